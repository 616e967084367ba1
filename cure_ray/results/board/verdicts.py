"""Rows of what is proven here: from the verdict stores of the zoo, the seeds of one experiment together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from cure_ray.errors import UserError
from cure_ray.results.board.rows import Ball, Figure, Link, Protocol, Row, figure, read_protocol
from cure_ray.results.cards import read_results
from cure_ray.results.frames import Loaded, find_stores, read_verdicts
from cure_ray.results.report.sources import href
from cure_ray.results.report.words import facts
from cure_ray.results.study import recipe
from cure_ray.results.tables import accuracy_table
from cure_ray.zoo.manifest import CARD, MANIFEST, RESULTS, Entry, check_entry
from cure_ray.zoo.published import Published


@dataclass(frozen=True)
class Judged:
    """An entry of the zoo with its verdicts."""

    entry: Entry
    protocol: Protocol
    folder: Path
    loaded: Loaded
    numbers: Mapping[str, Any]  # its row of the accuracy table


def judge(zoo: Path, entry: Entry) -> Judged:
    """The verdicts of an entry; UserError unless they are whole and about what the manifest says they are about."""
    folder = check_entry(zoo, entry)
    protocol = read_protocol(entry.dataset, entry.threats, f"{zoo / MANIFEST}, {entry.name}")
    store = folder / RESULTS
    rows = read_verdicts(find_stores(store), ["dataset", "family", "threat", "norm", "eps"]).drop_duplicates()
    has = {(str(norm), f"{eps:g}") for norm, eps in zip(rows["norm"], rows["eps"], strict=True)}
    if {*rows["dataset"]} != {entry.dataset} or not {(norm, f"{eps:g}") for norm, eps in protocol.balls} <= has:
        there = f"{', '.join(sorted({*rows['dataset']}))} under {', '.join(map(str, rows['threat'].unique()))}"
        raise UserError(
            f"{entry.name}: the manifest says {entry.dataset} under {protocol.threats}, but {store} holds verdicts on {there}: a store of "
            "another protocol. Certify the network under the manifest's, or correct the manifest."
        )
    loaded = read_results(folder, entry)
    block = loaded.study.entries[0].evaluation
    known = (("networks", 1, len(loaded.study.entries)), ("n", entry.n, block.n), ("identity", entry.identity, block.checkpoint))
    for what, said, found in known:
        if said != found:
            raise UserError(f"{entry.name}: the manifest says {what} {said}, but the verdicts in {store} say {found}")
    return Judged(entry, protocol, folder, loaded, {str(k): v for k, v in accuracy_table(loaded.study).to_dict("records")[0].items()})


def proven_rows(zoo: Path, entries: Sequence[Entry], published: Mapping[str, Published], page: Path) -> list[Row]:
    """Every entry of the zoo; those that differ in nothing but the seed of their training make one row. Links lead there from `page`."""
    groups: dict[str, list[Judged]] = {}
    for entry in entries:
        found = judge(zoo, entry)
        info = found.loaded.study.entries[0].info
        how = sorted(recipe(info).items(), key=lambda item: item[0]) if info.experiment and entry.kind == "ours" else entry.name
        group = groups.setdefault(f"{found.protocol} {entry.n} {how}", [])
        same = [other.entry.name for other in group if {*other.entry.seeds} & {*entry.seeds}]
        if same:
            raise UserError(f"{same[0]} and {entry.name} are one experiment with one seed: a mean would count it twice. Keep one of them.")
        group.append(found)
    return [_row(group, published, page) for group in groups.values()]


def _row(group: Sequence[Judged], published: Mapping[str, Published], page: Path) -> Row:
    first, titles = group[0], [j.entry.title for j in group]
    entry, described = first.entry, published.get(first.entry.published or "")
    if entry.kind == "published" and described is None:
        raise UserError(f"{entry.name}: the manifest says it is the published network {entry.published!r}, which no file describes")
    known = described.weights.identity if described and described.weights else None
    if known not in (None, entry.identity):
        raise UserError(f"{entry.name}: identity {entry.identity[:12]} is another network than {entry.published}.yaml describes")
    whole = all("n_all" in j.numbers and not math.isnan(j.numbers["n_all"]) for j in group)
    union = _figure(group, "union", page)
    bound = _figure(group, "emp_union", page)
    verdicts = [j.loaded.verdicts for j in group]
    engines = dict.fromkeys(pair for v in verdicts for pair in zip(v["engine"], v["engine_version"], strict=True))
    return Row(
        name=entry.name,
        protocol=first.protocol,
        network=entry.published or entry.name,
        title=entry.title if len(group) == 1 else _common(titles),
        by=described.authors if described else "cure_ray",
        kind="recertified" if described else "ours",
        certifier=", ".join(f"cure_ray {version} ({engine})" for engine, version in engines),
        clean=_figure(group, "clean_all", page, int(first.numbers["n_all"])) if whole else _figure(group, "clean", page),
        union=union,
        bound=bound,
        balls=tuple(Ball(n, e, _figure(group, f"cert_{n}", page), _figure(group, f"emp_{n}", page)) for n, e in first.protocol.balls),
        open=round(entry.n * (bound.percent - union.percent) / 100, 2) if bound and union else None,
        n=entry.n,
        seeds=len(group) if entry.kind == "ours" else None,
        year=described.year if described else None,
        seconds=sum(j.entry.certification.seconds for j in group) / len(group),
        facts=_facts(group, described),
        commands=tuple(dict.fromkeys(command for j in group for command in j.entry.commands)),
        source=Link(f"zoo/{entry.folder}", href(first.folder / CARD, page)),
        links=tuple(link for j in group for link in _links(j, page)),
    )  # fmt: skip


def _figure(group: Sequence[Judged], column: str, page: Path, n: int | None = None) -> Figure | None:
    """The mean of a column of the accuracy table; None where it is unknown for any of them (a threat that was skipped, no attack)."""
    values = [float(j.numbers.get(column, math.nan)) for j in group]
    if any(map(math.isnan, values)):
        return None
    first, threat = group[0], f"{column.rpartition('_')[2]}="
    one = [(root, name) for root, name in first.loaded.shards if f"-{threat}" in name] if len(group) == 1 else []
    link = href(f"{one[0][0]}/verdicts/{one[0][1]}" if len(one) == 1 else first.folder / CARD, page)
    return figure(values, n or first.entry.n, ", ".join(f"zoo/{j.entry.folder}/{RESULTS}" for j in group), link)


def _common(titles: Sequence[str]) -> str:
    """What the titles of several seeds share, word by word, without the word that announces the number."""
    shared = takewhile(lambda words: len(set(words)) == 1, zip(*(title.split() for title in titles), strict=False))
    return " ".join(words[0] for words in shared).removesuffix("seed").rstrip(" ,;:-(") or titles[0]


def _facts(group: Sequence[Judged], described: Published | None) -> tuple[tuple[str, str], ...]:
    first = group[0]
    found = [("paper", f"{described.authors}: {described.paper}"), ("network", described.network)] if described else []
    said = {"seeds", "certification time"} | ({"trained on", "network"} if described else set())  # below, or by the description
    found += [(name, text) for name, text in facts(first.loaded, first.loaded.study) if name not in said]
    for j in group:
        seeds = ", ".join(map(str, j.entry.seeds))
        if seeds:
            found.append((f"seed {seeds}", f"certified {j.numbers['union']:.1f}, clean {j.numbers['clean']:.1f} on the certified images"))
        found.append((f"identity of the network{f', seed {seeds}' if seeds and len(group) > 1 else ''}", j.entry.identity))
        if j.entry.training:
            cost = j.entry.training
            found.append(("training", f"{cost.seconds:,.0f} s, {cost.hardware}, cure_ray {cost.version}"))
    cost = first.entry.certification
    found.append(("certification", f"{cost.seconds:,.0f} s, {cost.hardware}, cure_ray {cost.version}"))
    return tuple(dict.fromkeys(found))


def _links(judged: Judged, page: Path) -> list[Link]:
    """The card, the weights, what made them, and the verdicts, each with its checksum."""
    wanted = [n for n in judged.entry.files if n in (CARD, "experiment.yaml") or n.endswith((".safetensors", ".parquet"))]
    return [
        Link(f"zoo/{judged.entry.folder}/{name}, SHA-256 {judged.entry.files[name][:16]}", href(judged.folder / name, page))
        for name in wanted
    ]
