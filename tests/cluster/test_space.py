"""SWEEP.yaml: what is understood, what is refused and how, and every file that ships."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cure_ray.config import resolve
from cure_ray.errors import UserError
from cure_ray.search.ledger import rung_epochs
from cure_ray.search.space import Sweep, base_data, experiment_at, grid_points, load_sweep

SWEEPS = Path(__file__).parents[2] / "sweeps"
GOOD: dict[str, Any] = {
    "name": "s",
    "base": {"preset": "smoke"},
    "space": {
        "training.method": {"choice": ["max", "scratch"]},
        "training.lambda_2": {"loguniform": [1e-6, 1e-2]},
        "training.eta": {"uniform": [0.5, 4.0], "when": {"training.method": ["scratch"]}},
        "training.anneal_epochs": {"int": [2, 8]},
    },
    "trials": 4,
}


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in {**GOOD, **changes}.items() if v is not None}))
    return path


def test_a_point_becomes_an_experiment_that_can_be_run_alone(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path))
    experiment = experiment_at(sweep, {"training.method": "scratch", "training.eta": 1.5, "training.lambda_2": 1e-4}, 7, 3)
    assert (experiment.training.eta, experiment.training.lambda_2, experiment.seed, experiment.name) == (1.5, 1e-4, 3, "s-0007")


def test_a_grid_leaves_out_fields_whose_condition_does_not_hold(tmp_path: Path) -> None:
    space = {
        "training.method": {"grid": ["max", "scratch"]},
        "training.eta": {"grid": [0.5, 1.0, 2.0], "when": {"training.method": ["scratch"]}},
    }
    sweep = load_sweep(write(tmp_path, space=space, search="grid", trials=None))
    points = list(grid_points(sweep, resolve(base_data(sweep))))
    assert len(points) == 4
    assert {"training.method": "max"} in points


def test_losses_and_switches_are_searchable_and_one_that_is_off_counts_as_its_default(tmp_path: Path) -> None:
    space = {
        "training.loss": {"grid": ["sabr", "mtl"]},
        "training.lambda_2": {"grid": [0.1, 0.2], "when": {"training.loss": ["mtl"]}},
        "training.ema": {"grid": [0.0, 0.9], "when": {"training.precise_bn": [False], "training.attack.radius": [1.0]}},
    }
    sweep = load_sweep(write(tmp_path, space=space, search="grid", trials=None))
    points = list(grid_points(sweep, resolve(base_data(sweep))))
    assert len(points) == 6
    experiment = experiment_at(sweep, points[-1], 0, 0)
    assert (experiment.training.loss.of("l2"), experiment.training.lambda_2, experiment.training.ema) == ("mtl", 0.2, 0.9)
    for values, sentence in (
        ({"training.loss.l2": {"choice": ["mtl", "abc"]}}, "abc"),
        ({"training.los": {"choice": [1]}}, "Did you mean 'loss'"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_sweep(write(tmp_path, space=values))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"space": {"training.lamda_2": {"choice": [1]}}}, "training.lamda_2: unknown field. Did you mean 'lambda_2'"),
        ({"space": {"trainin.eta": {"choice": [1]}}}, "unknown field"),
        ({"space": {"training.eta": {"chioce": [1]}}}, "unknown key. Did you mean 'choice'"),
        ({"space": {"training.eta": {}}}, "exactly one of"),
        ({"space": {"training.eta": {"uniform": [2, 1]}}}, "smaller to a larger"),
        ({"space": {"training.lambda_2": {"loguniform": [0, 1]}}}, "positive ends"),
        ({"space": {"training.lambda_2": {"uniform": [0, 2]}}}, "with training.lambda_2=2"),
        ({"space": {"training.method": {"choice": ["max", "linf"]}, "training.eta": {"choice": [1.0]}}}, "limited to some values.*`when`"),
        ({"space": {"execution.threads": {"choice": [1, 2]}}}, "is not searched"),
        ({"objectives": ["ibp_union"]}, "'ibp_union' is not produced"),
        ({"at_least": {"claen": 0.9}}, "at_least: 'claen' is not produced. Did you mean 'clean'"),
        ({"at_least": {"clean": 95}}, "at_least.clean: Input should be less than or equal to 1"),
        ({"at_least": {"l2": 0.5}, "base": {"preset": "smoke", "threats": {"l2": 0}}}, "at_least: l2 is not produced, its radius is 0"),
        ({"objectives": ["union_linf_l2"], "base": {"preset": "smoke", "threats": {"l2": 0}}}, "union_linf_l2 is not produced"),
        ({"nodes": -1}, "nodes: Input should be greater than or equal to 0"),
        ({"search": "nsga2"}, "at least two objectives"),
        ({"search": "grid"}, "is a range"),
        ({"trials": None}, "needs a budget"),
        ({"search": "tp"}, "Did you mean 'tpe'"),
        ({"base": {"preset": "mnist-small"}}, "needs validation images"),
        ({"base": "nowhere.yaml"}, "no such file"),
        ({"start_with": [{"training.lr": 1.0}]}, "not in the space"),
        ({"tirals": 3}, "unknown key. Did you mean 'trials'"),
        ({"space": {"training.eta": {"choice": [1.0], "when": {"training.eta": [1]}}}}, "circle"),
    ],
)
def test_bad_sweeps_get_a_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"(?s){sentence}"):
        load_sweep(write(tmp_path, **changes))


def test_rungs_lie_after_the_radius_ramp(tmp_path: Path) -> None:
    sweep = load_sweep(write(tmp_path, early_stopping={"factor": 3, "rungs": 2}))
    experiment = resolve({"preset": "smoke"})  # 30 epochs, full radius from epoch 14 on
    assert rung_epochs(experiment, sweep) == [15, 19, 30]
    assert rung_epochs(experiment, sweep.model_copy(update={"early_stopping": None})) == [30]


@pytest.mark.parametrize("path", sorted(SWEEPS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(SWEEPS)))
def test_shipped_sweeps_are_valid_and_open_with_claim_cost_and_command(path: Path) -> None:
    assert isinstance(load_sweep(path), Sweep)
    opening = path.read_text().split("name:")[0]
    for word in ("# Claim:", "# Cost:", "# Run: cure-ray sweep "):
        assert word in opening
