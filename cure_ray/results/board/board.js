// Filters: rows, their points, and protocols of which nothing is left.
const records = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters");
const fits = (row, section, wanted) =>
  (!wanted.dataset || section.dataset.dataset === wanted.dataset) &&
  (!wanted.threats || section.id === wanted.threats) &&
  (!wanted.kind || row.dataset.kind === wanted.kind) &&
  wanted.text.toLowerCase().split(/\s+/).every((word) => `${row.textContent} ${section.getAttribute("aria-label") ?? ""}`.toLowerCase().includes(word));
const update = () => {
  const wanted = Object.fromEntries(new FormData(form));
  let shown = 0;
  for (const section of document.querySelectorAll(".protocol")) {
    let here = 0;
    for (const body of section.querySelectorAll("tbody")) {
      let inside = 0;
      for (const row of body.querySelectorAll("tr[data-id]")) {
        row.hidden = !fits(row, section, wanted);
        inside += !row.hidden;
        const point = section.querySelector(`.point[data-row="${CSS.escape(row.dataset.id)}"]`);
        if (point) point.classList.toggle("out", row.hidden);
      }
      body.hidden = !inside;
      here += inside;
    }
    section.hidden = !here;
    shown += here;
  }
  document.getElementById("nothing").hidden = shown > 0;
  form.querySelector("output").textContent = `${shown} of ${records.length} rows`;
};
form.hidden = false;
for (const kind of ["input", "change"]) form.addEventListener(kind, update);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(update));
update();

// The rows that are shown, as CSV.
document.getElementById("copy").addEventListener("click", async (event) => {
  const shown = new Set([...document.querySelectorAll("tr[data-id]:not([hidden])")].map((row) => row.dataset.id));
  const quote = (value) => { const text = String(value ?? ""); return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  const lines = records.filter((row) => shown.has(row.id)).map((row) => Object.values(row).map(quote).join(","));
  const button = event.currentTarget, said = button.textContent;
  try { await navigator.clipboard.writeText([Object.keys(records[0]).join(","), ...lines].join("\n")); button.textContent = "Copied"; } catch { button.textContent = "The browser does not allow it"; }
  setTimeout(() => { button.textContent = said; }, 1500);
});

// A point and its row light up together; what the point says is written beside the chart.
for (const point of document.querySelectorAll(".point")) {
  const section = point.closest(".protocol"), readout = section.querySelector(".readout");
  const row = section.querySelector(`tr[data-id="${CSS.escape(point.dataset.row)}"]`);
  const light = (on) => () => {
    point.classList.toggle("lit", on);
    row.classList.toggle("lit", on);
    readout.textContent = on ? point.getAttribute("aria-label") : readout.dataset.rest;
  };
  for (const [start, end] of [["pointerenter", "pointerleave"], ["focus", "blur"]]) {
    point.addEventListener(start, light(true));
    point.addEventListener(end, light(false));
  }
  row.addEventListener("pointerenter", () => point.classList.add("lit"));
  row.addEventListener("pointerleave", () => point.classList.remove("lit"));
}

// What a number rests on opens over the page; without this script the link leads to it below.
const panel = document.getElementById("panel");
const open = (id) => {
  const card = document.getElementById(id).cloneNode(true);
  card.removeAttribute("id");
  card.removeAttribute("aria-labelledby");
  const details = card.querySelector("details"), heading = details.querySelector("h3");
  heading.id = "panel-title";
  details.replaceWith(heading, ...[...details.children].filter((child) => child.tagName !== "SUMMARY"));
  panel.querySelector("div").replaceChildren(card);
  panel.showModal();
  panel.scrollTop = 0;
};
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  const id = link && decodeURIComponent(link.getAttribute("href").slice(1));
  if (!id || event.ctrlKey || event.metaKey || event.shiftKey || !document.getElementById(id)?.matches("article.source")) return;
  event.preventDefault();
  history.replaceState(null, "", `#${id}`);
  open(id);
});
panel.addEventListener("click", (event) => { if (event.target === panel) panel.close(); });
addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("article details")) details.open = true; });
