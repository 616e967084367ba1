"""Clients of a network file system in one process: each thread is one, with delays, stale answers and lost replies. Seeded.

What is simulated is what such systems really do: directories and attributes are cached for a while (a client's own changes are seen at
once, opening a file asks the server), a directory is known by its handle and reached by it after somebody moved it, and a rename that the
server has done may be answered with "no such file", because the first reply was lost and the question asked again.
"""

import errno
import io
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REAL = {name: getattr(os, name) for name in ("stat", "listdir", "rename", "mkdir")}


@dataclass
class Client:
    """One machine's view."""

    rng: random.Random
    stale: float  # seconds an answer may be old
    delay: float
    lost_replies: float  # share of renames
    answers: dict[tuple[str, str], tuple[float, Any]] = field(default_factory=dict)
    handles: dict[str, int] = field(default_factory=dict)

    def wait(self) -> None:
        time.sleep(self.rng.uniform(0, self.delay))

    def ask(self, what: str, path: str) -> Any:
        """From the cache while it is fresh enough, refusals too."""
        known = self.answers.get((what, path))
        if known is None or known[0] < time.monotonic():
            self.wait()
            try:
                answer = REAL[what](path)
            except OSError as error:
                answer = error
            self.answers[what, path] = known = (time.monotonic() + self.rng.uniform(0, self.stale), answer)
        if isinstance(known[1], OSError):
            raise OSError(known[1].errno, known[1].strerror, path)
        return known[1]

    def changed(self, path: str) -> None:
        """By us: it and its directory are asked for anew, and what was not there in that directory."""
        there = os.path.dirname(path)
        for (what, known), (_, answer) in list(self.answers.items()):
            missing = isinstance(answer, OSError) and os.path.dirname(known) == there
            if known.startswith(path) or known == there or missing:
                del self.answers[what, known]

    def open(self, path: str) -> None:
        """The server is asked for a file that is known, not for one that is known not to be there."""
        self.wait()
        until, answer = self.answers.get(("stat", path), (0.0, None))
        if isinstance(answer, OSError) and until >= time.monotonic():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        self.answers.pop(("stat", path), None)

    def handle(self, directory: str) -> int:
        """By which the directory is reached from now on, wherever it is moved to."""
        if directory not in self.handles:
            self.handles[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        return self.handles[directory]

    def forget(self, directory: str) -> None:
        number = self.handles.pop(directory, None)
        if number is not None:
            os.close(number)

    def rename(self, source: str, target: str) -> None:
        self.wait()
        there = os.path.dirname(source)
        try:
            REAL["rename"](os.path.basename(source), target, src_dir_fd=self.handle(there))
        except FileNotFoundError:
            self.forget(there)
            raise
        finally:
            self.changed(source)
            self.changed(target)
            self.forget(source)
        if self.rng.random() < self.lost_replies:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)


LOCAL = threading.local()


@contextmanager
def as_client(seed: int, stale: float = 0.2, delay: float = 0.002, lost_replies: float = 0.05) -> Iterator[Client]:
    """This thread sees files as that client does."""
    LOCAL.client = Client(random.Random(seed), stale, delay, lost_replies)
    try:
        yield LOCAL.client
    finally:
        for directory in list(LOCAL.client.handles):
            LOCAL.client.forget(directory)
        LOCAL.client = None


@contextmanager
def network_files(home: Path) -> Iterator[None]:
    """Below `home`, for threads that are clients; everybody else sees the server's own files."""

    def client(path: Any) -> Client | None:
        mine = getattr(LOCAL, "client", None)
        return mine if mine is not None and isinstance(path, str | os.PathLike) and str(path).startswith(str(home)) else None

    def stat(path: Any, **more: Any) -> Any:
        mine = client(path)
        return REAL["stat"](path, **more) if mine is None or more.get("dir_fd") is not None else mine.ask("stat", str(path))

    def listdir(path: Any = ".") -> Any:
        mine = client(path)
        return REAL["listdir"](path) if mine is None else list(mine.ask("listdir", str(path)))

    def rename(source: Any, target: Any, **more: Any) -> None:
        mine = client(source)
        return REAL["rename"](source, target, **more) if mine is None else mine.rename(str(source), str(target))

    def mkdir(path: Any, *rest: Any, **more: Any) -> None:
        mine = client(path)
        if mine is not None:
            mine.wait()
        REAL["mkdir"](path, *rest, **more)
        if mine is not None:
            mine.changed(str(path))

    real_open = io.open

    def read(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        mine = client(path)
        if mine is not None and "r" in mode:
            mine.open(str(path))
        if mine is not None and "r" not in mode:
            mine.changed(str(path))
        return real_open(path, mode, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", read)
        for name, function in (("stat", stat), ("listdir", listdir), ("rename", rename), ("mkdir", mkdir)):
            patch.setattr(os, name, function)
        yield
