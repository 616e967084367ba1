"""The results store: a directory (or fsspec URI) of Parquet shards that survive crashes, resume, and can be checked.

A shard is written under a temporary name, read back, and renamed; its name is the hash of the work it holds. A store belongs to
one split of one data set. It holds one checkpoint unless it was opened with `many`: then rows of several checkpoints live side by
side, told apart by checkpoint_digest. For one checkpoint and threat it holds the rows of one run only: mixing settings in one
column of a table is refused.
"""

import contextlib
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cure_ray.certification.job import Job, Shard
from cure_ray.certification.verdict import SCHEMA_VERSION, Verdict
from cure_ray.errors import UserError
from cure_ray.results import shards
from cure_ray.results.files import Files
from cure_ray.results.schema import KEY, SCHEMA, outdated, to_table
from cure_ray.threats import Balls, Threat

_STORE = {"schema_version": int, "dataset": str, "split": str, "data_digest": str, "many": bool}  # store.json
_PLAN = {"run_id": str, "checkpoint_digest": str, "threats": dict}  # of plans/*.json, besides the keys of the job
_INDEX = [*KEY, "eps", "grid", "run_id"]
_READS = 5  # a store is read anew so often if others merge its shards meanwhile


class Store:
    """Verdicts, witnesses and what is known of their checkpoints, under one root."""

    def __init__(self, root: str | Path) -> None:
        self.files = Files(root)
        self.root = self.files.root
        # Shorthands for the readers in this package.
        self.fs, self._at, self._read_json, self._list = self.files.fs, self.files.at, self.files.read_json, self.files.names

    @staticmethod
    def create(root: str | Path, dataset: str, split: str, data_digest: str, many: bool = False) -> "Store":
        """Open a store for writing, making it if need be. UserError if it holds results on other data."""
        store = Store(root)
        identity = {"schema_version": SCHEMA_VERSION, "dataset": dataset, "split": split, "data_digest": data_digest, "many": many}
        found = store._identity()
        if found is None:
            store.files.prepare()
            foreign = [name for name in store.files.names("", "") if not name.startswith((".store.json.", ".writable", "..writable."))]
            if foreign:  # beyond what a call leaves that was killed before it began
                raise UserError(f"{root} is not empty and holds no results of cure_ray; choose another directory")
            store.files.write_json("store.json", identity)
            return store
        for key in ("dataset", "split", "data_digest"):
            if found[key] != identity[key]:
                raise UserError(
                    f"{root} holds results on {found['dataset']} ({found['split']}, images {found['data_digest'][:8]}), these are on "
                    f"{dataset} ({split}, images {data_digest[:8]}). Choose another directory."
                )
        if many and not found["many"]:
            store.files.write_json("store.json", {**found, "many": True})
        return store

    @staticmethod
    def open(root: str | Path) -> "Store":
        """Open an existing store for reading."""
        store = Store(root)
        if store._identity() is None:
            raise UserError(f"{root} holds no results; `cure-ray certify ... --out {root}` makes them")
        return store

    def _identity(self) -> dict[str, Any] | None:
        """What this store is of; UserError if that is damaged or of another version."""
        found = self.files.read_json("store.json")
        if found is None:
            return None
        version, missing = found.get("schema_version"), [k for k in _STORE if not isinstance(found.get(k), _STORE[k])]
        if missing:
            raise UserError(
                f"{self.root}/store.json is damaged: it lacks {', '.join(missing)}. It says which images the verdicts are about; "
                "restore it from a copy, or certify again into another directory"
            )
        assert isinstance(version, int)
        if version > SCHEMA_VERSION:
            raise UserError(f"{self.root} has schema version {version}, newer than {SCHEMA_VERSION}: upgrade cure_ray")
        if version < SCHEMA_VERSION:
            raise UserError(outdated(self.root, version))
        return found

    # ------------------------------------------------------------ runs

    def begin(self, job: Job, threats: Sequence[Threat], indices: Sequence[int], about: Mapping[str, Any]) -> set[tuple[str, int]]:
        """Record what the run sets out to do and return the (threat, sample) pairs that are done already."""
        identity = self._identity() or {}
        self._finish_compaction()
        rows = self._tables(_INDEX)
        others = sorted({d for d in rows.column("checkpoint_digest").unique().to_pylist() if d != job.checkpoint_digest})
        if others and not identity.get("many"):
            raise UserError(
                f"{self.root} holds results of another checkpoint ({others[0][:12]}), not of {job.checkpoint_digest[:12]}. "
                "Choose another directory, or pass --add to keep several checkpoints in one store."
            )
        done, wanted = set(), {str(t): t for t in threats}
        for digest, threat, index, eps, grid, run_id in zip(*(rows.column(c).to_pylist() for c in _INDEX), strict=True):
            if digest != job.checkpoint_digest or threat not in wanted:
                continue
            asked = wanted[threat]
            now = asked.radii[index] if isinstance(asked, Balls) else asked.eps
            if eps != now:
                close = f"{threat} with radius {eps!r}, now {now!r}"
                raise UserError(f"{self.root} holds {close}: too close to tell apart in a table. Choose another directory.")
            if grid != wanted[threat].grid:
                cut = f"{threat} on a grid of {grid} cells, now {wanted[threat].grid}"
                raise UserError(f"{self.root} holds {cut}: do not mix them. Choose another directory, or the same --grid.")
            if run_id != job.run_id:
                changed = self._differences(run_id, job)
                raise UserError(
                    f"{self.root} holds {threat} results of this checkpoint from a run with other settings{changed}. "
                    "Choose another directory: one table must not mix settings."
                )
            done.add((threat, index))
        plan = self._plan_of(job, rows)
        started = job.union_only and job.run_id in rows.column("run_id").unique().to_pylist()
        if started and plan["threats"] and set(plan["threats"]) != set(wanted):
            raise UserError(
                f"{self.root} holds this --union-only run over {', '.join(plan['threats'])}, now asked over {', '.join(wanted)}: which "
                "samples it skipped depends on all its threats, so none can be added or left out. Choose another directory, or leave "
                "--union-only out."
            )
        self.files.write_json(f"runs/{job.checkpoint_digest}.json", dict(about))
        for threat in wanted:
            plan["threats"][threat] = sorted({*plan["threats"].get(threat, []), *indices})
        plan["grids"] = {**plan.get("grids", {}), **{name: t.grid for name, t in wanted.items() if t.grid}}
        self.files.write_json(f"plans/{job.run_id}.json", plan)
        return done

    def _differences(self, run_id: str, job: Job) -> str:
        old, new = self.files.read_json(f"plans/{run_id}.json"), job.key()
        if old is None:
            return ""
        flat_old, flat_new = ({**p, **p["settings"]} for p in (old, new))
        changed = [f"{k}: {flat_old.get(k)} there, {v} now" for k, v in flat_new.items() if k != "settings" and flat_old.get(k) != v]
        return f" ({'; '.join(changed)})"

    def _plan_of(self, job: Job, rows: pa.Table) -> dict[str, Any]:
        """What is written down of this run so far; where that is lost, as much of it as its rows tell."""
        name = f"{job.run_id}.json"
        with contextlib.suppress(UserError):
            if self.files.exists(f"plans/{name}"):
                return self.read_plan(name)
        plan: dict[str, Any] = {**job.key(), "run_id": job.run_id, "threats": {}}
        for threat, index, run_id in zip(*(rows.column(c).to_pylist() for c in ("threat", "sample_index", "run_id")), strict=True):
            if run_id == job.run_id:
                plan["threats"].setdefault(threat, []).append(index)
        return plan

    def plans(self) -> list[dict[str, Any]]:
        """What the runs of this store set out to do: run_id, checkpoint_digest, settings, and the samples per threat."""
        return [self.read_plan(name) for name in self.files.names("plans", ".json")]

    def read_plan(self, name: str) -> dict[str, Any]:
        plan = self.files.read_json(f"plans/{name}") or {}
        wrong = [key for key in _PLAN if not isinstance(plan.get(key), _PLAN[key])]
        if wrong:
            raise UserError(
                f"{self.root}/plans/{name} is damaged: it lacks {', '.join(wrong)}; run the same `cure-ray certify` command again"
            )
        return plan

    def about(self, checkpoint_digest: str) -> dict[str, Any]:
        return self.files.read_json(f"runs/{checkpoint_digest}.json") or {}

    # ------------------------------------------------------------ shards

    def write(self, shard: Shard, verdicts: Iterable[Verdict]) -> str:
        """Write a finished shard: temporary name, read back, rename. Returns its file name."""
        return self._write_table(shard, to_table(verdicts), [])

    def _write_table(self, shard: Shard, table: pa.Table, replaces: list[str]) -> str:
        self.files.write_bytes(f"verdicts/{shard.name}", shards.serialise(table, shard.job, replaces))
        return shard.name

    def compact(self, job: Job, threats: Sequence[Threat]) -> None:
        """Merge the shards of a finished run into one file per threat: the same file whatever the shards were, and fast to read.

        The merged file is in place before its parts go, and names them: a crash in between is tidied up by the next `begin`.
        """
        for group in [tuple(threats)] if job.union_only else [(t,) for t in threats]:
            prefix = f"{job.checkpoint_digest[:12]}-{'+'.join(str(t) for t in group)}-"
            parts = [name for name in self.shards() if name.startswith(prefix)]
            if len(parts) < 2:
                continue
            table = pa.concat_tables(self.read_shard(name) for name in parts).sort_by([(c, "ascending") for c in KEY])
            keys = list(zip(*(table.column(c).to_pylist() for c in KEY), strict=True))
            if set(table.column("run_id").to_pylist()) != {job.run_id} or len(set(keys)) != len(keys):
                continue  # not ours to merge; fsck names what is wrong
            self._write_table(Shard(job, group, tuple(sorted({index for _, _, index in keys}))), table, parts)
        self._finish_compaction()

    def _finish_compaction(self) -> None:
        names = self.shards()
        for name in names:
            with contextlib.suppress(UserError):  # a damaged file is fsck's business
                for part in shards.replaces(*self._shard(name)):
                    if part in names and part != name:
                        self.discard(f"verdicts/{part}")

    def discard(self, file: str) -> None:
        """Delete a file that fsck named; its rows are computed again by the next run."""
        self.files.remove(file)

    def shards(self) -> list[str]:
        return [name for name in self.files.names("verdicts", ".parquet") if not name.startswith(".")]

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """All rows. UserError naming the file that cannot be read or is of a newer schema."""
        return self._tables(columns)

    def _tables(self, columns: list[str] | None) -> pa.Table:
        """All rows, once each, also while another call merges shards: where one goes that was listed, its rows stand in another by then."""
        for attempt in range(_READS):
            names = self.shards()
            try:
                return self._rows(names, columns)
            except UserError:
                if attempt + 1 == _READS or all(self.files.exists(f"verdicts/{name}") for name in names):
                    raise
        raise AssertionError("unreachable")

    def _rows(self, names: Sequence[str], columns: list[str] | None) -> pa.Table:
        tables, merged = dict[str, pa.Table](), set[str]()
        for name in names:
            data, where = self._shard(name)
            tables[name] = shards.parse(data, where, columns)
            with contextlib.suppress(UserError):  # a file of others does not say; rows that it then repeats are refused as such
                merged.update(part for part in shards.replaces(data, where) if part != name)
        schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(c) for c in columns])
        kept = [table.cast(schema) for name, table in tables.items() if name not in merged]
        return pa.concat_tables(kept) if kept else schema.empty_table()

    def read_shard(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """The rows of one file; UserError naming it if it is damaged."""
        return shards.parse(*self._shard(name), columns)

    def check_shard(self, name: str) -> pa.Table:
        """The rows of one file that was not changed since it was written."""
        return shards.check(*self._shard(name))

    def _shard(self, name: str) -> tuple[bytes, str]:
        where = f"{self.root}/verdicts/{name}"
        try:
            return self.files.read_bytes(f"verdicts/{name}"), where
        except OSError as error:
            raise shards.damaged(where, str(error)) from error

    # ------------------------------------------------------------ witnesses

    def write_witness(self, image: "np.ndarray[Any, Any]") -> str:
        """Store a counterexample and return its digest."""
        data = np.ascontiguousarray(image, dtype=np.float64)
        digest = witness_digest(data)
        name = f"witnesses/{digest}.npy"
        if not self.files.exists(name):
            buffer = io.BytesIO()
            np.save(buffer, data, allow_pickle=False)
            self.files.write_bytes(name, buffer.getvalue())
        return digest

    def read_witness(self, digest: str) -> "np.ndarray[Any, Any]":
        try:
            data: np.ndarray[Any, Any] = np.load(io.BytesIO(self.files.read_bytes(f"witnesses/{digest}.npy")), allow_pickle=False)
        except FileNotFoundError as error:
            raise UserError(f"witness {digest[:12]} of {self.root} is missing: {error}") from error
        except Exception as error:  # damaged bytes may raise anything
            raise UserError(f"witness {digest[:12]} of {self.root} is damaged: {error}") from error
        if witness_digest(data) != digest:
            raise UserError(f"witness {digest[:12]} of {self.root} is damaged: its content has another digest")
        return data


def witness_digest(data: "np.ndarray[Any, Any]") -> str:
    """What a counterexample is called: the hash of its type, shape and values."""
    return hashlib.sha256(f"{data.dtype}{data.shape}".encode() + data.tobytes()).hexdigest()
