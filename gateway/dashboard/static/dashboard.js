// Charts from the figures in the page, the theme, and two keys. Everything else is plain HTML.
"use strict";
(() => {
  const root = document.documentElement;

  const dark = () => root.dataset.theme === "dark"
    || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function draw(holder) {
    const { names, columns } = JSON.parse(holder.dataset.chart);
    fillTable(holder, names, columns);
    holder.replaceChildren();
    const strokes = [color("--c0"), color("--c1"), color("--c2")];
    const axis = { stroke: color("--quiet"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
    const series = [{}, ...names.map((name, i) => ({
      label: name, stroke: strokes[i % 3], width: 2, spanGaps: false, points: { show: true, size: 5 }, dash: i === 2 ? [6, 3] : [],
    }))];
    const range = (u, low, high) => [0, high > 0 ? high * 1.1 : 1];
    new uPlot({ width: Math.max(holder.clientWidth, 200), height: 180, series, axes: [axis, { ...axis, size: 60 }],
                scales: { y: { range } }, legend: { live: false } }, columns, holder);
  }

  function fillTable(holder, names, columns) {
    const table = holder.parentElement.querySelector("table");
    const head = document.createElement("thead");
    const body = document.createElement("tbody");
    head.append(row("th", ["Time", ...names], "col"));
    const filled = columns[0].map((_, i) => i).filter((i) => columns.slice(1).some((c) => c[i]));
    for (const i of filled.slice(-60).reverse()) {
      const time = new Date(columns[0][i] * 1000).toLocaleString();
      body.append(row("td", [time, ...columns.slice(1).map((c) => c[i] ?? "–")]));
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
