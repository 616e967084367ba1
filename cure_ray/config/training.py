"""The training: method, regions, schedules, regularisers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cure_ray.config._base import Model, NonNegative, Positive, Unit, switch
from cure_ray.config.methods import METHODS, Method, MethodRow, Objective, inactive_fields, method_help
from cure_ray.config.regions import Attack, Bounds, Losses, Regions, TrainingRadii
from cure_ray.threats.norms import NORMS, Norm
from cure_ray.threats.transformations import training_transformation


class Training(Model):
    """How to train."""

    method: Method = Field("scratch", description=method_help())
    norms: tuple[Norm, ...] = Field(
        ("linf", "l2"),
        description="Norms of the multi-norm methods. The first one keeps weight 1 - alpha in joint; the warm-up regulariser reads l_inf where it is among them, else the first.",
    )
    base: Literal["max", "joint"] = Field("max", description="Objective inside scratch and finetune.")
    regions: Regions = Regions()
    loss: Losses = switch(Losses())
    bounds: Bounds = switch(Bounds())
    eps: TrainingRadii = TrainingRadii()
    epochs: Annotated[int, Field(ge=1)] = Field(20, description="Epochs in all.")
    standard_epochs: Annotated[int, Field(ge=0)] = Field(1, description="Epochs of natural training before the radius ramp.")
    anneal_epochs: Annotated[int, Field(ge=0)] = Field(
        6, description="Epochs over which the radii grow from 0 to their targets (A18: quartic, then linear)."
    )
    batch_size: Annotated[int, Field(ge=1)] = Field(64, description="Images per step; the last incomplete batch of an epoch is dropped.")
    lr: Positive = Field(1e-4, description="Learning rate of Adam (A20).")
    lr_milestones: tuple[int, ...] = Field(
        (), description="Epochs (from 1) from which the learning rate is multiplied by lr_factor once more (A19)."
    )
    lr_factor: Positive = Field(0.2, description="See lr_milestones.")
    lambda_inf: Unit = Field(
        0.4,
        description="How far the loss of l_inf goes from the attack (0, adversarial training) to bounds on the whole region (1, plain IBP): with loss sabr the side of the propagated box relative to the full one, with the others their coefficient. Good values differ between losses.",
    )
    lambda_2: Unit = Field(1e-5, description="The same for l_2.")
    lambda_1: Unit = Field(0.5, description="The same for l_1.")
    alpha: Unit = Field(0.5, description="Weight of the norms after the first in joint: 0 is the first norm alone, 1 the others alone.")
    eta: NonNegative = Field(2.0, description="Weight of bound alignment in scratch and finetune; 0 turns it off.")
    align: tuple[Norm, Norm] = Field(("linf", "l2"), description="Bound alignment KL(first to second) (A14).")
    align_subset: Literal["first", "second", "both", "all"] = Field(
        "first",
        description="Samples that are aligned (A13): those certified on the small region of the first norm, the second, both, or all samples.",
    )
    projection: bool | None = Field(
        None, description="Gradient projection (merge with a natural epoch) after the ramp; empty: only for scratch."
    )
    beta: Unit = Field(0.5, description="Weight of the natural branch in gradient projection; 0 is the certified branch bit for bit.")
    nt_optimizer: Literal["separate", "copy"] = Field(
        "separate",
        description="Adam state of the natural branch (A23): its own over all epochs, or a throw-away copy of the certified branch's (authors' code).",
    )
    random_weights: Literal["sum", "mean"] = Field("sum", description="Combination of the halves in random (A12): 1 + 1, or 1/2 + 1/2.")
    natural_weight: Annotated[float, Field(ge=0.0, lt=1.0)] = switch(
        0.0, "kappa: weight of the clean cross-entropy beside the robust loss, which gets 1 - kappa, from the ramp on."
    )
    ramp_bound: Literal["ibp", "crown-ibp"] = switch(
        "ibp",
        "Bounds while the radii grow: interval bounds, or CROWN-IBP's mixture, which begins with linear bounds of the margins and ends with interval bounds. Costs one backward pass of bounds per class.",
    )
    l1_weight: NonNegative = Field(0.0, description="Weight of the l1 norm of all trainable tensors (A16).")
    warmup_weight: NonNegative = Field(0.5, description="Weight of the tightness and balance regularisers while the radii grow.")
    relu_shrink: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Multiply the upper bound of crossing neurons by this in training (A2)."
    )
    grad_clip: Positive | None = Field(None, description="Clip the gradient norm to this; empty: never.")
    weight_decay: NonNegative = switch(
        0.0, "Decoupled weight decay (AdamW) of all trainable tensors, per step times the learning rate; 0: plain Adam."
    )
    accumulate: Annotated[int, Field(ge=1)] = switch(
        1, "Batches whose gradients are averaged before every step of the optimiser; BN statistics stay those of each batch."
    )
    ema: Annotated[float, Field(ge=0.0, lt=1.0)] = switch(
        0.0,
        "Decay, per step, of a moving average of weights and BN statistics, e.g. 0.999. The average is what is evaluated, saved and certified; training goes on with the weights themselves. It lags behind them, so short runs want a smaller one and precise_bn. 0: none.",
    )
    precise_bn: bool = switch(
        False,
        "After every epoch, replace the running BN statistics by those of the clean, unaugmented training set under the weights as they are then.",
    )
    start_from: str | None = Field(
        None, description="Checkpoint (or run directory) whose weights training starts from; finetune needs one."
    )
    transformation: str | None = Field(
        None, description="cgt only: the transformation to train against, e.g. R(30) or Tu(2),Tv(2) (docs/guide/geometric.md)."
    )
    transformation_widths: tuple[float, ...] | None = Field(
        None,
        description="cgt only: width of the sub-range of a batch per parameter, in degrees, pixels or factors; empty: the published ones, else the certification widths.",
    )
    attack: Attack = Attack()

    @property
    def row(self) -> MethodRow:
        """What the method is."""
        return METHODS[self.method]

    @property
    def active_norms(self) -> tuple[Norm, ...]:
        """The norms this method propagates."""
        if self.row.norms is not None:
            return self.row.norms
        if self.objective == "joint" and not self.uses_alignment:  # a norm of weight 0 needs no attack (5.1)
            return tuple(norm for norm, weight in zip(self.norms, self.joint_weights, strict=True) if weight > 0)
        return self.norms

    @property
    def objective(self) -> Objective:
        """What is done with the norms' losses."""
        return self.base if self.row.objective == "base" else self.row.objective

    @property
    def joint_weights(self) -> tuple[float, ...]:
        """1 - alpha for the first norm, alpha shared equally by the others."""
        others = max(len(self.norms) - 1, 1)
        return (1 - self.alpha, *[self.alpha / others] * (len(self.norms) - 1))

    @property
    def uses_alignment(self) -> bool:
        return self.row.aligns and self.eta > 0

    @property
    def uses_projection(self) -> bool:
        wanted = self.row.projects if self.projection is None else self.projection
        return wanted and self.beta > 0 and self.row.step == "certified"

    @property
    def ramps(self) -> bool:
        """Whether there are radii (or widths) that grow."""
        return self.row.step != "natural"

    @property
    def first_full_epoch(self) -> int:
        """First epoch at full radius, which is also the first with gradient projection."""
        return self.standard_epochs + self.anneal_epochs + 1

    def lambda_of(self, norm: Norm) -> float:
        if self.row.adversarial:
            return 0.0
        return {"linf": self.lambda_inf, "l2": self.lambda_2, "l1": self.lambda_1}[norm]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ramps and self.standard_epochs + self.anneal_epochs > self.epochs:
            raise ValueError(
                f"the ramp ends after epoch {self.standard_epochs + self.anneal_epochs} but training after {self.epochs}: lower anneal_epochs or raise epochs, or shrink all of them with `scale`"
            )
        if any(m < 1 for m in self.lr_milestones) or list(self.lr_milestones) != sorted(self.lr_milestones):
            raise ValueError(f"lr_milestones must be increasing epochs from 1, got {list(self.lr_milestones)}")
        if self.row.multi_norm and len(self.norms) < 2:
            raise ValueError(
                f"method {self.method} needs at least two norms, got {list(self.norms)}; for one norm use method {self.norms[0] if self.norms else 'linf'}"
            )
        if len(set(self.norms)) != len(self.norms):
            raise ValueError(f"norms lists a norm twice: {list(self.norms)}")
        if self.uses_alignment and (self.align[0] == self.align[1] or not set(self.align) <= set(self.norms)):
            raise ValueError(f"align needs two different norms out of norms={list(self.norms)}, got {list(self.align)}")
        if self.row.continues and self.start_from is None:
            raise ValueError(
                f"method {self.method} starts from a finished l_inf model: set training.start_from to its run directory or checkpoint"
            )
        if self.row.step == "transformation":
            if self.transformation is None:
                raise ValueError(f"method {self.method} trains against a geometric transformation: set training.transformation, e.g. R(30)")
            training_transformation(self.transformation, "", self.transformation_widths)
        trained = self.row.norms or self.norms
        if "loss" in self.row.fields and not self.loss.uniform:
            for norm in NORMS:
                if norm not in trained and self.loss.of(norm) != "sabr":
                    raise ValueError(f"loss.{norm}: {self.loss.of(norm)} has no effect, method {self.method} trains {', '.join(trained)}")
        if "loss" in self.row.fields and self.attack.radius != 1 and all(self.loss.of(norm) == "sabr" for norm in trained):
            raise ValueError("attack.radius has no effect with loss sabr, whose region lies where the attack ended: choose mtl, cc or exp")
        if self.ramp_bound != "ibp" and self.anneal_epochs == 0:
            raise ValueError(f"ramp_bound: {self.ramp_bound} acts while the radii grow, and anneal_epochs is 0: remove one of them")
        for name in inactive_fields(self.method, self.base) & self.model_fields_set:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with method {self.method}: remove it, or choose a method that uses it")
        return self
