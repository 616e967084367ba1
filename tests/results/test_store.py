"""The store keeps what was finished, refuses what does not belong together, and names what is wrong with it."""

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cure_ray.attacks import AttackSettings
from cure_ray.certification.job import CascadeSettings, Job, Shard
from cure_ray.certification.verdict import Status, Verdict
from cure_ray.errors import UserError
from cure_ray.results.frames import Loaded
from cure_ray.results.fsck import fsck
from cure_ray.results.schema import SCHEMA, to_table
from cure_ray.results.store import Store
from cure_ray.results.study import build_study
from cure_ray.results.summary import summary
from cure_ray.testing.storage import JOB, L2, LINF, create, fill, verdict
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import Box


def test_pandas_reads_the_directory_without_our_help(tmp_path: Path) -> None:
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF, L2], list(range(10)))
    frame = pd.read_parquet(tmp_path / "s" / "verdicts")
    assert len(frame) == 20
    assert list(frame.columns) == SCHEMA.names
    assert set(frame.threat) == {"linf=0.1", "l2=0.5"}
    assert list(frame.margins.iloc[0]) == [0.25, 1.5]


def test_the_name_of_a_shard_is_its_content() -> None:
    shard = Shard(JOB, (LINF,), (0, 1))
    assert shard.name == Shard(dataclasses.replace(JOB), (Ball("linf", 0.1),), (0, 1)).name
    others = [
        Shard(JOB, (Ball("linf", 0.1 + 1e-9),), (0, 1)),
        Shard(JOB, (LINF,), (0, 2)),
        Shard(dataclasses.replace(JOB, seed=1), (LINF,), (0, 1)),
        Shard(dataclasses.replace(JOB, engine_version="2"), (LINF,), (0, 1)),
        Shard(dataclasses.replace(JOB, settings=CascadeSettings(("ibp",))), (LINF,), (0, 1)),
        Shard(dataclasses.replace(JOB, settings=CascadeSettings(attack=AttackSettings(steps=5))), (LINF,), (0, 1)),
    ]
    assert len({s.name for s in [shard, *others]}) == 7
    assert Shard(dataclasses.replace(JOB, settings=CascadeSettings(batch=3)), (LINF,), (0, 1)).name == shard.name


def test_the_same_verdicts_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    files = []
    for name, order in (("a", 1), ("b", -1)):
        store = create(str(tmp_path / name))
        store.begin(JOB, [LINF], list(range(5)), {})
        store.write(Shard(JOB, (LINF,), tuple(range(5))), [verdict(LINF, i) for i in range(5)][::order])
        files.append(next((tmp_path / name / "verdicts").iterdir()).read_bytes())
    assert files[0] == files[1]


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        create(str(tmp_path))
    with pytest.raises(UserError, match="holds no results"):
        Store.open(tmp_path)


def test_what_a_call_leaves_that_was_killed_before_it_began_is_no_obstacle(tmp_path: Path) -> None:
    for name in (".store.json.0a1b2c3d.partial", "..writable.0a1b2c3d.partial", ".writable"):
        (tmp_path / name).write_text("half")
    fill(create(str(tmp_path)), JOB, [LINF], list(range(3)))
    assert fsck(Store.open(tmp_path)) == []


def test_fsck_names_missing_torn_duplicated_and_foreign(tmp_path: Path) -> None:
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF], list(range(8)), size=2)
    folder = tmp_path / "s" / "verdicts"
    first, second, third, fourth = sorted(folder.iterdir())
    assert fsck(store) == []
    first.unlink()
    data = bytearray(second.read_bytes())
    second.write_bytes(data[: len(data) // 2])
    third.write_bytes(bytes(b ^ (0xFF if i == 40 else 0) for i, b in enumerate(third.read_bytes())))
    store.write(Shard(JOB, (LINF,), (6,)), [verdict(LINF, 6)])
    foreign = dataclasses.replace(JOB, seed=9)
    store.write(Shard(foreign, (L2,), (0,)), [verdict(L2, 0, job=foreign)])
    (folder / ".half.parquet.partial").write_bytes(b"x")
    (folder / "notes.txt").write_text("?")
    (folder.parent / "witnesses").mkdir(exist_ok=True)
    (folder.parent / "witnesses" / ".half.npy.partial").write_bytes(b"x")
    found = [str(f) for f in fsck(store)]
    assert any(f.startswith("missing: linf=0.1") and "(0-5)" in f for f in found)
    assert sum(f.startswith("torn") and ".parquet is damaged" in f for f in found) == 2
    assert sum("interrupted" in f for f in found) == 2
    assert any(f.startswith("duplicated: sample 6") for f in found)
    assert sum(f.startswith("foreign") for f in found) == 2
    assert fourth.exists()
    for finding in fsck(store):
        if finding.file is not None:
            store.discard(finding.file)
    fill(store, JOB, [LINF], list(range(8)), size=2)
    assert [f.kind for f in fsck(store)] == ["foreign"], "the notes are not ours to delete"


def test_a_flipped_bit_in_the_rows_is_noticed_when_they_are_read(tmp_path: Path) -> None:
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF], list(range(4)))
    file = next((tmp_path / "s" / "verdicts").iterdir())
    good = file.read_bytes()
    end = pq.ParquetFile(file).metadata.row_group(0).column(0).file_offset or len(good) // 2
    noticed = 0
    for position in range(20, min(end, 400), 20):
        file.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        try:
            same = store.read().equals(pq.read_table(pa.BufferReader(good)))
        except UserError:
            noticed += 1
        else:
            assert same, f"byte {position} was changed and other rows were read"
    assert noticed


def flipped(data: bytes, position: int, rng: random.Random) -> bytes:
    return data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :]


def parts_of(file: Path) -> tuple[bytes, range, range]:
    """The bytes of a Parquet file, and where its pages and its footer lie."""
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    return data, range(4, footer), range(footer, len(data) - 8)


def test_a_flipped_bit_anywhere_in_a_shard_is_damage_and_named(tmp_path: Path) -> None:
    """Once a flip in the footer was a UnicodeDecodeError, and one in its statistics went unseen."""
    store, rng = create(str(tmp_path / "s")), random.Random(0)
    fill(store, JOB, [LINF], list(range(20)), 20)
    (name,), good = store.shards(), store.read()
    file = tmp_path / "s" / "verdicts" / name
    data, pages, footer = parts_of(file)
    text = data.index(b"parquet-cpp-arrow")  # another release of Arrow has another name there and may write other bytes
    for position in [*rng.sample(pages, 120), *rng.sample(footer, 180), text + 2]:
        if text + 26 <= position < text + 40:
            continue
        file.write_bytes(flipped(data, position, rng))
        found = fsck(store)
        assert found[0].kind == "torn", position
        assert name in found[0].what
        assert found[0].file == f"verdicts/{name}"
        with contextlib.suppress(UserError):
            assert store.read().equals(good), "a reader may overlook what changes no row, and must refuse what does"


def test_pages_carry_checksums_that_a_verifying_reader_refuses(tmp_path: Path) -> None:
    """What docs/reference/schema.md tells users of pandas and pyarrow."""
    store, rng = create(str(tmp_path / "s")), random.Random(1)
    fill(store, JOB, [LINF], list(range(20)), 20)
    file = next((tmp_path / "s" / "verdicts").iterdir())
    good, (data, pages, _) = pd.read_parquet(file), parts_of(file)
    wrong = caught = 0
    for position in rng.sample(pages, 150):
        file.write_bytes(flipped(data, position, rng))
        try:
            silent = not pd.read_parquet(file.parent).equals(good)
        except Exception:
            silent = False
        wrong += silent
        try:
            assert pd.read_parquet(file.parent, page_checksum_verification=True).equals(good)
        except (OSError, pa.ArrowInvalid):  # a page, or a header that makes no sense
            caught += silent
    assert wrong == caught > 5


@pytest.mark.parametrize("content", ["[]", "{}", "3", "null", "{", "\xff", '{"schema_version": "2"}', "[" * 100_000])
def test_a_store_json_without_its_facts_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "store.json").write_text(content, encoding="latin-1")
    for use in (lambda: create(str(tmp_path)), lambda: Store.open(tmp_path)):
        with pytest.raises(UserError, match=r"store\.json is damaged"):
            use()


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("a-file", "is a file"), ("a-file/below", "Not a directory|File exists"), ("/proc/xyz", "cannot be used"),
        ("/proc/1/x/y", "cannot be used"), ("foo://bucket/x", "Protocol not known"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_hold_results_is_a_sentence(tmp_path: Path, place: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("mine")
    with pytest.raises(UserError, match=sentence):
        create(place)
    assert Path("a-file").read_text() == "mine"


def test_a_newer_schema_is_refused_with_the_remedy(tmp_path: Path) -> None:
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF], [0])
    file = next((tmp_path / "s" / "verdicts").iterdir())
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), file)
    with pytest.raises(UserError, match=r"schema version 99.*upgrade"):
        store.read()


def test_a_store_that_knows_networks_by_their_weights_alone_is_neither_read_nor_continued(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = create(str(root))
    fill(store, JOB, [LINF], [0])
    about = json.loads((root / "store.json").read_text())
    (root / "store.json").write_text(json.dumps({**about, "schema_version": 1}))
    for use in (lambda: create(str(root)), lambda: Store.open(root)):
        with pytest.raises(UserError, match=r"cure_ray 0\.2 or older.*another directory"):
            use()
    (root / "store.json").write_text(json.dumps(about))
    file = next((root / "verdicts").iterdir())
    pq.write_table(pq.read_table(file).replace_schema_metadata({"schema_version": "1"}), file)
    with pytest.raises(UserError, match=r"cure_ray 0\.2 or older"):
        store.read()


def other(value: Any) -> Any:
    """Another value of the same type."""
    if dataclasses.is_dataclass(value):
        field = dataclasses.fields(value)[-1].name if isinstance(value, Box) else dataclasses.fields(value)[0].name
        return dataclasses.replace(value, **{field: other(getattr(value, field))})  # type: ignore[type-var]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return value[:-1]
    return '{"iterations": 21}' if value == "{}" else value + "x"


def test_whatever_is_changed_in_a_job_or_its_settings_makes_another_run() -> None:
    """By going through the fields, so that one added tomorrow is asked for too."""
    seen = {JOB.run_id}
    jobs = [dataclasses.replace(JOB, **{f.name: other(getattr(JOB, f.name))}) for f in dataclasses.fields(Job)]
    plain = JOB.settings
    fields = [f.name for f in dataclasses.fields(CascadeSettings) if f.name not in ("batch", "attack", "stages")]
    settings = [dataclasses.replace(plain, **{name: other(getattr(plain, name))}) for name in fields]
    attacks = [f.name for f in dataclasses.fields(AttackSettings) if f.name not in ("rows", "begun")]
    settings += [
        dataclasses.replace(plain, attack=dataclasses.replace(plain.attack, **{n: other(getattr(plain.attack, n))})) for n in attacks
    ]
    jobs += [dataclasses.replace(JOB, settings=s) for s in settings]
    for job in jobs:
        assert job.run_id not in seen, job
        seen.add(job.run_id)
        assert Job.of(json.loads(json.dumps(job.key()))) == job
    assert dataclasses.replace(JOB, settings=dataclasses.replace(plain, batch=7)).run_id == JOB.run_id
    with pytest.raises(UserError, match="from its beginning"):  # so that a part of an attack never passes for the whole
        CascadeSettings(attack=AttackSettings(begun=2))


@pytest.mark.parametrize("point", [0, 3, 7])
def test_a_reader_beside_a_call_that_merges_shards_sees_every_row_once(point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards are merged after the reader has listed them and read `point` of them."""
    store, other = create(str(tmp_path / "s")), Store(tmp_path / "s")
    fill(store, JOB, [LINF], list(range(16)), size=2)
    read, seen = store.files.read_bytes, list[str]()

    def merged_meanwhile(name: str) -> bytes:
        if len(seen) == point:
            other.compact(JOB, [LINF])
        seen.append(name)
        return read(name)

    monkeypatch.setattr(store.files, "read_bytes", merged_meanwhile)
    assert sorted(store.read(["sample_index"]).column("sample_index").to_pylist()) == list(range(16))
    assert len(seen) > point + 1
    assert len(other.shards()) == 1


def test_a_merged_shard_beside_its_parts_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF], list(range(8)), size=2)
    monkeypatch.setattr(store, "discard", lambda file: None)  # as if killed, or still on the way, before the parts go
    store.compact(JOB, [LINF])
    assert len(store.shards()) == 5
    assert sorted(store.read(["sample_index"]).column("sample_index").to_pylist()) == list(range(8))


def test_a_damaged_shard_is_still_named(tmp_path: Path) -> None:
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF], list(range(8)), size=2)
    first, *_ = sorted((tmp_path / "s" / "verdicts").iterdir())
    first.write_bytes(first.read_bytes()[:50])
    with pytest.raises(UserError, match=first.name[:12]):
        store.read()


def test_a_process_killed_while_writing_leaves_no_half_shard(tmp_path: Path) -> None:
    """kill -9 between the bytes and the rename: the shard is absent, not torn, and the next run does it again."""
    script = (
        "import os, signal, sys\n"
        "from cure_ray.results import store as module\n"
        "import tests_store_job as j\n"
        "os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"s = module.Store({str(tmp_path / 's')!r})\n"
        "s.write(j.Shard(j.JOB, (j.LINF,), (4,)), [j.verdict(j.LINF, 4)])\n"
    )
    store = create(str(tmp_path / "s"))
    fill(store, JOB, [LINF], [0, 1, 2, 3])
    (tmp_path / "tests_store_job.py").write_text(Path(__file__).read_text())
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert result.returncode == -9, result.stderr.decode()
    assert len(store.read()) == 4
    assert [f.kind for f in fsck(store)] == ["torn"]
    assert len(pd.read_parquet(tmp_path / "s" / "verdicts")) == 4


def test_the_schema_has_the_fields_of_a_verdict() -> None:
    assert {f.name for f in dataclasses.fields(Verdict)} == set(SCHEMA.names)


def table_of(rows: list[Verdict]) -> str:
    frame = to_table(rows).to_pandas()
    return summary(Loaded(build_study(frame), (), frame), JOB.checkpoint_digest)


def test_the_table_counts_per_sample_and_refuses_holes() -> None:
    rows = [verdict(LINF, i, Status.CERTIFIED if i < 6 else Status.UNKNOWN, stage="ibp" if i < 2 else "crown") for i in range(10)]
    rows += [verdict(L2, i, Status.CERTIFIED if i % 2 else Status.FALSIFIED, stage="crown" if i % 2 else "attack") for i in range(10)]
    text = table_of(rows)
    lines = {line.split()[0] if line.strip() else "": line for line in text.splitlines()}
    assert "60.0 %" in lines["l_inf"]
    assert "20.0 %" in lines["l_inf"], "by IBP alone"
    assert "50.0 %" in lines["l2"]
    assert "30.0 %" in lines["union"], "AND per sample: 1, 3 and 5"
    assert "falsified 5" in text
    assert "unknown 4" in text
    with pytest.raises(UserError, match=r"l2=0\.5 lacks 1 of 10"):
        table_of(rows[:-1])
