"""Concrete transformations of a batch of images: which to try, what the network says of them, and their replay in float64."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.attacks import margin, replay_network
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.threats.transformations import Transformation
from cure_ray.threats.warps import Warp, build_warps, pixel_columns, rows_of, transformed

Parameters = tuple[float, ...]
DESCENTS, ROUNDS, PROPOSALS = 3, 5, 6  # of a local search: points it starts from, rounds from each, points tried per round


class TransformedImages:
    """Images under one transformation, concretely or as interval images."""

    def __init__(self, engine: NativeEngine, network: nn.Sequential, x_BCHW: Tensor, y_B: Tensor, transformation: Transformation) -> None:
        self.engine, self.transformation = engine, transformation
        self.x, self.y = x_BCHW.to(engine.device), y_B.to(engine.device)
        self.columns_PBC = pixel_columns(self.x)
        self.replay = replay_network(network)

    @property
    def size(self) -> tuple[int, int]:
        return self.x.shape[2], self.x.shape[3]

    def draw(self, seed: int, purpose: str, count: int, corners: bool) -> list[Parameters]:
        """The same parameters for every image, so that a warp is built once: corners, then a random spread."""
        steps = self.transformation.steps
        found = list(itertools.islice(itertools.product(*((s.low, s.high) for s in steps)), 32)) if corners else []
        rng = seeding.generator("cpu", seed, purpose, str(self.transformation))
        unit = torch.rand(max(1, count - len(found)), len(steps), generator=rng, dtype=torch.float64)
        unit[:, 0] = (torch.arange(len(unit)) + unit[:, 0]) / len(unit)  # stratified in the first parameter
        return found + [tuple(s.low + (s.high - s.low) * u for s, u in zip(steps, row, strict=True)) for row in unit.tolist()]

    def margins_at(self, parameters: Sequence[Parameters], where: list[int]) -> Tensor:
        """[S, B] margins of concrete transformations, by the fast forward pass."""
        assert self.engine.search is not None
        index = torch.tensor(where, device=self.engine.device)
        rows = []
        for warp in build_warps(self.transformation.steps, [[(t, t) for t in p] for p in parameters], *self.size, self.engine.device):
            low, _ = self.boxes(warp, index)
            rows.append(margin(self.engine.search(low.float()), self.y[index]))
        return torch.stack(rows)

    def margins_of(self, b: int, parameters: Sequence[Parameters]) -> Tensor:
        """[S] the same of one image, in one pass."""
        assert self.engine.search is not None
        index = torch.tensor([b], device=self.engine.device)
        warps = build_warps(self.transformation.steps, [[(t, t) for t in p] for p in parameters], *self.size, self.engine.device)
        low = torch.cat([self.boxes(warp, index)[0] for warp in warps])
        return margin(self.engine.search(low.float()), self.y[index].expand(len(low))).cpu()

    def descend(self, b: int, starts: Sequence[tuple[Parameters, Sequence[float]]], stream: torch.Generator) -> Parameters:
        """A local search for the parameters of smallest margin: random steps from the best point so far, half as wide every round.

        A start is a point and how far to look around it, per parameter. It stops at a misclassified image.
        """
        found = self.margins_of(b, [point for point, _ in starts])
        order = found.argsort(stable=True).tolist()[:DESCENTS]
        best = float(found[order[0]]), starts[order[0]][0]
        for i in order:
            (here, reach), value = starts[i], float(found[i])
            for _ in range(ROUNDS):
                if best[0] <= 0:
                    return best[1]
                noise = 2 * torch.rand(PROPOSALS, len(here), generator=stream, dtype=torch.float64) - 1
                tried = [self._inside([t + r * u for t, r, u in zip(here, reach, row, strict=True)]) for row in noise.tolist()]
                values = self.margins_of(b, tried)
                pick = int(torch.nan_to_num(values, nan=torch.inf).argmin())
                if float(values[pick]) < value:
                    here, value = tried[pick], float(values[pick])
                best = min(best, (value, here))
                reach = [r / 2 for r in reach]
        return best[1]

    def _inside(self, point: Sequence[float]) -> Parameters:
        return tuple(min(max(t, step.low), step.high) for t, step in zip(point, self.transformation.steps, strict=True))

    def replayed(self, b: int, parameters: Parameters) -> tuple[Tensor, float]:
        """One transformed image and its margin, in float64 by the original network."""
        image = transformed(self.transformation.steps, parameters, self.x[b : b + 1]).cpu()
        with torch.no_grad():
            return image[0], float(margin(self.replay(image), self.y[b : b + 1].cpu()))

    def boxes(self, warp: Warp, index: Tensor) -> tuple[Tensor, Tensor]:
        """The interval images of one parameter box, flat, lower and upper ends."""
        low, high = warp.apply(self.columns_PBC[:, index].flatten(1))
        channels = self.x.shape[1]
        return rows_of(low, channels), rows_of(high, channels)
