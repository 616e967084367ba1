"""The objective of a search: certified accuracies by the cascade without branch and bound, on a fixed part of the validation split."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from cure_ray import seeding
from cure_ray.attacks import AttackSettings
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import Certifier
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import Status
from cure_ray.config.stages import DEFAULT_STAGES
from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.directory import checkpoint_at
from cure_ray.runs.lease import Lease
from cure_ray.search.records import Row, judged_at, note_judged
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS, Norm

# The attack only spares the bounds what cannot be proven, so it need not be the hardest one.
SETTINGS = CascadeSettings(DEFAULT_STAGES, attack=AttackSettings(steps=14, restarts=3))
PER_NORM = frozenset({"linf", "l2", "l1", "union_linf_l2"})


def judge_run(lease: Lease, epoch: int, samples: int, objectives: frozenset[str], device: str, data_dir: str | None) -> Row:
    """The objective of a run's weights after exactly this epoch, measured once: whoever asks again finds it."""
    run = lease.directory
    found = judged_at(run, epoch)
    if found is not None:
        return found
    began = time.perf_counter()
    values = judge(checkpoint_at(run, epoch), samples, objectives, device, data_dir)
    return note_judged(lease, epoch, values, time.perf_counter() - began)


def judge(checkpoint: Path, samples: int, objectives: frozenset[str], device: str, data_dir: str | None) -> dict[str, float]:
    """Accuracies in [0, 1]. A sample that fails one norm is not tried in the others, unless a norm's own accuracy is asked for."""
    loaded = load_checkpoint(checkpoint)
    experiment, where = loaded.experiment, seeding.resolve_device(device)
    # The split is the same fixed shuffle for every seed, so its first images are the same subset for every trial.
    images = load_dataset(experiment.dataset.model_copy(update={"augment": False}), "validation", data_dir)
    count = min(samples, len(images))
    x, y = images.batch(torch.arange(count))
    threats = [Ball(norm, experiment.threats.eps(norm)) for norm in NORMS if experiment.threats.eps(norm) > 0]
    engine = NativeEngine(loaded.network, where)
    settings = replace(SETTINGS, box=experiment.dataset.box)
    certifier = Certifier(engine, loaded.network, settings, bundles=checkpoint / "soundness-failure", device=where)
    if objectives & PER_NORM:
        found = {t.norm: certifier.certify(x, y, t, range(count)) for t in threats}
    else:
        order = certifier.failure_order(x[:16].to(where), y[:16].to(where), threats)
        found = dict(zip((t.norm for t in order), certifier.certify_union(x, y, order, range(count)), strict=True))
    return _accuracies(found, count, bool(objectives & PER_NORM))


def _accuracies(found: Mapping[Norm, list[Outcome]], count: int, per_norm: bool) -> dict[str, float]:
    proven = {norm: [o.status == Status.CERTIFIED for o in outcomes] for norm, outcomes in found.items()}
    first = next(iter(found.values()))
    values = {
        "clean": sum(o.status != Status.MISCLASSIFIED for o in first) / count,
        "union": sum(all(flags) for flags in zip(*proven.values(), strict=True)) / count,
    }
    if per_norm:
        values |= {norm: sum(flags) / count for norm, flags in proven.items()}
        if {"linf", "l2"} <= proven.keys():
            values["union_linf_l2"] = sum(a and b for a, b in zip(proven["linf"], proven["l2"], strict=True)) / count
    return values
