"""Parallel training on Ray Train: certified ranks and a natural rank, each in its process, and a reducer that merges their epochs.

A run has two phases. Until the radii are grown only the certified ranks exist: there is nothing to project yet, the natural rank
could help only by changing the arithmetic, and a GPU that waits for a third of the run is a GPU wasted. From the first epoch at full
radius (methods with gradient projection only) the placement group also holds one natural rank. The phases share a run directory,
which is the one `cure-ray train` writes in one process: same files, same bits. Workers own nothing that is not in its checkpoints.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cure_ray.cluster.session import Session, require, session
from cure_ray.cluster.training.ranks import check_batch, phases, rank_need
from cure_ray.config import Experiment
from cure_ray.data.images import load_dataset
from cure_ray.errors import NoRoomError, UserError, storage_full
from cure_ray.runs.checkpoints import newest_intact
from cure_ray.runs.directory import CHECKPOINTS
from cure_ray.runs.lease import succeed
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.progress import TrainingReporter
from cure_ray.runs.record import WHOLE, Record, RunResult, Stretch, diverged, open_run, stopped

if TYPE_CHECKING:
    from cure_ray.cluster.training.rank import Plan

RAY = ".ray"  # DIR/.ray/: what Ray Train notes for itself
SNAPSHOT = "checkpoint_manager_snapshot.json"  # its list of checkpoints, as versions up to 0.2 left it among ours


@dataclass(frozen=True)
class FailurePolicy:
    """What happens when a process of a run dies.

    Any death (a rank, the reducer, a node, an out-of-memory kill) ends the attempt for all ranks: they are in the middle of an epoch
    that only makes sense together. Ray Train starts the group again, on whatever nodes are alive, and every rank goes on from the last
    checkpoint; an epoch is a function of (weights, Adam, seed, number), so the result is the same to the bit. The cost is at most one
    epoch and about half a minute. `max_failures` bounds it, because a fault that comes back every time (memory, a broken node) must
    end in a message; it counts over a whole phase. Losing a node to preemption does not count: that is the cluster's normal life.
    Divergence is not a failure of a process: the same bits would diverge again, so the run ends with a message and is not restarted.
    Nor is a run that another call has taken over: an attempt whose leader does not get the lease ends at once.
    """

    max_failures: int = 8


@contextmanager
def _following(directory: Path, epochs: int, quiet: bool) -> Iterator[None]:
    """Prints epochs as the leader writes them; the leader's own output stays on its node."""
    done = threading.Event()

    def follow() -> None:
        with TrainingReporter(epochs, quiet) as reporter:
            rows = read_metrics(directory)
            seen = rows[-1]["epoch"] if rows else 0
            reporter.resume(seen)
            while True:
                finished = done.wait(0.5)
                for row in read_metrics(directory):
                    if row["epoch"] > seen:
                        seen = row["epoch"]
                        reporter.epoch(seen, row)
                if finished:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5)


@contextmanager
def _sigterm_is_sigint() -> Iterator[None]:
    """Batch systems send SIGTERM; both end in KeyboardInterrupt here, and the caller gets its handlers back."""
    try:
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    except ValueError:  # not the main thread: the caller's signals are not ours
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _fit(plan: "Plan", where: Session, policy: FailurePolicy) -> None:
    """One phase. Raises where its ranks ended early and a new attempt would not help."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from cure_ray.cluster.training.rank import OwnProcessGroup, rank_loop

    class Trainer(TorchTrainer):
        """Ray's own handler of SIGINT ends the process without a word."""

        def _register_sigint_handler(self, controller: Any) -> None:
            def stop(number: int, frame: object) -> None:
                controller.abort.remote()
                raise KeyboardInterrupt

            signal.signal(signal.SIGINT, stop)

    experiment, phase = plan.experiment, plan.phase
    need = rank_need(experiment, phase, where.gpus)
    require(need, f"{experiment.name} ({phase.ct_workers} certified and {int(phase.natural)} natural ranks)")
    device = "cpu" if not need.gpus and experiment.execution.device == "auto" else experiment.execution.device
    # NCCL refuses two ranks on one GPU; gloo carries CUDA tensors too, and only data-parallel ranks talk at all.
    backend = "nccl" if need.gpus >= 1 and phase.ct_workers > 1 else "gloo"
    ranks: Any = rank_loop  # what it returns, Ray's types do not know yet
    result: Any = Trainer(
        ranks,
        train_loop_config={"plan": replace(plan, device=device, backend=backend)},
        torch_config=OwnProcessGroup(),
        scaling_config=ScalingConfig(
            num_workers=phase.workers, use_gpu=need.gpus > 0, resources_per_worker=need.resources(), placement_strategy="PACK"
        ),
        # Ray's own notes; checkpoints are the leader's. It checks that every node sees the directory.
        run_config=RunConfig(name=RAY, storage_path=str(plan.directory), failure_config=FailureConfig(max_failures=policy.max_failures)),
    ).fit()
    if result.return_value is not None:
        raise result.return_value.error


def _user_error(error: BaseException, directory: Path) -> UserError | None:
    """Our own sentence inside whatever Ray wrapped around it."""
    causes = [error, error.__cause__, getattr(error, "controller_failure", None), *getattr(error, "worker_failures", {}).values()]
    for cause in causes:
        inner = getattr(cause, "cause", None)
        for candidate in (cause, inner, getattr(cause, "__cause__", None)):
            if isinstance(candidate, UserError):
                return type(candidate)(str(candidate))
            if isinstance(candidate, BaseException) and storage_full(candidate):
                return NoRoomError(
                    f"the disk of {directory} is full; what its checkpoints hold is intact. Free some space and continue with --resume."
                )
    return None


def train_parallel(
    experiment: Experiment,
    directory: Path,
    resume: bool = False,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    address: str | None = None,
    stretch: Stretch = WHOLE,
    policy: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
) -> RunResult:
    """`cure_ray.runs.run.train_run` on Ray Train: the same directory and, on CPUs with one thread and one certified rank, the same bits."""
    from cure_ray.cluster.training.rank import DIVERGED, Plan

    check_batch(experiment)
    directory = directory.absolute()
    data_dir = data_dir or os.environ.get("CURE_RAY_DATA")
    data = str(Path(data_dir).absolute()) if data_dir else None
    with open_run(experiment, directory, resume, stretch.term) as run:
        load_dataset(experiment.dataset, "train", data)  # fetched once, and missing data is said before anything starts
        for old in (DIVERGED, RAY, f"{CHECKPOINTS}/{SNAPSHOT}"):
            run.lease.remove(directory / old)
        call = run.lease.call
        with session(address) as where, _following(directory, experiment.training.epochs, quiet), _sigterm_is_sigint():
            try:
                for phase in phases(experiment):
                    last = min(phase.last, stretch.end(experiment))
                    if _saved(directory) < last and not (directory / DIVERGED).exists():
                        _fit(Plan(experiment, directory, data, "", "", phase, last, call), where, policy)
            except (KeyboardInterrupt, SystemExit):
                raise stopped(directory, "a signal", _saved(directory)) from None
            except Exception as error:
                ours = _user_error(error, directory)
                if ours is not None:
                    raise ours from None
                raise RuntimeError(
                    f"training on Ray failed more than {policy.max_failures} times; the last epoch in {directory} is {_saved(directory)}"
                ) from error
        with succeed(directory, call) as lease:
            if (directory / DIVERGED).exists():
                raise diverged(directory, (directory / DIVERGED).read_text())
            lease.remove(directory / RAY)
            record = Record(experiment, directory, lease, rows=read_metrics(directory))
            record.prune()
            return record.result(_saved(directory))


def _saved(directory: Path) -> int:
    newest = newest_intact(directory)
    return newest.epoch if newest else 0
