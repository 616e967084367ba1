"""The problem: which images, which network, which radii."""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from cure_ray.catalogue.own import own_name, read_own
from cure_ray.catalogue.published import PUBLISHED, DatasetRow, Shape
from cure_ray.config._base import Model, NonNegative, Positive, Radius
from cure_ray.config.factories import source_digest, split_factory
from cure_ray.errors import nearest
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.norms import NORMS, Norm

NETWORKS = ("cnn7", "conv-small", "mlp", "resnet-small")


def _is_none(value: Any) -> bool:
    """What an experiment does not use is no part of its written form, nor of its hash."""
    return value is None


class OwnImages(Model):
    """What a user's own data set held when the experiment was made."""

    digest: str
    shape: Shape
    classes: int
    train: int
    test: int
    domain: str | None = Field(None, exclude_if=_is_none)  # None: [0, 1], as images lie

    @property
    def row(self) -> DatasetRow:
        channels, box = self.shape[0], UNIT if self.domain is None else Box.of(self.domain)
        plain = (0.0,) * channels, (1.0,) * channels
        return DatasetRow(self.shape, self.classes, self.train, self.test, *plain, domain=(box.low, box.high))


class Jitter(Model):
    """How far a training image may be turned, slanted, zoomed and shifted, each by a uniform draw."""

    rotate: Annotated[float, Field(ge=0.0, le=180.0)] = Field(0.0, description="Degrees to either side.")
    shear: Annotated[float, Field(ge=0.0, le=60.0)] = Field(0.0, description="Slant in degrees to either side.")
    zoom: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Share by which it grows or shrinks, 0.1: to 90 to 110 %.")
    shift: NonNegative = Field(0.0, description="Pixels in either direction, also parts of one.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any((self.rotate, self.shear, self.zoom, self.shift)):
            raise ValueError("jitter moves nothing: set rotate, shear, zoom or shift, or remove it")
        return self


class Dataset(Model):
    """Which images, and how they are split."""

    path: str | None = Field(
        None,
        exclude_if=_is_none,
        description="Your own images instead of a published data set: an .npz file with the arrays images (N, C, H, W; uint8, or float32 in [0, 1]) and labels, test_images and test_labels if it has them, and for numbers that are no pixels domain, two ends such as -inf, inf; or a folder with one folder of images per class, perhaps below train/ and test/. Without test images every fifth image (of a folder: of each class) is one. They are neither normalised nor augmented.",
    )
    content: OwnImages | None = Field(
        None,
        exclude_if=_is_none,
        description="Written by cure-ray: what `path` held, which is part of the experiment's hash; the path is not.",
    )
    name: str = Field(
        "digits",
        description=f"Data set: {', '.join(PUBLISHED)}. `digits` ships with scikit-learn and needs no download. With `path`: a name for tables, by default the file's.",
    )
    train_samples: int | None = Field(
        None, ge=2, description="Use only this many training images (the first of a fixed shuffle); all if empty."
    )
    validation: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Images held out of the training set for validation and searches; a fixed, seed-independent choice. Empty: a tenth of the training set, at most 5000.",
    )
    augment: bool = Field(
        True,
        description="Random flips and crops where the data set has them (CIFAR, TinyImageNet), and `jitter`; reproducible per (seed, epoch, sample).",
    )
    jitter: Jitter | None = Field(
        None,
        exclude_if=_is_none,
        description="Turn, slant, zoom and shift every training image a little, by bilinear interpolation and before flips and crops; empty: not at all.",
    )
    crop: int | None = Field(
        None,
        ge=8,
        le=64,
        description="TinyImageNet only (A1): side of the crop used for training and testing; 56 by default, 64 pads instead.",
    )

    @property
    def row(self) -> DatasetRow:
        """What the data set is."""
        return PUBLISHED[self.name] if self.content is None else self.content.row

    @property
    def stream(self) -> str:
        """What the shuffle of the validation split is drawn from."""
        return self.name if self.content is None else self.content.digest

    @property
    def side(self) -> int | None:
        """Side of the crop that is used; None: the whole image."""
        return None if self.row.crop is None else self.crop or self.row.crop

    @property
    def input_shape(self) -> Shape:
        channels, height, width = self.row.shape
        return (channels, height, width) if self.side is None else (channels, self.side, self.side)

    @property
    def box(self) -> Box:
        """Where every number of an image lies."""
        return Box(*self.row.domain)

    @property
    def num_classes(self) -> int:
        return self.row.classes

    @property
    def pool_size(self) -> int:
        """Images available for training and validation together."""
        return min(self.train_samples or self.row.train, self.row.train)

    @property
    def validation_size(self) -> int:
        return self.validation if self.validation is not None else min(5000, self.pool_size // 10)

    @property
    def train_size(self) -> int:
        return self.pool_size - self.validation_size

    @model_validator(mode="before")
    @classmethod
    def _describe(cls, data: Any) -> Any:
        """Read a user's own data set, unless the experiment says already what it held."""
        if not isinstance(data, dict) or not isinstance(data.get("path"), str):
            return data
        path = Path(data["path"]).expanduser().absolute()
        found = {"name": own_name(path), **data, "path": str(path)}
        if found.get("content") is None:
            content = read_own(path)
            row = content.row
            box = Box(*row.domain)
            found["content"] = OwnImages(
                digest=content.digest, shape=row.shape, classes=row.classes, train=row.train, test=row.test,
                domain=None if box == UNIT else str(box),
            )  # fmt: skip
        return found

    @field_validator("name")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        own = info.data.get("path") is not None
        if own and value in PUBLISHED:
            raise ValueError(f"{value} is a published data set, and dataset.path names your own: give it another name, or none")
        if not own and value not in PUBLISHED:
            raise ValueError(f"unknown data set.{nearest(value, list(PUBLISHED))} Your own images are given by dataset.path")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is not None and self.path is None:
            raise ValueError("content describes the images at dataset.path, which is missing")
        if self.crop is not None and self.row.crop is None:
            raise ValueError(f"crop applies to tinyimagenet only, not to {self.name}")
        if self.jitter is not None and (self.path is not None or not self.augment):
            raise ValueError("jitter needs augment: true and a published data set; images of your own are not augmented")
        if self.validation_size >= self.pool_size:
            raise ValueError(f"validation={self.validation} leaves no training image of {self.pool_size}")
        return self


class NetworkConfig(Model):
    """Which architecture."""

    factory: str | None = Field(
        None,
        exclude_if=_is_none,
        description="Your own network instead: package.module:function, which returns a torch.nn.Sequential of the layers bounds are known for (docs/guide/own.md). Its code runs: it must lie in the working directory, or be allowed with --allow-code.",
    )
    arguments: dict[str, JsonValue] | None = Field(
        None, exclude_if=_is_none, description="Keyword arguments of the factory, e.g. {width: 32}."
    )
    code: str | None = Field(
        None,
        exclude_if=_is_none,
        description="Written by cure-ray: digest of the factory's source (its module and what that imports of your own), which is part of the experiment's hash; the module's name is not.",
    )
    name: str = Field(
        "conv-small",
        description="cnn7 is the paper's network; resnet-small has three residual blocks; conv-small and mlp are for CPUs and tests. With `factory`: the function's name.",
    )
    width: Positive = Field(1.0, description="Multiplier of all channel and hidden widths.")
    batch_norm: bool = Field(
        True, description="BN after every affine layer but the last (conv-small, mlp, resnet-small; cnn7 always has it)."
    )
    init: Literal["ibp", "default"] = Field(
        "ibp", description="ibp: weights ~ Normal(0, sqrt(2 pi)/fan_in), made for bound propagation. default: PyTorch's."
    )
    last_conv_stride: Literal[1, 2] = Field(1, description="cnn7 only (A1): stride of the fifth convolution.")

    @model_validator(mode="before")
    @classmethod
    def _describe(cls, data: Any) -> Any:
        """Look up a factory's source, unless the experiment says already what it was. Nothing is run."""
        if not isinstance(data, dict) or not isinstance(data.get("factory"), str):
            return data
        _, function = split_factory(data["factory"])
        return {**data, "name": function, "code": data.get("code") or source_digest(data["factory"])}

    @field_validator("name")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        if info.data.get("factory") is None and value not in NETWORKS:
            raise ValueError(f"unknown network.{nearest(value, NETWORKS)} Your own is given by network.factory")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factory is None and (self.arguments is not None or self.code is not None):
            raise ValueError("arguments and code belong to network.factory, which is missing")
        if self.factory is not None:
            for name in {"width", "batch_norm", "last_conv_stride"} & self.model_fields_set:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect with network.factory: give it as one of network.arguments")
            return self
        if self.name == "cnn7" and not self.batch_norm:
            raise ValueError("cnn7 always has batch normalisation; use another network to do without it")
        if self.name != "cnn7" and self.last_conv_stride != 1:
            raise ValueError(f"last_conv_stride belongs to cnn7, not to {self.name}")
        return self


class Threats(Model):
    """The radii to be robust to, in pixel units (images in [0, 1]); fractions like 8/255 are kept exactly."""

    linf: Radius = Field(Fraction(1, 10), description="l_inf radius in pixel units.")
    l2: Radius = Field(Fraction(1, 2), description="l_2 radius in pixel units.")
    l1: Radius = Field(Fraction(1), description="l_1 radius in pixel units.")

    def eps(self, norm: Norm) -> float:
        return float(getattr(self, norm))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for norm in NORMS:
            if self.eps(norm) < 0:
                raise ValueError(f"{norm} radius must not be negative, got {self.eps(norm)}")
        if self.linf > 1:
            raise ValueError(
                f"linf={self.eps('linf'):g}: radii are in pixel units with images in [0, 1]; for 8-bit levels write it as a fraction, e.g. 8/255"
            )
        return self
