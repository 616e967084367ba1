"""Signs of life: counted by the watcher's own clock, whatever the times of files and the clocks of others say."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cure_ray.runs.pulse import BEAT, Pulse, Watch, beating, presence, this_process


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_counter_that_moves_is_heard_whatever_the_time_of_its_file(tmp_path: Path, clock: Clock) -> None:
    pulse, watch = Pulse(tmp_path / "pulse"), Watch(clock)
    for age in (0, 3600 * 5, -3600 * 5):  # a fresh file, one of hours ago, one of a machine whose clock is ahead
        watch.look(tmp_path / "pulse")
        pulse.beat()
        os.utime(tmp_path / "pulse", (time.time() - age,) * 2)
        clock.now += BEAT
        heard = watch.look(tmp_path / "pulse")
        assert (heard.moved, heard.silent) == (True, 0.0)
    pulse.close()


def test_a_file_that_is_touched_but_does_not_count_is_silent(tmp_path: Path, clock: Clock) -> None:
    Pulse(tmp_path / "pulse").close()
    watch = Watch(clock)
    for _ in range(11):
        heard = watch.look(tmp_path / "pulse")
        os.utime(tmp_path / "pulse")
        clock.now += BEAT
    assert (heard.moved, heard.silent) == (False, 10 * BEAT)


def test_a_watcher_that_was_stopped_itself_does_not_take_its_own_pause_for_silence(tmp_path: Path, clock: Clock) -> None:
    """Both were on a machine that slept: he wakes first, and the other has had no time to beat."""
    Pulse(tmp_path / "pulse").close()
    watch = Watch(clock)
    watch.look(tmp_path / "pulse")
    clock.now += 10_000
    assert watch.look(tmp_path / "pulse").silent <= 2 * BEAT


def test_a_pulse_that_is_not_there_is_silent_and_one_that_appears_has_moved(tmp_path: Path, clock: Clock) -> None:
    watch = Watch(clock)
    watch.look(tmp_path / "pulse")
    clock.now += BEAT
    assert watch.look(tmp_path / "pulse").silent == BEAT
    Pulse(tmp_path / "pulse").close()
    assert watch.look(tmp_path / "pulse").moved


def test_a_thread_beats_until_the_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cure_ray.runs.pulse.BEAT", 0.01)
    watch = Watch()
    with beating(Pulse(tmp_path / "pulse")):
        watch.look(tmp_path / "pulse")
        while not watch.look(tmp_path / "pulse").moved:
            time.sleep(0.01)
    last = (tmp_path / "pulse").read_bytes()
    time.sleep(0.05)
    assert (tmp_path / "pulse").read_bytes() == last


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_processes_are_told_apart_by_state_start_and_place() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    about = {**this_process(), "pid": child.pid, "started": fields[19]}
    assert presence(about) == "running"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert presence(about) == "stopped"
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert presence(about) == "gone", "dead, although its parent has not looked yet"
    child.wait()
    child.stdout.close()
    assert presence(about) == "gone"
    assert presence({**this_process(), "started": "1"}) == "gone", "another process has its number now"
    for elsewhere in ("login7 other-boot pid:[1]", None):
        assert presence({**this_process(), "place": elsewhere}) == "unknown"
