"use strict";
// Light and dark: the reader's system decides until the button is used.
const root = document.documentElement;
const dark = () => root.dataset.theme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });

// Sortable tables: every heading becomes a button, so the keyboard works without further ado.
const cellValue = (row, i) => {
  const cell = row.cells[i];
  const number = parseFloat(cell.dataset.v ?? cell.textContent);
  return Number.isNaN(number) ? cell.textContent.trim().toLowerCase() : number;
};
// What is missing comes last, whichever way the column is sorted.
const compare = (a, b, down) => {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return (down ? -1 : 1) * (typeof a === "number" ? a - b : a.localeCompare(b));
};
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((th, i) => {
    if (th.classList.contains("picture")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = th.textContent;
    th.replaceChildren(button);
    button.addEventListener("click", () => {
      const numeric = th.classList.contains("n");
      const now = th.getAttribute("aria-sort");
      const down = now ? now === "ascending" : numeric; // numbers: largest first
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      for (const body of table.tBodies) { // each group of rows on its own, below its heading
        const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
        rows.sort((a, b) => compare(cellValue(a, i), cellValue(b, i), down));
        body.append(...rows);
      }
    });
  });
}
for (const input of document.querySelectorAll("[data-filter]")) {
  const table = document.getElementById(input.dataset.filter);
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    for (const row of table.tBodies[0].rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
}
for (const button of document.querySelectorAll("[data-csv]")) {
  button.addEventListener("click", async () => {
    const quote = (text) => `"${text.replaceAll('"', '""')}"`;
    const plain = (cell) => (cell.querySelector("a") ?? cell).textContent.trim().replace(/\s+/g, " ");
    const rows = [...document.getElementById(button.dataset.csv).rows].filter((row) => !row.hidden);
    const text = rows.map((row) => [...row.cells].map((cell) => quote(plain(cell))).join(",")).join("\n");
    const said = button.textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "The browser does not allow it"; }
    setTimeout(() => { button.textContent = said; }, 1500);
  });
}
// A link to a source opens it.
const reveal = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (const details of target.matches("details") ? [target] : target.querySelectorAll("details")) details.open = true;
};
addEventListener("hashchange", reveal);
reveal();
