"""What Ray tells a driver about its processes, in one line each: its own texts fill a screen, whatever `log_to_driver` says."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LONGEST = 200  # characters


def brief(text: str) -> str:
    """The gist of a message of Ray's."""
    died = re.search(r"A worker died or was killed.*?Worker PID: (\d+)", text, re.DOTALL)
    if died:
        return f"a worker process (pid {died[1]}) died"
    words = " ".join(text.split())
    first = re.split(r"(?<=[.!?]) (?=[A-Z(])", words, maxsplit=1)[0]
    return first if len(first) <= LONGEST else first[: LONGEST - 3] + "..."


def _say(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """In place of Ray's function, with its arguments; to stderr, where what a command prints is not mixed with it."""
    for text in data["lines"]:
        if text.strip():
            print(f"Ray: {brief(text)}", file=sys.stderr, flush=True)


@contextmanager
def brief_messages() -> Iterator[None]:
    """As long as the block lasts. There is no setting for it: messages about dead workers do not go by `log_to_driver`."""
    from ray._private import worker

    private: Any = worker
    original = private.print_to_stdstream
    private.print_to_stdstream = _say
    try:
        yield
    finally:
        private.print_to_stdstream = original
