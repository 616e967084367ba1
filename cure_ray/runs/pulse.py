"""Signs of life of a process, and how long another has not seen one. No clock of one machine is compared with a file time of another.

A process that works moves a counter in a file. Who watches it counts his own seconds between looks that found the counter where it was;
a look after a long pause (he was stopped himself, or his machine slept) counts as a short one.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

BEAT = 2.0  # seconds between signs of life
Presence = Literal["running", "stopped", "gone", "unknown"]


def _place() -> str:
    """Where a process number means something: this boot of this machine, this container."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _stat(pid: int) -> list[str] | None:
    """State and what follows in /proc/PID/stat."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def this_process() -> dict[str, Any]:
    """What others need to find this process: for people, and for `presence`."""
    fields = _stat(os.getpid())
    return {"host": socket.gethostname(), "pid": os.getpid(), "place": _place(), "started": fields[19] if fields else None}


def presence(about: Mapping[str, Any]) -> Presence:
    """Whether a process of this machine still exists; nobody can tell of another's."""
    if about.get("place") != _place():
        return "unknown"
    fields = _stat(about["pid"])
    if fields is None:
        return "gone" if Path("/proc/self/stat").exists() else _answers(about["pid"])
    if fields[0] in "ZX" or about.get("started") != fields[19]:  # dead and not yet buried, or another process with its number
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _answers(pid: int) -> Presence:
    """Systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "running"


class Pulse:
    """The counter of one process, in a file that it keeps open."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self.count = 0
        self.beat()

    def beat(self) -> None:
        """Written in place and of one length: whatever a reader sees, it is another text than before."""
        self.count += 1
        with suppress(OSError):  # a full disk or a lost server is no reason to die; others will believe we did
            os.pwrite(self.file, b"%016d\n" % self.count, 0)

    def close(self) -> None:
        os.close(self.file)


@contextmanager
def beating(pulse: Pulse, also: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Beat until the block ends, and do something else at each beat; then close it."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(BEAT):
            pulse.beat()
            also()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        pulse.close()


@dataclass
class Heard:
    """What a watcher knows of one counter."""

    text: bytes
    silent: float = 0.0  # his seconds without a change
    moved: bool = False  # whether he ever saw it change


class Watch:
    """A watcher's memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last: dict[Path, float] = {}
        self.heard: dict[Path, Heard] = {}

    def look(self, path: Path) -> Heard:
        """Look once more. A file that is not there (yet) is a text like any other."""
        try:
            text = path.read_bytes()
        except OSError:
            text = b""
        now = self.clock()
        gap = min(now - self.last.get(path, now), 2 * BEAT)
        self.last[path] = now
        known = self.heard.setdefault(path, Heard(text))
        if text != known.text:
            known.text, known.silent, known.moved = text, 0.0, True
        else:
            known.silent += gap
        return known
