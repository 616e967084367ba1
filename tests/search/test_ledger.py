"""Decisions of a search stand, whoever took them and however his call ended; and what a run measured is never forgotten."""

from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from search_helpers import SWEEP, call, new_sweep, proposed, run_of, trained

from cure_ray.config import resolve
from cure_ray.runs.lease import take
from cure_ray.search.ledger import Ledger, rung_epochs
from cure_ray.search.objective import judge_run
from cure_ray.search.space import Judging, Sweep
from cure_ray.search.trials import PASSED, VALUES


def values(union: float) -> dict[str, float]:
    return {"union": union, "clean": 0.9}


def trial(study: optuna.Study, number: int) -> FrozenTrial:
    return study.get_trials()[number]


def pass_then_meet_better_ones(ledger: Ledger) -> int:
    """A trial that is the best at the first rung when it is judged, and would be the worst of three a little later."""
    first, second, third = proposed(ledger), proposed(ledger), proposed(ledger)
    assert ledger.judged(first.number, 0, values(0.3))
    trained(run_of(ledger, first), 3, {3: 0.3})
    for later in (second, third):
        assert ledger.judged(later.number, 0, values(0.8 + later.number / 100))
        trained(run_of(ledger, later), 3, {3: 0.8 + later.number / 100})
    return first.number


def test_a_trial_that_was_let_on_is_not_stopped_at_the_same_rung_by_the_next_call(out: Path) -> None:
    with call(out) as ledger:
        number = pass_then_meet_better_ones(ledger)
    with call(out) as ledger:
        again = proposed(ledger)
        assert (again.number, again.rung) == (number, 1)
        assert ledger.judged(number, 0, values(0.3)), "its process died and Tune starts it from its first rung"
        assert trial(ledger.study, number).state == TrialState.RUNNING


def test_a_trial_that_ended_just_before_its_call_is_finished_by_the_next_one_and_not_run(out: Path) -> None:
    with call(out) as ledger:
        number = pass_then_meet_better_ones(ledger)
        run = run_of(ledger, ledger.live[number])
        trained(run, 4, {3: 0.3, 4: 0.35})  # trained and measured to its end; the study was not told
    with call(out) as ledger:
        assert proposed(ledger).number != number
        done = trial(ledger.study, number)
        assert (done.state, done.values) == (TrialState.COMPLETE, [0.35])
        assert done.intermediate_values == {0: 0.3, 1: 0.35}


def test_a_directory_that_went_past_a_rung_proves_the_decision_that_an_older_version_did_not_write_down(out: Path) -> None:
    with call(out) as ledger:
        number = pass_then_meet_better_ones(ledger)
        trained(run_of(ledger, ledger.live[number]), 4, {3: 0.3})
        handle = ledger._handle(number)
        ledger.study._storage.set_trial_user_attr(handle._trial_id, PASSED, -1)
    with call(out) as ledger:
        assert (proposed(ledger).rung, trial(ledger.study, number).user_attrs[PASSED]) == (1, 0)


def test_what_all_dead_trials_measured_is_told_before_one_of_them_is_judged(out: Path) -> None:
    """Each was measured at the first rung when the call died: the order in which they are taken up must not decide."""
    with call(out) as ledger:
        for union in (0.3, 0.8, 0.7):
            proposal = proposed(ledger)
            trained(run_of(ledger, proposal), 3, {3: union})
    with call(out) as ledger:
        assert proposed(ledger).number == 1
        assert [trial(ledger.study, n).intermediate_values for n in range(3)] == [{0: 0.3}, {0: 0.8}, {0: 0.7}]
        assert trial(ledger.study, 0).state == TrialState.PRUNED


def test_values_of_a_rung_are_all_of_its_epoch(out: Path) -> None:
    """Bounds logged in training too, although the run has gone on since."""
    with call(out) as ledger:
        run = run_of(ledger, proposed(ledger))
        trained(run, 4, {3: 0.3, 4: 0.5})
        with take(run) as lease:
            found = judge_run(lease, 3, Judging(10, ("union",)), [], "cpu", None)
        assert found == {**values(0.3), "ibp_union": 0.03}
    with call(out) as ledger:
        proposed(ledger)
        assert trial(ledger.study, 0).user_attrs[VALUES] == {**values(0.5), "ibp_union": 0.04}


def test_an_epoch_whose_weights_are_gone_is_not_judged_by_other_weights(out: Path) -> None:
    with call(out) as ledger:
        run = run_of(ledger, proposed(ledger))
    (run / "checkpoints" / "epoch_0004").mkdir(parents=True)
    (run / "checkpoints" / "epoch_0004" / "meta.json").write_text("{}")
    with take(run) as lease, pytest.raises(ValueError, match="epoch_0003 does not exist"):
        judge_run(lease, 3, Judging(10, ("union",)), [], "cpu", None)


def test_seeds_are_told_only_when_all_were_measured(tmp_path: Path) -> None:
    out = new_sweep(tmp_path / "two", seeds=[0, 1])
    with call(out, seeds=[0, 1]) as ledger:
        proposal = proposed(ledger)
        trained(run_of(ledger, proposal, 0), 3, {3: 0.2})
        trained(run_of(ledger, proposal, 1), 3, {})
    with call(out, seeds=[0, 1]) as ledger:
        assert proposed(ledger).rung == 0
        assert trial(ledger.study, 0).intermediate_values == {}
    trained(run_of(ledger, proposal, 1), 3, {3: 0.4})
    with call(out, seeds=[0, 1]) as ledger:
        proposed(ledger)
        assert trial(ledger.study, 0).intermediate_values == pytest.approx({0: 0.3})


def test_short_trainings_have_as_many_rungs_as_long_ones() -> None:
    """The second rung of one must not be compared with the third of another."""
    sweep = Sweep.model_validate({**SWEEP, "early_stopping": {"factor": 3, "rungs": 2}})
    training = {"epochs": 2, "standard_epochs": 0, "anneal_epochs": 1, "lr_milestones": []}
    assert rung_epochs(resolve({"preset": "smoke", "training": training}), sweep) == [2, 2, 2]
