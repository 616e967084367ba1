"""What one rank of a parallel run does: its branch's epochs from the last checkpoint on, meeting the others after each."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig

from cure_ray import seeding
from cure_ray.cluster.training.ranks import Phase, Role, certified_ranks, global_metrics, rendezvous
from cure_ray.cluster.training.reducer import Outcome, Part, create_reducer, exchange, to_arrays, to_tensors
from cure_ray.config import Experiment
from cure_ray.data.images import Images, load_dataset
from cure_ray.errors import NoRoomError
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.directory import cannot_write
from cure_ray.runs.lease import RANKS, LostLeaseError, succeed
from cure_ray.runs.pulse import this_process
from cure_ray.runs.record import Judge, Record, starting_point
from cure_ray.training.epochs import DivergedError, Learner, run_epoch
from cure_ray.training.loop import Progress, merge_metrics, natural_learner, prefers_channels_last, settle, snapshot
from cure_ray.training.step import Ranks

DIVERGED = "diverged.txt"


@dataclass(frozen=True)
class Plan:
    """What every rank of a phase is told."""

    experiment: Experiment
    directory: Path
    data_dir: str | None
    device: str
    backend: str
    phase: Phase
    last: int  # stop after this epoch
    call: str  # whose lease on the directory the leader may take over


class OwnProcessGroup(TorchConfig):
    """Ray Train would join all ranks, the natural one too, over a port open to the network; our certified ranks join by themselves."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend


@dataclass(frozen=True)
class Seat:
    """A rank's place: its role, its peers, and the reducer (only where there is a natural rank)."""

    role: Role
    ranks: Ranks
    reducer: Any


def _node_address() -> str:
    util: Any = ray.util  # carries no types
    return str(util.get_node_ip_address())


def _take_seat(plan: Plan, desk: Path) -> Seat:
    context = ray.train.get_context()
    role = plan.phase.role(context.get_world_rank())
    same_node = context.get_local_world_size() == context.get_world_size()
    offer = None
    if role.leads:
        reducer = create_reducer(plan.experiment.training.beta, plan.phase.workers) if plan.phase.natural else None
        offer = (reducer, rendezvous(plan.phase, same_node, _node_address()))
    reducer, meeting = broadcast_from_rank_zero(offer)
    ranks = certified_ranks(plan.phase, role, meeting, plan.backend)
    people = desk / RANKS
    me: dict[str, Any] = {**this_process(), "gpus": ray.get_gpu_ids()}
    if role.leads and reducer is not None:
        me["reducer_pid"] = ray.get(reducer.pid.remote())
    with suppress(OSError):  # nice to have, also where the disk is full or another call has the run
        people.mkdir(exist_ok=True)
        (people / f"{role}.json").write_text(json.dumps(me))
    return Seat(role, ranks, reducer)


def _resume(plan: Plan, record: Record | None, device: torch.device) -> tuple[Progress, dict[str, Any]]:
    """Where to go on from. The leader chooses, so that nobody is misled by a stale view of a network file system."""
    found = record.start if record is not None else None
    path = broadcast_from_rank_zero(str(found.path) if found else None)
    checkpoint = found or (load_checkpoint(path) if path is not None else None)
    return starting_point(plan.experiment, device, checkpoint)


def _own_epoch(plan: Plan, seat: Seat, learner: Learner, images: Images, epoch: int) -> tuple[dict[str, float], str]:
    """This rank's branch of an epoch: its metrics, or what diverged, agreed between the certified ranks."""
    metrics, failed = dict[str, float](), ""
    try:
        layout = prefers_channels_last(plan.experiment)
        metrics = run_epoch(seat.role.branch, learner, images, plan.experiment, epoch, seat.ranks, channels_last=layout)
    except DivergedError as error:
        failed = str(error)
    if int(seat.ranks.total(torch.tensor(int(bool(failed))))):
        return {}, failed or f"another certified rank diverged in epoch {epoch}"
    return global_metrics(metrics, seat.ranks), ""


def _exchange(plan: Plan, seat: Seat, progress: Progress, images: Images) -> tuple[dict[str, float], Outcome]:
    """An epoch with projection: run the own branch, bring it to the reducer, and load what it made of both."""
    epoch, role = progress.epoch + 1, seat.role
    copied = plan.experiment.training.nt_optimizer == "copy"
    learner = progress.ct if role.branch == "ct" else natural_learner(progress, plan.experiment)
    theta = snapshot(progress.ct.network) if role.leads or role.branch == "nt" else {}
    if role.branch == "nt":
        learner.network.load_state_dict(theta)
    metrics, failed = _own_epoch(plan, seat, learner, images, epoch)
    part = None
    if failed:
        part = Part(failed=failed)
    elif role.leads or role.branch == "nt":
        # Each branch keeps its own Adam. It travels only where another needs it: the natural one to the leader, who saves it, or
        # the certified one to the natural rank, if that starts every epoch from a copy.
        travels = copied == (role.branch == "ct")
        optimizer = to_arrays(learner.optimizer_tensors()) if travels else {}
        part = Part(to_arrays(snapshot(learner.network)), optimizer, metrics, to_arrays(theta) if role.leads else {})
    outcome = exchange(seat.reducer, epoch, role.branch, part)
    if not outcome.failed:
        progress.ct.network.load_state_dict(outcome.merged.state)
        if role.branch == "nt" and copied:
            progress.ct.load_optimizer_tensors(to_tensors(outcome.parts["ct"].optimizer))
    return metrics, outcome


def _next_epoch(plan: Plan, seat: Seat, progress: Progress, images: Images) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Advance by one epoch: metrics, the natural branch's Adam (where the leader has to save it), and what diverged."""
    if not plan.phase.natural:
        metrics, failed = _own_epoch(plan, seat, progress.ct, images, progress.epoch + 1)
        progress.epoch += 1
        if not failed:
            settle(progress, images, plan.experiment, merged=False)
        return dict(metrics), {}, failed
    began = time.perf_counter()
    own, outcome = _exchange(plan, seat, progress, images)
    together = time.perf_counter() - began
    progress.epoch += 1
    if outcome.failed:
        return {}, {}, outcome.failed
    settle(progress, images, plan.experiment, merged=True)
    natural = outcome.parts["nt"]
    metrics = {**own, **merge_metrics(outcome.merged, natural.metrics, outcome.seconds), "exchange_seconds": together}
    return {**metrics, "cosines": dict(outcome.cosines)}, to_tensors(natural.optimizer) if seat.role.leads else {}, ""


def rank_loop(config: Mapping[str, Any]) -> "Ending | None":
    """The function Ray Train runs on every rank. Killing any of them loses at most the epoch they are in.

    Returns why it ended early, if a new attempt would not help; the driver hears it from the leader.
    """
    plan: Plan = config["plan"]
    experiment = plan.experiment
    seeding.make_deterministic(experiment.execution.threads)
    device = seeding.resolve_device(plan.device)
    with ExitStack() as held:
        record, ending = _lease(plan, held)
        desk, ending = broadcast_from_rank_zero((record.lease.desk if record is not None else None, ending))
        return ending or _run_epochs(plan, _take_seat(plan, desk), record, device)


@dataclass(frozen=True)
class Ending:
    """Why a run is over before its end, although no process failed: no room on the disk, or another call has it."""

    text: str
    lost: bool

    @property
    def error(self) -> NoRoomError | LostLeaseError:
        return LostLeaseError(self.text) if self.lost else NoRoomError(self.text)


def ended(work: Callable[[], Any]) -> Ending | None:
    """Do a part of the leader's writing. No exception for what a new attempt would meet again: Ray Train would make eight of them."""
    try:
        work()
    except (LostLeaseError, NoRoomError) as error:
        return Ending(str(error), isinstance(error, LostLeaseError))
    return None


def _lease(plan: Plan, held: ExitStack) -> tuple[Record | None, Ending | None]:
    """The leader's right to write, ready to go on, or why there is none. Other ranks write nothing."""
    if not plan.phase.role(ray.train.get_context().get_world_rank()).leads:
        return None, None
    found: list[Record] = []

    def take() -> None:
        try:
            record = Record(plan.experiment, plan.directory, held.enter_context(succeed(plan.directory, plan.call)))
            record.resume()
            found.append(record)
        except OSError as error:
            raise cannot_write(plan.directory, error) from None

    ending = ended(take)
    return (found[0] if found else None), ending


def _run_epochs(plan: Plan, seat: Seat, record: Record | None, device: torch.device) -> Ending | None:
    experiment = plan.experiment
    images = load_dataset(experiment.dataset, "train", plan.data_dir).to(device)
    progress, extra = _resume(plan, record, device)
    judge = Judge.of(experiment, plan.data_dir, device) if record is not None else None
    if record is not None:
        record.extra = extra
        with suppress(NoRoomError):  # nice to have: the first checkpoint will say so, when all ranks stand at the same place
            record.describe(device, ranks={"ct_workers": plan.phase.ct_workers, "nt_workers": int(plan.phase.natural)})
    while progress.epoch < plan.last:
        began = time.perf_counter()
        found, nt_optimizer, failed = _next_epoch(plan, seat, progress, images)
        if failed:  # the same bits would diverge again: say so and end, instead of being restarted
            return ended(partial(record.lease.write, plan.directory / DIVERGED, failed)) if record is not None else None
        ending = None
        if record is not None and judge is not None:
            metrics = judge.epoch(progress, found, began, found.pop("cosines", None))
            ending = ended(partial(record.save, progress, metrics, nt_optimizer))
        ray.train.report({"epoch": progress.epoch})
        if ending := broadcast_from_rank_zero(ending):
            return ending
    return None
