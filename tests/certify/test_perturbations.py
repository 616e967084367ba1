import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification import families as perturbations
from cure_ray.certification.balls import Certifier
from cure_ray.certification.families import certify_any, check_feasible, enabled_stages
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import Status
from cure_ray.config import resolve
from cure_ray.errors import SoundnessError, UserError
from cure_ray.threats.balls import Ball
from cure_ray.threats.patches import Patch
from cure_ray.threats.text import read_threats, split_threats
from cure_ray.threats.transformations import parse_transformation
from tests.certify.perturbation_tools import digits_network


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("linf=0.1,R(10),patch=2x2", ["linf=0.1", "R(10)", "patch=2x2"]),
        ("R(2),Sh(2)", ["R(2),Sh(2)"]),
        ("R(10);R(2), Sh(2); Tu(1)", ["R(10)", "R(2),Sh(2)", "Tu(1)"]),
        ("R(10),l2=0.5,Tu(2),Tv(2)", ["R(10)", "l2=0.5", "Tu(2),Tv(2)"]),
        ("linf,R(10),patch(2),l1", ["linf", "R(10)", "patch(2)", "l1"]),
    ],
)
def test_commas_separate_threats_but_compose_transformations(text: str, parts: list[str]) -> None:
    assert split_threats(text) == parts


def test_every_family_is_read_into_its_type() -> None:
    found = read_threats("linf=8/255,Tu(2),Tv(2),patch=2x3", "mnist", (1, 28, 28))
    assert found == [Ball("linf", 8 / 255), parse_transformation("Tu(2),Tv(2)", "mnist"), Patch(2, 3)]
    assert [t.family for t in found] == ["lp", "geometric", "patch"]
    assert [str(t) for t in found] == ["linf=0.0313725", "Tu(2),Tv(2)", "patch=2x3"]


def test_a_norm_alone_has_the_radius_of_the_experiment() -> None:
    assert read_threats("linf,l2=0.3", "mnist", (1, 28, 28), {"linf": 0.1}) == [Ball("linf", 0.1), Ball("l2", 0.3)]
    for radii in (None, {"l2": 1.0}, {"linf": 0.0}):
        with pytest.raises(UserError, match="write it out"):
            read_threats("linf", "mnist", (1, 28, 28), radii)


@pytest.mark.parametrize(
    "text",
    [
        "linf=0.1,linf=0.2",
        "linf=1/0",
        "patch(0)",
        "patch(2",
        "linf=0.1,linf",
        "R(10);R(10)",
        "linf=x",
        "R(10),Q(1)",
        "patch=99",
        "l7=1",
        "linf=1_0",
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(UserError):
        read_threats(text, "mnist", (1, 28, 28))


@pytest.mark.parametrize(
    "text", ["linf=\uff11", "l2=0.\uff15", "R(\uff11\uff10)", "patch=\uff12x2", "linf=\uff18/255", "\u0661", "R(\u0661)"]
)
def test_digits_of_other_scripts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="plain ASCII"):
        read_threats(text)
    with pytest.raises(UserError, match=r"plain ASCII|a radius is a number"):
        resolve({"preset": "smoke", "certification": {"threats": [text]}})
    with pytest.raises(UserError, match="a radius is a number"):
        resolve({"preset": "smoke", "threats": {"linf": "\uff11/255"}})


def test_the_grid_is_named_by_the_request_or_the_experiment_and_unknown_names_are_refused() -> None:
    assert parse_transformation("R(30)", "mnist").grid == "240"
    assert parse_transformation("R(30)").grid == "480"
    assert parse_transformation("Tu(2),Tv(2)").cut("7x9").cells == (7, 9)
    with pytest.raises(UserError, match="Did you mean 'mnist'"):
        read_threats("R(30)", "minst")
    own = {"name": "mnist"}
    assert resolve({"preset": "mnist-small", "dataset": own}).grid == "mnist"
    assert resolve({"preset": "mnist-small", "dataset": own, "certification": {"grid": "standard"}}).grid == "standard"
    assert resolve({"preset": "smoke"}).grid == "standard"
    with pytest.raises(UserError, match="unknown grid"):
        resolve({"preset": "smoke", "certification": {"grid": "minst"}})


def test_rows_record_only_the_stages_that_can_decide_them() -> None:
    cascade = CascadeSettings()
    assert enabled_stages(Ball("l2", 1.0), cascade) == cascade.stages
    assert enabled_stages(parse_transformation("R(1)"), cascade) == ("ibp", "crown-ibp", "attack")
    assert enabled_stages(Patch(), cascade) == ("ibp", "attack")
    separate = CascadeSettings(separate_logits=True)
    assert enabled_stages(Ball("l2", 1.0), separate) == cascade.stages
    assert enabled_stages(parse_transformation("R(1)"), separate) == ("ibp", "attack")


@pytest.mark.parametrize("threat", [parse_transformation("R(40)", widths=(5.0,)), Patch(2, 2)], ids=str)
@pytest.mark.parametrize("stages", [("ibp",), ("attack",), ("crown-ibp",), ("ibp", "attack"), ("crown", "alpha-crown")], ids="+".join)
def test_only_the_enabled_stages_decide(threat: Any, stages: tuple[str, ...]) -> None:
    network, x, y = digits_network()
    settings = CascadeSettings(stages)
    if not enabled_stages(threat, settings):
        with pytest.raises(UserError, match="none of them is enabled"):
            check_feasible([threat], settings, False, 10, False)
        return
    check_feasible([threat], settings, False, 10, False)
    found = certify_any(Certifier(NativeEngine(network), network, settings), x, y, threat, range(len(x)))
    assert {o.stage for o in found} <= {"clean", *stages}
    assert ("attack" in stages) == any(o.status == Status.FALSIFIED for o in found)
    if stages == ("attack",):
        assert not any(o.status == Status.CERTIFIED for o in found)


def test_settings_are_known_by_what_they_change() -> None:
    assert "batch" not in CascadeSettings().key()
    for settings in (CascadeSettings(), CascadeSettings(("ibp",), patch_precheck=True), CascadeSettings(separate_logits=True, box=False)):
        assert CascadeSettings.of(settings.key()) == settings


def test_grids_over_the_budget_are_refused_before_anything_starts() -> None:
    big = parse_transformation("R(10)", "cifar10")
    with pytest.raises(UserError, match="--yes"):
        check_feasible([Ball("l2", 1.0), big], CascadeSettings(), False, 1000, False)
    check_feasible([big], CascadeSettings(), False, 1000, True)


def test_union_only_is_refused_for_other_families() -> None:
    with pytest.raises(UserError, match="about norms"):
        check_feasible([Patch()], CascadeSettings(), True, 10, False)


def test_a_sample_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = digits_network()
    certifier = Certifier(NativeEngine(network), network, CascadeSettings(("ibp",), batch=4))

    def fragile(certifier: Any, x: torch.Tensor, y: torch.Tensor, *rest: Any) -> list[Outcome]:
        if bool((x[:, 0, 0, 0] == 0.123).any()):
            raise MemoryError("no room")
        return [Outcome(int(label), int(label), Status.CERTIFIED, "ibp") for label in y]

    monkeypatch.setattr(perturbations, "certify_perturbed", fragile)
    images = x[:10].clone()
    images[5, 0, 0, 0] = 0.123
    found = certify_any(certifier, images, y[:10], Patch(), range(10))
    assert [o.status for o in found] == [Status.OOM if i == 5 else Status.CERTIFIED for i in range(10)]


@pytest.mark.parametrize(
    ("threat", "bounds"), [(Patch(1, 1), "patches.patch_margins"), (parse_transformation("R(2)"), "transformations.box_margins")]
)
def test_a_contradiction_is_saved_with_all_it_takes_to_repeat_it(
    threat: Any, bounds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings and seed too: without them a bundle says what happened, not how to make it happen again."""
    network, x, y = digits_network()
    engine, settings = NativeEngine(network), CascadeSettings(("ibp", "attack"))
    honest = pkgutil.resolve_name(f"cure_ray.certification.{bounds.replace('.', ':')}")
    monkeypatch.setattr(f"cure_ray.certification.{bounds}", lambda *rest, **more: honest(*rest, **more) + 1e3)
    certifier = Certifier(engine, network, settings, seed=7, bundles=tmp_path)
    with pytest.raises(SoundnessError, match=rf"engine native {engine.version}.*below the proven bound"):
        certify_any(certifier, x[:4], y[:4], threat, range(4))
    (bundle,) = tmp_path.iterdir()
    facts = json.loads((bundle / "facts.json").read_text())
    assert (facts["seed"], facts["threat"], facts["engine"]) == (7, str(threat), "native")
    assert facts["settings"] == settings.key()
