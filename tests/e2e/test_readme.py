"""Every command of the README, as a new user would type it, in order, in an empty directory."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
FASTER = {  # the same command, less of it: later options win
    "train": ["--set", "scale=0.3"],
    "certify": ["--samples", "12"],
    "sweep": ["--trials", "2"],
}


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
    smoke = yaml.safe_load((ROOT / "sweeps" / "smoke.yaml").read_text())
    smoke["base"]["training"] |= {"epochs": 4, "anneal_epochs": 1, "lr_milestones": [3, 4]}  # the shipped search, trained briefly
    smoke["base"] |= {"dataset": {"train_samples": 400, "validation": 60}, "network": {"width": 0.5}}
    (directory / "sweeps" / "smoke.yaml").write_text(yaml.safe_dump(smoke | {"samples": 40}))
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


QUICK = [sys.executable, "-m", "cure_ray", "quickstart", "--sweep", "tiny.yaml", "--out", "quick"]


@pytest.fixture(scope="module")
def quick(home: Path) -> str:
    """A quickstart of seconds in `home`/quick, run once for all tests; what it printed."""
    (home / "tiny.yaml").write_text(
        "name: tiny\n"
        "base: {preset: smoke, scale: 0.1, dataset: {train_samples: 400, validation: 60}, network: {width: 0.25}, "
        "certification: {samples: 40}}\n"
        "space: {training.method: {choice: [linf, max]}}\nsearch: grid\nsamples: 30\n"
    )
    first = run(QUICK, home)
    assert first.returncode == 0, first.stdout + first.stderr
    return first.stdout


def test_quickstart_ends_with_the_table_and_the_report_and_does_nothing_twice(home: Path, quick: str) -> None:
    assert "union" in quick
    assert (home / "quick" / "results" / "report.html").exists()
    written = {p: p.stat().st_mtime_ns for p in (home / "quick" / "sweep" / "trials").rglob("weights.safetensors")}
    second = run(QUICK, home)
    assert second.returncode == 0, second.stdout + second.stderr
    assert written == {p: p.stat().st_mtime_ns for p in (home / "quick" / "sweep" / "trials").rglob("weights.safetensors")}


def test_every_analysis_script_runs_on_the_quickstarts_store(
    home: Path, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `python analysis/NAME.py STORE --out DIR`, in this process: each writes what there is and names what there is not."""
    store = home / "quick" / "results"
    wrote, missed, suffixes = set(), set(), set()
    scripts = sorted((ROOT / "analysis").glob("*.py"))
    assert len(scripts) >= 15
    for path in scripts:
        monkeypatch.setattr("sys.argv", [str(path), str(store), "--out", str(tmp_path / path.stem)])
        runpy.run_path(str(path), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        assert lines, f"{path.name} says nothing"
        for line in lines:
            what, _, rest = line.partition(" ")
            assert what in ("wrote", "missing:"), line
            if what == "missing:":
                missed.add(path.stem)
                continue
            file = Path(rest)
            assert file.stat().st_size > 0
            suffixes.add(file.suffix)
            wrote.add(path.stem)
            for other in {".csv": (".md", ".tex"), ".png": (".svg",)}.get(file.suffix, ()):
                assert file.with_suffix(other).exists(), f"{file} without {other}"
    assert suffixes == {".csv", ".md", ".tex", ".png", ".svg"}
    assert wrote | missed == {p.stem for p in scripts}
    assert {"main_table", "decomposition", "trade_off_bars", "runtime_table", "paper_comparison"} <= wrote
    assert {"alpha_curve", "beta_curve", "eta_curve", "lambda2_curve", "ba_gp_ablation", "varying_eps", "geometric_table"} <= missed - wrote
