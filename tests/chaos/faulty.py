"""Work that dies, or meets a full disk, at the n-th change it makes to its directory: the same n, the same fault, every time.

Each piece of work runs in a process of its own, forked from one that has imported everything, and is the real thing in one process:
training, a search, a certification. What it does between two changes cannot be seen from outside, so the moments before each change are
all the moments there are to die at.
"""

import errno
import functools
import multiprocessing
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Kind = Literal["kill", "full", "none"]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
GROWING = {"open", "os.mkdir"}  # what a full disk refuses
CHANGING = {*GROWING, "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}
LARGE = ["cure_ray.cluster.trials.trial", "cure_ray.search.ledger", "cure_ray.runs.run", "cure_ray.results.store", "sklearn.datasets"]
LARGE += ["torch._dynamo", "torch.optim"]  # which optimisers import when they are first used
FINISHED, SENTENCE, WRONG = 0, 3, 4  # exit codes


def _watch(home: str, kind: Kind, at: int) -> Callable[[], int]:
    """Count the changes below `home`; let the fault happen at the right one. A disk that is full stays full."""
    changes = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal changes
        paths = [os.fsdecode(a) for a in args[:2] if isinstance(a, str | bytes | os.PathLike)]
        if event not in CHANGING or not any(path == home or path.startswith(f"{home}/") for path in paths):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & WRITING):
            return
        changes += 1
        if kind == "kill" and changes == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "full" and changes >= at and event in GROWING:
            raise OSError(errno.ENOSPC, "No space left on device", os.fsdecode(args[0]))

    sys.addaudithook(hook)
    return lambda: changes


def _child(work: Callable[[Path], None], home: Path, kind: Kind, at: int, log: Path) -> None:
    import torch

    from cure_ray.errors import UserError, storage_full

    torch.set_num_threads(1)
    changes = _watch(str(home), kind, at)
    try:
        work(home)
    except BaseException as error:
        sentence = isinstance(error, UserError) or storage_full(error)
        log.write_text(traceback.format_exc())
        os._exit(SENTENCE if sentence and kind == "full" else WRONG)
    log.write_text(str(changes()))
    os._exit(FINISHED)


def context() -> Any:
    """Children are forked from a server that has the modules and no threads."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["cure_ray.api.certify", "cure_ray.api.execution", *LARGE, "faulty"])
    return found


def attempt(work: Callable[[Path], None], home: Path, kind: Kind = "none", at: int = 0) -> int | None:
    """Run it once: how many changes it made if it came to its end, None if the fault ended it. Anything else is a failure."""
    log = home.with_name(f"{home.name}.log")
    process = context().Process(target=_child, args=(work, home, kind, at, log))
    process.start()
    process.join(300)
    assert process.exitcode is not None, f"it hangs after {kind} at change {at}"
    if process.exitcode == FINISHED:
        return int(log.read_text())
    expected = {"kill": -signal.SIGKILL, "full": SENTENCE}.get(kind)
    assert process.exitcode == expected, f"{kind} at change {at}: exit code {process.exitcode}\n{log.read_text() if log.exists() else ''}"
    return None


# ---------------------------------------------------------------- the work


def train(home: Path) -> None:
    from cure_ray.config import resolve
    from cure_ray.runs.run import train_run

    experiment = {
        "preset": "smoke",
        "dataset": {"train_samples": 128, "validation": 40},
        "network": {"width": 0.25},
        "training": {"method": "scratch", "epochs": 5, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
        "execution": {"keep_checkpoints": 2, "device": "cpu"},
    }
    train_run(resolve(experiment), home, resume=True, quiet=True)


SWEEP = {
    "name": "seeded",
    "base": {
        "preset": "smoke",
        "dataset": {"train_samples": 104, "validation": 40},
        "network": {"width": 0.25},
        "training": {"epochs": 2, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
        "execution": {"device": "cpu"},
    },
    "space": {"training.method": {"grid": ["max", "linf"]}, "training.lambda_inf": {"grid": [0.4, 0.8]}},
    "search": "grid",
    "samples": 4,
    "seeds": [0, 1],
    "early_stopping": {"factor": 2, "rungs": 1},
}


def search(home: Path) -> None:
    """What a call of `cure-ray sweep` does, its legs one after the other in this process instead of on Ray."""
    from cure_ray.cluster.trials.driver import Driver
    from cure_ray.cluster.trials.trial import run_leg
    from cure_ray.search import journal
    from cure_ray.search.calls import submission
    from cure_ray.search.layout import seed_run, trial_home
    from cure_ray.search.ledger import Ledger
    from cure_ray.search.records import mean
    from cure_ray.search.space import Sweep, experiment_at
    from cure_ray.search.study import claim

    # Half a minute of patience with a lock whose holder died is right, and too long for a test that kills so many of them.
    journal.JournalFileSymlinkLock = functools.partial(journal.JournalFileSymlinkLock, grace_period=3)  # type: ignore[misc,assignment]
    sweep = Sweep.model_validate(SWEEP)
    claim(home, sweep)
    with submission(home, {}) as me:
        ledger, driver = Ledger(sweep, me, lambda text: None), Driver(sweep, home, None)
        while (proposal := ledger.next()) is not None:
            place = trial_home(home, proposal.number, proposal.experiment.config_hash)
            for rung in range(proposal.rung, len(proposal.rungs)):
                values = []
                for seed in sweep.seeds:
                    experiment = experiment_at(sweep, proposal.point, proposal.number, seed)
                    config = {"gpus": 0, "term": proposal.term, "rungs": proposal.rungs}
                    values.append(run_leg(driver._leg(experiment, seed_run(place, seed), proposal.rungs[rung], config)).values)
                if not ledger.judged(proposal.number, rung, mean(values)):
                    break


def certify(home: Path) -> None:
    """Six shards: two checkpoints of the run that lies beside the results, three norms."""
    import cure_ray

    networks = sorted((home.parent / "network" / "checkpoints").iterdir())
    cure_ray.certify(networks, threats="linf=0.1,l2=0.5,l1=2", samples=40, stages="ibp,attack,crown", out=home, quiet=True)


# ---------------------------------------------------------------- faults of a disk, between two attempts


def tear_journal(home: Path, rng: random.Random) -> bool:
    """Half a line, as a writer leaves it that is killed in the midst of a write."""
    journal = home / "journal.log"
    if not journal.exists() or not journal.stat().st_size:
        return False
    line = rng.choice(journal.read_bytes().splitlines())
    with journal.open("ab") as file:
        file.write(line[: rng.randrange(1, len(line))])
    return True


def spoil_shard(home: Path, rng: random.Random) -> bool:
    """A bit flipped, a file cut short, lost, or doubled under another name."""
    found = sorted((home / "verdicts").glob("*.parquet"))
    if not found:
        return False
    victim, kind = rng.choice(found), rng.choice(["bit", "short", "lost", "doubled"])
    data = bytearray(victim.read_bytes())
    if kind == "bit":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
    elif kind == "short":
        victim.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "lost":
        victim.unlink()
    else:
        victim.with_name(f"copy-of-{victim.name}").write_bytes(data)
    return True


def lose_metrics(home: Path, rng: random.Random) -> bool:
    """The last line, or half of it: a crash of the machine may keep a checkpoint and lose what was written after it."""
    metrics = home / "metrics.jsonl"
    if not metrics.exists() or not metrics.stat().st_size:
        return False
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:-1]) + lines[-1][: rng.randrange(len(lines[-1]))])
    return True
