"""The verdict: one row per (checkpoint, sample, threat), and the words for what can come of it."""

from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 2
CLEAN = "clean"  # stage of a row that needed no perturbation
SKIPPED = "skipped"  # stage of a row that --union-only never looked at


class Status(StrEnum):
    """What is known of a sample under a threat. Only `certified` counts as robust."""

    CERTIFIED = "certified"  # proven: every margin has a finite, positive lower bound
    FALSIFIED = "falsified"  # a stored image of the ball, inside the domain, is misclassified
    UNKNOWN = "unknown"  # all enabled stages ran and decided nothing
    TIMEOUT = "timeout"  # branch and bound ran out of its time
    OOM = "oom"  # out of memory even for this sample alone
    ERROR = "error"  # NaN, or an exception: never counted as an outcome of verification
    MISCLASSIFIED = "misclassified"  # wrong without any perturbation


@dataclass(frozen=True)
class Verdict:
    """One row of the results store; cure_ray.results.schema says what every column means."""

    schema_version: int
    run_id: str
    checkpoint_digest: str
    dataset: str
    split: str
    sample_index: int
    label: int
    predicted: int
    family: str
    threat: str
    norm: str
    eps: float
    status: Status
    stage: str
    margin_lb: float | None
    margins: tuple[float, ...]
    attack_margin: float | None
    witness: str | None
    seconds: float
    engine: str
    engine_version: str
    seed: int
    stages: str
    budget_seconds: float
    budget_nodes: int
    box: str
    nodes: int
    message: str | None
    grid: str | None = None
