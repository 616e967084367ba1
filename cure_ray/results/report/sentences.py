"""Attacks on words in the report: a table beside the certificates, paired tests, and sentences with the words that changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cure_ray.results import tables
from cure_ray.results.attacked import FAMILY, Attacked, read_attacked, refuse_contradictions, words_table
from cure_ray.results.frames import Loaded
from cure_ray.results.study import Entry, Study
from cure_ray.results.words import paired_table

Row = dict[str, Any]
Columns = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Piece:
    """A word of a sentence; `old` is what stood in its place, if that was another."""

    word: str
    old: str = ""


@dataclass(frozen=True)
class SentenceCard:
    """One sentence under one attack on one method's first seed."""

    method: str
    seed: int
    attack: str
    sample: int
    label: int
    predicted: int
    status: str
    queries: int
    margin: float
    pieces: tuple[Piece, ...]
    moved: str  # distances of the vector, as text

    @property
    def changed(self) -> int:
        return sum(bool(piece.old) for piece in self.pieces)


@dataclass(frozen=True)
class WordsSection:
    """Everything the report says about words."""

    columns: Columns  # of the accuracy rows
    attacks: tuple[Row, ...]  # per method and attack: queries, changes, coverage
    measures: Columns
    pairs: tuple[Row, ...]  # paired tests, seeds pooled, per attack
    cards: tuple[SentenceCard, ...]


def words_section(loaded: Loaded, own: Study, shown: Sequence[Entry], count: int = 24) -> WordsSection | None:
    """None where no words were attacked. SoundnessError where an attack contradicts a certificate."""
    if not any(entry.everything.family(FAMILY) for entry in own.entries):
        return None
    refuse_contradictions(loaded.stores)
    rows, table = read_attacked(loaded.stores), tables.seed_table(own)
    measured = words_table(own, rows)
    names = [c for c in tables.metrics_of(table) if c.startswith("words_")]
    norms = [c.removeprefix("inside_") for c in measured.columns if str(c).startswith("inside_")]
    proven = [c for c in ("union", *(f"cert_{norm}" for norm in norms)) if c in table.columns]
    headings = {
        "queries": "queries per sentence", "success": "broken, % of attacked", "words_changed": "words changed where broken",
        **{f"inside_{norm}": f"stays in the {norm} ball, %" for norm in norms},
        **{f"singles_{norm}": f"one word exchanged: in the {norm} ball, %" for norm in norms},
    }  # fmt: skip
    return WordsSection(
        columns=(
            ("clean", "clean"), *((c, tables.heading(c)) for c in names),
            *((c, f"{tables.heading(c)}, certified in latent space") for c in proven),
        ),
        attacks=tuple({str(k): v for k, v in row.items()} for row in measured.to_dict("records")),
        measures=tuple((c, text) for c, text in headings.items() if c in measured.columns),
        pairs=tuple({str(k): v for k, v in row.items()} for row in paired_table(own).to_dict("records")),
        cards=_cards(rows, shown, count),
    )  # fmt: skip


def _cards(rows: Sequence[Attacked], shown: Sequence[Entry], count: int) -> tuple[SentenceCard, ...]:
    """The first sentences of every method's first seed, whatever came of them."""
    whose = {entry.evaluation.checkpoint: entry for entry in shown}
    mine = sorted((row for row in rows if row.checkpoint in whose), key=lambda r: (r.attack, r.sample))
    kept: dict[tuple[str, str], list[Attacked]] = {}
    for row in mine:
        kept.setdefault((row.checkpoint, row.attack), []).append(row)
    return tuple(_card(row, whose[row.checkpoint]) for group in kept.values() for row in group[:count])


def _card(row: Attacked, entry: Entry) -> SentenceCard:
    new = {change.place: change.new for change in row.record.changes}
    words = row.record.sentence.split()
    pieces = tuple(Piece(new[i], word) if i in new else Piece(word) for i, word in enumerate(words))
    moved = ", ".join(f"{norm} {value:.3g}" for norm, value in (row.record.distances or {}).items() if row.record.changes)
    margin = float("nan") if row.margin is None else row.margin
    who = (entry.label, entry.info.seed, row.attack, row.sample, row.label, row.predicted)
    return SentenceCard(*who, row.status, row.queries, margin, pieces, moved)
