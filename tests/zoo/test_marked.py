"""Tables between marks: written from stores and descriptions, and nothing else of a document is touched."""

import json
import shutil
from pathlib import Path

import pytest

from cure_ray.errors import UserError
from cure_ray.results.marked import fill
from cure_ray.zoo.manifest import Manifest, read_manifest, write_manifest

ROOT = Path(__file__).parent.parent.parent
MARKS = "before\n<!-- zoo:protocol {} -->\n{}<!-- /zoo -->\nafter\n"


def test_a_section_is_written_anew_and_the_rest_is_left() -> None:
    stale = MARKS.format("mnist linf=0.1,l2=0.5,l1=1", "| a number by hand | 99.9 |\n")
    fresh = fill(stale, ROOT / "zoo")
    assert fresh.startswith(
        "before\n<!-- zoo:protocol mnist linf=0.1,l2=0.5,l1=1 -->\n\n| certified, % | clean | linf=0.1 | l2=0.5 | l1=1 | union |"
    )
    assert fresh.endswith("<!-- /zoo -->\nafter\n")
    assert "99.9" not in fresh
    assert "| CURE-Scratch, MNIST, small radii, claimed | 99.2 | 97.5 | 98 | 97.9 | 97.5 |" in fresh
    assert fill(fresh, ROOT / "zoo") == fresh


def test_networks_of_others_stand_with_what_was_proven_before_and_ours_not_among_them() -> None:
    fresh = fill("<!-- zoo:recertified mmr-universal-mnist -->\n<!-- /zoo -->\n", ROOT / "zoo")
    assert len(fresh.splitlines()) == 7
    assert "| MMR-Universal, MNIST | linf=0.1,l2=0.3,l1=1 | 79.2 (mixed-integer programme and its linear relaxation) | 87.6 |" in fresh
    with pytest.raises(UserError, match="mmr-mnist-random is ours"):
        fill("<!-- zoo:recertified mmr-mnist-random -->\n<!-- /zoo -->\n", ROOT / "zoo")


def test_a_protocol_nobody_knows_and_another_kind_of_section_are_refused() -> None:
    with pytest.raises(UserError, match="know nothing about mnist with l2=7"):
        fill(MARKS.format("mnist l2=7", ""), ROOT / "zoo")
    with pytest.raises(UserError, match="not zoo:network"):
        fill(MARKS.format("x", "").replace("zoo:protocol", "zoo:network"), ROOT / "zoo")


PROTOCOL = "mnist linf=0.1,l2=0.3,l1=1"


def section(kind: str, words: str = PROTOCOL) -> str:
    return fill(f"<!-- zoo:{kind} {words} -->\n<!-- /zoo -->\n", ROOT / "zoo")


def test_methods_are_compared_by_their_networks_in_the_zoo() -> None:
    one = f"{PROTOCOL} only=mmr-mnist-random"
    rows = [line for line in section("methods", one).splitlines() if line.startswith("| mmr-universal-mnist-random")]
    assert len(rows) == 1
    assert "| 92.2 | 90.4 to 93.7 | 92.2 |" in rows[0]
    shares = [float(cell) for cell in section("stages", one).splitlines()[4].split("|")[2:-1]]
    *stages, standing, undecided = shares
    assert stages == sorted(stages)  # each stage adds to those before it
    assert stages[-1] == 92.2
    assert 92.2 <= standing <= 92.2 + 3 * undecided
    r, align, union = (float(cell.split()[0]) for cell in section("decomposition", one).splitlines()[4].split("|")[3:6])
    assert abs(r + align - union) < 0.11
    assert union == 7.8


def test_two_experiments_of_one_name_are_not_compared_as_one(tmp_path: Path) -> None:
    entries = [read_manifest(ROOT / "zoo").find(name) for name in ("union-mnist-finish-s0", "union-mnist-finish-s1")]
    for entry in entries:
        shutil.copytree(ROOT / "zoo" / entry.folder / "results", tmp_path / entry.folder / "results")
    write_manifest(tmp_path, Manifest(entries=tuple(entries)))
    marks = f"<!-- zoo:methods {PROTOCOL} -->\n<!-- /zoo -->\n"
    assert "| union-mnist-finish-joint |" in fill(marks, tmp_path)  # two seeds of one
    about = tmp_path / entries[1].folder / "results" / "runs" / f"{entries[1].identity}.json"
    known = json.loads(about.read_text())
    known["experiment"]["training"]["lr"] *= 2
    about.write_text(json.dumps(known))
    with pytest.raises(UserError, match="two different experiments are called 'union-mnist-finish-joint'"):
        fill(marks, tmp_path)


def test_a_comparison_without_networks_or_with_too_many_words_is_refused() -> None:
    with pytest.raises(UserError, match="no network of ours for mnist with l2=7"):
        section("methods", "mnist l2=7")
    with pytest.raises(UserError, match="takes a data set, threats and perhaps a baseline"):
        section("stages", "mnist l2=7 max min")


def test_a_comparison_can_be_of_some_names_alone() -> None:
    protocol = "mnist linf=0.1,l2=0.35,l1=0.7"
    rows = section("methods", f"{protocol} only=tuned-max-s*").splitlines()[4:-1]
    assert [row.split(" | ")[0] for row in rows if row] == ["| max-0004"]
    with pytest.raises(UserError, match=r"no network of ours for mnist with .* called other-\*"):
        section("methods", f"{protocol} only=other-*")
    with pytest.raises(UserError, match="networks of one method that differ in one setting"):
        section("curve", f"{protocol} training.eta only=tuned-max-s*")


@pytest.mark.parametrize(("setting", "first", "last"), [("eta", "0", "4"), ("beta", "0", "1")])
def test_a_curve_has_a_row_for_every_value_of_the_setting(setting: str, first: str, last: str) -> None:
    rows = [
        line.strip("| ").split(" | ") for line in section("curve", f"mnist linf=0.1,l2=0.35,l1=0.7 training.{setting}").splitlines()[2:-2]
    ]
    assert rows[0][:6] == [setting, "clean, whole split", "linf", "l2", "l1", "union"]
    values = [float(row[0]) for row in rows[2:]]
    assert values == sorted(set(values))
    assert (rows[2][0], rows[-1][0]) == (first, last)
    assert all(float(row[5].split()[0]) <= min(float(cell.split()[0]) for cell in row[2:5]) for row in rows[2:])
