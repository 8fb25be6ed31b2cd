// Charts from the figures in the page, the theme, and two keys. Everything else is plain HTML.
"use strict";
(() => {
  const root = document.documentElement;

  const dark = () => root.dataset.theme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const short = new Intl.NumberFormat("en", { notation: "compact" });

  function withUnit(value, unit) {
    if (unit === "ms") return value >= 1000 ? `${value / 1000} s` : `${value} ms`;
    return unit ? `${value}${unit}` : short.format(value);
  }

  function clock(seconds, step) {
    const at = new Date(seconds * 1000);
    return step >= 86400 ? at.toLocaleDateString("en", { day: "numeric", month: "short" })
      : at.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  }

  // Points that have no neighbour to draw a line to.
  const alone = (u, i) => u.data[i].flatMap((value, at, all) =>
    value != null && all[at - 1] == null && all[at + 1] == null ? [at] : []);

  function stack(columns, count) {
    return columns.map((column, i) => i < 2 || i > count ? column
      : column.map((_, at) => columns.slice(1, i + 1).reduce((sum, below) => sum + below[at], 0)));
  }

  function draw(holder) {
    const { names, columns, unit, top, stacked } = JSON.parse(holder.dataset.chart);
    fillTable(holder, names, columns);
    holder.replaceChildren();
    const strokes = ["--c0", "--c1", "--c2"].map(color);
    const areas = ["--a0", "--a1"].map(color);
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const series = [{}, ...names.map((label, i) => ({
      label, stroke: strokes[i % 3], width: 2, dash: i === 2 ? [6, 3] : [], points: { show: false, size: 6, filter: alone },
      fill: names.length === 1 || (stacked && i === 0) ? areas[i] : undefined,
    }))];
    new uPlot({
      width: Math.max(holder.clientWidth, 200), height: 190, series, legend: { live: false }, cursor: { show: false },
      bands: stacked ? [{ series: [2, 1], fill: areas[1] }] : [],
      axes: [{ ...axis, size: 30, space: 70, values: (u, times, a, b, step) => times.map((time) => clock(time, step)) },
             { ...axis, size: 58, space: 36, values: (u, values) => values.map((value) => withUnit(value, unit)) }],
      scales: { y: { range: (u, low, high) => [0, top ?? (high > 0 ? high * 1.1 : 1)] } },
    }, stack(columns, stacked), holder);
  }

  function fillTable(holder, names, columns) {
    const table = holder.parentElement.querySelector("table");
    const head = document.createElement("thead");
    const body = document.createElement("tbody");
    head.append(row("th", ["Time", ...names], "col"));
    const filled = columns[0].map((_, i) => i).filter((i) => columns.slice(1).some((c) => c[i]));
    for (const i of filled.slice(-60).reverse()) {
      const time = `${clock(columns[0][i], 86400)}, ${clock(columns[0][i], 0)}`;
      body.append(row("td", [time, ...columns.slice(1).map((c) => c[i]?.toLocaleString("en") ?? "–")]));
    }
    table.replaceChildren(head, body);
  }

  function row(tag, texts, scope) {
    const line = document.createElement("tr");
    for (const text of texts) {
      const cell = document.createElement(tag);
      if (scope) cell.scope = scope;
      cell.textContent = text;
      line.append(cell);
    }
    return line;
  }

  const drawAll = () => document.querySelectorAll(".chart").forEach(draw);

  function toggleTheme() {
    root.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("radixgate-theme", root.dataset.theme);
    drawAll();
  }

  document.addEventListener("htmx:beforeRequest", (event) => {
    if (document.hidden) event.preventDefault();
  });

  let opened = [];
  document.addEventListener("htmx:beforeSwap", () => {
    opened = [...document.querySelectorAll("details")].map((d) => d.open);
  });
  document.addEventListener("htmx:afterSettle", () => {
    document.querySelectorAll("details").forEach((d, i) => { d.open = opened[i] ?? false; });
    drawAll();
  });
  addEventListener("resize", drawAll);
  document.getElementById("theme")?.addEventListener("click", toggleTheme);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    if (event.key === "t") toggleTheme();
    if (event.key === "/" && document.getElementById("search")) {
      event.preventDefault();
      document.getElementById("search").focus();
    }
  });
  drawAll();
})();
