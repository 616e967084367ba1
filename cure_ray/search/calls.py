"""The calls of `cure-ray sweep` that share a directory: who they are, and which of them still work."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cure_ray.runs.pulse import BEAT, Heard, Pulse, Watch, beating, presence, this_process
from cure_ray.search.layout import SUBMISSIONS

FRESH, SILENCE = 3 * BEAT, 60.0  # seconds without a sign of life until a call may be dead, and until it counts as dead
State = Literal["alive", "dead", "unsure"]


class Calls:
    """What one observer knows of all calls. Nothing is written."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / SUBMISSIONS
        self.watch, self.lock = Watch(), threading.Lock()

    def __reduce__(self) -> tuple[type["Calls"], tuple[Path]]:
        """A copy in another process (Ray Tune keeps one) has heard nothing yet."""
        return Calls, (self.home.parent,)

    def _about(self, number: int) -> dict[str, Any] | None:
        """What a call said of itself; None if it has ended, or there is no such call."""
        try:
            about: dict[str, Any] = json.loads((self.home / f"{number:04d}.json").read_text())
        except (OSError, ValueError):
            return None
        return None if "ended" in about else about

    def _look(self, number: int) -> Heard:
        with self.lock:
            return self.watch.look(self.home / f"{number:04d}.pulse")

    def open(self) -> list[int]:
        """Calls that have not said that they ended."""
        numbers = sorted(int(p.stem) for p in self.home.glob("*.json") if p.stem.isdigit())
        return [n for n in numbers if self._about(n) is not None]

    def describe(self, number: int) -> str:
        about = self._about(number) or {}
        return f"process {about.get('pid', '?')} on {about.get('host', 'an unknown machine')}"

    def listen(self) -> None:
        """Once; somebody has to, about every beat, for silence to be counted."""
        for number in self.open():
            self._look(number)

    def listen_for(self, seconds: float) -> None:
        """Until every call of another machine was heard, or so long: whoever looks only once knows nothing of them."""
        until = time.monotonic() + seconds
        while any(self.state(n) == "unsure" for n in self.open()) and time.monotonic() < until:
            time.sleep(0.2)

    def state(self, number: int) -> State:
        """Dead: it ended, its process is gone, or it was silent for long. Unsure: not seen to live, and not silent for long enough."""
        about = self._about(number)
        here = "gone" if about is None else presence(about)
        if here == "gone":
            return "dead"
        heard = self._look(number)
        if heard.silent >= SILENCE:
            return "dead"
        return "alive" if here == "running" or (heard.moved and heard.silent < FRESH) else "unsure"


@dataclass(frozen=True)
class Submission:
    """One call at work."""

    directory: Path
    number: int
    calls: Calls


@contextmanager
def submission(directory: Path, what: Mapping[str, Any]) -> Iterator[Submission]:
    """Register this call, show that it is alive until it ends, and listen to the others."""
    me = {**this_process(), "since": time.time(), **what}
    number, home = 0, directory / SUBMISSIONS
    while True:
        path = home / f"{number:04d}.json"
        try:
            with path.open("x") as file:
                json.dump(me, file)
            break
        except FileExistsError:
            number += 1
    calls = Calls(directory)
    calls.listen()
    with beating(Pulse(path.with_suffix(".pulse")), calls.listen):
        try:
            yield Submission(directory, number, calls)
        finally:
            with suppress(OSError):
                path.write_text(json.dumps({**me, "ended": time.time()}))
