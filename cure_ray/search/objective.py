"""The objective of a search: accuracies proven by the cascade, with as much branch and bound as the sweep says, on a fixed part of the
validation split."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cure_ray import seeding
from cure_ray.attacks import AttackSettings
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import Certifier
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome, check_clean
from cure_ray.certification.verdict import Status
from cure_ray.config.stages import CASCADE, DEFAULT_STAGES, GUARD_SECONDS
from cure_ray.data.images import load_dataset
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.runs.directory import checkpoint_at
from cure_ray.runs.lease import Lease
from cure_ray.search.halving import ROUNDING, Values, dominates
from cure_ray.search.records import Row, bound_name, judged_at, note_judged
from cure_ray.search.space import Judging
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS, Norm

# The attack only spares the bounds what cannot be proven, so it need not be the hardest one.
SETTINGS = CascadeSettings(DEFAULT_STAGES, attack=AttackSettings(steps=14, restarts=3))
PER_NORM = frozenset({"linf", "l2", "l1", "union_linf_l2"})
Hopeless = Callable[[Row], bool]  # told what every accuracy is at most: is there no need to know more?


def judge_run(lease: Lease, epoch: int, judging: Judging, rivals: Sequence[Values], device: str, data_dir: str | None) -> Row:
    """The objective of a run's weights after exactly this epoch, measured once: whoever asks again finds it."""
    run = lease.directory
    found = judged_at(run, epoch)
    if found is not None:
        return found
    began = time.perf_counter()
    values = judge(checkpoint_at(run, epoch), judging, device, data_dir, lambda upper: beaten(upper, judging, rivals))
    return note_judged(lease, epoch, values, time.perf_counter() - began)


def beaten(upper: Row, judging: Judging, rivals: Sequence[Values]) -> bool:
    """Whether a rival is at least as good in every objective and better in one, whatever this run and those of the other seeds reach."""
    best = [round(1 - (1 - upper[name]) / judging.seeds, ROUNDING) for name in judging.objectives]
    return any(dominates([round(value, ROUNDING) for value in rival], best) for rival in rivals)


def judge(
    checkpoint: Path, judging: Judging, device: str, data_dir: str | None, hopeless: Hopeless = lambda upper: False
) -> dict[str, float]:
    """Accuracies in [0, 1]; where it was hopeless to go on, what they are at most. A sample that fails one norm is not tried in the
    others, unless a norm's own accuracy is asked for."""
    loaded = load_checkpoint(checkpoint)
    experiment, where = loaded.experiment, seeding.resolve_device(device)
    # The split is the same fixed shuffle for every seed, so its first images are the same subset for every trial.
    images = load_dataset(experiment.dataset.model_copy(update={"augment": False}), "validation", data_dir)
    x, y = images.batch(torch.arange(min(judging.samples, len(images))))
    threats = [Ball(norm, experiment.threats.eps(norm)) for norm in NORMS if experiment.threats.eps(norm) > 0]
    engine = NativeEngine(loaded.network, where)
    settings = replace(SETTINGS, box=experiment.dataset.box)
    if judging.nodes:
        settings = replace(settings, stages=CASCADE, seconds=GUARD_SECONDS, nodes=judging.nodes)
    certifier = Certifier(engine, loaded.network, settings, bundles=checkpoint / "soundness-failure", device=where)
    each = bool(PER_NORM & {*judging.objectives, *judging.constrained})
    if not each:
        threats = certifier.failure_order(x[:16].to(where), y[:16].to(where), threats)
    return _measure(certifier, x, y, threats, each, hopeless)


@dataclass
class _Tally:
    """What is known of the images so far, by their numbers."""

    count: int
    norms: Sequence[Norm]
    each: bool  # every norm is tried on every image
    wrong: set[int]
    proven: dict[Norm, set[int]] = field(default_factory=dict)
    falsified: dict[Norm, set[int]] = field(default_factory=dict)

    def learn(self, norm: Norm, members: Iterable[int], outcomes: Iterable[Outcome]) -> None:
        for b, outcome in zip(members, outcomes, strict=True):
            if outcome.status == Status.CERTIFIED:
                self.proven.setdefault(norm, set()).add(b)
            elif outcome.status == Status.FALSIFIED:
                self.falsified.setdefault(norm, set()).add(b)

    def accuracies(self) -> Row:
        """What was proven, once everything was tried."""
        return self._table(lambda norms: len(set.intersection(*(self.proven.get(n, set()) for n in norms))))

    def at_most(self) -> Row:
        """What no certifier can exceed on these images, whatever it proves of those that have no counterexample yet."""
        return self._table(lambda norms: self.count - len(self.wrong.union(*(self.falsified.get(n, set()) for n in norms))))

    def _table(self, number: Callable[[Sequence[Norm]], int]) -> Row:
        groups: dict[str, Sequence[Norm]] = {"union": self.norms}
        if self.each:
            groups |= {norm: (norm,) for norm in self.norms}
            if {"linf", "l2"} <= {*self.norms}:
                groups["union_linf_l2"] = ("linf", "l2")
        clean = {"clean": (self.count - len(self.wrong)) / self.count}
        return clean | {name: number(norms) / self.count for name, norms in groups.items()}


def _measure(certifier: Certifier, x_BCHW: Tensor, y_B: Tensor, threats: Sequence[Ball], each: bool, hopeless: Hopeless) -> Row:
    """Norm by norm and batch by batch, until all is known or there is no need to know more."""
    tally = _Tally(len(x_BCHW), [t.norm for t in threats], each, _misclassified(certifier, x_BCHW, y_B))
    alive, size = list(range(len(x_BCHW))), certifier.settings.batch
    for threat in threats:
        for start in range(0, len(alive), size):
            upper = tally.at_most()
            if hopeless(upper):
                return {"clean": upper["clean"], **{bound_name(name): value for name, value in upper.items() if name != "clean"}}
            members = alive[start : start + size]
            tally.learn(threat.norm, members, certifier.certify(x_BCHW[members], y_B[members], threat, members))
        if not each:
            alive = [b for b in alive if b in tally.proven.get(threat.norm, set())]
    return tally.accuracies()


def _misclassified(certifier: Certifier, x_BCHW: Tensor, y_B: Tensor) -> set[int]:
    outcomes = [Outcome(int(label)) for label in y_B]
    for start in range(0, len(outcomes), certifier.settings.batch):
        part = slice(start, start + certifier.settings.batch)
        check_clean(certifier.replay, x_BCHW[part], outcomes[part], certifier.settings.box)
    return {b for b, outcome in enumerate(outcomes) if outcome.status == Status.MISCLASSIFIED}
