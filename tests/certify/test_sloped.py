"""Sloped images against a judge with 64 bits of mantissa, without tolerance: what rounding hides must lie inside as well."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cure_ray.certification.sloped import parts_of, pieces, sloped_images
from cure_ray.certification.transformed import TransformedImages
from cure_ray.threats.transformations import Kind, Step, Transformation, root

WIDE: dict[Kind, float] = {"R": 0.6, "Tu": 3.0, "Tv": 3.0, "Sc": 0.4, "Sh": 0.5, "C": 1.0, "B": 0.6}
MOST: dict[Kind, float] = {"R": math.pi / 2, "Sc": 0.99, "C": 1.0}
SPATIAL: tuple[Kind, ...] = ("R", "Tu", "Tv", "Sc", "Sh")
Long = np.longdouble


def judge(steps: tuple[Step, ...], point: list[float], x_BCHW: Tensor) -> np.ndarray:
    """The transformed images by definition, flat in the engine's order."""
    pixels = x_BCHW.numpy().astype(Long)
    B, C, H, W = pixels.shape
    X, Y = np.tile(np.arange(W) - Long(W - 1) / 2, H), np.repeat(Long(H - 1) / 2 - np.arange(H), W)
    for step, value in reversed(list(zip(steps, point, strict=True))):
        t = Long(value)
        if step.kind == "R":
            X, Y = X * np.cos(t) + Y * np.sin(t), Y * np.cos(t) - X * np.sin(t)
        elif step.kind == "Sc":
            X, Y = X / t, Y / t
        elif step.kind == "Sh":
            X = X - Y * t
        else:
            X, Y = X - t * (step.kind == "Tu"), Y - t * (step.kind == "Tv")
    column, row, image = X + Long(W - 1) / 2, Long(H - 1) / 2 - Y, np.zeros((B, C, H * W), dtype=Long)
    for down, right in itertools.product((0, 1), repeat=2):
        i, j = np.floor(row).astype(int) + down, np.floor(column).astype(int) + right
        weight = (1 - abs(row - i)) * (1 - abs(column - j)) * ((i >= 0) & (i < H) & (j >= 0) & (j < W))
        image += weight * pixels[:, :, i.clip(0, H - 1), j.clip(0, W - 1)]
    image = image.clip(0, 1)
    for step, value in zip(steps, point, strict=True):
        if step.kind in ("C", "B"):
            image = (image * Long(value) if step.kind == "C" else image + Long(value)).clip(0, 1)
    return image.transpose(0, 2, 1).reshape(B, -1)


def some_step(rng: random.Random, kind: Kind) -> Step:
    """Ranges wide and tiny, whole and in part, sometimes a point, sometimes ending where pixels meet."""
    size = WIDE[kind] * (10 ** rng.uniform(-12, 0) if rng.random() < 0.3 else rng.choice([0.02, 0.1, 0.5, 1.0]))
    size = MOST.get(kind, size) if rng.random() < 0.05 else size
    middle = 1.0 if kind in ("Sc", "C") else 0.0
    low, high = middle - size, middle + size
    which = rng.random()
    if which < 0.5:
        low, high = sorted((rng.uniform(low, high), rng.uniform(low, high)))
        if kind in ("Tu", "Tv") and rng.random() < 0.5:
            low, high = sorted((float(round(low)), high))
    elif which < 0.6:
        low = high = rng.uniform(low, high)
    return Step(kind, low, high)


def some_value(rng: random.Random, low: float, high: float, count: int) -> float:
    """Inside a range that is cut into `count` pieces: ends, borders of pieces and beside them, half pixels, the identity, anywhere."""
    border = low + (high - low) * rng.randint(0, count) / count
    beside = math.nextafter(border, rng.choice([-math.inf, math.inf]))
    half = round(rng.uniform(low, high) * 2) / 2
    value = rng.choice([low, high, border, beside, half, 0.0, 1.0, rng.uniform(low, high), rng.uniform(low, high)])
    return min(max(value, low), high)


def some_images(size: int, channels: int, seed: int) -> Tensor:
    x = torch.rand(4, channels, size, size, generator=torch.Generator().manual_seed(seed))
    x[1] = (x[1] > 0.5).float()
    x[2] = (torch.arange(size)[:, None] + torch.arange(size)) % 2
    x[3] = 1.0
    return x


@pytest.mark.skipif(np.finfo(Long).nmant < 63, reason="long double is no wider than double here")
@pytest.mark.parametrize(("size", "channels", "cases"), [(8, 1, 24), (8, 3, 10), (28, 1, 4)])
def test_every_part_explains_the_images_of_all_its_parameters(size: int, channels: int, cases: int) -> None:
    rng, followed = random.Random(size + channels), 0
    for case in range(cases):
        count = rng.choice([0, 1, 1, 2, 3])
        kinds = [rng.choice(SPATIAL) for _ in range(count)]
        kinds += [rng.choice(("C", "B")) for _ in range(rng.choice([0, 0, 1, 2]) if count else rng.choice([1, 2]))]
        steps = tuple(some_step(rng, kind) for kind in kinds)
        transformation, x = Transformation("some", steps, (1,) * len(steps)), some_images(size, channels, case)
        engine = SimpleNamespace(device=torch.device("cpu"))  # all that images ask of it
        images = TransformedImages(engine, nn.Sequential(), x, torch.zeros(4, dtype=torch.long), transformation)  # type: ignore[arg-type]
        low, high, slope = (t.numpy().astype(Long) for t in sloped_images(images, root(transformation), torch.arange(4)))
        followed += int(abs(slope).any())
        ranges = [(s.low, s.high) for s in steps]
        counts = pieces(transformation, ranges, images.size)
        boxes, centres = parts_of(ranges, counts)
        for _ in range(8):
            point = [some_value(rng, a, b, n) for (a, b), n in zip(ranges, counts, strict=True)]
            image = judge(steps, point, x)
            holding = [j for j, box in enumerate(boxes) if all(a <= t <= b for (a, b), t in zip(box, point, strict=True))]
            assert holding, f"no part holds {point} of {ranges}"
            for j in holding[:4]:
                rest = image - sum(Long(tau) * slope[:, k] for k, tau in enumerate(centres[j]))
                assert (low <= rest).all(), f"{kinds} {ranges} at {point}: below the line"
                assert (rest <= high).all(), f"{kinds} {ranges} at {point}: above the line"
    assert followed >= cases // 4
