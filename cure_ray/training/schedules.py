"""How radii and learning rate move over a run (docs/explanation/algorithms.md 6)."""

from cure_ray.config import Training


def ramp(step: int, start: int, end: int) -> float:
    """The fraction of the full radius at a step: 0 before `start`, quartic then linear, 1 from `end` on (A18).

    The two pieces join smoothly a quarter of the way; the first annealed step is already above 0.
    """
    if step < start:
        return 0.0
    if step >= end:
        return 1.0
    origin = start - 1
    middle = origin + (end - origin) // 4
    width = middle - origin
    scale = 1.0 / (4 * (end - middle) * width**3 + width**4) if width else 0.0
    if step <= middle:
        return scale * (step - origin) ** 4
    joint = scale * width**4
    return joint + (1 - joint) * (step - middle) / (end - middle)


def radius_fraction(training: Training, epoch: int, batch: int, batches: int) -> float:
    """rho at batch `batch` (from 0) of epoch `epoch` (from 1)."""
    start = (1 + training.standard_epochs) * batches
    return ramp(epoch * batches + batch, start, start + training.anneal_epochs * batches)


def learning_rate(training: Training, epoch: int) -> float:
    """Multiplied by lr_factor at every milestone m with epoch >= m (A19)."""
    return training.lr * training.lr_factor ** sum(epoch >= m for m in training.lr_milestones)
