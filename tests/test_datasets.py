"""Data: splits that never overlap, draws that depend on names alone, and messages that say where files were looked for."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from cure_ray.catalogue.published import PUBLISHED
from cure_ray.config import Dataset
from cure_ray.config.problem import Jitter
from cure_ray.data import _torchvision_compat
from cure_ray.data import files as datafiles
from cure_ray.data.images import Augmentation, AugmentationTable, Images, augmented_batch, load_dataset, select_samples
from cure_ray.errors import UserError


def write_mnist(root: Path, train: int = 30, test: int = 10) -> None:
    """Files in the IDX format torchvision reads, with made-up pixels."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix, n in (("train", train), ("t10k", test)):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, n, 28, 28) + rng.bytes(n * 784))
        labels = bytes(int(v) for v in rng.integers(0, 10, n))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, n) + labels)


def test_digits_splits_are_disjoint_and_complete() -> None:
    config = Dataset(name="digits")
    train, validation, test = (load_dataset(config, s) for s in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (1294, 143, 360)
    assert not set(train.index.tolist()) & set(validation.index.tolist())
    assert sorted([*train.index.tolist(), *validation.index.tolist()]) == list(range(1437))
    x, y = train.batch(torch.arange(10))
    assert x.shape == (10, 1, 8, 8)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    assert y.dtype == torch.long


def test_the_validation_split_does_not_depend_on_how_many_images_train() -> None:
    few, many = (load_dataset(Dataset(name="digits", train_samples=n, validation=100), "validation") for n in (400, 1400))
    assert torch.equal(few.index, many.index)
    assert len(load_dataset(Dataset(name="digits", train_samples=400, validation=100), "train")) == 300


def test_mnist_is_read_through_torchvision_from_the_first_directory_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "a")
    monkeypatch.setenv("CURE_RAY_DATA", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images, labels, levels = datafiles.read_split("mnist", "train", None, download=False)
    assert images.shape == (30, 1, 28, 28)
    assert levels == 255
    assert labels.dtype == torch.long
    assert datafiles.check("mnist").state == "ok"
    write_mnist(tmp_path / "b", train=31)
    assert len(datafiles.read_split("mnist", "train", tmp_path / "b", download=False)[1]) == 31


def test_a_missing_data_set_names_every_file_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CURE_RAY_DATA", str(tmp_path / "env"))
    with pytest.raises(UserError) as caught:
        datafiles.read_split("mnist", "train", tmp_path / "option", download=False)
    message = str(caught.value)
    for piece in (*PUBLISHED["mnist"].files, str(tmp_path / "option"), str(tmp_path / "env"), str(tmp_path / "cache" / "cure_ray")):
        assert piece in message
    assert message.index("option") < message.index(str(tmp_path / "env")) < message.index("cache")


def test_a_truncated_file_is_reported_as_damaged(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-5])
    found = datafiles.check("mnist", tmp_path)
    assert found.state == "damaged"
    assert "train-images-idx3-ubyte" in found.detail
    with pytest.raises(UserError, match="damaged"):
        datafiles.read_split("mnist", "train", tmp_path, download=False)


def test_tinyimagenet_is_read_from_its_folder_layout_and_cropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n1\nn2\n")
    for i, wnid in enumerate(("n1", "n2")):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        Image.new("RGB", (64, 64), (10 * i, 20, 30)).save(folder / "train" / wnid / "images" / "a.JPEG")
    Image.new("L", (64, 64), 99).save(folder / "val" / "images" / "v.JPEG")
    (folder / "val" / "val_annotations.txt").write_text("v.JPEG\tn2\t0\t0\t62\t62\n")
    raw, labels, _ = datafiles.read_split("tinyimagenet", "train", tmp_path, download=False)
    assert raw.shape == (2, 3, 64, 64)
    assert labels.tolist() == [0, 1]
    test = load_dataset(Dataset(name="tinyimagenet"), "test", tmp_path)
    assert test.raw.shape == (1, 3, 56, 56)
    assert test.labels.tolist() == [1]
    again, _, _ = datafiles._read_tinyimagenet("train", tmp_path)  # from the cache
    assert torch.equal(again, raw)


def example_images(n: int = 6, side: int = 8, plan: Augmentation | None = None) -> Images:
    raw = torch.randint(0, 256, (n, 3, side, side), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return Images(raw, 255, torch.arange(n), torch.arange(n), plan)


def test_augmentation_is_flip_then_crop_of_the_edge_padded_image() -> None:
    images = example_images(plan=Augmentation(flip=True, pad=2, side=8))
    table = AugmentationTable.draw(images, 0, 1, "ct")
    assert table is not None
    batch, _ = augmented_batch(images, table, torch.arange(6))
    for i in range(6):
        image = images.raw[i].float() / 255
        image = image.flip(-1) if table.flips_N[i] else image
        padded = F.pad(image[None], (2, 2, 2, 2), mode="replicate")[0]
        top, left = int(table.rows_N[i]), int(table.columns_N[i])
        assert torch.equal(batch[i], padded[:, top : top + 8, left : left + 8])


def test_a_samples_augmentation_depends_on_seed_and_epoch_not_on_its_batch() -> None:
    images = example_images(plan=Augmentation(flip=True, pad=2, side=8))
    table = AugmentationTable.draw(images, 0, 1, "ct")
    alone = augmented_batch(images, table, torch.tensor([4]))[0][0]
    together = augmented_batch(images, table, torch.tensor([1, 4, 2]))[0][1]
    assert torch.equal(alone, together)
    other = AugmentationTable.draw(images, 0, 2, "ct")
    assert table is not None
    assert other is not None
    assert not (torch.equal(table.rows_N, other.rows_N) and torch.equal(table.columns_N, other.columns_N))


def test_jitter_moves_every_sample_by_its_own_draw_as_far_as_allowed() -> None:
    plan = Augmentation(flip=False, pad=0, side=9, jitter=Jitter(shift=2.0))
    raw = torch.zeros(40, 1, 9, 9, dtype=torch.uint8)
    raw[:, 0, 4, 4] = 200
    images = Images(raw, 255, torch.arange(40), torch.arange(40), plan)
    table = AugmentationTable.draw(images, 0, 1, "ct")
    moved, _ = augmented_batch(images, table, torch.arange(40))
    place = torch.arange(9.0)
    mass = moved[:, 0].sum((1, 2))
    assert torch.allclose(mass, torch.full((40,), 200 / 255), atol=1e-5), "what is shifted within the image is kept"
    down, right = (moved[:, 0].sum(other) @ place / mass - 4 for other in (2, 1))
    assert 1.5 < max(down.abs().max(), right.abs().max()) <= 2 + 1e-5
    assert torch.allclose(down, -2 * 9 / 4 * table.maps_N23[:, 1, 2], atol=1e-4), "each sample by its own draw"
    alone = augmented_batch(images, table, torch.tensor([7]))[0][0]
    assert torch.equal(alone, moved[7])


def test_jitter_turns_slants_and_zooms_about_the_middle() -> None:
    bar = torch.zeros(1, 1, 21, 21, dtype=torch.uint8)
    bar[0, 0, 2:19, 10] = 255
    for jitter in (Jitter(rotate=20), Jitter(shear=20), Jitter(zoom=0.3)):
        plan = Augmentation(flip=False, pad=0, side=21, jitter=jitter)
        images = Images(bar.expand(60, -1, -1, -1), 255, torch.zeros(60), torch.arange(60), plan)
        moved = augmented_batch(images, AugmentationTable.draw(images, 0, 1, "ct"), torch.arange(60))[0][:, 0]
        assert moved.min() >= 0
        assert moved.max() <= 1
        assert (moved[:, 10, 10] > 0.5).all(), "the middle stays"
        place = torch.arange(21.0) - 10
        slopes = ((moved[:, 5] @ place) / moved[:, 5].sum(1) - (moved[:, 15] @ place) / moved[:, 15].sum(1)) / 10
        lengths = moved.amax(2).sum(1)
        most = torch.tan(torch.tensor(20.0).deg2rad())
        if jitter.zoom:
            assert slopes.abs().max() < 1e-3
            assert lengths.min() < 14 < 20 < lengths.max()
        else:
            assert 0.8 * most < slopes.abs().max() < 1.1 * most
            assert slopes.min() < 0 < slopes.max()


def test_jitter_is_off_where_augmentation_is_and_leaves_other_draws_alone() -> None:
    config = Dataset(name="digits", jitter=Jitter(rotate=5))
    assert load_dataset(config, "train").augmentation == Augmentation(flip=False, pad=0, side=8, jitter=Jitter(rotate=5))
    assert load_dataset(config, "test").augmentation is None
    assert load_dataset(config.model_copy(update={"augment": False}), "train").augmentation is None
    tables = [AugmentationTable.draw(example_images(plan=Augmentation(True, 2, 8, j)), 0, 1, "ct") for j in (None, Jitter(rotate=5))]
    assert torch.equal(tables[0].rows_N, tables[1].rows_N)
    assert torch.equal(tables[0].flips_N, tables[1].flips_N)
    assert "jitter" not in Dataset(name="digits").model_dump()
    for wrong in ({"jitter": {}}, {"augment": False, "jitter": {"shift": 1}}, {"jitter": {"zoom": 1.5}}):
        with pytest.raises(ValueError, match="jitter"):
            Dataset(name="digits", **wrong)


def test_sample_selection_by_stride_covers_the_whole_set() -> None:
    assert select_samples(10, 4, "first").tolist() == [0, 1, 2, 3]
    assert select_samples(10000, 170, "stride")[:3].tolist() == [0, 58, 117]
    assert select_samples(5, 50, "stride").tolist() == [0, 1, 2, 3, 4]


def test_the_torchvision_shim_works_here_and_is_inert_where_the_operators_exist() -> None:
    datasets = _torchvision_compat.import_torchvision_datasets()
    assert datasets.MNIST.__name__ == "MNIST"
    _torchvision_compat.declare_missing_operators()
    assert all(_torchvision_compat._operator_exists(name) for name in ("nms", "qnms"))
    assert _torchvision_compat.declare_missing_operators() == []
    assert "torchvision" in sys.modules
