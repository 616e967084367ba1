"""A disk that fills up under parallel training: one attempt, one sentence, and a run that goes on once there is room."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_helpers import files_of, tiny, until

from cure_ray.config import Experiment, dump_experiment
from cure_ray.runs.directory import resolve_checkpoint
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.run import train_run

pytestmark = pytest.mark.chaos
BYTES = 8 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("only root may mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def parallel(epochs: int) -> Experiment:
    experiment = tiny(epochs=epochs)
    return experiment.model_copy(update={"execution": experiment.execution.model_copy(update={"mode": "parallel"})})


@pytest.mark.parametrize("left", [0, 100_000], ids=["nothing left", "room for the small files only"])
def test_a_full_disk_ends_parallel_training_with_one_sentence(small_disk: Path, tmp_path: Path, left: int) -> None:
    """Where nothing is left, Ray's own list of checkpoints may be the first that cannot be written; else it is a checkpoint."""
    epochs = 60
    (tmp_path / "e.yaml").write_text(dump_experiment(parallel(epochs)))
    run, filler = small_disk / "run", small_disk / "filler"
    command = [sys.executable, "-m", "cure_ray", "train", str(tmp_path / "e.yaml"), "--out", str(run)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: (run / "metrics.jsonl").exists() and read_metrics(run), 180)
    filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - left))
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 2, out + err
    assert err.startswith(f"error: the disk of {run} is full")
    assert err.count("\n") == 1
    assert [line for line in out.splitlines() if not line.startswith("epoch ")] == []
    filler.unlink()
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=300)
    alone = train_run(tiny(epochs=epochs), tmp_path / "alone", quiet=True)
    assert files_of(resolve_checkpoint(run)) == files_of(alone.checkpoint)
