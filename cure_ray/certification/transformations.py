"""Geometric certification: bisect the parameter box until every part is proven, from coarse boxes down to the leaf width (10.5, 10.6).

Interval arithmetic and IBP are inclusion-isotonic: a proven box proves all leaves inside it, so the verdict of IBP is that of the flat
grid of leaves at a fraction of the boxes. CROWN-IBP follows the parameters (sloped.py): it proves far larger boxes, and more images. A
sample stops at its first unproven leaf, or earlier at a concrete misclassified transformation. Boxes of different images and sub-ranges
share batches; the interpolation weights of a sub-range are built once.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.bounds.engine import Stage
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.boxes import box_margins, proven, separate_margins
from cure_ray.certification.bundle import Alarm
from cure_ray.certification.cells import Work, batches, middle, partition, split, starting_cells
from cure_ray.certification.outcome import Outcome, check_clean
from cure_ray.certification.sloped import sloped_images, sloped_margins
from cure_ray.certification.transformed import Parameters, TransformedImages
from cure_ray.certification.verdict import Status
from cure_ray.errors import UserError
from cure_ray.threats.box import UNIT
from cure_ray.threats.transformations import Cell, Transformation, cell_at
from cure_ray.threats.warps import build_warps, describe

WEAKEST = (48, 4, 7)  # to see where a range is weakest: cells it is cut into, cells that are followed, how often they are halved
STARTS: dict[Stage, float] = {"ibp": 1.0, "crown-ibp": 4.0}  # pixels a first box may move: no stage proves much more


@dataclass(frozen=True)
class GeometricSettings:
    """How a range is searched. Only `stages`, `attack` and `separate_logits` can change a verdict."""

    stages: tuple[Stage, ...] = ("ibp",)  # "crown-ibp" behind it searches again where it has failed; none: only attack
    attack: bool = True
    samples: int = 48  # concrete transformations tried per image before anything is proven
    probes: int = 1  # leaves around the worst of them, proven first: what fails, fails early
    batch: int = 256  # boxes bounded together
    budget: int = 20_000_000  # leaf boxes (images times leaves) that may be started without asking
    yes: bool = False
    separate_logits: bool = False  # compare bounds of single logits, as CGT does (A29): looser than bounds of their differences

    def __post_init__(self) -> None:
        if any(stage not in STARTS for stage in self.stages) or not (self.stages or self.attack):
            raise UserError(f"geometric stages are {', '.join(STARTS)}, got {', '.join(self.stages) or 'none'}")
        if self.separate_logits and self.stages not in (("ibp",), ()):
            raise UserError(f"separate logit bounds are those of ibp alone, not of {', '.join(self.stages)}")


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
    indices: Sequence[int] | None = None,
    alarm: Alarm | None = None,
) -> list[Outcome]:
    """One outcome per image, in order; `nodes` counts the boxes an image was bounded on. Random parameters follow the alarm's seed."""
    settings = settings or GeometricSettings()
    check_budget(transformation, len(x_BCHW), settings)
    indices = list(range(len(x_BCHW))) if indices is None else list(indices)
    images = TransformedImages(engine, network, x_BCHW, y_B, transformation)
    return _Search(images, settings, indices, alarm or Alarm(engine, network)).run()


class _Search:
    """The images under one transformation, and the boxes still to be proven."""

    def __init__(self, images: TransformedImages, settings: GeometricSettings, indices: list[int], alarm: Alarm) -> None:
        self.images, self.settings, self.seed, self.indices, self.alarm = images, settings, alarm.seed, indices, alarm
        self.engine, self.transformation = images.engine, images.transformation
        self.outcomes = [Outcome(int(label)) for label in images.y]
        self.stage: Stage = settings.stages[0] if settings.stages else "ibp"
        self.failed: dict[int, Cell] = {}  # the first unproven leaf of an image
        self.lowest: dict[int, tuple[float, Parameters]] = {}  # the smallest replayed margin of an image, and where; NaN stays

    def run(self) -> list[Outcome]:
        check_clean(self.images.replay, self.images.x, self.outcomes, UNIT)
        if self._open() and self.settings.attack:
            worst = self._sample()
            if self.settings.stages:
                self._probe(worst)
        for stage in self.settings.stages:
            if stage != self.settings.stages[0]:
                self._reopen(stage)
            if self._open():
                self._bisect()
            for b in self._open():
                self.outcomes[b].decide(Status.CERTIFIED, stage)
        for b in self._open():
            self.outcomes[b].decide(Status.UNKNOWN, "attack")  # the only stage there was
        if self.settings.attack:
            self._search_weakest()
        self._attack_certified()
        return self.outcomes

    def _reopen(self, stage: Stage) -> None:
        """A later stage starts over for the images an earlier one gave up on, at the leaf that stopped it."""
        self.stage, cells = stage, dict[Cell, list[int]]()
        for b, outcome in enumerate(self.outcomes):
            if outcome.status == Status.UNKNOWN:
                outcome.status, outcome.margins = None, None
                cells.setdefault(self.failed[b], []).append(b)
        for work in batches(list(cells.items()), self.settings.batch):
            self._bound(work)

    def _open(self) -> list[int]:
        return [b for b, o in enumerate(self.outcomes) if o.open]

    # ------------------------------------------------------------ concrete transformations

    def _sample(self) -> dict[int, list[Parameters]]:
        """Falsify what a concrete transformation falsifies; for the others the parameters of smallest margin, worst first."""
        where, worst = self._open(), dict[int, list[Parameters]]()
        parameters = self.images.draw(self.seed, "geometric", self.settings.samples, corners=True)
        started = time.perf_counter()
        order_SB = self.images.margins_at(parameters, where).argsort(0)
        for column, b in enumerate(where):
            worst[b] = [parameters[i] for i in order_SB[: max(1, self.settings.probes), column].tolist()]
            self._try(b, worst[b][0])
        for b in where:
            self.outcomes[b].seconds += (time.perf_counter() - started) / len(where)
        return worst

    def _try(self, b: int, parameters: Parameters, final: bool = False) -> None:
        """Replay one transformed image; a wrong class is a witness. `final`: all bounds have been tried, unknown is still open."""
        image, value = self.images.replayed(b, parameters)
        outcome = self.outcomes[b]
        if b not in self.lowest or value < self.lowest[b][0] or value != value:
            self.lowest[b] = value, parameters
        outcome.attack_margin = self.lowest[b][0]
        if value <= 0 and (outcome.open or (final and outcome.status == Status.UNKNOWN)):
            outcome.witness = image
            outcome.decide(Status.FALSIFIED, "attack", f"misclassified at {describe(self.transformation.steps, parameters)}")

    def _search_weakest(self) -> None:
        """Falsify what no bound decides: local searches from the cells with the lowest bounds, and from the worst sample."""
        where = [b for b, o in enumerate(self.outcomes) if o.status == Status.UNKNOWN]
        if not where:
            return
        started, weak = time.perf_counter(), self._weakest(where) if self.settings.stages else {}
        for b in where:
            starts = [middle(cell, self.transformation) for cell in weak.get(b, [])]
            if b in self.lowest:
                starts.append((self.lowest[b][1], [(step.high - step.low) / 8 for step in self.transformation.steps]))
            stream = seeding.generator("cpu", self.seed, "weakest-cells", str(self.transformation), self.indices[b])
            self._try(b, self.images.descend(b, starts, stream), final=True)
        for b in where:
            self.outcomes[b].seconds += (time.perf_counter() - started) / len(where)

    def _weakest(self, where: list[int]) -> dict[int, list[Cell]]:
        """For each image a few small cells whose bounds are low: a coarse partition first, then the lowest halves again and again."""
        parts = partition(self.transformation, *self.images.size, WEAKEST[0])
        beams = dict.fromkeys(where, parts)
        for _ in range(WEAKEST[2]):
            bounds = self._worst_margins(beams)
            for b, cells in beams.items():
                kept = sorted(cells, key=lambda cell: bounds[cell, b])[: WEAKEST[1]]
                beams[b] = [
                    half for cell in kept for half in ((cell,) if cell.is_leaf else split(self.transformation, cell, *self.images.size))
                ]
        return beams

    def _worst_margins(self, beams: Mapping[int, Sequence[Cell]]) -> dict[tuple[Cell, int], float]:
        """The smallest margin bound of each image on each of its cells; minus infinity for NaN."""
        members, found = dict[Cell, list[int]](), dict[tuple[Cell, int], float]()
        for b, cells in beams.items():
            self.outcomes[b].nodes += len(cells)
            for cell in cells:
                members.setdefault(cell, []).append(b)
        for work in batches(list(members.items()), self.settings.batch):
            worst = torch.nan_to_num(self._margins(work).amin(1), nan=-torch.inf).tolist()
            pairs = [(cell, b) for cell, images in work for b in images]
            found.update(zip(pairs, worst, strict=True))
        return found

    def _attack_certified(self) -> None:
        """No transformation tried before the proof, nor what a search from fresh ones finds, may have a margin below it: the alarm of
        last resort."""
        where = [b for b, o in enumerate(self.outcomes) if o.status == Status.CERTIFIED]
        if not where:
            return
        parameters = self.images.draw(self.seed, "after-certificate", min(16, self.settings.samples), corners=False)
        margins_SB = self.images.margins_at(parameters, where)
        for column, b in enumerate(where):
            fresh = parameters[int(margins_SB[:, column].argmin())]
            stream = seeding.generator("cpu", self.seed, "after-certificate", str(self.transformation), self.indices[b])
            reach = [(step.high - step.low) / 8 for step in self.transformation.steps]
            self._try(b, self.images.descend(b, [(fresh, reach)], stream))
            value, point = self.lowest[b]
            if not value > 0 or self.outcomes[b].contradicted_by(value):
                what = f"the image at {describe(self.transformation.steps, point)} has margin {value:.9g}, below the proven bound"
                self.alarm.unsound(self.images.x[b], self.outcomes[b], self.transformation, self.indices[b], what)

    def _probe(self, worst: dict[int, list[Parameters]]) -> None:
        """The leaves around the worst concrete transformations: an image that fails usually fails there."""
        for rank in range(self.settings.probes):
            cells: dict[Cell, list[int]] = {}
            for b in self._open():
                if rank < len(worst[b]):
                    cells.setdefault(cell_at(self.transformation, worst[b][rank]), []).append(b)
            for work in batches(list(cells.items()), self.settings.batch):
                self._bound(work)

    # ------------------------------------------------------------ boxes

    def _bound(self, work: Work) -> list[list[bool]]:
        """Whether each (cell, image) is proven by the current stage."""
        started = time.perf_counter()
        margins = self._margins(work)
        return self._learn(work, margins.cpu(), proven(margins).tolist(), started)

    def _margins(self, work: Work) -> Tensor:
        """[boxes, K-1] the bounds of the current stage, image by image of cell after cell."""
        device = self.engine.device
        groups = [torch.tensor(images, device=device) for _, images in work]
        y = self.images.y[torch.cat(groups)]
        if self.stage == "crown-ibp":
            pieces = [sloped_images(self.images, cell, group) for (cell, _), group in zip(work, groups, strict=True)]
            low, high, slope = (torch.cat(parts) for parts in zip(*pieces, strict=True))
            return sloped_margins(self.engine, low, high, slope, y, self.stage)
        ranges = [cell.ranges(self.transformation) for cell, _ in work]
        warps = build_warps(self.transformation.steps, ranges, *self.images.size, device)
        boxes = [self.images.boxes(warp, group) for warp, group in zip(warps, groups, strict=True)]
        low, high = (torch.cat(parts) for parts in zip(*boxes, strict=True))
        separate = self.settings.separate_logits
        return separate_margins(self.engine, low, high, y) if separate else box_margins(self.engine, low, high, y, self.stage)

    def _learn(self, work: Work, margins: Tensor, ok: list[bool], started: float) -> list[list[bool]]:
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

    def _bisect(self) -> None:
        """Depth first, the part farther from the identity first; images that have failed leave every stack entry."""
        stack: Work = [(cell, self._open()) for cell in starting_cells(self.transformation, *self.images.size, STARTS[self.stage])]
        while stack:
            work: Work = []
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
                    stack += [(half, failed) for half in split(self.transformation, cell, *self.images.size)]
