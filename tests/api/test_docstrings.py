"""The examples in the library's docstrings are run, on small real data."""

import doctest
import importlib
from pathlib import Path

import pytest

import cure_ray

HOMES = sorted({getattr(cure_ray, name).__module__ for name in cure_ray.__all__})


@pytest.mark.parametrize("name", HOMES)
def test_examples_say_what_happens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = sum(len(test.examples) for home in HOMES for test in finder.find(importlib.import_module(home)))
    assert examples >= 5
