"""The contract a place of results keeps, any fsspec file system: what is written is there, whole, once, and only with its like.

Subclass StorageContract in a test module and say where an empty store may be made.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cure_ray.certification.job import CascadeSettings, Job, Shard, plan
from cure_ray.certification.verdict import SCHEMA_VERSION, Status, Verdict
from cure_ray.errors import UserError
from cure_ray.results.fsck import fsck
from cure_ray.results.schema import SCHEMA, from_table
from cure_ray.results.store import Store
from cure_ray.threats.balls import Ball

LINF, L2 = Ball("linf", 0.1), Ball("l2", 0.5)
JOB = Job("c" * 64, "digits", "test", "d1", "native", "1", CascadeSettings(), 0)


def verdict(threat: Ball, index: int, status: Status = Status.CERTIFIED, job: Job = JOB, **changes: object) -> Verdict:
    """A made-up row of a job."""
    row = Verdict(
        SCHEMA_VERSION, job.run_id, job.checkpoint_digest, job.dataset, job.split, index, index % 10, index % 10, "lp", str(threat),
        threat.norm, threat.eps, status, "crown", 0.25, (0.25, 1.5), 0.5, None, 0.01, job.engine, job.engine_version, job.seed,
        ",".join(job.settings.stages), 0.0, 20000, "0,1", 0, None,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def fill(store: Store, job: Job, threats: Sequence[Ball], indices: Sequence[int], size: int = 4) -> None:
    """Do what of a job is left to do, with made-up verdicts."""
    done = store.begin(job, threats, indices, {"method": "joint"})
    for shard in plan(job, threats, indices, done, size):
        store.write(shard, [verdict(t, i, job=job) for t in threats if t in shard.threats for i in shard.indices])


def create(root: str, many: bool = False, dataset: str = "digits") -> Store:
    return Store.create(root, dataset, "test", "d1", many)


class StorageContract:
    """What a place must do. `place` names an empty one, as a path or URL."""

    def place(self, directory: Path) -> str:
        raise NotImplementedError("return where an empty store may be made; `directory` is an empty local one")

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return self.place(tmp_path)

    def test_rows_come_back_as_they_went_in(self, root: str) -> None:
        store = create(root)
        rows = [
            verdict(LINF, 0),
            verdict(LINF, 1, Status.MISCLASSIFIED, margin_lb=None, margins=(), attack_margin=None, stage="clean"),
            verdict(LINF, 2, Status.ERROR, message="a bound is NaN"),
        ]
        store.begin(JOB, [LINF], [0, 1, 2], {})
        store.write(Shard(JOB, (LINF,), (0, 1, 2)), reversed(rows))
        assert from_table(Store.open(root).read()) == rows
        assert Store.open(root).read().schema.equals(SCHEMA)

    def test_a_continued_run_computes_nothing_twice_whatever_its_shards_were(self, root: str) -> None:
        store, indices = create(root), list(range(15))
        fill(store, JOB, [LINF], indices[:10], size=4)
        done = store.begin(JOB, [LINF, L2], indices, {})
        assert done == {("linf=0.1", i) for i in range(10)}
        shards = plan(JOB, [LINF, L2], indices, done, size=7)
        assert sorted(i for s in shards if s.threats == (LINF,) for i in s.indices) == indices[10:]
        fill(store, JOB, [LINF, L2], indices, size=7)
        assert plan(JOB, [LINF, L2], indices, store.begin(JOB, [LINF, L2], indices, {})) == []
        assert fsck(store) == []

    def test_compaction_gives_the_same_file_whatever_the_shards_were(self, root: str) -> None:
        contents = []
        for size in (3, 4):
            store = create(f"{root}{size}")
            fill(store, JOB, [LINF, L2], list(range(10)), size)
            before = store.read().sort_by("sample_index").sort_by("threat")
            store.compact(JOB, [LINF, L2])
            assert len(store.shards()) == 2
            assert store.read().sort_by("sample_index").sort_by("threat").equals(before)
            assert fsck(store) == []
            assert store.begin(JOB, [LINF], list(range(10)), {}) == {("linf=0.1", i) for i in range(10)}
            contents.append((store.shards(), store.read().to_pylist()))
        assert contents[0] == contents[1]

    def test_a_crash_during_compaction_is_tidied_up_by_the_next_run(self, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        store = create(root)
        fill(store, JOB, [LINF], list(range(10)), 3)
        monkeypatch.setattr(Store, "discard", lambda self, file: None)
        store.compact(JOB, [LINF])
        monkeypatch.undo()
        assert {f.kind for f in fsck(store)} == {"duplicated"}
        store.begin(JOB, [LINF], list(range(10)), {})
        assert fsck(store) == []
        assert len(store.read()) == 10

    def test_results_of_another_checkpoint_are_refused_unless_the_store_is_for_many(self, root: str) -> None:
        other = dataclasses.replace(JOB, checkpoint_digest="e" * 64)
        fill(create(root), JOB, [LINF], [0, 1])
        with pytest.raises(UserError, match=r"another checkpoint \(cccccccccccc\).*--add"):
            create(root).begin(other, [LINF], [0, 1], {})
        fill(create(root, many=True), other, [LINF], [0, 1])
        fill(create(root), JOB, [L2], [0, 1])  # it is for many from now on
        assert fsck(Store.open(root)) == []
        assert Store.open(root).about("e" * 64) == {"method": "joint"}

    def test_other_data_other_settings_and_nearly_equal_radii_are_refused(self, root: str) -> None:
        fill(create(root), JOB, [LINF], [0, 1])
        with pytest.raises(UserError, match="holds results on digits"):
            create(root, dataset="mnist")
        longer = dataclasses.replace(JOB, settings=CascadeSettings(seconds=10.0))
        with pytest.raises(UserError, match=r"other settings \(seconds: 0.0 there, 10.0 now\)"):
            create(root).begin(longer, [LINF], [0, 1], {})
        with pytest.raises(UserError, match="too close"):
            create(root).begin(JOB, [Ball("linf", 0.1 + 1e-12)], [0], {})

    def test_damaged_plans_and_histories_are_named_and_the_next_run_writes_them_anew(self, root: str) -> None:
        store = create(root)
        fill(store, JOB, [LINF], [0, 1, 2])
        for name, junk in ((f"plans/{JOB.run_id}.json", b"[]"), (f"runs/{JOB.checkpoint_digest}.json", b'{"a": \xff')):
            before = store.files.read_bytes(name)
            store.files.write_bytes(name, junk)
            (found,) = fsck(store)
            assert (found.kind, found.file) == ("torn", None), "nothing may be deleted for it"
            assert name in found.what
            fill(store, JOB, [LINF], [0, 1])
            assert fsck(store) == []
            assert store.files.read_bytes(name) == before

    def test_witnesses_are_found_by_digest_and_damage_is_noticed(self, root: str) -> None:
        store = create(root)
        image = np.random.default_rng(0).random((1, 8, 8))
        digest = store.write_witness(image)
        assert store.write_witness(image) == digest
        assert np.array_equal(store.read_witness(digest), image)
        store.begin(JOB, [LINF], [0, 1], {})
        store.write(Shard(JOB, (LINF,), (0, 1)), [verdict(LINF, 0, Status.FALSIFIED, witness=digest), verdict(LINF, 1, witness="f" * 64)])
        assert [f.kind for f in fsck(store)] == ["missing"]
        path = store.files.at(f"witnesses/{digest}.npy")
        data = store.files.fs.cat_file(path)
        store.files.fs.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(UserError, match="damaged"):
            store.read_witness(digest)
