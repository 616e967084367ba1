"""Re-derive a sample of certificates with the other engine: two implementations agree, or we say where they do not."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cure_ray import seeding
from cure_ray.bounds.engine import Engine
from cure_ray.certification.job import CascadeSettings
from cure_ray.data.samples import Samples
from cure_ray.threats.balls import Ball


@dataclass(frozen=True)
class CrossCheck:
    """What the other engine says of certificates under one threat."""

    engine: str
    threat: Ball
    checked: tuple[int, ...]  # sample numbers
    confirmed: tuple[int, ...]  # certified by the other engine too
    best: tuple[float, ...]  # its best worst-margin bound, per checked sample

    def __str__(self) -> str:
        text = f"cross-check {self.threat}: {self.engine} confirms {len(self.confirmed)} of {len(self.checked)} certificates"
        open_ = [f"{i} (bound {b:.3g})" for i, b in zip(self.checked, self.best, strict=True) if i not in self.confirmed]
        if not open_:
            return text
        why = " It bounds the whole ball, without the image domain, so it may fail where we prove." if self.threat.norm != "linf" else ""
        return f"{text}; NOT confirmed: samples {', '.join(open_)}.{why}"


def cross_check(
    engine: Engine, samples: Samples, threat: Ball, certified: Sequence[int], settings: CascadeSettings, seed: int, limit: int = 20
) -> CrossCheck:
    """Take up to `limit` certified samples at random and go up the other engine's stages until each is proven or none is left."""
    order = torch.randperm(len(certified), generator=seeding.generator("cpu", seed, "cross-check", str(threat)))
    chosen = sorted(certified[int(i)] for i in order[:limit])
    x, y = samples.images[chosen], samples.labels[chosen]
    best = torch.full((len(chosen),), -torch.inf, dtype=torch.float64)
    for stage in engine.stages:
        todo = (~(best > 0)).nonzero().squeeze(1)
        if stage == "branch-and-bound" or not len(todo):
            break
        margins = engine.margins(engine.problem(x[todo], y[todo], threat, settings.box), stage).to("cpu")
        worst = torch.nan_to_num(margins.amin(1), nan=-torch.inf)
        best[todo] = torch.maximum(best[todo], worst)
    confirmed = tuple(i for i, value in zip(chosen, best.tolist(), strict=True) if value > 0)
    return CrossCheck(f"{engine.name} {engine.version}", threat, tuple(chosen), confirmed, tuple(best.tolist()))
