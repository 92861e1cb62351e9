// Code and tables that are wider than the page scroll by the arrow keys, too.
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".highlight > pre, .table-wrapper")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  }
});
