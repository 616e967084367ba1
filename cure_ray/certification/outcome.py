"""What is known of one sample while it is certified, and what all threats share: the clean check, one failure at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cure_ray.bounds.arithmetic import out_of_memory
from cure_ray.certification.verdict import CLEAN, Status
from cure_ray.errors import SoundnessError, UserError
from cure_ray.threats.box import EVERYWHERE, Box

# How far, relative to the margin, a bound may exceed the margin of a real point before it is called unsound: a certificate by
# the rounding of the float64 replay; the bounds of an undecided sample are search results and may be float32.
_ROUNDING = {True: 1e-7, False: 1e-2}


@dataclass
class Outcome:
    """What is known of one sample on its way; final when `status` is set and the batch is done."""

    label: int
    predicted: int = -1
    status: Status | None = None
    stage: str = CLEAN
    margins: Tensor | None = None  # [K-1] float64 on the CPU: the best proven lower bound of each margin
    attack_margin: float | None = None
    witness: Tensor | None = None  # [C, H, W] float64
    seconds: float = 0.0
    nodes: int = 0
    message: str | None = None

    def decide(self, status: Status, stage: str, message: str | None = None) -> None:
        self.status, self.stage, self.message = status, stage, message

    @property
    def open(self) -> bool:
        return self.status is None

    def contradicted_by(self, margin: float | None) -> bool:
        """Whether a real image of this margin lies below the bound: caught long before anything is misclassified."""
        if margin is None or self.margins is None:
            return False
        return float(self.margins.min()) > margin + _ROUNDING[self.status == Status.CERTIFIED] * (1 + abs(margin))


@torch.no_grad()
def check_clean(replay: nn.Module, x_BCHW: Tensor, outcomes: Sequence[Outcome], box: Box = EVERYWHERE) -> None:
    """Decide what needs no perturbation: wrong predictions, images outside the domain, and what is no finite number."""
    finite = torch.isfinite(x_BCHW.flatten(1)).all(1).tolist()
    domain = ((x_BCHW >= box.low) & (x_BCHW <= box.high)).flatten(1).all(1).tolist()
    logits = replay(x_BCHW.to("cpu", torch.float64))
    for outcome, row, ok, within in zip(outcomes, logits, finite, domain, strict=True):
        if not ok or not bool(torch.isfinite(row).all()):
            what = "the image" if not ok else "the network's output on it"
            outcome.decide(Status.ERROR, CLEAN, f"{what} holds NaN or infinite values")
            continue
        if not within:
            outcome.decide(Status.ERROR, CLEAN, f"the image has pixels outside {box.words()}")
            continue
        outcome.predicted = int(row.argmax())
        if outcome.predicted != outcome.label:
            outcome.decide(Status.MISCLASSIFIED, CLEAN)


def isolate(members: Sequence[int], work: Callable[[Sequence[int]], None], failed: Callable[[int, Status, str], None]) -> None:
    """Work on all members; where that fails on their halves, so that one bad sample costs only itself."""
    try:
        work(members)
    except (UserError, SoundnessError):
        raise
    except Exception as error:
        if len(members) == 1:
            failed(members[0], Status.OOM if out_of_memory(error) else Status.ERROR, f"{type(error).__name__}: {error}"[:500])
            return
        half = len(members) // 2
        for part in (members[:half], members[half:]):
            isolate(part, work, failed)
