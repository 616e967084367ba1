"""The objective is what `certify` proves on the same images, with and without branch and bound, and a bound is above every value."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

import cure_ray
from cure_ray.config import resolve
from cure_ray.runs.directory import checkpoint_at
from cure_ray.runs.lease import take
from cure_ray.runs.run import train_run
from cure_ray.search import objective
from cure_ray.search.objective import beaten, judge, judge_run
from cure_ray.search.space import Judging

SAMPLES = 24


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them a norm, so that there is an end between them."""
    monkeypatch.setattr(objective, "SETTINGS", replace(objective.SETTINGS, batch=12))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = resolve(
        {
            "preset": "smoke",
            "dataset": {"train_samples": 600, "validation": SAMPLES},
            "network": {"width": 0.5},
            "threats": {"linf": 0.05, "l2": 0.2, "l1": 0.5},
            "training": {"method": "natural", "epochs": 3, "lr_milestones": []},  # whose bounds are loose: something is left to branch on
            "execution": {"device": "cpu"},
        }
    )
    return train_run(experiment, tmp_path_factory.mktemp("run"), quiet=True).directory


def test_the_objective_is_what_certify_proves_on_these_images(run: Path) -> None:
    found = {nodes: judge(checkpoint_at(run, 3), Judging(SAMPLES, ("union",), nodes=nodes), "cpu", None) for nodes in (0, 50)}
    loose = cure_ray.certify(run, split="validation", samples=SAMPLES, stages=objective.SETTINGS.stages, quiet=True)
    tight = cure_ray.certify(run, split="validation", samples=SAMPLES, nodes=50, quiet=True)
    assert found[0]["union"] == pytest.approx(loose.union)
    assert found[50]["union"] == pytest.approx(tight.union)
    assert found[50]["union"] > found[0]["union"], "else this network tells nothing about branch and bound"
    assert found[0]["clean"] == found[50]["clean"] == (loose.verdicts["status"] != "misclassified").mean()


def test_norms_of_their_own_are_the_same_union(run: Path) -> None:
    each = judge(checkpoint_at(run, 3), Judging(SAMPLES, ("union",), ("l2",)), "cpu", None)
    assert each["union"] == judge(checkpoint_at(run, 3), Judging(SAMPLES, ("union",)), "cpu", None)["union"]
    assert each["union"] <= min(each["linf"], each["l2"], each["l1"]) <= each["clean"]
    assert each["union"] <= each["union_linf_l2"] <= min(each["linf"], each["l2"])


def test_judging_ends_once_counterexamples_rule_out_a_win_and_not_before(run: Path, tmp_path: Path) -> None:
    judging = Judging(SAMPLES, ("clean", "union"))
    full = judge(checkpoint_at(run, 3), judging, "cpu", None)
    seen: list[dict[str, float]] = []

    def watch(upper: dict[str, float]) -> bool:
        seen.append(upper)
        return False

    assert judge(checkpoint_at(run, 3), judging, "cpu", None, watch) == full
    assert seen[0]["union"] == seen[0]["clean"] == full["clean"], "before any attack"
    assert all(a["union"] >= b["union"] >= full["union"] for a, b in itertools.pairwise(seen))
    assert seen[-1]["union"] < full["clean"]

    rival = (full["clean"], seen[1]["union"] + 0.01)
    ended = judge(checkpoint_at(run, 3), judging, "cpu", None, lambda upper: beaten(upper, judging, [rival]))
    assert ended == {"clean": full["clean"], "union_at_most": seen[1]["union"]}
    less_clean = (full["clean"] - 0.01, 1.0)
    assert judge(checkpoint_at(run, 3), judging, "cpu", None, lambda upper: beaten(upper, judging, [less_clean])) == full
    with take(run) as lease:
        assert judge_run(lease, 3, judging, [rival], "cpu", None)["union_at_most"] == seen[1]["union"]
        assert "union" not in judge_run(lease, 3, judging, [], "cpu", None), "what was noted stands"


def test_other_seeds_may_still_reach_everything() -> None:
    one, three = Judging(10, ("union",)), Judging(10, ("union",), seeds=3)
    assert beaten({"union": 0.5}, one, [(0.6,)])
    assert not beaten({"union": 0.5}, one, [(0.5,)]), "a draw is no defeat"
    assert not beaten({"union": 0.5}, three, [(0.8,)]), "two others at 1 make a mean of 0.833"
    assert beaten({"union": 0.5}, three, [(0.84,)])
