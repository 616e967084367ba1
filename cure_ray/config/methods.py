"""The training methods: one row each, in the order tables show them. Whoever asks what a method does or is called, reads its row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cure_ray.threats.norms import Norm

Method = Literal["natural", "linf", "l2", "l1", "l2_pgd", "joint", "max", "random", "finetune", "scratch", "cgt"]
Objective = Literal["single", "joint", "max", "parts"]  # what is done with the norms' losses: training/losses
Step = Literal["natural", "certified", "transformation"]  # which step trains it once the standard epochs are over: training/epochs
Loss = Literal["sabr", "mtl", "cc", "exp"]  # what is done with a norm's attack and bounds: training/losses


@dataclass(frozen=True)
class MethodRow:
    """What one method is. `norms` None: those of the experiment; `objective` "base": that of `training.base`."""

    meaning: str  # for the help
    step: Step = "certified"
    norms: tuple[Norm, ...] | None = None
    objective: Objective | Literal["base"] = "single"
    aligns: bool = False  # bound alignment
    projects: bool = False  # gradient projection, unless the experiment says otherwise
    adversarial: bool = False  # regions shrink to the attacked point
    continues: bool = False  # starts from a finished network
    fields: tuple[str, ...] = ()  # of Training, which say nothing about a method that does not list them
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # what it changes whatever the preset (docs/explanation/algorithms.md 8 and 12.12)
    display: str = ""  # the paper's name; a method that is not in the paper keeps its own

    @property
    def multi_norm(self) -> bool:
        return self.norms is None

    @property
    def watches_worst(self) -> bool:
        """Whether it is worth logging which norm is the worst."""
        return self.objective in ("max", "base")


_NO_RAMP = {"standard_epochs": 0, "anneal_epochs": 0, "warmup_weight": 0.0}
_BOUNDED = ("loss", "bounds", "natural_weight", "ramp_bound")  # of every method that propagates regions of the norms
_ALIGNED = (*_BOUNDED, "norms", "base", "eta", "align", "align_subset")

METHODS: dict[Method, MethodRow] = {
    "natural": MethodRow("cross-entropy", step="natural", norms=(), defaults={"training": {**_NO_RAMP, "l1_weight": 0.0}}),
    "linf": MethodRow("certified in l_inf alone", norms=("linf",), fields=_BOUNDED),
    "l2": MethodRow("certified in l_2 alone", norms=("l2",), fields=_BOUNDED),
    "l1": MethodRow("certified in l_1 alone", norms=("l1",), fields=_BOUNDED),
    "l2_pgd": MethodRow(
        "adversarial training in l_2",
        norms=("l2",),
        adversarial=True,
        defaults={"network": {"init": "default"}, "training": {"warmup_weight": 0.0, "l1_weight": 0.0}},
    ),
    "joint": MethodRow(
        "the weighted sum over several norms", objective="joint", fields=(*_BOUNDED, "norms", "alpha"), display="CURE-Joint"
    ),
    "max": MethodRow("the worst of several norms per sample", objective="max", fields=(*_BOUNDED, "norms"), display="CURE-Max"),
    "random": MethodRow(
        "one of several norms per sample, by chance",
        objective="parts",
        fields=(*_BOUNDED, "norms", "random_weights"),
        display="CURE-Random",
    ),
    "finetune": MethodRow(
        "max and bound alignment from an l_inf model",
        objective="base",
        aligns=True,
        continues=True,
        fields=_ALIGNED,
        defaults={"training": _NO_RAMP},
        display="CURE-Finetune",
    ),
    "scratch": MethodRow(
        "max, bound alignment and gradient projection",
        objective="base",
        aligns=True,
        projects=True,
        fields=_ALIGNED,
        display="CURE-Scratch",
    ),
    "cgt": MethodRow(
        "certified against a geometric transformation",
        step="transformation",
        norms=(),
        fields=("transformation", "transformation_widths"),
        defaults={
            "network": {"init": "default"},
            "training": {"anneal_epochs": 0, "warmup_weight": 0.0, "l1_weight": 0.0, "grad_clip": 8.0, "transformation": "R(10)"},
        },
    ),
}
# The losses of one norm, between the attack's (lambda = 0) and the bound's on the whole region (lambda = 1): "expressive losses" of
# De Palma et al., ICLR 2024. A is the attack's loss, B that of bounds on the whole region (docs/explanation/algorithms.md 5.8).
LOSSES: dict[Loss, str] = {
    "sabr": "bounds on a region lambda times the full size, placed by the attack (SABR)",
    "mtl": "(1 - lambda) A + lambda B (MTL-IBP)",
    "cc": "the loss of (1 - lambda) attacked margins + lambda bounded margins (CC-IBP)",
    "exp": "A^(1 - lambda) B^lambda (Exp-IBP)",
}
_SPECIFIC = {name for row in METHODS.values() for name in row.fields}


def method_help() -> str:
    return " ".join(f"{name}: {row.meaning}." for name, row in METHODS.items())


def loss_help() -> str:
    return "; ".join(f"{name}: {meaning}" for name, meaning in LOSSES.items())


def inactive_fields(method: Method, base: str = "max") -> set[str]:
    """Fields of Training that say nothing about this method; giving one a value of one's own is an error."""
    row = METHODS[method]
    weighted = {"alpha"} if row.objective == "base" and base == "joint" else set[str]()
    return _SPECIFIC - set(row.fields) - weighted


def display_name(method: str) -> str:
    """The method as the paper calls it; anything else (a network made elsewhere) keeps its own name."""
    row = METHODS.get(method)  # type: ignore[call-overload]
    return row.display or method if row else method


def method_rank(method: str) -> int:
    """Its place in tables; what is no method of ours comes last."""
    return [*METHODS, method].index(method)
