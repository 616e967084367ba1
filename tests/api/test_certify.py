"""`cure_ray.certify`: any network, tensors or arrays, in memory or in a store, and the very rows of the command line."""

import gc
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import cure_ray
from cure_ray.api import execution
from cure_ray.commands.certify import certify as command
from cure_ray.interchange import write_onnx
from cure_ray.results.fsck import fsck
from cure_ray.results.store import Store
from cure_ray.testing import tiny

THREATS = "linf=0.03,l2=0.2,l1=0.4"
QUICK: dict[str, Any] = {"quiet": True, "device": "cpu"}


def same(left: pd.DataFrame, right: pd.DataFrame) -> bool:
    """The same rows but for the time they took."""
    key = ["threat", "sample_index"]
    frames = [f.drop(columns="seconds").sort_values(key).reset_index(drop=True) for f in (left, right)]
    for frame in frames:
        frame["margins"] = frame["margins"].map(tuple)
    return frames[0].astype(object).equals(frames[1].astype(object)[frames[0].columns])


@pytest.fixture(scope="module")
def result() -> cure_ray.CertificationResult:
    x, y = tiny.samples(12)
    return cure_ray.certify(tiny.network(), x, y, THREATS, **QUICK)


def test_the_result_answers_in_pandas(result: cure_ray.CertificationResult) -> None:
    rows = result.verdicts
    assert len(rows) == 36
    by_hand = rows.assign(ok=rows["status"] == "certified").groupby("sample_index")["ok"].all().mean()
    assert result.union == pytest.approx(by_hand)
    table = result.table()
    assert f"{100 * by_hand:.1f} [" in table["union"].iloc[0]
    assert "<table" in result._repr_html_()
    assert "union" in result.summary()


def test_a_witness_is_an_image_of_the_ball_that_the_network_gets_wrong(result: cure_ray.CertificationResult) -> None:
    x, y = tiny.samples(12)
    broken = result.verdicts.query("status == 'falsified' and norm == 'l2'")["sample_index"].tolist()
    assert broken
    image = result.witness(broken[0], cure_ray.Ball("l2", 0.2))
    assert np.linalg.norm(image - x[broken[0]].numpy()) <= 0.2
    assert int(tiny.network().double()(torch.tensor(image)[None]).argmax()) != int(y[broken[0]])
    tiny.network().float()
    proven = result.verdicts.query("status == 'certified' and norm == 'l2'")["sample_index"].iloc[0]
    with pytest.raises(cure_ray.UserError, match="is certified, not falsified"):
        result.witness(proven, "l2=0.2")
    with pytest.raises(cure_ray.UserError, match="threats here are"):
        result.witness(0, "l2=0.3")


def test_the_command_line_a_store_and_memory_give_the_same_rows(
    result: cure_ray.CertificationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = tiny.samples(12)
    np.savez(tmp_path / "images.npz", images=x.numpy(), labels=y.numpy())
    torch.save(tiny.network().state_dict(), tmp_path / "w.pt")
    options: dict[str, Any] = {
        "network": "cure_ray.testing.tiny:architecture",
        "weights": tmp_path / "w.pt",
        "data": tmp_path / "images.npz",
    }
    command(**options, threats=THREATS, out=str(tmp_path / "cli"), device="cpu", quiet=True)
    printed = Store.open(tmp_path / "cli").read().to_pandas()
    assert same(printed, result.verdicts)
    seen: list[int] = []
    real = execution.certify_shard
    monkeypatch.setattr(execution, "certify_shard", lambda *given: seen.append(len(given[1].indices)) or real(*given))
    given = {"images": x.double().numpy(), "labels": [int(label) for label in y], "threats": cure_ray_threats()}
    stored = cure_ray.certify(tiny.network(), **given, out=tmp_path / "store", **QUICK)
    assert same(stored.verdicts, result.verdicts)
    assert fsck(stored.store) == []
    assert cure_ray.load_results(tmp_path / "store").union == result.union
    again = cure_ray.certify(tiny.network(), **given, out=tmp_path / "store", samples=5, **QUICK)
    assert seen == [12, 12, 12], "what was there was not computed again"
    assert len(again.verdicts) == 15, "a result is about what was asked"


def cure_ray_threats() -> list[Any]:
    return [cure_ray.Ball("linf", 0.03), cure_ray.Ball("l2", 0.2), cure_ray.Ball("l1", 0.4)]


def test_memory_is_given_back_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = tiny.samples(2)
    result = cure_ray.certify(tiny.network(), x, y, "linf=0.01", stages="ibp", **QUICK)
    memory, path = fsspec.filesystem("memory"), result.store.files.path
    assert memory.find(path)
    del result
    gc.collect()
    assert not memory.find(path)
    assert list(tmp_path.iterdir()) == []


def test_the_caller_s_network_and_threads_are_left_alone() -> None:
    network, (x, y) = tiny.architecture().train(), tiny.samples(2)
    before, state = torch.get_num_threads(), {k: v.clone() for k, v in network.state_dict().items()}
    cure_ray.certify(network, x, y, "linf=0.01", stages="ibp", **QUICK)
    assert network.training
    assert all(torch.equal(v, state[k]) for k, v in network.state_dict().items())
    assert torch.get_num_threads() == before


def test_a_run_brings_its_data_radii_and_budgets(tmp_path: Path) -> None:
    small = {"dataset.train_samples": 200, "dataset.validation": 50, "network.width": 0.25, "certification.samples": 4}
    run = cure_ray.train("smoke", method="linf", scale=0.1, overrides=small, out=tmp_path / "run", quiet=True)
    result = cure_ray.certify(run, stages="ibp", **QUICK)
    assert len(result.verdicts) == 4 * len(result.verdicts["threat"].unique())
    assert set(result.verdicts["norm"]) == {"linf", "l2", "l1"}
    assert set(result.verdicts["dataset"]) == {"digits"}
    again = cure_ray.certify(tmp_path / "run", stages=["ibp"], samples=[0, 1, 2, 3], **QUICK)
    assert same(again.verdicts, result.verdicts)
    x, y = tiny.samples(3)
    assert len(cure_ray.certify(run.checkpoint, x, y, "l2=0.1", stages="ibp", **QUICK).verdicts) == 3
    assert "CURE" not in str(result.table()["method"].iloc[0])
    page = result.report(tmp_path / "page.html")
    assert page.read_text().count("data:image/png") >= 4


def test_an_onnx_file_is_the_network_it_was_written_from(result: cure_ray.CertificationResult, tmp_path: Path) -> None:
    x, y = tiny.samples(12)
    write_onnx(tiny.network(), tmp_path / "net.onnx")
    found = cure_ray.certify(tmp_path / "net.onnx", x, y, THREATS, stages="ibp,crown", **QUICK).verdicts
    assert len(found) == 36
    ours = cure_ray.certify(tiny.network(), x, y, THREATS, stages="ibp,crown", **QUICK).verdicts
    assert (found["status"] == ours["status"]).all()


def test_several_networks_make_one_table() -> None:
    x, y = tiny.samples(4)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = cure_ray.certify([tiny.network(), other], x, y, "linf=0.01", stages="ibp", **QUICK)
    assert len(result.table()) == 2
    with pytest.raises(cure_ray.UserError, match="results of 2 networks"):
        result.union  # noqa: B018


def test_a_report_of_results_in_memory_shows_the_images(result: cure_ray.CertificationResult, tmp_path: Path) -> None:
    page = result.report(tmp_path / "page.html", images=6)
    assert page == tmp_path / "page.html"
    assert page.read_text().count("data:image/png") >= 6


X, Y = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
BAD: list[tuple[dict[str, Any], str]] = [
    ({"images": X[:, 0]}, r"images must be \(N, C, H, W\), got shape \(2, 8, 8\)"),
    ({"images": X + 2}, r"images must lie in \[0, 1\], these lie in \[2, 2\]"),
    ({"images": X * 0 + 200.0}, "Divide by 255"),
    ({"images": X - 1}, "Undo the normalisation"),
    ({"images": X.long()}, "images must be uint8 or floats, got int64"),
    ({"images": np.full((2, 1, 8, 8), 0.1)}, "float32 cannot hold"),
    ({"images": torch.zeros(2, 1, 9, 9)}, r"shape \(1, 8, 8\), the data has \(1, 9, 9\)"),
    ({"images": X[:0], "labels": Y[:0]}, "no images"),
    ({"images": None}, "labels without images"),
    ({"images": None, "labels": None}, "brings no data"),
    ({"labels": None}, "images without labels"),
    ({"labels": torch.tensor([0, 10])}, r"labels must lie in 0\.\.9"),
    ({"labels": torch.tensor([0.0, 1.0])}, "labels must be 2 integers, got float32"),
    ({"labels": [0]}, "labels must be 2 integers"),
    ({"threats": "l3=0.1"}, "unknown norm 'l3'"),
    ({"threats": None}, "which threats"),
    ({"threats": []}, "which threats"),
    ({"threats": [cure_ray.Ball("l2", 0.1), cure_ray.Ball("l2", 0.2)]}, "one radius per norm"),
    ({"stages": "crwn"}, "Did you mean 'crown'"),
    ({"nodes": -1}, "budgets must not be negative"),
    ({"seconds": "soon"}, "not a time"),
    ({"samples": 0}, "at least 1"),
    ({"samples": [0, 7]}, r"different numbers in 0\.\.1"),
    ({"samples": [1, 1]}, "different numbers"),
    ({"device": "gpu"}, "unknown device 'gpu'"),
    ({"workers": 0}, "at least one worker"),
    ({"engine": "natve"}, "Did you mean 'native'"),
    ({"split": "train"}, "certified as it is"),
    ({"node": 3}, "no option 'node'. Did you mean 'nodes'"),
    ({"network": 3}, "a int cannot be certified"),
    ({"network": "nowhere"}, "nowhere does not exist"),
    ({"network": nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()}, "weights are torch.float64"),
    ({"network": nn.Sequential(nn.Flatten(), nn.Linear(64, 1))}, "at least two classes"),
    ({"network": nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 10))}, "does not accept images of shape"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[s for _, s in BAD])
def test_bad_input_raises_a_sentence_and_writes_nothing(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"network": tiny.architecture(), "images": X, "labels": Y, "threats": "linf=0.1", "stages": "ibp", **QUICK}
    with pytest.raises(cure_ray.UserError, match=sentence):
        cure_ray.certify(**{**given, **change}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
