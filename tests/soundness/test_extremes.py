"""Numbers at the ends of what a double holds: no bound that rational arithmetic contradicts, no overflow that becomes a proof."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soundness_rational import check_wide, wide_convolution
from torch import nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize
from cure_ray.threats.balls import Ball

STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


def six_layers(size: float, seed: int = 3) -> Network:
    """Six linear layers without biases; `size` scales each, so that the function is scaled by its sixth power."""
    torch.manual_seed(seed)
    widths, layers = [16, 8, 8, 8, 8, 8, 3], list[nn.Module]([nn.Flatten()])
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs, bias=False).double()
        nn.init.normal_(layer.weight).data.mul_(size)
        layers += [layer, nn.ReLU()]
    return Network(layers[:-1], (1, 4, 4), 3).double().eval()


@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.3), ("linf", 0.1), ("l1", 0.5)])
@pytest.mark.parametrize("box", [True, False])
def test_six_layers_of_1e30th_certify_nothing_the_same_layers_at_scale_1_do_not(norm, eps, box):
    """Coefficients of 1e-180: their squares are 0, and the radius was forgotten with them."""
    x = torch.rand(50, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    plain, tiny = six_layers(1.0), six_layers(1e-30)
    y = plain(x.double()).argmax(1)
    engines = [NativeEngine(network, "cpu") for network in (plain, tiny)]
    problems = [e.problem(x, y, Ball(norm, eps), box) for e in engines]
    open_to_all = torch.ones(len(x), dtype=torch.bool)
    for stage in STAGES:
        there, here = ((e.margins(p, stage) > 0).all(1) for e, p in zip(engines, problems, strict=True))
        assert not (here & ~there).any(), stage
        open_to_all &= ~there
        if stage != "alpha-crown":  # the deciding pass by itself: the searching one, in float32, sees zeros only
            there, here = ((e._crown(e.decide, p.domain, y, stage) > 0).all(1) for e, p in zip(engines, problems, strict=True))
            assert not (here & ~there).any(), stage
    assert open_to_all.any()  # else there would be nothing to be wrong about


@pytest.mark.parametrize("seed", range(24))
def test_bounds_hold_in_rational_arithmetic_over_the_whole_range_of_doubles(seed):
    check_wide(seed)


@settings(max_examples=30, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(seed=st.integers(1000, 10**9), box=st.booleans())
def test_bounds_hold_in_rational_arithmetic_for_random_exponents(seed, box):
    check_wide(seed, box)


@pytest.mark.soundness_long
@settings(max_examples=3000, deadline=None, suppress_health_check=QUIET)
@given(seed=st.integers(0, 10**12), box=st.booleans())
def test_bounds_hold_in_rational_arithmetic_for_many_random_exponents(seed, box):
    check_wide(seed, box)


@pytest.mark.parametrize("seed", range(3))
def test_bounds_on_windows_hold_in_rational_arithmetic_too(seed):
    check_wide(seed, make=wide_convolution)


def test_the_extreme_networks_are_not_all_hopeless():
    assert sum(check_wide(seed) > 0 for seed in (0, 1, 2, 3, 4, 5, 6, 7)) >= 2


def linear(*numbers: float, bias: float = 0.0) -> nn.Linear:
    layer = nn.Linear(len(numbers), 1).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([numbers], dtype=torch.float64))
        layer.bias.fill_(bias)
    return layer


def two_classes(*layers: nn.Module) -> Network:
    """f_0 - f_1 is the output of the last layer given."""
    last = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[1.0], [0.0]]))
    return Network([*layers, nn.ReLU(), last], (1, 2, 2), 2).double().eval()


@pytest.mark.parametrize("size", [1e121, 1e300])
def test_parameters_beyond_what_rounding_is_charged_for_are_refused(size):
    with pytest.raises(UserError, match="beyond"):
        NativeEngine(two_classes(nn.Flatten(), linear(1.0, size, 0.0, 0.0)), "cpu")


def test_weights_that_folding_turns_into_zero_are_refused():
    """0 would be an exact zero to the engine, one that costs no rounding and moves with nothing."""
    network = two_classes(Normalize([0.0], [1e38]), nn.Flatten(), linear(1e-300, 1.0, 0.0, 0.0))
    with pytest.raises(UserError, match="too small"):
        NativeEngine(network, "cpu")


def test_magnitudes_beyond_the_ceiling_certify_nothing():
    steep = two_classes(nn.Flatten(), linear(*[1e100] * 4), nn.ReLU(), linear(1e100, bias=1.0))
    engine = NativeEngine(steep, "cpu")
    x, y = torch.full((1, 1, 2, 2), 0.5), torch.tensor([0])
    for eps in (0.0, 1.0):
        margins = [engine.margins(engine.problem(x, y, Ball("linf", eps)), stage) for stage in STAGES]
        assert torch.isnan(margins[-1]).all()
        assert not any((m > 0).any() for m in margins)


def test_a_radius_float32_cannot_hold_is_refused_by_name():
    with pytest.raises(UserError, match="at most 1e"):
        Ball("linf", 1e31)


def test_flushed_subnormals_change_no_bound_and_the_setting_comes_back():
    case = two_classes(nn.Flatten(), linear(1.0, -1.0, 2.0, 0.5, bias=0.1))
    engine = NativeEngine(case, "cpu")
    x, y = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.long)
    problem = engine.problem(x, y, Ball("l2", 0.1))
    kept = engine.margins(problem, "crown")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        flushed = engine.margins(problem, "crown")
        assert float(torch.full((), 2.0**-1074, dtype=torch.float64) * 1) == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(kept, flushed)
    assert math.isfinite(float(kept.sum()))
