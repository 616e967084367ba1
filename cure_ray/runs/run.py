"""Training in this process: epoch after epoch, each saved, until the end, a rung of a search, or a signal."""

import time
from pathlib import Path

from cure_ray import seeding
from cure_ray.config import Experiment
from cure_ray.data.images import load_dataset
from cure_ray.runs.progress import TrainingReporter
from cure_ray.runs.record import WHOLE, Judge, RunResult, Stretch, diverged, open_run, starting_point, stopped
from cure_ray.runs.stopping import StoppedError, stop_on_signals
from cure_ray.training.epochs import DivergedError
from cure_ray.training.loop import serial_epoch

CHECK_SECONDS = 1.0  # between looks, within an epoch, whether the run is still ours


def train_run(
    experiment: Experiment,
    directory: Path,
    resume: bool = False,
    data_dir: str | Path | None = None,
    quiet: bool = False,
    stretch: Stretch = WHOLE,
) -> RunResult:
    """Train in this process, saving every epoch. Interrupting it costs at most the epoch it was in.

    A `stretch` may end early; calling again with `resume` goes on as if there had been no stop (searches judge at rungs).
    """
    device = seeding.resolve_device(experiment.execution.device)
    seeding.make_deterministic(experiment.execution.threads)
    end = stretch.end(experiment)
    with open_run(experiment, directory, resume, stretch.term) as run:
        images = load_dataset(experiment.dataset, "train", data_dir).to(device)
        judge = Judge.of(experiment, data_dir, device)
        progress, run.extra = starting_point(experiment, device, run.resume())
        run.describe(device)
        with stop_on_signals() as stop, TrainingReporter(experiment.training.epochs, quiet) as reporter:
            reporter.resume(progress.epoch)
            looked = time.monotonic()

            def tick(done: int, total: int) -> None:
                nonlocal looked
                stop()
                if time.monotonic() - looked > CHECK_SECONDS:
                    run.lease.check()
                    looked = time.monotonic()
                reporter.batch(done, total)

            try:
                while progress.epoch < end:
                    began = time.perf_counter()
                    trained, merged = serial_epoch(progress, images, experiment, tick)
                    metrics = judge.epoch(progress, trained, began, merged.cosines if merged else None)
                    run.save(progress, metrics)
                    reporter.epoch(progress.epoch, metrics)
            except StoppedError as told:
                raise stopped(directory, str(told), progress.epoch) from None
            except DivergedError as error:
                raise diverged(directory, str(error)) from None
        run.prune()  # a predecessor may have been killed before he did
        return run.result(progress.epoch)
