"""Geometric certification: bisect the parameter box until every part is proven, from coarse boxes down to the leaf width (10.5, 10.6).

Interval arithmetic and IBP are inclusion-isotonic: a proven box proves all leaves inside it, so the verdict is that of the flat
grid of leaves at a fraction of the boxes. A sample stops at its first unproven leaf, or earlier at a concrete misclassified
transformation. Boxes of different images and sub-ranges share batches; the interpolation weights of a sub-range are built once.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.attacks import margin, replay_network
from cure_ray.bounds.engine import Stage
from cure_ray.bounds.interval_images import Warp, build_warps, describe, effect, pixel_columns, rows_of, transformed
from cure_ray.bounds.native import NativeEngine
from cure_ray.certify.boxes import box_margins, proven
from cure_ray.certify.cascade import Outcome
from cure_ray.certify.perturbed import check_clean, raise_unsound
from cure_ray.certify.verdict import Status
from cure_ray.config.transforms import Cell, Transformation, cell_at, root
from cure_ray.errors import UserError

Parameters = tuple[float, ...]
TIGHTENED = 64  # leaves in the largest cell a later stage tries: a proof there saves up to as many at the leaves


@dataclass(frozen=True)
class GeometricSettings:
    """How a range is searched. Only `stages` can change a verdict from unknown to certified."""

    stages: tuple[Stage, ...] = ("ibp",)  # a second one, "crown-ibp", searches again where the first has failed
    samples: int = 48  # concrete transformations tried per image before anything is proven
    probes: int = 2  # leaves around the worst of them, proven first: what fails, fails early
    batch: int = 256  # boxes bounded together
    budget: int = 20_000_000  # leaf boxes (images times leaves) that may be started without asking
    yes: bool = False

    def __post_init__(self) -> None:
        allowed = ("ibp", "crown-ibp", "crown", "alpha-crown")
        if not self.stages or any(stage not in allowed for stage in self.stages):
            raise UserError(f"geometric stages are {', '.join(allowed)}, got {', '.join(self.stages) or 'none'}")


def check_budget(transformation: Transformation, images: int, settings: GeometricSettings) -> None:
    """Refuse a grid nobody meant to start."""
    boxes = transformation.leaves * images
    if boxes > settings.budget and not settings.yes:
        grid = " x ".join(str(n) for n in transformation.cells)
        raise UserError(
            f"{transformation} on {images} images is a grid of {grid} = {transformation.leaves:,} sub-ranges, {boxes:,} leaf boxes in "
            f"all, over the budget of {settings.budget:,}. The bisection needs far fewer, but may need days if it has to go deep. "
            "Add --yes to start it anyway, certify fewer images, or choose a smaller range."
        )


def certify_geometric(
    engine: NativeEngine,
    network: nn.Sequential,
    x_BCHW: Tensor,
    y_B: Tensor,
    transformation: Transformation,
    settings: GeometricSettings | None = None,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    bundles: Path = Path("soundness-failure"),
) -> list[Outcome]:
    """One outcome per image, in order; `nodes` counts the boxes an image was bounded on."""
    settings = settings or GeometricSettings()
    check_budget(transformation, len(x_BCHW), settings)
    indices = list(range(len(x_BCHW))) if indices is None else list(indices)
    return _Search(engine, network, x_BCHW, y_B, transformation, settings, seed, indices, bundles).run()


class _Search:
    """The images under one transformation, and the boxes still to be proven."""

    def __init__(
        self, engine: NativeEngine, network: nn.Sequential, x_BCHW: Tensor, y_B: Tensor, transformation: Transformation,
        settings: GeometricSettings, seed: int, indices: list[int], bundles: Path,
    ) -> None:  # fmt: skip
        self.engine, self.network, self.transformation, self.settings = engine, network, transformation, settings
        self.seed, self.indices, self.bundles = seed, indices, bundles
        self.x, self.y = x_BCHW.to(engine.device), y_B.to(engine.device)
        self.columns_PBC = pixel_columns(self.x)
        self.replay = replay_network(network)
        self.outcomes = [Outcome(int(label)) for label in y_B]
        self.stage: Stage = settings.stages[0]
        self.failed: dict[int, Cell] = {}  # the first unproven leaf of an image

    def run(self) -> list[Outcome]:
        check_clean(self.replay, self.x, self.outcomes)
        if self._open():
            self._probe(self._sample("geometric"))
            for stage in self.settings.stages:
                self._reopen(stage)
                self._bisect()
                for b in self._open():
                    self.outcomes[b].decide(Status.CERTIFIED, stage)
        self._sample_certified()
        return self.outcomes

    def _reopen(self, stage: Stage) -> None:
        """A later stage starts over for the images an earlier one gave up on, at the leaf that stopped it."""
        if stage == self.settings.stages[0]:
            return
        self.stage, cells = stage, dict[Cell, list[int]]()
        for b, outcome in enumerate(self.outcomes):
            if outcome.status == Status.UNKNOWN:
                outcome.status, outcome.margins = None, None
                cells.setdefault(self.failed[b], []).append(b)
        for work in _batches(list(cells.items()), self.settings.batch):
            self._bound(work)

    def _open(self) -> list[int]:
        return [b for b, o in enumerate(self.outcomes) if o.open]

    # ------------------------------------------------------------ concrete transformations

    def _draw(self, purpose: str, corners: bool) -> list[Parameters]:
        """The same parameters for every image, so that a warp is built once: corners and centre, then a random spread."""
        steps = self.transformation.steps
        found = list(itertools.islice(itertools.product(*((s.low, s.high) for s in steps)), 32)) if corners else []
        rng = seeding.generator("cpu", self.seed, purpose, str(self.transformation))
        unit = torch.rand(max(1, self.settings.samples - len(found)), len(steps), generator=rng, dtype=torch.float64)
        unit[:, 0] = (torch.arange(len(unit)) + unit[:, 0]) / len(unit)  # stratified in the first parameter
        return found + [tuple(s.low + (s.high - s.low) * u for s, u in zip(steps, row, strict=True)) for row in unit.tolist()]

    def _margins_at(self, parameters: Sequence[Parameters], where: list[int]) -> Tensor:
        """[S, B] margins of concrete transformations, by the fast forward pass."""
        assert self.engine.search is not None
        index = torch.tensor(where, device=self.engine.device)
        H, W = self.x.shape[2:]
        rows = []
        for warp in build_warps(self.transformation.steps, [[(t, t) for t in p] for p in parameters], H, W, self.engine.device):
            low, _ = self._boxes_of(warp, index)
            rows.append(margin(self.engine.search(low.float()), self.y[index]))
        return torch.stack(rows)

    def _sample(self, purpose: str) -> dict[int, list[Parameters]]:
        """Falsify what a concrete transformation falsifies; for the others the parameters of smallest margin, worst first."""
        where, parameters, worst = self._open(), self._draw(purpose, corners=True), {}
        started = time.perf_counter()
        margins_SB = self._margins_at(parameters, where)
        order_SB = margins_SB.argsort(0)
        for column, b in enumerate(where):
            ranked = [parameters[i] for i in order_SB[: self.settings.probes, column].tolist()]
            worst[b] = ranked
            self._check_point(b, ranked[0] if ranked else parameters[int(order_SB[0, column])])
        self._charge(where, started)
        return worst

    def _check_point(self, b: int, parameters: Parameters) -> float:
        """Replay one transformed image in float64; a wrong class is a witness."""
        image = transformed(self.transformation.steps, parameters, self.x[b : b + 1]).cpu()
        with torch.no_grad():
            value = float(margin(self.replay(image), self.y[b : b + 1].cpu()))
        outcome = self.outcomes[b]
        outcome.attack_margin = value if outcome.attack_margin is None else min(value, outcome.attack_margin)
        if value <= 0 and outcome.open:
            outcome.witness = image[0]
            outcome.decide(Status.FALSIFIED, "attack", f"misclassified at {describe(self.transformation.steps, parameters)}")
        return value

    def _sample_certified(self) -> None:
        """Everything certified is tried once more at fresh parameters: the alarm of last resort."""
        where = [b for b, o in enumerate(self.outcomes) if o.status == Status.CERTIFIED]
        if not where:
            return
        parameters = self._draw("after-certificate", corners=False)[:16]
        margins_SB = self._margins_at(parameters, where)
        for column, b in enumerate(where):
            point = parameters[int(margins_SB[:, column].argmin())]
            value, bound = self._check_point(b, point), self.outcomes[b].margins
            if bound is not None and float(bound.min()) > value + 1e-7 * (1 + abs(value)):
                what = f"the image at {describe(self.transformation.steps, point)} has margin {value:.9g}, below the proven bound"
                where_saved, index = self.bundles, self.indices[b]
                raise_unsound(where_saved, self.network, self.x[b], self.outcomes[b], self.transformation, index, what, self.engine)

    # ------------------------------------------------------------ boxes

    def _boxes_of(self, warp: Warp, index: Tensor) -> tuple[Tensor, Tensor]:
        low, high = warp.apply(self.columns_PBC[:, index].flatten(1))
        channels = self.x.shape[1]
        return rows_of(low, channels), rows_of(high, channels)

    def _bound(self, work: Sequence[tuple[Cell, list[int]]]) -> list[list[bool]]:
        """Whether each (cell, image) is proven by IBP, or by the current stage where the cell is small enough for it to pay."""
        started = time.perf_counter()
        H, W = self.x.shape[2:]
        warps = build_warps(self.transformation.steps, [cell.ranges(self.transformation) for cell, _ in work], H, W, self.engine.device)
        index = torch.tensor([b for _, images in work for b in images], device=self.engine.device)
        pieces = [self._boxes_of(w, torch.tensor(i, device=self.engine.device)) for w, (_, i) in zip(warps, work, strict=True)]
        low, high = (torch.cat([piece[k] for piece in pieces]) for k in (0, 1))
        margins = box_margins(self.engine, low, high, self.y[index], self.settings.stages[0])
        if self.stage != self.settings.stages[0]:
            small = torch.tensor([cell.leaves <= TIGHTENED for cell, images in work for _ in images], device=self.engine.device)
            todo = (~proven(margins) & small).nonzero(as_tuple=True)[0]
            if len(todo):
                tight = box_margins(self.engine, low[todo], high[todo], self.y[index[todo]], self.stage)
                margins[todo] = tight  # one stage certifies alone: an unproven row of the first may hold float32 margins
        return self._learn(work, margins.cpu(), proven(margins).tolist(), started)

    def _learn(self, work: Sequence[tuple[Cell, list[int]]], margins: Tensor, ok: list[bool], started: float) -> list[list[bool]]:
        share = (time.perf_counter() - started) / max(1, len(ok))
        results, row = [], 0
        for cell, images in work:
            results.append(ok[row : row + len(images)])
            for b in images:
                outcome, found = self.outcomes[b], margins[row]
                outcome.nodes += 1
                outcome.seconds += share
                if ok[row]:  # the smallest bound over the parts is the bound of the whole
                    outcome.margins = found if outcome.margins is None else torch.minimum(outcome.margins, found)
                elif cell.is_leaf and outcome.open:
                    self._give_up(b, cell, found)
                row += 1
        return results

    def _give_up(self, b: int, cell: Cell, margins: Tensor) -> None:
        self.failed[b], self.outcomes[b].margins = cell, margins
        if bool(margins.isnan().any()):
            self.outcomes[b].decide(Status.ERROR, self.stage, "a bound is NaN or infinite (overflow in the weights)")
        else:
            self.outcomes[b].decide(Status.UNKNOWN, self.stage)

    def _charge(self, where: list[int], started: float) -> None:
        for b in where:
            self.outcomes[b].seconds += (time.perf_counter() - started) / len(where)

    def _probe(self, worst: dict[int, list[Parameters]]) -> None:
        """The leaves around the worst concrete transformations: an image that fails usually fails there."""
        for rank in range(self.settings.probes):
            cells: dict[Cell, list[int]] = {}
            for b in self._open():
                if rank < len(worst[b]):
                    cells.setdefault(cell_at(self.transformation, worst[b][rank]), []).append(b)
            for work in _batches(list(cells.items()), self.settings.batch):
                self._bound(work)

    def _bisect(self) -> None:
        """Depth first, the part farther from the identity first; images that have failed leave every stack entry."""
        stack = [(cell, self._open()) for cell in starting_cells(self.transformation, self.x.shape[2], self.x.shape[3])]
        while stack:
            work: list[tuple[Cell, list[int]]] = []
            room = self.settings.batch
            while stack and room > 0:
                cell, images = stack.pop()
                images = [b for b in images if self.outcomes[b].open]
                if len(images) > room and work:
                    stack.append((cell, images))
                    break
                if images:
                    work.append((cell, images))
                    room -= len(images)
            if not work:
                continue
            for (cell, images), ok in zip(work, self._bound(work), strict=True):
                failed = [b for b, good in zip(images, ok, strict=True) if not good and self.outcomes[b].open]
                if failed and not cell.is_leaf:
                    stack += [(half, failed) for half in split(self.transformation, cell, self.x.shape[2], self.x.shape[3])]


def _batches(items: list[tuple[Cell, list[int]]], size: int) -> list[list[tuple[Cell, list[int]]]]:
    batches, count = list[list[tuple[Cell, list[int]]]](), size
    for cell, images in items:
        if count + len(images) > size:
            batches.append([])
            count = 0
        batches[-1].append((cell, images))
        count += len(images)
    return batches


def split(transformation: Transformation, cell: Cell, height: int, width: int) -> tuple[Cell, Cell]:
    """Halve the parameter that moves pixels most; the half nearer to the identity first (a stack takes the other one first)."""
    steps, ranges = transformation.steps, cell.ranges(transformation)
    axes = [i for i, (first, last) in enumerate(cell.spans) if last - first > 1]
    axis = max(axes, key=lambda i: effect(steps[i], ranges[i][1] - ranges[i][0], height, width))
    below, above = cell.halves(axis)
    identity = 1.0 if steps[axis].kind in ("Sc", "C") else 0.0
    return (below, above) if sum(ranges[axis]) / 2 >= identity else (above, below)


def starting_cells(transformation: Transformation, height: int, width: int, most: float = 1.0, limit: int = 4096) -> list[Cell]:
    """Boxes coarse enough to be worth a try: no network is proven where pixels move by more than about one place."""
    cells, small = [root(transformation)], list[Cell]()
    while cells and len(cells) + len(small) < limit:
        cell = cells.pop(0)
        ranges = cell.ranges(transformation)
        sizes = [effect(s, high - low, height, width) for s, (low, high) in zip(transformation.steps, ranges, strict=True)]
        divisible = [size for size, (first, last) in zip(sizes, cell.spans, strict=True) if last - first > 1]
        if divisible and max(divisible) > most:
            cells += split(transformation, cell, height, width)
        else:
            small.append(cell)
    centre = [(s.low + s.high) / 2 for s in transformation.steps]

    def distance(cell: Cell) -> float:
        return sum(effect(s, abs((low + high) / 2 - c), height, width)
                   for s, (low, high), c in zip(transformation.steps, cell.ranges(transformation), centre, strict=True))  # fmt: skip

    return sorted(cells + small, key=distance)
