"""What a training does in one norm: the attack, the region it places, the loss taken there, and the radius."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cure_ray.config._base import Model, Positive, Radius, switch
from cure_ray.config.methods import Loss, loss_help
from cure_ray.threats.norms import NORMS, Norm

Bound = Literal["ibp", "crown-ibp"]


class Attack(Model):
    """The attack that places the small region during training."""

    steps: Annotated[int, Field(ge=0)] = Field(8, description="Gradient steps per norm.")
    step: Positive = Field(
        0.5, description="First step length of the l_inf attack relative to the radius; times 0.1 at 50, 80 and 90 % of the steps."
    )
    l2_step: Positive = Field(0.5, description="The same for l_2 and l_1 (A7).")
    l2_init: Literal["box", "ball"] = Field(
        "box", description="Start of the l_2 attack (A6): uniform in the box as the paper writes, or in the ball."
    )
    l2_project: Literal["sphere", "ball", "accumulate"] = Field(
        "sphere",
        description="l_2 projection (A8): to norm exactly eps, to norm at most eps, or the authors' code's quirk that adds the projected step to the iterate.",
    )
    returns: Literal["last", "best"] = Field(
        "last", description="Which iterate places the region (A9): the last one, or the one of highest loss."
    )
    radius: Positive = switch(
        1.0,
        "Radius of the attack relative to that of the bounds, for losses mtl, cc and exp; De Palma et al. use 2.1 on CIFAR-10 at 2/255.",
    )
    tau_mode: Literal["dimwise", "scalar"] = Field(
        "dimwise", description="Half-width of the small box (A5): per pixel inside [0, 1], or one number clipped to [0, 1]."
    )


class Regions(Model):
    """Shape of the propagated region per norm: the paper's axis-parallel box, or a small ball of the norm itself."""

    linf: Literal["box"] = Field("box", description="An l_inf ball is a box.")
    l2: Literal["box", "ball"] = Field(
        "box", description="box: the paper's small box around the attack. ball: a small l_2 ball, exact through the first layer."
    )
    l1: Literal["ball"] = Field("ball", description="A small l_1 ball, exact through the first layer.")


class Losses(Model):
    """The loss of each norm; one word stands for all of them."""

    linf: Loss = Field("sabr", description=f"Loss of l_inf. {loss_help()}. One word for `loss` itself sets all norms.")
    l2: Loss = Field("sabr", description="The same for l_2; mtl, cc and exp attack and bound the ball itself, whatever regions.l2 says.")
    l1: Loss = Field("sabr", description="The same for l_1.")

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, data: Any) -> Any:
        return dict.fromkeys(NORMS, data) if isinstance(data, str) else data

    def of(self, norm: Norm) -> Loss:
        return {"linf": self.linf, "l2": self.l2, "l1": self.l1}[norm]

    @property
    def uniform(self) -> bool:
        return self.linf == self.l2 == self.l1


class Bounds(Model):
    """The bounds of each norm's region; one word stands for all of them."""

    linf: Bound = Field(
        "ibp",
        description="Bounds of l_inf's region: intervals, or where it is tighter one linear bound of every margin on hidden intervals (CROWN-IBP; one backward pass of bounds per class). One word for `bounds` itself sets all norms.",
    )
    l2: Bound = Field("ibp", description="The same for l_2.")
    l1: Bound = Field("ibp", description="The same for l_1, whose intervals are the loosest.")

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, data: Any) -> Any:
        return dict.fromkeys(NORMS, data) if isinstance(data, str) else data

    def of(self, norm: Norm) -> Bound:
        return {"linf": self.linf, "l2": self.l2, "l1": self.l1}[norm]


class TrainingRadii(Model):
    """Radii used in training where they differ from the certified ones."""

    linf: Radius | None = Field(None, description="Training radius for l_inf; the threat's if empty.")
    l2: Radius | None = Field(None, description="Training radius for l_2; the threat's if empty.")
    l1: Radius | None = Field(None, description="Training radius for l_1; the threat's if empty.")
