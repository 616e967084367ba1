"""A small sweep, calls that work on it and end, and trials whose directories say what a test wants them to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cure_ray.search.calls import submission
from cure_ray.search.layout import seed_run, trial_home
from cure_ray.search.ledger import Ledger, Proposal
from cure_ray.search.space import Sweep
from cure_ray.search.study import claim

SWEEP = {
    "name": "tiny",
    "base": {
        "preset": "smoke",
        "dataset": {"train_samples": 300, "validation": 40},
        "training": {"epochs": 4, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []},
        "execution": {"device": "cpu"},
    },
    "space": {"training.method": {"grid": ["max", "linf"]}, "training.lambda_inf": {"grid": [0.4, 0.8]}},
    "search": "grid",
    "samples": 10,
    "early_stopping": {"factor": 2, "rungs": 1},
}


def new_sweep(directory: Path, **changes: object) -> Path:
    claim(directory, Sweep.model_validate({**SWEEP, **changes}))
    return directory


@contextmanager
def call(directory: Path, **changes: object) -> Iterator[Ledger]:
    """A call of `cure-ray sweep`, as far as the study sees it."""
    sweep = Sweep.model_validate({**SWEEP, **changes})
    with submission(directory, {}) as me:
        yield Ledger(sweep, me, lambda text: None)


def proposed(ledger: Ledger) -> Proposal:
    proposal = ledger.next()
    assert proposal is not None
    return proposal


def run_of(ledger: Ledger, proposal: Proposal, seed: int = 0) -> Path:
    return seed_run(trial_home(ledger.directory, proposal.number, proposal.experiment.config_hash), seed)


def trained(run: Path, epochs: int, judged: dict[int, float]) -> None:
    """A run directory after so many epochs, with the objective measured at some of them."""
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"epoch": epoch, "ibp_union": epoch / 100} for epoch in range(1, epochs + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = [{"epoch": epoch, "union": value, "clean": 0.9, "seconds": 1.0} for epoch, value in judged.items()]
    (run / "objective.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
