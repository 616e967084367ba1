"""The results store: a directory (or fsspec URI) of Parquet shards that survive crashes, resume, and can be checked.

A shard is written under a temporary name, read back, and renamed; its name is the hash of the work it holds. A store belongs to
one split of one data set. It holds one checkpoint unless it was opened with `many`: then rows of several checkpoints live side by
side, told apart by checkpoint_digest. For one checkpoint and threat it holds the rows of one run only: mixing settings in one
column of a table is refused.
"""

import hashlib
import io
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from cure_ray.certify.settings import Job, Shard
from cure_ray.certify.verdict import SCHEMA_VERSION, Verdict
from cure_ray.errors import UserError
from cure_ray.results.schema import KEY, SCHEMA, check_schema, to_table
from cure_ray.threats import Threat

_JOB = b"cure_ray_job"  # file metadata: the job as JSON, so that every shard explains itself
_INDEX = [*KEY, "eps", "run_id"]


@dataclass(frozen=True)
class Finding:
    """Something fsck found: kind is missing, torn, duplicated or foreign."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class Store:
    """Verdicts, witnesses and what is known of their checkpoints, under one root."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(root).rstrip("/")
        self.fs, self.path = fsspec.core.url_to_fs(self.root)

    @staticmethod
    def create(root: str | Path, dataset: str, split: str, data_digest: str, many: bool = False) -> "Store":
        """Open a store for writing, making it if need be. UserError if it holds results on other data."""
        store = Store(root)
        identity = {"schema_version": SCHEMA_VERSION, "dataset": dataset, "split": split, "data_digest": data_digest, "many": many}
        found = store._read_json("store.json")
        if found is None:
            if store._list("", ""):
                raise UserError(f"{root} is not empty and holds no results of cure_ray; choose another directory")
            store._write_json("store.json", identity)
            return store
        for key in ("dataset", "split", "data_digest"):
            if found[key] != identity[key]:
                raise UserError(
                    f"{root} holds results on {found['dataset']} ({found['split']}, images {found['data_digest'][:8]}), these are on "
                    f"{dataset} ({split}, images {data_digest[:8]}). Choose another directory."
                )
        if many and not found["many"]:
            store._write_json("store.json", {**found, "many": True})
        return store

    @staticmethod
    def open(root: str | Path) -> "Store":
        """Open an existing store for reading."""
        store = Store(root)
        found = store._read_json("store.json")
        if found is None:
            raise UserError(f"{root} holds no results; `cure-ray certify ... --out {root}` makes them")
        if found["schema_version"] > SCHEMA_VERSION:
            raise UserError(f"{root} has schema version {found['schema_version']}, newer than {SCHEMA_VERSION}: upgrade cure_ray")
        return store

    # ------------------------------------------------------------ runs

    def begin(self, job: Job, threats: Sequence[Threat], indices: Sequence[int], about: Mapping[str, Any]) -> set[tuple[str, int]]:
        """Record what the run sets out to do and return the (threat, sample) pairs that are done already."""
        identity = self._read_json("store.json") or {}
        rows = self._index()
        others = sorted({d for d in rows.column("checkpoint_digest").unique().to_pylist() if d != job.checkpoint_digest})
        if others and not identity.get("many"):
            raise UserError(
                f"{self.root} holds results of another checkpoint ({others[0][:12]}), not of {job.checkpoint_digest[:12]}. "
                "Choose another directory, or pass --add to keep several checkpoints in one store."
            )
        done, wanted = set(), {str(t): t for t in threats}
        for digest, threat, index, eps, run_id in zip(*(rows.column(c).to_pylist() for c in _INDEX), strict=True):
            if digest != job.checkpoint_digest or threat not in wanted:
                continue
            if eps != wanted[threat].eps:
                close = f"{threat} with radius {eps!r}, now {wanted[threat].eps!r}"
                raise UserError(f"{self.root} holds {close}: too close to tell apart in a table. Choose another directory.")
            if run_id != job.run_id:
                changed = self._differences(run_id, job)
                raise UserError(
                    f"{self.root} holds {threat} results of this checkpoint from a run with other settings{changed}. "
                    "Choose another directory: one table must not mix settings."
                )
            done.add((threat, index))
        self._write_json(f"runs/{job.checkpoint_digest}.json", dict(about))
        plan = self._read_json(f"plans/{job.run_id}.json") or {**job.key(), "run_id": job.run_id, "threats": {}}
        for threat in wanted:
            plan["threats"][threat] = sorted({*plan["threats"].get(threat, []), *indices})
        self._write_json(f"plans/{job.run_id}.json", plan)
        return done

    def _differences(self, run_id: str, job: Job) -> str:
        old, new = self._read_json(f"plans/{run_id}.json"), job.key()
        if old is None:
            return ""
        flat_old, flat_new = ({**p, **p["settings"]} for p in (old, new))
        changed = [f"{k}: {flat_old.get(k)} there, {v} now" for k, v in flat_new.items() if k != "settings" and flat_old.get(k) != v]
        return f" ({'; '.join(changed)})"

    def about(self, checkpoint_digest: str) -> dict[str, Any]:
        return self._read_json(f"runs/{checkpoint_digest}.json") or {}

    # ------------------------------------------------------------ shards

    def write(self, shard: Shard, verdicts: Iterable[Verdict]) -> str:
        """Write a finished shard: temporary name, read back, rename. Returns its file name."""
        table = to_table(verdicts)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), _JOB: json.dumps(shard.job.key())})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        self._write_bytes(f"verdicts/{shard.name}", buffer.getvalue())
        return shard.name

    def shards(self) -> list[str]:
        return [name for name in self._list("verdicts", ".parquet") if not name.startswith(".")]

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """All rows. UserError naming the file that cannot be read or is of a newer schema."""
        return self._tables(columns)

    def _index(self) -> pa.Table:
        return self._tables(_INDEX)

    def _tables(self, columns: list[str] | None) -> pa.Table:
        tables = [self._read_shard(name, columns) for name in self.shards()]
        schema = SCHEMA if columns is None else pa.schema([SCHEMA.field(c) for c in columns])
        return pa.concat_tables(t.cast(schema) for t in tables) if tables else schema.empty_table()

    def _read_shard(self, name: str, columns: list[str] | None = None) -> pa.Table:
        try:
            file = pq.ParquetFile(pa.BufferReader(self._read_bytes(f"verdicts/{name}")), page_checksum_verification=True)
            check_schema(file.schema_arrow, f"{self.root}/verdicts/{name}")
            return file.read(columns=columns or SCHEMA.names)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.root}/verdicts/{name} is damaged ({error}); delete it and run the same command again") from error

    # ------------------------------------------------------------ witnesses

    def write_witness(self, image: "np.ndarray[Any, Any]") -> str:
        """Store a counterexample and return its digest."""
        data = np.ascontiguousarray(image, dtype=np.float64)
        digest = _witness_digest(data)
        name = f"witnesses/{digest}.npy"
        if not self.fs.exists(self._at(name)):
            buffer = io.BytesIO()
            np.save(buffer, data, allow_pickle=False)
            self._write_bytes(name, buffer.getvalue())
        return digest

    def read_witness(self, digest: str) -> "np.ndarray[Any, Any]":
        try:
            data: np.ndarray[Any, Any] = np.load(io.BytesIO(self._read_bytes(f"witnesses/{digest}.npy")), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"witness {digest[:12]} of {self.root} cannot be read: {error}") from error
        if _witness_digest(data) != digest:
            raise UserError(f"witness {digest[:12]} of {self.root} is damaged: its content has another digest")
        return data

    # ------------------------------------------------------------ check

    def fsck(self) -> list[Finding]:
        """Everything missing, torn, duplicated or foreign, by name."""
        findings, seen = [], Counter[tuple[str, str, int]]()
        plans = {plan["run_id"]: plan for plan in map(self._read_json, (f"plans/{n}" for n in self._list("plans", ".json"))) if plan}
        for name in self.shards():
            try:
                table = self._read_shard(name)  # every column, so that every page checksum is verified
            except UserError as error:
                findings.append(Finding("torn", str(error)))
                continue
            unknown = sorted(set(table.column("run_id").to_pylist()) - set(plans))
            if unknown:
                findings.append(Finding("foreign", f"verdicts/{name} belongs to run {unknown[0]}, which has no plan in this store"))
            seen.update(zip(*(table.column(c).to_pylist() for c in KEY), strict=True))
            for digest in filter(None, table.column("witness").to_pylist()):
                try:
                    self.read_witness(digest)
                except UserError as error:
                    findings.append(Finding("torn" if "damaged" in str(error) else "missing", str(error)))
        for name in self._list("verdicts", ""):
            if name.startswith("."):
                findings.append(Finding("torn", f"verdicts/{name} is a shard whose writing was interrupted; it is safe to delete"))
            elif not name.endswith(".parquet"):
                findings.append(Finding("foreign", f"verdicts/{name} is no shard of this store"))
        for (digest, threat, index), count in sorted(seen.items()):
            if count > 1:
                findings.append(Finding("duplicated", f"sample {index}, {threat}, checkpoint {digest[:12]}: {count} rows"))
        for plan in plans.values():
            for threat, indices in plan["threats"].items():
                absent = [i for i in indices if (plan["checkpoint_digest"], threat, i) not in seen]
                if absent:
                    what = f"{len(absent)} of {len(indices)} samples ({_ranges(absent)})"
                    findings.append(Finding("missing", f"{threat}, checkpoint {plan['checkpoint_digest'][:12]}: {what}"))
        return findings

    # ------------------------------------------------------------ files

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _list(self, folder: str, ending: str) -> list[str]:
        path = self._at(folder) if folder else self.path
        if not self.fs.isdir(path):
            return []
        self.fs.invalidate_cache()
        return sorted(n for p in self.fs.ls(path, detail=False) if (n := str(p).rstrip("/").rsplit("/", 1)[-1]).endswith(ending))

    def _read_bytes(self, name: str) -> bytes:
        data: bytes = self.fs.cat_file(self._at(name))
        return data

    def _write_bytes(self, name: str, data: bytes) -> None:
        """Atomically, and only after the bytes have been read back as they were written."""
        folder, file = name.rsplit("/", 1) if "/" in name else ("", name)
        temporary = f"{folder}/.{file}.{uuid.uuid4().hex[:8]}.partial".lstrip("/")
        self.fs.makedirs(self._at(folder).rstrip("/"), exist_ok=True)
        try:
            self.fs.pipe_file(self._at(temporary), data)
            if self._read_bytes(temporary) != data:
                raise OSError(f"{self.root}/{temporary} reads back differently from what was written: check the disk")
            if isinstance(self.fs, LocalFileSystem):
                os.replace(self._at(temporary), self._at(name))
            else:
                self.fs.mv(self._at(temporary), self._at(name))
        except BaseException:
            if self.fs.exists(self._at(temporary)):
                self.fs.rm_file(self._at(temporary))
            raise

    def _read_json(self, name: str) -> dict[str, Any] | None:
        if not self.fs.exists(self._at(name)):
            return None
        try:
            value: dict[str, Any] = json.loads(self._read_bytes(name))
        except ValueError as error:
            raise UserError(f"{self.root}/{name} is damaged: {error}") from error
        return value

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write_bytes(name, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def _witness_digest(data: "np.ndarray[Any, Any]") -> str:
    return hashlib.sha256(f"{data.dtype}{data.shape}".encode() + data.tobytes()).hexdigest()


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
