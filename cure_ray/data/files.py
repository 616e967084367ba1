"""Finding and reading data set files: where they are looked for, what they must be, and what to say when they are missing."""

import functools
import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cure_ray.catalogue.own import Source, read_own
from cure_ray.catalogue.published import PUBLISHED
from cure_ray.data._torchvision_compat import import_torchvision_datasets
from cure_ray.errors import UserError


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cure_ray"


def search_path(data_dir: str | Path | None = None) -> list[Path]:
    """Directories looked into, in order: --data-dir, CURE_RAY_DATA, the user cache."""
    named = [data_dir, os.environ.get("CURE_RAY_DATA")]
    return [Path(d).expanduser() for d in named if d] + [user_cache()]


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The first directory that holds every file of the data set."""
    for directory in search_path(data_dir):
        if all((directory / file).exists() for file in PUBLISHED[name].files):
            return directory
    return None


def _missing_message(name: str, data_dir: str | Path | None, reason: str) -> str:
    places = "\n".join(f"  {d}" for d in search_path(data_dir))
    files = "\n".join(f"  {f}" for f in PUBLISHED[name].files)
    return (
        f"data set {name} not found. Looked for these files:\n{files}\nin these directories, in this order:\n{places}\n{reason}"
        "Put the files into one of them, or name their directory with --data-dir or the variable CURE_RAY_DATA."
    )


def _find_or_download(name: str, data_dir: str | Path | None, download: bool) -> Path:
    found = locate(name, data_dir)
    if found is not None:
        return found
    if not PUBLISHED[name].torchvision:
        raise UserError(_missing_message(name, data_dir, "It is not downloaded automatically: unpack tiny-imagenet-200.zip yourself.\n"))
    if not download:
        raise UserError(_missing_message(name, data_dir, ""))
    target = search_path(data_dir)[0]
    kind = getattr(import_torchvision_datasets(), PUBLISHED[name].torchvision)
    try:
        target.mkdir(parents=True, exist_ok=True)
        kind(str(target), train=True, download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(_missing_message(name, data_dir, f"Downloading to {target} failed: {error}.\n")) from None
    return target


def _read_digits(source: Source) -> tuple[Tensor, Tensor, int]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    raw = torch.from_numpy(bunch.images.astype(np.uint8))[:, None]
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    # Every fifth image is a test image: 360 of 1797, spread evenly over the writers, fixed for ever.
    test = torch.arange(len(labels)) % 5 == 0
    keep = test if source == "test" else ~test
    return raw[keep], labels[keep], 16


def _read_torchvision(name: str, source: Source, root: Path) -> tuple[Tensor, Tensor, int]:
    """torchvision checks the MD5 of the CIFAR files before it reads them, so only their known content is ever unpickled."""
    try:
        data = getattr(import_torchvision_datasets(), PUBLISHED[name].torchvision)(str(root), train=source == "train", download=False)
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise UserError(f"data set {name} in {root} is damaged: {error}. Delete it there and run again to download it anew.") from None
    raw = torch.as_tensor(data.data)
    raw = raw[:, None] if raw.dim() == 3 else raw.permute(0, 3, 1, 2)
    return raw.contiguous(), torch.as_tensor(data.targets, dtype=torch.long), 255


def _read_tinyimagenet(source: Source, root: Path) -> tuple[Tensor, Tensor, int]:
    """The folder layout of tiny-imagenet-200; the labelled `val` split is the test set. Decoded once, then cached as .npy."""
    from PIL import Image

    folder = root / "tiny-imagenet-200"
    classes = {wnid: i for i, wnid in enumerate((folder / "wnids.txt").read_text().split())}
    if source == "train":
        listing = [(p, classes[w]) for w in classes for p in sorted((folder / "train" / w / "images").glob("*.JPEG"))]
    else:
        rows = [line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
        listing = [(folder / "val" / "images" / row[0], classes[row[1]]) for row in sorted(rows)]
    if not listing:
        raise UserError(f"{folder}: no images for the {source} split; expected the layout of tiny-imagenet-200.zip")
    labels = torch.tensor([label for _, label in listing])
    identity = hashlib.sha256(f"{folder.resolve()}:{len(listing)}".encode()).hexdigest()[:12]
    cache = user_cache() / "tiny-imagenet-200" / f"{source}-{identity}.npy"
    if cache.exists():
        return torch.from_numpy(np.load(cache, allow_pickle=False)), labels, 255
    raw = np.stack([np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1) for path, _ in listing])
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(f".{os.getpid()}.npy")
    np.save(partial, raw)
    partial.replace(cache)
    return torch.from_numpy(raw), labels, 255


@functools.lru_cache(maxsize=4)
def _read(name: str, source: Source, root: Path | None) -> tuple[Tensor, Tensor, int]:
    if root is None:
        return _read_digits(source)
    return _read_torchvision(name, source, root) if PUBLISHED[name].torchvision else _read_tinyimagenet(source, root)


def read_split(name: str, source: Source, data_dir: str | Path | None, download: bool) -> tuple[Tensor, Tensor, int]:
    """Raw uint8 images [N,C,H,W], labels, and the level that means 1.0."""
    return _read(name, source, _find_or_download(name, data_dir, download) if PUBLISHED[name].files else None)


def read_own_split(path: str, digest: str, source: Source, data_dir: str | Path | None) -> tuple[Tensor, Tensor, int]:
    """A split of a user's own images, where they were or by the same name in a data directory; only if they are the same images."""
    places = [Path(path), *(directory / Path(path).name for directory in search_path(data_dir))]
    found = read_own(next((place for place in places if place.exists()), places[0]))
    if found.digest != digest:
        raise UserError(
            f"dataset.path {path} has changed since the experiment was made (content {found.digest[:8]}, then {digest[:8]}): restore the "
            "images, or start a new experiment that names the path alone"
        )
    images, labels = found.train if source == "train" else found.test
    return torch.from_numpy(images), torch.from_numpy(labels), 255 if images.dtype == np.uint8 else 1


@dataclass(frozen=True)
class Presence:
    """What `cure-ray data` says about one data set."""

    name: str
    directory: str
    state: Literal["ok", "missing", "damaged"]
    detail: str


def _idx_problem(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(16)
    if len(head) < 8 or head[:3] != b"\x00\x00\x08":
        return f"{path.name} is not an IDX file"
    dims = head[3]
    shape = struct.unpack(f">{dims}I", head[4 : 4 + 4 * dims])
    expected = 4 + 4 * dims + int(np.prod(shape))
    return None if path.stat().st_size == expected else f"{path.name} has {path.stat().st_size} bytes, expected {expected}"


def check(name: str, data_dir: str | Path | None = None) -> Presence:
    """Whether a data set is present, where, and whether its files are what they should be."""
    row = PUBLISHED[name]
    if not row.files:
        return Presence(name, "scikit-learn", "ok", f"{row.train} training and {row.test} test images, 8x8")
    root = locate(name, data_dir)
    if root is None:
        return Presence(name, "", "missing", "not in " + ", ".join(map(str, search_path(data_dir))))
    for file in row.files:
        problem = _idx_problem(root / file) if "ubyte" in file else None
        if problem:
            return Presence(name, str(root), "damaged", problem)
    try:
        sizes = [len(read_split(name, source, root, False)[1]) for source in ("train", "test")]
    except UserError as error:
        return Presence(name, str(root), "damaged", str(error))
    return Presence(name, str(root), "ok", f"{sizes[0]} training and {sizes[1]} test images")
