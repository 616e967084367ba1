"""The Parquet schema of verdicts: versioned, and every column says what it means."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from cure_ray.certification.verdict import SCHEMA_VERSION, Status, Verdict
from cure_ray.errors import UserError

_COLUMNS: tuple[tuple[str, pa.DataType, bool, str], ...] = (
    ("schema_version", pa.int32(), False, "Version of this schema; readers refuse a newer one."),
    ("run_id", pa.string(), False,
     "Hash of everything that can change a verdict but the samples and threats: network, data, engine and its options, settings, "
     "seed, version of the program. `plans/<run_id>.json` holds all of it."),
    ("checkpoint_digest", pa.string(), False,
     "Identity of the certified network: SHA-256 of the function it computes (every operation, layer, constant and weight, in order). "
     "`runs/<digest>.json` says how it was made (method, seed, experiment) and holds the digest of the weights alone."),
    ("dataset", pa.string(), False, "Data set, or the name of the file the images came from."),
    ("split", pa.string(), False, "train, validation or test."),
    ("sample_index", pa.int64(), False, "Position of the image in its split (or file), from 0."),
    ("label", pa.int32(), False, "True class."),
    ("predicted", pa.int32(), False,
     "Class of the unperturbed image, from a float64 replay on the CPU; -1 if it could not be computed or was not needed."),
    ("family", pa.string(), False, "Kind of threat: lp, geometric or patch."),
    ("threat", pa.string(), False, "The threat, readable, e.g. l2=0.5. Radii are in pixel units; the domain is in `box`."),
    ("norm", pa.string(), False, "linf, l2 or l1 (family lp); geometric or patch."),
    ("eps", pa.float64(), False, "Radius in pixel units, exact; 0 for transformations and patches."),
    ("status", pa.string(), False,
     "certified, falsified, unknown, timeout, oom, error or misclassified. Only certified counts as robust."),
    ("stage", pa.string(), False,
     "Stage that decided (clean, ibp, crown-ibp, attack, crown, alpha-crown, branch-and-bound); for unknown the last one "
     "run; `skipped`: not tried, because another threat had failed (--union-only)."),
    ("margin_lb", pa.float64(), True, "Smallest of `margins`; null if no bound was computed."),
    ("margins", pa.list_(pa.float64()), False,
     "Best lower bound found of f_y - f_i over the ball inside the domain, one per class i != y in increasing order; empty if none was "
     "computed. A proof in certified rows; in other rows single entries may come from the float32 search."),
    ("attack_margin", pa.float64(), True,
     "Smallest margin any attack reached in the ball inside the domain, replayed in float64; null if not attacked."),
    ("witness", pa.string(), True, "SHA-256 of the counterexample, stored as `witnesses/<digest>.npy` (float64); null unless falsified."),
    ("seconds", pa.float64(), False, "Time spent on this row: each stage's time shared equally among the samples of its batch."),
    ("engine", pa.string(), False, "Bound engine: native or auto_lirpa."),
    ("engine_version", pa.string(), False, "Its version."),
    ("seed", pa.int64(), False, "Seed of the attacks."),
    ("stages", pa.string(), False, "Enabled stages, comma separated, in order: certified accuracy is a function of them."),
    ("budget_seconds", pa.float64(), False, "Branch-and-bound time per sample and threat; 0 means it did not run."),
    ("budget_nodes", pa.int64(), False, "Branch-and-bound sub-problems per sample and threat."),
    ("box", pa.string(), False,
     "Domain of the inputs, which cuts off balls: `0,1`, `-1,1`, ..., or `none` for whole balls. Transformations and patches: `0,1`."),
    ("nodes", pa.int64(), False, "Sub-problems branch and bound solved; parameter boxes or patch positions bounded."),
    ("message", pa.string(), True, "What went wrong, for status error and oom; where a transformation or patch falsifies."),
    ("grid", pa.string(), True,
     "Cells each parameter of a transformation was cut into, in the order written, e.g. 80 or 20x40: the proof is over them."),
)  # fmt: skip

SCHEMA = pa.schema(
    [pa.field(name, kind, nullable, {"doc": doc}) for name, kind, nullable, doc in _COLUMNS],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
KEY = ("checkpoint_digest", "threat", "sample_index")  # one row each in a sound store


def to_table(verdicts: Iterable[Verdict]) -> pa.Table:
    """Rows sorted by (threat, sample), so that the same verdicts give the same file whatever order they came in."""
    rows = sorted(verdicts, key=lambda v: (v.checkpoint_digest, v.threat, v.sample_index))
    columns: dict[str, list[Any]] = {name: [getattr(v, name) for v in rows] for name in SCHEMA.names}
    columns["status"] = [str(s) for s in columns["status"]]
    columns["margins"] = [list(m) for m in columns["margins"]]
    return pa.table(columns, schema=SCHEMA)


def from_table(table: pa.Table) -> list[Verdict]:
    """The rows of a table as verdicts."""
    check_schema(table.schema, "this table")
    return [
        Verdict(**{**row, "status": Status(row["status"]), "margins": tuple(row["margins"])})
        for row in table.select(SCHEMA.names).to_pylist()
    ]


def outdated(where: str, version: int) -> str:
    """Up to schema 1 a row was bound to a network's weights alone: one with another stride, eps or normalisation had the same name."""
    return (
        f"{where} holds verdicts of schema version {version} (cure_ray 0.2 or older), which name a network by its weights alone and not by "
        f"what it computes: they are neither read nor continued. Certify again into another directory (version {SCHEMA_VERSION} now)."
    )


def check_schema(schema: pa.Schema, where: str) -> None:
    """UserError unless a file has this schema's columns and version."""
    version = (schema.metadata or {}).get(b"schema_version")
    if version is None:
        raise UserError(f"{where} is not a verdict file of cure_ray: it has no schema_version in its metadata")
    if int(version) > SCHEMA_VERSION:
        raise UserError(f"{where} has schema version {int(version)}, this cure_ray reads up to {SCHEMA_VERSION}: upgrade cure_ray")
    if int(version) < SCHEMA_VERSION:
        raise UserError(outdated(where, int(version)))
    missing = [name for name in SCHEMA.names if name not in schema.names]
    if missing:
        raise UserError(f"{where} lacks the columns {', '.join(missing)}")


def documentation() -> str:
    """docs/reference/schema.md; a test keeps the file equal to this."""
    lines = [
        "# The verdict schema",
        "",
        f"Version {SCHEMA_VERSION}. One row per (checkpoint, sample, threat). `cure_ray.load_results(DIR).verdicts` reads a store;",
        "nothing in it is pickled. Generated from the code by `make docs`.",
        "",
        "| column | type | null | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {kind} | {'yes' if nullable else ''} | {doc} |" for name, kind, nullable, doc in _COLUMNS]
    lines += [
        "",
        "Every page carries a checksum. `cure_ray.load_results(DIR)` and `cure-ray report` verify them and refuse damaged files; pandas",
        "and pyarrow do so when asked: `pandas.read_parquet(DIR / 'verdicts', page_checksum_verification=True)`. `cure-ray fsck DIR`",
        "also compares every file, its footer included, with what its rows would be written as.",
        "",
        "A sample that is misclassified without perturbation is `misclassified` under every threat. A union is computed from complete",
        "sets only: every sample needs a row for every threat. If any row has stage `skipped`, per-norm accuracies are not available,",
        "only the union is.",
        "",
        "Attacks on words (`cure-ray attack-text`) have family and norm `text`, the attack as threat, and engine `words`. They prove",
        "nothing: `falsified` is a broken sentence, whose vector is the witness, and `unknown` one that stands. `nodes` counts the",
        "sentences that were asked for, `message` is JSON with the sentence, the words that changed, and how far its vector moved in",
        "every norm.",
        "",
        "Beside `verdicts/`: `runs/<checkpoint digest>.json` (how the network was made), `plans/<run_id>.json` (what the run set out to",
        "do, so that missing rows can be named), `witnesses/<digest>.npy` (counterexamples), `store.json` (data set and split).",
        "",
    ]
    return "\n".join(lines)


assert tuple(SCHEMA.names) == tuple(f.name for f in dataclasses.fields(Verdict))
