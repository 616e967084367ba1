"""A user's own images as a data set: an .npz file, or a folder of images by class as torchvision's ImageFolder reads it.

What is not divided into training and test images is: every fifth image of the file, or of each class's folder by name, is for tests.
"""

import functools
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cure_ray.catalogue.published import PUBLISHED, DatasetRow
from cure_ray.errors import UserError

Array = NDArray[Any]
Source = Literal["train", "test"]
Ends = tuple[float, float]
UNIT: Ends = (0.0, 1.0)
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
EVERY = 5  # which images are held out for testing where nobody said: one in so many
LAYOUT = "expected PATH/class/image.png, or PATH/train/class/image.png and PATH/test/class/image.png"


@dataclass(frozen=True)
class Content:
    """What a file or a folder holds. Images [N, C, H, W] are uint8 of 255 levels, or float32 in the domain, which is [0, 1] for images."""

    digest: str
    train: tuple[Array, Array]
    test: tuple[Array, Array]
    domain: Ends = UNIT

    @property
    def row(self) -> DatasetRow:
        """The data set as a row of the catalogue: no normalisation, no augmentation."""
        images = self.train[0]
        classes = 1 + max(int(labels.max()) for _, labels in (self.train, self.test))
        channels, height, width = images.shape[1:]
        plain = ((0.0,) * channels, (1.0,) * channels)
        return DatasetRow((channels, height, width), classes, len(images), len(self.test[0]), *plain, domain=self.domain)


def own_name(path: Path) -> str:
    """What tables call it: the file's name, never one of a published data set."""
    return path.name if path.name not in PUBLISHED else f"{path.name}-folder"


def checked_images(images: Array, labels: Array, where: str) -> tuple[Array, Array]:
    """Images as uint8 or float32 and labels as int64, whatever they were saved as; UserError if that would change them."""
    if images.ndim != 4:
        raise UserError(f"{where}: images must be (N, C, H, W), got shape {images.shape}")
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{where}: labels must be {len(images)} integers, got {labels.dtype} of shape {labels.shape}")
    if images.dtype == np.uint8:
        return images, labels.astype(np.int64)
    if not np.issubdtype(images.dtype, np.floating):
        raise UserError(f"{where}: images must be uint8 or floats, got {images.dtype}")
    with np.errstate(over="ignore"):
        single = images.astype(np.float32)
    if not np.array_equal(single.astype(images.dtype), images, equal_nan=True):
        raise UserError(
            f"{where}: the images are {images.dtype} numbers that float32 cannot hold, so a certificate would be about slightly "
            "other images. Save them as uint8, or as float32: images.astype(numpy.float32)"
        )
    return single, labels.astype(np.int64)


def read_npz(path: Path, where: str) -> dict[str, tuple[Array, Array]]:
    """`images` and `labels` of an .npz file as "train", and `test_images` and `test_labels` as "test" where it has them."""
    if not path.is_file():
        raise UserError(f"{where}: no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = {"train": ("images", "labels")}
            if "test_images" in file.files or "test_labels" in file.files:
                names["test"] = ("test_images", "test_labels")
            missing = [name for pair in names.values() for name in pair if name not in file.files]
            if missing:
                raise UserError(f"{where}: needs the arrays {' and '.join(missing)}, has {', '.join(file.files) or 'none'}")
            arrays = {part: (file[images], file[labels]) for part, (images, labels) in names.items()}
    except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where}: not an .npz file of plain arrays ({error})") from error
    return {part: checked_images(*pair, where) for part, pair in arrays.items()}


def read_domain(path: Path, where: str) -> Ends:
    """The array `domain` of an .npz file, two ends that may be infinite; [0, 1] where it has none, as images have."""
    with np.load(path, allow_pickle=False) as file:
        ends = np.asarray(file["domain"], dtype=float) if "domain" in file.files else np.array(UNIT)
    if ends.shape != (2,) or not ends[0] < ends[1]:
        raise UserError(f"{where}: the array domain must be two ends, the lower one first, like [-inf, inf]; it is {ends.tolist()}")
    return float(ends[0]), float(ends[1])


def _listing(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def _classes(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and _listing(p))


def _parts(folder: Path, where: str) -> dict[str, Path]:
    """The folders that hold classes: the folder itself, or its train and test (or val). A class may be called train, too."""
    names = _classes(folder)
    if "train" not in names or not _classes(folder / "train"):
        return {"train": folder}
    strange = [name for name in names if name not in ("train", "test", "val")]
    if strange:
        raise UserError(f"{where}: {strange[0]} stands beside train: is it a class or a part? {LAYOUT}")
    test = next((folder / name for name in ("test", "val") if name in names), None)
    return {"train": folder / "train", **({"test": test} if test is not None else {})}


def _read_image(path: Path, grey: bool) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path}: not a readable image ({error})") from None
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _modes(paths: list[Path]) -> set[str]:
    from PIL import Image, UnidentifiedImageError

    found = set()
    for path in paths:
        try:
            with Image.open(path) as image:
                found.add(image.mode)
        except (UnidentifiedImageError, OSError) as error:
            raise UserError(f"{path}: not a readable image ({error})") from None
        if image.mode.startswith(("I", "F")):
            raise UserError(f"{path}: {image.mode} images have more than 256 levels; save them as float32 in an .npz file instead")
    return found


def _turns(root: Path, classes: list[str]) -> list[tuple[int, Path, int]]:
    """(rank within its class, image, label), the classes in turns: the first images of a data set must not all be of one class."""
    return sorted((rank, path, label) for label, name in enumerate(classes) for rank, path in enumerate(_listing(root / name)))


def _read_folder(folder: Path, where: str) -> dict[str, tuple[Array, Array]]:
    parts = _parts(folder, where)
    classes = _classes(parts["train"])
    if len(classes) < 2:
        raise UserError(f"{where}: {len(classes)} folders with images, at least two classes are needed; {LAYOUT}")
    listings = {}
    for part, root in parts.items():
        strange = [name for name in _classes(root) if name not in classes]
        if strange:
            raise UserError(f"{where}: {root.name} has a class {strange[0]!r} that train has not")
        listings[part] = _turns(root, classes)
    if "test" not in listings:
        whole = listings["train"]
        listings = {"train": [t for t in whole if t[0] % EVERY], "test": [t for t in whole if t[0] % EVERY == 0]}
    grey = _modes([path for listing in listings.values() for _, path, _ in listing]) <= {"L", "1"}
    return {part: _stacked(listing, grey) for part, listing in listings.items()}


def _stacked(listing: list[tuple[int, Path, int]], grey: bool) -> tuple[Array, Array]:
    images = [_read_image(path, grey) for _, path, _ in listing]
    for (_, path, _), image in zip(listing, images, strict=True):
        if image.shape != images[0].shape:
            raise UserError(f"{path}: {image.shape[1:]} pixels, the images before it have {images[0].shape[1:]}; make them equal")
    return np.stack(images) if images else np.empty((0, 1, 1, 1), np.uint8), np.array([label for _, _, label in listing], dtype=np.int64)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else _listing(path):
        with file.open("rb") as stream:
            digest.update(f"{file.relative_to(path)}:{hashlib.file_digest(stream, 'sha256').hexdigest()};".encode())
    return digest.hexdigest()[:32]


def _check(content: Content, where: str) -> None:
    (images, labels), (test_images, test_labels) = content.train, content.test
    if not len(images) or not len(test_images):
        raise UserError(f"{where}: {len(images)} training and {len(test_images)} test images; at least one of each is needed")
    if images.shape[1:] != test_images.shape[1:] or images.dtype != test_images.dtype:
        raise UserError(
            f"{where}: training images are {images.shape[1:]} {images.dtype}, test images {test_images.shape[1:]} {test_images.dtype}"
        )
    if min(int(labels.min()), int(test_labels.min())) < 0 or content.row.classes < 2:
        raise UserError(f"{where}: labels must be numbers from 0 on, of at least two classes")
    if int(test_labels.max()) > int(labels.max()):
        raise UserError(f"{where}: the test images have class {int(test_labels.max())}, which no training image has")
    low, high = min(float(a.min()) for a in (images, test_images)), max(float(a.max()) for a in (images, test_images))
    if images.dtype == np.uint8:
        if content.domain != UNIT:
            raise UserError(f"{where}: uint8 images lie in [0, 1] and need no domain; save numbers of another domain as float32")
    elif not all(np.isfinite(a).all() for a in (images, test_images)) or low < content.domain[0] or high > content.domain[1]:
        raise UserError(f"{where}: images must lie in [{content.domain[0]:g}, {content.domain[1]:g}], these lie in [{low:g}, {high:g}]")


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Changes when a file does: what makes it safe to read a folder once."""
    files = [path] if path.is_file() else _listing(path)
    return tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files)


@functools.lru_cache(maxsize=2)
def _read(path: Path, stamp: tuple[tuple[str, int, int], ...], where: str) -> Content:
    arrays = read_npz(path, where) if path.is_file() else _read_folder(path, where)
    domain = read_domain(path, where) if path.is_file() else UNIT
    images, labels = arrays["train"]
    if "test" in arrays:
        content = Content(_digest(path), arrays["train"], arrays["test"], domain)
    else:
        held = np.arange(len(labels)) % EVERY == 0
        content = Content(_digest(path), (images[~held], labels[~held]), (images[held], labels[held]), domain)
    _check(content, where)
    return content


def read_own(path: Path) -> Content:
    """The data set at a path, checked; read once per process and state of the files."""
    where = f"dataset.path {path}"
    if not path.exists():
        raise UserError(f"{where}: no such file or folder. It must be here and, on a cluster, on every node")
    return _read(path, _stamp(path), where)
