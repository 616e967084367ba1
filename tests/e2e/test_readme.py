"""Every command of the README, as a new user would type it, in order, in an empty directory."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
FASTER = {"sweep": ["--trials", "2"]}  # the same command, less of it


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "sweeps", directory / "sweeps")
    return directory


def test_every_command_of_the_readme_works_in_order(home: Path) -> None:
    typed = [c for c in commands() if not c.startswith("make ")]
    assert len(typed) >= 9
    for command in typed:
        program, name, *arguments = shlex.split(command)
        assert program == ".venv/bin/cure-ray", command
        done = run([sys.executable, "-m", "cure_ray", name, *arguments, *FASTER.get(name, [])], home)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    done = run([sys.executable, "-c", f"{snippet.rstrip().replace('verdicts.groupby', 'print(verdicts.groupby')})"], home)
    assert done.returncode == 0, done.stderr
    assert "certified" in done.stdout
    report = (home / "results" / "max" / "report.html").read_text()
    assert "<html" in report


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(commands()), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_quickstart_ends_with_the_table_and_the_report_and_does_nothing_twice(home: Path) -> None:
    (home / "tiny.yaml").write_text(
        "name: tiny\n"
        "base: {preset: smoke, scale: 0.1, dataset: {train_samples: 400, validation: 60}, network: {width: 0.25}, "
        "certification: {samples: 40}}\n"
        "space: {training.method: {choice: [linf, max]}}\nsearch: grid\nsamples: 30\n"
    )
    command = [sys.executable, "-m", "cure_ray", "quickstart", "--sweep", "tiny.yaml", "--out", "quick"]
    first = run(command, home)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "union" in first.stdout
    assert (home / "quick" / "results" / "report.html").exists()
    written = {p: p.stat().st_mtime_ns for p in (home / "quick" / "sweep" / "trials").rglob("weights.safetensors")}
    second = run(command, home)
    assert second.returncode == 0, second.stdout + second.stderr
    assert written == {p: p.stat().st_mtime_ns for p in (home / "quick" / "sweep" / "trials").rglob("weights.safetensors")}
