"""What a person sees while certification runs."""

import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from cure_ray.certification.pace import Pace, Watcher

LINE_SECONDS = 30.0
BAR = 20  # characters


class _Left(ProgressColumn):
    """The time left, which goes by between decisions too."""

    def __init__(self, reporter: "Reporter") -> None:
        super().__init__()
        self.reporter = reporter

    def render(self, task: Task) -> Text:
        return Text(self.reporter.left())


class _Stages(ProgressColumn):
    """What each stage decided, as far as a narrow terminal has room beside what matters more."""

    def __init__(self, reporter: "Reporter") -> None:
        super().__init__()
        self.reporter = reporter

    def render(self, task: Task) -> Text:
        counts = len(str(self.reporter.total)) * 2 + 1
        taken = len("certifying") + BAR + counts + len(self.reporter.left()) + 4  # and the gaps
        text = Text(self.reporter.by(), no_wrap=True)
        text.truncate(max(0, self.reporter.console.width - taken), overflow="ellipsis")
        return text


def remark(lines: Iterable[str], quiet: bool) -> None:
    """What a person should know before it begins."""
    for line in () if quiet else lines:
        print(f"note: {line}", file=sys.stderr)


class Reporter(Watcher):
    """A bar with the samples each stage decided and the time left on a terminal; elsewhere one plain line per half minute."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.quiet, self.resumed = total, quiet, 0
        self.decided: Counter[str] = Counter()
        self.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.task: Any = None
        self.pace: Pace | None = None
        self.spoken = time.monotonic()

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
                TextColumn("certifying"), BarColumn(BAR), MofNCompleteColumn(), _Left(self), _Stages(self),
                console=self.console, transient=True,
            )  # fmt: skip
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, completed=resumed)

    def begin(self, pace: Pace) -> None:
        self.pace = pace

    def left(self) -> str:
        seconds = self.pace.seconds_left_now() if self.pace is not None else None
        if seconds is None:
            return ""
        return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"

    def by(self) -> str:
        return ", ".join(f"{s} {n}" for s, n in self.decided.items() if n)

    def __call__(self, stage: str, decided: int) -> None:
        self.decided[stage] += decided
        seen = self.resumed + sum(self.decided.values())
        if self.bar is not None:
            self.bar.update(self.task, completed=min(self.total, seen))
        elif not self.quiet and time.monotonic() - self.spoken > LINE_SECONDS:
            self.spoken, left = time.monotonic(), self.left()
            self.console.print(f"decided {seen} of {self.total} ({self.by()})" + (f"; {left}" if left else ""))
