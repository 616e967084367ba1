"""A published network judged: every published figure beside what was proven here, and what was open before.

As JSON for `docs/board/` (format cure_ray-judgement-1) and as Markdown for people.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from cure_ray.errors import UserError
from cure_ray.results.frames import Loaded
from cure_ray.results.tables import accuracy_table
from cure_ray.threats.text import read_threats
from cure_ray.zoo.published import UNION, Figure, Published, find_published

FORMAT = "cure_ray-judgement-1"


@dataclass(frozen=True)
class Measured:
    """One number of ours, on all the images it is about."""

    what: str  # clean, certified or not broken, as of a published figure
    threat: str | None
    count: int
    n: int
    low: float  # 95 % interval, in %
    high: float

    @property
    def value(self) -> float:
        return 100 * self.count / self.n


def measured(loaded: Loaded) -> tuple[Measured, ...]:
    """Clean, and per threat and for the union of several what is proven and what no attack broke, of the one network here."""
    if len(loaded.study.entries) != 1:
        raise UserError(f"these are verdicts of {len(loaded.study.entries)} networks; a judgement is about one")
    (entry,) = loaded.study.entries
    row = accuracy_table(loaded.study).iloc[0].to_dict()
    threats, n = entry.evaluation.threats, entry.evaluation.n
    names: list[tuple[str, str | None, str]] = [("clean", None, "clean")]
    for threat in threats:
        names += [("certified", threat.name, f"cert_{threat.norm}"), ("not broken", threat.name, f"emp_{threat.norm}")]
    if len(threats) > 1:
        names += [("certified", UNION, "union"), ("not broken", UNION, "emp_union")]
    found = [_number(what, threat, row[column], n) for what, threat, column in names if not np.isnan(row.get(column, float("nan")))]
    if row.get("n_all", n) != n:
        found.insert(0, _number("clean", None, row["clean_all"], int(row["n_all"])))
    return tuple(found)


def _number(what: str, threat: str | None, percent: float, n: int) -> Measured:
    from cure_ray.results.statistics import wilson

    count = round(percent * n / 100)
    low, high = wilson(count, n)
    return Measured(what, threat, count, n, round(100 * float(low), 2), round(100 * float(high), 2))


@dataclass(frozen=True)
class Judgement:
    """What is known of a published network now."""

    published: Published
    identity: str  # of the network that was certified
    weights: Mapping[str, Any]  # the file it came from: name, sha256, how it was recognised
    data: Mapping[str, Any]
    settings: Mapping[str, Any]  # of the cascade, with engine, seed and versions
    figures: tuple[Measured, ...]
    hardware: str = ""
    cpu_seconds: float | None = None  # of one process; None where workers did the work
    seconds: float = 0.0  # of all rows together
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def ours(self, what: str, threat: str | None) -> Measured | None:
        """The number on the most images."""
        found = [m for m in self.figures if (m.what, m.threat) == (what, threat)]
        return max(found, key=lambda m: m.n) if found else None

    def as_json(self) -> str:
        known = asdict(self)
        described = known.pop("published")
        data: dict[str, Any] = {"format": FORMAT, "name": described.name, "title": described.title, "threats": described.protocol.threats}
        data |= known | {"figures": [{**asdict(m), "value": round(m.value, 4)} for m in self.figures]}
        data["published"] = [figure.model_dump(mode="json", exclude_none=True) for figure in described.figures]
        data["open"] = [asdict(gap) for gap in gaps(self)]
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        return "\n".join(_page(self)) + "\n"


@dataclass(frozen=True)
class Gap:
    """Between what is proven and what is not broken: as published, and here. In % of the images of each."""

    threat: str
    published: tuple[float, float] | None
    here: tuple[float, float]


def gaps(judgement: Judgement) -> Iterator[Gap]:
    """Per threat, union included, what was open before and what is open now."""
    for threat in dict.fromkeys(m.threat for m in judgement.figures if m.threat is not None):
        low, high = judgement.ours("certified", threat), judgement.ours("not broken", threat)
        if low is None or high is None:
            continue
        alike = [f for f in judgement.published.figures if f.threat == threat and f.n in (None, low.n)]
        proven, standing = ([f.value for f in alike if f.what == what] for what in ("certified", "not broken"))
        before = (max(proven), min(standing)) if proven and standing else None
        yield Gap(threat, before, (round(low.value, 4), round(high.value, 4)))


def _page(judgement: Judgement) -> Iterator[str]:
    described = judgement.published
    yield f"## {described.title}"
    yield ""
    where = f" ([weights]({described.source.url}))" if described.source else ""
    yield f"{described.authors}, {described.paper}{where}; {described.network}. Certified against {described.protocol.threats}."
    yield ""
    yield "| | published, % | here, % | 95 % interval | images |"
    yield "|---|---|---|---|---|"
    for what, threat in dict.fromkeys((m.what, m.threat) for m in judgement.figures):
        for ours in (m for m in judgement.figures if (m.what, m.threat) == (what, threat)):
            theirs = [f for f in described.figures if (f.what, f.threat) == (what, threat) and f.n in (None, ours.n)]
            label = what if threat is None else f"{threat}, {what}"
            yield f"| {label} | {_theirs(theirs)} | {ours.value:.2f} | {ours.low:.1f} to {ours.high:.1f} | {ours.n} |"
    yield ""
    for gap in gaps(judgement):
        yield f"- {_sentence(gap)}"
    yield ""
    cost = f"{judgement.cpu_seconds:.0f} CPU seconds" if judgement.cpu_seconds is not None else f"{judgement.seconds:.0f} s of all workers"
    yield f"`{judgement.command}`: {cost} ({judgement.hardware}); cure_ray {judgement.versions.get('cure_ray')}, torch " + (
        f"{judgement.versions.get('torch')}; at most {judgement.settings['nodes']} sub-problems an image and threat, seed "
        f"{judgement.settings['seed']}. Weights: {judgement.weights['recognised']}."
    )


def _theirs(figures: Sequence[Figure]) -> str:
    return "; ".join(f"{f.value:g}" + (f" ({f.certifier})" if f.certifier else "") for f in figures)


def _sentence(gap: Gap) -> str:
    low, high = gap.here
    now = f"decided: {low:g}" if low == high else f"between {low:g} and {high:g}, {high - low:.1f} points open"
    if gap.published is None:
        return f"{gap.threat}: {now}."
    proven, standing = gap.published
    return f"{gap.threat}: between {proven:g} and {standing:g} as published, {standing - proven:.1f} points open; here {now}."


def read_judgement(path: Path, described: Mapping[str, Published] | None = None) -> Judgement:
    """What was written; UserError if it is something else, or about another protocol than its description has now.

    The published figures are the description's: that of its name among `described`, by default among those that are shipped.
    """
    try:
        data = json.loads(path.read_text())
        figures = tuple(Measured(m["what"], m["threat"], m["count"], m["n"], m["low"], m["high"]) for m in data["figures"])
        known = {f.name: data[f.name] for f in fields(Judgement) if f.name not in ("published", "figures")}
        name, threats, dataset = str(data["name"]), str(data["threats"]), data["data"]["name"]
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}")
        if not all(0 <= m.count <= m.n for m in figures):
            raise ValueError("a count of images that is not between 0 and n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no judgement of format {FORMAT} ({type(error).__name__}: {error})") from None
    published = find_published(name) if described is None else described.get(name)
    if published is None:
        raise UserError(f"{path} judges {name!r}, which no file describes")
    if dataset != published.data.name or {*map(str, read_threats(threats))} != {*map(str, published.protocol.read())}:
        raise UserError(
            f"{path} judges {name} on {dataset} under {threats}, its description says {published.data.name} under "
            f"{published.protocol.threats}: another protocol. Judge it again."
        )
    return Judgement(published, **known, figures=figures)


def judgements_page(folder: Path) -> str:
    """Every judgement of a folder, as one page."""
    parts = [read_judgement(path).as_markdown() for path in sorted(folder.glob("*.json"))]
    return _HEADING + "\n" + "\n".join(parts)


_HEADING = """# Published networks, judged

Networks of others, certified from their authors' weights with `cure-ray judge` ([how](../guide/zoo.md)). Generated from
`docs/board/*.json` by `make docs`; the verdicts are in `zoo/`. *Certified* is proven for every image of the ball within [0, 1], *not
broken* is correct and not broken by any attack; the truth lies between them.
"""


def write_judgement(judgement: Judgement, folder: Path) -> tuple[Path, Path]:
    """Both forms into a folder: judgement.json and judgement.md."""
    paths = folder / "judgement.json", folder / "judgement.md"
    for path, text in zip(paths, (judgement.as_json(), judgement.as_markdown()), strict=True):
        path.write_text(text)
    return paths
