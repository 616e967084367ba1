"""One compact check of images that follow the parameters: every transformed image lies in the set, and no margin is above its own.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import itertools

import torch
from soundness_images import reference
from soundness_networks import designed_network
from soundness_points import preactivations, true_margins

TOLERANCE = 1e-11


def check_sloped() -> None:
    from cure_ray.bounds.native.compiled import flatten_images
    from cure_ray.bounds.native.engine import NativeEngine
    from cure_ray.certification.boxes import ANY_BOX
    from cure_ray.certification.sloped import SlopedDomain, sloped_images, sloped_margins
    from cure_ray.certification.transformed import TransformedImages
    from cure_ray.threats.box import UNIT
    from cure_ray.threats.transformations import parse_transformation, root

    g, case = torch.Generator().manual_seed(0), designed_network(0)
    engine, index = NativeEngine(case.network, "cpu"), torch.tensor([2, 0, 1])
    x, y = case.x[index], case.y[index]
    for text in ("R(12)", "Tu(1),Tv(0.5)", "Sc(10),R(8),C(10),B(0.05)", "C(30)"):
        transformation = parse_transformation(text, widths=(1e9,) * text.count("("))  # one leaf: sloped images know no grid
        images = TransformedImages(engine, case.network, case.x, case.y, transformation)
        low, high, slope = sloped_images(images, root(transformation), index)
        domain = SlopedDomain(low, torch.zeros_like(low), high - low, ANY_BOX, UNIT, slope)
        # Directions in which a set that is too small would show: single pixels, along and across the slopes, at random.
        noise = torch.randn(3, 40, low.shape[1], generator=g, dtype=torch.float64)
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=slope.shape[1])), dtype=torch.float64)
        along = torch.einsum("sk,bkn->bsn", signs, slope)
        some = torch.eye(low.shape[1], dtype=torch.float64)[torch.randperm(low.shape[1], generator=g)[:60]].expand(3, -1, -1)
        rows = torch.cat([noise, along, along.sign(), along.sign() * noise[:, : len(signs)].abs(), some, -some], 1)
        least, _ = domain.minimise(rows)
        kinds, ranges = [s.kind for s in transformation.steps], [(s.low, s.high) for s in transformation.steps]
        inside = torch.rand(24, len(ranges), generator=g, dtype=torch.float64).tolist()
        points = [*itertools.product(*ranges), *([a + (b - a) * u for (a, b), u in zip(ranges, row, strict=True)] for row in inside)]
        attained = []
        for point in points:
            image = reference(kinds, list(point), x)
            value = torch.einsum("bsn,bn->bs", rows, flatten_images(image))
            assert (least <= value + TOLERANCE * rows.abs().sum(2)).all(), f"{text}: an image outside the set"
            if slope.shape[1] == 1:
                _check_line(flatten_images(image), low, high, slope[:, 0])
            attained.append(true_margins(preactivations(case.network, image)[-1], y))
        worst = torch.stack(attained).amin(0)
        for stage in ("ibp", "crown-ibp"):
            margins = sloped_margins(engine, low, high, slope, y, stage)
            slack = torch.where((margins > 0).all(1), 1e-9, 1e-4).unsqueeze(1)
            assert (margins <= worst + slack).all(), f"{text}, {stage}: above the margin of a transformed image"
        exact = engine._crown(engine.decide, domain, y, "crown-ibp")
        assert (exact <= worst + 1e-9).all(), f"{text}: above the margin of a transformed image"


def _check_line(image_BN: torch.Tensor, low_BN: torch.Tensor, high_BN: torch.Tensor, slope_BN: torch.Tensor) -> None:
    """With one parameter: some t of [-1, 1] explains all pixels at once."""
    for image, low, high, slope in zip(image_BN, low_BN, high_BN, slope_BN, strict=True):
        flat = slope.abs() < 1e-9
        assert (low[flat] <= image[flat] + TOLERANCE).all()
        assert (image[flat] <= high[flat] + TOLERANCE).all()
        ends = torch.stack([(image - low)[~flat] / slope[~flat], (image - high)[~flat] / slope[~flat]])
        slack = 10 * TOLERANCE / slope[~flat].abs()
        first, last = (
            torch.cat([ends.amin(0) - slack, ends.new_tensor([-1.0])]).max(),
            torch.cat([ends.amax(0) + slack, ends.new_tensor([1.0])]).min(),
        )
        assert first <= last, "no single t explains all pixels"
