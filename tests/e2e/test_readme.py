"""Every command and every line of Python of the README and the tutorial, as a new user would type them, in order, in an empty directory."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README, TUTORIAL = (ROOT / "README.md").read_text(), (ROOT / "docs" / "tutorial.md").read_text()
FASTER = {  # the same lines, less of everything
    "scale=0.5": "scale=0.1", "scale: 0.5": "scale: 0.1", "samples=100": "samples=12", "--samples 100": "--samples 12",
    "samples=10,": "samples=2,", "--samples 10 ": "--samples 2 ", "0.1, out=": "0.5, out=", "--precision 0.1": "--precision 0.5",
    "nodes=1000": "nodes=20", "--nodes 1000": "--nodes 20", "sweep smoke": "sweep tiny.yaml",
}  # fmt: skip
TINY = """
name: tiny
base: {preset: smoke, scale: 0.1, dataset: {train_samples: 400, validation: 60}, network: {width: 0.25}, certification: {samples: 16}}
space: {training.method: {choice: [linf, max]}}
search: grid
samples: 20
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """The kind and the text of every block that is meant to be typed; what only shows output has no kind."""
    return re.findall(r"```(bash|python|yaml)\n(.*?)```", page, re.S)


def commands(page: str) -> list[str]:
    return [line.split(" #")[0].strip() for kind, text in blocks(page) if kind == "bash" for line in text.splitlines() if line.strip()]


def script(page: str) -> str:
    """A page as one Python program: files are written, commands run by the program's own entry, Python as it stands."""
    for slow, fast in FASTER.items():
        page = page.replace(slow, fast)
    lines = ["import matplotlib", "matplotlib.use('Agg')", "from cure_ray.cli import app"]
    for kind, text in blocks(page):
        if kind == "yaml":
            lines.append(f"open({text.split()[1]!r}, 'w').write({text!r})")
        elif kind == "bash":
            words = [shlex.split(command)[1:] for command in commands(f"```bash\n{text}```") if command.startswith("cure-ray ")]
            lines += [f"app({w!r}, standalone_mode=False)" for w in words]
        else:
            lines.append(text)
    return "\n".join(lines)


def run(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("readme")
    (directory / "tiny.yaml").write_text(TINY)
    return directory


def test_everything_in_the_readme_works_in_order(home: Path) -> None:
    assert len(commands(README)) >= 6
    done = run([sys.executable, "-c", script(README)], home)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "<html" in (home / "results" / "max" / "report.html").read_text()
    assert "<html" in (home / "report.html").read_text()


def test_everything_in_the_tutorial_works_in_order(tmp_path: Path) -> None:
    assert len(commands(TUTORIAL)) >= 6
    done = run([sys.executable, "-c", script(TUTORIAL)], tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "CURE-Max" in done.stdout
    for picture in re.findall(r"tutorial-(\w+\.png)", TUTORIAL):
        assert (tmp_path / picture).is_file()
        assert (ROOT / "docs" / "images" / f"tutorial-{picture}").is_file()


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(commands(README)), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


QUICK = [sys.executable, "-m", "cure_ray", "quickstart", "--sweep", "tiny.yaml", "--out", "quick"]


@pytest.fixture(scope="module")
def quick(home: Path) -> str:
    """A quickstart of seconds in `home`/quick, run once for all tests; what it printed."""
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
