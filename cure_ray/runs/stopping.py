"""Signals: SIGINT and SIGTERM end work between two steps, so that nothing is torn."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(Exception):
    """SIGINT or SIGTERM arrived."""


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], None]]:
    """Turns SIGINT and SIGTERM into StoppedError at the next batch, so that nothing is torn."""
    arrived: list[str] = []

    def note(number: int, frame: object) -> None:
        if arrived:  # a second signal means it
            raise KeyboardInterrupt
        arrived.append(signal.Signals(number).name)

    def check() -> None:
        if arrived:
            raise StoppedError(arrived[0])

    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: the caller's signals are not ours
        pass
    try:
        yield check
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
