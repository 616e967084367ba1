"""The list of the zoo: what it promises is there, and what is there is promised."""

import json
from pathlib import Path
from typing import Any

import pytest

from cure_ray.errors import UserError
from cure_ray.zoo.manifest import (
    MOST_BYTES,
    Cost,
    Entry,
    Manifest,
    check_entry,
    find_zoo,
    listed_files,
    read_manifest,
    write_manifest,
    zoo_bytes,
)  # fmt: skip

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    folder = tmp_path / "zoo" / "tiny"
    folder.mkdir(parents=True)
    (folder / "card.md").write_text("# tiny\n")
    entry = Entry(
        name="tiny", title="Tiny", kind="ours", dataset="digits", threats="linf=0.1", n=8, seeds=(0,), identity="0" * 64,
        commands=("cure-ray train smoke",), certification=Cost(seconds=1.5, hardware="a machine", version="0.3.0"), folder="tiny",
        files=listed_files(folder),
    )  # fmt: skip
    write_manifest(tmp_path / "zoo", Manifest().with_entry(entry))
    return tmp_path / "zoo"


def test_what_was_written_is_read_again(zoo: Path) -> None:
    entry = read_manifest(zoo).find("tiny")
    assert check_entry(zoo, entry) == zoo / "tiny"
    assert read_manifest(zoo).with_entry(entry.model_copy(update={"n": 9})).entries[0].n == 9


def test_a_missing_changed_or_unlisted_file_is_named(zoo: Path) -> None:
    entry = read_manifest(zoo).find("tiny")
    (zoo / "tiny" / "more.txt").write_text("?")
    with pytest.raises(UserError, match=r"tiny: .*more\.txt is not in the manifest"):
        check_entry(zoo, entry)
    (zoo / "tiny" / "card.md").write_text("# changed\n")
    with pytest.raises(UserError, match=r"tiny: .*card\.md is not what the manifest lists"):
        check_entry(zoo, entry)
    (zoo / "tiny" / "card.md").unlink()
    with pytest.raises(UserError, match=r"tiny: .*card\.md is missing, though the manifest lists it"):
        check_entry(zoo, entry)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"threats": "l7=1"}, "l7"),
        ({"folder": "../elsewhere"}, "a folder lies inside the zoo"),
        ({"run": "../elsewhere"}, "a folder lies inside the zoo"),
        ({"files": {"/etc/passwd": "0" * 64}}, "does not lie in its folder"),
        ({"files": {"card.md": "xyz"}}, "files"),
        ({"kind": "our"}, "unknown value 'our'"),
        ({"n": 0}, "n:"),
        ({"colour": "red"}, "colour: unknown key"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(zoo: Path, change: dict[str, Any], said: str) -> None:
    data = json.loads((zoo / "manifest.json").read_text())
    data["entries"][0] |= change
    (zoo / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as refused:
        read_manifest(zoo)
    assert said in str(refused.value)


def test_a_name_twice_no_list_and_no_zoo_are_told_apart(zoo: Path, tmp_path: Path) -> None:
    data = json.loads((zoo / "manifest.json").read_text())
    (zoo / "manifest.json").write_text(json.dumps({**data, "entries": data["entries"] * 2}))
    with pytest.raises(UserError, match="tiny is listed twice"):
        read_manifest(zoo)
    (zoo / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_manifest(zoo)
    with pytest.raises(UserError, match=r"is no zoo: it has no manifest\.json"):
        find_zoo(tmp_path)


def test_the_zoo_is_found_by_name_by_variable_and_in_the_checkout(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_zoo(zoo) == zoo
    assert find_zoo() == ROOT / "zoo"
    monkeypatch.setenv("CURE_RAY_ZOO", str(zoo))
    assert find_zoo() == zoo


def test_an_unknown_name_gets_the_nearest_one(zoo: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'tiny'"):
        read_manifest(zoo).find("tinny")


def test_the_zoo_of_the_repository_is_whole_and_small() -> None:
    zoo = ROOT / "zoo"
    entries = read_manifest(zoo).entries
    for entry in entries:
        check_entry(zoo, entry)
    assert {p.name for p in zoo.iterdir()} == {"manifest.json", *(entry.folder for entry in entries)}
    assert zoo_bytes(zoo) <= MOST_BYTES
