"""A run that this process may write: where it goes on from, its epochs as they end, and what is said when it ends before its time.

Both ways of training use it, in one process and on Ray Train: same files, same bits, same sentences.
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cure_ray.config import Experiment
from cure_ray.data.images import Images, load_dataset
from cure_ray.errors import NoRoomError, UserError, storage_full
from cure_ray.networks.build import new_network
from cure_ray.runs.checkpoints import (
    Checkpoint,
    checkpoint_bytes,
    load_checkpoint,
    load_weights,
    newest_intact,
    versions,
    write_checkpoint,
)
from cure_ray.runs.directory import ABOUT, CHECKPOINTS, cannot_write, checkpoint_at, claim_directory, how_to_continue, list_checkpoints
from cure_ray.runs.hardware import hardware
from cure_ray.runs.lease import Lease, take, take_for
from cure_ray.runs.metrics import METRICS, read_metrics
from cure_ray.runs.stopping import StoppedError
from cure_ray.training.epochs import Learner
from cure_ray.training.evaluation import evaluate
from cure_ray.training.loop import Progress, natural_learner, place, prefers_channels_last, snapshot, start


@dataclass(frozen=True)
class Stretch:
    """The part of a run that a search orders: up to this epoch, in the name of the trial's present owner (`cure_ray.runs.lease`)."""

    until: int | None = None
    term: int | None = None

    def end(self, experiment: Experiment) -> int:
        return min(self.until or experiment.training.epochs, experiment.training.epochs)


WHOLE = Stretch()


@dataclass(frozen=True)
class RunResult:
    directory: Path
    checkpoint: Path
    epoch: int
    metrics: dict[str, Any]


@dataclass
class Record:
    """The run of an experiment in a directory, under a lease."""

    experiment: Experiment
    directory: Path
    lease: Lease
    extra: dict[str, Any] = field(default_factory=dict)  # goes into every checkpoint
    rows: list[dict[str, Any]] = field(default_factory=list)
    start: Checkpoint | None = None

    def resume(self) -> Checkpoint | None:
        """Where to go on from; metrics of epochs that will run again are forgotten, one that was not written yet is."""
        for half in (self.directory / CHECKPOINTS).glob(".epoch_*.partial"):  # of versions up to 0.2, killed while saving
            self.lease.remove(half)
        found = self.start = newest_intact(self.directory)
        if found is not None:
            known = {row["epoch"]: row for row in read_metrics(self.directory) if row["epoch"] <= found.epoch}
            self.rows = list({**known, found.epoch: known.get(found.epoch, found.meta["metrics"])}.values())
        if self.rows or (self.directory / METRICS).exists():
            with self._room("its metrics"):
                self._write_rows()
        return found

    def describe(self, device: torch.device, **more: Any) -> None:
        about = {"config_hash": self.experiment.config_hash, "hardware": hardware(device), "versions": versions(), **more}
        with self._room("what it runs on"):
            self.lease.write(self.directory / ABOUT, json.dumps(about, indent=1))

    def save(self, progress: Progress, metrics: dict[str, Any], nt_optimizer: Mapping[str, torch.Tensor] | None = None) -> Path:
        """Keep the epoch that just ended: checkpoint first, then its metrics line. The natural optimiser may be another process's."""
        target = checkpoint_at(self.directory, progress.epoch)
        optimizers = {"ct": progress.ct.saved_tensors()}
        if progress.nt is not None and nt_optimizer is None:
            nt_optimizer = progress.nt.optimizer_tensors()
        if nt_optimizer:
            optimizers["nt"] = dict(nt_optimizer)
        with self._room(f"epoch {progress.epoch}"):
            target.parent.mkdir(exist_ok=True)
            with self.lease.desk_work() as desk:
                made = desk / target.name
                write_checkpoint(made, self.experiment, progress.epoch, snapshot(progress.ct.result), optimizers, metrics, self.extra)
            self.lease.publish(made, target)
            self.rows.append(metrics)
            self._write_rows()
        self.prune()
        return target

    def prune(self) -> None:
        for old in list_checkpoints(self.directory)[: -self.experiment.execution.keep_checkpoints]:
            self.lease.remove(old)

    def result(self, epoch: int) -> RunResult:
        return RunResult(self.directory, checkpoint_at(self.directory, epoch), epoch, self.rows[-1] if self.rows else {})

    def _write_rows(self) -> None:
        self.lease.write(self.directory / METRICS, "".join(json.dumps(row) + "\n" for row in self.rows))

    @contextmanager
    def _room(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not storage_full(error):
                raise
            raise NoRoomError(
                f"the disk of {self.directory} is full; {what} could not be saved, earlier checkpoints are intact. "
                "Free some space and continue with --resume."
            ) from None


@contextmanager
def open_run(experiment: Experiment, directory: Path, resume: bool, term: int | None = None) -> Iterator[Record]:
    """Claim the directory and its lease: for a person, or (with a term) for the call of a sweep that the trial belongs to."""
    if experiment.network.factory is not None:  # before anything is claimed: one that is refused will be another one the next time
        new_network(experiment)
    claim_directory(directory, experiment, resume)
    check_disk(directory, experiment)
    with ExitStack() as stack:
        try:
            lease = stack.enter_context(take(directory) if term is None else take_for(directory, term))
        except OSError as error:
            raise cannot_write(directory, error) from None
        yield Record(experiment, directory, lease)


def check_disk(directory: Path, experiment: Experiment) -> None:
    """Enough room for the checkpoints that are kept and the one being written?"""
    branches = 2 if experiment.training.uses_projection and experiment.training.nt_optimizer == "separate" else 1
    size = checkpoint_bytes(new_network(experiment), branches, averaged=experiment.training.ema > 0)
    need = size * (experiment.execution.keep_checkpoints + 1)
    free = shutil.disk_usage(directory).free
    if free < need:
        raise NoRoomError(
            f"{directory} has {free / 1e6:.0f} MB free, but this run needs about {need / 1e6:.0f} MB for "
            f"{experiment.execution.keep_checkpoints} checkpoints and one being written. Free some, lower "
            "execution.keep_checkpoints, or choose another --out."
        )


def starting_point(experiment: Experiment, device: torch.device, checkpoint: Checkpoint | None) -> tuple[Progress, dict[str, Any]]:
    """The progress a checkpoint holds, optimisers included; else epoch 0, from scratch or from another run, with where it came from."""
    if checkpoint is not None:
        network = checkpoint.network.train()
        place(network, device, prefers_channels_last(experiment))
        ct = Learner.certified(network, experiment.training)
        ct.load_saved_tensors(checkpoint.optimizer("ct") or {})
        progress = Progress(checkpoint.epoch, ct)
        saved = checkpoint.optimizer("nt")
        if saved is not None:
            natural_learner(progress, experiment).load_optimizer_tensors(saved)
        return progress, {k: v for k, v in checkpoint.meta.items() if k == "start_digest"}
    source = experiment.training.start_from
    if source is None:
        return start(experiment, device), {}
    origin = load_checkpoint(source)
    probe = new_network(experiment)
    load_weights(probe, origin.network.state_dict(), source)
    return start(experiment, device, origin.network.state_dict()), {"start_digest": origin.digest}


@dataclass(frozen=True)
class Judge:
    """Measures every epoch on the validation split; without one, on the first 1000 training images (and the metrics say so)."""

    experiment: Experiment
    images: Images
    split: str

    @staticmethod
    def of(experiment: Experiment, data_dir: str | Path | None, device: torch.device) -> "Judge":
        if experiment.dataset.validation_size:
            return Judge(experiment, load_dataset(experiment.dataset, "validation", data_dir).to(device), "validation")
        plain = load_dataset(experiment.dataset.model_copy(update={"augment": False}), "train", data_dir)
        first = torch.arange(min(1000, len(plain)))
        images = Images(plain.raw[first], plain.levels, plain.labels[first], plain.index[first])
        return Judge(experiment, images.to(device), "train")

    def epoch(self, progress: Progress, trained: Mapping[str, Any], began: float, cosines: Mapping[str, float] | None) -> dict[str, Any]:
        """The metrics line of an epoch that began at this `time.perf_counter()`."""
        return {
            "epoch": progress.epoch,
            **trained,
            **evaluate(progress.ct.result, self.images, self.experiment),
            "eval_split": self.split,
            "epoch_seconds": time.perf_counter() - began,
            **({"cosines": dict(cosines)} if cosines is not None else {}),
        }


def stopped(directory: Path, by: str, saved: int) -> StoppedError:
    """Told to end after so many epochs."""
    kept = f"epochs up to {saved} are saved in {directory}" if saved else f"no epoch was finished yet in {directory}"
    return StoppedError(f"stopped by {by} in epoch {saved + 1}; {kept}.\n{how_to_continue(directory)}")


def diverged(directory: Path, reason: str) -> UserError:
    """The same bits would diverge again."""
    saved = list_checkpoints(directory)
    last = f"The last good checkpoint is {saved[-1]}." if saved else "That was before the first epoch was saved: there is no checkpoint."
    helps = "A lower training.lr, a longer training.anneal_epochs or training.grad_clip usually helps."
    return UserError(f"training stopped: {reason}. {last} {helps}")
