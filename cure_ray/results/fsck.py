"""Check a results store: everything missing, torn, duplicated or foreign, by name."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cure_ray.errors import UserError
from cure_ray.results.schema import KEY
from cure_ray.results.store import Store


@dataclass(frozen=True)
class Finding:
    """Something fsck found: kind is missing, torn, duplicated or foreign; `file` can be deleted and computed again."""

    kind: str
    what: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def fsck(store: Store) -> list[Finding]:
    """Everything missing, torn, duplicated or foreign, by name."""
    findings, seen, places = list[Finding](), Counter[tuple[str, str, int]](), dict[tuple[str, str, int], str]()
    plans, lost = dict[str, dict[str, Any]](), False
    for name in store.files.names("plans", ".json"):
        try:
            plan = store.read_plan(name)
        except UserError as error:
            lost = True
            findings.append(Finding("torn", f"{error}; what it planned beyond its rows cannot be told"))
            continue
        plans[plan["run_id"]] = plan
    for name in store.files.names("runs", ".json"):
        try:
            store.files.read_json(f"runs/{name}")
        except UserError as error:
            findings.append(Finding("torn", f"{error}; run the same `cure-ray certify` command again, which writes it anew"))
    for name in store.shards():
        try:
            table = store.check_shard(name)
        except UserError as error:
            findings.append(Finding("torn", str(error), f"verdicts/{name}"))
            continue
        unknown = sorted(set(table.column("run_id").to_pylist()) - set(plans))
        if unknown and not lost:
            what = f"verdicts/{name} belongs to run {unknown[0]}, which has no plan in this store"
            findings.append(Finding("foreign", what, f"verdicts/{name}"))
        keys = list(zip(*(table.column(c).to_pylist() for c in KEY), strict=True))
        seen.update(keys)
        places.update((key, f"verdicts/{name}") for key in keys)
        for digest in filter(None, table.column("witness").to_pylist()):
            try:
                store.read_witness(digest)
            except UserError as error:
                findings.append(Finding("torn" if "damaged" in str(error) else "missing", str(error)))
    for name in store.files.names("verdicts", ""):
        if name.startswith("."):
            what = f"verdicts/{name} is a shard whose writing was interrupted; it is safe to delete"
            findings.append(Finding("torn", what, f"verdicts/{name}"))
        elif not name.endswith(".parquet"):
            findings.append(Finding("foreign", f"verdicts/{name} is no shard of this store"))
    for name in store.files.names("witnesses", ".partial"):
        what = f"witnesses/{name} is a counterexample whose writing was interrupted; it is safe to delete"
        findings.append(Finding("torn", what, f"witnesses/{name}"))
    for key, count in sorted(seen.items()):
        if count > 1:
            digest, threat, index = key
            what = f"sample {index}, {threat}, checkpoint {digest[:12]}: {count} rows, one of them in {places[key]}"
            findings.append(Finding("duplicated", what, places[key]))
    for plan in plans.values():
        for threat, indices in plan["threats"].items():
            absent = [i for i in indices if (plan["checkpoint_digest"], threat, i) not in seen]
            if absent:
                what = f"{len(absent)} of {len(indices)} samples ({_ranges(absent)})"
                findings.append(Finding("missing", f"{threat}, checkpoint {plan['checkpoint_digest'][:12]}: {what}"))
    return findings


def _ranges(numbers: Sequence[int]) -> str:
    """0-4, 7, 9-11, ... (first few)."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts[:5])
    return text + (", ..." if len(parts) > 5 else "")
