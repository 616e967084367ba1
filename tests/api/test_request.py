"""How `cure-ray certify` reads its budgets, and what it says to arguments of the wrong kind."""

from typing import Any

import pytest
import torch
from torch import nn

import cure_ray
from cure_ray.api.request import Cascade, parse_seconds
from cure_ray.attacks import attack_settings
from cure_ray.certification.job import CascadeSettings
from cure_ray.config import Certification
from cure_ray.config.stages import CASCADE, DEFAULT_STAGES, GUARD_SECONDS, NODES
from cure_ray.errors import UserError
from cure_ray.testing import tiny


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


def settings(budget: str | None = None, nodes: int | None = None, engine: str = "native", **experiment: float) -> CascadeSettings:
    defaults = Certification.model_validate({k.removesuffix("_there"): v for k, v in experiment.items()}) if experiment else None
    return Cascade(None, parse_seconds(budget), nodes, engine).settings(defaults)


def test_where_no_budget_is_named_branch_and_bound_has_a_small_one() -> None:
    assert settings() == settings(samples=10) == settings(nodes=NODES) == CascadeSettings(CASCADE, GUARD_SECONDS, NODES)
    assert settings(nodes=0).stages == settings("0").stages == DEFAULT_STAGES
    assert Cascade(("ibp", "branch-and-bound")).settings(None) == CascadeSettings(("ibp", "branch-and-bound"), GUARD_SECONDS, NODES)
    with pytest.raises(UserError, match="needs a budget"):
        Cascade(("ibp", "branch-and-bound"), nodes=0).settings(None)


def test_it_is_not_added_to_stages_that_were_chosen() -> None:
    assert Cascade(("ibp", "crown")).settings(None) == CascadeSettings(("ibp", "crown"))
    assert Cascade().settings(Certification(stages=("ibp", "attack"))) == CascadeSettings(("ibp", "attack"))


def test_an_experiment_of_an_older_version_is_certified_as_it_was() -> None:
    """Its file spells the old defaults out: no seconds, 20,000 nodes."""
    assert settings(seconds=0.0, nodes_there=20000) == CascadeSettings(DEFAULT_STAGES)


def test_branch_and_bound_runs_when_a_budget_says_so() -> None:
    assert settings("10s") == CascadeSettings(CASCADE, 10.0)
    assert settings(nodes=1000) == CascadeSettings(CASCADE, GUARD_SECONDS, 1000)
    assert settings("2m", 1000) == CascadeSettings(CASCADE, 120.0, 1000)
    assert settings("0", 1000).stages == settings(nodes=0).stages == DEFAULT_STAGES


def test_the_experiment_s_budget_holds_until_the_command_line_names_another() -> None:
    assert settings(seconds=5.0) == CascadeSettings(CASCADE, 5.0)
    assert settings("5s", 7, seconds=60.0) == CascadeSettings(CASCADE, 5.0, 7)
    assert settings(nodes=7, seconds=60.0) == CascadeSettings(CASCADE, GUARD_SECONDS, 7)  # named alone, nodes are the limit
    assert settings("0", seconds=5.0).seconds == 0
    assert settings(nodes_there=7) == CascadeSettings(CASCADE, GUARD_SECONDS, 7)
    assert settings(nodes_there=0).stages == DEFAULT_STAGES


def test_an_engine_without_branch_and_bound_is_not_asked_for_it() -> None:
    assert settings(nodes=1000, engine="auto_lirpa") == CascadeSettings(nodes=1000)
    assert Cascade(("ibp",), nodes=1000).settings(None) == CascadeSettings(("ibp",), nodes=1000)


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10.0), ("2m", 120.0), ("1h", 3600.0), ("0.5", 0.5), ("0", 0.0)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-1s", "infs", "nan", ""])
def test_bad_times(text: str) -> None:
    with pytest.raises(UserError, match="--budget"):
        parse_seconds(text)


def test_the_attack_is_the_command_line_s_else_the_experiment_s() -> None:
    strong = Certification(attack="strong")
    assert Cascade().settings(None).attack == attack_settings("default")
    assert Cascade().settings(strong).attack == attack_settings("strong")
    assert Cascade(attack="default").settings(strong).attack == attack_settings("default")
    assert Cascade(attack="strong").settings(None).key() != Cascade().settings(None).key()
    with pytest.raises(UserError, match="unknown attack"):
        Cascade(attack="harder").settings(None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": "a"}, "seed must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"seed": 2**70}, "fit into 64 bits"),
        ({"nodes": "5"}, "nodes must be a whole number"),
        ({"nodes": 1.5}, "nodes must be a whole number"),
        ({"workers": "2"}, "workers must"),
        ({"threads": True}, "threads must"),
        ({"stages": 5}, "stages are names"),
        ({"stages": [1]}, "stages are names"),
        ({"box": 3}, "not a domain"),
        ({"samples": 2.0}, "how many, or a list of which"),
        ({"samples": [0.5]}, "samples must be a whole number"),
        ({"samples": True}, "at least 1"),
        ({"samples": "3"}, "how many, or a list of which"),
        ({"network": []}, "no network given"),
        ({"images": torch.zeros(2, 1, 8, 8, device="meta")}, "dense tensor with numbers"),
        ({"images": torch.zeros(2, 1, 8, 8).to_sparse()}, "dense tensor with numbers"),
        ({"threats": {"linf": 0.1}}, "a list of Ball"),
        ({"threats": ["linf=0.1"]}, "a list of Ball"),
        ({"network": Pair()}, "one tensor"),
    ],
)
def test_every_argument_of_the_wrong_kind_is_named(change: dict[str, Any], sentence: str) -> None:
    x, y = tiny.samples(2)
    given: dict[str, Any] = {
        "network": tiny.architecture(),
        "images": x,
        "labels": y,
        "threats": "linf=0.1",
        "stages": "ibp",
        "quiet": True,
    }
    with pytest.raises(cure_ray.UserError, match=sentence):
        cure_ray.certify(**{**given, **change})


@pytest.mark.parametrize(("height", "width"), [(0, 1), (-1, 2), (1.5, 1)])
def test_a_patch_has_whole_positive_sides(height: Any, width: Any) -> None:
    with pytest.raises(cure_ray.UserError, match="at least 1x1"):
        cure_ray.Patch(height, width)
