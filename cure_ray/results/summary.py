"""The table `cure-ray certify` prints: the library's tables of one network as text, with every status counted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from cure_ray.config.stages import BOUND_STAGES
from cure_ray.errors import UserError
from cure_ray.results.evaluations import STATUSES
from cure_ray.results.frames import Loaded
from cure_ray.results.study import Entry, Study
from cure_ray.results.tables import accuracy_table, column_of, stage_table, status_table

_NAMES = {"linf": "l_inf ", "l2": "l2 ", "l1": "l1 ", "patch": "patch "}
_FAILED = ("error", "oom")
_TROUBLES = 3  # shown one by one


def summary(loaded: Loaded, checkpoint_digest: str) -> str:
    """Clean, every threat, the union over the balls and the means over the rest, for one network whose set is complete."""
    entry = next((e for e in loaded.study.entries if e.evaluation.checkpoint == checkpoint_digest), None)
    if entry is None:
        raise UserError(f"there are no verdicts of the checkpoint {checkpoint_digest[:12]} here")
    block = entry.everything.only(entry.everything.threats)
    rows = loaded.verdicts[loaded.verdicts["checkpoint_digest"] == checkpoint_digest]
    enabled = {stage for stages in rows["stages"].unique() for stage in str(stages).split(",")}
    used = [stage for stage in BOUND_STAGES if stage in enabled]
    accuracy, by_stage = accuracy_table(Study((entry,))).iloc[0].to_dict(), _by_stage(entry, used)
    lines = [["", "accuracy", "95 % interval", *(f"<= {stage}" for stage in used)]]
    lines.append(["clean", *_share(accuracy, "clean"), *([""] * len(used))])
    for threat in block.threats:
        name, metric = _NAMES.get(threat.norm, "") + threat.name.split("=", 1)[-1], f"cert_{column_of(threat)}"
        if block.skipped.any():  # rows of other threats were skipped: the count says nothing about this norm alone
            lines.append([name, "-", "not computed", *(["-"] * len(used))])
        else:
            lines.append([name, *_share(accuracy, metric), *by_stage[metric]])
    if entry.balls:
        whole = len(entry.evaluation.threats) == len(block.threats)
        lines.append(["union" if whole else "union (balls only)", *_share(accuracy, "union"), *by_stage["union"]])
    lines += [[name, *_share(accuracy, name), *([""] * len(used))] for name in ("gcr_geo", "gcr_all") if name in accuracy]
    return "\n".join([f"{block.n} samples", *_aligned(lines), *_statuses(entry), *_troubles(rows)])


def _by_stage(entry: Entry, used: Sequence[str]) -> dict[str, list[str]]:
    """Per metric one cell for each stage: certified by it or an earlier one."""
    others = entry.everything.family("geometric", "patch")
    parts = [entry] if entry.balls else []
    parts += [replace(entry, evaluation=entry.everything.only(others))] if others else []
    cells: dict[str, list[str]] = {}
    for part in parts:
        table = stage_table(Study((part,))).set_index("stage").loc[[*used]]
        cells |= {str(c): [f"{share:.1f} %" for share in table[c]] for c in table.columns if str(c).startswith(("cert_", "union"))}
    return cells


def _statuses(entry: Entry) -> list[str]:
    lines = []
    for i, row in status_table(Study((entry,))).iterrows():
        skipped = int(entry.everything.skipped[:, int(str(i))].sum())
        counts = {**{status: int(row[status]) for status in STATUSES}, "skipped": skipped}
        counts["unknown"] -= skipped
        lines.append(f"{row['threat']}: " + ", ".join(f"{status} {count}" for status, count in counts.items() if count))
    return lines


def _troubles(rows: pd.DataFrame) -> list[str]:
    failed = rows[rows["message"].notna() & rows["status"].isin(_FAILED)]
    told = [f"{r.status}: sample {r.sample_index}, {r.threat}, at {r.stage}: {r.message}" for r in failed.head(_TROUBLES).itertuples()]
    return [*told, f"... and {len(failed) - _TROUBLES} more (column `message`)"] if len(failed) > _TROUBLES else told


def _share(row: Mapping[Any, Any], metric: str) -> tuple[str, str]:
    return f"{row[metric]:.1f} %", f"{row[f'{metric}_low']:.1f} to {row[f'{metric}_high']:.1f}"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
    return ["  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]) for line in lines]
