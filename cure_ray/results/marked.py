"""Tables in documents that are written from the zoo, not by hand: what stands between two marks is replaced by what the stores say.

`<!-- zoo:protocol mnist linf=0.1,l2=0.3,l1=1 -->` ... `<!-- /zoo -->` holds every network under that protocol: those of the zoo with what
is proven of them (one row for the seeds of one title), then the published figures. `<!-- zoo:recertified NAME NAME -->` holds networks
of others, what was proven before beside what is proven now; without names, all there are. The sections that compare methods are those
of marked_methods.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cure_ray.errors import UserError
from cure_ray.results.cards import protocol_key, read_results
from cure_ray.results.judgement import Measured, measured
from cure_ray.results.marked_methods import TABLES, methods_section
from cure_ray.results.statistics import wilson
from cure_ray.threats.text import read_threats
from cure_ray.zoo.manifest import Entry, read_manifest
from cure_ray.zoo.published import UNION, Figure, Published, all_published, strongest

_SECTION = re.compile(r"(<!-- zoo:(\w+)([^\n]*?) -->\n).*?(<!-- /zoo -->)", re.S)


def fill(text: str, zoo: Path) -> str:
    """A document with every marked section written anew."""

    def section(found: re.Match[str]) -> str:
        if found[2] == "protocol":
            dataset, _, threats = found[3].strip().partition(" ")
            table = protocol_table(zoo, dataset, threats.strip())
        elif found[2] == "recertified":
            table = recertified_table(zoo, found[3].split())
        elif found[2] in TABLES:
            table = methods_section(found[2], zoo, found[3].split())
        else:
            kinds = ", ".join(("protocol", *TABLES))
            raise UserError(f"a section of the zoo is one of {kinds} with DATASET THREATS, or zoo:recertified, not zoo:{found[2]}")
        return f"{found[1]}\n{table}\n\n{found[4]}"  # blank lines: some readers of Markdown see no table without

    return _SECTION.sub(section, text)


def protocol_table(zoo: Path, dataset: str, threats: str) -> str:
    """Every network under one protocol, as Markdown; certified accuracies in %, ours before those that were published."""
    wanted, names = protocol_key(dataset, threats), [str(t) for t in read_threats(threats)]
    headline = UNION if len(names) > 1 else names[0]
    groups = dict[tuple[str, str, int], list[Proven]]()
    for e in read_manifest(zoo).entries:
        if protocol_key(e.dataset, e.threats) == wanted:
            groups.setdefault((e.kind, e.title, e.n), []).append(Proven(e, measured(read_results(zoo / e.folder, e))))
    proven = sorted(groups.values(), key=lambda group: -_mean(group, "certified", headline))
    columns = [*names, *([UNION] if headline == UNION else [])]
    head = ["certified, %", "clean", *columns, "95 % interval", "not broken", "images"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [_proven(group, columns, headline) for group in proven]
    for described in all_published().values():
        if protocol_key(described.data.name, described.protocol.threats) == wanted and described.figures:
            lines.append(_printed(described, columns, headline))
    if len(lines) == 2:
        raise UserError(f"the zoo and the published networks know nothing about {dataset} with {threats}")
    return "\n".join(lines)


def recertified_table(zoo: Path, names: Sequence[str]) -> str:
    """Networks of others: the best that was published about each under its protocol, and what is proven here."""
    manifest = read_manifest(zoo)
    entries = [manifest.find(name) for name in names] if names else [e for e in manifest.entries if e.published]
    head = ["network", "threats", "proven before, %", "proven here, %", "95 % interval", "not broken, %", "images", "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for entry in entries:
        described, figures = all_published().get(entry.published or ""), measured(read_results(zoo / entry.folder, entry))
        if described is None:
            raise UserError(f"zoo:recertified is about networks of others, and {entry.name} is ours")
        threats = [str(t) for t in read_threats(entry.threats)]
        headline = UNION if len(threats) > 1 else threats[0]
        now, standing = _found(figures, "certified", headline), _found(figures, "not broken", headline)
        before = strongest(described.figures, "certified", headline)
        said = f"{before.value:g}" + (f" ({before.certifier})" if before.certifier else "") if before else ""
        ends = f"{now.low:.1f} to {now.high:.1f}"
        cells = [entry.title, entry.threats, said, f"{now.value:.1f}", ends, f"{standing.value:.1f}", str(now.n)]
        lines.append("| " + " | ".join([*cells, f"{entry.certification.seconds:.0f}"]) + " |")
    return "\n".join(lines)


def _found(figures: Sequence[Measured], what: str, threat: str | None) -> Measured:
    return next(m for m in figures if (m.what, m.threat) == (what, threat))


@dataclass(frozen=True)
class Proven:
    """A network of the zoo with its numbers."""

    entry: Entry
    figures: tuple[Measured, ...]


def _mean(group: Sequence[Proven], what: str, threat: str | None) -> float:
    return sum(_found(p.figures, what, threat).value for p in group) / len(group)


def _proven(group: Sequence[Proven], columns: Sequence[str], headline: str) -> str:
    """One row for networks of one title: those of several seeds, by their mean, and the union of each in the order of seeds."""
    group = sorted(group, key=lambda p: p.entry.seeds)
    first, seeds = group[0], [seed for p in group for seed in p.entry.seeds]
    said = f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else ", certified here"
    n, union = _found(first.figures, "certified", headline).n, _mean(group, "certified", headline)
    low, high = wilson(union * n / 100, n)
    unions = ", ".join(f"{_found(p.figures, 'certified', headline).value:.1f}" for p in group)
    each = f" ({unions})" if len(group) > 1 else ""
    cells = [f"{_mean(group, 'certified', column):.1f}{each * (column == headline)}" for column in columns]
    clean = f"{sum(p.figures[0].value for p in group) / len(group):.2f} ({first.figures[0].n} images)"
    ends = f"{100 * float(low):.1f} to {100 * float(high):.1f}"
    return (
        "| " + " | ".join([f"{first.entry.title}{said}", clean, *cells, ends, f"{_mean(group, 'not broken', headline):.1f}", str(n)]) + " |"
    )


def _printed(described: Published, columns: Sequence[str], headline: str) -> str:
    claim = "published" if described.recomputable else "claimed"
    best = strongest(described.figures, "certified", headline)
    by = f" ({best.certifier})" if best and best.certifier else ""
    cells = [_value(strongest(described.figures, "certified", column)) for column in columns]
    ends = [_value(strongest(described.figures, what, threat)) for what, threat in (("clean", None), ("not broken", headline))]
    n = str(best.n) if best and best.n else ""
    return "| " + " | ".join([f"{described.title}, {claim}{by}", ends[0], *cells, "", ends[1], n]) + " |"


def _value(figure: Figure | None) -> str:
    return f"{figure.value:g}" if figure else ""
