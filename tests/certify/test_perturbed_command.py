"""`cure-ray certify` for transformations, patches and ONNX files, as typed."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cure_ray.cli import app
from cure_ray.errors import UserError
from cure_ray.interchange import write_onnx
from cure_ray.results.store import Store
from tests.certify.perturbation_tools import digits_network


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("foreign")
    network, x, y = digits_network()
    write_onnx(network, directory / "net.onnx")
    np.savez(directory / "data.npz", images=x.numpy(), labels=y.numpy())
    return directory


def certify(files: Path, *arguments: str) -> str:
    common = ["certify", "--onnx", str(files / "net.onnx"), "--data", str(files / "data.npz"), "--device", "cpu", "--quiet"]
    result = CliRunner().invoke(app, [*common, *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_one_command_certifies_every_family_of_an_onnx_file_into_one_store(files: Path, tmp_path: Path) -> None:
    threats = "linf=0.01,R(2);Tu(0.1),Tv(0.1),patch=1x1"
    text = certify(files, "--threats", threats, "--samples", "8", "--out", str(tmp_path / "out"))
    for word in ("l_inf 0.01", "R(2)", "Tu(0.1),Tv(0.1)", "patch 1x1", "union", "gcr_geo", "gcr_all"):
        assert word in text
    rows = pq.read_table(tmp_path / "out" / "verdicts").to_pylist()
    assert len(rows) == 4 * 8
    assert {(r["family"], r["threat"]) for r in rows} == {
        ("lp", "linf=0.01"), ("geometric", "R(2)"), ("geometric", "Tu(0.1),Tv(0.1)"), ("patch", "patch=1x1"),
    }  # fmt: skip
    assert {r["stages"] for r in rows if r["family"] == "patch"} == {"ibp,attack"}
    assert all(r["margin_lb"] > 0 for r in rows if r["status"] == "certified")
    assert any(r["status"] == "certified" for r in rows if r["family"] == "geometric")
    again = certify(files, "--threats", threats, "--samples", "8", "--out", str(tmp_path / "out"))
    assert again.splitlines()[1:] == text.splitlines()[1:]


def test_the_grid_does_not_depend_on_what_the_data_file_is_called(files: Path, tmp_path: Path) -> None:
    """A file called mnist.npz used to get the grid published for MNIST."""
    rows = {}
    for name in ("mnist", "mine"):
        shutil.copy(files / "data.npz", tmp_path / f"{name}.npz")
        for grid in ((), ("--grid", "mnist")):
            out = tmp_path / f"{name}{len(grid)}"
            certify(
                files, "--data", str(tmp_path / f"{name}.npz"), "--threats", "R(30),linf=0.01", "--samples", "3", "--out", str(out), *grid
            )
            rows[name, grid] = {r["threat"]: r["grid"] for r in pq.read_table(out / "verdicts").to_pylist()}
    for name in ("mnist", "mine"):
        assert rows[name, ()] == {"R(30)": "480", "linf=0.01": None}
        assert rows[name, ("--grid", "mnist")] == {"R(30)": "240", "linf=0.01": None}


def test_two_grids_do_not_mix_in_one_store(files: Path, tmp_path: Path) -> None:
    common = ("--threats", "R(30)", "--samples", "3", "--out", str(tmp_path / "out"))
    certify(files, *common)
    with pytest.raises(UserError, match="on a grid of 480 cells, now 240"):
        certify(files, *common, "--grid", "mnist")


def test_switches_of_patches_and_transformations_are_recorded_with_the_run(files: Path, tmp_path: Path) -> None:
    runs = {}
    for switch in ((), ("--patch-precheck",), ("--separate-logits",)):
        out = tmp_path / "-".join(("out", *switch))
        certify(files, "--threats", "R(2);patch=1x1", "--samples", "8", "--out", str(out), *switch)
        (plan,) = Store.open(out).plans()
        runs[switch] = plan["run_id"], [(r["threat"], r["sample_index"], r["status"]) for r in pq.read_table(out / "verdicts").to_pylist()]
        assert plan["settings"].get("patch_precheck", False) == ("--patch-precheck" in switch)
        assert plan["settings"].get("separate_logits", False) == ("--separate-logits" in switch)
    assert len({run_id for run_id, _ in runs.values()}) == 3
    assert runs[()][1] == runs[("--patch-precheck",)][1]


def test_a_falsified_transformation_stores_its_witness_and_says_where(files: Path, tmp_path: Path) -> None:
    certify(files, "--threats", "R(60)", "--samples", "10", "--out", str(tmp_path / "out"))
    rows = [r for r in pq.read_table(tmp_path / "out" / "verdicts").to_pylist() if r["status"] == "falsified"]
    assert rows
    assert all((tmp_path / "out" / "witnesses" / f"{r['witness']}.npy").is_file() and "R=" in r["message"] for r in rows)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--threats", "R(10),Q(1)"], "here"),
        (["--threats", "R(120)"], "90 degrees"),
        (["--threats", "Sc(100)"], "scale of 0"),
        (["--threats", "patch=9x9"], "larger than the image"),
        (["--threats", "Tu(4),Tv(4),R(90),Sc(50),Sh(50)"], "--yes"),
        (["--threats", "R(10)", "--union-only"], "about norms"),
        (["--threats", "R(10)", "--engine", "auto_lirpa"], "native engine"),
    ],
)
def test_bad_input_is_a_sentence(files: Path, tmp_path: Path, arguments: list[str], word: str) -> None:
    with pytest.raises(UserError, match=word):
        certify(files, *arguments, "--samples", "4", "--out", str(tmp_path / "out"))


def test_an_onnx_file_needs_data(files: Path) -> None:
    result = CliRunner().invoke(app, ["certify", "--onnx", str(files / "net.onnx"), "--threats", "R(1)"])
    assert isinstance(result.exception, UserError)
    assert "--data" in str(result.exception)
