"""What a person sees while something runs: a live line on a terminal, one plain line per epoch elsewhere."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def epoch_line(epoch: int, epochs: int, metrics: Mapping[str, Any]) -> str:
    """One epoch in one line."""
    parts = [f"epoch {epoch}/{epochs}", f"eps {100 * metrics['rho']:.0f} %", f"loss {metrics['loss']:.3f}"]
    for name, label in (("clean", "clean"), ("ibp_linf", "ibp linf"), ("ibp_l2", "l2"), ("ibp_l1", "l1")):
        if name in metrics:
            parts.append(f"{label} {100 * metrics[name]:.1f}")
    for name, label in (("gamma_share", "gamma"), ("cosine_mean", "cos")):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:.2f}")
    return "  ".join([*parts, f"{metrics['epoch_seconds']:.1f} s"])


class TrainingReporter:
    """Progress of a training run. On a terminal a bar follows the batches; otherwise only whole epochs are printed."""

    def __init__(self, epochs: int, quiet: bool = False) -> None:
        self.epochs, self.quiet = epochs, quiet
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        self.task: Any = None
        self.started = time.perf_counter()

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[batch]}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.epochs, batch="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def resume(self, epoch: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=epoch)

    def batch(self, done: int, total: int) -> None:
        if self.bar is not None and (done == total or done % 10 == 0):
            self.bar.update(self.task, batch=f"batch {done}/{total}")

    def epoch(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=epoch, description=f"epoch {epoch + 1}/{self.epochs}")
        if not self.quiet:
            self.console.print(epoch_line(epoch, self.epochs, metrics))
            sys.stdout.flush()
