"""`cure-ray certify` as a person types it: own checkpoints and foreign networks, resume, Ctrl-C, and sentences for bad input."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from cure_ray.api import execution as runner
from cure_ray.certification.identity import network_identity
from cure_ray.commands import certify as command
from cure_ray.config import parse_experiment
from cure_ray.errors import UserError
from cure_ray.networks.build import new_network
from cure_ray.results.fsck import fsck
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import load_checkpoint, write_checkpoint
from cure_ray.testing import tiny
from cure_ray.threats.balls import Ball
from cure_ray.threats.text import parse_balls


def certify(**options: Any) -> None:
    command.certify(**options)


def rows(options: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """All rows with their timings, which tell a row that was kept from one that was computed again."""
    return {(r["threat"], r["sample_index"]): r for r in Store.open(options["out"]).read().to_pylist()}


def test_a_foreign_network_is_certified_and_the_table_is_printed(foreign: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    certify(**foreign)
    printed = capsys.readouterr().out
    frame = pd.read_parquet(Path(foreign["out"]) / "verdicts")
    assert len(frame) == 72
    union = frame[frame.status == "certified"].groupby("sample_index").size().eq(3).sum()
    line = next(line for line in printed.splitlines() if line.startswith("union"))
    assert f"{100 * union / 24:.1f} %" in line
    for word in ("clean", "l_inf 0.03", "l2 0.2", "l1 0.4", "95 % interval", "<= crown-ibp", "certified "):
        assert word in printed
    for witness in frame.witness.dropna():
        assert Store.open(foreign["out"]).read_witness(witness).shape == (1, 8, 8)
    assert fsck(Store.open(foreign["out"])) == []


def test_the_same_command_continues_and_changes_nothing(foreign: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    certify(**foreign, samples=10, stages="ibp,crown")
    before = rows(foreign)
    seen: list[int] = []
    real = runner.certify_shard

    def watched(certifier: Any, shard: Any, samples: Any, save: Any) -> Any:
        seen.extend(shard.indices)
        return real(certifier, shard, samples, save)

    monkeypatch.setattr(runner, "certify_shard", watched)
    certify(**foreign, samples=10, stages="ibp,crown")
    assert seen == []
    certify(**foreign, samples=14, stages="ibp,crown")
    assert sorted(set(seen)) == [10, 11, 12, 13]
    after = rows(foreign)
    assert len(after) == 42
    assert before.items() <= after.items()


def test_union_only_gives_the_same_union_and_hides_the_single_norms(foreign: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    certify(**foreign)
    full = capsys.readouterr().out
    certify(**{**foreign, "out": foreign["out"] + "-union"}, union_only=True)
    short = capsys.readouterr().out

    def union(text: str) -> list[str]:
        return next(line for line in text.splitlines() if line.startswith("union")).split()[:3]

    assert union(full) == union(short)
    assert "not computed" in short


def test_the_threats_of_a_union_only_run_are_settled(foreign: dict[str, Any]) -> None:
    """Which samples are skipped depends on all threats: adding one would write rows twice, leaving one out would understate."""
    certify(**{**foreign, "threats": "linf=0.03,l2=0.2"}, samples=6, stages="ibp", union_only=True)
    before = rows(foreign)
    for other in (foreign["threats"], "linf=0.03", "l1=0.4"):
        with pytest.raises(UserError, match="none can be added or left out"):
            certify(**{**foreign, "threats": other}, samples=6, stages="ibp", union_only=True)
    assert rows(foreign) == before
    certify(**{**foreign, "threats": "l2=0.2,linf=0.03"}, samples=8, stages="ibp", union_only=True)
    assert len(rows(foreign)) == 16
    assert fsck(Store.open(foreign["out"])) == []


def test_double_precision_images_are_taken_where_single_precision_holds_them(foreign: dict[str, Any]) -> None:
    x, y = tiny.samples(3)
    np.savez(foreign["data"], images=x.numpy().astype(np.float64), labels=y.numpy())
    certify(**foreign, stages="ibp")
    assert len(rows(foreign)) == 9


def test_a_cross_check_confirms_linf_certificates(foreign: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    certify(**{**foreign, "threats": "linf=0.02"}, samples=8, cross_check="auto_lirpa")
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("cross-check"))
    confirmed, of, checked = line.split("confirms ")[1].split()[:3]
    assert of == "of"
    assert int(confirmed) == int(checked) > 0


def test_a_residual_network_is_refused_by_name_and_certified_by_the_other_engine(foreign: dict[str, Any], tmp_path: Path) -> None:
    network, (x, _) = tiny.residual(), tiny.samples(6)
    np.savez(foreign["data"], images=x.numpy(), labels=network(x).argmax(1).numpy())
    options = {**foreign, "network": "cure_ray.testing.tiny:residual", "weights": None, "threats": "linf=0.003,l2=0.01,l1=0.02"}
    with pytest.raises(UserError, match=r"Skip.*auto_lirpa"):
        certify(**options)
    certify(**options, engine="auto_lirpa")
    frame = pd.read_parquet(Path(foreign["out"]) / "verdicts")
    assert set(frame.engine) == {"auto_lirpa"}
    assert (frame.status == "certified").any()
    assert not (frame.status == "error").any()


def test_a_broken_image_is_an_error_row_and_named_below_the_table(foreign: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    x, y = tiny.samples(4)
    x[2, 0, 0, 0] = float("nan")
    np.savez(foreign["data"], images=x.numpy(), labels=y.numpy())
    certify(**foreign, stages="ibp,crown")
    printed = capsys.readouterr().out
    assert "error: sample 2, linf=0.03, at clean: the image holds NaN" in printed
    assert "error 1" in printed


def test_a_checkpoint_brings_its_data_radii_and_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = parse_experiment({"network": {"name": "mlp", "width": 0.2}, "certification": {"samples": 6}})
    torch.manual_seed(0)
    weights = new_network(experiment).state_dict()
    digest = write_checkpoint(tmp_path / "epoch_0001", experiment, 1, weights, {}, {"clean": 0.1})
    certify(checkpoint=tmp_path / "epoch_0001", out=str(tmp_path / "out"), device="cpu")
    store = Store.open(tmp_path / "out")
    frame = store.read().to_pandas()
    assert len(frame) == 18
    assert set(frame.threat) == {"linf=0.1", "l2=0.5", "l1=1"}
    (identity,) = set(frame.checkpoint_digest)
    assert identity == network_identity(load_checkpoint(tmp_path / "epoch_0001").network)
    assert store.about(identity)["weights_digest"] == digest
    assert store.about(identity)["method"] == experiment.training.method
    assert store.about(identity)["seed"] == 0


def test_a_checkpoint_brings_its_threats_of_every_family(tmp_path: Path) -> None:
    threats = ["l2", "linf=0.05", "R(2)", "Tu(0.1),Tv(0.1)", "patch(1)"]
    experiment = parse_experiment({"network": {"name": "mlp", "width": 0.2}, "certification": {"samples": 3, "threats": threats}})
    torch.manual_seed(0)
    write_checkpoint(tmp_path / "epoch_0001", experiment, 1, new_network(experiment).state_dict(), {}, {})
    options: dict[str, Any] = {"checkpoint": tmp_path / "epoch_0001", "device": "cpu", "stages": "ibp"}
    certify(**options, out=str(tmp_path / "own"))
    frame = Store.open(tmp_path / "own").read().to_pandas()
    assert set(frame.threat) == {"l2=0.5", "linf=0.05", "R(2)", "Tu(0.1),Tv(0.1)", "patch=1x1"}
    assert set(frame.stages) == {"ibp"}
    certify(**options, out=str(tmp_path / "given"), threats="l2,R(1)")
    assert set(Store.open(tmp_path / "given").read().to_pandas().threat) == {"l2=0.5", "R(1)"}


def test_a_grid_is_weighed_by_the_images_there_are(foreign: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file brings all its images, whatever number an experiment would take, and never more than it has."""
    from cure_ray.certification import families as perturbations

    seen: list[int] = []
    monkeypatch.setattr(perturbations, "check_budget", lambda transformation, images, settings: seen.append(images))
    for samples in (None, 5, 1000):
        certify(**{**foreign, "threats": "R(1)", "out": f"{foreign['out']}-{samples}"}, stages="ibp", samples=samples)
    assert seen == [24, 5, 24]


def test_another_checkpoint_in_the_output_directory_is_refused(foreign: dict[str, Any], tmp_path: Path) -> None:
    certify(**foreign, samples=2, stages="ibp")
    save_file({k: v * 1.01 if v.is_floating_point() else v for k, v in tiny.network().state_dict().items()}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="another checkpoint"):
        certify(**{**foreign, "weights": tmp_path / "other.safetensors"}, samples=2, stages="ibp")
    certify(**{**foreign, "weights": tmp_path / "other.safetensors"}, samples=2, stages="ibp", add=True)
    assert len(pd.read_parquet(Path(foreign["out"]) / "verdicts")) == 12


def test_ctrl_c_keeps_finished_shards_and_says_how_to_continue(foreign: dict[str, Any]) -> None:
    """A real SIGINT to a real process, after its first shard is on disk."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from cure_ray.api import execution\n"
        "from cure_ray.commands.certify import certify\n"
        "from cure_ray.runs.stopping import StoppedError\n"
        "plan = execution.plan\n"
        "execution.plan = lambda job, threats, indices, done, size=100: plan(job, threats, indices, done, 2)\n"
        "try:\n"
        f"    certify(**{ {k: str(v) for k, v in foreign.items() if k not in ('weights', 'data')}!r},\n"
        f"            weights=Path({str(foreign['weights'])!r}), data=Path({str(foreign['data'])!r}))\n"
        "except StoppedError as error:\n"
        "    sys.exit(str(error))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    folder = Path(foreign["out"]) / "verdicts"
    deadline = time.monotonic() + 120
    while not (folder.is_dir() and list(folder.glob("*.parquet"))) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=120)
    assert "shards are finished and kept in" in message
    assert "run the same command to continue" in message
    kept = rows(foreign)
    assert 0 < len(kept) < 72
    certify(**foreign)
    assert kept.items() <= rows(foreign).items(), "nothing that was finished has been computed again"
    assert fsck(Store.open(foreign["out"])) == []


def test_radii_are_read_as_written() -> None:
    assert parse_balls("linf=8/255, l2=0.5") == [Ball("linf", 8 / 255), Ball("l2", 0.5)]
