"""The bytes of a shard, written with fewer bits of its bounds."""

import math
from pathlib import Path

import pyarrow as pa
import pytest

from cure_ray.certification.job import Shard
from cure_ray.errors import UserError
from cure_ray.results import shards
from cure_ray.testing.storage import JOB, LINF, create, verdict

ATTACKED = {0: 0.3, 1: -5e-324, 2: None, 3: -255.5 / 256}
BOUNDS = {0: (0.3, 1.7e5, 1e-300), 1: (-0.3, 2.0, 5e-324), 2: (), 3: (0.0, -1e-300, 255.5 / 256)}


def shard_bytes(tmp_path: Path) -> bytes:
    rows = [verdict(LINF, i, margins=m, margin_lb=min(m) if m else None, attack_margin=ATTACKED[i]) for i, m in BOUNDS.items()]
    store = create(str(tmp_path))
    return store.files.read_bytes(f"verdicts/{store.write(Shard(JOB, (LINF,), tuple(BOUNDS)), rows)}")


def test_thinned_bounds_are_still_bounds(tmp_path: Path) -> None:
    data = shard_bytes(tmp_path)
    before, after = shards.check(data, "before"), shards.check(shards.thinned(data, "before"), "after")
    rounded = ["margins", "margin_lb", "attack_margin"]
    assert before.drop_columns(rounded).equals(after.drop_columns(rounded))
    for new, was in zip(after["attack_margin"].to_pylist(), ATTACKED.values(), strict=True):
        assert (new is None) == (was is None)
        assert was is None or (was <= new <= was + abs(was) / 128 and (new < 0) == (was < 0))
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


def test_thinned_shards_are_small_stay_what_they_are_and_are_read_beside_others(tmp_path: Path) -> None:
    data = shard_bytes(tmp_path)
    thin = shards.thinned(data, "here")
    assert len(thin) < 0.5 * len(data)
    assert shards.thinned(thin, "here") == thin
    tables = [shards.check(each, "here") for each in (data, thin)]
    assert pa.concat_tables(tables).num_rows == 2 * len(BOUNDS)
    other = bytearray(thin)
    other[-30] ^= 1  # in the footer
    with pytest.raises(UserError, match="damaged"):
        shards.check(bytes(other), "here")


def test_a_damaged_shard_is_not_thinned(tmp_path: Path) -> None:
    data = bytearray(shard_bytes(tmp_path))
    data[len(data) // 2] ^= 1
    with pytest.raises(UserError, match="damaged"):
        shards.thinned(bytes(data), "here")
