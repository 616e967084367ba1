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
const compare = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a.localeCompare(b);
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
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => (down ? -1 : 1) * compare(cellValue(a, i), cellValue(b, i)));
      table.tBodies[0].append(...rows);
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

// Gallery: filters and order; the arrow keys walk through what is shown.
for (const tools of document.querySelectorAll("[data-gallery]")) {
  const grid = document.getElementById(tools.dataset.gallery);
  const cards = [...grid.children];
  const update = () => {
    let shown = 0;
    for (const card of cards) {
      const ok = [...tools.querySelectorAll("[data-by]")].every((select) => {
        const has = card.dataset[select.dataset.by];
        return !select.value || (select.dataset.by === "status" ? has.split(" ").includes(select.value) : has === select.value);
      });
      card.hidden = !ok;
      shown += ok;
    }
    const by = tools.querySelector("[data-sort]").value;
    grid.append(...cards.toSorted((a, b) => a.dataset[by] - b.dataset[by] || a.dataset.sample - b.dataset.sample));
    tools.querySelector("output").textContent = `${shown} of ${cards.length} cards`;
  };
  tools.addEventListener("change", update);
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const visible = [...grid.children].filter((card) => !card.hidden);
    const next = visible[visible.indexOf(document.activeElement) + step];
    if (next) { next.focus(); event.preventDefault(); }
  });
  update();
}
// A link to a source opens it.
const reveal = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (const details of target.matches("details") ? [target] : target.querySelectorAll("details")) details.open = true;
};
addEventListener("hashchange", reveal);
reveal();
