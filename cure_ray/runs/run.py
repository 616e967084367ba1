"""A training run on disk: its directory, resume, metrics, signals, and what is said when something goes wrong.

DIR/experiment.yaml, DIR/run.json (hardware, versions), DIR/metrics.jsonl (one line per epoch), DIR/checkpoints/epoch_NNNN/.
"""

import json
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cure_ray import seeding
from cure_ray.config import Experiment, dump_experiment, load_experiment
from cure_ray.data.images import Images, load_dataset
from cure_ray.errors import NoRoomError, UserError, storage_full
from cure_ray.networks.build import new_network
from cure_ray.runs.checkpoints import (
    Checkpoint,
    checkpoint_at,
    checkpoint_bytes,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    versions,
)
from cure_ray.runs.metrics import METRICS, rewind_metrics
from cure_ray.runs.progress import TrainingReporter
from cure_ray.training.epochs import DivergedError, Learner
from cure_ray.training.evaluation import evaluate
from cure_ray.training.loop import Progress, natural_learner, place, prefers_channels_last, serial_epoch, snapshot, start


class StoppedError(Exception):
    """SIGINT or SIGTERM arrived."""


@dataclass(frozen=True)
class RunResult:
    directory: Path
    checkpoint: Path
    epoch: int
    metrics: dict[str, Any]


def default_directory(experiment: Experiment) -> Path:
    return Path("runs") / f"{experiment.name}-seed{experiment.seed}-{experiment.config_hash[:8]}"


def hardware(device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"machine": platform.machine(), "processor": _cpu_name(), "cpus": os.cpu_count(), "gpu": gpu, "device": str(device)}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def claim_directory(directory: Path, experiment: Experiment, resume: bool) -> None:
    """Make the directory ours, or say whose it is. Never overwrites."""
    described = directory / "experiment.yaml"
    if described.exists():
        owner = load_experiment(described)
        if owner.config_hash != experiment.config_hash:
            raise UserError(
                f"{directory} belongs to another experiment ({owner.name}, hash {owner.config_hash}; this one is {experiment.name}, "
                f"hash {experiment.config_hash}). Choose another --out, or run the experiment stored there: {described}"
            )
        done = list_checkpoints(directory)
        if done and not resume:
            raise UserError(f"{directory} already holds this run up to {done[-1].name}. Add --resume to continue, or choose another --out.")
        return
    partial = directory / ".experiment.yaml.partial"  # may be left by a process that died right here
    if directory.exists() and any(path != partial for path in directory.iterdir()):
        raise UserError(f"{directory} is not empty and was not written by `cure-ray train`. Choose another --out.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(dump_experiment(experiment))
        partial.replace(described)
    except OSError as error:
        kind = NoRoomError if storage_full(error) else UserError
        raise kind(f"cannot write to {directory}: {error.strerror}. Choose another --out.") from None


def check_own_network(experiment: Experiment) -> None:
    """Before a directory is claimed: a user's own network that is refused will be another one the next time."""
    if experiment.network.factory is not None:
        new_network(experiment)


def check_disk(directory: Path, experiment: Experiment) -> None:
    """Enough room for the checkpoints that are kept and the one being written?"""
    branches = 2 if experiment.training.uses_projection and experiment.training.nt_optimizer == "separate" else 1
    need = checkpoint_bytes(new_network(experiment), branches) * (experiment.execution.keep_checkpoints + 1)
    free = shutil.disk_usage(directory).free
    if free < need:
        raise NoRoomError(
            f"{directory} has {free / 1e6:.0f} MB free, but this run needs about {need / 1e6:.0f} MB for "
            f"{experiment.execution.keep_checkpoints} checkpoints and one being written. Free some, lower "
            "execution.keep_checkpoints, or choose another --out."
        )


def prune(directory: Path, keep: int) -> None:
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def newest_intact(directory: Path) -> Checkpoint | None:
    """The last checkpoint that passes all checks; a damaged newer one is left alone and skipped."""
    for path in reversed(list_checkpoints(directory)):
        try:
            return load_checkpoint(path)
        except UserError as error:
            print(f"skipping a damaged checkpoint: {error}")
    return None


def restore(checkpoint: Checkpoint, experiment: Experiment, device: torch.device) -> Progress:
    """The progress a checkpoint holds, optimisers included, on `device`."""
    network = checkpoint.network.train()
    place(network, device, prefers_channels_last(experiment))
    ct = Learner.of(network, experiment.training.lr)
    ct.load_optimizer_tensors(checkpoint.optimizer("ct") or {})
    progress = Progress(checkpoint.epoch, ct)
    saved = checkpoint.optimizer("nt")
    if saved is not None:
        natural_learner(progress, experiment).load_optimizer_tensors(saved)
    return progress


def starting_point(experiment: Experiment, device: torch.device) -> tuple[Progress, dict[str, Any]]:
    """Epoch 0, from scratch or from another run's checkpoint, with where it came from."""
    source = experiment.training.start_from
    if source is None:
        return start(experiment, device), {}
    origin = load_checkpoint(source)
    probe = new_network(experiment)
    load_weights(probe, origin.network.state_dict(), source)
    return start(experiment, device, origin.network.state_dict()), {"start_digest": origin.digest}


def evaluation_images(experiment: Experiment, data_dir: str | Path | None, train: Images) -> tuple[Images, str]:
    """The validation split; without one, the first 1000 training images (and the metrics say so)."""
    if experiment.dataset.validation_size:
        return load_dataset(experiment.dataset, "validation", data_dir).to(train.raw.device), "validation"
    plain = load_dataset(experiment.dataset.model_copy(update={"augment": False}), "train", data_dir)
    first = torch.arange(min(1000, len(plain)))
    return Images(plain.raw[first], plain.levels, plain.labels[first], plain.index[first]).to(train.raw.device), "train"


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


def no_room(directory: Path, epoch: int) -> str:
    return (
        f"the disk of {directory} is full; epoch {epoch} could not be saved, earlier checkpoints are intact. "
        "Free some space and continue with --resume."
    )


def write_epoch(directory: Path, progress: Progress, experiment: Experiment, metrics: Mapping[str, Any], extra: Mapping[str, Any]) -> Path:
    """Save the epoch that just ended: checkpoint first, then its metrics line."""
    target = checkpoint_at(directory, progress.epoch)
    optimizers = {"ct": progress.ct.optimizer_tensors()}
    if progress.nt is not None:
        optimizers["nt"] = progress.nt.optimizer_tensors()
    try:
        save_checkpoint(target, experiment, progress.epoch, snapshot(progress.ct.network), optimizers, metrics, extra)
        with (directory / METRICS).open("a") as file:
            file.write(json.dumps(metrics) + "\n")
    except OSError as error:
        if not storage_full(error):
            raise
        raise NoRoomError(no_room(directory, progress.epoch)) from None
    prune(directory, experiment.execution.keep_checkpoints)
    return target


def train_run(
    experiment: Experiment,
    directory: Path,
    resume: bool = False,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    until: int | None = None,
) -> RunResult:
    """Train in this process, saving every epoch. Interrupting it costs at most the epoch it was in.

    `until` stops after that epoch; calling again with `resume` goes on as if there had been no stop (searches judge at rungs).
    """
    device = seeding.resolve_device(experiment.execution.device)
    seeding.make_deterministic(experiment.execution.threads)
    check_own_network(experiment)
    claim_directory(directory, experiment, resume)
    check_disk(directory, experiment)
    images = load_dataset(experiment.dataset, "train", data_dir).to(device)
    judged, judged_split = evaluation_images(experiment, data_dir, images)
    checkpoint = newest_intact(directory)
    if checkpoint is None:
        progress, extra = starting_point(experiment, device)
    else:
        progress, extra = restore(checkpoint, experiment, device), {k: v for k, v in checkpoint.meta.items() if k == "start_digest"}
    rewind_metrics(directory, progress.epoch)
    about = {"config_hash": experiment.config_hash, "hardware": hardware(device), "versions": versions()}
    (directory / "run.json").write_text(json.dumps(about, indent=1))
    metrics: dict[str, Any] = checkpoint.meta["metrics"] if checkpoint else {}
    target = checkpoint.path if checkpoint else directory
    with stop_on_signals() as stop, TrainingReporter(experiment.training.epochs, quiet) as reporter:
        reporter.resume(progress.epoch)

        def tick(done: int, total: int) -> None:
            stop()
            reporter.batch(done, total)

        try:
            while progress.epoch < min(until or experiment.training.epochs, experiment.training.epochs):
                began = time.perf_counter()
                epoch_metrics, merged = serial_epoch(progress, images, experiment, tick)
                accuracies = evaluate(progress.ct.network, judged, experiment)
                metrics = {
                    "epoch": progress.epoch,
                    **epoch_metrics,
                    **accuracies,
                    "eval_split": judged_split,
                    "epoch_seconds": time.perf_counter() - began,
                    **({"cosines": merged.cosines} if merged else {}),
                }
                target = write_epoch(directory, progress, experiment, metrics, extra)
                reporter.epoch(progress.epoch, metrics)
        except StoppedError as stopped:
            raise StoppedError(
                f"stopped by {stopped} in epoch {progress.epoch + 1}; epochs up to {progress.epoch} are saved in {directory}.\n"
                f"Continue with: cure-ray train {directory / 'experiment.yaml'} --out {directory} --resume"
            ) from None
        except DivergedError as error:
            raise UserError(
                f"training stopped: {error}. The last good checkpoint is {target}. "
                "A lower training.lr, a longer training.anneal_epochs or training.grad_clip usually helps."
            ) from None
    return RunResult(directory, target, progress.epoch, metrics)
