"""`import cure_ray`: light, lazy, typed, and the same objects as behind the command line."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cure_ray


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_library_loads_neither_torch_nor_ray() -> None:
    loaded = modules_after("import cure_ray; cure_ray.Ball('l2', 0.5); cure_ray.load_experiment('smoke')")
    assert "cure_ray.threats.balls" in loaded
    assert not loaded & {"torch", "ray", "pandas", "optuna"}


def test_every_public_name_is_there_and_typed() -> None:
    typed = set()
    for node in ast.walk(ast.parse(Path(cure_ray.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cure_ray."):
            typed |= {alias.asname for alias in node.names}
    assert typed == set(cure_ray.__all__)
    for name in cure_ray.__all__:
        assert getattr(cure_ray, name).__doc__, name
        assert name in dir(cure_ray)
    with pytest.raises(AttributeError, match="no attribute 'certfy'"):
        cure_ray.certfy  # noqa: B018


def test_an_experiment_may_be_named_read_written_out_or_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: smoke\nscale: 0.1\ntraining: {method: max}\n")
    wanted = cure_ray.load_experiment(file)
    assert cure_ray.load_experiment("smoke", ["scale=0.1", "training.method=max"]) == wanted
    assert cure_ray.load_experiment("smoke", {"scale": 0.1, "training.method": "max"}) == wanted
    assert cure_ray.load_experiment({"preset": "smoke", "scale": 0.1, "training": {"method": "max"}}) == wanted
    assert cure_ray.load_experiment(wanted) == wanted
    assert cure_ray.load_experiment(wanted, {"seed": 4}).seed == 4
    with pytest.raises(cure_ray.UserError, match="Did you mean 'eta'"):
        cure_ray.load_experiment("smoke", {"training.etta": 1})
    with pytest.raises(cure_ray.UserError, match="expected a mapping"):
        cure_ray.load_experiment(3)  # type: ignore[arg-type]


def test_bad_input_raises_what_the_command_line_prints(tmp_path: Path) -> None:
    with pytest.raises(cure_ray.UserError) as raised:
        cure_ray.train("smok", out=tmp_path / "run")
    printed = subprocess.run([sys.executable, "-m", "cure_ray", "train", "smok"], capture_output=True, text=True, check=False)
    assert printed.stderr.strip() == f"error: {raised.value}"
    with pytest.raises(cure_ray.UserError, match="holds no certification results"):
        cure_ray.report(tmp_path)
    with pytest.raises(cure_ray.UserError, match="no such file"):
        cure_ray.sweep(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: cure_ray.train("smoke", overrides=5), "overrides are a mapping"),
        (lambda: cure_ray.train("smoke", overrides="scale=0.1"), "overrides are a mapping"),
        (lambda: cure_ray.train("smoke", out=__file__), "is a file"),
        (lambda: cure_ray.sweep("smoke", trials="a"), "trials must be a whole number"),
        (lambda: cure_ray.sweep(3), "a sweep is a YAML file"),
        (lambda: cure_ray.report(3), "read from a directory"),
        (lambda: cure_ray.load_results([]), "read from a directory"),
        (lambda: cure_ray.radius(None, precision="a"), "precision must lie"),
    ],
)
def test_arguments_of_the_wrong_kind_are_sentences(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(cure_ray.UserError, match=sentence):
        call()
