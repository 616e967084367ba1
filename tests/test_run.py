"""Runs on disk: the same bits twice, the same bits after a kill, and nothing lost or overwritten when things go wrong."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cure_ray.config import METHODS, Experiment, dump_experiment, resolve
from cure_ray.errors import NoRoomError, UserError
from cure_ray.runs import checkpoints
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.directory import file_digest, list_checkpoints
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.run import train_run


def quick(method: str = "scratch", epochs: int = 4, **more: Any) -> Experiment:
    """A few seconds: one standard epoch, one of ramp, the rest at full radius (with gradient projection for scratch)."""
    training = {"method": method, "epochs": epochs, "anneal_epochs": 1, "lr_milestones": [], **more.pop("training", {})}
    if method in ("natural", "finetune"):
        training.pop("anneal_epochs")
    return resolve(
        {
            "preset": "smoke",
            "dataset": {"train_samples": 300, "validation": 60},
            "network": {"width": 0.25},
            "training": training,
            "execution": {"keep_checkpoints": 10},
            **more,
        }
    )


def final_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of the last checkpoint."""
    last = list_checkpoints(directory)[-1]
    return {f"{p.name}:{k}": v for p in sorted(last.glob("*.safetensors")) for k, v in load_file(p).items()}


def assert_same_bits(a: Path, b: Path) -> None:
    left, right = final_tensors(a), final_tensors(b)
    assert left.keys() == right.keys()
    assert any("exp_avg" in key for key in left)
    for key in left:
        assert torch.equal(left[key], right[key]), key


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    train_run(quick(), directory, quiet=True)
    return directory


def test_the_same_experiment_gives_the_same_bits_twice(undisturbed: Path, tmp_path: Path) -> None:
    train_run(quick(), tmp_path / "again", quiet=True)
    assert_same_bits(undisturbed, tmp_path / "again")
    assert load_checkpoint(undisturbed).digest == load_checkpoint(tmp_path / "again").digest


def test_another_seed_gives_other_weights(undisturbed: Path, tmp_path: Path) -> None:
    train_run(quick(seed=1), tmp_path / "other", quiet=True)
    assert load_checkpoint(undisturbed).digest != load_checkpoint(tmp_path / "other").digest


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_resuming_from_any_epoch_gives_the_same_bits(undisturbed: Path, tmp_path: Path, epoch: int) -> None:
    copy = tmp_path / "resumed"
    shutil.copytree(undisturbed, copy)
    for later in list_checkpoints(copy)[epoch:]:
        shutil.rmtree(later)
    train_run(quick(), copy, resume=True, quiet=True)
    assert_same_bits(undisturbed, copy)
    assert [row["epoch"] for row in read_metrics(copy)] == [1, 2, 3, 4]


SWITCHES = {"loss": "mtl", "lambda_2": 0.3, "ema": 0.9, "accumulate": 2, "precise_bn": True, "weight_decay": 0.01, "natural_weight": 0.1}


@pytest.mark.parametrize("optimizer", ["separate", "copy"])
def test_resuming_with_average_accumulation_and_exact_statistics_gives_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    described = quick(training={**SWITCHES, "ramp_bound": "crown-ibp", "nt_optimizer": optimizer})
    train_run(described, tmp_path / "whole", quiet=True)
    for epoch in (1, 3):
        copy = tmp_path / f"resumed-{epoch}"
        shutil.copytree(tmp_path / "whole", copy)
        for later in list_checkpoints(copy)[epoch:]:
            shutil.rmtree(later)
        train_run(described, copy, resume=True, quiet=True)
        assert_same_bits(tmp_path / "whole", copy)
    last = list_checkpoints(tmp_path / "whole")[-1]
    result, behind = load_file(last / "weights.safetensors"), load_file(last / "optimizer_ct.safetensors")
    assert not torch.equal(result["0.weight"], behind["live/0.weight"])
    assert torch.equal(load_checkpoint(last).network.state_dict()["0.weight"], result["0.weight"])


def start_in_background(tmp_path: Path, name: str) -> tuple[subprocess.Popen[str], Path, Path]:
    described, out = tmp_path / f"{name}.yaml", tmp_path / name
    described.write_text(dump_experiment(quick(epochs=6)))
    command = [sys.executable, "-m", "cure_ray", "train", str(described), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), described, out


def wait_for_epoch(out: Path, epoch: int) -> None:
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / f"epoch_{epoch:04d}" / "meta.json").exists():
        assert time.monotonic() < deadline, "training did not get going"
        time.sleep(0.02)


def test_kill_nine_and_resume_gives_the_same_bits(tmp_path: Path) -> None:
    process, described, out = start_in_background(tmp_path, "killed")
    wait_for_epoch(out, 3)
    process.kill()
    process.communicate()
    assert len(read_metrics(out)) < 6, "it was too fast to be killed"
    done = subprocess.run([sys.executable, "-m", "cure_ray", "train", str(described), "--out", str(out), "--resume"], check=False)
    assert done.returncode == 0
    train_run(quick(epochs=6), tmp_path / "whole", quiet=True)
    assert_same_bits(out, tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_cleanly_and_say_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    process, _, out = start_in_background(tmp_path, "stopped")
    wait_for_epoch(out, 2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped by {number.name}" in errors
    assert f"--out {out} --resume" in errors
    assert "Traceback" not in errors
    assert load_checkpoint(out).epoch >= 2


@pytest.mark.parametrize("profile", ["paper", "authors"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_in_both_profiles(method: str, profile: str, undisturbed: Path, tmp_path: Path) -> None:
    training = {"start_from": str(undisturbed)} if method == "finetune" else {}
    if profile == "authors" and method == "finetune":
        training["anneal_epochs"] = 1
    result = train_run(quick(method, 3, profile=profile, training=training), tmp_path / "run", quiet=True)
    assert result.epoch == 3
    assert result.metrics["loss"] > 0
    assert {"clean", "ibp_linf", "ibp_l2", "ibp_l1", "ibp_union", "epoch_seconds"} <= result.metrics.keys()
    assert result.metrics["ibp_union"] <= min(result.metrics[f"ibp_{n}"] for n in ("linf", "l2", "l1"))


def test_projection_wraps_any_method_and_beta_zero_changes_nothing(tmp_path: Path) -> None:
    plain = train_run(quick("linf"), tmp_path / "plain", quiet=True)
    zero = train_run(quick("linf", training={"projection": True, "beta": 0.0}), tmp_path / "zero", quiet=True)
    merged = train_run(quick("linf", training={"projection": True}), tmp_path / "merged", quiet=True)
    digests = [load_checkpoint(r.directory).digest for r in (plain, zero, merged)]
    assert digests[0] == digests[1] != digests[2]
    assert "cosine_mean" in merged.metrics
    assert set(merged.metrics["cosines"]) <= set(load_checkpoint(merged.directory).network.state_dict())


def test_training_learns(tmp_path: Path) -> None:
    experiment = resolve({"preset": "smoke", "scale": 0.5, "training": {"method": "linf"}})
    metrics = train_run(experiment, tmp_path / "run", quiet=True).metrics
    assert metrics["clean"] > 0.85
    assert metrics["ibp_linf"] > 0.2


@pytest.mark.parametrize("loss", ["mtl", "cc", "exp"])
def test_every_loss_trains_the_union_on_digits(tmp_path: Path, loss: str) -> None:
    described = quick(
        "joint",
        6,
        dataset={"train_samples": 700, "validation": 100},
        network={"width": 0.5},
        threats={"linf": 0.03, "l2": 0.1, "l1": 0.2},
        training={"norms": ["linf", "l2", "l1"], "loss": loss, **dict.fromkeys(("lambda_inf", "lambda_2", "lambda_1"), 0.5), "lr": 5e-3},
    )
    metrics = train_run(described, tmp_path / "run", quiet=True).metrics
    assert metrics["clean"] > 0.75
    assert metrics["ibp_union"] > 0.1


def test_metrics_are_one_table_in_pandas(undisturbed: Path) -> None:
    table = pd.read_json(undisturbed / "metrics.jsonl", lines=True)
    assert table["epoch"].tolist() == [1, 2, 3, 4]
    assert table["gamma_share"].between(0, 1).sum() == 3
    assert table["cosine_mean"].notna().sum() == 2
    assert set(table["eval_split"]) == {"validation"}


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    train_run(quick(execution={"keep_checkpoints": 2}), tmp_path / "run", quiet=True)
    assert [p.name for p in list_checkpoints(tmp_path / "run")] == ["epoch_0003", "epoch_0004"]


def test_a_directory_of_another_experiment_is_left_alone(undisturbed: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}
    with pytest.raises(UserError, match="belongs to another experiment"):
        train_run(quick(seed=9), undisturbed, resume=True, quiet=True)
    with pytest.raises(UserError, match="Add --resume"):
        train_run(quick(), undisturbed, quiet=True)
    assert before == {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}


def test_a_directory_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        train_run(quick(), tmp_path, quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_diverging_loss_stops_with_the_step_and_the_term(tmp_path: Path) -> None:
    experiment = quick("linf", training={"lr": 1e30})
    with pytest.raises(UserError, match=r"loss term '\w+' became (nan|inf) in epoch \d+, batch \d+"):
        train_run(experiment, tmp_path / "run", quiet=True)
    for path in list_checkpoints(tmp_path / "run"):
        assert load_checkpoint(path).epoch >= 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),  # as safetensors 0.8 says it
        SafetensorError(f"Error while serializing: I/O error: Disk quota exceeded (os error {errno.EDQUOT})"),
    ],
)
def test_a_full_disk_keeps_earlier_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    real = checkpoints.save_file
    calls = []

    def full(tensors: Any, path: Any) -> None:
        calls.append(path)
        if len(calls) > 3:
            raise error
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(NoRoomError, match=r"disk of .* is full; epoch 2 could not be saved"):
        train_run(quick("linf"), tmp_path / "run", quiet=True)
    assert load_checkpoint(tmp_path / "run").epoch == 1
    assert not list((tmp_path / "run" / "checkpoints").glob(".*partial"))


def test_too_little_disk_is_noticed_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="MB free, but this run needs"):
        train_run(quick(), tmp_path / "run", quiet=True)


def damaged(source: Path, target: Path, damage: str) -> Path:
    shutil.copytree(source, target)
    weights, meta = target / "weights.safetensors", target / "meta.json"
    if damage == "flipped byte":
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(bytes(content))
    elif damage == "missing weights":
        weights.unlink()
    elif damage == "torn json":
        meta.write_text(meta.read_text()[:50])
    elif damage == "foreign":
        meta.write_text('{"format": "somebody-else"}')
    elif damage == "escaping path":
        content_json = json.loads(meta.read_text())
        content_json["files"]["../../etc/passwd"] = "0"
        meta.write_text(json.dumps(content_json))
    elif damage == "other architecture":
        save_file({"0.weight": torch.zeros(1)}, weights)
        content_json = json.loads(meta.read_text())
        content_json["files"]["weights.safetensors"] = file_digest(weights)
        meta.write_text(json.dumps(content_json))
    return target


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("flipped byte", "digest differs"),
        ("missing weights", "weights.safetensors is missing"),
        ("torn json", "cannot be read"),
        ("foreign", "not a checkpoint of this program"),
        ("escaping path", "missing"),
        ("other architecture", "belongs to another architecture"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_refused_with_the_reason(undisturbed: Path, tmp_path: Path, damage: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_checkpoint(damaged(list_checkpoints(undisturbed)[-1], tmp_path / "epoch_0004", damage))
    assert says in str(caught.value)


def test_resume_falls_back_to_the_last_intact_checkpoint(undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy)
    last = list_checkpoints(copy)[-1]
    (last / "weights.safetensors").write_bytes(b"torn")
    train_run(quick(), copy, resume=True, quiet=True)
    assert "skipping a damaged checkpoint" in capsys.readouterr().out
    assert_same_bits(undisturbed, copy)


def test_finetuning_from_another_architecture_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    experiment = quick("finetune", training={"start_from": str(undisturbed)}, network={"width": 0.5})
    with pytest.raises(UserError, match="another architecture"):
        train_run(experiment, tmp_path / "run", quiet=True)


def test_a_checkpoint_that_is_not_there_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist: expected a directory written by `cure-ray train`"):
        load_checkpoint(tmp_path / "nowhere")
