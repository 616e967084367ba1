"""The house rules, checked: imports go one way, and each outside library stays in its room."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cure_ray"

# From the ground up: a room may import itself and the rooms before it, never one after it.
ROOMS = (
    "errors", "seeding", "catalogue", "threats", "config", "data", "networks", "bounds", "attacks", "training", "runs", "interchange",
    "zoo", "certification", "text", "search", "results", "cluster", "api", "commands", "cli", "__main__", "testing",
)  # fmt: skip
OUTSIDE = {
    "ray": {"cluster"},
    "pandas": {"results", "api", "testing"},
    "matplotlib": {"results"},
    "typer": {"commands", "cli"},
    "optuna": {"search", "cluster", "results"},
    "onnx": {"interchange"},
    "pytest": {"testing"},
    "transformers": {"text"},
}


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | ({f"cure_ray.{a.name}" for a in node.names} if node.module == "cure_ray" else set())
    return found


MODULES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py" or p.parent != PACKAGE]
MODULES = [p for p in MODULES if p.parent.name != "presets"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in ROOMS, f"{path.name}: a new room must be given its place in ROOMS"
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top == "cure_ray" and rest:
            other = rest.split(".")[0]
            if other in ROOMS:
                assert ROOMS.index(other) <= ROOMS.index(room), f"{room} must not import {other}"
        if top in OUTSIDE:
            assert room in OUTSIDE[top], f"{top} belongs to {sorted(OUTSIDE[top])}, not to {room}"


def test_a_checkpoint_can_be_read_without_what_trains() -> None:
    assert not {name for name in imported(PACKAGE / "runs" / "checkpoints.py") if name.startswith("cure_ray.training")}


def test_no_module_unpickles() -> None:
    for path in MODULES:
        assert not imported(path) & {"pickle", "cloudpickle", "dill", "joblib"}, path
        text = path.read_text()
        assert "torch.load(" not in text or "weights_only=True" in text, path
        assert "allow_pickle=True" not in text, path


MOST = 8  # parameters: with more, some of them are a thing that has no name yet


def too_many(path: Path) -> list[str]:
    found = list[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            command = room_of(path) == "commands" and node.name == path.stem  # its parameters are its options
            if len([a for a in every if a not in ("self", "cls")]) > MOST and not command:
                found.append(f"{path.relative_to(PACKAGE)}:{node.name}")
    return found


def test_no_function_has_more_than_eight_parameters() -> None:
    assert not {name for path in MODULES for name in too_many(path)}, "give what belongs together a dataclass"


def test_every_module_says_what_it_is_for_and_none_is_a_warehouse() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
        assert path.stat().st_size < 25_000, path


def test_the_walks_through_the_house_name_what_is_there() -> None:
    text = (PACKAGE.parent / "docs" / "explanation" / "house.md").read_text()
    steps = re.findall(r"`(cure_ray/[\w/]+\.py)` `(\w+)`", text)
    assert len(steps) > 50
    for file, name in steps:
        tree = ast.parse((PACKAGE.parent / file).read_text())
        named = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        named |= {t.id for n in tree.body if isinstance(n, ast.AnnAssign | ast.Assign) for t in ast.walk(n) if isinstance(t, ast.Name)}
        assert name in named, f"{file} has no {name}"
    rooms = set(re.findall(r"^\| .*$", text, re.M))
    for room in ROOMS:
        assert room == "__main__" or any(f"`{room}" in row for row in rooms), f"the table of rooms lacks {room}"
