"""Proofs with products in float32: as many as in float64 where there is room, and none too many where there is none."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from cure_ray.bounds.arithmetic import exact_arithmetic
from cure_ray.bounds.native.compiled import compile_network
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.single import with_single_products
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball

sys.path.insert(0, str(Path(__file__).parent.parent / "soundness"))
from soundness_single import check_single, convolutions, matrices


def test_every_product_in_float32_is_paid_for():
    check_single()


@pytest.mark.parametrize("make", [convolutions, matrices])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_stages_agree_with_float64_and_never_go_above_what_it_can_reach(norm, make):
    engine = NativeEngine(make().float(), "cpu")
    assert engine.prove is not engine.decide
    x, y = torch.rand(8, 2, 14, 14, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    problem = engine.problem(x, y, Ball(norm, {"linf": 1e-3, "l2": 1e-2, "l1": 2e-2}[norm]))
    for stage in ("ibp", "crown-ibp", "crown"):
        exact = engine._crown(engine.decide, problem.domain, problem.y_B, stage)
        torch.testing.assert_close(engine.margins(problem, stage), exact, rtol=2e-3, atol=2e-4)
    assert problem.known is not None, "what CROWN has proven is not handed on"
    handed = engine.margins(problem, "alpha-crown")
    alone = engine.margins(engine.problem(x, y, Ball(norm, problem.domain.threat.eps)), "alpha-crown")
    torch.testing.assert_close(handed, alone, rtol=2e-2, atol=2e-3)


def test_networks_of_small_matrices_and_other_devices_keep_float64():
    network = Network([nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)], (1, 2, 2), 2).eval()
    exact = compile_network(network, (1, 2, 2)).to(torch.device("cpu"), torch.float64)
    assert with_single_products(exact) is exact
    for make in (convolutions, matrices):
        meta = compile_network(make(), (2, 14, 14)).to(torch.device("meta"), torch.float64)
        assert with_single_products(meta) is meta


def test_small_matrices_beside_large_ones_keep_float64():
    """A charge costs proofs; where float32 saves nothing there is none."""
    sizes = [(196, 100), (100, 100), (100, 200), (200, 2)]
    layers = [m for i, o in sizes for m in (nn.Linear(i, o), nn.ReLU())][:-1]
    network = Network([nn.Flatten(), *layers], (1, 14, 14), 2).eval()
    exact = compile_network(network, (1, 14, 14)).to(torch.device("cpu"), torch.float64)
    quick = with_single_products(exact)
    assert [layer.lost > 0 for layer in quick.layers] == [True, False, True, False]
    assert quick.layers[1] is exact.layers[1]


def test_reduced_precision_inside_float32_is_switched_off_and_comes_back():
    conv = torch.backends.mkldnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "bf16"
    try:
        with exact_arithmetic():
            assert conv.fp32_precision == "ieee"
        assert conv.fp32_precision == "bf16"
    finally:
        conv.fp32_precision = before


def test_where_work_is_short_the_neurons_that_matter_come_first():
    from cure_ray.bounds.native.budget import affordable, neuron_costs
    from cure_ray.bounds.native.relaxation import margin_rows
    from cure_ray.bounds.native.windows import row_elements

    engine = NativeEngine(convolutions(2).float(), "cpu")
    x, y = torch.rand(3, 2, 14, 14, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2])
    problem = engine.problem(x, y, Ball("linf", 0.1))
    engine.margins(problem, "crown")
    C_BSK = margin_rows(y, 4, torch.float64)
    costs = neuron_costs(engine.search, problem.domain, problem.known, C_BSK, torch.ones(3, 3, dtype=torch.bool))
    limit = 20 * row_elements(engine.search, 3) + 5 * row_elements(engine.search, 2)
    masks = affordable(engine.search, problem.known, costs, limit)
    for b in range(3):
        work = sum(int(mask[b].sum()) * row_elements(engine.search, k) for k, mask in enumerate(masks))
        assert 0 < work <= limit
        last = problem.known[3].unstable()[b]
        assert bool((masks[3][b] == last).all()), "all of the last layer is affordable"
        taken, left = costs[2][b][masks[2][b]], costs[2][b][~masks[2][b] & problem.known[2].unstable()[b]]
        assert len(taken)
        assert len(left)
        assert taken.min() >= left.max()
