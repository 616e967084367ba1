"""The published data sets: one row each. Whoever asks what a data set is, reads its row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[int, int, int]
Widths = tuple[float, ...]


@dataclass(frozen=True)
class Grid:
    """How finely a published transformation is cut, per parameter: for certificates, and by CGT in training where that differs."""

    certified: Widths
    training: Widths | None = None


@dataclass(frozen=True)
class DatasetRow:
    """What a data set is."""

    shape: Shape  # as it is stored
    classes: int
    train: int  # images
    test: int
    mean: tuple[float, ...] = (0.0,)  # of the normalisation inside the network; 0 and 1: none
    std: tuple[float, ...] = (1.0,)
    files: tuple[str, ...] = ()  # below a data directory; none: it comes with a library
    torchvision: str = ""  # its class there, which reads and downloads it
    augments: bool = False  # random flips, and crops after padding by `pad`
    pad: int = 0
    crop: int | None = None  # side that is cut out for training and testing, unless the experiment says otherwise
    grids: Mapping[str, Grid] = field(default_factory=dict)  # by transformation, as docs/explanation/algorithms.md 10.4 lists them
    display: str = ""  # the paper's name
    domain: tuple[float, float] = (0.0, 1.0)  # where every number of an image lies


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_MNIST = {
    "R(30)": Grid((0.25,), (0.5,)),
    "Tu(2),Tv(2)": Grid((0.05, 0.05), (0.1, 0.1)),
    "Sc(5),R(5),C(5),B(0.01)": Grid((0.005, 0.125, 0.05, 0.02), (0.01, 0.25, 0.05, 0.02)),
    "Sh(2),R(2),Sc(2),C(2),B(0.001)": Grid((0.0025, 0.0625, 0.0025, 0.04, 0.002), (0.005, 0.125, 0.005, 0.04, 0.002)),
}
_CIFAR = {
    "R(10)": Grid((0.0002,), (0.001,)),
    "R(2),Sh(2)": Grid((0.01, 0.00025), (0.02, 0.0005)),
    "Sc(1),R(1),C(1),B(0.001)": Grid((0.00005, 0.005, 0.005, 0.002)),
}

PUBLISHED: dict[str, DatasetRow] = {
    "digits": DatasetRow((1, 8, 8), 10, 1437, 360),
    "mnist": DatasetRow(
        (1, 28, 28), 10, 60000, 10000,
        files=tuple(f"MNIST/raw/{name}" for name in _IDX), torchvision="MNIST", grids=_MNIST, display="MNIST",
    ),
    "fashion-mnist": DatasetRow(
        (1, 28, 28), 10, 60000, 10000,
        files=tuple(f"FashionMNIST/raw/{name}" for name in _IDX), torchvision="FashionMNIST", grids=_MNIST, display="Fashion-MNIST",
    ),
    "cifar10": DatasetRow(
        (3, 32, 32), 10, 50000, 10000, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010),
        files=tuple(f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")),
        torchvision="CIFAR10", augments=True, pad=2, grids=_CIFAR, display="CIFAR-10",
    ),
    "cifar100": DatasetRow(
        (3, 32, 32), 100, 50000, 10000, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
        files=("cifar-100-python/train", "cifar-100-python/test"),
        torchvision="CIFAR100", augments=True, pad=2, grids=_CIFAR, display="CIFAR-100",
    ),
    "tinyimagenet": DatasetRow(
        (3, 64, 64), 200, 100000, 10000, (0.4802, 0.4481, 0.3975), (0.2302, 0.2265, 0.2262),
        files=tuple(f"tiny-imagenet-200/{name}" for name in ("wnids.txt", "train", "val/images", "val/val_annotations.txt")),
        augments=True, pad=4, crop=56, display="TinyImageNet",
        grids={"R(5)": Grid((0.001,)), "Sc(2)": Grid((0.00002,)), "Sh(2)": Grid((0.00002,))},
    ),
}  # fmt: skip


STANDARD = "standard"  # the grid of whatever was not published
GRIDS = (STANDARD, *(name for name, row in PUBLISHED.items() if row.grids))


def grid_for(dataset: str) -> str:
    """The name of the grid that was published for a data set, else of the standard one."""
    return dataset if dataset in GRIDS else STANDARD


def certified_widths(grid: str, transformation: str) -> Widths | None:
    """The published cells of a transformation, if the grid of this name lists it."""
    found = PUBLISHED[grid].grids.get(transformation) if grid != STANDARD else None
    return None if found is None else found.certified


def training_widths(transformation: str) -> Widths | None:
    """The sub-ranges CGT was published with, whatever the data set: training on another one starts from them too."""
    grids = (row.grids.get(transformation) for row in PUBLISHED.values())
    return next((grid.training for grid in grids if grid is not None and grid.training is not None), None)
