"""The bytes of a shard, written with fewer bits of its bounds."""

import math
from pathlib import Path

import pytest

from cure_ray.certification.job import Shard
from cure_ray.errors import UserError
from cure_ray.results import shards
from cure_ray.testing.storage import JOB, LINF, create, verdict

BOUNDS = {0: (0.3, 1.7e5, 1e-300), 1: (-0.3, 2.0, 5e-324), 2: (), 3: (0.0, -1e-300, 255.5 / 256)}


def shard_bytes(tmp_path: Path) -> bytes:
    rows = [verdict(LINF, i, margins=m, margin_lb=min(m) if m else None) for i, m in BOUNDS.items()]
    store = create(str(tmp_path))
    return store.files.read_bytes(f"verdicts/{store.write(Shard(JOB, (LINF,), tuple(BOUNDS)), rows)}")


def test_thinned_bounds_are_still_bounds(tmp_path: Path) -> None:
    data = shard_bytes(tmp_path)
    before, after = shards.check(data, "before"), shards.check(shards.thinned(data, "before"), "after")
    assert before.drop_columns(["margins", "margin_lb"]).equals(after.drop_columns(["margins", "margin_lb"]))
    changed = 0
    for least, kept, old in zip(after["margin_lb"].to_pylist(), after["margins"].to_pylist(), BOUNDS.values(), strict=True):
        assert len(kept) == len(old)
        assert least == (min(kept) if kept else None)
        for new, was in zip(kept, old, strict=True):
            assert new <= was
            assert (new > 0) == (was > 0)
            assert abs(was - new) <= abs(was) / 128
            assert math.frexp(new)[0] * 256 % 1 == 0
            changed += new != was
    assert changed == 6


def test_a_damaged_shard_is_not_thinned(tmp_path: Path) -> None:
    data = bytearray(shard_bytes(tmp_path))
    data[len(data) // 2] ^= 1
    with pytest.raises(UserError, match="damaged"):
        shards.thinned(bytes(data), "here")
