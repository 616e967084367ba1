"""A published network: whose it is, where its authors keep the weights, what it is made of, and what was published about it.

One YAML file each in `published/`; no weights are shipped. Torch-free: `architecture.py` builds the network.
"""

import functools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from cure_ray.catalogue.published import PUBLISHED as DATASETS
from cure_ray.config._base import Model, Positive, Radius
from cure_ray.config._explain import explain
from cure_ray.config.files import _load_yaml
from cure_ray.errors import UserError, nearest
from cure_ray.threats import Threat
from cure_ray.threats.text import read_threats

UNION = "union"
Percent = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Source(Model):
    """Where the authors keep their network."""

    url: str
    commit: str | None = None
    path: str | None = Field(None, description="Of the file of weights, below the repository at that commit.")
    licence: str = Field("not stated", description="Of the weights.")


class Origin(Model):
    """The array of the authors' file that a tensor of the network is."""

    array: str
    shape: tuple[int, ...] | None = Field(None, description="Taken as this shape before the axes are exchanged; none: as it is.")
    axes: tuple[int, ...] | None = Field(None, description="The array's axes in the tensor's order; none: as they are.")


class Weights(Model):
    """How the authors' file becomes the network's tensors, and how both are recognised."""

    format: Literal["mat", "pt", "safetensors", "onnx"]
    sha256: Sha256 | None = Field(None, description="Of the authors' file; none: not known here.")
    identity: Sha256 | None = Field(None, description="Of the function the network computes, whatever file it came from.")
    copies: dict[str, Sha256] = Field({}, description="Other files known to hold the same numbers: what they are, and their SHA-256.")
    tensors: dict[str, Origin] = Field({}, description="The network's tensors in the authors' file, where they bear other names there.")

    @field_validator("tensors", mode="before")
    @classmethod
    def _names_alone(cls, value: Any) -> Any:
        return {k: {"array": v} if isinstance(v, str) else v for k, v in value.items()} if isinstance(value, dict) else value


class Layer(Model):
    """One plain layer of a sequence."""

    layer: Literal["normalize", "conv", "linear", "relu", "flatten"]
    inputs: int | None = Field(None, ge=1, description="Channels of a convolution, features of a linear layer.")
    outputs: int | None = Field(None, ge=1)
    kernel: int | None = Field(None, ge=1)
    stride: int = Field(1, ge=1)
    padding: int = Field(0, ge=0)
    mean: tuple[Radius, ...] | None = None
    std: tuple[Radius, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"layer": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> "Layer":
        needed = {"conv": ("inputs", "outputs", "kernel"), "linear": ("inputs", "outputs"), "normalize": ("mean", "std")}
        missing = [name for name in needed.get(self.layer, ()) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a layer {self.layer} needs {', '.join(missing)}")
        return self


class Data(Model):
    """Which images the figures are about."""

    name: str = Field(description="Of the data set.")
    split: Literal["test"] = "test"
    n: int = Field(ge=1, description="How many are certified.")
    samples: tuple[int, ...] | None = Field(None, description="Which of the split, in this order; none: the first n, if `given` is false.")
    given: bool = Field(False, description="Whether the images are a selection that only the authors' file tells: --data is needed.")
    digest: Sha256 | None = Field(None, description="Of the images and labels: the whole split, or the selection where there is one.")

    @model_validator(mode="after")
    def _consistent(self) -> "Data":
        if self.name not in DATASETS:
            raise ValueError(f"unknown data set {self.name!r}.{nearest(self.name, tuple(DATASETS))}")
        if self.samples is not None and (self.given or len(self.samples) != self.n or len({*self.samples}) != self.n):
            raise ValueError(f"{self.n} different samples are announced, {len({*self.samples})} listed; given must be false with a list")
        most = DATASETS[self.name].test
        if self.n > most or any(not 0 <= i < most for i in self.samples or ()):
            raise ValueError(f"{self.name} has {most} test images, numbered from 0")
        return self


class Protocol(Model):
    """Against what the network is judged, and how hard we try."""

    threats: str = Field(description="As `cure-ray certify --threats` takes them, e.g. linf=0.1,l2=24/255.")
    nodes: int = Field(1000, ge=0, description="Sub-problems of branch and bound per image and threat, unless the caller says otherwise.")

    @field_validator("threats")
    @classmethod
    def _readable(cls, value: str) -> str:
        read_threats(value)
        return value

    def read(self) -> list[Threat]:
        return read_threats(self.threats)


class Figure(Model):
    """One number that was published about the network."""

    what: Literal["clean", "certified", "not broken"] = Field(description="Correct; proven robust; correct and not broken by any attack.")
    threat: str | None = Field(None, description="One threat of the protocol, or union; none for clean.")
    value: Percent
    n: int | None = Field(None, ge=1, description="Images it was measured on; none: the source does not say.")
    certifier: str | None = Field(None, description="What proved it, or attacked.")
    source: str = Field(description="Where it is printed.")
    seconds: Positive | None = Field(None, description="Per image, where published.")

    @model_validator(mode="after")
    def _about_a_threat(self) -> "Figure":
        if (self.what == "clean") != (self.threat is None):
            raise ValueError("clean has no threat; certified and not broken are about one, or about union")
        if self.threat not in (None, UNION):
            (found,) = read_threats(str(self.threat))
            object.__setattr__(self, "threat", str(found))  # as a store writes it
        return self


def strongest(figures: Sequence[Figure], what: str, threat: str | None) -> Figure | None:
    """Of several printed numbers the one that says most: the largest proof, the attack that leaves least."""
    own = [f for f in figures if (f.what, f.threat) == (what, threat)]
    return (min if what == "not broken" else max)(own, key=lambda f: f.value) if own else None


class Published(Model):
    """Everything that is known about one published network."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    title: str
    authors: str
    paper: str
    year: int
    source: Source | None = None
    weights: Weights | None = Field(None, description="None: never published, so that nobody can recompute the figures.")
    network: str = Field(description="What it is, in words.")
    input: tuple[int, int, int] | None = Field(None, description="Channels, height, width.")
    layers: tuple[Layer, ...] = ()
    data: Data
    protocol: Protocol
    figures: tuple[Figure, ...] = ()
    notes: str = ""

    @property
    def recomputable(self) -> bool:
        """Whether its weights can be had, so that a figure is more than a claim."""
        return self.weights is not None

    @model_validator(mode="after")
    def _whole(self) -> "Published":
        if self.weights is not None and (not self.layers or self.input is None or self.source is None):
            raise ValueError("weights need source, input and layers: else nobody can put them into a network")
        asked = {UNION, None, *(str(t) for t in self.protocol.read())}
        for figure in self.figures:
            if figure.threat not in asked:
                raise ValueError(f"a figure is about {figure.threat}, the protocol about {self.protocol.threats}")
        return self


def parse_published(text: str, where: str) -> Published:
    """A description from YAML, with errors a person can act on."""
    data = _load_yaml(text, where)
    if not isinstance(data, dict):
        raise UserError(f"{where}: expected a mapping of keys (name, title, source, ...), got {type(data).__name__}")
    try:
        return Published.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where}:\n{explain(error, Published)}") from None


def read_published(path: Path) -> Published:
    """A description that is not shipped: one's own, before it is offered to others."""
    try:
        return parse_published(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a description of a network ({type(error).__name__})") from None


@functools.cache
def all_published() -> dict[str, Published]:
    """Every description that is shipped, by name."""
    files = sorted(
        (p for p in resources.files("cure_ray.zoo").joinpath("published").iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name
    )
    found = {p.name.removesuffix(".yaml"): parse_published(p.read_text(), p.name) for p in files}
    for file, described in found.items():
        if described.name != file:
            raise UserError(f"{file}.yaml describes {described.name!r}: a description bears the name of its file")
    return found


def find_published(name: str) -> Published:
    """By name, or from a file of one's own (NAME.yaml)."""
    if name in all_published():
        return all_published()[name]
    if name.endswith((".yaml", ".yml")):
        return read_published(Path(name))
    raise UserError(f"no published network {name!r} is described here.{nearest(name, tuple(all_published()))}")
