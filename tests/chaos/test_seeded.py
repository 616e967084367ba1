"""200 faults that can be repeated: work killed, or left without room, before the n-th change to its directory, n drawn by a seed.

A failure names its seed and the faults it had so far; `CHAOS_SEED=17 make chaos` tries others.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import Kind, attempt, certify, lose_metrics, search, spoil_shard, tear_journal, train
from optuna.trial import TrialState

from cure_ray.results.fsck import fsck
from cure_ray.results.store import Store
from cure_ray.runs.directory import list_checkpoints
from cure_ray.runs.metrics import read_metrics
from cure_ray.search.space import load_sweep
from cure_ray.search.study import read_study

pytestmark = pytest.mark.chaos
SEED, FAULTS = int(os.environ.get("CHAOS_SEED", "0")), Counter[str]()
TIMED = {"seconds", "nt_seconds", "merge_seconds", "epoch_seconds", "exchange_seconds"}


def weights(run: Path) -> dict[str, bytes]:
    return {f"{c.name}/{p.name}": p.read_bytes() for c in list_checkpoints(run) for p in sorted(c.glob("*.safetensors"))}


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(run)]


def trained(run: Path) -> object:
    return rows(run), weights(run)


def searched(out: Path) -> object:
    """Every configuration once, with its measurements, its runs' epochs once each, and their weights."""
    trials = [t for t in read_study(out, load_sweep(out / "sweep.yaml")).get_trials() if "duplicate_of" not in t.user_attrs]
    assert {t.state for t in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    found = {}
    for trial in trials:
        (home,) = (out / "trials").glob(f"{trial.number:04d}-*")
        assert trial.user_attrs["identity"] not in found
        epochs = {run.name: [row["epoch"] for row in read_metrics(run)] for run in home.iterdir()}
        assert all(seen == list(range(1, len(seen) + 1)) for seen in epochs.values())
        found[trial.user_attrs["identity"]] = {
            rung: (value, {run.name: weights(run) for run in sorted(home.iterdir())} if rung == 1 else None)
            for rung, value in trial.intermediate_values.items()
        }
    return found


def same_search(found: Any, expected: Any) -> bool:
    """Which trials halving stops depends on the order they came in, which a fault may change; what was measured does not."""
    both = [(found[identity], rungs) for identity, rungs in expected.items() if identity in found]
    agree = all(mine[rung] == measured for mine, rungs in both for rung, measured in rungs.items() if rung in mine)
    return agree and found.keys() == expected.keys()


def certified(out: Path) -> object:
    assert fsck(Store.open(out)) == []
    order = [(column, "ascending") for column in ("run_id", "threat", "sample_index")]
    table = Store.open(out).read().drop_columns(["seconds"]).sort_by(order)
    return table.to_pydict(), {p.name: p.read_bytes() for p in sorted((out / "witnesses").glob("*.npy"))}


def repair(out: Path) -> None:
    store = Store.open(out)
    for finding in fsck(store):
        if finding.file is not None:
            store.discard(finding.file)


Work = tuple[Callable[[Path], None], Callable[[Path], object], Callable[[Path, random.Random], bool], Callable[[Any, Any], bool]]
WORK: dict[str, Work] = {
    "training": (train, trained, lose_metrics, lambda a, b: bool(a == b)),
    "search": (search, searched, tear_journal, same_search),
    "certification": (certify, certified, spoil_shard, lambda a, b: bool(a == b)),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, object]]:
    """How many changes each piece of work makes, and what comes of it."""
    home = tmp_path_factory.mktemp("undisturbed")
    attempt(train, home / "network")
    found = {}
    for name, (work, result, _, _) in WORK.items():
        changes = attempt(work, home / name)
        assert changes is not None
        found[name] = changes, result(home / name)
    return found


@pytest.mark.parametrize("seed", range(SEED, SEED + 9))
@pytest.mark.parametrize("name", list(WORK))
def test_whatever_happens_at_whatever_change_nothing_is_lost_and_nothing_is_done_twice(
    name: str, seed: int, tmp_path: Path, undisturbed: dict[str, tuple[int, object]]
) -> None:
    work, result, spoil, same = WORK[name]
    rng, home, history = random.Random(f"{name} {seed}"), tmp_path / name, list[str]()
    changes, expected = undisturbed[name]
    if name == "certification":
        attempt(train, tmp_path / "network")
    try:
        while len(history) < 9:
            kind: Kind = rng.choice(["kill", "kill", "full"])
            at = rng.randrange(1, changes // 3)
            if attempt(work, home, kind, at) is not None:
                break  # it came to its end before
            history.append(f"{kind} {at}")
            FAULTS[f"{name}: {kind}"] += 1
            if rng.random() < 0.3 and spoil(home, rng):
                history.append(spoil.__name__)
                FAULTS[f"{name}: {spoil.__name__}"] += 1
                if name == "certification":
                    repair(home)
        attempt(work, home)
        assert same(result(home), expected)
    except BaseException:
        print(f"seed {seed}, {name}: {', '.join(history)}")
        raise


def test_there_were_two_hundred() -> None:
    print(f"\n{sum(FAULTS.values())} seeded faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(FAULTS.items())))
    assert sum(FAULTS.values()) >= 200, FAULTS
