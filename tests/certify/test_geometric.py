import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification import transformations as geometric
from cure_ray.certification.boxes import BoxDomain, box_margins, proven, separate_margins
from cure_ray.certification.bundle import Alarm
from cure_ray.certification.cells import starting_cells
from cure_ray.certification.transformations import GeometricSettings, certify_geometric
from cure_ray.certification.transformed import TransformedImages
from cure_ray.certification.verdict import Status
from cure_ray.errors import SoundnessError, UserError
from cure_ray.networks.models import Network
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT
from cure_ray.threats.transformations import Cell, Transformation, parse_transformation
from cure_ray.threats.warps import build_warps, pixel_columns, rows_of, transformed
from tests.certify.perturbation_tools import digits_network

COMPOSED = [
    "R(20)",
    "Tu(2),Tv(1)",
    "Sc(20),R(10),C(10),B(0.05)",
    "Sh(10),R(5),Sc(5),C(5),B(0.01)",
    "R(8),Tu(1),Sh(5),Tv(1),Sc(9)",
    "C(30),B(0.2)",
]
CPU = torch.device("cpu")


def images(count: int, channels: int = 1, height: int = 9, width: int = 9) -> Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(3))


def interval(transformation: Transformation, ranges: list[tuple[float, float]], x: Tensor) -> tuple[Tensor, Tensor]:
    (warp,) = build_warps(transformation.steps, [ranges], x.shape[2], x.shape[3], CPU)
    low, high = warp.apply(pixel_columns(x).flatten(1))
    shape = (x.shape[2], x.shape[3], x.shape[0], x.shape[1])
    return low.view(shape).permute(2, 3, 0, 1), high.view(shape).permute(2, 3, 0, 1)


def random_ranges(transformation: Transformation, seed: int, share: float) -> list[tuple[float, float]]:
    rng = torch.Generator().manual_seed(seed)
    out = []
    for step in transformation.steps:
        extent = step.high - step.low
        width = extent * share * float(torch.rand(1, generator=rng))
        low = step.low + (extent - width) * float(torch.rand(1, generator=rng))
        out.append((low, low + width))
    return out


def bilinear(x: Tensor, column: float, row: float) -> Tensor:
    """Bilinear interpolation by its definition, zero outside, for one place: [B, C]."""
    total = torch.zeros(x.shape[:2], dtype=torch.float64)
    for i in range(x.shape[2]):
        for j in range(x.shape[3]):
            weight = max(0.0, 1 - abs(row - i)) * max(0.0, 1 - abs(column - j))
            total += weight * x[:, :, i, j].double()
    return total


def test_a_rotation_is_bilinear_interpolation_at_the_rotated_coordinates() -> None:
    x, angle = images(2, 3, 6, 7), 0.3
    out = transformed(parse_transformation("R(30)").steps, [angle], x)
    for i, j in [(0, 0), (2, 3), (5, 6), (1, 5)]:
        X, Y = j - 3.0, 2.5 - i
        source = X * math.cos(angle) + Y * math.sin(angle), -X * math.sin(angle) + Y * math.cos(angle)
        assert torch.allclose(out[:, :, i, j], bilinear(x, source[0] + 3.0, 2.5 - source[1]), atol=1e-12)


@pytest.mark.parametrize("text", COMPOSED)
@pytest.mark.parametrize("seed", range(4))
def test_sampled_transformations_lie_inside_the_interval_image(text: str, seed: int) -> None:
    x, transformation = images(3, 2, 9, 8), parse_transformation(text)
    ranges = random_ranges(transformation, seed, 0.5)
    low, high = interval(transformation, ranges, x)
    rng = torch.Generator().manual_seed(seed)
    for k in range(25):
        share = torch.rand(len(ranges), generator=rng).tolist() if k > 1 else [float(k)] * len(ranges)
        point = [a + (b - a) * s for (a, b), s in zip(ranges, share, strict=True)]
        image = transformed(transformation.steps, point, x)
        assert bool((low <= image).all())
        assert bool((image <= high).all())


@pytest.mark.parametrize("text", COMPOSED)
@pytest.mark.parametrize("seed", range(4))
def test_nested_parameter_boxes_give_nested_interval_images(text: str, seed: int) -> None:
    x, transformation = images(2), parse_transformation(text)
    outer = random_ranges(transformation, seed, 0.8)
    inner = [(a + 0.2 * (b - a), a + 0.7 * (b - a)) for a, b in outer]
    (low, high), (inner_low, inner_high) = interval(transformation, outer, x), interval(transformation, inner, x)
    assert bool((low <= inner_low + 1e-15).all())
    assert bool((inner_high <= high + 1e-15).all())


@pytest.mark.parametrize("text", COMPOSED)
def test_the_identity_reproduces_the_image(text: str) -> None:
    x, steps = images(2), parse_transformation(text).steps
    identity = [1.0 if s.kind in ("Sc", "C") else 0.0 for s in steps]
    assert torch.allclose(transformed(steps, identity, x), x.double(), atol=1e-14)
    low, high = interval(parse_transformation(text), [(t, t) for t in identity], x)
    assert float((high - low).max()) < 1e-9


def _one(row: int, column: int, size: int = 7) -> Tensor:
    x = torch.zeros(1, 1, size, size)
    x[0, 0, row, column] = 1
    return x


def test_a_positive_horizontal_shift_moves_content_right_and_a_vertical_one_up() -> None:
    assert torch.equal(transformed(parse_transformation("Tu(1)").steps, [1.0], _one(3, 3)), _one(3, 4).double())
    assert torch.equal(transformed(parse_transformation("Tv(1)").steps, [1.0], _one(3, 3)), _one(2, 3).double())


def test_a_quarter_turn_takes_right_pointing_to_up_pointing() -> None:
    turned = transformed(parse_transformation("R(90)").steps, [math.pi / 2], _one(3, 5))
    assert torch.allclose(turned, _one(1, 3).double(), atol=1e-12)


def test_transformations_act_in_the_order_written() -> None:
    steps = parse_transformation("Tu(2),R(90)").steps  # right by 2, then a quarter turn: the content ends above the centre
    assert torch.allclose(transformed(steps, [2.0, math.pi / 2], _one(3, 3)), _one(1, 3).double(), atol=1e-12)


def _flat(engine: NativeEngine, x: Tensor, y: Tensor, transformation: Transformation) -> list[bool]:
    """Every leaf of the grid, no hierarchy, no early stop."""
    ok = torch.ones(len(x), dtype=torch.bool)
    columns = pixel_columns(x).flatten(1)
    for cell in _leaves(transformation.cells):
        (warp,) = build_warps(transformation.steps, [cell.ranges(transformation)], x.shape[2], x.shape[3], CPU)
        low, high = warp.apply(columns)
        ok &= proven(box_margins(engine, rows_of(low, 1), rows_of(high, 1), y, "ibp"))
    return ok.tolist()


def _leaves(cells: tuple[int, ...]) -> list[Cell]:
    spans: list[tuple[tuple[int, int], ...]] = [()]
    for count in cells:
        spans = [(*s, (i, i + 1)) for s in spans for i in range(count)]
    return [Cell(s) for s in spans]


@pytest.mark.parametrize(
    ("text", "widths"),
    [("R(8)", (0.5,)), ("Tu(0.2),Tv(0.1)", (0.05, 0.05)), ("Sc(3),R(2),C(2),B(0.005)", (0.01, 0.5, 0.04, 0.01))],
)
def test_the_hierarchical_verdict_is_that_of_the_flat_grid(text: str, widths: tuple[float, ...]) -> None:
    network, x, y = digits_network()
    engine, transformation = NativeEngine(network), parse_transformation(text, widths=widths)
    found = certify_geometric(engine, network, x, y, transformation)
    flat = _flat(engine, x, y, transformation)
    assert [o.status == Status.CERTIFIED for o in found] == flat
    assert 0 < sum(flat) < len(flat)  # both verdicts occur


def test_every_margin_of_a_certified_image_is_proven_finite_and_positive() -> None:
    network, x, y = digits_network()
    found = certify_geometric(NativeEngine(network), network, x, y, parse_transformation("R(8)"))
    certified = [o for o in found if o.status == Status.CERTIFIED]
    assert certified
    for outcome in certified:
        assert outcome.margins is not None
        assert bool((torch.isfinite(outcome.margins) & (outcome.margins > 0)).all())
        assert outcome.attack_margin is not None
        assert float(outcome.margins.min()) <= outcome.attack_margin


def test_a_falsified_image_comes_with_a_transformed_image_that_is_misclassified() -> None:
    network, x, y = digits_network()
    found = certify_geometric(NativeEngine(network), network, x, y, parse_transformation("R(60)"))
    falsified = [(b, o) for b, o in enumerate(found) if o.status == Status.FALSIFIED]
    assert falsified
    for b, outcome in falsified:
        assert outcome.witness is not None
        assert int(network.double()(outcome.witness[None]).argmax()) != int(y[b])
        network.float()
        assert outcome.message is not None
        assert "R=" in outcome.message


def test_linear_bounds_at_the_leaves_only_add_certificates_and_the_stage_says_so() -> None:
    network, x, y = digits_network()
    engine, transformation = NativeEngine(network), parse_transformation("R(12)", widths=(3.0,))
    plain = certify_geometric(engine, network, x, y, transformation)
    tight = certify_geometric(engine, network, x, y, transformation, GeometricSettings(stages=("ibp", "crown-ibp")))
    pairs = list(zip(plain, tight, strict=True))
    assert all(b.status == Status.CERTIFIED for a, b in pairs if a.status == Status.CERTIFIED)
    gained = [b for a, b in pairs if a.status != Status.CERTIFIED and b.status == Status.CERTIFIED]
    assert gained
    assert all(o.stage == "crown-ibp" for o in gained)


def test_separate_logit_bounds_are_never_above_those_of_differences_and_equal_at_a_point() -> None:
    network, x, y = digits_network()
    engine = NativeEngine(network)
    assert engine.decide is not None
    flat = rows_of(pixel_columns(x).flatten(1), 1)
    for radius in (0.0, 0.01):
        low, high = (flat - radius).clamp(0, 1), (flat + radius).clamp(0, 1)
        domain = BoxDomain(low, torch.zeros_like(low), high - low, Ball("linf", 1.0), UNIT)
        elided, separate = engine._crown(engine.decide, domain, y, "ibp"), separate_margins(engine, low, high, y)
        assert bool((separate <= elided + 1e-9).all())
        assert torch.allclose(separate, elided, atol=1e-8) == (radius == 0)
    transformation = parse_transformation("R(8)")
    elided_, naive = (certify_geometric(engine, network, x, y, transformation, GeometricSettings(separate_logits=s)) for s in (False, True))
    assert all(a.status == Status.CERTIFIED for a, b in zip(elided_, naive, strict=True) if b.status == Status.CERTIFIED)
    assert any(o.status == Status.CERTIFIED for o in naive)
    with pytest.raises(UserError, match="ibp alone"):
        GeometricSettings(stages=("ibp", "crown-ibp"), separate_logits=True)


def test_linear_bounds_that_follow_the_parameters_prove_larger_boxes() -> None:
    network, x, y = digits_network()
    engine = NativeEngine(network)
    for text, widths in (("R(10)", (0.25,)), ("Tu(0.3),Tv(0.3)", (0.05, 0.05))):
        transformation = parse_transformation(text, widths=widths)
        boxes, lines = (certify_geometric(engine, network, x, y, transformation, GeometricSettings((s,))) for s in ("ibp", "crown-ibp"))
        both = [(a.nodes, b.nodes) for a, b in zip(boxes, lines, strict=True) if a.status == b.status == Status.CERTIFIED]
        assert len(both) == sum(o.status == Status.CERTIFIED for o in boxes) > 0
        assert 2 * sum(b for _, b in both) < sum(a for a, _ in both)


def test_the_verdict_does_not_depend_on_the_batch() -> None:
    network, x, y = digits_network()
    engine, transformation = NativeEngine(network), parse_transformation("R(12)")
    together = certify_geometric(engine, network, x, y, transformation)
    few = GeometricSettings(batch=3)
    apart = [certify_geometric(engine, network, x[b : b + 1], y[b : b + 1], transformation, few)[0] for b in range(10)]
    assert [o.status for o in together[:10]] == [o.status for o in apart]


def test_starting_cells_tile_the_parameter_box() -> None:
    transformation = parse_transformation("Sc(5),R(40),B(0.01)", widths=(0.01, 1.0, 0.02))
    cells = starting_cells(transformation, 28, 28)
    assert len(cells) > 1
    assert sum(cell.leaves for cell in cells) == transformation.leaves


def test_a_grid_over_the_budget_is_refused_with_its_size_unless_confirmed() -> None:
    network, x, y = digits_network()
    engine, transformation = NativeEngine(network), parse_transformation("Sc(1),R(1),C(1),B(0.001)", "cifar10")
    with pytest.raises(UserError, match=r"640,000 sub-ranges.*--yes"):
        certify_geometric(engine, network, x, y, transformation)
    small = parse_transformation("R(1)")
    found = certify_geometric(engine, network, x[:2], y[:2], small, GeometricSettings(budget=10, yes=True))
    assert len(found) == 2


def test_an_image_outside_the_domain_is_an_error_and_never_certified() -> None:
    network, x, y = digits_network()
    broken = x[:3].clone()
    broken[0, 0, 0, 0] = math.nan
    broken[1, 0, 0, 0] = 1.5
    found = certify_geometric(NativeEngine(network), network, broken, y[:3], parse_transformation("R(1)"))
    assert [o.status for o in found[:2]] == [Status.ERROR, Status.ERROR]


def test_ranges_that_differ_have_names_that_differ() -> None:
    assert parse_transformation("R(10)").text == "R(10)"
    assert parse_transformation("R(10.000001)").text != parse_transformation("R(10)").text
    assert parse_transformation(parse_transformation("R(10.000001)").text).text == parse_transformation("R(10.000001)").text


def _darkness(bias: float) -> Network:
    """On 4 x 4 images: class 0 by the bias, minus 4 per unit of brightness."""
    last = nn.Linear(16, 2)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([[0.0], [0.25]]).expand(2, 16))
        last.bias.copy_(torch.tensor([bias, 0.0]))
    return Network([nn.Flatten(), last], (1, 4, 4), 2).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("text", "pixel", "bias", "attack", "lie"),
    [
        ("B(0.2)", 0.5, 3.0, False, 0.5),  # only the last third of the range contradicts the bound
        ("B(0.2)", 0.5, 3.0, True, 0.001),  # only the corner does, which was tried before anything was proven
        ("B(1e-8)", 1e-8, 4.4e-8, False, 6e-8),  # by less than rounding might explain, but on the wrong side of zero
    ],
)
def test_a_bound_above_any_margin_that_was_seen_stops_the_run(
    text: str, pixel: float, bias: float, attack: bool, lie: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    network, x, y = _darkness(bias), torch.full((1, 1, 4, 4), pixel), torch.zeros(1, dtype=torch.long)
    settings, transformation = GeometricSettings(attack=attack), parse_transformation(text)
    engine = NativeEngine(network, "cpu")
    (outcome,) = certify_geometric(engine, network, x, y, transformation, settings, alarm=Alarm(engine, network, root=tmp_path))
    assert outcome.status == (Status.CERTIFIED if bias > 1 else Status.UNKNOWN)
    monkeypatch.setattr(geometric, "box_margins", lambda *given: box_margins(*given) + lie)
    with pytest.raises(SoundnessError, match="below the proven bound"):
        certify_geometric(engine, network, x, y, transformation, settings, alarm=Alarm(engine, network, root=tmp_path))


def narrow_detector(pixel: int, threshold: float) -> Network:
    """Class 0 by half a unit on 9x9 images, unless one pixel is brighter than the threshold."""
    first, last = nn.Linear(81, 1), nn.Linear(1, 2)
    with torch.no_grad():
        first.weight.zero_()
        first.weight[0, pixel] = 1.0
        first.bias.fill_(-threshold)
        last.weight.copy_(torch.tensor([[0.0], [40.0]]))
        last.bias.copy_(torch.tensor([0.5, 0.0]))
    return Network([nn.Flatten(), first, nn.ReLU(), last], (1, 9, 9), 2).eval().requires_grad_(False)


@pytest.mark.parametrize("stages", [("ibp",), ("ibp", "crown-ibp")])
def test_the_cells_with_the_lowest_bounds_lead_to_a_witness_that_the_first_samples_miss(stages: tuple[str, ...]) -> None:
    """A dot must land nearly on one pixel: 0.4 percent of the range. Random shifts find it, the 48 tried first do not."""
    x, y = torch.zeros(1, 1, 9, 9), torch.tensor([0])
    x[0, 0, 4, 4] = 1.0
    shift = parse_transformation("Tu(1.7),Tv(1.7)", widths=(0.1, 0.1))
    for row, column in ((3, 5), (5, 5), (5, 3), (3, 3)) if stages == ("ibp",) else ((3, 5),):
        network = narrow_detector(9 * row + column, 0.85)
        engine, settings = NativeEngine(network, "cpu"), GeometricSettings(stages)
        images = TransformedImages(engine, network, x, y, shift)
        first = images.margins_at(images.draw(0, "geometric", settings.samples, corners=True), [0])
        assert bool((first > 0).all())
        if (row, column, *stages) == (3, 5, "ibp"):
            assert float(images.margins_at(images.draw(7, "random", 1500, corners=False), [0]).min()) < -0.65
        (outcome,) = certify_geometric(engine, network, x, y, shift, settings)
        assert (outcome.status, outcome.stage) == (Status.FALSIFIED, "attack")
        with torch.no_grad():
            assert int(network.double()(outcome.witness[None]).argmax()) == 1
        network.float()
        (unattacked,) = certify_geometric(engine, network, x, y, shift, GeometricSettings(stages, attack=False))
        assert unattacked.status == Status.UNKNOWN


def test_a_certificate_is_attacked_by_a_search_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No sample is taken before the proof; the bound is a little above the margin at one shift, which 16 fresh samples alone miss."""
    x, y = torch.zeros(1, 1, 9, 9), torch.tensor([0])
    x[0, 0, 4, 4] = 1.0
    network = narrow_detector(9 * 4 + 5, 0.2)
    with torch.no_grad():
        network[3].weight[1, 0] = 0.6  # the margin falls to 0.02 where the dot lands on the pixel, and no further
    engine, shift = NativeEngine(network, "cpu"), parse_transformation("Tu(1.7)", widths=(0.1,))
    (honest,) = certify_geometric(engine, network, x, y, shift, GeometricSettings(attack=False))
    assert honest.status == Status.CERTIFIED
    images = TransformedImages(engine, network, x, y, shift)
    fresh = float(images.margins_at(images.draw(0, "after-certificate", 16, corners=False), [0]).min())
    assert honest.attack_margin < fresh - 0.01
    lie = (honest.attack_margin + fresh) / 2
    monkeypatch.setattr(geometric, "box_margins", lambda engine, low, high, y, stage: torch.full((len(y), 1), lie, dtype=torch.float64))
    with pytest.raises(SoundnessError, match="below the proven bound"):
        certify_geometric(
            engine, network, x, y, shift, GeometricSettings(attack=False), alarm=Alarm(engine, network, root=tmp_path / "bundle")
        )
