// Before the first paint, so that a dark page does not flash white.
"use strict";
(() => {
  const chosen = localStorage.getItem("radixgate-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
