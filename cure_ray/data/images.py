"""Images as tensors: a fixed validation split, and augmentation that is reproducible per (seed, epoch, sample).

A whole split lives in one uint8 tensor on the training device; a batch is one gather. There is no loader process to seed.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cure_ray import seeding
from cure_ray.catalogue.own import Source
from cure_ray.config import Dataset
from cure_ray.config.problem import Jitter
from cure_ray.data.files import read_own_split, read_split

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Augmentation:
    """Random flip, then a random crop of `side` after edge-replicating padding; before both what `jitter` says."""

    flip: bool
    pad: int
    side: int
    jitter: Jitter | None = None


@dataclass(frozen=True)
class Images:
    """A split: raw levels [N,C,H,W] in uint8, the level that means 1.0, labels, and each image's index in its source split."""

    raw: Tensor
    levels: int
    labels: Tensor
    index: Tensor
    augmentation: Augmentation | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Images":
        return replace(self, raw=self.raw.to(device), labels=self.labels.to(device))

    def batch(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels in [0, 1] and labels, without augmentation."""
        return self.raw[index_B].float() / self.levels, self.labels[index_B]

    def pixels(self) -> Tensor:
        return self.raw.float() / self.levels


@dataclass(frozen=True)
class AugmentationTable:
    """The draws of one epoch for every sample, so that sample i looks the same whatever batch or worker it lands in."""

    rows_N: Tensor  # crop offsets
    columns_N: Tensor
    flips_N: Tensor
    maps_N23: Tensor | None = None  # where in the image every pixel comes from, in coordinates from -1 to 1

    @staticmethod
    def draw(images: Images, seed: int, epoch: int, branch: str) -> "AugmentationTable | None":
        plan = images.augmentation
        if plan is None:
            return None
        rng = seeding.generator("cpu", seed, epoch, branch, "augment")
        choices = images.raw.shape[-1] + 2 * plan.pad - plan.side + 1
        device = images.raw.device
        rows, columns = (torch.randint(choices, (len(images),), generator=rng).to(device) for _ in range(2))
        flips = (torch.rand(len(images), generator=rng) < 0.5).to(device) & plan.flip
        maps = None if plan.jitter is None else _maps(plan.jitter, images, seeding.generator("cpu", seed, epoch, branch, "jitter"))
        return AugmentationTable(rows, columns, flips, maps)


def _maps(jitter: Jitter, images: Images, rng: torch.Generator) -> Tensor:
    """One affine map per image, [N, 2, 3]: of a pixel's place to the place its value is taken from."""
    count, (height, width) = len(images), images.raw.shape[-2:]
    turn, slant, zoom, down, right = (2 * torch.rand(5, count, generator=rng) - 1).unbind()
    angle, slope, size = torch.deg2rad(jitter.rotate * turn), torch.deg2rad(jitter.shear * slant).tan(), 1 / (1 + jitter.zoom * zoom)
    cos, sin, ratio = angle.cos() * size, angle.sin() * size, height / width
    across, along = 2 * jitter.shift * right / width, 2 * jitter.shift * down / height
    entries = (cos, (cos * slope - sin) * ratio, across, sin / ratio, sin * slope + cos, along)
    return torch.stack(entries, 1).view(count, 2, 3).to(images.raw.device)


def _moved(x_BCHW: Tensor, maps_B23: Tensor) -> Tensor:
    """Bilinear interpolation, beyond the border its nearest pixel; what rounding adds to weights that sum to 1 is cut off."""
    grid = F.affine_grid(maps_B23, list(x_BCHW.shape), align_corners=False)
    return F.grid_sample(x_BCHW, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp(0, 1)


def augmented_batch(images: Images, table: AugmentationTable | None, index_B: Tensor) -> tuple[Tensor, Tensor]:
    """A training batch. One gather does flip, padding and crop: padding by replication is clamping of the index."""
    if table is None or images.augmentation is None:
        return images.batch(index_B)
    plan, size = images.augmentation, images.raw.shape[-1]
    source, levels, which_B = images.raw, images.levels, index_B
    if table.maps_N23 is not None:
        source, levels = _moved(images.batch(index_B)[0], table.maps_N23[index_B]), 1
        which_B = torch.arange(len(index_B), device=index_B.device)
    grid = torch.arange(plan.side, device=images.raw.device) - plan.pad
    rows = (table.rows_N[index_B, None] + grid).clamp(0, size - 1)
    columns = (table.columns_N[index_B, None] + grid).clamp(0, size - 1)
    columns = torch.where(table.flips_N[index_B, None], size - 1 - columns, columns)
    channels = torch.arange(images.raw.shape[1], device=images.raw.device)
    picked = source[which_B[:, None, None, None], channels[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]]
    return picked.float() / levels, images.labels[index_B]


def _plan(config: Dataset) -> Augmentation | None:
    if not config.augment or not (config.row.augments or config.jitter):
        return None
    whole = config.row.shape[-1]
    side = config.side or whole
    flips = config.row.augments
    return Augmentation(flip=flips, pad=config.row.pad if flips and side == whole else 0, side=side, jitter=config.jitter)


def _centre_crop(raw: Tensor, side: int) -> Tensor:
    offset = (raw.shape[-1] - side) // 2
    return raw[..., offset : offset + side, offset : offset + side].contiguous()


def load_dataset(config: Dataset, split: Split, data_dir: str | Path | None = None, download: bool = True) -> Images:
    """One split of a data set. Validation images are the first of a fixed shuffle of the training set, independent of any seed."""
    source: Source = "test" if split == "test" else "train"
    if config.path is not None and config.content is not None:
        raw, labels, levels = read_own_split(config.path, config.content.digest, source, data_dir)
    else:
        raw, labels, levels = read_split(config.name, source, data_dir, download)
    index = torch.arange(len(labels))
    if split != "test":
        held_out, pool = config.validation_size, config.pool_size
        if held_out or pool < len(labels):
            order = torch.randperm(len(labels), generator=seeding.generator("cpu", 0, "split", config.stream))
            chosen = order[:held_out] if split == "validation" else order[held_out:pool]
            index = chosen.sort().values
        elif split == "validation":
            index = index[:0]
    raw, labels = raw[index], labels[index]
    plan = _plan(config) if split == "train" else None
    if config.side is not None and plan is None:
        raw = _centre_crop(raw, config.side)
    return Images(raw, levels, labels, index, plan)


def select_samples(total: int, samples: int, selection: str) -> Tensor:
    """Which test images are certified (A28): the first ones, or an even stride over all of them."""
    count = min(samples, total)
    if selection == "first":
        return torch.arange(count)
    return torch.tensor([i * total // count for i in range(count)], dtype=torch.long)
