"""Products in float32 prove only what they pay for: judged at one point, where a bound has no room but its own rounding.

The network is evaluated in float64 by torch; imports of cure_ray happen inside the functions (mutation test).
"""

import torch
from soundness_points import preactivations, true_margins
from torch import Tensor, nn

NOISE = 1e-12  # float64 noise of the judge, as a share of what is compared; what float32 loses is a hundred thousand times as much


def convolutions(seed: int = 0, small: float = 1.0, lift: float = 1.0) -> nn.Sequential:
    """Two convolutions whose neurons see a part of the image, one that sees all of it, two layers of neurons; no number fits float32.
    With `small` the first layer is lost to float32 altogether, and the next two lift what it says again."""
    from cure_ray.networks.models import Network

    torch.manual_seed(seed)
    maps = [nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 5, 3, 2, 1), nn.Conv2d(5, 4, 4, padding=1), nn.Linear(144, 12), nn.Linear(12, 4)]
    layers = [m for affine in maps for m in (*([nn.Flatten()] if affine is maps[3] else []), affine, nn.ReLU())][:-1]
    network = Network(layers, (2, 14, 14), 4).double().eval()
    with torch.no_grad():
        maps[0].weight.mul_(small).add_(1e-9 * small)
        maps[0].bias.mul_(small)
        for k in (1, 2):
            maps[k].weight.mul_(lift)
            maps[k].bias.mul_(small * lift**k)
    return network


def matrices(seed: int = 0, small: float = 1.0, lift: float = 1.0) -> nn.Sequential:
    """Three layers of neurons, all large enough for float32, and the logits; `small` and `lift` as above."""
    from cure_ray.networks.models import Network

    torch.manual_seed(seed)
    maps = [nn.Linear(392, 160), nn.Linear(160, 128), nn.Linear(128, 128), nn.Linear(128, 4)]
    layers = [nn.Flatten(), *[m for affine in maps for m in (affine, nn.ReLU())][:-1]]
    network = Network(layers, (2, 14, 14), 4).double().eval()
    with torch.no_grad():
        maps[0].weight.mul_(small).add_(1e-9 * small)
        maps[0].bias.mul_(small)
        for k in (1, 2):
            maps[k].weight.mul_(lift)
            maps[k].bias.mul_(small * lift**k)
    return network


def check_single() -> None:
    for make in (convolutions, matrices):
        for norm in ("linf", "l2"):
            _check_point(make(0), norm)
    _check_point(convolutions(1, 1e-42, 3e18), "linf")
    _check_point(matrices(1, 1e-46, 3e18), "linf")
    _check_share()
    _check_matrices()
    _check_parts()
    _check_states()


def _check_states() -> None:
    """Autocast stays outside, fast kernels are found out at the sizes where they begin, and a problem is of one network as it is."""
    from cure_ray.bounds.arithmetic import exact_arithmetic
    from cure_ray.bounds.native.affine import Affine
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.single import _promised
    from cure_ray.errors import UserError
    from cure_ray.threats.balls import Ball

    engine = NativeEngine(matrices(0), "cpu")
    x, y = torch.rand(6, 2, 14, 14, generator=torch.Generator().manual_seed(3), dtype=torch.float64), torch.arange(6) % 4
    problem = engine.problem(x, y, Ball("linf", 1e-9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        margins = engine.margins(problem, "crown")
    assert torch.equal(margins, engine.margins(problem, "crown")), "autocast reaches the bounds"
    try:
        NativeEngine(matrices(1), "cpu").margins(problem, "crown")
    except UserError:
        pass
    else:
        raise AssertionError("what was proven of another network is believed")
    changing = matrices(0)
    later = NativeEngine(changing, "cpu")
    later.problem(x, y, Ball("linf", 1e-9))
    with torch.no_grad():
        changing[-1].weight.neg_()
        logits = changing(x)
    changed = later.margins(later.problem(x, y, Ball("linf", 1e-9)), "crown")
    assert bool((changed <= true_margins(logits, y) + 1e-9).all()), "what was proven of a network before it changed is believed"
    with exact_arithmetic():
        with exact_arithmetic():
            pass
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee", "settings are given back while bounds are computed"

    class Rough(Affine):
        """Eleven bits in the factors, from sixteen rows on. In sums of 4,096 terms what that loses evens out, but in those of one."""

        def linear(self, x_RN: Tensor, weight: Tensor | None = None) -> Tensor:
            rough = len(x_RN) >= 16
            return super().linear(_short(x_RN) if rough else x_RN, _short(self.weight) if rough and weight is None else weight)

    weight, none = torch.randn(16, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.zeros(16).double()
    exact = Affine(weight, none, none, (4096,), (16,))
    rough = Rough(weight, none, none, (4096,), (16,), lost=5e-4, single_up=True, single_down=True)
    assert _promised(Affine(weight, none, none, (4096,), (16,), lost=5e-4, single_up=True, single_down=True), exact)
    assert not _promised(rough, exact), "kernels with fewer bits for many rows are believed"


def _short(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def _inside(values_BN: Tensor, lower_BN: Tensor, upper_BN: Tensor, what: str) -> None:
    assert bool(torch.isfinite(lower_BN).all() & torch.isfinite(upper_BN).all()), f"{what}: nothing is proven"
    noise = NOISE * values_BN.abs().amax()
    assert bool((lower_BN <= values_BN + noise).all()), f"{what}: a value below its lower bound"
    assert bool((upper_BN >= values_BN - noise).all()), f"{what}: a value above its upper bound"


def _check_point(network: nn.Sequential, norm: str) -> None:
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.bounds.native.intermediate import Rows
    from cure_ray.bounds.native.linear import best_of_slopes
    from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, interval_bounds, interval_layer, margin_rows
    from cure_ray.threats.balls import Ball

    engine = NativeEngine(network, "cpu")
    net = engine.prove
    assert net is not engine.decide, "float32 products are not used"
    x, y = torch.rand(2, 2, 14, 14, generator=torch.Generator().manual_seed(3), dtype=torch.float64), torch.arange(2)
    problem = engine.problem(x, y, Ball(norm, 1e-12))
    truth = preactivations(network, x)
    pairs = zip(interval_bounds(engine.decide, problem.domain), interval_bounds(net, problem.domain), strict=True)
    exact = [LayerBounds(e.lower_BN, e.upper_BN, b.scale_BN) for e, b in pairs]  # one point: CROWN on these is exact but for rounding
    for k in range(1, net.hidden):
        _inside(truth[k], *_ends(interval_layer(net.layers[k], exact[k - 1], net.gamma)), f"interval, layer {k}")
        far = torch.full_like(truth[k], 4 * float(truth[k].abs().max()))
        scale = interval_layer(net.layers[k], exact[k - 1], net.gamma).scale_BN
        whole, every = LayerBounds(-far, far, scale), torch.ones_like(far, dtype=torch.bool)
        relaxations = [Relaxation.of(b) for b in exact[:k]]
        rows = Rows(net, k, relaxations, whole, problem.domain)
        rows.crown(every, 1_000_000)
        _inside(truth[k], *_ends(rows.bounds), f"CROWN, layer {k}")
        rows = Rows(net, k, relaxations, whole, problem.domain)
        rows.enclose(every, 1_000_000)
        _inside(truth[k], *_ends(rows.bounds), f"enclosed, layer {k}")
        low = [Relaxation.of(b.to(torch.float32)) for b in exact[:k]]
        tried = Rows(engine.search, k, low, whole.to(torch.float32), problem.domain.to(torch.float32))
        rows = Rows(net, k, relaxations, whole, problem.domain)
        tried.optimise(every, 1_000_000, 1, rows)
        _inside(truth[k], *_ends(rows.bounds), f"optimised, layer {k}")
    C_BSK = margin_rows(y, 4, torch.float64)
    found = best_of_slopes(net, problem.domain, exact, [Relaxation.of(b) for b in exact], C_BSK)
    margins = true_margins(truth[-1], y)
    assert bool((found <= margins + NOISE * margins.abs().amax()).all()), "a margin above the true one"


def _ends(bounds: object) -> tuple[Tensor, Tensor]:
    return bounds.lower_BN, bounds.upper_BN


def _check_share() -> None:
    """What is charged covers the longest sum of a kernel in either direction, and kernels that mix sums are found out."""
    from dataclasses import replace

    from cure_ray.bounds.native.compiled import compile_network
    from cure_ray.bounds.native.single import _promised, with_single_products
    from cure_ray.networks.models import Network

    for inputs, outputs in ((3, 40), (40, 3)):
        layers = [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.Flatten(), nn.Linear(outputs * 4, 2)]
        exact = compile_network(Network(layers, (inputs, 6, 6), 2).eval(), (inputs, 6, 6)).to(torch.device("cpu"), torch.float64)
        quick = with_single_products(exact).layers[0]
        unit = (25 * 40 + 2) * 2.0**-24
        assert quick.lost >= unit / (1 - unit), "less is charged than a product in float32 may lose"
        assert not quick.single_up, "the first layer is read in float32"
        assert not _promised(replace(quick, weight=quick.weight + 1e-3), exact.layers[0]), "a wrong kernel was believed"


def _check_matrices() -> None:
    """The same for matrices, of which the last is read as it is, and long sums are left to float64."""
    from dataclasses import replace

    from cure_ray.bounds.native.compiled import compile_network
    from cure_ray.bounds.native.single import _promised, with_single_products
    from cure_ray.networks.models import Network

    for inputs, outputs in ((40, 500), (500, 40)):
        maps = [nn.Linear(inputs, outputs), nn.Linear(outputs, inputs), nn.Linear(inputs, 600)]
        layers = [nn.Flatten(), maps[0], nn.ReLU(), maps[1], nn.ReLU(), maps[2]]
        exact = compile_network(Network(layers, (1, 1, inputs), 600).eval(), (1, 1, inputs)).to(torch.device("cpu"), torch.float64)
        quick = with_single_products(exact).layers
        unit = (500 + 2) * 2.0**-24
        for layer in quick[:2]:
            least = unit / (1 - unit) / (1 - unit)  # of magnitudes that are multiplied in float32 themselves
            assert layer.lost >= least, "less is charged than a product in float32 may lose"
        assert not any(layer.single_up for layer in quick), "intervals of a matrix, or the image, are read in float32"
        assert [layer.single_down for layer in quick] == [True, True, False], "the last layer is read in float32"
        assert not _promised(replace(quick[1], weight=quick[1].weight + 1e-3, cache={}), exact.layers[1]), "a wrong matrix was believed"
    for long in (2**13 + 1, 2**13):
        layers = [nn.Flatten(), nn.Linear(9, long), nn.ReLU(), nn.Linear(long, 9), nn.ReLU(), nn.Linear(9, 2)]
        exact = compile_network(Network(layers, (1, 3, 3), 2).eval(), (1, 3, 3)).to(torch.device("cpu"), torch.float64)
        quick = with_single_products(exact)
        assert (quick is exact) == (long > 2**13), "a sum that is too long for its charge"
    rounded = replace(quick.layers[1], cache={"W": quick.layers[1].weight.bfloat16().float()})
    assert not _promised(rounded, exact.layers[1]), "numbers of fewer bits were believed"


def _check_parts() -> None:
    """A batch whose margins walk down in parts has those of the whole."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.threats.balls import Ball

    x, y = torch.rand(5, 2, 14, 14, generator=torch.Generator().manual_seed(4)), torch.tensor([0, 1, 2, 3, 0])
    for network, norm in ((matrices(2), "linf"), (convolutions(2), "l1")):
        engine = NativeEngine(network, "cpu")
        problem = engine.problem(x, y, Ball(norm, 0.01))
        whole = engine.margins(problem, "crown-ibp")
        engine._together = lambda *_: 2
        torch.testing.assert_close(engine.margins(problem, "crown-ibp"), whole, rtol=1e-5, atol=1e-6)
