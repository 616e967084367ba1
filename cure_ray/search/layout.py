"""The directory of a sweep.

DIR/sweep.yaml (the sweep as first given), DIR/journal.log (Optuna's), DIR/submissions/NNNN.json and NNNN.pulse (one per call),
DIR/trials/NNNN-HASH/seedS/ (run directories), DIR/tune/NNNN/ (what Ray Tune writes for a call: TensorBoard's logs; never read).
"""

from pathlib import Path

SWEEP, JOURNAL, SUBMISSIONS, TRIALS, TUNE = "sweep.yaml", "journal.log", "submissions", "trials", "tune"


def trial_home(directory: Path, number: int, identity: str) -> Path:
    """Where a configuration's runs are, one per seed."""
    return directory / TRIALS / f"{number:04d}-{identity[:8]}"


def trial_runs(directory: Path, number: int) -> list[Path]:
    """The run directories of a trial, one per seed."""
    return sorted(run for home in (directory / TRIALS).glob(f"{number:04d}-*") for run in home.iterdir() if run.is_dir())


def seed_run(home: Path, seed: int) -> Path:
    """The run directory of one seed."""
    return home / f"seed{seed}"
