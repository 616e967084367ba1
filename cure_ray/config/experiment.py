"""The experiment: problem, training, execution and certification in one frozen object whose hash is the identity of a run."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cure_ray.catalogue.published import GRIDS, grid_for
from cure_ray.config._base import Model, NonNegative, Positive
from cure_ray.config.problem import Dataset, NetworkConfig, Threats
from cure_ray.config.stages import DEFAULT_STAGES, NODES, Stage
from cure_ray.config.training import Training
from cure_ray.errors import UserError
from cure_ray.threats.box import Box
from cure_ray.threats.norms import NORMS, Norm, contains
from cure_ray.threats.text import check_list, read_threats, split_threats
from cure_ray.threats.transformations import check_grid

PUBLISHED = "published"


class Execution(Model):
    """Where and how the work runs. Nothing here changes what is learnt, beyond rounding where the text says so."""

    mode: Literal["serial", "parallel"] = Field(
        "serial", description="serial: one process. parallel: Ray Train, the natural and the certified epoch at the same time."
    )
    device: str = Field("auto", description="auto (cuda if there is one), cpu, cuda, cuda:1, ...")
    threads: Annotated[int, Field(ge=1)] = Field(
        1, description="CPU threads per process. One gives the same bits on every machine with the same instruction set."
    )
    compile: bool = Field(
        False, description="torch.compile the bound propagation and the attack step. Rounding may differ from the eager run."
    )
    channels_last: bool | None = Field(
        None, description="NHWC memory layout in training; empty: wherever there are convolutions, where it is faster."
    )
    keep_checkpoints: Annotated[int, Field(ge=1)] = Field(2, description="How many of the last epochs' checkpoints to keep.")
    ct_workers: Annotated[int, Field(ge=1)] = Field(
        1,
        description="Data-parallel ranks of the certified branch (parallel only). More than one changes rounding, and for method random which norm a sample gets.",
    )
    gpus_per_worker: NonNegative = Field(1.0, description="GPUs per rank on a cluster that has them; fractions allowed.")
    cpus_per_worker: Positive = Field(1.0, description="CPUs per rank.")


class Certification(Model):
    """The defaults of `cure-ray certify` for this experiment."""

    threats: tuple[str, ...] = Field(
        (),
        description="What to certify, each as `cure-ray certify --threats` reads it: linf, l2, l1 (alone: at the experiment's radius, else l2=0.3), transformations such as R(10) or 'Tu(2),Tv(2)', patch=2x2 (docs/guide/geometric.md). Empty: every norm that has a radius.",
    )
    grid: str = Field(
        PUBLISHED,
        description=f"Cells that transformations are cut into: published (those of the experiment's data set, where there are any), or a name: {', '.join(GRIDS)}.",
    )
    samples: Annotated[int, Field(ge=1)] = Field(1000, description="Test images to certify.")
    selection: Literal["first", "stride"] = Field(
        "first", description="Which test images (A28): the first ones, or an even stride over the test set."
    )
    stages: tuple[Stage, ...] = Field(
        DEFAULT_STAGES,
        description="Stages of the cascade, in order. A budget of branch and bound adds that stage.",
    )
    seconds: NonNegative | None = Field(
        None, description="Branch-and-bound budget per sample and threat, in seconds (A27); 0: it does not run. Empty: see nodes."
    )
    nodes: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description=f"The same in sub-problems; alone, time is no limit (but an hour); 0: it does not run. Both empty: {NODES} sub-problems.",
    )
    attack: Literal["default", "strong"] = Field(
        "default", description="How hard to search for counterexamples: strong costs 10 to 20 times as much where none is found."
    )
    domain: str | None = Field(
        None,
        description="Where inputs lie, which cuts off balls: LOW,HIGH, or none for no limits. Empty: the data set's, which is 0,1 for images.",
    )

    @field_validator("domain")
    @classmethod
    def _is_domain(cls, value: str | None) -> str | None:
        return None if value is None else str(Box.of(value))

    @field_validator("threats", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            return value  # pydantic says what is wrong with it
        return tuple(threat for part in parts for threat in split_threats(part))

    @field_validator("grid")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if value == PUBLISHED else check_grid(value)

    @field_validator("threats")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        check_list(value)
        return value


class Experiment(Model):
    """Everything a run depends on."""

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9._-]+$", description="A short name for tables and directories.")
    origin: str = Field("", description="Where the settings came from (preset, profile, scale); written by cure-ray, for the reader.")
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(0, description="One seed for everything random.")
    dataset: Dataset = Dataset()
    network: NetworkConfig = NetworkConfig()
    threats: Threats = Threats()
    training: Training = Training()
    execution: Execution = Execution()
    certification: Certification = Certification()

    @property
    def config_hash(self) -> str:
        """Identity of a trained network: everything but names, placement and certification settings; what is a user's own, by content."""
        content = self.model_dump(mode="json", exclude={"name", "origin", "execution", "certification"})
        if self.dataset.content is not None:
            content["dataset"] = {key: value for key, value in content["dataset"].items() if key not in ("name", "path")}
        content["network"].pop("factory", None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def grid(self) -> str:
        """The name of the grid its transformations are certified on."""
        return grid_for(self.dataset.name) if self.certification.grid == PUBLISHED else self.certification.grid

    def training_eps(self, norm: Norm) -> float:
        own = getattr(self.training.eps, norm)
        return float(own) if own is not None else self.threats.eps(norm)

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset.train_size // self.training.batch_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.training.batch_size > self.dataset.train_size:
            raise ValueError(
                f"batch_size {self.training.batch_size} exceeds the {self.dataset.train_size} training images of {self.dataset.name}"
            )
        if self.training.accumulate > self.steps_per_epoch:
            raise ValueError(f"training.accumulate: an epoch has {self.steps_per_epoch} batches, got {self.training.accumulate}")
        if self.training.precise_bn and not self.network.batch_norm:
            raise ValueError("training.precise_bn has no effect: network.batch_norm is false")
        shape = self.dataset.input_shape
        dimension = shape[0] * shape[1] * shape[2]
        balls: Mapping[Norm, float] = {norm: self.threats.eps(norm) for norm in NORMS if self.threats.eps(norm) > 0}
        for inner, inner_eps in balls.items():
            for outer, outer_eps in balls.items():
                if inner != outer and contains(outer, outer_eps, inner, inner_eps, dimension):
                    raise ValueError(
                        f"the {inner} ball of radius {inner_eps:g} lies inside the {outer} ball of radius {outer_eps:g} (dimension {dimension}), so it adds nothing to the union: change one of the radii, or set {inner} to 0 to leave it out"
                    )
        try:
            read_threats(";".join(self.certification.threats), self.grid, shape[1:], balls)
        except UserError as error:
            raise ValueError(f"certification.threats: {error}") from None
        return self
