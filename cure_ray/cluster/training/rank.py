"""What one rank of a parallel run does: its branch's epochs from the last checkpoint on, meeting the others after each."""

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointUploadMode
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig

from cure_ray import seeding
from cure_ray.cluster.training.ranks import Phase, Role, certified_ranks, global_metrics, rendezvous
from cure_ray.cluster.training.reducer import Outcome, Part, create_reducer, exchange, to_arrays, to_tensors
from cure_ray.config import Experiment
from cure_ray.data.images import Images, load_dataset
from cure_ray.errors import storage_full
from cure_ray.runs.checkpoints import checkpoint_at, load_checkpoint, save_checkpoint, versions
from cure_ray.runs.metrics import METRICS, read_metrics, rewind_metrics
from cure_ray.runs.run import evaluation_images, hardware, newest_intact, no_room, restore, starting_point
from cure_ray.training.epochs import DivergedError, Learner, run_epoch
from cure_ray.training.evaluation import evaluate
from cure_ray.training.loop import Progress, merge_metrics, natural_learner, prefers_channels_last, snapshot
from cure_ray.training.step import Ranks

DIVERGED = "diverged.txt"
PEOPLE = "ranks"  # DIR/ranks/ct0.json: who runs where, for `cure-ray status`


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


def _take_seat(plan: Plan) -> Seat:
    context = ray.train.get_context()
    role = plan.phase.role(context.get_world_rank())
    same_node = context.get_local_world_size() == context.get_world_size()
    offer = None
    if role.leads:
        reducer = create_reducer(plan.experiment.training.beta, plan.phase.workers) if plan.phase.natural else None
        offer = (reducer, rendezvous(plan.phase, same_node, _node_address()))
    reducer, meeting = broadcast_from_rank_zero(offer)
    ranks = certified_ranks(plan.phase, role, meeting, plan.backend)
    me: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "gpus": ray.get_gpu_ids(), "since": time.time()}
    if role.leads and reducer is not None:
        me["reducer_pid"] = ray.get(reducer.pid.remote())
    _note(plan.directory / PEOPLE / f"{role}.json", me)
    return Seat(role, ranks, reducer)


def _note(path: Path, about: Mapping[str, Any]) -> None:
    """Something nice to have. On a full disk the checkpoint is the one to say so: then all ranks stand at the same place."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(about, indent=1))
    except OSError as error:
        if not storage_full(error):
            raise


def _resume(plan: Plan, role: Role, device: torch.device) -> tuple[Progress, dict[str, Any]]:
    """Where to go on from. The leader chooses, so that nobody is misled by a stale view of a network file system."""
    found = newest_intact(plan.directory) if role.leads else None
    path = broadcast_from_rank_zero(str(found.path) if found else None)
    if path is None:
        progress, extra = starting_point(plan.experiment, device)
    else:
        checkpoint = found or load_checkpoint(path)
        progress = restore(checkpoint, plan.experiment, device)
        extra = {k: v for k, v in checkpoint.meta.items() if k == "start_digest"}
    if role.leads:
        rewind_metrics(plan.directory, progress.epoch)
        if found is not None and all(row["epoch"] != found.epoch for row in read_metrics(plan.directory)):
            _append_metrics(plan.directory, found.meta["metrics"])  # killed between checkpoint and metrics line
    return progress, extra


def _append_metrics(directory: Path, metrics: Mapping[str, Any]) -> None:
    with (directory / METRICS).open("a") as file:
        file.write(json.dumps(metrics) + "\n")


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
        return dict(metrics), {}, failed
    began = time.perf_counter()
    own, outcome = _exchange(plan, seat, progress, images)
    together = time.perf_counter() - began
    progress.epoch += 1
    if outcome.failed:
        return {}, {}, outcome.failed
    natural = outcome.parts["nt"]
    metrics = {**own, **merge_metrics(outcome.merged, natural.metrics, outcome.seconds), "exchange_seconds": together}
    return {**metrics, "cosines": dict(outcome.cosines)}, to_tensors(natural.optimizer) if seat.role.leads else {}, ""


def _save(plan: Plan, progress: Progress, metrics: Mapping[str, Any], nt_optimizer: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """The leader's epoch: the checkpoint, its metrics line, and the report, for which the other ranks wait in any case.

    Returns what to say if there is no room: that is no failure of a process, which a new attempt could put right.
    """
    optimizers = {"ct": progress.ct.optimizer_tensors(), **({"nt": nt_optimizer} if nt_optimizer else {})}
    target, full = checkpoint_at(plan.directory, progress.epoch), ""
    try:
        save_checkpoint(target, plan.experiment, progress.epoch, snapshot(progress.ct.network), optimizers, metrics, extra)
        _append_metrics(plan.directory, metrics)
    except OSError as error:
        if not storage_full(error):
            raise
        full = no_room(plan.directory, progress.epoch)
    checkpoint = None if full else ray.train.Checkpoint.from_directory(str(target))
    ray.train.report({"epoch": progress.epoch}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    return full


def rank_loop(config: Mapping[str, Any]) -> str:
    """The function Ray Train runs on every rank. Killing any of them loses at most the epoch they are in.

    Returns why it ended early, if a new attempt would not help; the driver hears it from the leader.
    """
    plan: Plan = config["plan"]
    experiment = plan.experiment
    seeding.make_deterministic(experiment.execution.threads)
    device = seeding.resolve_device(plan.device)
    seat = _take_seat(plan)
    images = load_dataset(experiment.dataset, "train", plan.data_dir).to(device)
    progress, extra = _resume(plan, seat.role, device)
    judged, judged_split = evaluation_images(experiment, plan.data_dir, images) if seat.role.leads else (images, "")
    if seat.role.leads:
        about = {"config_hash": experiment.config_hash, "hardware": hardware(device), "versions": versions()}
        ranks = {"ct_workers": plan.phase.ct_workers, "nt_workers": int(plan.phase.natural)}
        _note(plan.directory / "run.json", {**about, "ranks": ranks})
    while progress.epoch < plan.last:
        began = time.perf_counter()
        found, nt_optimizer, failed = _next_epoch(plan, seat, progress, images)
        if failed:  # the same bits would diverge again: say so and end, instead of being restarted
            if seat.role.leads:
                (plan.directory / DIVERGED).write_text(failed)
            return ""
        full = ""
        if seat.role.leads:
            cosines = {"cosines": found.pop("cosines")} if "cosines" in found else {}
            accuracies = evaluate(progress.ct.network, judged, experiment)
            seconds = {"eval_split": judged_split, "epoch_seconds": time.perf_counter() - began}
            full = _save(plan, progress, {"epoch": progress.epoch, **found, **accuracies, **seconds, **cosines}, nt_optimizer, extra)
        else:
            ray.train.report({"epoch": progress.epoch})
        if full := broadcast_from_rank_zero(full):
            return full
    return ""
