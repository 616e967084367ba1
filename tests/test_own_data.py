"""A user's own images: an .npz file or a folder, split like the others, part of the experiment's identity by content."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from cure_ray.config import Dataset, Experiment, dump_experiment, resolve
from cure_ray.data.images import load_dataset
from cure_ray.errors import UserError
from cure_ray.threats.box import Box


def arrays(n: int = 40, seed: int = 0, shape: tuple[int, ...] = (1, 6, 6), classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % classes


def save(path: Path, **more: np.ndarray) -> Path:
    images, labels = arrays()
    np.savez(path, **{"images": images, "labels": labels, **more})
    return path


def folder(root: Path, names: tuple[str, ...] = ("bird", "cat"), n: int = 10, mode: str = "L") -> Path:
    rng = np.random.default_rng(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(0, 256, (6, 6) if mode == "L" else (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:03d}.png")
    return root


def experiment(path: Path, **dataset: Any) -> Experiment:
    return resolve({"preset": "smoke", "dataset": {"path": str(path), **dataset}, "training": {"batch_size": 4}})


def test_an_npz_file_is_split_like_the_others(tmp_path: Path) -> None:
    images, labels = arrays()
    config = experiment(save(tmp_path / "mine.npz"), validation=5).dataset
    assert (config.name, config.input_shape, config.num_classes, config.train_size) == ("mine.npz", (1, 6, 6), 3, 27)
    parts = {split: load_dataset(config, split) for split in ("train", "validation", "test")}  # type: ignore[arg-type]
    assert {name: len(part) for name, part in parts.items()} == {"train": 27, "validation": 5, "test": 8}
    assert torch.equal(parts["test"].raw, torch.from_numpy(images[::5]))
    assert torch.equal(parts["test"].labels, torch.from_numpy(labels[::5]))
    held = set(parts["validation"].index.tolist())
    assert held.isdisjoint(parts["train"].index.tolist())
    few = load_dataset(config.model_copy(update={"train_samples": 20}), "validation")
    assert set(few.index.tolist()) == held, "the held out images depend on the content alone"


def test_test_images_of_the_file_are_the_test_set(tmp_path: Path) -> None:
    images, labels = arrays(7, seed=1)
    config = experiment(save(tmp_path / "mine.npz", test_images=images, test_labels=labels)).dataset
    assert torch.equal(load_dataset(config, "test").raw, torch.from_numpy(images))
    assert config.pool_size == 40


def test_floats_are_kept_exactly(tmp_path: Path) -> None:
    images, labels = arrays()
    np.savez(tmp_path / "f.npz", images=(images / 255).astype(np.float32), labels=labels)
    found = load_dataset(Dataset(path=str(tmp_path / "f.npz")), "test")
    assert torch.equal(found.batch(torch.arange(3))[0], torch.from_numpy((images[:15:5] / 255).astype(np.float32)))


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_a_folder_of_images_is_read_as_torchvision_reads_it(tmp_path: Path, mode: str, channels: int) -> None:
    from cure_ray.data._torchvision_compat import import_torchvision_datasets

    root = folder(tmp_path / "animals", mode=mode)
    config = experiment(root).dataset
    assert (config.name, config.input_shape, config.num_classes) == ("animals", (channels, 6, 6), 2)
    theirs = import_torchvision_datasets().ImageFolder(str(root))
    assert theirs.classes == ["bird", "cat"]
    birds, cats = ([np.asarray(image.convert(mode)) for image, label in theirs if label == wanted] for wanted in (0, 1))
    ours = load_dataset(config, "test")
    assert ours.labels.tolist() == [0, 1, 0, 1], "every fifth of each class, the classes in turns"
    for mine, pixels in zip(ours.raw.numpy(), (birds[0], cats[0], birds[5], cats[5]), strict=True):
        assert np.array_equal(mine[0] if mode == "L" else mine.transpose(1, 2, 0), pixels)


def test_a_folder_may_be_divided_and_a_class_may_be_called_train(tmp_path: Path) -> None:
    folder(tmp_path / "split" / "train")
    folder(tmp_path / "split" / "test", n=3)
    config = experiment(tmp_path / "split").dataset
    assert (config.pool_size, len(load_dataset(config, "test"))) == (20, 6)
    vehicles = experiment(folder(tmp_path / "vehicles", names=("plane", "train"))).dataset
    assert (vehicles.num_classes, vehicles.pool_size) == (2, 16)


def test_the_hash_goes_by_content_not_by_place_or_name(tmp_path: Path) -> None:
    first = experiment(save(tmp_path / "a.npz"))
    (tmp_path / "elsewhere").mkdir()
    assert experiment(save(tmp_path / "elsewhere" / "b.npz")).config_hash == first.config_hash
    assert experiment(tmp_path / "a.npz", name="mine").config_hash == first.config_hash
    images, labels = arrays()
    images[0, 0, 0, 0] ^= 1
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    assert experiment(tmp_path / "a.npz").config_hash != first.config_hash


def test_the_written_form_needs_no_file_until_images_are_loaded(tmp_path: Path) -> None:
    first = experiment(save(tmp_path / "a.npz"))
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.npz").rename(tmp_path / "moved" / "a.npz")
    again = resolve(yaml.safe_load(dump_experiment(first)))
    assert again == first
    with pytest.raises(UserError, match="no such file or folder"):
        load_dataset(again.dataset, "test")
    assert len(load_dataset(again.dataset, "test", data_dir=tmp_path / "moved")) == 8


def test_images_that_changed_since_are_refused(tmp_path: Path) -> None:
    first = experiment(save(tmp_path / "a.npz"))
    np.savez(tmp_path / "a.npz", images=arrays(seed=5)[0], labels=arrays()[1])
    with pytest.raises(UserError, match="has changed since"):
        load_dataset(first.dataset, "train")


IMAGES, LABELS = arrays()
BAD: dict[str, dict[str, np.ndarray]] = {
    "needs the arrays labels": {"images": IMAGES},
    "needs the arrays test_labels": {"images": IMAGES, "labels": LABELS, "test_images": IMAGES},
    "must be (N, C, H, W)": {"images": IMAGES[:, 0], "labels": LABELS},
    "must be 40 integers": {"images": IMAGES, "labels": LABELS / 2},
    "these lie in [0, 255]": {"images": IMAGES.astype(np.float32), "labels": LABELS},
    "float32 cannot hold": {"images": IMAGES / 255.0, "labels": LABELS},
    "numbers from 0 on": {"images": IMAGES, "labels": LABELS - 1},
    "at least two classes": {"images": IMAGES, "labels": LABELS * 0},
    "which no training image has": {"images": IMAGES, "labels": LABELS, "test_images": IMAGES, "test_labels": LABELS + 1},
    "test images (2, 6, 6)": {"images": IMAGES, "labels": LABELS, "test_images": IMAGES.repeat(2, 1), "test_labels": LABELS},
    "at least one of each": {"images": IMAGES[:1], "labels": LABELS[:1]},
}


@pytest.mark.parametrize("says", BAD)
def test_arrays_that_are_no_data_set_are_refused(tmp_path: Path, says: str) -> None:
    np.savez(tmp_path / "bad.npz", **BAD[says])
    with pytest.raises(UserError) as caught:
        experiment(tmp_path / "bad.npz")
    assert says in str(caught.value)
    assert "dataset.path" in str(caught.value)


def test_folders_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least two classes"):
        experiment(folder(tmp_path / "one", names=("a",)))
    odd = folder(tmp_path / "odd")
    Image.new("L", (7, 6)).save(odd / "cat" / "zzz.png")
    with pytest.raises(UserError, match=r"zzz\.png.*\(6, 7\)"):
        experiment(odd)
    (odd / "cat" / "zzz.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"zzz\.png: not a readable image"):
        experiment(odd)
    Image.new("I;16", (6, 6)).save(odd / "cat" / "zzz.png")
    with pytest.raises(UserError, match="256 levels"):
        experiment(odd)
    mixed = folder(tmp_path / "mixed" / "train")
    folder(mixed.parent / "test", names=("bird", "dog"))
    with pytest.raises(UserError, match="'dog' that train has not"):
        experiment(mixed.parent)
    folder(mixed.parent, names=("owl",))
    with pytest.raises(UserError, match="owl stands beside train"):
        experiment(mixed.parent)


def test_a_published_name_is_not_given_to_ones_own_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="published data set"):
        experiment(save(tmp_path / "a.npz"), name="mnist")
    assert experiment(folder(tmp_path / "mnist")).dataset.name == "mnist-folder"
    with pytest.raises(UserError, match=r"dataset\.name: unknown data set\. Did you mean 'mnist'\?.*dataset\.path"):
        resolve({"dataset": {"name": "mnits"}})


def test_numbers_that_are_no_pixels_bring_their_domain(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, labels = rng.normal(0, 3, (40, 36, 1, 1)).astype(np.float32), np.arange(40) % 3
    unbounded = experiment(save(tmp_path / "z.npz", images=vectors, labels=labels, domain=np.array([-np.inf, np.inf])))
    assert not unbounded.dataset.box.bounded
    assert resolve(yaml.safe_load(dump_experiment(unbounded))).config_hash == unbounded.config_hash
    assert experiment(save(tmp_path / "w.npz", images=vectors, labels=labels, domain=np.array([-20, 20]))).dataset.box == Box(-20, 20)
    assert "domain" not in experiment(save(tmp_path / "p.npz")).model_dump()["dataset"]["content"]  # images keep their hash
    for wrong, said in (([-1.0, 1.0], r"must lie in \[-1, 1\]"), ([1.0, -1.0], "two ends, the lower one first"), ([0.0], "two ends")):
        with pytest.raises(UserError, match=said):
            experiment(save(tmp_path / "bad.npz", images=vectors, labels=labels, domain=np.array(wrong)))
    with pytest.raises(UserError, match="uint8 images lie in"):
        experiment(save(tmp_path / "levels.npz", domain=np.array([-np.inf, np.inf])))
    broken = np.where(vectors > 8, np.nan, vectors)
    broken[0] = np.inf
    with pytest.raises(UserError, match=r"must lie in \[-inf, inf\]"):
        experiment(save(tmp_path / "inf.npz", images=broken, labels=labels, domain=np.array([-np.inf, np.inf])))
