"""How far a sweep at work is, and how long it may still take: for `status`, and for the line a minute of a call."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from optuna.trial import FrozenTrial, TrialState

from cure_ray.config import load_experiment
from cure_ray.errors import UserError
from cure_ray.runs.metrics import read_metrics
from cure_ray.search.layout import trial_runs
from cure_ray.search.ledger import Ledger
from cure_ray.search.ranking import ranked
from cure_ray.search.space import Sweep
from cure_ray.search.trials import OWNER, TERM

EVERY = 60.0  # seconds between two lines
SHOWN = 4  # trials that are named one by one
RECENT = 30  # finished trials that tell how long one takes
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def seconds_left(rows: Sequence[dict[str, float]], epochs: int) -> float:
    """Of a training, at the pace of its last epochs."""
    recent = [row["epoch_seconds"] for row in rows[-3:] if "epoch_seconds" in row]
    return (epochs - rows[-1]["epoch"]) * sum(recent) / max(1, len(recent))


def seconds_a_trial(trials: Sequence[FrozenTrial]) -> float | None:
    """What lately finished trials took on average. Those that changed hands, or slept with their machine, say nothing about it."""
    ended = [t for t in trials if t.state in ENDED and t.duration is not None and t.user_attrs.get(TERM, 1) == 1]
    times = [s for t in ended[-RECENT:] if t.duration is not None and (s := t.duration.total_seconds()) >= 0]
    usual = [s for s in times if s <= 5 * median(times)]
    return sum(usual) / len(usual) if usual else None


def sweep_left(sweep: Sweep, trials: Sequence[FrozenTrial], running: Sequence[FrozenTrial], directory: Path) -> float | None:
    """Seconds, from how long finished trials took (before there is one: the pace of epochs) and how many run at once."""
    if not running:
        return None
    each = seconds_a_trial(trials)
    if each is None:
        paces = [pace for t in running for run in trial_runs(directory, t.number) if (pace := _by_epochs(run)) is not None]
        if not paces:
            return None
        current, each = max(left for left, _ in paces), max(whole for _, whole in paces)
    else:
        now = time.time()
        current = max([each - (now - t.datetime_start.timestamp()) for t in running if t.datetime_start], default=0.0)
    waiting = sum(t.state == TrialState.WAITING for t in trials)
    unstarted = max(waiting, (sweep.trials or 0) - (len(trials) - waiting))
    return min(max(current, 0.0), each) + each * unstarted / len(running)


def _by_epochs(run: Path) -> tuple[float, float] | None:
    """What is left of a training, and what it takes altogether, if it goes to its end."""
    epochs, rows = epochs_of(run)
    if not rows:
        return None
    left = seconds_left(rows, epochs)
    return left, left + sum(row.get("epoch_seconds", 0.0) for row in rows)


def epochs_of(run: Path) -> tuple[int, list[dict[str, float]]]:
    """How many epochs a run has altogether, and the metrics of those it has finished."""
    if not (run / "experiment.yaml").is_file():
        return 0, []
    return load_experiment(run / "experiment.yaml").training.epochs, read_metrics(run)


def _where(directory: Path, numbers: Sequence[int]) -> str:
    """The epochs of running trials: of few one by one (the slowest seed of each), of many their range."""
    found = {}
    for number in numbers:
        runs = [known for run in trial_runs(directory, number) if (known := epochs_of(run))[0]]  # others are just being made
        if runs:
            found[number] = min((int(rows[-1]["epoch"]) if rows else 0, epochs) for epochs, rows in runs)
    if not found:
        return ""
    if len(numbers) > SHOWN:
        done = [epoch for epoch, _ in found.values()]
        return f" (epochs {min(done)} to {max(done)} of {max(epochs for _, epochs in found.values())})"
    return " (" + ", ".join(f"trial {number}: epoch {epoch} of {epochs}" for number, (epoch, epochs) in found.items()) + ")"


def outlook(ledger: Ledger) -> str:
    """A sweep at work in one line."""
    study, sweep = ledger.study, ledger.sweep
    trials = [t for t in study.get_trials(deepcopy=False) if "duplicate_of" not in t.user_attrs]
    running = [t for t in trials if t.state == TrialState.RUNNING]
    alive = {owner for owner in {t.user_attrs.get(OWNER, -1) for t in running} if ledger.calls.state(owner) == "alive"}
    running = [t for t in running if t.user_attrs.get(OWNER, -1) in alive]
    here = sorted(ledger.live)
    parts = [f"{len(here)} trial{'s' if len(here) != 1 else ''} running{_where(ledger.directory, here)}"]
    if len(running) > len(here):
        parts.append(f"{len(running) - len(here)} in other calls")
    over = sum(t.state.is_finished() for t in trials)
    budget = sweep.trials or (len(trials) if sweep.search == "grid" else None)
    parts.append(f"{over} of {budget} done" if budget else f"{over} done")
    best = ranked(study)[:1]
    for trial in best:
        values = ", ".join(f"{name} {100 * value:.1f} %" for name, value in zip(sweep.objectives, trial.values, strict=True))
        parts.append(f"best so far {values} (trial {trial.number})")
    left = sweep_left(sweep, trials, running, ledger.directory)
    hours = ledger.deadline - time.monotonic()
    if left is not None:
        parts.append(f"about {duration(left)} left")
    elif hours < float("inf"):
        parts.append(f"new trials for {duration(max(0.0, hours))}")
    return "; ".join(parts)


class Minute:
    """Says how the sweep stands, once a minute however often it is called."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self.ledger, self.clock = ledger, clock
        self.next = clock() + EVERY

    def __call__(self) -> None:
        if self.clock() >= self.next:
            with suppress(OSError, UserError):  # a file server that is away for a moment must not end a sweep over a line of news
                self.ledger.say(outlook(self.ledger))
            self.next = self.clock() + EVERY  # after a suspension one line, not one for every minute of it
