"""One compact check of interval images and of bounds over boxes: what transformations are certified by.

The judge transforms images by the definition of bilinear interpolation. Imports of cure_ray happen inside the functions: the mutation
test runs them against altered copies of the package.
"""

import itertools
from fractions import Fraction

import torch
from soundness_networks import designed_network, tied_network
from soundness_points import preactivations, true_margins
from torch import Tensor, nn

COMPOSED = ("R(20)", "Tu(2),Tv(1)", "Sc(20),R(10),C(10),B(0.05)", "Sh(10),R(15),Sc(5),C(5)", "R(8),Tu(1),Sh(5),Tv(1),Sc(9)", "C(30),B(0.2)")
TOLERANCE = 1e-12


def reference(kinds: list[str], parameters: list[float], x_BCHW: Tensor) -> Tensor:
    """The transformed images by definition, float64: where each output pixel came from, bilinear weights, zero outside."""
    B, C, H, W = x_BCHW.shape
    X = (torch.arange(W, dtype=torch.float64) - (W - 1) / 2).repeat(H)
    Y = ((H - 1) / 2 - torch.arange(H, dtype=torch.float64)).repeat_interleave(W)
    for kind, t in reversed([p for p in zip(kinds, parameters, strict=True) if p[0] not in "CB"]):
        a = torch.tensor(t, dtype=torch.float64)
        if kind == "R":
            X, Y = X * a.cos() + Y * a.sin(), -X * a.sin() + Y * a.cos()
        elif kind == "Tu":
            X = X - a
        elif kind == "Tv":
            Y = Y - a
        elif kind == "Sc":
            X, Y = X / a, Y / a
        elif kind == "Sh":
            X = X - Y * a
    column, row = X + (W - 1) / 2, (H - 1) / 2 - Y
    wx = (1 - (column[:, None] - torch.arange(W)).abs()).clamp_min(0)
    wy = (1 - (row[:, None] - torch.arange(H)).abs()).clamp_min(0)
    image = torch.einsum("ph,pw,bchw->bcp", wy, wx, x_BCHW.double()).view(B, C, H, W).clamp(0, 1)
    for kind, t in zip(kinds, parameters, strict=True):
        image = (image * t).clamp(0, 1) if kind == "C" else (image + t).clamp(0, 1) if kind == "B" else image
    return image


def check_interval_images() -> None:
    """Every transformed image lies in the interval image of every box around its parameters; a point's interval is the point."""
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.threats.transformations import parse_transformation
    from cure_ray.threats.warps import build_warps, pixel_columns, rows_of, transformed

    g = torch.Generator().manual_seed(0)
    x = torch.rand(2, 2, 7, 6, generator=g)
    assert torch.equal(rows_of(pixel_columns(x).flatten(1), 2), flatten_images(x.double())), "the engine's order of pixels"
    for text in COMPOSED:
        steps = parse_transformation(text).steps
        kinds, unit = [s.kind for s in steps], torch.rand(3, len(steps), 2, generator=g).sort(-1).values.tolist()
        unit.append([[0.0, 1.0]] * len(steps))
        for share in unit:
            ranges = [(s.low + (s.high - s.low) * a, s.low + (s.high - s.low) * b) for s, (a, b) in zip(steps, share, strict=True)]
            (warp,) = build_warps(steps, [ranges], 7, 6, torch.device("cpu"))
            low, high = (t.view(7, 6, 2, 2).permute(2, 3, 0, 1) for t in warp.apply(pixel_columns(x).flatten(1)))
            corners = list(itertools.islice(itertools.product(*ranges), 16))
            inside = torch.rand(12, len(steps), generator=g, dtype=torch.float64).tolist()
            for point in [*corners, *([a + (b - a) * u for (a, b), u in zip(ranges, row, strict=True)] for row in inside)]:
                image = reference(kinds, list(point), x)
                assert (low <= image + TOLERANCE).all(), f"{text}: an image below its interval"
                assert (image <= high + TOLERANCE).all(), f"{text}: an image above its interval"
        middle = [(a + b) / 2 for a, b in ranges]
        (warp,) = build_warps(steps, [[(t, t) for t in middle]], 7, 6, torch.device("cpu"))
        low, high = warp.apply(pixel_columns(x).flatten(1))
        assert float((high - low).max()) < 1e-9, f"{text}: the interval of a point"
        assert float((transformed(steps, middle, x) - reference(kinds, middle, x)).abs().max()) < 1e-12, text


def check_rounding_of_images() -> None:
    """A shift by a float64 number, computed exactly in rationals, lies in the interval image of that one number."""
    from cure_ray.threats.transformations import parse_transformation
    from cure_ray.threats.warps import build_warps, pixel_columns

    x = torch.rand(1, 1, 1, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pixels = [Fraction(v) for v in x.flatten().tolist()]
    steps = parse_transformation("Tu(2)").steps
    for t in (0.1, 0.7, -0.3, 1.9, 1 / 3):
        (warp,) = build_warps(steps, [[(t, t)]], 1, 6, torch.device("cpu"))
        low, high = warp.apply(pixel_columns(x).flatten(1))
        for j in range(6):
            exact = sum(max(Fraction(0), 1 - abs(Fraction(j) - Fraction(t) - k)) * v for k, v in enumerate(pixels))
            assert Fraction(float(low[j])) <= exact <= Fraction(float(high[j])), "rounding left the interval"


def check_boxes() -> None:
    """Margins over boxes are below those of their points; what counts as proven is finite and positive everywhere."""
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification.boxes import box_margins, proven, separate_margins

    case, g = designed_network(0), torch.Generator().manual_seed(0)
    engine = NativeEngine(case.network, "cpu")
    for radius in (0.0, 0.02, 0.3):
        noise = radius * torch.rand(case.x.shape, generator=g, dtype=torch.float64)
        low, high = (case.x.double() - noise).clamp(0, 1), (case.x.double() + noise).clamp(0, 1)
        unit = torch.rand(24, *case.x.shape, generator=g, dtype=torch.float64)
        unit[:16] = unit[:16].round()
        images = low + (high - low) * unit
        attained = torch.stack([true_margins(preactivations(case.network, z)[-1], case.y) for z in images]).amin(0)
        flat = flatten_images(low), flatten_images(high)
        for stage in ("ibp", "crown-ibp"):
            margins = box_margins(engine, *flat, case.y, stage)
            slack = torch.where(proven(margins), 1e-9, 1e-4).unsqueeze(1)
            assert (margins <= attained + slack).all(), f"{stage}: above a point of the box"
        separate = separate_margins(engine, *flat, case.y)
        assert (separate <= attained + 1e-9).all(), "separate logits: above a point of the box"
        if radius == 0:
            assert torch.allclose(separate, attained, atol=1e-6)
    rows = [[1.0, torch.inf], [1.0, 0.0], [1.0, -1.0], [1.0, torch.nan], [torch.inf, torch.inf], [1e-300, 1.0]]
    assert proven(torch.tensor(rows, dtype=torch.float64)).tolist() == [False, False, False, False, False, True]
    for wrong in (torch.nan, torch.inf):
        for end in (0, 1):
            ends = [flat[0].clone(), flat[1].clone()]
            ends[end][1, 3] = wrong * (2 * end - 1)
            assert proven(box_margins(engine, *ends, case.y, "ibp")).tolist()[1] is False, "a box without finite ends is proven"
    _check_exact_boxes()
    for seed in range(2):  # logits that tie exactly: any positive claim is rounding
        tied = NativeEngine(tied_network(seed), "cpu")
        x = torch.rand(16, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for margins in (box_margins(tied, x, x, torch.arange(16) % 2, "ibp"), separate_margins(tied, x, x, torch.arange(16) % 2)):
            assert not (margins > 0).any(), "certified an exact tie"


def _check_exact_boxes() -> None:
    """Without a hidden layer interval bounds are exact, of the differences and of single logits."""
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification.boxes import box_margins, separate_margins
    from cure_ray.networks.models import Network

    torch.manual_seed(5)
    last = nn.Linear(12, 3)
    engine = NativeEngine(Network([nn.Flatten(), last], (1, 3, 4), 3).eval(), "cpu")
    low, high = torch.rand(2, 5, 12, dtype=torch.float64).sort(0).values
    W, b, y = last.weight.detach().double(), last.bias.detach().double(), torch.arange(5) % 3

    def least(rows_BSN: Tensor) -> Tensor:
        return torch.einsum("bsn,bn->bs", rows_BSN.clamp_min(0), low) + torch.einsum("bsn,bn->bs", rows_BSN.clamp_max(0), high)

    others = torch.tensor([[i for i in range(3) if i != label] for label in y.tolist()])
    differences = least(W[y].unsqueeze(1) - W[others]) + b[y].unsqueeze(1) - b[others]
    single = least(W[y].unsqueeze(1)) + b[y].unsqueeze(1) + least(-W[others]) - b[others]
    assert torch.allclose(box_margins(engine, low, high, y, "ibp"), differences, atol=1e-5)
    assert torch.allclose(separate_margins(engine, low, high, y), single, atol=1e-9)


def check_images() -> None:
    """Everything here."""
    check_interval_images()
    check_rounding_of_images()
    check_boxes()
