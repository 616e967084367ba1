"""What a sweep says of itself every minute: epochs, trials, the best so far, and how long it may take, from what is on disk."""

import json
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from search_helpers import call, proposed, run_of, trained

from cure_ray.config import dump_experiment
from cure_ray.search.ledger import Ledger, Proposal
from cure_ray.search.outlook import EVERY, Minute, outlook, seconds_a_trial
from cure_ray.search.trials import TERM


def at_epoch(ledger: Ledger, proposal: Proposal, epochs: int, seconds: float) -> None:
    run = run_of(ledger, proposal)
    trained(run, 0, {})
    (run / "experiment.yaml").write_text(dump_experiment(proposal.experiment))
    rows = [{"epoch": epoch, "epoch_seconds": seconds} for epoch in range(1, epochs + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_before_any_trial_ended_the_pace_of_epochs_tells_how_long_it_takes(out: Path) -> None:
    """Four trials of four epochs of 100 s, two at once, half of both done: 200 s for these and 400 s for the others."""
    with call(out) as ledger:
        assert outlook(ledger) == "0 trials running; 0 of 4 done"
        first, second = proposed(ledger), proposed(ledger)
        run_of(ledger, second).mkdir(parents=True)  # it has just begun
        at_epoch(ledger, first, 2, 100.0)
        assert outlook(ledger).startswith("2 trials running (trial 0: epoch 2 of 4); 0 of 4 done")
        at_epoch(ledger, second, 2, 100.0)
        assert outlook(ledger) == "2 trials running (trial 0: epoch 2 of 4, trial 1: epoch 2 of 4); 0 of 4 done; about 10 min left"


def test_the_best_so_far_and_trials_of_other_calls_are_told(out: Path) -> None:
    with call(out) as ledger, call(out) as other:
        first, _ = proposed(ledger), proposed(other)
        at_epoch(ledger, first, 4, 1.0)
        ledger.judged(first.number, 0, {"union": 0.5, "clean": 0.9})
        ledger.judged(first.number, 1, {"union": 0.6, "clean": 0.9})
        second = proposed(ledger)
        at_epoch(ledger, second, 1, 1.0)
        line = outlook(ledger)
    assert line.startswith("1 trial running (trial 2: epoch 1 of 4); 1 in other calls; 1 of 4 done; best so far union 60.0 % (trial 0)")
    assert line.endswith("left")


def test_many_trials_are_told_by_the_range_of_their_epochs(out: Path) -> None:
    grid = {"training.lambda_inf": {"grid": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}}
    with call(out, space=grid) as ledger:
        for epochs in range(5):
            at_epoch(ledger, proposed(ledger), epochs, 1.0)
        assert outlook(ledger).startswith("5 trials running (epochs 0 to 4 of 4); 0 of 6 done")


def test_one_line_a_minute_and_one_after_a_suspension(out: Path) -> None:
    said, now = list[str](), [0.0]
    with call(out) as ledger:
        ledger.say = said.append
        minute = Minute(ledger, lambda: now[0])
        for seconds, lines in ((EVERY - 1, 0), (EVERY, 1), (EVERY + 1, 1), (2 * EVERY, 2), (500 * EVERY, 3), (500 * EVERY + 1, 3)):
            now[0] = seconds
            minute()
            assert len(said) == lines


def test_a_file_server_that_is_away_does_not_end_a_sweep(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("cure_ray.search.outlook.trial_runs", away)
    with call(out) as ledger:
        proposed(ledger)
        minute = Minute(ledger, lambda: time.monotonic() + EVERY)
        minute.next = 0.0
        minute()


def ended(seconds: float, term: int = 1) -> FrozenTrial:
    trial = create_trial(state=TrialState.COMPLETE, value=0.5, user_attrs={TERM: term})
    trial.datetime_start = datetime.now() - timedelta(days=1)
    trial.datetime_complete = trial.datetime_start + timedelta(seconds=seconds)
    return trial


def test_trials_that_slept_or_changed_hands_do_not_tell_how_long_one_takes() -> None:
    assert seconds_a_trial([]) is None
    assert seconds_a_trial([ended(10), ended(20), ended(30)]) == pytest.approx(20)
    assert seconds_a_trial([ended(10), ended(20), ended(30), ended(36_000)]) == pytest.approx(20)  # a laptop was closed meanwhile
    assert seconds_a_trial([ended(10), ended(20), ended(30), ended(100, term=2)]) == pytest.approx(20)
    assert seconds_a_trial([ended(10), ended(-3600)]) == pytest.approx(10)  # a clock was set back
