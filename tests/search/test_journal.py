"""The journal of a study survives writers that die in the middle of a line, and says which line is damaged if one ever is."""

import json
import os
import random
import subprocess
import threading
from pathlib import Path

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from search_helpers import SWEEP, call, proposed

from cure_ray.errors import UserError
from cure_ray.results.report.sweeps import read_sweeps
from cure_ray.search.journal import JournalReader, JournalWriter
from cure_ray.search.layout import JOURNAL
from cure_ray.search.ranking import best_runs
from cure_ray.search.space import Sweep
from cure_ray.search.status import describe_directory
from cure_ray.search.study import read_study

TORN = (
    b"{",
    b'{"op_code": 4, "worker_id": "a',
    b'{"op_code":8,"worker_id":"x","trial_id":0,"user_attr":{"values"',
    b"\xff\xfe\x00",
    b"x" * 9000,
)


def records(path: Path) -> list[dict[str, object]]:
    return list(JournalReader(path).read_logs(0))


@pytest.mark.parametrize("torn", TORN)
def test_half_a_line_at_the_end_is_ignored_by_readers_and_cut_off_by_the_next_writer(out: Path, torn: bytes) -> None:
    with call(out) as ledger:
        trial = proposed(ledger)
    journal = out / JOURNAL
    intact = journal.read_bytes()
    journal.write_bytes(intact + torn)
    assert "1 running" in describe_directory(out) or "1 interrupted" in describe_directory(out)
    assert read_study(out, Sweep.model_validate(SWEEP)).trials[0].number == trial.number
    assert [s.trials for s in read_sweeps([out])] == [4]
    with pytest.raises(UserError, match="no finished trial"):
        best_runs(out, 1)
    assert journal.read_bytes() == intact + torn, "whoever only looks repairs nothing"
    with call(out) as ledger:
        assert proposed(ledger).number == trial.number
    assert journal.read_bytes().startswith(intact)
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())


def test_a_writer_heals_the_line_of_another_that_died_while_it_was_open(out: Path) -> None:
    with call(out) as ledger:
        proposed(ledger)
        with (out / JOURNAL).open("ab") as file:
            file.write(b'{"op_code": 8, "wor')
        second = proposed(ledger)
        assert [t.number for t in ledger.study.get_trials() if t.state.name == "RUNNING"] == [0, second.number]


def test_a_line_glued_to_half_a_line_is_read(out: Path) -> None:
    """As `status` of versions up to 0.2 left it: the half never took effect, the whole one did."""
    with call(out) as ledger:
        proposed(ledger)
    journal = out / JOURNAL
    before = records(journal)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + b'{"op_code": 4, "worker_id": "a' + lines[-1])
    assert records(journal) == before
    with call(out) as ledger:
        assert proposed(ledger).number == 0


@pytest.mark.parametrize("damage", [b"\x00\x00\x00", b'{"op_code": 5', b"[]", b"", b'"text"'])
def test_a_damaged_line_is_named_with_what_to_do_and_that_helps(out: Path, damage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with call(out) as ledger:
        first, _second = proposed(ledger), proposed(ledger)
    journal = out / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    broken = len(lines) - 3
    journal.write_bytes(b"".join([*lines[: broken - 1], damage + b"\n", *lines[broken:]]))
    with pytest.raises(UserError, match=rf"journal\.log, line {broken} is damaged.*head -n {broken - 1} ") as caught:
        describe_directory(out)
    with pytest.raises(UserError, match=f"line {broken} is damaged"), call(out):
        pass
    assert read_sweeps([out]) == []
    assert f"line {broken} is damaged" in capsys.readouterr().err
    command = str(caught.value).partition("before that line: ")[2].partition(" (the study")[0]
    subprocess.run(command, shell=True, check=True)
    with call(out) as ledger:
        assert proposed(ledger).number == first.number


def test_a_foreign_log_is_no_damaged_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-journal.log").write_text("dear diary\n")
    assert read_sweeps([tmp_path]) == []
    assert capsys.readouterr().err == ""


def test_what_we_write_optuna_reads(out: Path) -> None:
    with call(out) as ledger:
        proposed(ledger)
    names = [s.study_name for s in JournalStorage(JournalFileBackend(str(out / JOURNAL))).get_all_studies()]
    assert names == [ledger.study.study_name]


def test_a_disk_that_takes_half_a_line_loses_that_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JournalWriter(tmp_path / JOURNAL)
    journal.append_logs([{"op_code": 0, "n": 0}])
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) - 5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        journal.append_logs([{"op_code": 0, "n": 1}])
    monkeypatch.undo()
    assert not (tmp_path / JOURNAL).read_bytes().endswith(b"\n")
    journal.append_logs([{"op_code": 0, "n": 2}])
    assert [r["n"] for r in records(tmp_path / JOURNAL)] == [0, 2]


def test_writers_at_once_and_dead_ones_between_them_lose_no_line(tmp_path: Path) -> None:
    """Four writers at once; after each line somebody leaves half a line, as if he died there."""
    path, rng = tmp_path / JOURNAL, random.Random(0)

    def die_while_writing() -> None:
        lock = JournalFileSymlinkLock(str(path))
        lock.acquire()
        with path.open("ab") as file:
            file.write(b'{"op_code":0,"me":0,"n":99}'[: rng.randrange(1, 27)])
        lock.release()

    def write(me: int) -> None:
        writer = JournalWriter(path)
        for n in range(10):
            writer.append_logs([{"op_code": 0, "me": me, "n": n}, {"op_code": 0, "me": me, "n": n + 0.5}])
            die_while_writing()

    threads = [threading.Thread(target=write, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = records(path)
    for me in range(4):
        assert [r["n"] for r in found if r["me"] == me] == [n / 2 for n in range(20)]
