"""One call's part of a sweep's study: which configuration comes next, and what became of it. Optuna and files; no Ray.

It holds no state that matters: configurations and their results are in the study, trainings in their run directories. A call can be
stopped anywhere, started again, or run several times at once on one directory.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from cure_ray.config import Experiment, resolve
from cure_ray.errors import UserError
from cure_ray.search.calls import Submission
from cure_ray.search.halving import shortfalls, standing, survives
from cure_ray.search.layout import seed_run, trial_home
from cure_ray.search.records import Row, at_most, bound_name, mean_judged, rungs_passed
from cure_ray.search.sampling import make_sampler
from cure_ray.search.space import Sweep, base_data, experiment_at, grid_points
from cure_ray.search.study import counted, deciding, enqueue, open_study, orphans, suggest
from cure_ray.search.trials import BOUND, FAILED, OWNER, PASSED, POINT, TERM, VALUES, keeps_rungs, reached_at, rung_name, standing_at

Say = Callable[[str], None]
MAX_DUPLICATES = 50  # proposals in a row that were tried before: the space is exhausted


def rung_epochs(experiment: Experiment, sweep: Sweep) -> list[int]:
    """Epochs at which a configuration is judged: never before the radii are full, geometrically up to the end.

    As many for every configuration, the same epoch twice if it must be: a rung's number says which values are compared with which.
    """
    training, stopping = experiment.training, sweep.early_stopping
    ramp = min(training.first_full_epoch - 1, training.epochs - 1) if training.ramps else 0
    steps = 0 if stopping is None else stopping.rungs
    shares = [(stopping.factor if stopping else 1) ** -k for k in range(steps, -1, -1)]
    return [ramp + math.ceil((training.epochs - ramp) * share) for share in shares]


def describe(point: Mapping[str, Any]) -> str:
    """A point in few words: the last part of every path, numbers short."""
    return ", ".join(f"{p.rsplit('.', 1)[-1]}={v:.3g}" if isinstance(v, float) else f"{p.rsplit('.', 1)[-1]}={v}" for p, v in point.items())


@dataclass(frozen=True)
class Proposal:
    """A configuration to run, from this rung on (0 unless it is another call's, taken over)."""

    number: int
    point: dict[str, Any]
    experiment: Experiment  # of the first seed
    rungs: list[int]
    term: int  # how many calls have had it, this one included
    rung: int = 0
    since: float = field(default_factory=time.monotonic)


class Ledger:
    """Proposes, takes over what dead calls left, judges, and writes it all to the study."""

    def __init__(self, sweep: Sweep, submission: Submission, say: Say) -> None:
        self.sweep, self.directory, self.me, self.say = sweep, submission.directory, submission.number, say
        self.calls = submission.calls
        self.base = resolve(base_data(sweep))
        self.study = open_study(self.directory, sweep, make_sampler(sweep, self.me))
        self.live: dict[int, Proposal] = {}
        self.deadline = time.monotonic() + sweep.hours * 3600 if sweep.hours else math.inf
        self.exhausted = False
        fixed = [*sweep.start_with, *(grid_points(sweep, self.base) if sweep.search == "grid" else ())]
        with deciding(self.directory, self.study):
            enqueue(self.study, sweep, list(itertools.islice(fixed, sweep.trials)))

    # ------------------------------------------------------------ what comes next

    def next(self) -> Proposal | None:
        """What a dead call left, else something new, else None: nothing for now."""
        if not self._left() and not self._may_propose():
            return None  # without the lock: while there is nothing to do, nobody has to wait for us should we be stopped
        with deciding(self.directory, self.study):
            left = self._left()
            for trial in left:  # all of them before any is judged: they are each other's competitors
                self._report_known(trial)
            found = next(filter(None, map(self._adopt, left)), None)
            if found is None and self._may_propose():
                found = self._propose()
        if found is not None:
            self.live[found.number] = found
        return found

    def over(self) -> bool:
        """Whether there is nothing to wait for: no trial of ours, and none whose call seems gone, so that it is about to be free."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return not self.live and all(self.calls.state(owner) == "alive" for owner in {t.user_attrs.get(OWNER, -1) for t in running})

    def _left(self) -> list[FrozenTrial]:
        return [t for t in orphans(self.study, self.calls) if t.number not in self.live]  # we may have been suspended ourselves

    def _may_propose(self) -> bool:
        if self.exhausted or time.monotonic() > self.deadline:
            return False
        if self.sweep.trials is not None and counted(self.study) >= self.sweep.trials:
            return False
        return self.sweep.search != "grid" or bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _propose(self) -> Proposal | None:
        for _ in range(MAX_DUPLICATES):
            if not self._may_propose():
                return None
            asked = self.study.ask()
            asked.set_user_attr(OWNER, self.me)
            point = suggest(asked, self.sweep, self.base)
            try:
                proposal = self._make(asked.number, point)
            except UserError as error:  # a combination nobody foresaw; say it where it is looked for
                self._fail(asked.number, str(error))
                continue
            twin = self._twin(proposal)
            if twin is not None:
                self._repeat(asked, twin)
                continue
            asked.set_user_attr(TERM, proposal.term)
            asked.set_user_attr("identity", proposal.experiment.config_hash)
            asked.set_user_attr(POINT, point)
            return proposal
        self.exhausted = True
        return None

    def _make(self, number: int, point: dict[str, Any], term: int = 1) -> Proposal:
        experiment = experiment_at(self.sweep, point, number, self.sweep.seeds[0])
        return Proposal(number, point, experiment, rung_epochs(experiment, self.sweep), term)

    def _twin(self, proposal: Proposal) -> FrozenTrial | None:
        identity = proposal.experiment.config_hash
        trials = (t for t in self.study.get_trials(deepcopy=False) if t.number != proposal.number and "duplicate_of" not in t.user_attrs)
        return next((t for t in trials if t.user_attrs.get("identity") == identity), None)

    def _repeat(self, asked: optuna.Trial, twin: FrozenTrial) -> None:
        """Proposed again: give the sampler the known answer, and run nothing."""
        asked.set_user_attr("duplicate_of", twin.number)
        if twin.state == TrialState.COMPLETE:
            for name, miss in twin.constraints.items():
                asked.set_constraint(name, miss)
            self.study.tell(asked, twin.values)
        else:
            self.study.tell(asked, state=TrialState.FAIL)

    def _adopt(self, frozen: FrozenTrial) -> Proposal | None:
        handle, point = self._handle(frozen.number), frozen.user_attrs.get(POINT)
        if point is None:  # its call died while proposing it: nothing was run
            handle.set_user_attr("duplicate_of", -1)
            self.study.tell(frozen.number, state=TrialState.FAIL)
            if "fixed_params" in frozen.system_attrs:
                self.study.enqueue_trial(frozen.system_attrs["fixed_params"])
                self.exhausted = False
            return None
        term = frozen.user_attrs.get(TERM, 1) + 1
        handle.set_user_attr(TERM, term)  # first: whoever has the smaller one loses his leases (runs/lease.py)
        handle.set_user_attr(OWNER, self.me)
        return self._recall(self._make(frozen.number, point, term))

    def _runs(self, proposal: Proposal) -> list[Path]:
        home = trial_home(self.directory, proposal.number, proposal.experiment.config_hash)
        return [seed_run(home, seed) for seed in self.sweep.seeds]

    def _report_known(self, frozen: FrozenTrial) -> None:
        """What its runs have measured and the study has not heard: its call ended in between."""
        if POINT not in frozen.user_attrs:
            return
        proposal = self._make(frozen.number, frozen.user_attrs[POINT])
        for rung, epoch in enumerate(proposal.rungs):
            known = mean_judged(self._runs(proposal), epoch)
            if known is not None and not at_most(known, self.sweep.measured):
                self._note_reached(frozen, rung, known)

    def _note_reached(self, frozen: FrozenTrial, rung: int, reached: Mapping[str, float]) -> None:
        """What its competitors at this rung will be compared with."""
        if reached_at(frozen, rung, self.sweep) is not None:
            return
        handle = self._handle(frozen.number)
        if len(self.sweep.objectives) == 1:
            handle.report(reached[self.sweep.objectives[0]], rung)
        if keeps_rungs(self.sweep):
            handle.set_user_attr(rung_name(rung), {name: reached[name] for name in self.sweep.measured})

    def _recall(self, proposal: Proposal) -> Proposal | None:
        """Take its rungs as far as its runs have come: what they left behind was decided, what they measured since is decided now."""
        runs = self._runs(proposal)
        behind = rungs_passed(runs, proposal.rungs)
        for rung, epoch in enumerate(proposal.rungs):
            if rung < behind:
                self._note_passed(proposal.number, rung)
                continue
            known = mean_judged(runs, epoch)
            if known is None:
                self.say(f"trial {proposal.number}: continued, its call has ended")
                return replace(proposal, rung=rung)
            if not self._decide(proposal, rung, known):
                return None
        raise AssertionError("the last rung ends a trial")

    # ------------------------------------------------------------ what became of it

    def judged(self, number: int, rung: int, mean: Mapping[str, float]) -> bool:
        """Note the objective at a rung; whether the trial goes on. A rung that is reported again after a crash changes nothing."""
        with deciding(self.directory, self.study):
            proposal = self.live.get(number)
            if proposal is None or self._lost(number):
                return False
            goes_on = self._decide(proposal, rung, mean)
        if not goes_on:
            del self.live[number]
        return goes_on

    def _decide(self, proposal: Proposal, rung: int, mean: Mapping[str, float]) -> bool:
        """Whether it goes on after this rung (hold the lock). Decided once: competitors that come later do not change it."""
        number, last = proposal.number, rung == len(proposal.rungs) - 1
        handle, frozen = self._handle(number), self._frozen(number)
        if rung <= frozen.user_attrs.get(PASSED, -1):
            return True
        handle.set_user_attr(VALUES, dict(mean))
        bounds = at_most(mean, self.sweep.measured)
        if bounds:
            return self._end_by_bound(proposal, bounds, mean)
        self._note_reached(frozen, rung, mean)
        if not last and self._survives(number, rung, mean):
            self._note_passed(number, rung)
            return True
        self._constrain(handle, mean)
        if last:
            self.study.tell(number, [mean[name] for name in self.sweep.objectives])
        else:
            self.study.tell(number, state=TrialState.PRUNED)
        self._tell(proposal, mean, "" if last else f", stopped at epoch {proposal.rungs[rung]}")
        return False

    def _end_by_bound(self, proposal: Proposal, bounds: Row, mean: Mapping[str, float]) -> bool:
        """Counterexamples have ruled out that it wins. It was not measured, so it has no value: the study keeps what it is at most."""
        handle, upper = self._handle(proposal.number), {**mean, **bounds}
        handle.set_user_attr(BOUND, {name: upper[name] for name in self.sweep.measured})
        self._constrain(handle, upper)
        self.study.tell(proposal.number, state=TrialState.PRUNED)
        self._tell(proposal, mean, ", which does not win")
        return False

    def _constrain(self, handle: optuna.Trial, reached: Mapping[str, float]) -> None:
        known = self._frozen(handle.number).constraints  # of a call that died before it told the study
        for name, miss in shortfalls(reached, self.sweep.at_least).items():
            if name not in known:
                handle.set_constraint(name, miss)

    def _note_passed(self, number: int, rung: int) -> None:
        if rung > self._frozen(number).user_attrs.get(PASSED, -1):
            self._handle(number).set_user_attr(PASSED, rung)

    def failed(self, number: int, reason: str) -> None:
        with deciding(self.directory, self.study):
            if number not in self.live or self._lost(number):
                return
            del self.live[number]
            self._fail(number, reason)
        self.say(f"trial {number} failed: {reason}")

    def left(self, number: int) -> None:
        """Another call has it: ours was silent for so long that it counted as dead."""
        if self.live.pop(number, None) is not None:
            self.say(f"trial {number}: left to another call, which took it over")

    def _lost(self, number: int) -> bool:
        trial = self._frozen(number)
        if trial.user_attrs.get(OWNER) == self.me and not trial.state.is_finished():
            return False
        self.left(number)
        return True

    def _survives(self, number: int, rung: int, reached: Mapping[str, float]) -> bool:
        """Among all calls' trials, so that two calls halve one field of competitors and not each its own."""
        assert self.sweep.early_stopping is not None
        mine = standing(reached, self.sweep.objectives, self.sweep.at_least)
        seen = (standing_at(t, rung, self.sweep) for t in self.study.get_trials(deepcopy=False) if t.number != number)
        return survives(mine, [other for other in seen if other is not None], self.sweep.early_stopping.factor)

    def _fail(self, number: int, reason: str) -> None:
        self._handle(number).set_user_attr(FAILED, reason)
        self.study.tell(number, state=TrialState.FAIL)

    def _tell(self, proposal: Proposal, mean: Mapping[str, float], note: str) -> None:
        names = dict.fromkeys([*self.sweep.measured, "clean"])
        shown = ", ".join(f"{n} {100 * mean[n]:.1f} %" if n in mean else f"{n} at most {100 * mean[bound_name(n)]:.1f} %" for n in names)
        self.say(f"trial {proposal.number}: {shown}{note}  ({describe(proposal.point)}; {time.monotonic() - proposal.since:.0f} s)")

    def _handle(self, number: int) -> optuna.Trial:
        return optuna.Trial(self.study, self._frozen(number)._trial_id)

    def _frozen(self, number: int) -> FrozenTrial:
        """As it is now. `study.trials` would copy all of them, which is most of what a call does in a sweep of hundreds."""
        return self.study.get_trials(deepcopy=False)[number]
