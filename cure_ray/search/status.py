"""Sweeps and runs in words, read from their directories alone: works from another shell, and without Ray."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from cure_ray.config import load_experiment
from cure_ray.errors import UserError
from cure_ray.runs.directory import how_to_continue, list_checkpoints
from cure_ray.runs.lease import PULSE, at_work, holder, workers
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.pulse import Watch, presence
from cure_ray.search.calls import FRESH, Calls
from cure_ray.search.halving import front
from cure_ray.search.layout import SWEEP, trial_runs
from cure_ray.search.outlook import duration, epochs_of, seconds_left, sweep_left
from cure_ray.search.space import Sweep, load_sweep
from cure_ray.search.study import read_study
from cure_ray.search.trials import BOUND, FAILED, OWNER, POINT, VALUES, meets


def describe_directory(directory: Path) -> str:
    """A sweep's or a run's state in a few lines. Only reads: it may be somebody else's directory."""
    try:
        return _describe(directory)
    except PermissionError as error:
        raise UserError(f"{error.filename or directory} may not be read by you: ask its owner, or look at a copy") from None


def _describe(directory: Path) -> str:
    if (directory / SWEEP).is_file():
        return _sweep(directory)
    if (directory / "experiment.yaml").is_file():
        return "\n".join(_run(directory))
    what = "holds neither" if directory.is_dir() else "does not exist, so it holds neither"
    raise UserError(f"{directory} {what} a sweep (sweep.yaml) nor a run (experiment.yaml)")


def _people(run: Path, watch: Watch) -> str:
    """Who works on a run: its ranks, or the process that trains it alone. Processes of this machine that are gone are left out; of
    others only the holder's pulse tells, which `watch` has looked at before."""
    found = holder(run)
    if found is None or found.released:
        return ""
    shown, unheard = [], presence(found.about) == "unknown" and not watch.look(found.desk / PULSE).moved
    for name, about in workers(found).items():
        if presence(about) != "gone":
            shown.append(f"{name} on {about['host']} (pid {about['pid']}{', GPU ' + str(about['gpus']) if about.get('gpus') else ''})")
    return ", ".join(shown) + (f", no sign of life for {FRESH:.0f} s" if shown and unheard else "")


def _listen(runs: Iterable[Path]) -> Watch:
    """Look at the pulses of holders on other machines, and wait until those that live must have moved."""
    watch = Watch()
    found = [now for run in runs if (now := holder(run)) is not None and not now.released and presence(now.about) == "unknown"]
    until = time.monotonic() + FRESH
    while time.monotonic() < until:
        silent = [now for now in found if not watch.look(now.desk / PULSE).moved]  # look at every one of them
        if not silent:
            break
        time.sleep(0.2)
    return watch


def _run(run: Path) -> list[str]:
    experiment = load_experiment(run / "experiment.yaml")
    rows, epochs = read_metrics(run), experiment.training.epochs
    done = int(rows[-1]["epoch"]) if rows else 0
    lines = [f"{experiment.name}: epoch {done} of {epochs}"]
    if rows:
        lines[0] += f", clean {100 * rows[-1].get('clean', 0):.1f} %"
    if rows and done < epochs:
        lines.append(f"about {duration(seconds_left(rows, epochs))} left at the pace of its last epochs")
    now = holder(run)
    if now is not None and at_work(now):
        lines.append(f"running: {_people(run, _listen([run])) or f'none of its processes just now; {now.called()} starts them again'}")
    elif done < epochs:
        lines.append(f"nobody at work. {how_to_continue(run)}")
    saved = list_checkpoints(run)
    lines.append(f"last checkpoint: {saved[-1]}" if saved else "no checkpoint yet")
    return lines


def _sweep(directory: Path) -> str:
    sweep = load_sweep(directory / SWEEP)
    trials = [t for t in read_study(directory, sweep).get_trials(deepcopy=False) if "duplicate_of" not in t.user_attrs]
    states = Counter(t.state for t in trials)
    calls = Calls(directory)
    calls.listen_for(FRESH)
    alive = [n for n in calls.open() if calls.state(n) == "alive"]
    silent = [n for n in calls.open() if calls.state(n) == "unsure"]
    bounded = sum(BOUND in t.user_attrs for t in trials)
    early = f"stopped early{f' ({bounded} by bound: they cannot win)' if bounded else ''}"
    words = {TrialState.COMPLETE: "finished", TrialState.PRUNED: early, TrialState.FAIL: "failed", TrialState.WAITING: "waiting"}
    counts = ", ".join(f"{states[s]} {word}" for s, word in words.items() if states[s])
    running = [t for t in trials if t.state == TrialState.RUNNING]
    owned = [t for t in running if t.user_attrs.get(OWNER, -1) in alive]
    budget = f" of {sweep.trials}" if sweep.trials else ""
    lines = [f"sweep {sweep.name}: {len(trials) - states[TrialState.WAITING]}{budget} trials; {counts or 'none finished'}"]
    lines[0] += f", {len(owned)} running" if owned else ""
    lines[0] += f", {len(running) - len(owned)} interrupted (the next call continues them)" if len(running) > len(owned) else ""
    again = f"nobody at work; continue: cure-ray sweep {directory / SWEEP} --out {directory}"
    lines.append(f"{len(alive)} call{'s' if len(alive) != 1 else ''} at work" if alive else again)
    lines += [f"call {n} ({calls.describe(n)}): no sign of life for {FRESH:.0f} s" for n in silent]
    lines += _best(trials, sweep)
    watch = _listen(run for trial in owned for run in trial_runs(directory, trial.number))
    for trial in owned:
        lines += _running(directory, trial, watch)
    lines += [f"trial {t.number} failed: {t.user_attrs[FAILED]}" for t in trials if FAILED in t.user_attrs][-3:]
    left = sweep_left(sweep, trials, owned, directory)
    return "\n".join([*lines, *([f"about {duration(left)} left"] if alive and left is not None else [])])


def _best(trials: Sequence[FrozenTrial], sweep: Sweep) -> list[str]:
    """The Pareto front of several objectives, else the best three; and how many meet the constraints."""
    done = [t for t in trials if t.state == TrialState.COMPLETE]
    met = [t for t in done if meets(t)]
    lines = []
    if sweep.at_least and done:
        wanted = ", ".join(f"{name} {bound:g}" for name, bound in sweep.at_least.items())
        lines.append(f"{len(met)} of {len(done)} finished trials meet at_least ({wanted})")
    ahead = front([tuple(t.values) for t in met])
    shown = sorted((t for t in met or done if len(sweep.objectives) == 1 or tuple(t.values) in ahead), key=lambda t: [-v for v in t.values])
    for trial in shown[:3] if len(sweep.objectives) == 1 else shown:
        values = ", ".join(f"{name} {100 * value:.1f} %" for name, value in zip(sweep.objectives, trial.values, strict=True))
        clean = trial.user_attrs.get(VALUES, {}).get("clean")
        extra = f", clean {100 * clean:.1f} %" if clean is not None and "clean" not in sweep.objectives else ""
        word = "front" if len(sweep.objectives) > 1 else "best" if trial is shown[0] else "then"
        lines.append(f"{word}: trial {trial.number}: {values}{extra}  {trial.user_attrs.get(POINT)}")
    return lines


def _running(directory: Path, trial: FrozenTrial, watch: Watch) -> list[str]:
    lines = []
    for run in trial_runs(directory, trial.number):
        epochs, rows = epochs_of(run)
        if epochs:
            done, people = int(rows[-1]["epoch"]) if rows else 0, _people(run, watch)
            lines.append(f"trial {trial.number} {run.name}: epoch {done} of {epochs}{'; ' + people if people else ''}")
    return lines or [f"trial {trial.number}: waiting for resources"]
