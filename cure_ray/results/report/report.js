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
