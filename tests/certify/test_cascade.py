"""The cascade decides soundly, says which stage decided, and never turns trouble into an outcome."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cure_ray.attacks import AttackSettings, margin, replay_network
from cure_ray.bounds.engine import Branching, Engine, Problem, Stage
from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import Certifier, certify_batch
from cure_ray.certification.job import CASCADE, CascadeSettings
from cure_ray.certification.outcome import Outcome
from cure_ray.certification.verdict import SKIPPED, Status
from cure_ray.errors import SoundnessError, UserError
from cure_ray.networks.models import Network
from cure_ray.testing import tiny
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance

THREATS = [Ball("linf", 0.05), Ball("l2", 0.3), Ball("l1", 0.4)]
BOUNDS = CascadeSettings(("ibp", "crown-ibp", "crown", "alpha-crown"), attack=AttackSettings(15, 2))


class Tampered:
    """A real engine whose margins pass through `change` first: how faults are planted."""

    def __init__(self, inner: Engine, change: Callable[[Tensor, Problem], Tensor]) -> None:
        self.inner, self.change = inner, change
        self.name, self.version, self.stages = "tampered", "0", inner.stages

    def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: Ball, box: bool = True) -> Problem:
        return self.inner.problem(x_BCHW, y_B, threat, box)

    def margins(self, problem: Problem, stage: Stage) -> Tensor:
        return self.change(self.inner.margins(problem, stage), problem)

    def branch(self, problem: Problem, seconds: float, nodes: int) -> list[Branching]:
        return self.inner.branch(problem, seconds, nodes)


def run(engine: Engine, settings: CascadeSettings, threat: Ball, n: int = 30, seed: int = 0, **more: object) -> list[Outcome]:
    x, y = tiny.samples(n)
    return Certifier(engine, tiny.network(), settings, seed, **more).certify(x, y, threat, range(n))  # type: ignore[arg-type]


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("make", [NativeEngine, LirpaEngine], ids=["native", "auto_lirpa"])
def test_every_outcome_is_backed_by_what_it_claims(make: Callable[..., Engine], threat: Ball) -> None:
    x, y = tiny.samples(30)
    outcomes = run(make(tiny.network()), CascadeSettings(attack=AttackSettings(15, 2)), threat)
    replay = replay_network(tiny.network())
    assert {o.status for o in outcomes} >= {Status.CERTIFIED}
    for b, o in enumerate(outcomes):
        assert o.label == int(y[b])
        assert o.stage in ("clean", *CASCADE)
        if o.status == Status.CERTIFIED:
            assert o.margins is not None
            assert torch.isfinite(o.margins).all()
            assert (o.margins > 0).all()
            assert o.attack_margin is not None
            assert o.attack_margin >= float(o.margins.min()) - 1e-9, "every certified sample has been attacked"
        elif o.status == Status.FALSIFIED:
            assert o.witness is not None
            assert float(margin(replay(o.witness[None]), y[b : b + 1])) <= 0
            assert float(distance((o.witness - x[b].double()).flatten(), threat.norm)) <= threat.eps
        elif o.status == Status.MISCLASSIFIED:
            assert o.predicted != o.label


def test_decisions_do_not_depend_on_the_batch_size_or_on_which_later_stages_are_enabled() -> None:
    engine = NativeEngine(tiny.network())
    reference = run(engine, CascadeSettings(batch=30), THREATS[1])
    small = run(engine, CascadeSettings(batch=7), THREATS[1])
    assert [(o.status, o.stage, o.predicted) for o in reference] == [(o.status, o.stage, o.predicted) for o in small]
    early = run(engine, CascadeSettings(("ibp", "crown-ibp")), THREATS[1])
    for full, part in zip(reference, early, strict=True):
        assert part.status != Status.CERTIFIED or (full.status, full.stage) == (part.status, part.stage)


def test_branch_and_bound_loses_nothing_and_unresolved_is_timeout_or_unknown() -> None:
    engine = NativeEngine(tiny.network())
    threat = Ball("linf", 0.08)
    without = run(engine, CascadeSettings(), threat)
    with_ = run(engine, CascadeSettings(CASCADE, seconds=1.0, nodes=400), threat)
    for before, after in zip(without, with_, strict=True):
        if before.status != Status.UNKNOWN:
            assert after.status == before.status
        else:
            assert after.status in (Status.CERTIFIED, Status.UNKNOWN, Status.TIMEOUT)
            assert after.nodes > 0
    assert sum(o.status == Status.CERTIFIED for o in with_) >= sum(o.status == Status.CERTIFIED for o in without)


def test_an_unsound_bound_stops_the_run_and_leaves_a_bundle(tmp_path: Path) -> None:
    liar = Tampered(NativeEngine(tiny.network()), lambda margins, problem: margins + 50)
    with pytest.raises(SoundnessError, match="SOUNDNESS FAILURE at sample"):
        run(liar, CascadeSettings(("crown",)), Ball("linf", 0.2), bundles=tmp_path)
    bundle = next(tmp_path.iterdir())
    facts = json.loads((bundle / "facts.json").read_text())
    tensors = load_file(bundle / "sample.safetensors")
    restored = tiny.architecture()
    restored.load_state_dict(load_file(bundle / "weights.safetensors"))
    witness, label = tensors["witness"], torch.tensor([facts["label"]])
    assert float(margin(replay_network(restored.eval())(witness[None]), label)) < float(tensors["margins"].min())
    assert float(distance((witness - tensors["image"].double()).flatten(), "linf")) <= facts["eps"]


def test_a_bound_slightly_above_a_real_margin_is_caught_before_anything_is_misclassified(tmp_path: Path) -> None:
    """At radius zero the bound is the margin: half a unit more is a lie although the sample is robust."""
    liar = Tampered(NativeEngine(tiny.network()), lambda margins, problem: margins + 0.5)
    with pytest.raises(SoundnessError, match="below the bound"):
        run(liar, CascadeSettings(("ibp",)), Ball("l2", 0.0), bundles=tmp_path)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_bound_that_is_no_number_is_an_error_and_certifies_nothing(poison: float) -> None:
    def change(margins: Tensor, problem: Problem) -> Tensor:
        margins = margins.clone()
        margins[:, 0] = poison
        return margins

    outcomes = run(Tampered(NativeEngine(tiny.network()), change), BOUNDS, THREATS[0], n=8)
    wanted = {Status.UNKNOWN} if poison == -math.inf else {Status.ERROR}
    assert {o.status for o in outcomes} <= wanted | {Status.MISCLASSIFIED}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError("no memory"), Status.OOM),
        (torch.OutOfMemoryError("CUDA out of memory"), Status.OOM),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), Status.OOM),
        (ZeroDivisionError("a bug"), Status.ERROR),
    ],
)
def test_a_crash_costs_one_sample_and_is_recorded_as_what_it_was(error: Exception, status: Status) -> None:
    x, y = tiny.samples(9)
    clean = run(NativeEngine(tiny.network()), BOUNDS, THREATS[0], n=9)
    bad = next(b for b, o in enumerate(clean) if o.status == Status.CERTIFIED)
    native = NativeEngine(tiny.network())
    key = native.problem(x[bad : bad + 1], y[bad : bad + 1], THREATS[0]).domain.x_BN

    def change(margins: Tensor, problem: Problem) -> Tensor:
        if bool((problem.domain.x_BN == key).all(1).any()):  # type: ignore[attr-defined]
            raise error
        return margins

    outcomes = run(Tampered(native, change), BOUNDS, THREATS[0], n=9)
    assert outcomes[bad].status == status
    assert type(error).__name__ in (outcomes[bad].message or "")
    assert [o.status for b, o in enumerate(outcomes) if b != bad] == [o.status for b, o in enumerate(clean) if b != bad]


def test_poisoned_images_and_weights_are_errors() -> None:
    x, y = tiny.samples(4)
    x[1, 0, 3, 3] = math.nan
    outcomes = certify_batch(NativeEngine(tiny.network()), tiny.network(), x, y, THREATS[0], BOUNDS)
    assert outcomes[1].status == Status.ERROR
    assert all(o.status != Status.ERROR for b, o in enumerate(outcomes) if b != 1)


def test_union_only_skips_after_the_first_failure_and_agrees_on_the_union() -> None:
    x, y = tiny.samples(30)
    certifier = Certifier(NativeEngine(tiny.network()), tiny.network(), CascadeSettings(attack=AttackSettings(15, 2)))
    full = [certifier.certify(x, y, t, range(30)) for t in THREATS]
    order = certifier.failure_order(x[:16], y[:16], THREATS)
    short = certifier.certify_union(x, y, order, range(30))
    union = [all(o[b].status == Status.CERTIFIED for o in full) for b in range(30)]
    assert union == [all(o[b].status == Status.CERTIFIED for o in short) for b in range(30)]
    engine = certifier.engine
    worst = [engine.margins(engine.problem(x[:16], y[:16], t), "ibp").amin(1) for t in order]
    failing = [(int((w <= 0).sum()), -float(w.mean())) for w in worst]  # by the cheapest bound; where that decides nothing, by how far
    assert failing == sorted(failing, reverse=True)
    assert len(set(failing)) == len(THREATS) > 1
    for b in range(30):
        if full[0][b].status == Status.MISCLASSIFIED:
            assert all(o[b].status == Status.MISCLASSIFIED for o in short)
    assert any(o.stage == SKIPPED for o in short[-1]) or not any(o.status != Status.CERTIFIED for o in short[0])


def test_progress_counts_every_sample_once() -> None:
    seen: dict[str, int] = {}
    run(NativeEngine(tiny.network()), CascadeSettings(batch=11), THREATS[0], progress=lambda s, n: seen.update({s: seen.get(s, 0) + n}))
    assert sum(seen.values()) == 30


def test_a_stage_the_engine_does_not_have_is_a_user_error() -> None:
    with pytest.raises(UserError, match="has no stage branch-and-bound"):
        Certifier(LirpaEngine(tiny.network()), tiny.network(), CascadeSettings(CASCADE, seconds=1))
    with pytest.raises(UserError, match="crown-ibp"):
        CascadeSettings(("crown-ipb",))
    assert CascadeSettings(("crown", "ibp")).stages == ("ibp", "crown"), "stages run in the order of the cascade"


def test_an_unsound_bound_from_branch_and_bound_stops_the_run_too(tmp_path: Path) -> None:
    """The alarm is raised inside the stage that isolates failing samples; it must not be isolated itself."""

    class Lying(NativeEngine):
        def branch(self, problem, seconds, nodes):  # type: ignore[no-untyped-def]
            return [Branching(torch.full((self.search.classes - 1,), 1e6, dtype=torch.float64), 1, 0.0, False)] * problem.size

    torch.manual_seed(0)
    network = Network([nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)], (1, 4, 4), 3).eval()
    x = torch.rand(6, 1, 4, 4)
    settings = CascadeSettings(stages=("attack", "branch-and-bound"), seconds=1.0)
    with pytest.raises(SoundnessError):
        Certifier(Lying(network), network, settings, bundles=tmp_path).certify(x, network(x).argmax(1), Ball("linf", 1e-3), range(6))
