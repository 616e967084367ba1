"""The radius of robustness of every image, by bisection: the largest that is proven, the smallest that is refuted.

Certificates and counterexamples are monotone: a proof at r holds for every smaller radius, and an image at distance d that is
misclassified refutes every radius from d on. So every probe moves an end of an image's bracket, a counterexample moves it to its own
distance, and a certificate beyond a counterexample is a contradiction that stops the run.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from cure_ray.attacks.losses import margin
from cure_ray.certification.balls import Certifier
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import Status
from cure_ray.data.samples import Samples
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import Box
from cure_ray.threats.geometry import distance
from cure_ray.threats.norms import Norm, P

Side = Literal["prove", "attack"]  # the whole cascade, or the attack alone
_UNBOUNDED = 1024.0  # per pixel, where the domain has no ends
_FLOOR = 1e-5  # of the largest radius there is: what is smaller is not told from nothing
_ROUNDING = 1 + 1e-12  # of a distance computed in float64


@dataclass(frozen=True)
class Probe:
    """What one radius taught about one image."""

    index: int
    radius: float
    side: Side
    status: Status
    distance: float | None = None  # of the counterexample that was found, rounded up
    witness: Tensor | None = None  # [C, H, W] float64
    predicted: int = -1
    seconds: float = 0.0
    message: str | None = None


@dataclass
class Bracket:
    """What is known of one image."""

    index: int
    label: int
    certified: float = 0.0  # proven up to here
    falsified: float = math.inf  # a misclassified image is this far away
    unproven: float = math.inf  # the smallest radius that was tried and not proven
    unbroken: float = 0.0  # the largest radius that was attacked in vain
    witness: Tensor | None = None
    status: Status | None = None  # where no radius could be tried: misclassified, error
    predicted: int = -1
    probes: int = 0
    seconds: float = 0.0
    message: str | None = None

    def learn(self, probe: Probe) -> None:
        self.probes, self.seconds = self.probes + 1, self.seconds + probe.seconds
        self.predicted = probe.predicted if probe.predicted >= 0 else self.predicted
        self.message = probe.message or self.message
        if probe.status == Status.MISCLASSIFIED:
            self.status, self.falsified = Status.MISCLASSIFIED, 0.0
        elif probe.status == Status.ERROR and probe.predicted < 0:  # the image itself is broken
            self.status = Status.ERROR
        elif probe.status == Status.CERTIFIED:
            self.certified = max(self.certified, probe.radius)
        elif probe.status == Status.FALSIFIED and probe.distance is not None:
            if probe.distance < self.falsified:
                self.falsified, self.witness = probe.distance, probe.witness
        else:
            self.unbroken = max(self.unbroken, probe.radius)
            if probe.side == "prove":
                self.unproven = min(self.unproven, probe.radius)

    def next(self, limit: float, precision: float) -> tuple[float, Side] | None:
        """The radius to try next, and what for; None: both ends are known well enough."""
        if self.status is not None:
            return None
        if self.probes == 0:
            return limit, "attack"  # where it is broken at all
        upper = min(self.unproven, self.falsified, limit)
        if upper - self.certified > max(precision * upper, _FLOOR * limit):
            return between(self.certified, upper), "prove"
        lower = max(self.unbroken, self.certified)
        if math.isfinite(self.falsified) and self.falsified - lower > max(precision * self.falsified, _FLOOR * limit):
            return between(lower, self.falsified), "attack"
        return None


def between(low: float, high: float) -> float:
    """The roundest binary fraction in the middle half of an interval: images with like brackets meet at one radius, in one batch."""
    first, last = low + (high - low) / 4, high - (high - low) / 4
    step = 2.0 ** math.ceil(math.log2(last))
    while math.ceil(first / step) * step > last:
        step /= 2
    return math.ceil(first / step) * step


def largest_radius(norm: Norm, shape: Sequence[int], box: Box) -> float:
    """Every input of the domain is closer than this; without ends, far enough."""
    width = box.high - box.low if math.isfinite(box.high - box.low) else _UNBOUNDED
    return float(width * math.prod(shape) ** (0.0 if math.isinf(P[norm]) else 1.0 / P[norm]))


@torch.no_grad()
def closer(replay: nn.Module, x: Tensor, label: int, witness: Tensor, steps: int = 40) -> Tensor:
    """A misclassified image on the way from x to the witness, as near to x as bisection finds; float64, on the CPU."""
    start, end = x.to("cpu", torch.float64), witness.to("cpu", torch.float64)
    y, near, far, best = torch.tensor([label]), 0.0, 1.0, end
    for _ in range(steps):
        middle = (near + far) / 2
        image = torch.minimum(torch.maximum(start + middle * (end - start), torch.minimum(start, end)), torch.maximum(start, end))
        if float(margin(replay(image[None]), y)) <= 0:
            far, best = middle, image
        else:
            near = middle
    return best


@dataclass(frozen=True)
class RadiusSearch:
    """A certifier and how finely it is asked."""

    certifier: Certifier
    samples: Samples
    norm: Norm
    precision: float

    @property
    def limit(self) -> float:
        return largest_radius(self.norm, self.samples.images.shape[1:], self.certifier.settings.box)

    def run(self, brackets: Sequence[Bracket], keep: Callable[[list[Probe]], None]) -> None:
        """Probe until every bracket is narrow enough; `keep` is called with what every batch taught."""
        attack = replace(self.certifier, settings=replace(self.certifier.settings, stages=("attack",), seconds=0.0))
        while batches := list(self._batches(brackets)):
            for (radius, side), members in batches:
                judge = self.certifier if side == "prove" else attack
                rows = torch.tensor([b.index for b in members])
                x, y = self.samples.images[rows], self.samples.labels[rows]
                found = judge.certify(x, y, Ball(self.norm, radius), rows.tolist())
                probes = [self._probe(b, radius, side, outcome) for b, outcome in zip(members, found, strict=True)]
                for bracket, probe in zip(members, probes, strict=True):
                    bracket.learn(probe)
                    self._check(bracket)
                keep(probes)

    def _batches(self, brackets: Sequence[Bracket]) -> Iterator[tuple[tuple[float, Side], list[Bracket]]]:
        groups = defaultdict[tuple[float, Side], list[Bracket]](list)
        for bracket in brackets:
            following = bracket.next(self.limit, self.precision)
            if following is not None:
                groups[following].append(bracket)
        size = self.certifier.settings.batch
        for key, members in groups.items():
            for start in range(0, len(members), size):
                yield key, members[start : start + size]

    def _probe(self, bracket: Bracket, radius: float, side: Side, outcome: Outcome) -> Probe:
        assert outcome.status is not None
        found = Probe(
            bracket.index, radius, side, outcome.status, predicted=outcome.predicted, seconds=outcome.seconds, message=outcome.message
        )
        if outcome.status != Status.FALSIFIED or outcome.witness is None:
            return found
        x = self.samples.images[bracket.index].double()
        witness = closer(self.certifier.replay, x, bracket.label, outcome.witness)
        size = float(distance((witness - x).flatten(), self.norm)) * _ROUNDING
        return replace(found, distance=min(size, radius), witness=witness)

    def _check(self, bracket: Bracket) -> None:
        """The alarm between probes: what is proven at one radius may not be broken inside it at another."""
        if bracket.certified >= bracket.falsified and bracket.status is None and bracket.witness is not None:
            outcome = Outcome(bracket.label, bracket.predicted, Status.CERTIFIED, witness=bracket.witness)
            what = f"proven at {bracket.certified:.9g}, and a misclassified image is {bracket.falsified:.9g} away"
            image = self.samples.images[bracket.index]
            self.certifier.alarm.unsound(image, outcome, Ball(self.norm, bracket.certified), bracket.index, what)
