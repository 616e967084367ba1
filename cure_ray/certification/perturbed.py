"""What geometric and patch certification share with the cascade: the clean check, and the alarm when a proof is contradicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import CLEAN, Outcome
from cure_ray.certification.bundle import ThreatLike, save_bundle
from cure_ray.certification.verdict import Status
from cure_ray.errors import SoundnessError


@torch.no_grad()
def check_clean(replay: nn.Module, x_BCHW: Tensor, outcomes: Sequence[Outcome]) -> None:
    """Decide what needs no perturbation: wrong predictions, and images or outputs that are no finite numbers."""
    logits = replay(x_BCHW.to("cpu", torch.float64))
    finite = torch.isfinite(x_BCHW.flatten(1)).all(1).tolist()
    inside = ((x_BCHW >= 0) & (x_BCHW <= 1)).flatten(1).all(1).tolist()
    for outcome, row, ok, domain in zip(outcomes, logits, finite, inside, strict=True):
        if not (ok and domain and bool(torch.isfinite(row).all())):
            message = "the network's output is not finite" if ok and domain else "the image is not a finite one in [0, 1]"
            outcome.decide(Status.ERROR, CLEAN, message)
            continue
        outcome.predicted = int(row.argmax())
        if outcome.predicted != outcome.label:
            outcome.decide(Status.MISCLASSIFIED, CLEAN)


def raise_unsound(
    root: Path, network: nn.Module, image: Tensor, outcome: Outcome, threat: ThreatLike, index: int, what: str, engine: NativeEngine
) -> NoReturn:
    """Save everything needed to reproduce the contradiction, then stop the run."""
    path = save_bundle(
        root,
        network,
        image,
        outcome.label,
        threat,
        index,
        what,
        outcome.witness,
        outcome.margins,
        engine.name,
        engine.version,
        {},
        0,
    )
    raise SoundnessError(
        f"SOUNDNESS FAILURE at sample {index}, {threat}: {what}. No certificate of this run can be trusted. "
        f"Everything needed to reproduce it is in {path}; please report it."
    )
