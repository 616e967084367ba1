"""The directory of a run: what is where, and whose it is. Torch-free, so that looking at a run costs nothing.

DIR/experiment.yaml, DIR/run.json (hardware, versions), DIR/metrics.jsonl (one line per epoch), DIR/checkpoints/epoch_NNNN/,
DIR/.lease/ (who writes here).
"""

import hashlib
import os
from pathlib import Path

from cure_ray.config import Experiment, dump_experiment, load_experiment
from cure_ray.errors import NoRoomError, UserError, storage_full

EXPERIMENT, ABOUT, CHECKPOINTS = "experiment.yaml", "run.json", "checkpoints"
META = "meta.json"  # of a checkpoint


def default_directory(experiment: Experiment) -> Path:
    return Path("runs") / f"{experiment.name}-seed{experiment.seed}-{experiment.config_hash[:8]}"


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_at(run: Path, epoch: int) -> Path:
    """Where a run keeps this epoch."""
    return run / CHECKPOINTS / f"epoch_{epoch:04d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run directory, oldest first."""
    return sorted(p for p in (run / CHECKPOINTS).glob("epoch_*") if (p / META).is_file())


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint a person means: a checkpoint directory, or the last one of a run directory."""
    if (path / META).is_file():
        return path
    found = list_checkpoints(path) if path.is_dir() else []
    if not found:
        what = "holds no checkpoint" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}: expected a directory written by `cure-ray train` (a run, or one of its checkpoints/epoch_*)")
    return found[-1]


def claim_directory(directory: Path, experiment: Experiment, resume: bool) -> None:
    """Make the directory this experiment's, or say whose it is. Never overwrites."""
    described = directory / EXPERIMENT
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; a run needs a directory. Choose another --out.")
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
    partial = directory / f".{EXPERIMENT}.{os.getpid()}"  # others may be at this place now, or died here
    if directory.exists() and any(not path.name.startswith(f".{EXPERIMENT}.") for path in directory.iterdir()):
        raise UserError(f"{directory} is not empty and was not written by `cure-ray train`. Choose another --out.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial.write_text(dump_experiment(experiment))
        partial.replace(described)
    except OSError as error:
        raise cannot_write(directory, error) from None


def cannot_write(directory: Path, error: OSError) -> UserError:
    kind = NoRoomError if storage_full(error) else UserError
    return kind(f"cannot write to {directory}: {error.strerror}. Choose another --out.")


def how_to_continue(directory: Path) -> str:
    return f"Continue with: cure-ray train {directory / EXPERIMENT} --out {directory} --resume"
