"""The board as data: flat records for JSON and CSV, and the fingerprint of an edition."""

import csv
import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

from cure_ray.results.board.rows import Ball, Figure, Row
from cure_ray.threats.norms import NORMS

Record = dict[str, Any]


def record(row: Row) -> Record:
    """One row with the same keys whatever is known of it; percentages with two decimals, what is unknown is empty."""
    balls = {ball.norm: ball for ball in row.balls}
    out: Record = {
        "id": row.name, "dataset": row.protocol.dataset, "threats": row.protocol.threats, "network": row.network, "title": row.title,
        "kind": row.kind, "certifier": row.certifier,
    }  # fmt: skip
    out |= _numbers("certified", row.union, interval=True) | _numbers("not_broken", row.bound) | _numbers("clean", row.clean, interval=True)
    out["clean_n"] = row.clean.n if row.clean else None
    for norm in NORMS:
        ball = balls.get(norm, Ball(norm, 0.0))
        out |= _numbers(f"certified_{norm}", ball.certified) | _numbers(f"not_broken_{norm}", ball.bound)
    out |= {"open": row.open, "n": row.n, "seeds": row.seeds, "year": row.year, "seconds": row.seconds}
    return out | {
        "by": row.by,
        "source": row.source.text if row.source else "",
        "address": row.source.href if row.source and row.kind == "published" else "",
    }


def _numbers(name: str, value: Figure | None, interval: bool = False) -> Record:
    def two(number: float | None) -> float | None:
        return None if number is None else round(number, 2)

    out = {name: two(value.percent) if value else None}
    if interval:
        out |= {f"{name}_low": two(value.low) if value else None, f"{name}_high": two(value.high) if value else None}
        out |= {f"{name}_sd": two(value.sd) if value else None}
    return out


def as_json(records: Sequence[Record]) -> str:
    return json.dumps(list(records), ensure_ascii=False, separators=(",", ":"))


def as_csv(records: Sequence[Record]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def fingerprint(records: Sequence[Record]) -> str:
    """What an edition is known by: any other number, and it is another edition."""
    return hashlib.sha256(as_json(records).encode()).hexdigest()[:12]
