"""Who may write in a run directory. Leases have growing numbers; whoever holds the highest writes, everybody else has lost.

DIR/.lease/NNNNNNNN/ is the desk of a lease: `holder.json`, `pulse`, `ranks/` (the other processes of a parallel run), and every file and
checkpoint while it is being made. A finished one
is renamed from the desk to its place. Taking the lease moves the desks of lower numbers out of the way, so what their holders
finish later has no place to come from: the file system itself refuses it, also to a process that was stopped between looking whether the
lease is still its own and writing. A take-over is therefore always safe; whether it is polite is decided by who asks:

- a person (`take`) does not take a run from a process that still works;
- a search (`take_for`) takes what a smaller term holds: the terms of a trial count how often it changed hands in the study;
- a process of the same call (`succeed`) takes over from its predecessor, and from nobody else.
"""

import errno
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cure_ray.errors import UserError
from cure_ray.runs.pulse import BEAT, Pulse, Watch, beating, presence, this_process

LEASES, HOLDER, PULSE, RELEASED, RANKS = ".lease", "holder.json", "pulse", "released", "ranks"
LISTEN = 5 * BEAT  # seconds a person's call listens for a process of another machine
GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)  # what a path into a desk that was moved away raises


class LostLeaseError(UserError):
    """Somebody else works on the run now. Nothing was written after he began."""


@dataclass(frozen=True)
class Holder:
    """Who holds, or last held, the lease with this number."""

    number: int
    desk: Path
    about: dict[str, Any]

    @property
    def term(self) -> int:
        return int(self.about.get("term", 0))

    @property
    def released(self) -> bool:
        return (self.desk / RELEASED).exists()

    def called(self) -> "Holder":
        """The same, told of the process that a person started: ending one that it started would only make it start another."""
        return replace(self, about={**self.about, **self.about.get("caller", {})})

    def __str__(self) -> str:
        return f"process {self.about.get('pid', '?')} on {self.about.get('host', 'an unknown machine')}"


@dataclass(frozen=True)
class Lease:
    """The right to write in `directory`, as long as nobody has a higher number."""

    directory: Path
    number: int
    call: str  # the same for all processes of one call

    @property
    def desk(self) -> Path:
        return _desk(self.directory, self.number)

    def check(self) -> None:
        """Stop here if the lease is lost."""
        if not self.desk.is_dir():
            self._stop()

    def _stop(self) -> None:
        now = holder(self.directory)
        raise LostLeaseError(f"{self.directory} is worked on by {now or 'somebody else'} now; this process stopped and wrote nothing since")

    @contextmanager
    def desk_work(self) -> Iterator[Path]:
        """Make something on the desk; losing the desk meanwhile is losing the lease."""
        self.check()
        try:
            yield self.desk
        except OSError as error:
            if error.errno in GONE and not _is_there(self.desk):
                self._stop()
            raise

    def publish(self, made: Path, target: Path) -> None:
        """Move what was made on the desk to its place, where it replaces a file or directory of that name."""
        with self.desk_work() as desk:
            if target.is_dir():
                _move(target, desk / f"old-{uuid.uuid4().hex}")
            _move(made, target)

    def write(self, target: Path, text: str) -> None:
        """A whole file at once: nobody ever reads half of it."""
        with self.desk_work() as desk:
            made = desk / f"{target.name}.{uuid.uuid4().hex}"
            try:
                made.write_text(text)
            except OSError:
                made.unlink(missing_ok=True)
                raise
        self.publish(made, target)

    def remove(self, target: Path) -> None:
        """Nothing if it is not there."""
        with self.desk_work() as desk:
            old = desk / f"old-{uuid.uuid4().hex}"
            with suppress(FileNotFoundError):
                _move(target, old)
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Rename. A server may have done it and lost its answer; asked again it says that there is no such file."""
    moved = source.stat().st_ino
    try:
        source.rename(target)
    except FileNotFoundError:
        if not target.exists() or target.stat().st_ino != moved:
            raise


def _is_there(directory: Path) -> bool:
    """Asked of the server, by making something in it: what a client believes to know may be old."""
    probe = directory / f"probe-{uuid.uuid4().hex}"
    try:
        probe.mkdir()
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    probe.rmdir()
    return True


def _desk(directory: Path, number: int) -> Path:
    return directory / LEASES / f"{number:08d}"


def _numbers(directory: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(directory / LEASES) if name.isdigit())
    except FileNotFoundError:
        return []


def holder(directory: Path) -> Holder | None:
    """Who holds the highest number; None if nobody ever did.

    A desk that is gone when it is looked at was moved away by somebody with a higher number, who is not in this list: it is asked for
    anew, or a lower number would pass for the highest. One that fails again is damaged.
    """
    failed = list[int]()
    while numbers := [number for number in _numbers(directory) if failed.count(number) < 2]:
        desk = _desk(directory, numbers[-1])
        with suppress(OSError, ValueError):
            return Holder(numbers[-1], desk, json.loads((desk / HOLDER).read_text()))
        failed.append(numbers[-1])
    return None


def workers(found: Holder) -> dict[str, dict[str, Any]]:
    """Whoever works under a lease, by name: the ranks of a parallel run, else the process that holds it."""
    ranks = {}
    for path in sorted((found.desk / RANKS).glob("*.json")):
        with suppress(OSError, ValueError):
            ranks[path.stem] = json.loads(path.read_text())
    return ranks or {"process": found.about}


def at_work(found: Holder) -> bool:
    """Whether the holder still works, or the call whose process it is (which starts another when one dies, and between phases).

    A process of this machine is asked for; one of another is listened to for some seconds.
    """
    if found.released:
        return False
    here, caller = presence(found.about), presence(found.about.get("caller", found.about))
    if here in ("running", "stopped") or caller in ("running", "stopped"):
        return True
    if here == "gone":
        return False
    print(f"looking for {LISTEN:.0f} s whether {found} still works in {found.desk.parents[1]}", file=sys.stderr, flush=True)
    watch, until = Watch(), time.monotonic() + LISTEN
    while not watch.look(found.desk / PULSE).moved and time.monotonic() < until:
        time.sleep(min(0.2, LISTEN))
    return watch.look(found.desk / PULSE).moved


@contextmanager
def _hold(directory: Path, call: str, admit: Callable[[Holder | None], int]) -> Iterator[Lease]:
    """Take the next number; `admit` says under which term, or raises."""
    leases = directory / LEASES
    leases.mkdir(exist_ok=True)
    lease, pulse = None, None
    while lease is None:
        draft = leases / f"draft-{uuid.uuid4().hex}"
        draft.mkdir()
        try:
            pulse = Pulse(draft / PULSE)  # it moves along with its directory
            lease = _sit_down(directory, draft, call, admit)
        finally:
            if lease is None and pulse is not None:
                pulse.close()
            shutil.rmtree(draft, ignore_errors=True)
    assert pulse is not None
    with beating(pulse):
        yield lease


@contextmanager
def _call(directory: Path, admit: Callable[[Holder | None], int]) -> Iterator[Lease]:
    """A new call. When it ends it says so, also for those of its processes that died, or ended before it did."""
    call = uuid.uuid4().hex
    with _hold(directory, call, admit) as lease:
        try:
            yield lease
        finally:
            last = holder(directory)
            if last is not None and last.about.get("call") == call:
                with suppress(OSError):
                    (last.desk / RELEASED).touch()


def _sit_down(directory: Path, draft: Path, call: str, admit: Callable[[Holder | None], int]) -> Lease | None:
    """Make the draft the desk of the next number, and clear the others; None if somebody was faster."""
    before = holder(directory)  # after the draft was made: a client of a network file system then lists the directory anew
    me = {**this_process(), "call": call, "term": admit(before), "since": time.time(), "draft": draft.name}
    me["caller"] = before.about.get("caller") if before is not None and before.about.get("call") == call else this_process()
    (draft / HOLDER).write_text(json.dumps(me))
    lease = Lease(directory, (before.number if before else 0) + 1, call)
    try:
        _move(draft, lease.desk)  # refused if he took this number: his desk is not empty
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            return None
        raise
    now = holder(directory)
    if now is None or now.about.get("draft") != draft.name:  # he has a higher number, and this one was free again or never ours
        with suppress(OSError, ValueError):
            if json.loads((lease.desk / HOLDER).read_text()).get("draft") == draft.name:
                _clear(lease.desk)
        return None
    for path in directory.joinpath(LEASES).iterdir():
        if path.name.startswith("lost-") or (path.name.isdigit() and int(path.name) < lease.number):
            _clear(path)
    _is_there(directory)  # and from now on this client sees what others have written there
    return lease


def _clear(desk: Path) -> None:
    """Take a desk away from its holder, and return only when nothing can come from it any more.

    Moved, it is out of reach for paths, and so for processes of this machine. Another client of a network file system may know it by its
    handle and go on; that ends when the directory is gone.
    """
    away = desk.with_name(f"lost-{uuid.uuid4().hex}")
    with suppress(OSError):
        _move(desk, away)
    for _ in range(200):
        shutil.rmtree(away, ignore_errors=True)
        try:
            if all(name.startswith(".nfs") for name in os.listdir(away)):  # still open in a process of this machine
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise UserError(f"{away} cannot be removed: is it another user's? Its owner can, and then the run can be continued")


def take(directory: Path) -> AbstractContextManager[Lease]:
    """For a person: refused while another process works there."""

    def admit(found: Holder | None) -> int:
        if found is not None and at_work(found):
            found = found.called()
            stopped = presence(found.about) == "stopped"
            state = f"which is stopped: continue it (kill -CONT {found.about['pid']})" if stopped else "Wait for it"
            raise UserError(
                f"{directory} is being trained by {found}{', ' if stopped else '. '}{state}, end it (kill {'-9 ' if stopped else ''}"
                f"{found.about['pid']}, on {found.about['host']}), or choose another --out."
            )
        return found.term if found else 0

    return _call(directory, admit)


def take_for(directory: Path, term: int) -> AbstractContextManager[Lease]:
    """For a trial that changed hands so often: taken from earlier terms and from dead processes of this one alike."""

    def admit(found: Holder | None) -> int:
        if found is not None and found.term > term:
            raise LostLeaseError(f"{directory} has been taken over by {found}")
        return term

    return _call(directory, admit)


def succeed(directory: Path, call: str) -> AbstractContextManager[Lease]:
    """For the next process of a call that already holds it."""

    def admit(found: Holder | None) -> int:
        if found is None or found.about.get("call") != call:
            raise LostLeaseError(f"{directory} has been taken over by {found}")
        return found.term

    return _hold(directory, call, admit)
