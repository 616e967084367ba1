"""The table `cure-ray certify` prints: accuracies with 95 % intervals, by stage, and every status counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from cure_ray.certification.job import CASCADE
from cure_ray.certification.verdict import SKIPPED, Status
from cure_ray.errors import UserError
from cure_ray.results.evaluations import named_samples
from cure_ray.results.statistics import wilson

_FAILED = (Status.ERROR, Status.OOM)
_NAMES = {"linf": "l_inf ", "l2": "l2 ", "l1": "l1 ", "patch": "patch "}


def summary(table: pa.Table, checkpoint_digest: str, threats: Sequence[str]) -> str:
    """Clean, every threat and the union over these threats, for one checkpoint. UserError if a set is not complete."""
    rows = [r for r in table.to_pylist() if r["checkpoint_digest"] == checkpoint_digest and r["threat"] in threats]
    cells: dict[str, dict[int, dict[str, Any]]] = {threat: {} for threat in threats}
    twice: dict[str, list[int]] = {}
    for row in rows:
        if row["sample_index"] in cells[row["threat"]]:
            twice.setdefault(row["threat"], []).append(row["sample_index"])
        cells[row["threat"]][row["sample_index"]] = row
    if twice:
        named = "; ".join(f"{threat} (samples {named_samples(sorted(set(own)))})" for threat, own in twice.items())
        raise UserError(
            f"checkpoint {checkpoint_digest[:12]} has more than one verdict for {named}: counting both would be wrong. "
            "`cure-ray fsck STORE` names the files, with --repair it puts the store right."
        )
    samples = sorted({i for by_sample in cells.values() for i in by_sample})
    missing = [f"{t} lacks {len(samples) - len(c)} of {len(samples)} samples" for t, c in cells.items() if len(c) != len(samples)]
    if missing or not samples:
        what = "; ".join(missing) or "there are no verdicts"
        raise UserError(f"the table needs every sample under every threat: {what}. Run the same command again to fill it.")
    used = [s for s in CASCADE if s != "attack" and any(s in r["stages"].split(",") for r in rows)]
    skipped = any(r["stage"] == SKIPPED for r in rows)
    n = len(samples)
    lines = [["", "accuracy", "95 % interval", *(f"<= {s}" for s in used)]]
    clean = sum(cells[threats[0]][i]["predicted"] == cells[threats[0]][i]["label"] for i in samples)
    lines.append(["clean", *_share(clean, n), *([""] * len(used))])
    for threat in threats:
        by_stage = [sum(_certified(cells[threat][i], used[: k + 1]) for i in samples) for k in range(len(used))]
        name = _NAMES.get(cells[threat][samples[0]]["norm"], "") + threat.split("=", 1)[-1]
        if skipped:  # rows of other threats were skipped: the count says nothing about this norm alone
            lines.append([name, "-", "not computed", *(["-"] * len(used))])
        else:
            total = sum(_certified(cells[threat][i], None) for i in samples)
            lines.append([name, *_share(total, n), *(f"{100 * k / n:.1f} %" for k in by_stage)])
    balls = [t for t in threats if cells[t][samples[0]]["family"] == "lp"]
    union = [sum(all(_certified(cells[t][i], used[: k + 1]) for t in balls) for i in samples) for k in range(len(used))]
    both = sum(all(_certified(cells[t][i], None) for t in balls) for i in samples)
    if balls:
        name = "union" if len(balls) == len(threats) else "union (balls only)"
        lines.append([name, *_share(both, n), *(f"{100 * k / n:.1f} %" for k in union)])
    lines += _generalised(cells, [t for t in threats if t not in balls], samples, len(used))
    counts = [f"{t}: " + ", ".join(f"{s} {c}" for s, c in _statuses(cells[t].values())) for t in threats]
    failed = [r for r in rows if r["message"] and r["status"] in _FAILED]
    troubles = [f"{r['status']}: sample {r['sample_index']}, {r['threat']}, at {r['stage']}: {r['message']}" for r in failed]
    if len(troubles) > 3:
        troubles = [*troubles[:3], f"... and {len(troubles) - 3} more (column `message`)"]
    return "\n".join([f"{n} samples", *_aligned(lines), *counts, *troubles])


def _generalised(cells: dict[str, dict[int, dict[str, Any]]], threats: Sequence[str], samples: Sequence[int], used: int) -> list[list[str]]:
    """gcr_geo, the mean over the transformations, and gcr_all with the patches (docs/explanation/algorithms.md 1.3)."""
    shares = {t: sum(_certified(cells[t][i], None) for i in samples) / len(samples) for t in threats}
    geometric = [v for t, v in shares.items() if cells[t][samples[0]]["family"] == "geometric"]
    means = {"gcr_geo": geometric, "gcr_all": list(shares.values()) if len(shares) > len(geometric) else []}
    n = len(samples)
    return [[name, *_share(n * sum(v) / len(v), n), *([""] * used)] for name, v in means.items() if v]


def _certified(row: dict[str, Any], stages: Sequence[str] | None) -> bool:
    return row["status"] == Status.CERTIFIED and (stages is None or row["stage"] in stages)


def _statuses(rows: Any) -> list[tuple[str, int]]:
    counts = Counter("skipped" if r["stage"] == SKIPPED else r["status"] for r in rows)
    return [(s, counts[s]) for s in (*map(str, Status), "skipped") if counts[s]]


def _share(k: float, n: int) -> tuple[str, str]:
    low, high = wilson(k, n)
    return f"{100 * k / n:.1f} %", f"{100 * float(low):.1f} to {100 * float(high):.1f}"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
    return ["  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]) for line in lines]
