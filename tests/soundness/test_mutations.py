"""Deliberate mistakes, one at a time, in a copy of the package: the compact soundness checks must catch every one.

A check that lets a wrong sign pass is worth nothing; this is the test of the tests.
"""

import importlib
import shutil
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from mistakes_bounds import BOUNDS, RESIDUAL
from mistakes_certify import CASCADE, PERTURBED
from mistakes_generated import GENERATED, is_equivalent
from mistakes_others import ATTACKS, IDENTITY, RESULTS
from mutants import Hang, Mutant, limited, mutants
from soundness_attacks import check_attacks
from soundness_cascade import check_cascade
from soundness_identity import check_identity
from soundness_perturbed import check_perturbed
from soundness_residual import check_residual
from soundness_results import check_results
from soundness_tools import check_compact

import cure_ray

PACKAGE = Path(cure_ray.__file__).parent
CHECKS = {
    "bounds": (check_compact, BOUNDS),
    "residual": (check_residual, RESIDUAL),
    "perturbed": (check_perturbed, PERTURBED),
    "cascade": (check_cascade, CASCADE),
    "attacks": (check_attacks, ATTACKS),
    "identity": (check_identity, IDENTITY),
    "results": (check_results, RESULTS),
}
BY_RULE = [
    (area, mutant) for area, (_, files) in GENERATED.items() for file, names in files.items() for mutant in mutants(PACKAGE, file, names)
]
HANGS = 30.0  # CPU seconds; the longest check takes a fifth of it


@contextmanager
def package_at(root: Path):
    """Import cure_ray from `root` instead, and put everything back afterwards."""
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "cure_ray"}
    for name in saved:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "cure_ray"]:
            del sys.modules[name]
        sys.modules.update(saved)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # what is caught may leave a bundle behind
    shutil.copytree(PACKAGE, tmp_path / "cure_ray", ignore=shutil.ignore_patterns("__pycache__", "report", "cluster", "commands"))
    return tmp_path


def caught(root: Path, check: Callable[[], None], file: str, text: str, replacement: str) -> bool:
    path = root / "cure_ray" / file
    source = path.read_text()
    assert source.count(text) == 1, f"{file}: the mistake no longer applies, {source.count(text)} places read {text!r}"
    changed = source.replace(text, replacement)
    compile(changed, file, "exec")  # a mistake of the tests would be caught for the wrong reason
    path.write_text(changed)
    return fails(root, check)


def fails(root: Path, check: Callable[[], None], seconds: float = HANGS) -> bool:
    with package_at(root):
        try:
            with limited(seconds):
                check()
        except (Exception, Hang):
            return True
    return False


@pytest.mark.parametrize("area", CHECKS)
def test_the_unchanged_copy_passes(copy, area):
    with package_at(copy):
        import cure_ray.bounds.native.engine as altered

        assert str(copy) in altered.__file__
        CHECKS[area][0]()


def spread(every: int) -> list:
    """All mistakes as (area, mistake), every so many of each area first: the fast part is not all of one kind."""
    found = [(area, mistake, i) for area, (_, mistakes) in CHECKS.items() for i, mistake in enumerate(mistakes)]
    return [(a, m) for a, m, i in found if i % every == 0], [(a, m) for a, m, i in found if i % every]


FAST, LONG = spread(12)  # the first always run; the others with `make soundness`


@pytest.mark.parametrize(("area", "mistake"), FAST, ids=lambda m: m[0] if isinstance(m, tuple) else m)
def test_a_mistake_is_caught(copy, area, mistake):
    assert caught(copy, CHECKS[area][0], *mistake[1:]), f"survived: {mistake[0]}"


@pytest.mark.soundness_long
@pytest.mark.parametrize(("area", "mistake"), LONG, ids=lambda m: m[0] if isinstance(m, tuple) else m)
def test_another_mistake_is_caught(copy, area, mistake):
    assert caught(copy, CHECKS[area][0], *mistake[1:]), f"survived: {mistake[0]}"


def pieces(size: int = 12) -> list[tuple[str, list[Mutant]]]:
    """Mistakes by rule, a dozen of one area to a test: a copy of the package and an import each would cost more than the check."""
    found = list[tuple[str, list[Mutant]]]()
    for area, mutant in BY_RULE:
        if is_equivalent(mutant):
            continue
        if not found or found[-1][0] != area or len(found[-1][1]) == size:
            found.append((area, []))
        found[-1][1].append(mutant)
    return found


def survivors(root: Path, area: str, some: list[Mutant]) -> list[str]:
    left = []
    for mutant in some:
        path = root / "cure_ray" / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        if not fails(root, GENERATED[area][0], 3.0 if area == "cells" else HANGS):
            left.append(mutant.name)
        path.write_text(source)
    return left


@pytest.mark.soundness_long
@pytest.mark.parametrize(("area", "some"), pieces(), ids=lambda m: m if isinstance(m, str) else m[0].function)
def test_mistakes_made_by_rule_are_caught(copy, area, some):
    assert survivors(copy, area, some) == []


def test_a_few_mistakes_made_by_rule_are_caught(copy):
    """One of each quick area; `make soundness` makes all of them."""
    for quick in ("attacks", "cells", "windows"):
        area, mutant = [(a, m) for a, m in BY_RULE if a == quick and not is_equivalent(m)][7]
        assert survivors(copy, area, [mutant]) == []


def test_every_argument_for_equivalence_is_about_a_mistake_that_is_made():
    from mistakes_generated import EQUIVALENT

    for file, function, part, why in EQUIVALENT:
        hits = [m for _, m in BY_RULE if (m.file, m.function) == (file, function) and (part in m.name or part in m.statement)]
        assert hits, f"{file}: {function}: nothing reads {part!r} any more"
        assert why
