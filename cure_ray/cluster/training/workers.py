"""Parallel training on Ray Train: certified ranks and a natural rank, each in its process, and a reducer that merges their epochs.

A run has two phases. Until the radii are grown only the certified ranks exist: there is nothing to project yet, the natural rank
could help only by changing the arithmetic, and a GPU that waits for a third of the run is a GPU wasted. From the first epoch at full
radius (methods with gradient projection only) the placement group also holds one natural rank. The phases share a run directory,
which is the one `cure-ray train` writes in one process: same files, same bits. Workers own nothing that is not in its checkpoints.
"""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cure_ray.cluster.session import Session, require, session
from cure_ray.cluster.training.ranks import Phase, check_batch, phases, rank_need
from cure_ray.config import Experiment
from cure_ray.data.images import load_dataset
from cure_ray.errors import NoRoomError, UserError, storage_full
from cure_ray.runs.checkpoints import list_checkpoints
from cure_ray.runs.metrics import read_metrics
from cure_ray.runs.progress import TrainingReporter
from cure_ray.runs.run import RunResult, StoppedError, check_disk, check_own_network, claim_directory, newest_intact, prune

SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's list of checkpoints; ours is the directory itself


@dataclass(frozen=True)
class FailurePolicy:
    """What happens when a process of a run dies.

    Any death (a rank, the reducer, a node, an out-of-memory kill) ends the attempt for all ranks: they are in the middle of an epoch
    that only makes sense together. Ray Train starts the group again, on whatever nodes are alive, and every rank goes on from the last
    checkpoint; an epoch is a function of (weights, Adam, seed, number), so the result is the same to the bit. The cost is at most one
    epoch and about half a minute. `max_failures` bounds it, because a fault that comes back every time (memory, a broken node) must
    end in a message; it counts over a whole phase. Losing a node to preemption does not count: that is the cluster's normal life.
    Divergence is not a failure of a process: the same bits would diverge again, so the run ends with a message and is not restarted.
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


def _fit(
    experiment: Experiment, directory: Path, data_dir: str | None, phase: Phase, last: int, where: Session, policy: FailurePolicy
) -> None:
    """One phase. Raises where its ranks ended early and a new attempt would not help."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from cure_ray.cluster.training.rank import OwnProcessGroup, Plan, rank_loop

    class Trainer(TorchTrainer):
        """Ray's own handler of SIGINT ends the process without a word."""

        def _register_sigint_handler(self, controller: Any) -> None:
            def stop(number: int, frame: object) -> None:
                controller.abort.remote()
                raise KeyboardInterrupt

            signal.signal(signal.SIGINT, stop)

    need = rank_need(experiment, phase, where.gpus)
    require(need, f"{experiment.name} ({phase.ct_workers} certified and {int(phase.natural)} natural ranks)")
    device = "cpu" if not need.gpus and experiment.execution.device == "auto" else experiment.execution.device
    # Ray Train resumes silently from its own list; the directory may have changed since (a serial run, a pruned checkpoint).
    (directory / "checkpoints" / SNAPSHOT).unlink(missing_ok=True)
    prune(directory, experiment.execution.keep_checkpoints)
    # NCCL refuses two ranks on one GPU; gloo carries CUDA tensors too, and only data-parallel ranks talk at all.
    backend = "nccl" if need.gpus >= 1 and phase.ct_workers > 1 else "gloo"
    ranks: Any = rank_loop  # what it returns, Ray's types do not know yet
    result: Any = Trainer(
        ranks,
        train_loop_config={"plan": Plan(experiment, directory, data_dir, device, backend, phase, last)},
        torch_config=OwnProcessGroup(),
        scaling_config=ScalingConfig(
            num_workers=phase.workers, use_gpu=need.gpus > 0, resources_per_worker=need.resources(), placement_strategy="PACK"
        ),
        run_config=RunConfig(
            name="checkpoints",  # with storage_path: DIR/checkpoints/epoch_NNNN, where a run in one process puts them
            storage_path=str(directory),
            failure_config=FailureConfig(max_failures=policy.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=experiment.execution.keep_checkpoints),
        ),
    ).fit()
    if result.return_value:
        raise NoRoomError(result.return_value)


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
    until: int | None = None,
    policy: FailurePolicy = FailurePolicy(),  # noqa: B008 - frozen
) -> RunResult:
    """`cure_ray.runs.run.train_run` on Ray Train: the same directory and, on CPUs with one thread and one certified rank, the same bits."""
    from cure_ray.cluster.training.rank import DIVERGED, PEOPLE

    check_batch(experiment)
    directory = directory.absolute()
    data_dir = data_dir or os.environ.get("CURE_RAY_DATA")
    data = str(Path(data_dir).absolute()) if data_dir else None
    check_own_network(experiment)
    claim_directory(directory, experiment, resume)
    check_disk(directory, experiment)
    load_dataset(experiment.dataset, "train", data)  # fetched once, and missing data is said before anything starts
    (directory / DIVERGED).unlink(missing_ok=True)
    end = min(until or experiment.training.epochs, experiment.training.epochs)

    def finished() -> int:
        newest = newest_intact(directory)
        return newest.epoch if newest else 0

    with session(address) as where, _following(directory, experiment.training.epochs, quiet), _sigterm_is_sigint():
        try:
            for phase in phases(experiment):
                last = min(phase.last, end)
                if finished() < last and not (directory / DIVERGED).exists():
                    _fit(experiment, directory, data, phase, last, where, policy)
        except (KeyboardInterrupt, SystemExit):
            raise StoppedError(
                f"stopped after epoch {finished()}, which is saved in {directory}.\n"
                f"Continue with: cure-ray train {directory / 'experiment.yaml'} --out {directory} --resume"
            ) from None
        except Exception as error:
            ours = _user_error(error, directory)
            if ours is not None:
                raise ours from None
            raise RuntimeError(
                f"training on Ray failed more than {policy.max_failures} times; the last checkpoint in {directory} is epoch {finished()}"
            ) from error
        finally:
            shutil.rmtree(directory / PEOPLE, ignore_errors=True)
    if (directory / DIVERGED).exists():
        raise UserError(
            f"training stopped: {(directory / DIVERGED).read_text()}. The last good checkpoint is epoch {finished()} in {directory}. "
            "A lower training.lr, a longer training.anneal_epochs or training.grad_clip usually helps."
        )
    prune(directory, experiment.execution.keep_checkpoints)
    rows = read_metrics(directory)
    return RunResult(directory, list_checkpoints(directory)[-1], finished(), rows[-1] if rows else {})
