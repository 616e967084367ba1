"""Stores on disk to studies: what is found, and the sentence for everything that is not right."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cure_ray.errors import UserError
from cure_ray.results import tables
from cure_ray.results.frames import find_stores, load, parse_threats
from cure_ray.results.store import Store
from cure_ray.results.study import build_study
from cure_ray.testing import fabricate, stores


@pytest.fixture
def root(tmp_path: Path) -> Path:
    runs = {"a": stores.experiment("max"), "b": stores.experiment("scratch"), "c": stores.experiment("scratch", seed=1)}
    stores.write_store(tmp_path / "results", runs)
    return tmp_path / "results"


def test_a_store_becomes_a_study_with_methods_and_seeds(root: Path) -> None:
    table = tables.seed_table(load(root).study).set_index("method")
    assert table["seeds"].to_dict() == {"CURE-Max": 1, "CURE-Scratch": 2}


def test_many_stores_below_a_directory_are_one_study(tmp_path: Path) -> None:
    for name, method in (("one", "max"), ("two", "linf")):
        stores.write_store(tmp_path / "runs" / name / "certificates", {name: stores.experiment(method)})
    assert len(find_stores(tmp_path)) == 2
    study = load(tmp_path).study
    assert [e.label for e in study.entries] == ["linf", "CURE-Max"]
    assert len(tables.significance_table(study)) == 1


def test_the_tables_do_not_depend_on_how_rows_are_cut_into_shards(root: Path, tmp_path: Path) -> None:
    before = tables.accuracy_table(load(root).study)
    for file in sorted((root / "verdicts").glob("*.parquet")):
        table = pq.read_table(file)
        metadata = table.schema.metadata
        for k, (start, stop) in enumerate(((0, 7), (7, 30))):
            pq.write_table(table.slice(start, stop - start).replace_schema_metadata(metadata), file.with_name(f"{9 - k}-{file.name}"))
        file.unlink()
    pd.testing.assert_frame_equal(before, tables.accuracy_table(load(root).study))


def test_training_runs_beside_the_results_are_found(root: Path) -> None:
    for where in (Path("runs") / "max", Path("sweep") / "trials" / "0001"):
        stores.write_run(root.parent / where, stores.experiment("max"))
        entry = load(root).study.entries[0]
        assert entry.info.directory == root.parent / where
        assert entry.info.hardware["processor"] == "a CPU"
        shutil.rmtree(root.parent / where)


# ---------------------------------------------------------------- bad input


def test_a_directory_that_does_not_exist_or_holds_nothing_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cure-ray certify"):
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        load(tmp_path / "file")


def test_an_empty_store_says_so(root: Path) -> None:
    for file in (root / "verdicts").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="no verdicts yet"):
        load(root)


def test_an_interrupted_certification_is_partial_even_where_every_threat_lacks_the_same_samples(root: Path) -> None:
    for file in (root / "verdicts").glob(f"{fabricate.digest('a')[:12]}*"):
        table = pq.read_table(file)
        pq.write_table(table.slice(0, 20).replace_schema_metadata(table.schema.metadata), file)
    with pytest.raises(UserError, match=r"of checkpoint \w{12} lacks 10 of 30 samples \(20, 21, 22, 23, 24, \.\.\.\)"):
        load(root)


def test_a_checkpoint_without_any_verdict_is_named(root: Path) -> None:
    for file in (root / "verdicts").glob(f"{fabricate.digest('a')[:12]}*"):
        file.unlink()
    with pytest.raises(UserError, match=fabricate.digest("a")[:12]):
        load(root)


def test_a_torn_shard_is_named(root: Path) -> None:
    file = sorted((root / "verdicts").iterdir())[0]
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(UserError, match=file.name.split("-")[0]):
        load(root)


def test_a_newer_schema_asks_for_an_upgrade(root: Path) -> None:
    about = json.loads((root / "store.json").read_text())
    (root / "store.json").write_text(json.dumps({**about, "schema_version": 99}))
    with pytest.raises(UserError, match="upgrade"):
        load(root)


def test_two_checkpoints_of_one_run_can_be_told_apart_by_digest(tmp_path: Path) -> None:
    stores.write_store(tmp_path / "s", {"a": stores.experiment("max"), "b": stores.experiment("max")})
    with pytest.raises(UserError, match="two checkpoints of one training run"):
        load(tmp_path / "s")
    chosen = load(tmp_path / "s", checkpoints=[fabricate.digest("b")[:10]])
    assert [e.evaluation.checkpoint for e in chosen.study.entries] == [fabricate.digest("b")]
    with pytest.raises(UserError, match="no verdicts of a checkpoint 'feed'"):
        load(tmp_path / "s", checkpoints=["feed"])


def test_the_same_checkpoint_in_two_stores_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        stores.write_store(tmp_path / name, {"a": stores.experiment("max")})
    with pytest.raises(UserError, match="certified twice"):
        load(tmp_path)
    assert len(load([tmp_path / "one", tmp_path / "one"]).stores) == 1, "the same store named twice is one store"


def test_a_shard_copied_inside_a_store_stops_library_report_and_summary(root: Path) -> None:
    file = sorted((root / "verdicts").iterdir())[0]
    (root / "verdicts" / f"copy-{file.name}").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"more than one verdict for \S+ \(samples 0, 1, 2, 3, 4, \.\.\.\)"):
        load(root)
    table = Store.open(root).read()
    digest, threat = table["checkpoint_digest"][0].as_py(), table["threat"][0].as_py()
    with pytest.raises(UserError, match=rf"{digest[:12]} has more than one verdict for {threat} \(samples 0, 1"):
        build_study(table.filter(pc.equal(table["checkpoint_digest"], digest)).to_pandas())  # what `certify` prints is made of this


def test_results_on_different_images_under_one_name_are_not_merged(tmp_path: Path) -> None:
    for name, method in (("one", "max"), ("two", "linf")):
        stores.write_store(tmp_path / name, {name: stores.experiment(method)})
    about = json.loads((tmp_path / "two" / "store.json").read_text())
    (tmp_path / "two" / "store.json").write_text(json.dumps({**about, "data_digest": "f" * 16}))
    with pytest.raises(UserError, match=r"one and .*two both hold results on digits \(test\), but on different images"):
        load(tmp_path)
    assert len(load(tmp_path / "two").study.entries) == 1


def test_rows_can_go_by_the_experiments_names_unless_a_name_has_two_meanings(tmp_path: Path) -> None:
    one = stores.experiment("scratch").model_copy(update={"name": "balls"})
    two = stores.experiment("scratch", eta=0.5).model_copy(update={"name": "boxes"})
    stores.write_store(tmp_path / "s", {"a": one, "b": two})
    assert [e.label for e in load(tmp_path / "s", by_name=True).study.entries] == ["balls", "boxes"]
    stores.write_store(tmp_path / "t", {"a": one, "b": two.model_copy(update={"name": "balls"})})
    with pytest.raises(UserError, match=r"two different experiments are called 'balls' \(training.eta"):
        load(tmp_path / "t", by_name=True)


def test_radii_are_read_as_fractions_and_wrong_ones_are_explained() -> None:
    assert parse_threats(["linf=8/255", "l2=0.5"]) == (("linf", 8 / 255), ("l2", 0.5))
    assert parse_threats([]) is None
    for wrong in ("linf", "l3=1", "linf=a/b", "l2=0", "l2=1/0", "l1=nan"):
        with pytest.raises(UserError, match="--threat"):
            parse_threats([wrong])
    with pytest.raises(UserError, match="twice"):
        parse_threats(["linf=0.1", "linf=0.2"])
