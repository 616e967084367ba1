"""The card of a network of the zoo: what is claimed, what it cost, how to make it again. Written from its folder alone."""

from collections.abc import Iterator
from pathlib import Path

from cure_ray.config import load_experiment
from cure_ray.results.frames import Loaded, load
from cure_ray.results.judgement import Measured, measured
from cure_ray.runs.directory import EXPERIMENT
from cure_ray.threats.text import read_threats
from cure_ray.zoo.manifest import RESULTS, Cost, Entry
from cure_ray.zoo.published import UNION, find_published


def read_results(folder: Path, entry: Entry) -> Loaded:
    """The verdicts of an entry, complete for the whole protocol."""
    return load(folder / RESULTS, entry.threats.split(","))


def card(folder: Path, entry: Entry) -> str:
    """As Markdown."""
    return "\n".join(_lines(folder, entry, measured(read_results(folder, entry)))) + "\n"


def _lines(folder: Path, entry: Entry, figures: tuple[Measured, ...]) -> Iterator[str]:
    yield f"# {entry.title}"
    yield ""
    yield claim(entry, figures)
    yield ""
    yield from made(folder, entry)
    yield ""
    yield "| | % | 95 % interval | images |"
    yield "|---|---|---|---|"
    for m in figures:
        yield f"| {m.what if m.threat is None else f'{m.threat}, {m.what}'} | {m.value:.2f} | {m.low:.1f} to {m.high:.1f} | {m.n} |"
    yield ""
    yield "Certified: proven for every image in the ball within [0, 1]. Not broken: correct, and no attack found a counterexample."
    yield ""
    yield "```bash"
    yield from entry.commands
    yield f"cure-ray zoo certify {entry.name}" + (" --weights FILE" if entry.published else "")
    yield "```"
    yield ""
    yield "| | seconds | on | cure_ray |"
    yield "|---|---|---|---|"
    for what, cost in (("training", entry.training), ("certification", entry.certification)):
        if cost is not None:
            yield _cost(what, cost)
    yield ""
    yield f"Identity (SHA-256 of the function it computes): `{entry.identity}`. The manifest has the SHA-256 of every file."


def claim(entry: Entry, figures: tuple[Measured, ...]) -> str:
    """One sentence: what is proven of how many images."""
    headline = [m for m in figures if m.what == "certified"][-1]  # the union, or the one threat there is
    clean = figures[0]
    against = f"the union of {entry.threats}" if headline.threat == UNION else entry.threats
    return (
        f"{headline.value:.1f} % of {headline.n} {entry.dataset} test images are certified against {against}; "
        f"clean accuracy {clean.value:.2f} % ({clean.n} images)."
    )


def made(folder: Path, entry: Entry) -> Iterator[str]:
    if entry.published is not None:
        published = find_published(entry.published)
        at = f" Weights: {published.source.url}, {published.source.path} (licence: {published.source.licence})." if published.source else ""
        yield f"By {published.authors}: {published.paper}. {published.network}.{at} They are not shipped here."
        return
    experiment = load_experiment((folder if entry.run is None else folder.parent / entry.run) / EXPERIMENT)
    where = "" if entry.run is None else f" of {entry.run}, which is the same network under another protocol,"
    start = experiment.training.start_from
    begun = "" if start is None else f"from the weights of {start}, "
    yield (
        f"Trained here: {experiment.network.name}, width {experiment.network.width:g}, method {experiment.training.method}, "
        f"{experiment.dataset.train_size} training images, {experiment.training.epochs} epochs, {begun}"
        f"seed {experiment.seed} (experiment.yaml{where} has every setting)."
    )


def _cost(what: str, cost: Cost) -> str:
    return f"| {what} | {cost.seconds:.0f} | {cost.hardware} | {cost.version} |"


def protocol_key(dataset: str, threats: str) -> tuple[str, tuple[str, ...]]:
    """What must be equal for two networks to be compared."""
    return dataset, tuple(sorted(str(t) for t in read_threats(threats)))
