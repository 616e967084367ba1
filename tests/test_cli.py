"""The command line as typed: help that teaches, exit code 2 with a sentence for bad input, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cure_ray.cli import main
from cure_ray.search.space import Sweep
from cure_ray.search.study import claim
from cure_ray.testing import stores


def cure_ray(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cure_ray", *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def test_training_from_a_file_prints_epochs_and_the_way_on(tmp_path: Path) -> None:
    described = tmp_path / "mine.yaml"
    described.write_text(
        "preset: smoke\nscale: 0.1\ndataset: {train_samples: 300, validation: 50}\nnetwork: {width: 0.25}\ntraining: {method: max}\n"
    )
    done = cure_ray("train", "mine.yaml", "--set", "training.lambda_2=1e-4", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "epoch 1/3" in done.stdout
    assert "certify it: cure-ray certify run" in done.stdout
    assert (tmp_path / "run" / "experiment.yaml").exists()
    again = cure_ray("train", "mine.yaml", "--set", "training.lambda_2=1e-4", "--out", "run", "--resume", cwd=tmp_path)
    assert again.returncode == 0
    assert "epoch 1/3" not in again.stdout
    reproduced = cure_ray("train", "run/experiment.yaml", "--out", "copy", cwd=tmp_path)
    assert reproduced.returncode == 0
    digests = [next((tmp_path / d / "checkpoints").glob("epoch_0003")) / "weights.safetensors" for d in ("run", "copy")]
    assert digests[0].read_bytes() == digests[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "nothing.yaml"), "no such file, and no such preset"),
        (("train", "smoke", "--set", "training.etta=1"), "Did you mean 'eta'?"),
        (("train", "smoke", "--set", "threats.l2=9"), "lies inside"),
        (("train", "smoke", "--set", "execution.device=gpu0"), "unknown device"),
        (("train", "smoke", "--set", "training.method=finetune", "--set", "training.start_from=nowhere"), "does not exist"),
        (("train", "tinyimagenet", "--set", "network.width=0.1"), "tiny-imagenet-200/wnids.txt"),
        (("config", "smok"), "Did you mean 'smoke'?"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_two(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cure-ray", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert says in printed


def test_a_process_that_is_refused_ends_with_the_sentence_alone(tmp_path: Path) -> None:
    done = cure_ray("train", "nothing.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: nothing.yaml")
    assert "Traceback" not in done.stderr


def test_help_lists_the_commands() -> None:
    done = cure_ray("--help")
    assert done.returncode == 0
    for command in ("train", "data", "config"):
        assert command in done.stdout


def test_help_status_and_configurations_load_no_torch(tmp_path: Path) -> None:
    """They answer at once, also where torch takes seconds to load."""
    stores.write_run(tmp_path / "run", stores.experiment())
    space = {"training.lambda_2": {"choice": [0.1, 0.2]}}
    claim(tmp_path / "sweep", Sweep.model_validate({"name": "s", "base": {"preset": "smoke"}, "space": space, "trials": 2}))
    words = [["status", "run"], ["status", "sweep"], ["config", "smoke"], ["--version"], ["--help"]]
    words += [
        [command, "--help"] for command in ("train", "certify", "radius", "sweep", "report", "fsck", "submit", "quickstart", "export")
    ]
    script = (
        "import sys\nfrom cure_ray.cli import app\n"
        f"for words in {words!r}:\n    assert not app(words, standalone_mode=False), words\n"
        "print(sorted({'torch', 'ray', 'torchvision', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 10
    assert done.stdout.splitlines()[-1] == "[]"


def test_config_prints_a_file_that_loads_to_the_same_experiment(tmp_path: Path) -> None:
    printed = cure_ray("config", "cifar-large", "--set", "scale=0.1").stdout
    (tmp_path / "full.yaml").write_text(printed)
    again = cure_ray("config", str(tmp_path / "full.yaml")).stdout
    assert printed == again
    assert "# config_hash: " in printed


def test_data_lists_every_data_set(tmp_path: Path) -> None:
    done = cure_ray("data", "--data-dir", str(tmp_path))
    assert done.returncode == 0
    for name in ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "tinyimagenet"):
        assert name in done.stdout
