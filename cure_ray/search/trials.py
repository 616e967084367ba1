"""What a trial of the study says of itself: its attributes by name, what it reached at its rungs, whether it meets the constraints."""

from collections.abc import Mapping, Sequence

from optuna.trial import FrozenTrial

from cure_ray.search.halving import Standing, Values, standing
from cure_ray.search.space import Sweep

OWNER, TERM, POINT, FAILED, VALUES, PASSED = "submission", "term", "point", "failed", "values", "passed"  # user attributes
RUNG = "rung"  # "rung:0": what was reached there; Optuna keeps intermediate values of one objective only
BOUND = "at_most"  # of a trial that ended by bound: what its objectives are at most


def rung_name(rung: int) -> str:
    return f"{RUNG}:{rung}"


def keeps_rungs(sweep: Sweep) -> bool:
    """Whether more than one number is needed at a rung: Optuna's own intermediate values do not hold it."""
    return len(sweep.objectives) > 1 or bool(sweep.at_least)


def reached_at(trial: FrozenTrial, rung: int, sweep: Sweep) -> Mapping[str, float] | None:
    """What it was measured to reach at a rung; None if it was not measured there."""
    if keeps_rungs(sweep):
        found: Mapping[str, float] | None = trial.user_attrs.get(rung_name(rung))
        return found
    return {sweep.objectives[0]: trial.intermediate_values[rung]} if rung in trial.intermediate_values else None


def standing_at(trial: FrozenTrial, rung: int, sweep: Sweep) -> Standing | None:
    reached = reached_at(trial, rung, sweep)
    return standing(reached, sweep.objectives, sweep.at_least) if reached is not None else None


def last_reached(trial: FrozenTrial, objectives: Sequence[str]) -> Values | None:
    """Objectives of a stopped trial: at its last rung, or the bound it ended by; None if nothing is known of it."""
    rungs = {int(k.partition(":")[2]): v for k, v in trial.user_attrs.items() if k.startswith(f"{RUNG}:")}
    known: Mapping[str, float] | None = trial.user_attrs.get(BOUND) or (rungs[max(rungs)] if rungs else None)
    if known is not None:
        return tuple(known[name] for name in objectives) if {*objectives} <= {*known} else None
    return (trial.intermediate_values[max(trial.intermediate_values)],) if trial.intermediate_values else None


def meets(trial: FrozenTrial) -> bool:
    """Whether it meets the sweep's constraints, which it was told with."""
    return all(miss <= 0 for miss in trial.constraints.values())
