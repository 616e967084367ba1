from typing import Any

import pytest
import torch

from cure_ray.bounds.native import NativeEngine
from cure_ray.certify import perturbations
from cure_ray.certify.cascade import Certifier, Outcome
from cure_ray.certify.patch import Patch
from cure_ray.certify.perturbations import certify_any, check_affordable, enabled_stages, family, parse_any_threats, split_threats
from cure_ray.certify.settings import CascadeSettings
from cure_ray.certify.verdict import Status
from cure_ray.config.transforms import parse_transformation
from cure_ray.errors import UserError
from cure_ray.threats import Threat
from tests.certify.perturbation_tools import digits_network


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("linf=0.1,R(10),patch=2x2", ["linf=0.1", "R(10)", "patch=2x2"]),
        ("R(2),Sh(2)", ["R(2),Sh(2)"]),
        ("R(10);R(2), Sh(2); Tu(1)", ["R(10)", "R(2),Sh(2)", "Tu(1)"]),
        ("R(10),l2=0.5,Tu(2),Tv(2)", ["R(10)", "l2=0.5", "Tu(2),Tv(2)"]),
    ],
)
def test_commas_separate_threats_but_compose_transformations(text: str, parts: list[str]) -> None:
    assert split_threats(text) == parts


def test_every_family_is_read_into_its_type() -> None:
    found = parse_any_threats("linf=8/255,Tu(2),Tv(2),patch=2x3", "mnist", (1, 28, 28))
    assert found == [Threat("linf", 8 / 255), parse_transformation("Tu(2),Tv(2)", "mnist"), Patch(2, 3)]
    assert [family(t) for t in found] == ["lp", "geometric", "patch"]
    assert [str(t) for t in found] == ["linf=0.0313725", "Tu(2),Tv(2)", "patch=2x3"]


@pytest.mark.parametrize("text", ["linf=0.1,linf=0.2", "R(10);R(10)", "linf=x", "R(10),Q(1)", "patch=99", "l7=1"])
def test_what_cannot_be_read_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(UserError):
        parse_any_threats(text, "mnist", (1, 28, 28))


def test_rows_record_only_the_stages_that_can_decide_them() -> None:
    cascade = ("ibp", "crown-ibp", "attack", "crown", "alpha-crown")
    assert enabled_stages(Threat("l2", 1.0), cascade) == cascade
    assert enabled_stages(parse_transformation("R(1)"), cascade) == ("ibp", "crown-ibp", "attack")
    assert enabled_stages(Patch(), cascade) == ("ibp", "attack")


def test_grids_over_the_budget_are_refused_before_anything_starts() -> None:
    big = parse_transformation("R(10)", "cifar10")
    with pytest.raises(UserError, match="--yes"):
        check_affordable([Threat("l2", 1.0), big], False, 1000, False)
    check_affordable([big], False, 1000, True)


def test_union_only_is_refused_for_other_families() -> None:
    with pytest.raises(UserError, match="about norms"):
        check_affordable([Patch()], True, 10, False)


def test_a_sample_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = digits_network()
    certifier = Certifier(NativeEngine(network), network, CascadeSettings(("ibp",), batch=4))

    def fragile(engine: Any, network: Any, x: torch.Tensor, y: torch.Tensor, *rest: Any) -> list[Outcome]:
        if bool((x[:, 0, 0, 0] == 0.123).any()):
            raise MemoryError("no room")
        return [Outcome(int(label), int(label), Status.CERTIFIED, "ibp") for label in y]

    monkeypatch.setattr(perturbations, "certify_perturbed", fragile)
    images = x[:10].clone()
    images[5, 0, 0, 0] = 0.123
    found = certify_any(certifier, images, y[:10], Patch(), range(10))
    assert [o.status for o in found] == [Status.OOM if i == 5 else Status.CERTIFIED for i in range(10)]
