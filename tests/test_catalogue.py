"""The rows of published data sets: what the files hold, the splits, and that reading them needs no torch."""

import subprocess
import sys

import pytest

from cure_ray.catalogue.published import PUBLISHED, certified_widths, training_widths
from cure_ray.config import Dataset
from cure_ray.data.files import read_split
from cure_ray.data.images import Augmentation, _plan
from cure_ray.threats.transformations import parse_transformation, training_transformation


def test_a_row_says_what_the_files_hold() -> None:
    row = PUBLISHED["digits"]
    for source, size in (("train", row.train), ("test", row.test)):
        raw, labels, _ = read_split("digits", source, None, download=False)  # type: ignore[arg-type]
        assert tuple(raw.shape) == (size, *row.shape)
        assert sorted(labels.unique().tolist()) == list(range(row.classes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_normalisation_and_grids_fit_the_data_set(name: str) -> None:
    row = PUBLISHED[name]
    assert len(row.mean) == len(row.std) == row.shape[0]
    for text, grid in row.grids.items():
        transformation = parse_transformation(text, name)
        assert transformation.text == text, "a grid must be found by the canonical spelling"
        assert len(grid.certified) == len(transformation.steps)


def test_published_grids_are_used_for_certificates_and_training() -> None:
    assert certified_widths("mnist", "R(30)") == (0.25,)
    assert certified_widths("digits", "R(30)") is None
    assert training_widths("R(30)") == (0.5,)
    assert parse_transformation("R(30)", "mnist").cells == (240,)
    assert training_transformation("R(30)", "mnist").cells == (120,)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Dataset(name="mnist"), None),
        (Dataset(name="cifar10"), Augmentation(True, 2, 32)),
        (Dataset(name="cifar10", augment=False), None),
        (Dataset(name="tinyimagenet"), Augmentation(True, 0, 56)),
        (Dataset(name="tinyimagenet", crop=64), Augmentation(True, 4, 64)),
    ],
)
def test_augmentation_is_the_published_one(dataset: Dataset, expected: Augmentation | None) -> None:
    assert _plan(dataset) == expected


def test_describing_an_experiment_loads_no_torch() -> None:
    code = (
        "import sys, cure_ray.config, cure_ray.threats.text; cure_ray.config.load_experiment('mnist-small'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
