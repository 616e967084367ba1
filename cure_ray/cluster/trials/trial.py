"""What a search does with one configuration and seed: train it up to a rung, judge it. Stateless over a run directory.

A leg may be killed and started again anywhere that sees the directory: it goes on from the last checkpoint.
"""

from ray.exceptions import WorkerCrashedError

from cure_ray.cluster.session import Need
from cure_ray.cluster.training.ranks import phases, rank_need
from cure_ray.cluster.training.workers import train_parallel
from cure_ray.cluster.trials.driver import Leg, LegResult
from cure_ray.config import Experiment
from cure_ray.errors import NoRoomError, UserError
from cure_ray.runs.lease import LostLeaseError, take_for
from cure_ray.runs.record import Stretch
from cure_ray.runs.run import train_run
from cure_ray.runs.stopping import StoppedError
from cure_ray.search.objective import judge_run
from cure_ray.search.ranking import rivals


def need_of(experiment: Experiment, cluster_gpus: float) -> Need:
    """What one training asks for at its widest."""
    if experiment.execution.mode == "parallel":
        return rank_need(experiment, phases(experiment)[-1], cluster_gpus)
    one = rank_need(experiment, phases(experiment)[-1], cluster_gpus)
    return Need(1, one.cpus, one.gpus)


def train_leg(leg: Leg) -> LegResult:
    """Train up to the leg's end, in this process or, in mode parallel, on Ray Train."""
    leg.directory.mkdir(parents=True, exist_ok=True)
    stretch = Stretch(leg.until, leg.term)
    try:
        if leg.experiment.execution.mode == "parallel":
            train_parallel(leg.experiment, leg.directory, True, leg.data_dir, quiet=True, stretch=stretch)
        else:
            train_run(leg.experiment, leg.directory, True, leg.data_dir, quiet=True, stretch=stretch)
    except (NoRoomError, LostLeaseError):  # no fault of this configuration, which another time, or another call, is as good as any
        raise
    except UserError as error:
        return LegResult({}, str(error))
    except StoppedError as stopped:  # a signal to this process (preemption): for those who wait for it, a death like any other
        raise WorkerCrashedError from stopped
    return LegResult({})


def judge_leg(leg: Leg) -> LegResult:
    """Measure the objective once per rung; a leg that is run again finds it."""
    with take_for(leg.directory, leg.term) as lease:
        known = rivals(leg.contest.directory, leg.contest.sweep) if leg.contest is not None else []
        return LegResult(judge_run(lease, leg.until, leg.judging, known, leg.device, leg.data_dir))


def run_leg(leg: Leg) -> LegResult:
    """Train and judge in one process."""
    import torch

    torch.set_num_threads(leg.experiment.execution.threads)
    trained = train_leg(leg)
    return trained if trained.failed else judge_leg(leg)
