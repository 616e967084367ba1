"""The cascade: clean, IBP, CROWN-IBP, attack, CROWN, alpha-CROWN, branch and bound; what is decided leaves the batch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from cure_ray import seeding
from cure_ray.attacks import AttackSettings, attack, check_witness, replay_network
from cure_ray.bounds.engine import Engine, Problem, Stage
from cure_ray.certification.bundle import Alarm
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome, check_clean, isolate
from cure_ray.certification.verdict import CLEAN, SKIPPED, Status
from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball

Progress = Callable[[str, int], None]  # (stage, samples it decided)


@dataclass(frozen=True)
class Certifier:
    """A network, its engine and the cascade's settings. `bundles` is where a soundness failure is saved before it is raised."""

    engine: Engine
    network: nn.Module
    settings: CascadeSettings
    seed: int = 0
    bundles: Path = Path("soundness-failure")
    progress: Progress = lambda stage, decided: None
    device: torch.device | str = "cpu"
    replay: nn.Module = field(init=False)
    alarm: Alarm = field(init=False)

    def __post_init__(self) -> None:
        missing = [s for s in self.settings.stages if s != "attack" and s not in self.engine.stages]
        if missing:
            offers = ", ".join((*self.engine.stages, "attack"))
            raise UserError(f"the {self.engine.name} engine has no stage {missing[0]}; it offers {offers}")
        object.__setattr__(self, "replay", replay_network(self.network))
        object.__setattr__(self, "alarm", Alarm(self.engine, self.network, self.settings.key(), self.seed, self.bundles))

    def certify(self, x_BCHW: Tensor, y_B: Tensor, threat: Ball, indices: Sequence[int]) -> list[Outcome]:
        """One outcome per sample, in order. `indices` are the samples' numbers in their data set: their seeds depend on them."""
        outcomes: list[Outcome] = []
        for start in range(0, len(x_BCHW), self.settings.batch):
            part = slice(start, start + self.settings.batch)
            outcomes += _Batch(self, x_BCHW[part], y_B[part], threat, list(indices[part])).run()
        return outcomes

    def certify_union(self, x_BCHW: Tensor, y_B: Tensor, threats: Sequence[Ball], indices: Sequence[int]) -> list[list[Outcome]]:
        """Outcomes per threat; a sample that fails one threat is skipped for the later ones: put first what fails most."""
        results: list[list[Outcome]] = []
        alive = torch.ones(len(x_BCHW), dtype=torch.bool)
        for threat in threats:
            row = [_skipped(int(label), results, b) for b, label in enumerate(y_B)]
            todo = alive.nonzero().squeeze(1)
            found = self.certify(x_BCHW[todo], y_B[todo], threat, [indices[int(i)] for i in todo])
            for b, outcome in zip(todo.tolist(), found, strict=True):
                row[b] = outcome
                alive[b] = outcome.status == Status.CERTIFIED
            results.append(row)
        return results

    def failure_order(self, x_BCHW: Tensor, y_B: Tensor, threats: Sequence[Ball]) -> list[Ball]:
        """The threats, the one that fails most on these samples by the cheapest bound first."""

        def failures(threat: Ball) -> float:
            worst = self.engine.margins(self.engine.problem(x_BCHW, y_B, threat, self.settings.box), self.engine.stages[0]).amin(1)
            return float((~(worst > 0)).sum()) - float(torch.nan_to_num(worst, neginf=-1e9).mean().clamp(-1e9, 1e9)) * 1e-12

        return sorted(threats, key=failures, reverse=True)


def certify_batch(
    engine: Engine,
    network: nn.Module,
    x_BCHW: Tensor,
    y_B: Tensor,
    threat: Ball,
    settings: CascadeSettings,
    indices: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """The cascade as one call; use a Certifier for many batches of one network, or to choose where alarms and progress go."""
    certifier = Certifier(engine, network, settings, seed, device=x_BCHW.device)
    return certifier.certify(x_BCHW, y_B, threat, range(len(x_BCHW)) if indices is None else indices)


def _skipped(label: int, earlier: list[list[Outcome]], b: int) -> Outcome:
    """A row for a threat that was not tried; a misclassified sample is misclassified under every threat."""
    first = earlier[0][b] if earlier else None
    if first is not None and first.status == Status.MISCLASSIFIED:
        return Outcome(label, first.predicted, Status.MISCLASSIFIED, CLEAN)
    return Outcome(label, first.predicted if first else -1, Status.UNKNOWN, SKIPPED)


class _Batch:
    """One batch under one threat on its way through the stages."""

    def __init__(self, certifier: Certifier, x_BCHW: Tensor, y_B: Tensor, threat: Ball, indices: list[int]) -> None:
        self.c, self.threat, self.indices = certifier, threat, indices
        self.x, self.y = x_BCHW.to(certifier.device), y_B.to(certifier.device)
        self.outcomes = [Outcome(int(label)) for label in y_B]
        self.late: set[int] = set()  # samples that branch and bound had no time left for

    def run(self) -> list[Outcome]:
        check_clean(self.c.replay, self.x, self.outcomes, self.c.settings.box)
        self.c.progress(CLEAN, sum(not o.open for o in self.outcomes))
        alive = self._alive()
        problem = self._problem(alive)
        last = CLEAN
        for step in _steps(self.c.settings):
            stage = step.stage
            if not len(alive):
                break
            if stage == "branch-and-bound" and self.c.settings.seconds <= 0:
                continue
            started, before = time.perf_counter(), len(alive)
            if step.attack is not None:
                self._attack(alive, step.attack, step.purpose)
            elif problem is not None:
                self._bound(problem, alive, stage)
            share = 0.0 if stage == "branch-and-bound" else (time.perf_counter() - started) / before  # that stage keeps its own time
            for b in alive.tolist():
                self.outcomes[b].seconds += share
            if step.purpose == "attack":  # an attack in between belongs to the stage before it
                last = stage
            still = self._alive()
            if problem is not None and len(still) < before:
                problem = problem.select(torch.isin(alive, still).nonzero().squeeze(1).to(self.x.device))
            alive = still
            self.c.progress(stage, before - len(alive))
        for b in alive.tolist():
            self.outcomes[b].decide(Status.TIMEOUT if b in self.late else Status.UNKNOWN, last)
        self.c.progress("open", len(alive))
        self._attack_certified()
        return self.outcomes

    def _alive(self) -> Tensor:
        return torch.tensor([b for b, o in enumerate(self.outcomes) if o.open], dtype=torch.long)

    def _problem(self, alive: Tensor) -> Problem | None:
        bounds = any(stage != "attack" for stage in self.c.settings.stages)
        if not bounds or not len(alive):
            return None
        return self.c.engine.problem(self.x[alive], self.y[alive], self.threat, self.c.settings.box)

    # ------------------------------------------------------------ bounds

    def _bound(self, problem: Problem, alive: Tensor, stage: str) -> None:
        """Run one bound stage on the batch."""

        def work(members: Sequence[int]) -> None:
            index = torch.tensor(members, dtype=torch.long)
            part = problem if len(members) == len(alive) else problem.select(index.to(self.x.device))
            if stage == "branch-and-bound":
                self._branch(part, alive[index])
                return
            margins = self.c.engine.margins(part, _as_stage(stage)).to("cpu", torch.float64)
            for b, row in zip(alive[index].tolist(), margins, strict=True):
                self._learn(b, row, stage)

        isolate(range(len(alive)), work, lambda i, status, what: self.outcomes[int(alive[i])].decide(status, stage, what))

    def _learn(self, b: int, row: Tensor, stage: str) -> None:
        """A stage certifies alone: only where all its margins are positive has the engine evaluated them in float64."""
        outcome = self.outcomes[b]
        if bool(row.isnan().any()) or bool((row == torch.inf).any()):
            outcome.decide(Status.ERROR, stage, "a bound is NaN or +inf (overflow in the weights or the radius)")
            return
        if bool(torch.isfinite(row).all()) and bool((row > 0).all()):
            outcome.margins = row
            outcome.decide(Status.CERTIFIED, stage)
        else:
            outcome.margins = row if outcome.margins is None else torch.maximum(outcome.margins, row)
        self._compare(b, outcome.attack_margin, None)

    def _branch(self, problem: Problem, alive: Tensor) -> None:
        settings = self.c.settings
        for b, result in zip(alive.tolist(), self.c.engine.branch(problem, settings.seconds, settings.nodes), strict=True):
            outcome = self.outcomes[b]
            outcome.nodes, outcome.seconds = result.nodes, outcome.seconds + result.seconds
            self._learn(b, result.margins.to("cpu", torch.float64), "branch-and-bound")
            if outcome.open and result.exhausted and result.seconds >= settings.seconds:
                self.late.add(b)

    # ------------------------------------------------------------ attacks

    def _attack(self, alive: Tensor, settings: AttackSettings, purpose: str) -> None:
        self._search(alive, purpose, settings, steered=True)
        for b in alive.tolist():
            outcome = self.outcomes[b]
            if outcome.witness is not None:
                outcome.decide(Status.FALSIFIED, "attack")

    def _search(self, where: Tensor, purpose: str, settings: AttackSettings, steered: bool) -> None:
        """Attack these samples and keep what replays. Any bound above a replayed margin is a soundness failure.

        `steered`: aim at the classes the bounds leave open. Not where it is the bounds that are in doubt.
        """
        seeds = [seeding.derive(self.c.seed, purpose, str(self.threat), self.indices[b]) for b in where.tolist()]
        x, y = self.x[where], self.y[where]
        aims, box = self._bounds(where) if steered else None, self.c.settings.box
        candidates = attack(self.c.network, x, y, self.threat, seeds, settings, aims, box)
        found = check_witness(self.c.replay, x, y, candidates, self.threat, box)
        for i, b in enumerate(where.tolist()):
            outcome, value = self.outcomes[b], float(found.margins[i])
            if value != value or not bool(found.inside[i]):  # what lies outside the threat says nothing about it
                continue
            outcome.attack_margin = value if outcome.attack_margin is None else min(value, outcome.attack_margin)
            if bool(found.valid[i]):
                outcome.witness = found.images[i].clone()
            self._compare(b, value, found.images[i])

    def _bounds(self, where: Tensor) -> Tensor | None:
        """[B, K-1] the best bounds so far, if there are any."""
        known = [self.outcomes[b].margins for b in where.tolist()]
        rows = [row for row in known if row is not None]
        return torch.stack(rows).to(self.x.device, self.x.dtype) if len(rows) == len(known) else None

    def _compare(self, b: int, value: float | None, image: Tensor | None) -> None:
        """No image of the ball may have a margin below the bound."""
        outcome = self.outcomes[b]
        if outcome.contradicted_by(value) and outcome.margins is not None:
            bound = float(outcome.margins.min())
            self._unsound(b, f"an image of the ball has margin {value:.9g}, below the bound {bound:.9g}", image)

    def _attack_certified(self) -> None:
        """Everything certified is attacked once more with a fresh seed: the alarm of last resort."""
        certified = torch.tensor([b for b, o in enumerate(self.outcomes) if o.status == Status.CERTIFIED], dtype=torch.long)
        if not len(certified):
            return
        self._search(certified, "after-certificate", self.c.settings.attack.again, steered=False)
        for b in certified.tolist():
            if self.outcomes[b].witness is not None:
                self._unsound(b, "a certified sample is misclassified inside its ball", self.outcomes[b].witness)

    def _unsound(self, b: int, what: str, image: Tensor | None = None) -> None:
        self.c.alarm.unsound(self.x[b], self.outcomes[b], self.threat, self.indices[b], what, image)


@dataclass(frozen=True)
class _Step:
    """A bound stage, or what the attack does in one of its turns; the purpose names its random stream."""

    stage: str
    attack: AttackSettings | None = None
    purpose: str = "attack"


def _steps(settings: CascadeSettings) -> list[_Step]:
    """Most samples that fall do so at once, and most others CROWN proves: so the attack opens before CROWN, and the rest of it
    follows, aimed at what CROWN leaves open. Branch and bound costs more than any attack, so one more goes before it; what even it
    leaves open is likely to fall to a strong one, which goes last."""
    attack, steps = settings.attack, list[_Step]()
    parted = "attack" in settings.stages and "crown" in settings.stages
    for stage in settings.stages:
        branches = stage == "branch-and-bound" and "attack" in settings.stages and settings.seconds > 0 and settings.nodes > 0
        if branches and "alpha-crown" in settings.stages:
            steps.append(_Step("attack", attack.closing, "attack before branching"))
        steps.append(_Step(stage, None if stage != "attack" else attack.opening if parted else attack))
        if branches:
            steps.append(_Step("attack", attack.last, "attack after branching"))
        if stage == "crown" and parted and attack.rest is not None:
            steps.append(_Step("attack", attack.rest, "rest of the attack"))
    return steps


def _as_stage(stage: str) -> Stage:
    return stage  # type: ignore[return-value]  # CascadeSettings admits the engine's stages and "attack" only
