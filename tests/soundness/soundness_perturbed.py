"""One compact check that transformations and patches are certified soundly: windows, and both searches.

Networks are planted that one place of the threat breaks. Imports of cure_ray happen inside the functions: the mutation test runs them
against altered copies of the package.
"""

import itertools
import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import torch
from soundness_images import check_images, reference
from soundness_networks import designed_network, tied_network
from soundness_points import preactivations, true_margins
from soundness_sloped import check_sloped
from torch import Tensor, nn


def _patched(x: Tensor, corner: tuple[int, int], height: int, width: int, fill: Tensor) -> Tensor:
    image = x.double().clone()
    image[..., corner[0] : corner[0] + height, corner[1] : corner[1] + width] = fill
    return image


def check_windows() -> None:
    """Windows give the bounds of whole images, at every position; the bound for all positions together is below each."""
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification.boxes import BoxDomain
    from cure_ray.certification.windows import anywhere_margins, clean_pass, patch_margins, positions
    from cure_ray.threats.balls import Ball
    from cure_ray.threats.box import UNIT

    g = torch.Generator().manual_seed(0)
    torch.manual_seed(3)
    flat_case = SimpleNamespace(
        network=_mlp(nn.Linear(20, 6), nn.Linear(6, 5), nn.Linear(5, 3)), x=torch.rand(3, 1, 4, 5), y=torch.arange(3)
    )
    cases = [(designed_network(0), 2, 3), (designed_network(0), 3, 2), (designed_network(1), 1, 1), (flat_case, 2, 2), (flat_case, 1, 3)]
    cases += [(gappy_network(), height, width) for height, width in ((1, 1), (2, 3), (3, 1))]
    for case, height, width in cases:
        engine = NativeEngine(case.network, "cpu")
        H, W = case.x.shape[2:]
        places = positions((H, W), height, width)
        assert sorted(places) == [(i, j) for i in range(H - height + 1) for j in range(W - width + 1)]
        clean = clean_pass(engine.decide, flatten_images(case.x.double()), case.y)
        together = anywhere_margins(clean, height, width)
        assert torch.allclose(together, _anywhere(case.network, case.x, case.y, height, width), rtol=1e-7, atol=1e-7), "all positions"
        for corner in places:
            found = patch_margins(clean, corner, height, width)
            low, high = (flatten_images(_patched(case.x, corner, height, width, torch.tensor(v).double())) for v in (0.0, 1.0))
            domain = BoxDomain(low, torch.zeros_like(low), high - low, Ball("linf", 1.0), UNIT)
            assert torch.allclose(found, engine._crown(engine.decide, domain, case.y, "ibp"), rtol=1e-9, atol=1e-7), corner
            fill = torch.rand(len(case.x), case.x.shape[1], height, width, generator=g, dtype=torch.float64).round()
            logits = preactivations(case.network, _patched(case.x, corner, height, width, fill))[-1]
            assert (found <= true_margins(logits, case.y) + 1e-9).all(), f"above a patched image at {corner}"
            assert (together <= found + 1e-9).all(), f"all positions together: above {corner}"
    for seed in range(6):  # a pixel nobody reads, and logits that tie: any positive claim is rounding
        network = tied_network(seed)
        with torch.no_grad():
            network[1].weight[:, 0] = 0
        engine, x = NativeEngine(network, "cpu"), torch.rand(16, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
        clean = clean_pass(engine.decide, flatten_images(x.double()), torch.arange(16) % 2)
        assert not (patch_margins(clean, (0, 0), 1, 1) > 0).any(), "certified an exact tie"


def _anywhere(network: nn.Sequential, x: Tensor, y: Tensor, height: int, width: int) -> Tensor:
    """All positions together, from the modules: each neuron of the first layer moves by the heaviest window a patch can cover."""
    from cure_ray.bounds.native.compiled import compile_network, flatten_images
    from cure_ray.bounds.native.relaxation import margin_rows

    layers = compile_network(network, tuple(x.shape[1:])).to(torch.device("cpu"), torch.float64).layers
    first, weight = layers[0], layers[0].weight.abs()
    c = first(flatten_images(x.double()))
    maps = weight if first.is_conv else weight.view(-1, *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
    tall, wide = min(height, maps.shape[2]), min(width, maps.shape[3])
    corners = itertools.product(range(maps.shape[2] - tall + 1), range(maps.shape[3] - wide + 1))
    heavy = torch.stack([maps[:, :, i : i + tall, j : j + wide].sum((1, 2, 3)) for i, j in corners]).amax(0)
    r = (heavy.repeat(c.shape[1] // len(heavy)) if first.is_conv else heavy).expand_as(c)
    for layer in layers[1:]:
        low, high = (c - r).clamp_min(0), (c + r).clamp_min(0)
        if layer is layers[-1]:
            break
        c, r = layer((low + high) / 2), layer.linear((high - low) / 2, layer.weight.abs())
    rows = margin_rows(y, network.num_classes, torch.float64)
    A = rows @ layers[-1].weight
    return torch.einsum("bsn,bn->bs", A.clamp_min(0), low) + torch.einsum("bsn,bn->bs", A.clamp_max(0), high) + rows @ layers[-1].bias_N


def check_window_rounding() -> None:
    """First layers of patched images in rational arithmetic, without tolerance, where large terms cancel."""
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification import windows
    from cure_ray.networks.models import Network

    torch.manual_seed(6)
    x = torch.rand(1, 1, 4, 5, dtype=torch.float64)
    dense, conv = nn.Linear(20, 40).double(), nn.Conv2d(1, 12, 3, 1, 1).double()
    with torch.no_grad():
        dense.weight.mul_(1000)
        dense.bias.copy_(-(dense.weight @ x.flatten()))
        conv.weight.mul_(1000)
        conv.bias.copy_(-conv(x)[0, :, 1, 1] + conv.bias)
    tail = [nn.Linear(40, 2).double()], [nn.Flatten(), nn.Linear(240, 4).double(), nn.ReLU(), nn.Linear(4, 2).double()]
    for first, rest in ((dense, tail[0]), (conv, tail[1])):
        layers = [nn.Flatten(), first, nn.ReLU(), *rest] if first is dense else [first, nn.ReLU(), *rest]
        engine = NativeEngine(Network(layers, (1, 4, 5), 2).eval(), "cpu")
        clean = windows.clean_pass(engine.decide, flatten_images(x), torch.tensor([0]))
        half = torch.full((1, 2, 1, 1), 0.5, dtype=torch.float64)
        window = windows._Window(half, half, (1, 3), (2, 3))
        if first is dense:
            c, r = windows._into_dense(clean.layers[0], window)
            found = [(float(c[0, i] - r[0, i]), float(c[0, i] + r[0, i]), i, None) for i in range(40)]
        else:
            out = windows._through_convolution(clean.layers[0], window)
            places = itertools.product(range(*out.rows), range(*out.columns), range(12))
            ends = zip((out.c - out.r).flatten().tolist(), (out.c + out.r).flatten().tolist(), places, strict=True)
            found = [(low, high, k, (i, j)) for low, high, (i, j, k) in ends]
        for low, high, neuron, place in found:
            least, most = _exact_ends(first, neuron, place, x[0, 0].tolist())
            assert Fraction(low) <= max(least, Fraction(0)) * (1 + Fraction(1, 2**50)), "a patched neuron goes below its bound"
            assert Fraction(high) >= max(most, Fraction(0)) * (1 - Fraction(1, 2**50)), "a patched neuron goes above its bound"


def check_carried_rounding() -> None:
    """Rounding of clean activations reaches the next layer's bounds: in a first layer whose large terms leave almost nothing."""
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification import windows
    from cure_ray.networks.models import Network

    torch.manual_seed(7)
    conv, dense, last = nn.Conv2d(1, 4, 3).double(), nn.Linear(24, 16).double(), nn.Linear(16, 2).double()
    x = 1 - 1e-12 * torch.rand(1, 1, 4, 5, dtype=torch.float64)
    with torch.no_grad():
        conv.weight.copy_(1000 * torch.rand(4, 1, 3, 3))
        conv.bias.copy_(1e-6 - conv.weight.sum((1, 2, 3)))
        dense.weight[:, ::6] = 0  # the outputs the patch reaches, whose own slack would hide it
        dense.bias.copy_(-(dense.weight @ conv(x).relu().flatten()))
    engine = NativeEngine(Network([conv, nn.ReLU(), nn.Flatten(), dense, nn.ReLU(), last], (1, 4, 5), 2).eval(), "cpu")
    clean = windows.clean_pass(engine.decide, flatten_images(x), torch.tensor([0]))
    half = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    through = windows._through_convolution(clean.layers[0], windows._Window(half, half, (0, 1), (0, 1)))
    c, r = windows._into_dense(clean.layers[1], through)
    pixels, weight, bias = x[0, 0].tolist(), conv.weight.detach()[:, 0].tolist(), conv.bias.tolist()
    ends = []  # of every activation, channels first
    for k, i, j in itertools.product(range(4), range(2), range(3)):
        least = most = Fraction(bias[k])
        for a, b in itertools.product(range(3), range(3)):
            w, patched = Fraction(weight[k][a][b]), (i + a, j + b) == (0, 0)
            least += min(w, Fraction(0)) if patched else w * Fraction(pixels[i + a][j + b])
            most += max(w, Fraction(0)) if patched else w * Fraction(pixels[i + a][j + b])
        ends.append((max(least, Fraction(0)), max(most, Fraction(0))))
    for neuron, (row, constant) in enumerate(zip(dense.weight.tolist(), dense.bias.tolist(), strict=True)):
        terms = [(Fraction(w) * low, Fraction(w) * high) for w, (low, high) in zip(row, ends, strict=True)]
        least, most = (max(Fraction(constant) + sum(map(pick, terms)), Fraction(0)) for pick in (min, max))
        assert Fraction(float(c[0, neuron] - r[0, neuron])) <= least * (1 + Fraction(1, 2**50)), "an error of clean activations was lost"
        assert Fraction(float(c[0, neuron] + r[0, neuron])) >= most * (1 - Fraction(1, 2**50)), "an error of clean activations was lost"


def _exact_ends(layer: nn.Module, neuron: int, place: tuple[int, int] | None, pixels: list[list[float]]) -> tuple[Fraction, Fraction]:
    """The smallest and largest value of a neuron while the pixels of rows 1 and 2, column 2 take any value in [0, 1]."""
    least = most = Fraction(layer.bias[neuron].item())
    for i, j in itertools.product(range(4), range(5)):
        if place is None:
            w = layer.weight[neuron, 5 * i + j].item()
        else:
            a, b = i - place[0] + 1, j - place[1] + 1
            w = layer.weight[neuron, 0, a, b].item() if 0 <= a < 3 and 0 <= b < 3 else 0.0
        free = i in (1, 2) and j == 2
        least += min(Fraction(w), Fraction(0)) if free else Fraction(w) * Fraction(pixels[i][j])
        most += max(Fraction(w), Fraction(0)) if free else Fraction(w) * Fraction(pixels[i][j])
    return least, most


def gappy_network() -> SimpleNamespace:
    """Strides longer than the kernels, and different ones: some pixels no output reads, and windows that only partly matter."""
    from cure_ray.networks.models import Network

    torch.manual_seed(4)
    layers = [nn.Conv2d(1, 2, (2, 1), (3, 2)), nn.ReLU(), nn.Conv2d(2, 3, (1, 2), (1, 2), (0, 1)), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(3 * 2 * 3, 5), nn.ReLU(), nn.Linear(5, 3)]
    network = Network(layers, (1, 7, 8), 3).eval()
    return SimpleNamespace(network=network, x=torch.rand(3, 1, 7, 8), y=torch.arange(3))


def _mlp(*layers: nn.Linear) -> nn.Sequential:
    """Linear layers with ReLUs between, on 4 x 5 images."""
    from cure_ray.networks.models import Network

    between = [part for layer in layers for part in (layer, nn.ReLU())][:-1]
    return Network([nn.Flatten(), *between], (1, 4, 5), layers[-1].out_features).eval()


def detector(
    shape: tuple[int, int], pixels: list[int], threshold: float, weight: float = 20.0, guards: list[int] | None = None
) -> nn.Sequential:
    """Class 0 by half a unit, unless one of the pixels is brighter than the threshold (and its guard pixel is dark)."""
    from cure_ray.networks.models import Network

    first, last = nn.Linear(shape[0] * shape[1], len(pixels)), nn.Linear(len(pixels), 2)
    with torch.no_grad():
        first.weight.zero_()
        for i, pixel in enumerate(pixels):
            first.weight[i, pixel] = 1.0
            if guards is not None:
                first.weight[i, guards[i]] = -1.0
        first.bias.fill_(-threshold)
        last.weight[0], last.weight[1] = 0.0, weight
        last.bias.copy_(torch.tensor([0.5, 0.0]))
    return Network([nn.Flatten(), first, nn.ReLU(), last], (1, *shape), 2).eval().requires_grad_(False)


def convolutional_detector() -> nn.Sequential:
    """The same for the top left pixel of each 2 x 2 block, by a convolution."""
    from cure_ray.networks.models import Network

    first, second, last = nn.Conv2d(1, 1, 2, 2), nn.Linear(4, 1), nn.Linear(1, 2)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]))
        first.bias.fill_(-0.5)
        second.weight.fill_(1.0)
        second.bias.zero_()
        last.weight.copy_(torch.tensor([[0.0], [20.0]]))
        last.bias.copy_(torch.tensor([0.5, 0.0]))
    layers = [first, nn.ReLU(), nn.Flatten(), second, nn.ReLU(), last]
    return Network(layers, (1, 4, 4), 2).eval().requires_grad_(False)


def check_patch() -> None:
    """A network that one pixel breaks is not certified wherever that pixel is; what cannot be broken is; witnesses are real."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification import patches as patch
    from cure_ray.certification.bundle import Alarm
    from cure_ray.errors import SoundnessError

    y, dark = torch.zeros(4, dtype=torch.long), torch.zeros(1, 4, 4)
    for pixel in range(16):
        pixels, guards = [pixel, (pixel + 7) % 16], [(pixel + 5) % 16, (pixel + 10) % 16]
        network = detector((4, 4), pixels, 0.5, guards=guards)
        x = dark.repeat(4, 1, 1, 1)
        flat = x.view(4, 16)
        flat[0, guards[1]] = flat[1, guards[0]] = flat[2, guards[0]] = flat[2, guards[1]] = flat[3, guards[0]] = flat[3, guards[1]] = 1.0
        engine = NativeEngine(network, "cpu")
        for precheck in (False, True):
            settings = patch.PatchSettings(attack=False, precheck=precheck, check_every=3)
            found = patch.certify_patch(engine, network, x, y, patch.Patch(1, 1), settings)
            assert [str(o.status) for o in found] == ["unknown", "unknown", "certified", "certified"], f"pixel {pixel}"
            assert all(bool((o.margins > 0).all()) and float(o.margins.min()) <= 0.5 for o in found[2:])
        for outcome, image in zip(patch.certify_patch(engine, network, x, y, patch.Patch(1, 1)), x, strict=True):
            _check_witness(network, outcome, (outcome.witness - image).abs().flatten().nonzero() if outcome.witness is not None else None)
    network = convolutional_detector()
    for precheck in (False, True):
        settings = patch.PatchSettings(attack=False, precheck=precheck)
        (outcome,) = patch.certify_patch(NativeEngine(network, "cpu"), network, dark[None], y[:1], patch.Patch(1, 1), settings)
        assert str(outcome.status) == "unknown"
    network = detector((4, 4), [3], 0.5, 0.9)  # a patch lowers the margin to 0.05 and no further
    engine, x = NativeEngine(network, "cpu"), dark[None]
    (honest,) = patch.certify_patch(engine, network, x, y[:1], patch.Patch(1, 1), patch.PatchSettings(precheck=True))
    assert str(honest.status) == "certified"
    assert float(honest.margins.min()) <= 0.05 + 1e-6
    for seed in range(4):  # the attack before the proof finds the worst patch; the one after it need not
        (honest,) = patch.certify_patch(engine, network, x, y[:1], patch.Patch(1, 1), alarm=Alarm(engine, network, seed=seed))
        assert abs(honest.attack_margin - 0.05) < 1e-6, "the smaller of two margins is kept"
    with _lying(patch, "patch_margins", 0.01), tempfile.TemporaryDirectory() as folder:
        alarm = Alarm(engine, network, root=Path(folder))
        _expect(SoundnessError, lambda: patch.certify_patch(engine, network, x, y[:1], patch.Patch(1, 1), alarm=alarm))
    everywhere = detector((4, 4), list(range(16)), 0.5, 0.9)  # the same by a patch at any position; no attack comes before the proof
    engine, unattacked = NativeEngine(everywhere, "cpu"), patch.PatchSettings(attack=False)
    (honest,) = patch.certify_patch(engine, everywhere, x, y[:1], patch.Patch(1, 1), unattacked)
    assert str(honest.status) == "certified"
    assert abs(honest.attack_margin - 0.05) < 1e-6, "the attack after the certificate did not find the worst patch"
    with _lying(patch, "patch_margins", 0.01), tempfile.TemporaryDirectory() as folder:
        alarm = Alarm(engine, everywhere, root=Path(folder))
        _expect(SoundnessError, lambda: patch.certify_patch(engine, everywhere, x, y[:1], patch.Patch(1, 1), unattacked, alarm=alarm))


def _check_witness(network: nn.Sequential, outcome: object, changed: Tensor | None) -> None:
    if str(outcome.status) == "falsified":
        assert preactivations(network, outcome.witness[None])[-1].argmax(1).item() != outcome.label, "a witness that is no witness"
        assert ((outcome.witness >= 0) & (outcome.witness <= 1)).all()
        assert changed is None or len(changed) <= 1
    else:
        assert str(outcome.status) == "certified"


class _lying:  # noqa: N801 - reads like a sentence where it is used
    """A bound that is too high by so much, while this is entered."""

    def __init__(self, module: object, name: str, by: float) -> None:
        self.module, self.name, self.by, self.real = module, name, by, getattr(module, name)

    def __enter__(self) -> None:
        setattr(self.module, self.name, lambda *given: self.real(*given) + self.by)

    def __exit__(self, *rest: object) -> None:
        setattr(self.module, self.name, self.real)


def _expect(kind: type[Exception], run: object) -> None:
    try:
        run()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def check_cells() -> None:
    """A range cut in halves again and again ends in every leaf, once, and leaves share their edges."""
    from cure_ray.certification.cells import batches, middle, partition, split, starting_cells
    from cure_ray.threats.transformations import Cell, cell_at, parse_transformation

    transformation = parse_transformation("Sc(5),R(40),B(0.01)", widths=(0.02, 3.0, 0.01))
    whole = sorted(itertools.product(*([(i, i + 1) for i in range(count)] for count in transformation.cells)))
    ways = [starting_cells(transformation, 9, 9), starting_cells(transformation, 9, 9, limit=5), starting_cells(transformation, 9, 9, 0.1)]
    for cells in [*ways, *(partition(transformation, 9, 9, count) for count in (1, 10, 10_000))]:
        leaves = []
        while cells:
            cell = cells.pop()
            if cell.is_leaf:
                leaves.append(cell)
            else:
                cells += split(transformation, cell, 9, 9)
        assert sorted(leaf.spans for leaf in leaves) == whole
    for leaf in leaves:
        point, reach = middle(leaf, transformation)
        assert cell_at(transformation, point) == leaf
        assert all(
            abs(t - r - low) < 1e-12 and abs(t + r - high) < 1e-12
            for t, r, (low, high) in zip(point, reach, leaf.ranges(transformation), strict=True)
        )
    corner = tuple(step.high for step in transformation.steps)
    assert cell_at(transformation, corner).spans == tuple((n - 1, n) for n in transformation.cells)
    assert cell_at(transformation, tuple(step.low for step in transformation.steps)).spans == ((0, 1),) * 3
    assert cell_at(parse_transformation("R(0)"), (0.0,)).spans == ((0, 1),)
    assert Cell(((2, 5), (1, 3))).leaves == 6
    assert len(partition(transformation, 9, 9, 10)) == 10
    assert [c.leaves for c in partition(transformation, 9, 9, 1)] == [len(whole)]
    items = [(Cell(((i, i + 1),)), list(range(size))) for i, size in enumerate((3, 4, 1, 9, 2))]
    assert [[len(images) for _, images in part] for part in batches(items, 8)] == [[3, 4, 1], [9], [2]]
    assert [item for part in batches(items, 8) for item in part] == items
    near, far = split(transformation, Cell(((0, 5), (0, 2), (0, 1))), 9, 9)  # the parameter that moves pixels most, identity side first
    assert {near.spans[1], far.spans[1]} != {(0, 2)} or {near.spans[0], far.spans[0]} == {(0, 2), (2, 5)}
    for axis, step in enumerate(transformation.steps):
        edges = sorted({end for leaf in leaves for end in leaf.ranges(transformation)[axis]})
        assert len(edges) == transformation.cells[axis] + 1
        assert (edges[0], edges[-1]) == (step.low, step.high)


def check_geometric() -> None:
    """A network that one narrow part of the range breaks is not certified, wherever that part is; margins hold at every parameter."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification import transformations as geometric
    from cure_ray.certification.bundle import Alarm
    from cure_ray.errors import SoundnessError
    from cure_ray.threats.transformations import parse_transformation

    dot, centre = torch.zeros(1, 9, 9), torch.zeros(1, 9, 9)
    dot[0, 4, 8], centre[0, 4, 4] = 1.0, 1.0
    x, y = torch.stack([dot, dot, centre, centre]), torch.zeros(4, dtype=torch.long)
    turn = parse_transformation("R(40)", widths=(2.5,))
    low, high = turn.steps[0].low, turn.steps[0].high
    angles = [low + (high - low) * k / 160 for k in range(161)]
    seen = torch.stack([reference(["R"], [a], dot[None]).flatten() for a in angles])  # [angles, pixels]
    bright = [p for p in range(81) if float(seen[:, p].max()) > 0.4 and p != 44]  # where it is without any turn
    assert len(bright) >= 5
    plain = geometric.GeometricSettings(attack=False)
    for pixel in bright:
        network = detector((9, 9), [pixel], float(seen[:, pixel].max()) - 0.03, 100.0)
        engine = NativeEngine(network, "cpu")
        for settings in (plain, geometric.GeometricSettings(("ibp", "crown-ibp"), attack=False)):
            found = geometric.certify_geometric(engine, network, x, y, turn, settings)
            assert [str(o.status) for o in found] == ["unknown", "unknown", "certified", "certified"], f"pixel {pixel}"
        for outcome in geometric.certify_geometric(engine, network, x, y, turn):
            if str(outcome.status) != "unknown":
                _check_witness(network, outcome, None)
        mild = detector((9, 9), [pixel], 0.2, 0.4)
        engine = NativeEngine(mild, "cpu")
        worst = 0.5 - 0.4 * float((seen[:, pixel].max() - 0.2).clamp_min(0))
        for settings in (plain, geometric.GeometricSettings(("ibp", "crown-ibp"))):
            for outcome in geometric.certify_geometric(engine, mild, x[:1], y[:1], turn, settings):
                assert str(outcome.status) == "certified"
                assert 0 < float(outcome.margins.min()) <= worst + 1e-6, "a margin above that of some angle"
                ends = min(0.5 - 0.4 * max(float(seen[k, pixel]) - 0.2, 0.0) for k in (0, -1))
                assert worst - 0.02 <= outcome.attack_margin, "below the margin of every angle"
                assert not settings.attack or outcome.attack_margin <= ends + 1e-6, "the smallest margin that was seen is kept"
    shift = parse_transformation("Tu(1),Tv(1)", widths=(0.25, 0.25))
    for row, column in itertools.product((3, 4, 5), repeat=2):  # the dot of the centre reaches each neighbour at one corner of the range
        network = detector((9, 9), [9 * row + column], 0.97, 100.0)
        if (row, column) != (4, 4):
            (outcome,) = geometric.certify_geometric(NativeEngine(network, "cpu"), network, centre[None], y[:1], shift, plain)
            assert str(outcome.status) == "unknown", f"shifted to {row}, {column}"
    cancelling = detector((9, 9), [bright[0]] * 2, -0.1)
    with torch.no_grad():
        cancelling[3].weight[1, 1] = -20.0  # the two cancel, which linear bounds see and intervals do not
    settings = geometric.GeometricSettings(("ibp", "crown-ibp"), attack=False)
    (outcome,) = geometric.certify_geometric(NativeEngine(cancelling, "cpu"), cancelling, x[:1], y[:1], turn, settings)
    assert (str(outcome.status), outcome.stage) == ("certified", "crown-ibp")
    assert bool((outcome.margins > 0).all()), "a certificate with a margin that is not positive"
    engine = NativeEngine(mild, "cpu")
    with _lying(geometric, "box_margins", 0.5), tempfile.TemporaryDirectory() as folder:
        alarm = Alarm(engine, mild, root=Path(folder))
        _expect(SoundnessError, lambda: geometric.certify_geometric(engine, mild, x[:1], y[:1], turn, plain, alarm=alarm))


def check_perturbed() -> None:
    """Everything here and below: used on every mutant of the modules it covers."""
    check_images()
    check_sloped()
    check_windows()
    check_window_rounding()
    check_carried_rounding()
    check_patch()
    check_cells()
    check_geometric()
