"""Several objectives, constraints and bounds: decisions stand, the front is what no other beats, nothing unmeasured has a value."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.samplers import GPSampler
from optuna.trial import TrialState
from search_helpers import SWEEP, call, new_sweep, proposed, run_of, trained

from cure_ray.api.subject import subjects
from cure_ray.errors import UserError
from cure_ray.search.layout import SWEEP as FILE
from cure_ray.search.ledger import Ledger
from cure_ray.search.ranking import best_runs, pareto, ranked, rivals
from cure_ray.search.sampling import Informed
from cure_ray.search.space import Sweep, load_sweep
from cure_ray.search.status import describe_directory
from cure_ray.search.study import claim, read_study
from cure_ray.search.trials import BOUND, last_reached, meets

TWO: dict[str, Any] = {
    "space": {"training.lambda_inf": {"uniform": [0.2, 1.0]}, "training.lr": {"loguniform": [1e-4, 1e-2]}},
    "objectives": ["clean", "union"],
    "search": "gp",
    "trials": 12,
}
WITH_CONSTRAINT = {**TWO, "at_least": {"clean": 0.9}}


def point(clean: float, union: float) -> dict[str, float]:
    return {"clean": clean, "union": union}


def finish(ledger: Ledger, clean: float, union: float) -> int:
    """A trial that reaches the same at its first rung and, if it is let on, at its end."""
    number = proposed(ledger).number
    if ledger.judged(number, 0, point(clean, union)):
        ledger.judged(number, 1, point(clean, union))
    return number


def sweep_of(**changes: Any) -> Sweep:
    return Sweep.model_validate({**SWEEP, **changes})


def test_rungs_halve_by_rank_and_hypervolume_and_their_decisions_stand(tmp_path: Path) -> None:
    out = new_sweep(tmp_path / "out", **TWO)
    with call(out, **TWO) as ledger:
        first = proposed(ledger)
        assert ledger.judged(first.number, 0, point(0.8, 0.3))
        trained(run_of(ledger, first), 3, {3: 0.3})
        other = proposed(ledger)
        assert ledger.judged(other.number, 0, point(0.85, 0.6)), "it beats the first one in both"
        worse = finish(ledger, 0.7, 0.2)
        assert ledger.judged(first.number, 0, point(0.8, 0.3)), "decided once: a better competitor that comes later changes nothing"
        trials = ledger.study.get_trials()
        assert (trials[worse].state, trials[worse].values) == (TrialState.PRUNED, None)
        assert last_reached(trials[worse], ledger.sweep.objectives) == (0.7, 0.2)
    with call(out, **TWO) as ledger:
        assert (proposed(ledger).number, ledger.study.get_trials()[first.number].state) == (first.number, TrialState.RUNNING)


def test_what_dead_trials_measured_is_told_before_one_of_them_is_judged(tmp_path: Path) -> None:
    out = new_sweep(tmp_path / "out", **TWO)
    with call(out, **TWO) as ledger:
        for union in (0.3, 0.8, 0.7):
            trained(run_of(ledger, proposed(ledger)), 3, {3: union})
    with call(out, **TWO) as ledger:
        assert proposed(ledger).number == 1
        assert [t.user_attrs["rung:0"]["union"] for t in ledger.study.get_trials()[:3]] == [0.3, 0.8, 0.7]
        assert ledger.study.get_trials()[0].state == TrialState.PRUNED


def test_the_front_is_what_meets_the_constraints_and_nothing_else_beats(tmp_path: Path) -> None:
    changes = {**WITH_CONSTRAINT, "early_stopping": None}
    out = new_sweep(tmp_path / "out", **changes)
    with call(out, **changes) as ledger:
        for clean, union in ((0.95, 0.4), (0.85, 0.9), (0.92, 0.6), (0.91, 0.5)):
            assert not ledger.judged(proposed(ledger).number, 0, point(clean, union))
    study = read_study(out, sweep_of(**changes))
    assert [t.number for t in pareto(study)] == [0, 2]
    assert [t.number for t in ranked(study)] == [0, 2, 3, 1], "the front, who meets the constraint, who does not"
    assert rivals(out, sweep_of(**changes)) == [(0.95, 0.4), (0.92, 0.6), (0.91, 0.5)]
    for number in range(4):
        (out / "trials" / f"{number:04d}-x" / "seed0").mkdir(parents=True)
    assert [p.parent.name for p in best_runs(out, front=True)] == ["0000-x", "0002-x"]
    assert [p.parent.name for p in best_runs(out, 9)] == ["0000-x", "0002-x", "0003-x"]
    text = describe_directory(out)
    assert "3 of 4 finished trials meet at_least (clean 0.9)" in text
    assert "front: trial 2: clean 92.0 %, union 60.0 %" in text


def test_constraints_no_trial_meets_are_a_sentence_with_how_many_did(tmp_path: Path) -> None:
    changes = {**WITH_CONSTRAINT, "early_stopping": None}
    out = new_sweep(tmp_path / "out", **changes)
    with call(out, **changes) as ledger:
        for clean in (0.7, 0.85, 0.6):
            ledger.judged(proposed(ledger).number, 0, point(clean, 0.3))
    with pytest.raises(UserError, match=r"0 of 3 finished trials meet at_least \(clean 0.9\); trial 1 comes nearest with clean 0.85"):
        best_runs(out, 1)


def test_a_front_of_one_point_and_of_one_objective_are_sentences(tmp_path: Path) -> None:
    changes = {**TWO, "early_stopping": None}
    out = new_sweep(tmp_path / "out", **changes)
    with call(out, **changes) as ledger:
        for clean, union in ((0.7, 0.2), (0.9, 0.5)):
            ledger.judged(proposed(ledger).number, 0, point(clean, union))
    with pytest.raises(UserError, match=r"is one point: trial 1 is the best in every objective \(clean, union\)"):
        best_runs(out, front=True)
    single = new_sweep(tmp_path / "one", early_stopping=None)
    with call(single, early_stopping=None) as ledger:
        ledger.judged(proposed(ledger).number, 0, point(0.7, 0.2))
    with pytest.raises(UserError, match="one objective"):
        best_runs(single, front=True)
    with pytest.raises(UserError, match="give one of them"):
        subjects(out, None, best=2, front=True)
    with pytest.raises(UserError, match="is none"):
        subjects(tmp_path, None, front=True)


def test_a_trial_that_ends_by_bound_has_no_value_but_its_bound(out: Path) -> None:
    with call(out) as ledger:
        best, loser = proposed(ledger), proposed(ledger)
        assert ledger.judged(best.number, 0, point(0.9, 0.5))
        ledger.judged(best.number, 1, point(0.9, 0.6))
        ledger._note_passed(loser.number, 0)
        trained(run_of(ledger, loser), 4, {})
        row = {"epoch": 4, "clean": 0.8, "union_at_most": 0.55, "seconds": 1.0}
        (run_of(ledger, loser) / "objective.jsonl").write_text(json.dumps(row) + "\n")
    with call(out) as ledger:  # its call ended before the study was told: the next one finds it
        assert proposed(ledger).number not in (best.number, loser.number)
        trial = ledger.study.get_trials()[loser.number]
        assert (trial.state, trial.values, trial.user_attrs[BOUND]) == (TrialState.PRUNED, None, {"union": 0.55})
        assert [t.number for t in ranked(ledger.study)] == [best.number]
    assert "1 stopped early (1 by bound: they cannot win)" in describe_directory(out)


def test_seeds_one_of_which_has_a_bound_have_a_mean_bound() -> None:
    from cure_ray.search.records import at_most, mean

    rows = [{"clean": 0.8, "union_at_most": 0.5}, {"clean": 0.9, "union": 0.3}]
    found = mean(rows)
    assert found == pytest.approx({"clean": 0.85, "union_at_most": 0.4})
    assert at_most(found, ["clean", "union"]) == pytest.approx({"union": 0.4})
    assert at_most({"clean": 0.8, "union": 0.5}, ["clean", "union"]) == {}


def test_gaussian_processes_learn_from_stopped_trials_and_obey_constraints(tmp_path: Path) -> None:
    """Twelve proposals with a known optimum; after the random start they come from the model, which sees what was stopped."""
    out = new_sweep(tmp_path / "out", **WITH_CONSTRAINT)
    with call(out, **WITH_CONSTRAINT) as ledger:
        assert isinstance(ledger.study.sampler, Informed)
        assert isinstance(ledger.study.sampler.sampler, GPSampler)
        while (proposal := ledger.next()) is not None:
            share = (proposal.point["training.lambda_inf"] - 0.2) / 0.8  # more of it: less clean, more proven
            values = point(1 - 0.2 * share, share)
            if ledger.judged(proposal.number, 0, values):
                ledger.judged(proposal.number, 1, values)
        trials = ledger.study.get_trials()
        assert {t.state for t in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
        modelled = [t for t in trials if any(k.startswith("gp:relative_params") for k in t.system_attrs)]
        assert len(modelled) == 8, "after four random ones"
        assert sum(map(meets, modelled)) >= 6, "half of the space is forbidden"
        assert all(set(t.constraints) == {"clean"} for t in trials)


@pytest.mark.parametrize("search", ["tpe", "nsga2", "random"])
def test_every_search_goes_on_among_stopped_trials_of_several_objectives(tmp_path: Path, search: str) -> None:
    """Most are stopped: Optuna's own TPE fails once it must rank trials that have no values."""
    changes = {**WITH_CONSTRAINT, "search": search, "trials": 30, "early_stopping": {"factor": 4, "rungs": 1}}
    out = new_sweep(tmp_path / "out", **changes)
    with call(out, **changes) as ledger:
        while (proposal := ledger.next()) is not None:
            values = point(1 - proposal.number / 100, 0.5 - proposal.number / 100)  # each worse than the last
            if ledger.judged(proposal.number, 0, values):
                ledger.judged(proposal.number, 1, values)
        states = [t.state for t in ledger.study.get_trials() if "duplicate_of" not in t.user_attrs]
    assert states == [TrialState.COMPLETE] + [TrialState.PRUNED] * 29


def test_older_sweeps_keep_their_identity_and_go_on_as_they_began(tmp_path: Path) -> None:
    """Version 0.2 knew neither nodes nor at_least: in its directories they are off, and its study is found."""
    old = sweep_of(nodes=0)
    assert old.identity == "b526c193c3d4f870"
    out = tmp_path / "out"
    claim(out, old)
    written = {k: v for k, v in yaml.safe_load((out / FILE).read_text()).items() if k not in ("nodes", "at_least")}
    (out / FILE).write_text(yaml.safe_dump(written))
    found = load_sweep(out / FILE)
    assert (found.nodes, found.identity) == (0, old.identity)
    claim(out, found)
    with pytest.raises(UserError, match=r"belongs to another sweep .*: nodes 0 there, 100 here\)"):
        claim(out, sweep_of())
