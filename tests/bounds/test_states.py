"""Bounds whatever state torch and the network are in: autocast, other kernels, tensors changed in place, problems of another network."""

import itertools
import operator
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from cure_ray.bounds.arithmetic import exact_arithmetic
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.problem import NativeProblem
from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball

sys.path.insert(0, str(Path(__file__).parent.parent / "soundness"))
from soundness_points import true_margins
from soundness_single import convolutions, matrices

STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")


def asked(engine: NativeEngine, norm: str = "linf", eps: float = 1e-9) -> tuple[NativeProblem, torch.Tensor]:
    """Ten images and their labels; the margins at the images are the true ones but for the radius."""
    x = torch.rand(10, 2, 14, 14, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        logits = engine.network(x)
    y = logits.argmax(1)
    return engine.problem(x, y, Ball(norm, eps)), true_margins(logits, y)


@pytest.mark.parametrize("make", [convolutions, matrices])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_does_not_reach_the_bounds(make, inside):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        engine = NativeEngine(make(0), "cpu")
    assert engine.prove is not engine.decide, "autocast kept float32 from proving"
    plain = [engine.margins(asked(engine)[0], stage) for stage in STAGES]
    problem, truth = asked(engine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [engine.margins(problem, stage) for stage in STAGES]
        assert torch.is_autocast_enabled("cpu")
    for stage, margins, alone in zip(STAGES, found, plain, strict=True):
        assert (margins <= truth + 1e-12).all(), stage
        if stage != "alpha-crown":
            assert torch.equal(margins, alone), stage


def test_kernels_that_mix_neighbours_are_not_used_for_large_batches():
    """Without oneDNN torch multiplies small batches directly and large ones by NNPACK."""
    torch.manual_seed(0)
    maps = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 3)]
    network = Network(maps, (8, 16, 16), 3).double().eval()
    x = torch.rand(40, 8, 16, 16, dtype=torch.float64)
    x[..., 8:] *= 1e-6  # a dark half beside a bright one
    with torch.no_grad():
        logits = network(x)
    y = logits.argmax(1)
    with torch.backends.mkldnn.flags(enabled=False):
        engine = NativeEngine(network, "cpu")
        problem = engine.problem(x, y, Ball("linf", 1e-12))
        for stage in ("ibp", "crown"):
            assert (engine.margins(problem, stage) <= true_margins(logits, y) + 1e-13).all(), stage
    with torch.backends.nnpack.flags(enabled=True), exact_arithmetic():
        assert not torch.backends.nnpack.set_flags(False)[0]


def precisions() -> list[str]:
    backends = torch.backends
    parts = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.conv, backends.mkldnn.matmul, backends.mkldnn)
    return [part.fp32_precision for part in parts]


@pytest.mark.parametrize("named", ["highest", "high", "medium"])
@pytest.mark.parametrize("allowed", [(False, True), (True, False)])
def test_older_settings_come_back_and_can_be_read_inside(named, allowed):
    """torch refuses to read them where they differ from the newer ones, and its own profiler reads them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        matmul.allow_tf32, cudnn.allow_tf32 = allowed
        torch.set_float32_matmul_precision(named)
        before = (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision(), precisions())
        with exact_arithmetic():
            assert (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, False, "highest")
        assert (matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision(), precisions()) == before
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.allow_tf32, cudnn.allow_tf32 = False, True
        for part in (matmul, torch.backends.mkldnn.matmul):
            part.fp32_precision = "none"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("new", ["tf32", "ieee"])
def test_older_settings_beside_newer_ones_are_kept(old, new):
    cudnn = torch.backends.cudnn
    try:
        cudnn.allow_tf32 = old
        cudnn.conv.fp32_precision = new
        before = precisions()
        with exact_arithmetic():
            assert not cudnn.allow_tf32
        assert precisions() == before
        cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32" if old else "none"
        assert cudnn.allow_tf32 is old
    finally:
        cudnn.allow_tf32 = True


@pytest.mark.parametrize("where", ["cuda.matmul", "mkldnn", "mkldnn.conv", "cudnn"])
def test_precisions_that_a_program_has_chosen_come_back_and_are_inherited_as_before(where):
    """Also those of torch's newer settings, beside which it refuses to read the older ones."""
    chosen = operator.attrgetter(where)(torch.backends)
    default = precisions()
    try:
        chosen.fp32_precision = "tf32"
        before = precisions()
        with exact_arithmetic():
            assert precisions()[:4] == ["ieee"] * 4
        assert precisions() == before != default
    finally:
        chosen.fp32_precision = "none"
    assert precisions()[2:] == default[2:]


def test_bounds_in_two_threads_keep_exact_arithmetic_until_the_last_is_done():
    inside, entered, left = [], threading.Event(), threading.Event()

    def other() -> None:
        with exact_arithmetic():
            entered.set()
            left.wait(10)
            inside.extend(precisions()[:4])

    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        thread = threading.Thread(target=other)
        with exact_arithmetic():
            thread.start()
            assert entered.wait(10)
        left.set()
        thread.join()
        assert inside == ["ieee"] * 4
        assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.conv.fp32_precision = "none"


def test_a_problem_belongs_to_the_network_it_was_made_for():
    first, second = NativeEngine(matrices(0), "cpu"), NativeEngine(matrices(1), "cpu")
    problem, _ = asked(first)
    with pytest.raises(UserError, match="another engine"):
        second.margins(problem, "crown")
    with pytest.raises(UserError, match="another engine"):
        second.branch(problem, 1.0, 4)
    flat = NativeEngine(nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)).eval())
    wide = flat.problem(torch.rand(2, 2, 3, 6), torch.tensor([0, 1]), Ball("l2", 0.1))
    flat.problem(torch.rand(2, 3, 2, 6), torch.tensor([0, 1]), Ball("l2", 0.1))
    with pytest.raises(UserError, match="images of another shape"):
        flat.margins(wide, "ibp")


def test_a_problem_is_about_the_network_as_it_was_when_the_problem_was_made():
    network = matrices(0)
    engine = NativeEngine(network, "cpu")
    problem, _ = asked(engine)
    before = engine.margins(problem, "crown")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(-1.5)
    assert torch.equal(engine.margins(problem, "crown"), before)
    changed, truth = asked(engine)
    found = engine.margins(changed, "crown")
    assert (found <= truth + 1e-12).all()
    assert not torch.equal(found, before)
    with pytest.raises(UserError, match="another engine"):
        engine.margins(problem, "crown")


def test_what_overflows_in_float32_is_handed_on_in_float64():
    network, generator = matrices(2), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in network:
            if isinstance(layer, nn.Linear):
                rows, columns = (torch.randint(-40, 41, (n,), generator=generator).double().exp2() for n in layer.weight.shape)
                layer.weight.mul_(rows[:, None] * columns)
                layer.bias.mul_(rows)
    engine = NativeEngine(network, "cpu")
    assert engine.prove is not engine.decide
    problem, truth = asked(engine)
    with exact_arithmetic():
        alone = engine._crown(engine.prove, problem.domain, problem.y_B, "crown")
    assert not torch.isfinite(alone).all(), "nothing overflows here"
    for stage in STAGES:
        margins = engine.margins(problem, stage)
        assert torch.isfinite(margins).all(), stage
        assert (margins <= truth + 1e-9 * truth.abs()).all(), stage


def test_ascents_of_some_neurons_keep_what_float64_has_proven_where_float32_overflows():
    """Magnitudes of 1e38 in the middle, and less work allowed than all neurons would take."""
    torch.manual_seed(0)
    maps = [nn.Linear(256, 200), nn.Linear(200, 200), nn.Linear(200, 200), nn.Linear(200, 5)]
    with torch.no_grad():
        for layer in maps:
            layer.double().weight.mul_(2)
        for layer, weight, bias in zip(maps, (1e19, 1e19, 1, 1e-38), (1e19, 1e38, 1e38, 1), strict=True):
            layer.weight.mul_(weight)
            layer.bias.mul_(bias)
    network = Network([nn.Flatten(), *[m for layer in maps for m in (layer, nn.ReLU())][:-1]], (1, 16, 16), 5).eval()
    x = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        logits = network(x)
    y = logits.argmax(1)
    engine = NativeEngine(network, "cpu", effort=Effort(work_limit=3000, hidden_iterations=2))
    problem = engine.problem(x, y, Ball("l2", 0.1))
    for stage in ("crown", "alpha-crown"):
        margins = engine.margins(problem, stage)
        assert torch.isfinite(margins).all(), stage
        assert (margins <= true_margins(logits, y) + 1e-9).all(), stage


@pytest.mark.parametrize("widths", [(20, 30, 1), (200, 150, 150, 1)])
def test_a_network_of_one_class_has_no_margins(widths):
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
    engine = NativeEngine(Network([nn.Flatten(), *layers], (1, 1, widths[0]), 1).eval())
    problem = engine.problem(torch.rand(2, 1, 1, widths[0]), torch.zeros(2, dtype=torch.long), Ball("linf", 0.1))
    for stage in ("ibp", "crown-ibp", "crown"):
        assert engine.margins(problem, stage).shape == (2, 0)
