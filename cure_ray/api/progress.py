"""What a person sees while certification runs."""

import sys
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """A bar with the samples each stage decided and an ETA on a terminal; elsewhere one plain line per half minute."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.quiet, self.resumed = total, quiet, 0
        self.decided: Counter[str] = Counter()
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.task: Any = None
        self.started = self.spoken = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def start(self, resumed: int) -> None:
        self.resumed = resumed
        if resumed and not self.quiet:
            self.console.print(f"{resumed} of {self.total} verdicts are there already")
        if self.console.is_terminal and not self.quiet:
            self.bar = Progress(
                TextColumn("certifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[by]}"),
                console=self.console, transient=True,
            )  # fmt: skip
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, completed=resumed, by="")

    def __call__(self, stage: str, decided: int) -> None:
        self.decided[stage] += decided
        by = ", ".join(f"{s} {n}" for s, n in self.decided.items() if n)
        seen = sum(self.decided.values())
        if self.bar is not None:
            self.bar.update(self.task, completed=min(self.total, self.resumed + seen), by=by)
        elif not self.quiet and time.monotonic() - self.spoken > 30:
            self.spoken = time.monotonic()
            left = (self.total - self.resumed - seen) * (self.spoken - self.started) / max(seen, 1)
            self.console.print(f"decided {self.resumed + seen} of {self.total} ({by}); about {left / 60:.0f} min left")
