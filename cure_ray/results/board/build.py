"""Puts the board together: rows of the published files and of the zoo, one page, written once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from cure_ray import __version__
from cure_ray.errors import UserError
from cure_ray.results.board import data
from cure_ray.results.board.chart import chart, shape, words
from cure_ray.results.board.claims import published_rows
from cure_ray.results.board.judgements import judged_row
from cure_ray.results.board.rows import KINDS, Protocol, Row, in_order, protocols
from cure_ray.results.board.verdicts import proven_rows
from cure_ray.results.report.page import environment, write_page
from cure_ray.results.report.words import duration
from cure_ray.zoo.manifest import read_manifest
from cure_ray.zoo.published import Published


@dataclass(frozen=True)
class Section:
    """A protocol of the page."""

    protocol: Protocol
    rows: tuple[Row, ...]
    picture: Markup

    @property
    def groups(self) -> list[tuple[str, list[Row]]]:
        """Proofs and claims never stand in one list."""
        found = [
            ("Proven here, image by image", [r for r in self.rows if r.proven]),
            ("As published", [r for r in self.rows if not r.proven]),
        ]
        return [(name, rows) for name, rows in found if rows]

    @property
    def undrawn(self) -> int:
        return sum(not (r.clean and r.union) for r in self.rows)

    @property
    def sentence(self) -> str:
        """What the protocol's table comes to."""
        here, printed = self.best(True), self.best(False)
        parts = []
        if here and here.union:
            left = f"; attacks leave {here.bound.percent - here.union.percent:.1f} points open" if here.bound else ""
            parts.append(f"{here.union.percent:.1f} % is the most that is proven here ({here.title}{left}).")
        else:
            parts.append("Nothing is proven here under this protocol yet.")
        if printed and printed.union:
            lost = "" if printed.recomputable else "; without public weights nobody can recompute it"
            parts.append(f"{printed.union.percent:.1f} % is the most that was published ({printed.title}{lost}).")
            again = next((r for r in self.rows if r.proven and r.network == printed.network and r.union and r is not here), None)
            if again and again.union:
                parts.append(f"Of that network {again.union.percent:.1f} % is proven here.")
        return " ".join(parts)

    def best(self, proven: bool) -> Row | None:
        return next((r for r in self.rows if r.proven == proven and r.union), None)


@dataclass(frozen=True)
class Sources:
    """What the board is made of."""

    published: Mapping[str, Published]
    zoo: Path | None = None
    judgements: Path | None = None  # a directory of JSON files


def board_rows(sources: Sources, page: Path) -> list[Row]:
    """Everything the board says, in its order. Links of the rows lead from `page`."""
    rows = [row for described in sources.published.values() for row in published_rows(described)]
    if sources.zoo is not None:
        rows += proven_rows(sources.zoo, read_manifest(sources.zoo).entries, sources.published, page)
    if sources.judgements is not None:
        stored = {row.network for row in rows if row.kind == "recertified"}  # a store says more than the judgement made of it
        judged = [judged_row(path, sources.published, page) for path in sorted(sources.judgements.glob("*.json"))]
        rows += [row for row in judged if row.network not in stored]
    if not rows:
        raise UserError("no network is described and the zoo is empty: there is nothing to put on a board")
    twice = [name for name, times in Counter(row.name for row in rows).items() if times > 1]
    if twice:
        raise UserError(f"two networks are called {twice[0]}; every row of the board has a name of its own")
    ordered = in_order(rows)
    return [row for protocol in protocols(ordered) for row in ordered if row.protocol == protocol]


def render(rows: Sequence[Row], made: date) -> str:
    """The page; the same rows and date give the same bytes."""
    numbers, sections = dict[str, int](), list[Section]()
    for protocol in protocols(rows):
        own = tuple(row for row in rows if row.protocol == protocol)
        numbers |= {row.name: i + 1 for i, row in enumerate(own)}
        sections.append(Section(protocol, own, chart(own, numbers)))
    records = [data.record(row) for row in rows]
    edition = data.fingerprint(records)
    env = environment("cure_ray.results.board", "board")
    env.filters |= {"duration": duration, "words": words}
    env.globals |= {"shape": lambda kind: Markup(shape(kind, 11, 11))}
    return env.get_template("board.html").render(
        sections=sections,
        rows=rows,
        numbers=numbers,
        kinds=KINDS,
        made=made.isoformat(),
        version=__version__,
        edition=edition,
        bibtex=_bibtex(edition, made),
        records=Markup(data.as_json(records).replace("<", "\\u003c")),
        downloads=[
            ("board.csv", "data:text/csv;charset=utf-8," + quote(data.as_csv(records))),
            ("board.json", "data:application/json;charset=utf-8," + quote(data.as_json(records))),
        ],
    )


def _bibtex(edition: str, made: date) -> str:
    fields = {
        "title": "The board of certified unions",
        "author": "{The cure_ray authors}",
        "year": str(made.year),
        "note": f"cure_ray {__version__}, edition {edition}, {made.isoformat()}",
    }
    return "@misc{cure_ray_board,\n" + ",\n".join(f"  {name:6} = {{{text}}}" for name, text in fields.items()) + "\n}"


def write_board(sources: Sources, out: Path, made: date) -> Path:
    return write_page(out, render(board_rows(sources, out), made))
