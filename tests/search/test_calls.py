"""Which calls of a sweep are alive: by their pulse and the observer's own clock, never by times of files or clocks of others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from search_helpers import SWEEP, call, proposed

from cure_ray.runs.pulse import BEAT, Pulse, Watch
from cure_ray.search.calls import SILENCE, Calls, State, submission
from cure_ray.search.space import Sweep
from cure_ray.search.status import describe_directory
from cure_ray.search.study import locked, read_study
from cure_ray.search.trials import OWNER, TERM


def of_another_host(out: Path, number: int = 0) -> Path:
    """Turn a call into one that another machine makes and has not ended; its pulse."""
    path = out / "submissions" / f"{number:04d}.json"
    about = {k: v for k, v in json.loads(path.read_text()).items() if k != "ended"}
    path.write_text(json.dumps({**about, "host": "node7", "place": "node7 another-boot pid:[1]"}))
    return path.with_suffix(".pulse")


class Observer:
    """Calls seen through a clock that the test moves."""

    def __init__(self, out: Path) -> None:
        self.now, self.calls = 0.0, Calls(out)
        self.calls.watch = Watch(lambda: self.now)

    def look(self, seconds: float = BEAT) -> State:
        self.calls.listen()
        self.now += seconds
        return self.calls.state(0)


@pytest.mark.parametrize("age", [0, 5 * 3600, -5 * 3600])
def test_a_host_that_died_is_given_up_after_a_minute_of_our_own_clock_whatever_its_files_say(out: Path, age: float) -> None:
    with call(out) as ledger:
        proposed(ledger)
    pulse = of_another_host(out)
    os.utime(pulse, (time.time() - age,) * 2)
    observer = Observer(out)
    states = [observer.look() for _ in range(int(SILENCE / BEAT) + 2)]
    assert states[0] == "unsure"
    assert states[-1] == "dead"
    assert "alive" not in states
    assert states.index("dead") >= SILENCE / BEAT - 2


@pytest.mark.parametrize("age", [0, 5 * 3600, -5 * 3600])
def test_a_host_whose_clock_is_hours_off_is_alive_as_long_as_it_counts(out: Path, age: float) -> None:
    with call(out):
        pass
    pulse, observer = Pulse(of_another_host(out)), Observer(out)
    for _ in range(100):
        pulse.beat()
        os.utime(out / "submissions" / "0000.pulse", (time.time() - age,) * 2)
        observer.look()
    assert observer.look() == "alive"
    pulse.close()


def test_clock_jumps_move_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day forward and two back at every question: no call dies of it, no budget of hours is used up."""
    jumps, real = [86_400.0, -172_800.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + jumps[int(real() * 1e4) % 2])
    with call(out, hours=1.0) as ledger:
        trial = proposed(ledger)
        assert ledger.calls.state(ledger.me) == "alive"
        with call(out, hours=1.0) as other:
            assert other._left() == []
            assert proposed(other).number != trial.number
            assert not other.over()
        assert ledger._may_propose()


def test_a_trial_of_a_dead_host_changes_hands_once_and_its_term_grows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with call(out) as ledger:
        proposed(ledger)
    of_another_host(out)
    with call(out) as ledger:
        assert proposed(ledger).number == 1, "nobody knows yet whether the first one's call is dead"
        assert not ledger.over()
        monkeypatch.setattr("cure_ray.search.calls.SILENCE", 0.0)
        taken = proposed(ledger)
        assert (taken.number, taken.term) == (0, 2)
    found = read_study(out, Sweep.model_validate(SWEEP)).trials[0].user_attrs
    assert (found[OWNER], found[TERM]) == (1, 2)


def test_status_says_that_a_call_of_another_host_was_not_heard_of(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cure_ray.search.status.FRESH", 0.1)
    with call(out) as ledger:
        proposed(ledger)
    of_another_host(out)
    text = describe_directory(out)
    assert "on node7): no sign of life" in text
    assert "1 interrupted" in text


def test_a_call_that_waits_for_a_stopped_one_says_for_whom(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock belongs to a process; another that has it and does not let go is told by its number."""

    code = (
        "import sys; from pathlib import Path; from cure_ray.search.study import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.readline()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdout.readline()

    def release(text: str, **more: object) -> None:
        said.append(text)
        assert holder.stdin is not None
        holder.stdin.write("\n")
        holder.stdin.flush()

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", release)
        with locked(out, patience=0.1):
            pass
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert f"waiting for process {holder.pid} on" in said[0]


def test_the_pulse_of_a_call_moves_while_it_works(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cure_ray.runs.pulse.BEAT", 0.01)
    with submission(out, {}) as me:
        watch = Watch()
        watch.look(out / "submissions" / f"{me.number:04d}.pulse")
        while not watch.look(out / "submissions" / f"{me.number:04d}.pulse").moved:
            time.sleep(0.01)
    assert me.calls.state(me.number) == "dead"
