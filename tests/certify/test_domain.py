"""The domain of the inputs: [0, 1] is only the default, and only points inside it and the ball count against a bound."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from cure_ray.attacks import AttackSettings, attack, check_witness, replay_network
from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import certify_batch
from cure_ray.certification.job import CascadeSettings, Job
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import Status
from cure_ray.commands import certify as command
from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize
from cure_ray.testing import tiny
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import EVERYWHERE, UNIT, Box
from cure_ray.threats.geometry import distance

THREATS = [Ball("linf", 0.05), Ball("l2", 0.3), Ball("l1", 0.4)]
ATTACK = AttackSettings(15, 2)
STAGES = ("ibp", "crown-ibp", "attack", "crown", "alpha-crown")


def moved_network(box: Box) -> Network:
    """The tiny network on inputs that fill another domain instead of [0, 1]."""
    return Network([Normalize([box.low], [box.high - box.low]), *tiny.network()], (1, 8, 8), 10).eval()


def moved(x: Tensor, box: Box) -> Tensor:
    return box.low + x * (box.high - box.low)


def exact_engine(network: Network) -> NativeEngine:
    """Products in float32 pay by the size of the numbers, which a rescaled problem has others of."""
    return NativeEngine(network, effort=Effort(single=False))


def certify(network: Network, x: Tensor, y: Tensor, threat: Ball, box: Box, engine: Any = NativeEngine, **more: Any) -> list[Outcome]:
    settings = CascadeSettings(STAGES, attack=ATTACK, box=box, **more)
    return certify_batch(engine(network), network, x, y, threat, settings)


@pytest.mark.parametrize("box", [Box(-1.0, 1.0), Box(0.0, 8.0), Box(-3.0, -1.0)], ids=str)
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_a_problem_and_its_rescaled_copy_get_the_same_verdicts(threat: Ball, box: Box) -> None:
    x, y = tiny.samples(30)
    scale = box.high - box.low
    here = certify(tiny.network(), x, y, threat, UNIT, exact_engine)
    there = certify(moved_network(box), moved(x, box), y, Ball(threat.norm, threat.eps * scale), box, exact_engine)
    assert {o.status for o in here} >= {Status.CERTIFIED, Status.FALSIFIED}
    for a, b in zip(here, there, strict=True):
        assert (a.status, a.predicted) == (b.status, b.predicted)
        if a.status == Status.CERTIFIED:
            near = 1e-3 if a.stage in ("ibp", "crown-ibp", "crown") else 0.05  # an ascent may take another way to its proof
            torch.testing.assert_close(a.margins, b.margins, rtol=near, atol=near)


@pytest.mark.parametrize("make", [exact_engine, LirpaEngine], ids=["native", "auto_lirpa"])
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_bounds_of_a_rescaled_problem_are_the_same(threat: Ball, make: Any) -> None:
    x, y = tiny.samples(6)
    box = Box(-1.0, 3.0)
    engine, other = make(tiny.network()), make(moved_network(box))
    wide = Ball(threat.norm, 4 * threat.eps)
    for inside, outside in ((UNIT, box), (EVERYWHERE, EVERYWHERE)):
        for stage in ("ibp", "crown"):
            found = engine.margins(engine.problem(x, y, threat, inside), stage)
            again = other.margins(other.problem(moved(x, box), y, wide, outside), stage)
            torch.testing.assert_close(found, again, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("box", [EVERYWHERE, Box(-1.0, 1.0), Box(-2.0, float("inf"))], ids=str)
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_data_outside_the_unit_cube_raises_no_false_alarm(threat: Ball, box: Box) -> None:
    """Witnesses used to be clamped to [0, 1], out of the ball, and their margins were held against the bound."""
    torch.manual_seed(0)
    x = torch.rand(20, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        y = tiny.network()(x).argmax(1)
    outcomes = certify(tiny.network(), x, y, threat, box)
    assert {o.status for o in outcomes} >= {Status.CERTIFIED}
    for outcome, image in zip(outcomes, x.double(), strict=True):
        if outcome.witness is not None:
            assert float(distance((outcome.witness - image).flatten(), threat.norm)) <= threat.eps
            assert bool(((outcome.witness >= box.low) & (outcome.witness <= box.high)).all())


@pytest.mark.parametrize("stages", [("attack",), ("ibp",)])
def test_images_outside_the_domain_are_errors_and_their_neighbours_are_not(stages: tuple[str, ...]) -> None:
    x, y = tiny.samples(3)
    x[1, 0, 0, 0] = 1.5
    settings = CascadeSettings(stages, attack=ATTACK)
    outcomes = certify_batch(NativeEngine(tiny.network()), tiny.network(), x, y, THREATS[0], settings)
    assert outcomes[1].status == Status.ERROR
    assert "outside [0, 1]" in str(outcomes[1].message)
    assert Status.ERROR not in (outcomes[0].status, outcomes[2].status)


@pytest.mark.parametrize("make", [NativeEngine, LirpaEngine], ids=["native", "auto_lirpa"])
def test_engines_refuse_images_outside_the_domain(make: Any) -> None:
    x, y = tiny.samples(2)
    with pytest.raises(UserError, match=r"\[0, 0.5\]"):
        make(tiny.network()).problem(x, y, THREATS[0], Box(0.0, 0.5))


def test_a_point_outside_the_threat_is_no_witness_and_says_so() -> None:
    x, y = tiny.samples(4)
    outside = check_witness(replay_network(tiny.network()), x + 2, y, x + 2, Ball("linf", 0.1), UNIT)
    assert not outside.inside.any()
    assert not outside.valid.any()
    assert check_witness(replay_network(tiny.network()), x + 2, y, x + 2, Ball("linf", 0.1), EVERYWHERE).inside.all()


@pytest.mark.parametrize("size", [1.0, 1e3, 1e8])
@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_witnesses_of_large_inputs_stay_in_the_ball(threat: Ball, size: float) -> None:
    """Adding an offset to a large number rounds more than adding it to a pixel of [0, 1]."""
    x = size * torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    candidates = x + 10 * torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = check_witness(replay_network(tiny.network()), x, torch.zeros(5, dtype=torch.long), candidates, threat, EVERYWHERE)
    assert found.inside.all()
    assert (distance((found.images - x.double()).flatten(1), threat.norm) <= threat.eps).all()


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_without_a_domain_the_attack_uses_the_whole_ball(threat: Ball) -> None:
    x, y = tiny.samples(8)
    big = Ball(threat.norm, 4 * threat.eps)
    inside = attack(tiny.network(), x, y, big, range(8), ATTACK)
    free = attack(tiny.network(), x, y, big, range(8), ATTACK, box=EVERYWHERE)
    assert float(inside.min()) >= 0
    assert float(inside.max()) <= 1
    assert float(free.min()) < 0 or float(free.max()) > 1


def test_settings_know_their_domain_and_come_back_with_it() -> None:
    assert CascadeSettings(box=True) == CascadeSettings() == CascadeSettings(box=UNIT)  # type: ignore[arg-type]
    assert CascadeSettings(box=False).box == EVERYWHERE  # type: ignore[arg-type]
    keys = set()
    for box in (UNIT, EVERYWHERE, Box(-1, 1), Box(-1.0, 1 / 3)):
        settings = CascadeSettings(box=box)
        assert CascadeSettings.of(settings.key()) == settings
        job = Job("n", "d", "test", "x", "native", "1", settings, 0)
        assert Job.of(job.key()) == job
        keys.add(job.run_id)
    assert len(keys) == 4  # another domain is another job


def test_the_command_certifies_in_another_domain(foreign: dict[str, Any], tmp_path: Path) -> None:
    file = np.load(foreign["data"])
    np.savez(tmp_path / "wide.npz", images=(2 * (file["images"] / 255) - 1).astype(np.float32), labels=file["labels"])
    options = {**foreign, "data": tmp_path / "wide.npz", "samples": 4, "stages": "ibp,attack", "threats": "linf=0.03"}
    with pytest.raises(UserError, match=r"--domain"):
        command.certify(**options)
    for number, domain in enumerate(("-1,1", "none")):
        command.certify(**{**options, "out": str(tmp_path / str(number))}, domain=domain)
        frame = pd.read_parquet(tmp_path / str(number) / "verdicts")
        assert set(frame.box) == {domain}
        assert not (frame.status == "error").any()
    with pytest.raises(UserError, match="give one of them"):
        command.certify(**options, domain="-1,1", no_box=True)
    with pytest.raises(UserError, match="images in"):
        command.certify(**{**options, "threats": "patch=2x2"}, domain="-1,1")


def test_the_whole_space_gives_the_verdicts_of_a_box_too_wide_to_matter() -> None:
    """Vectors as they are, without a box, and the same problem scaled into [0, 1], where no ball reaches the ends."""
    generator, half = torch.Generator().manual_seed(5), 64.0  # a power of two: scaling is exact
    z = 3 * torch.randn(24, 6, 1, 1, generator=generator)
    layers = [torch.nn.Flatten(), torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 2)]
    with torch.no_grad():
        for layer in (layers[1], layers[3]):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 3)
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator) / 3)
    head = Network(layers, (6, 1, 1), 2).eval()
    scaled = Network([Normalize([0.5] * 6, [1 / (2 * half)] * 6), *layers], (6, 1, 1), 2).eval()
    labels, seen = head(z).argmax(1), set[str]()
    for norm, eps in (("linf", 0.25), ("l2", 0.5), ("l1", 0.75)):
        settings = CascadeSettings(STAGES, attack=ATTACK)
        free = certify_batch(NativeEngine(head), head, z, labels, Ball(norm, eps), replace(settings, box=EVERYWHERE))
        boxed = certify_batch(NativeEngine(scaled), scaled, 0.5 + z / (2 * half), labels, Ball(norm, eps / (2 * half)), settings)
        assert [o.status for o in free] == [o.status for o in boxed]
        seen |= {str(o.status) for o in free}
    assert {"certified", "falsified"} <= seen
