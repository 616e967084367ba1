"""A run directory has one writer: whoever lost it writes nothing more, wherever he was stopped and whatever his file system told him."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import held_elsewhere
from network_files import as_client, network_files
from run_helpers import essence, everything, small

from cure_ray.config import dump_experiment
from cure_ray.errors import UserError
from cure_ray.runs import lease as leases
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.directory import list_checkpoints
from cure_ray.runs.lease import LostLeaseError, at_work, holder, succeed, take, take_for
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.pulse import Pulse, beating
from cure_ray.runs.record import Stretch
from cure_ray.runs.run import train_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    train_run(small(), run, quiet=True)
    return essence(run)


class Frozen(threading.Thread):
    """A training of the first term that stands still just before its n-th rename, as if its process had been stopped there."""

    def __init__(self, run: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(daemon=True)
        self.run_directory, self.at, self.moves = run, at, 0
        self.reached, self.thaw, self.error = threading.Event(), threading.Event(), BaseException()
        real = leases._move

        def move(source: Path, target: Path) -> None:
            if threading.current_thread() is self:
                self.moves += 1
                if self.moves == self.at:
                    self.reached.set()
                    self.thaw.wait()
            real(source, target)

        monkeypatch.setattr(leases, "_move", move)

    def run(self) -> None:
        try:
            train_run(small(), self.run_directory, resume=True, quiet=True, stretch=Stretch(term=1))
        except BaseException as error:
            self.error = error
            self.reached.set()


# 1: taking the lease; 2: run.json; then per epoch checkpoint and metrics, and from the third on the oldest checkpoint out of the way.
@pytest.mark.parametrize("at", range(1, 12))
def test_a_run_taken_over_at_any_rename_has_one_writer_and_the_same_bytes(
    at: int, tmp_path: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    old = Frozen(run, at, monkeypatch)
    old.start()
    assert old.reached.wait(60)
    assert old.is_alive(), old.error
    train_run(small(), run, resume=True, quiet=True, stretch=Stretch(term=2))
    written = everything(run)
    old.thaw.set()
    old.join(60)
    assert isinstance(old.error, LostLeaseError), old.error
    assert everything(run) == written, "whoever lost the lease wrote something"
    assert [row["epoch"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert essence(run) == undisturbed


DRIVER = """
import sys
from pathlib import Path
from cure_ray.config import load_experiment
from cure_ray.runs.record import Stretch
from cure_ray.runs.run import train_run
train_run(load_experiment(sys.argv[1]), Path(sys.argv[2]), resume=True, quiet=True, stretch=Stretch(term=1))
"""


def start(tmp_path: Path, epochs: int) -> tuple[subprocess.Popen[str], Path]:
    described, run = tmp_path / "experiment.yaml", tmp_path / "run"
    described.write_text(dump_experiment(small(epochs)))
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(described), str(run)], stderr=subprocess.PIPE, text=True)
    while not read_metrics(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process, run


def test_a_process_that_is_stopped_and_continued_after_the_takeover_ends_without_writing(tmp_path: Path) -> None:
    process, run = start(tmp_path, 400)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    done = len(read_metrics(run))
    with pytest.raises(UserError, match=rf"is being trained by process {process.pid} on .*, which is stopped: continue it \(kill -CONT"):
        train_run(small(400), run, resume=True, quiet=True)
    train_run(small(400), run, resume=True, quiet=True, stretch=Stretch(until=done + 3, term=2))
    written = everything(run)
    process.send_signal(signal.SIGCONT)
    assert "LostLeaseError" in process.communicate(timeout=60)[1]
    assert everything(run) == written
    assert [row["epoch"] for row in read_metrics(run)] == list(range(1, done + 4))
    train_run(small(400), tmp_path / "alone", quiet=True, stretch=Stretch(until=done + 3))
    assert essence(run) == essence(tmp_path / "alone")


def test_a_person_is_refused_while_the_run_is_trained_and_not_after_its_process_was_killed(tmp_path: Path) -> None:
    process, run = start(tmp_path, 400)
    with pytest.raises(UserError, match=rf"is being trained by process {process.pid} on .*\. Wait for it, end it \(kill {process.pid}, on"):
        train_run(small(400), run, resume=True, quiet=True)
    process.kill()
    process.communicate()
    epoch = len(read_metrics(run))
    assert train_run(small(400), run, resume=True, quiet=True, stretch=Stretch(until=epoch + 1)).epoch <= epoch + 2
    assert [row["epoch"] for row in read_metrics(run)] == list(range(1, load_checkpoint(run).epoch + 1))


def test_a_run_killed_between_checkpoint_and_metrics_line_gets_the_line_when_it_goes_on(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    train_run(small(), run, quiet=True, stretch=Stretch(until=3))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    train_run(small(), run, resume=True, quiet=True)
    assert essence(run) == undisturbed


def test_lines_that_older_versions_wrote_twice_are_one_line_again(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    run = tmp_path / "run"
    train_run(small(), run, quiet=True, stretch=Stretch(until=3))
    with (run / "metrics.jsonl").open("a") as file:
        file.write((run / "metrics.jsonl").read_text())
    train_run(small(), run, resume=True, quiet=True)
    assert essence(run) == undisturbed


# ---------------------------------------------------------------- who may take it


def test_a_later_term_takes_it_and_an_earlier_one_never_does_again(tmp_path: Path) -> None:
    with take_for(tmp_path, 1) as first:
        first.check()
        with take_for(tmp_path, 2) as second:
            assert second.number > first.number
            with pytest.raises(LostLeaseError, match="is worked on by process"):
                first.check()
            with pytest.raises(LostLeaseError):
                first.write(tmp_path / "file", "first")
        with pytest.raises(LostLeaseError), take_for(tmp_path, 1):  # released, but still somebody else's trial
            pass
    with take(tmp_path), pytest.raises(LostLeaseError), take_for(tmp_path, 1):  # nor from a person who went on for him
        pass
    assert not (tmp_path / "file").exists()


def test_only_the_same_call_succeeds_itself(tmp_path: Path) -> None:
    with take(tmp_path) as mine:
        with succeed(tmp_path, mine.call) as next_one:
            next_one.check()
            with pytest.raises(LostLeaseError):
                mine.check()
        with pytest.raises(LostLeaseError), succeed(tmp_path, "another"):
            pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cure_ray.runs.lease.LISTEN", 0.3)
    monkeypatch.setattr("cure_ray.runs.pulse.BEAT", 0.02)


@pytest.mark.parametrize("age", [0, 6 * 3600, -6 * 3600])
def test_the_holder_on_another_machine_is_judged_by_its_pulse_and_not_by_times(tmp_path: Path, impatient: None, age: float) -> None:
    pulse = held_elsewhere(tmp_path)
    os.utime(pulse, (time.time() - age,) * 2)
    with beating(Pulse(pulse)), pytest.raises(UserError, match=r"is being trained by process .* on node7"), take(tmp_path):
        pass
    os.utime(pulse, (time.time() - age,) * 2)
    found = holder(tmp_path)
    assert found is not None
    assert not at_work(found)
    with take(tmp_path) as mine:
        mine.check()


def test_many_who_take_it_at_once_get_different_numbers_and_one_is_left(tmp_path: Path) -> None:
    held: list[leases.Lease] = []

    def work() -> None:
        for _ in range(10):
            with take_for(tmp_path, 1) as mine:
                held.append(mine)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [lease.number for lease in held]
    assert len(set(numbers)) == 60
    assert [path.name for path in (tmp_path / ".lease").iterdir()] == [f"{max(numbers):08d}"]


def test_a_desk_that_goes_while_one_looks_means_a_higher_number_not_a_lower_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with take_for(tmp_path, 1) as mine:
        first, second, third = (mine.desk.with_name(f"{number:08d}") for number in (1, 2, 3))
        shutil.copytree(first, second)
        real = leases._numbers

        def listed(directory: Path) -> list[int]:
            numbers = real(directory)
            if second.is_dir():  # its successor comes, and clears it, right after the list was made
                second.rename(third)
            return numbers

        monkeypatch.setattr(leases, "_numbers", listed)
        found = holder(tmp_path)
        assert found is not None
        assert found.number == 3
        (third / "holder.json").write_text("{")  # damaged: the one before it counts, as it did
        found = holder(tmp_path)
        assert found is not None
        assert found.number == 1


def test_a_disk_without_room_or_rights_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *rest: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    train_run(small(), tmp_path / "run", quiet=True, stretch=Stretch(until=1))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot write to .*run: Permission denied\. Choose another --out"):
        train_run(small(), tmp_path / "run", resume=True, quiet=True)


# ---------------------------------------------------------------- file systems that are slow, stale and lose replies


def notes(run: Path) -> list[str]:
    try:
        return (run / "notes").read_text().splitlines()
    except FileNotFoundError:
        return []


def write_notes(run: Path, term: Iterator[int], seed: int, said: list[str], errors: list[BaseException]) -> None:
    """Take the run over again and again, and add lines until somebody else has it. What was answered for is kept in `said`."""
    rng = random.Random(seed)
    try:
        with as_client(seed):
            for _ in range(6):
                try:
                    with take_for(run, next(term)) as mine:
                        for n in range(rng.randrange(1, 6)):
                            mine.write(run / "notes", "".join(f"{line}\n" for line in [*notes(run), f"{mine.number} {n}"]))
                            said.append(f"{mine.number} {n}")
                except LostLeaseError:
                    continue
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("seed", range(4))
def test_on_a_slow_stale_and_forgetful_file_system_no_writer_undoes_another(tmp_path: Path, seed: int) -> None:
    """Each writes the whole file anew: a line written after the lease was lost would wipe out the lines of whoever has it."""
    counter, lock = iter(range(1, 1000)), threading.Lock()

    class Terms:
        def __next__(self) -> int:
            with lock:
                return next(counter)

    said, errors = list[str](), list[BaseException]()
    with network_files(tmp_path):
        threads = [threading.Thread(target=write_notes, args=(tmp_path, Terms(), 10 * seed + k, said, errors)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, "".join(traceback.format_exception(errors[0]))
    found = notes(tmp_path)
    assert set(said) <= set(found), "a line that was answered for is gone"
    assert len(set(found)) == len(found)
    numbers = [int(line.split()[0]) for line in found]
    assert numbers == sorted(numbers), "an earlier lease wrote after a later one"
    assert len(set(numbers)) > 1


def test_who_takes_it_sees_what_was_written_before_although_he_looked_earlier(tmp_path: Path) -> None:
    """A client that remembers for a minute that there was no such file."""
    with network_files(tmp_path), as_client(seed=0, stale=60.0, lost_replies=0.0) as client:
        client.rng.uniform = lambda low, high: high if high == 60.0 else 0.0  # type: ignore[method-assign]
        assert not (tmp_path / "notes").exists()
        server = threading.Thread(target=write_one, args=(tmp_path,))
        server.start()
        server.join()
        assert notes(tmp_path) == [], "the client would have noticed by itself: the test shows nothing"
        with take_for(tmp_path, 2):
            assert notes(tmp_path) == ["there"]


def write_one(run: Path) -> None:
    with take_for(run, 1) as mine:
        mine.write(run / "notes", "there\n")


def test_training_on_such_a_file_system_gives_the_same_bytes(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    with network_files(tmp_path), as_client(seed=3, lost_replies=0.3):
        train_run(small(), tmp_path / "run", quiet=True)
    assert essence(tmp_path / "run") == undisturbed
    assert [c.name for c in list_checkpoints(tmp_path / "run")] == ["epoch_0003", "epoch_0004"]


# ---------------------------------------------------------------- a call with several processes


SUCCESSOR = """
import os, signal, sys
from pathlib import Path
from cure_ray.runs.lease import succeed
with succeed(Path(sys.argv[1]), sys.argv[2]):
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_between_two_processes_of_a_call_the_run_is_still_its_own(tmp_path: Path, end: str) -> None:
    """A rank died and Ray is about to start another, or a phase is over: nobody else may think that the run is free."""
    with take(tmp_path) as mine:
        subprocess.run([sys.executable, "-c", SUCCESSOR, str(tmp_path), mine.call, end], check=end == "ended")
        found = holder(tmp_path)
        assert found is not None
        assert found.about["pid"] != os.getpid()
        assert at_work(found)
        with pytest.raises(UserError, match=rf"is being trained by process {os.getpid()} on"), take(tmp_path):
            pass
    assert not at_work(found)
    with take(tmp_path) as next_one:
        next_one.check()
