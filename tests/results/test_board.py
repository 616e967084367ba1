"""The board: numbers of files and stores arrive unchanged, proofs and claims stay apart, and what does not fit is refused."""

import csv
import io
import json
import math
import re
from datetime import date
from pathlib import Path

import board_helpers
import numpy as np
import pytest

import cure_ray
from cure_ray.cli import main
from cure_ray.errors import UserError
from cure_ray.results.board.build import Sources, board_rows, render
from cure_ray.results.board.claims import published_rows
from cure_ray.results.board.data import as_csv, fingerprint, record
from cure_ray.results.board.judgements import judged_row
from cure_ray.results.board.rows import Row, on_front, radius
from cure_ray.results.judgement import Judgement, Measured
from cure_ray.results.statistics import wilson
from cure_ray.testing import fabricate, stores
from cure_ray.zoo.manifest import listed_files, read_manifest, write_manifest
from cure_ray.zoo.published import all_published, parse_published

TOY = parse_published(board_helpers.DESCRIPTION, "toy.yaml")
DAY = date(2026, 1, 2)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return board_helpers.write_zoo(tmp_path_factory.mktemp("board") / "zoo")


@pytest.fixture(scope="module")
def rows(zoo: Path) -> dict[str, Row]:
    return {r.name: r for r in board_rows(Sources({"toy": TOY}, zoo), zoo.parent / "docs" / "board.html")}


def counted(name: str, seed: int) -> dict[str, float]:
    """The same numbers from the made-up verdicts, without any of our tables."""
    frame = fabricate.verdicts(seed, 30, (name,))
    status = frame.pivot(index="sample_index", columns="norm", values="status")
    whole = {"clean": 100 * float((frame["label"] == frame["predicted"])[frame["norm"] == "l2"].mean())}
    whole["union"] = 100 * float((status == "certified").all(axis=1).mean())
    return whole | {norm: 100 * float((status[norm] == "certified").mean()) for norm in ("linf", "l2", "l1")}


def test_a_store_gives_the_numbers_that_its_verdicts_count_to(rows: dict[str, Row]) -> None:
    row, expected = rows["linf"], counted("linf", 2)
    assert row.union is not None
    assert row.clean is not None
    assert (row.kind, row.n, row.seeds, row.seconds) == ("ours", 30, 1, 12.5)
    assert math.isclose(row.union.percent, expected["union"])
    assert math.isclose(row.clean.percent, expected["clean"])
    assert {b.norm: round(b.certified.percent, 6) for b in row.balls if b.certified} == {
        n: round(expected[n], 6) for n in ("linf", "l2", "l1")
    }
    low, high = wilson(expected["union"] / 100 * 30, 30)
    assert np.allclose((row.union.low, row.union.high), (100 * low, 100 * high))
    assert row.union.n == 30
    shards = [link.href for link in row.links if link.href.endswith(".parquet")]
    assert len(shards) == 3
    assert all(href.startswith("../zoo/linf/results/verdicts/") for href in shards)


def test_seeds_of_one_experiment_are_one_row_with_their_mean_and_deviation(rows: dict[str, Row]) -> None:
    row = rows["max-seed-0"]
    values = [counted("max-seed-0", 0)["union"], counted("max-seed-1", 1)["union"]]
    assert "max-seed-1" not in rows
    assert (row.title, row.seeds, row.certifier) == ("max", 2, "cure_ray 1 (native)")
    assert row.union is not None
    assert math.isclose(row.union.percent, float(np.mean(values)))
    assert row.union.sd is not None
    assert math.isclose(row.union.sd, float(np.std(values, ddof=1)))


def test_one_seed_in_two_entries_is_refused(tmp_path: Path) -> None:
    root = stores.write_zoo(tmp_path / "zoo", {"one": stores.experiment("linf"), "two": stores.experiment("linf")}, 6)
    with pytest.raises(UserError, match="one and two are one experiment with one seed"):
        board_rows(Sources({}, root), tmp_path / "board.html")


def test_printed_numbers_make_a_row_per_certifier_and_the_strongest_attack_bounds_them(rows: dict[str, Row]) -> None:
    first, second = rows["toy-published-first"], rows["toy-published-second"]
    assert [r.union.percent for r in (first, second) if r.union] == [40.0, 30.0]
    assert [r.bound.percent for r in (first, second) if r.bound] == [60.0, 60.0]
    assert [r.n for r in (first, second)] == [30, None]
    assert second.union is not None
    assert second.union.n is None
    assert second.union.low is None  # no n, no interval
    assert {b.norm: b.certified.percent for b in first.balls if b.certified} == {"l2": 55.0}
    assert first.source is not None
    assert first.source.href == "https://arxiv.org/abs/2001.00001"
    assert rows["toy-again"].kind == "recertified"
    assert rows["toy-again"].network == first.network


@pytest.mark.parametrize("name", sorted(all_published()))
def test_every_printed_certificate_of_every_description_is_on_the_board(name: str) -> None:
    described = all_published()[name]
    made = published_rows(described)
    page = render(made, DAY)
    shown = [f.percent for r in made for f in (r.union, *(b.certified for b in r.balls)) if f]
    printed = [f for f in described.figures if f.what == "certified"]
    assert printed
    for figure in printed:
        assert figure.value in shown
        assert f">{figure.value:.1f}</a>" in page
    assert all(not r.proven for r in made)


def test_proofs_and_claims_never_share_a_group_and_what_is_written_is_escaped(rows: dict[str, Row]) -> None:
    page = render(list(rows.values()), DAY)
    for body in re.findall(r"<tbody class=\"(?:proven|claims)\">.*?</tbody>", page, re.S):
        kinds = set(re.findall(r'data-kind="(\w+)"', body))
        assert kinds <= ({"published"} if 'class="claims"' in body else {"ours", "recertified"})
    assert "<b>bold" not in page
    assert "A toy &amp; &lt;b&gt;bold&lt;/b&gt;" in page
    assert not re.search(r"<(?:link|img|script|iframe)[^>]*(?:src|href)=.?(?:https?:)?//", page)
    assert "\\u003cb>bold" in page  # in the data too: nothing there can end the script element


def test_the_data_of_the_page_are_its_rows_and_name_the_edition(rows: dict[str, Row]) -> None:
    page = render(list(rows.values()), DAY)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    records = json.loads(found[1])
    assert records == [record(r) for r in rows.values()]
    assert f"edition {fingerprint(records)}" in page
    assert fingerprint([{**records[0], "certified": 99.0}, *records[1:]]) != fingerprint(records)
    read = list(csv.DictReader(io.StringIO(as_csv(records))))
    assert [r["title"] for r in read] == [r.title for r in rows.values()]
    assert render(list(rows.values()), DAY) == page


def test_the_front_is_what_nobody_beats_in_both(rows: dict[str, Row]) -> None:
    front = on_front(list(rows.values()))
    for row in rows.values():
        if row.clean and row.union and row not in front:
            better = [
                f for f in front if f.clean and f.union and f.clean.percent >= row.clean.percent and f.union.percent >= row.union.percent
            ]
            assert better, row.title
    assert [r.clean.percent for r in front if r.clean] == sorted(r.clean.percent for r in front if r.clean)


def test_an_address_that_is_a_program_is_no_link_and_a_name_of_the_page_stays_its_own() -> None:
    text = board_helpers.DESCRIPTION.replace("https://example.org/toy", "javascript:alert(1)").replace(", arXiv 2001.00001", "")
    page = render(published_rows(parse_published(text.replace("name: toy", "name: data"), "data.yaml")), DAY)
    assert 'href="javascript:' not in page
    assert page.count('id="data"') == 1
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_radii_are_written_as_people_write_them() -> None:
    assert [radius(e) for e in (0.1, 0.5, 1.0, 24 / 255, 8 / 255, 0.25)] == ["0.1", "0.5", "1", "24/255", "8/255", "0.25"]


def write_judgement(folder: Path, **changes: object) -> Path:
    """What `cure-ray judge` writes, with made-up figures."""
    figures = (
        Measured("clean", None, 27, 30, 0.0, 0.0),
        Measured("certified", "union", 15, 30, 0.0, 0.0),
        Measured("not broken", "union", 18, 30, 0.0, 0.0),
        Measured("certified", "l2=0.35", 16, 30, 0.0, 0.0),
    )
    settings = {"stages": ("ibp", "attack"), "nodes": 10, "engine": "native", "engine_version": "1", "seed": 0}
    made = Judgement(
        TOY, "1" * 64, {"file": "toy.pt", "sha256": "2" * 64, "recognised": "the authors' file, by its SHA-256"},
        {"name": "digits", "split": "test", "n": 30, "digest": "3" * 64}, settings, figures, "a machine", 9.5, 9.0, "cure-ray judge toy",
        {"cure_ray": "0.3.0"},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "toy.json"
    path.write_text(json.dumps(json.loads(made.as_json()) | changes))
    return path


def test_a_judgement_is_a_recertified_row_unless_the_zoo_has_its_store(zoo: Path, tmp_path: Path) -> None:
    path = write_judgement(tmp_path / "docs" / "board")
    row = judged_row(path, {"toy": TOY}, tmp_path / "docs" / "board.html")
    assert (row.kind, row.n, row.open, row.seconds) == ("recertified", 30, 3, 9.5)
    assert [f.percent for f in (row.clean, row.union, row.bound) if f] == [90.0, 50.0, 60.0]
    assert row.source is not None
    assert row.source.href == "board/toy.json"
    page = tmp_path / "docs" / "board.html"
    without = board_rows(Sources({"toy": TOY}, judgements=path.parent), page)
    assert [r.name for r in without if r.kind == "recertified"] == ["toy"]
    both = board_rows(Sources({"toy": TOY}, zoo, path.parent), page)
    assert [r.name for r in both if r.kind == "recertified"] == ["toy-again"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threats": "linf=0.1,l2=0.5,l1=0.7"}, "another protocol"),
        ({"name": "nobody"}, "which no file describes"),
        ({"weights": {"file": "x", "sha256": "2" * 64, "recognised": "not verified"}}, "judges another network"),
        ({"format": "cure_ray-judgement-9"}, "is no judgement"),
        ({"figures": [{"what": "clean", "threat": None, "count": -1, "n": 30}]}, "is no judgement"),
    ],
)
def test_a_judgement_of_something_else_is_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    path = write_judgement(tmp_path, **changes)
    with pytest.raises(UserError, match=says):
        judged_row(path, {"toy": TOY}, tmp_path / "board.html")


def test_the_library_writes_the_page_and_takes_ones_own_description(zoo: Path, tmp_path: Path) -> None:
    written = cure_ray.board(tmp_path, zoo=zoo, published=[board_helpers.write_description(tmp_path)], date=DAY)
    assert written == tmp_path / "board.html"
    assert "2026-01-02" in written.read_text()
    taken = board_helpers.write_description(tmp_path / "b", board_helpers.DESCRIPTION.replace("name: toy", "name: mmr-universal-mnist"))
    with pytest.raises(UserError, match="described already"):
        cure_ray.board(tmp_path, zoo=zoo, published=[taken])


def changed(root: Path, **update: object) -> None:
    manifest = read_manifest(root)
    entry = manifest.find("linf").model_copy(update={**update, "files": listed_files(root / "linf")})
    write_manifest(root, manifest.with_entry(entry))


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"threats": "linf=0.1,l2=0.5,l1=0.7"}, "linf: the manifest says digits under linf=0.1,l2=0.5,l1=0.7, but"),
        ({"dataset": "mnist"}, "a store of another protocol"),
        ({"threats": "R(10)"}, "unions of norm balls"),
        ({"n": 40}, "the manifest says n 40, but the verdicts in"),
        ({"identity": "0" * 64}, "the manifest says identity 0000"),
        ({"kind": "published", "published": "nobody"}, "the published network 'nobody', which no file describes"),
    ],
)
def test_an_entry_that_its_store_contradicts_ends_with_a_sentence(
    update: dict[str, object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.write_zoo(tmp_path / "zoo", {"linf": stores.experiment("linf")}, 6)
    changed(tmp_path / "zoo", **update)
    assert refused(["--zoo", str(tmp_path / "zoo"), "--out", str(tmp_path / "board.html")], monkeypatch, capsys, says)
    assert not (tmp_path / "board.html").exists()


def test_a_missing_file_and_a_malformed_description_end_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = stores.write_zoo(tmp_path / "zoo", {"linf": stores.experiment("linf")}, 6)
    out = ["--zoo", str(root), "--out", str(tmp_path / "board.html")]
    broken = board_helpers.write_description(tmp_path, board_helpers.DESCRIPTION.replace("value: 91.5", "value: 191.5"))
    assert refused([*out, "--published", str(broken)], monkeypatch, capsys, "191.5")
    next((root / "linf" / "results" / "verdicts").glob("*.parquet")).unlink()
    assert refused(out, monkeypatch, capsys, "is missing, though the manifest lists it")
    assert refused(["--zoo", str(tmp_path), "--out", str(tmp_path / "b.html")], monkeypatch, capsys, "is no zoo")


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], says: str) -> bool:
    monkeypatch.setattr("sys.argv", ["cure-ray", "board", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert said.startswith("error: ")
    assert "Traceback" not in said
    return says in said
