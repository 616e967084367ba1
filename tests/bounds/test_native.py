"""The native engine's own parts: folding, windows, gradients, memory, devices, refusals."""

import pytest
import torch
from torch import nn

from cure_ray.bounds.native import engine as native_module
from cure_ray.bounds.native.compiled import compile_network, flatten_images
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.intermediate import Rows, layer_rows
from cure_ray.bounds.native.linear import evaluate, slope_gradients
from cure_ray.bounds.native.relaxation import (
    LayerBounds,
    Relaxation,
    interval_bounds,
    interval_layer,
    interval_margins,
    margin_rows,
    start_rows,
)
from cure_ray.bounds.native.windows import gather_rows, windows_pay
from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize, cnn7, conv_small
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box

STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")
NORMS = [("linf", 0.03), ("l2", 0.3), ("l1", 0.8)]


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    layers = [
        Normalize([0.3], [0.4]),
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, 1, 1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 36, 10),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Linear(10, 4),
    ]
    net = Network(layers, (1, 10, 10), 4)
    with torch.no_grad():
        for m in net:
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2)
                m.weight.normal_()
    return net.eval()


def setup(norm: str, eps: float, dtype: torch.dtype = torch.float64, box: bool = True):
    net = compile_network(network(), (1, 10, 10)).to(torch.device("cpu"), dtype)
    x = torch.rand(3, 1, 10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return net, Domain.around(flatten_images(x).to(dtype), Ball(norm, eps), Box.of(box))


@torch.no_grad()
def test_the_compiled_network_computes_what_the_network_computes():
    net, x = network(), torch.rand(5, 1, 10, 10, dtype=torch.float64)
    compiled = compile_network(net, (1, 10, 10))
    torch.testing.assert_close(compiled(flatten_images(x)), net.double()(x), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_transposes_are_adjoint():
    net = compile_network(network(), (1, 10, 10))
    for layer in net.layers:
        x, A = torch.randn(4, layer.inputs, dtype=torch.float64), torch.randn(4, layer.outputs, dtype=torch.float64)
        torch.testing.assert_close((layer.linear(x) * A).sum(1), (x * layer.transpose(A)).sum(1))


@torch.no_grad()
@pytest.mark.parametrize(("norm", "eps"), NORMS)
def test_windows_and_whole_rows_give_the_same_bounds(norm, eps):
    """Two implementations of the same mathematics, sharing little code."""
    net, domain = setup(norm, eps)
    first = interval_bounds(net, domain)[:1]
    relaxations = [Relaxation.of(b) for b in first]
    bounds = interval_layer(net.layers[1], first[0], net.gamma)
    assert windows_pay(net, 1)
    samples = torch.arange(3).repeat_interleave(20)
    neurons = torch.arange(20).repeat(3) * 7
    rows = gather_rows(net, 1, relaxations, bounds, domain, samples, neurons)
    value, _ = rows.evaluate(rows.initial_slopes())
    A, b = layer_rows(net.layers[1], neurons.view(3, 20))
    guard = 4 * net.gamma * bounds.scale_BN.gather(1, neurons.view(3, 20))
    slopes = [r.adaptive_BN for r in relaxations]
    for sign, plane in ((1, 0), (-1, 1)):
        dense = evaluate(net.layers[:1], relaxations, domain, (sign * A, sign * b), slopes, net.gamma).value_BS - guard
        torch.testing.assert_close(value[plane].view(3, 20), dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("norm", "eps"), NORMS)
@pytest.mark.parametrize("box", [True, False])
def test_the_analytic_gradient_is_that_of_autograd(norm, eps, box):
    net, domain = setup(norm, eps, box=box)
    with torch.no_grad():
        bounds = interval_bounds(net, domain)
        relaxations = [Relaxation.of(b) for b in bounds]
        A, b, _ = start_rows(net, margin_rows(torch.tensor([0, 1, 3]), 4, torch.float64))
    torch.manual_seed(0)
    alphas = [r.lower_slope(torch.rand(3, 3, r.active_BN.shape[1], dtype=torch.float64)).requires_grad_() for r in relaxations]
    found = evaluate(net.layers[:-1], relaxations, domain, (A, b), alphas, 0.0, trace=True)
    expected = torch.autograd.grad(found.value_BS.sum(), alphas)
    for mine, theirs, r in zip(slope_gradients(found, relaxations), expected, relaxations, strict=True):
        torch.testing.assert_close(mine, theirs * r.unstable_BN.unsqueeze(1), rtol=1e-3, atol=1e-3 if norm == "l2" else 1e-8)


def test_alpha_is_strictly_tighter_than_crown_where_it_has_to_be():
    net = network()
    engine = NativeEngine(net, effort=Effort(stop_early=False))
    x = torch.rand(8, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    for norm, eps in NORMS:
        wide = 2 * eps if norm != "l1" else 12 * eps  # vertices leave slopes little to do on smaller balls
        problem = engine.problem(x, net(x).argmax(1), Ball(norm, wide))
        crown, alpha = engine.margins(problem, "crown"), engine.margins(problem, "alpha-crown")
        assert alpha.mean() > crown.mean() + 1e-3


def test_kernels_run_on_meta_so_nothing_mixes_devices_or_reads_back():
    meta = torch.device("meta")
    net = compile_network(network(), (1, 10, 10)).to(meta, torch.float32)
    x = torch.empty(2, 100, device=meta)
    for norm, eps in NORMS:
        domain = Domain.around(x, Ball(norm, eps), Box.of(norm == "linf"))
        bounds = interval_bounds(net, domain)
        C = margin_rows(torch.empty(2, dtype=torch.long, device=meta), 4, torch.float32)
        assert interval_margins(net, domain, bounds, C).device == meta
        boxed = Domain.around(x, Ball(norm, eps), UNIT)
        relaxations = [Relaxation.of(b) for b in bounds]
        A, b, _ = start_rows(net, C)
        slopes = [r.adaptive_BN for r in relaxations]
        found = evaluate(net.layers[:-1], relaxations, boxed, (A, b), slopes, 1e-9, trace=True)
        assert found.value_BS.shape == (2, 3)
        assert all(g.device == meta for g in slope_gradients(found, relaxations))
        index = torch.empty(5, dtype=torch.long, device=meta)
        rows = gather_rows(net, 1, relaxations, bounds[1], boxed, index, index)
        assert rows.evaluate(rows.initial_slopes(), trace=True)[0].shape == (2, 5)


def test_running_out_of_memory_halves_the_batch_and_is_recorded(monkeypatch):
    net = network()
    engine = NativeEngine(net)
    x = torch.rand(8, 1, 10, 10)
    problem = engine.problem(x, net(x).argmax(1), Ball("linf", 0.01))
    expected = engine.margins(problem, "crown")
    real = native_module.crown_bounds

    def short(net, domain, elements):
        if len(domain.x_BN) > 2:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return real(net, domain, elements)

    monkeypatch.setattr(native_module, "crown_bounds", short)
    torch.testing.assert_close(engine.margins(problem, "crown"), expected, rtol=1e-5, atol=1e-5)
    assert len(engine.backoffs) == 2

    def hopeless(net, domain, elements):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(native_module, "crown_bounds", hopeless)
    with pytest.raises(RuntimeError, match="allocate"):
        engine.margins(problem, "crown")


def test_other_errors_are_not_mistaken_for_lack_of_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    engine = NativeEngine(network())
    monkeypatch.setattr(native_module, "crown_bounds", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        engine.margins(engine.problem(torch.rand(2, 1, 10, 10), torch.tensor([0, 1]), Ball("l2", 0.1)), "crown")
    assert engine.backoffs == []


def test_a_small_budget_changes_nothing_but_the_batches():
    net = network()
    x = torch.rand(3, 1, 10, 10, generator=torch.Generator().manual_seed(3))
    y = net(x).argmax(1)
    for norm, eps in NORMS:
        results = []
        for budget in (1 << 30, 2_000_000):
            engine = NativeEngine(net, memory_budget=budget)
            results.append(engine.margins(engine.problem(x, y, Ball(norm, eps)), "alpha-crown"))
        torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


def test_the_same_question_gets_the_same_answer_bit_for_bit():
    net = network()
    x = torch.rand(4, 1, 10, 10)
    y = net(x).argmax(1)
    answers = []
    for _ in range(2):
        engine = NativeEngine(net)
        answers.append([engine.margins(engine.problem(x, y, Ball("l1", 0.5)), s) for s in STAGES])
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_cnn7_is_bounded_within_a_limit_of_work():
    torch.manual_seed(0)
    net = cnn7((1, 28, 28), 10, [0.0], [1.0], width=0.25).eval()
    engine = NativeEngine(net, effort=Effort(iterations=2, work_limit=1_000_000))
    x = torch.rand(1, 1, 28, 28)
    problem = engine.problem(x, net(x).argmax(1), Ball("linf", 0.001))
    margins = [engine.margins(problem, s) for s in ("ibp", "crown-ibp", "alpha-crown")]
    assert margins[2].min() >= margins[0].min()
    assert torch.isfinite(torch.stack(margins)).all()


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


REFUSED = {
    "MaxPool2d": [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 2)],
    "Sigmoid": [nn.Flatten(), nn.Linear(100, 3), nn.Sigmoid(), nn.Linear(3, 2)],
    "Residual": [nn.Flatten(), Residual(nn.Linear(100, 100)), nn.ReLU(), nn.Linear(100, 2)],
    "two affine": [nn.Flatten(), nn.Linear(100, 3), nn.Linear(3, 2)],
    "BatchNorm1d": [nn.Flatten(), nn.Linear(100, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2)],
    "ends in a Linear": [nn.Flatten(), nn.Linear(100, 3), nn.ReLU()],
    "dilation": [nn.Conv2d(1, 2, 3, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2)],
    "Normalize": [nn.Conv2d(1, 1, 3), nn.ReLU(), Normalize([0.5], [0.5]), nn.Flatten(), nn.Linear(64, 2)],
    "zero padding": [nn.Conv2d(1, 2, 3, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(200, 2)],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused_by_name_with_advice(what):
    with pytest.raises(UserError, match=what) as error:
        NativeEngine(Network(REFUSED[what], (1, 10, 10), 2).eval())
    assert "auto_lirpa" in str(error.value)


def test_train_mode_is_refused():
    with pytest.raises(UserError, match="train mode"):
        NativeEngine(conv_small((1, 28, 28), 10, [0.0], [1.0]))


def test_hidden_behaviour_is_noticed():
    net = network()
    net[-1].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(UserError, match="hook"):
        NativeEngine(net)


@pytest.mark.parametrize(("x", "y"), [((2, 100), (2,)), ((2, 1, 10, 10), (3,)), ((2, 1, 10, 10), (2, 1))])
def test_wrong_shapes_are_refused(x, y):
    with pytest.raises(UserError, match="expected images"):
        NativeEngine(network()).problem(torch.rand(x), torch.zeros(y, dtype=torch.long), Ball("l2", 0.1))


@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range_are_refused(label):
    with pytest.raises(UserError, match=r"0\.\.3"):
        NativeEngine(network()).problem(torch.rand(1, 1, 10, 10), torch.tensor([label]), Ball("l2", 0.1))


def test_an_empty_batch_is_fine():
    engine = NativeEngine(network())
    problem = engine.problem(torch.rand(0, 1, 10, 10), torch.zeros(0, dtype=torch.long), Ball("l2", 0.1))
    for stage in STAGES:
        assert engine.margins(problem, stage).shape == (0, 3)
    assert engine.branch(problem, 1.0, 10) == []


def test_one_hard_sample_does_not_starve_the_others():
    net = network()
    x = torch.rand(6, 1, 10, 10, generator=torch.Generator().manual_seed(5))
    y = net(x).argmax(1)
    y[0] = (y[0] + 1) % 4  # cannot be proven
    engine = NativeEngine(net)
    for norm, eps in NORMS:
        results = engine.branch(engine.problem(x, y, Ball(norm, eps)), seconds=1.0, nodes=20)
        assert not (results[0].margins > 0).all()
        assert all(r.nodes <= 20 + 2 * 64 for r in results)
        assert all(r.seconds >= 0 for r in results)


def test_rows_never_loosen():
    net, domain = setup("l2", 0.3)
    first = interval_bounds(net, domain)[:1]
    start = interval_layer(net.layers[1], first[0], net.gamma)
    rows = Rows(net, 1, [Relaxation.of(first[0])], start, domain)
    rows.crown(start.unstable(), 10_000)
    rows.crown(start.unstable(), 10_000, zero=True)
    assert (rows.bounds.lower_BN >= start.lower_BN).all()
    assert (rows.bounds.upper_BN <= start.upper_BN).all()
    assert isinstance(rows.bounds, LayerBounds)
