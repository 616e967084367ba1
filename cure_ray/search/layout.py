"""The directory of a sweep, and the clock of those who share it.

DIR/sweep.yaml (the sweep as first given), DIR/journal.log (Optuna's), DIR/submissions/NNNN.json (one per call, touched while alive),
DIR/trials/NNNN-HASH/seedS/ (run directories), DIR/tune/NNNN/ (what Ray Tune writes for a call: TensorBoard's logs; never read).
"""

from pathlib import Path

SWEEP, JOURNAL, SUBMISSIONS, TRIALS, TUNE = "sweep.yaml", "journal.log", "submissions", "trials", "tune"
RUNNING = "running.json"  # trials/NNNN-HASH/seedS.running.json: who trains that run now
# Seconds between signs of life; after which a call counts as dead; and after which one whose process is gone does, so that Ray has
# ended its tasks before somebody else goes on in their directories.
BEAT, SILENCE, GRACE = 2.0, 60.0, 6.0


def trial_home(directory: Path, number: int, identity: str) -> Path:
    """Where a configuration's runs are, one per seed."""
    return directory / TRIALS / f"{number:04d}-{identity[:8]}"


def trial_runs(directory: Path, number: int) -> list[Path]:
    """The run directories of a trial, one per seed."""
    return sorted(run for home in (directory / TRIALS).glob(f"{number:04d}-*") for run in home.iterdir() if run.is_dir())


def seed_run(home: Path, seed: int) -> Path:
    """The run directory of one seed."""
    return home / f"seed{seed}"
