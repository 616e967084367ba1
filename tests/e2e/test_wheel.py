"""A wheel, built and installed away from the clone: the quickstart runs from it in an empty directory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=False, env={**inherited, **environment})
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed. Built from a copy: a build leaves files behind. Its dependencies are this interpreter's."""
    home = tmp_path_factory.mktemp("wheel")
    (home / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, home / "source")
    shutil.copytree(ROOT / "cure_ray", home / "source" / "cure_ray", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", "dist", "./source", cwd=home)
    (wheel,) = (home / "dist").glob("*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", "site", str(wheel), cwd=home)
    return home / "site"


def test_the_quickstart_runs_from_an_installed_wheel_outside_a_clone(site: Path, tmp_path: Path) -> None:
    where = run(sys.executable, "-c", "import cure_ray; print(cure_ray.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert where.strip() == str(site / "cure_ray" / "__init__.py")
    script = [sys.executable, str(site / "bin" / "cure-ray")]
    assert "--trials" in run(*script, "quickstart", "--help", cwd=tmp_path, PYTHONPATH=str(site), COLUMNS="120")
    printed = run(*script, "quickstart", "--trials", "1", "--samples", "8", cwd=tmp_path, PYTHONPATH=str(site))
    assert "1. search: cure-ray sweep smoke --out quickstart/sweep" in printed
    assert "8 samples" in printed
    assert "<html" in (tmp_path / "quickstart" / "results" / "report.html").read_text()


def test_everything_the_program_reads_of_itself_is_in_the_wheel(site: Path) -> None:
    shipped = {p.relative_to(site / "cure_ray") for p in (site / "cure_ray").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    ours = {p.relative_to(ROOT / "cure_ray") for p in (ROOT / "cure_ray").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert ours == shipped
