"""One compact check of the cascade: with an engine whose every bound is scripted, each sample must end as its own script says.

Imports of cure_ray happen inside the functions: the mutation test runs them against altered copies of the package.
"""

import tempfile
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path

import torch
from torch import Tensor, nn

SIDE = 3


@dataclass(frozen=True)
class Scripted:
    """A batch that knows which samples it holds: a sample's number is its first pixel, in hundredths."""

    numbers: Tensor

    @property
    def size(self) -> int:
        return len(self.numbers)

    def select(self, index: Tensor) -> "Scripted":
        return replace(self, numbers=self.numbers[index])


class ScriptedEngine:
    """Margins by sample and stage; what is not scripted proves nothing. `fragile`: a batch of several samples fails."""

    name, version, stages = "scripted", "0", ("ibp", "crown-ibp", "crown", "alpha-crown", "branch-and-bound")

    def __init__(self, script: dict[int, dict[str, list[float]]], fragile: bool = False) -> None:
        self.script, self.fragile = script, fragile

    def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: object, box: bool = True) -> Scripted:
        return Scripted((100 * x_BCHW[:, 0, 0, 0]).round().long())

    def margins(self, problem: Scripted, stage: str) -> Tensor:
        if self.fragile and problem.size > 1:
            raise RuntimeError("out of memory")
        rows = [self.script.get(int(n), {}).get(stage, [-1.0, -1.0]) for n in problem.numbers]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 2)

    def branch(self, problem: Scripted, seconds: float, nodes: int) -> list[object]:
        from cure_ray.bounds.engine import Branching

        return [Branching(row, 1, seconds, True) for row in self.margins(problem, "branch-and-bound")]


def samples(count: int) -> tuple[Tensor, Tensor]:
    x = torch.full((count, 1, SIDE, SIDE), 0.5)
    x[:, 0, 0, 0] = torch.arange(count) / 100
    return x, torch.zeros(count, dtype=torch.long)


def constant(margin: float) -> nn.Sequential:
    """Class 0 by this much, whatever the image."""
    last = nn.Linear(SIDE * SIDE, 3)
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([margin, 0.0, 0.0]))
    return nn.Sequential(nn.Flatten(), last).eval().requires_grad_(False)


# What each sample's bounds say, and how it must end: (script, status, stage, margins of a certified one).
GOOD, STAGES = [2.0, 3.0], ("ibp", "crown-ibp", "attack", "crown", "alpha-crown")
SCRIPTS: list[tuple[dict[str, list[float]], str, str]] = [
    ({"ibp": GOOD}, "certified", "ibp"),
    ({"ibp": [1.0, -1.0], "crown-ibp": [-1.0, 1.0], "crown": [1.0, -1.0]}, "unknown", "alpha-crown"),
    ({"crown": GOOD}, "certified", "crown"),
    ({"ibp": [0.0, 1.0], "crown": [1.0, 0.0], "alpha-crown": [0.0, 0.0]}, "unknown", "alpha-crown"),
    ({"ibp": [1.0, nan]}, "error", "ibp"),
    ({"ibp": [-inf, 5.0], "crown-ibp": [5.0, -inf]}, "unknown", "alpha-crown"),
    ({"crown-ibp": GOOD}, "certified", "crown-ibp"),
    ({"crown-ibp": [1.0, inf]}, "error", "crown-ibp"),
    ({"alpha-crown": [1e-9, 4.0]}, "certified", "alpha-crown"),
    ({"alpha-crown": [nan, nan]}, "error", "alpha-crown"),
    ({}, "unknown", "alpha-crown"),
]


def check_scripts() -> None:
    """Certified exactly where one stage proves all margins of this very sample; NaN and inf are errors; a wrong class is never proven."""
    from cure_ray.certification.balls import Certifier
    from cure_ray.certification.job import CascadeSettings
    from cure_ray.threats.balls import Ball

    x, y = samples(len(SCRIPTS))
    script = {n: s for n, (s, _, _) in enumerate(SCRIPTS)}
    for fragile in (False, True):
        for batch in (50, 4):
            certifier = Certifier(ScriptedEngine(script, fragile), constant(10.0), CascadeSettings(STAGES, batch=batch))
            for n, outcome in enumerate(certifier.certify(x, y, Ball("linf", 0.1), range(len(x)))):
                bounds, status, stage = SCRIPTS[n]
                assert (str(outcome.status), outcome.stage) == (status, stage), f"sample {n}"
                if status == "certified":
                    assert outcome.margins.tolist() == bounds[stage], f"sample {n}: another sample's margins"
                    assert outcome.attack_margin is not None, "a certified sample has not been attacked"
    wrong = Certifier(ScriptedEngine({n: {"ibp": GOOD} for n in range(3)}), constant(10.0), CascadeSettings(("ibp",)))
    labels = torch.tensor([0, 1, 2])
    statuses = [str(o.status) for o in wrong.certify(x[:3], labels, Ball("linf", 0.1), range(3))]
    assert statuses == ["certified", "misclassified", "misclassified"]
    broken = x[:3].clone()
    broken[1, 0, 1, 1] = nan
    assert [str(o.status) for o in wrong.certify(broken, y[:3], Ball("linf", 0.1), range(3))] == ["certified", "error", "certified"]
    overflowing = Certifier(ScriptedEngine({n: {"ibp": GOOD} for n in range(3)}), constant(inf), CascadeSettings(("ibp",)))
    assert [str(o.status) for o in overflowing.certify(x[:3], y[:3], Ball("linf", 0.1), range(3))] == ["error"] * 3


def check_branching() -> None:
    """Branch and bound proves only with all margins, and only when it was given time."""
    from cure_ray.certification.balls import Certifier
    from cure_ray.certification.job import CascadeSettings
    from cure_ray.threats.balls import Ball

    x, y = samples(3)
    script = {0: {"branch-and-bound": GOOD}, 1: {"branch-and-bound": [1.0, -1.0]}, 2: {"branch-and-bound": [nan, 1.0]}}
    for seconds, expected in ((1.0, ["certified", "timeout", "error"]), (0.0, ["unknown"] * 3)):
        certifier = Certifier(ScriptedEngine(script), constant(10.0), CascadeSettings(("ibp", "branch-and-bound"), seconds))
        assert [str(o.status) for o in certifier.certify(x, y, Ball("linf", 0.1), range(3))] == expected


def check_union() -> None:
    """A sample is in the union iff it is certified under every threat; what was skipped is not certified."""
    from cure_ray.certification.balls import Certifier
    from cure_ray.certification.job import CascadeSettings
    from cure_ray.threats.balls import Ball

    class PerNorm(ScriptedEngine):
        def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: object, box: bool = True) -> Scripted:
            found = super().problem(x_BCHW, y_B, threat, box)
            return replace(found, numbers=found.numbers + (10 if threat.norm == "l2" else 0))

    x, y = samples(4)
    script = {0: {"ibp": GOOD}, 1: {"ibp": GOOD}, 10: {"ibp": GOOD}, 12: {"ibp": GOOD}}
    certifier = Certifier(PerNorm(script), constant(10.0), CascadeSettings(("ibp",)))
    linf, l2 = certifier.certify_union(x, y, [Ball("linf", 0.1), Ball("l2", 0.1)], range(4))
    assert [str(o.status) for o in linf] == ["certified", "certified", "unknown", "unknown"]
    assert [str(o.status) for o in l2] == ["certified", "unknown", "unknown", "unknown"]
    assert [o.stage for o in l2] == ["ibp", "ibp", "skipped", "skipped"]


def steep() -> nn.Sequential:
    """Class 0 where the mean pixel is below 0.55; margins of single images are easy to break at a radius of 0.1 and not of 0.01."""
    last = nn.Linear(SIDE * SIDE, 3)
    with torch.no_grad():
        last.weight.zero_()
        last.weight[1] = 1 / (SIDE * SIDE)
        last.bias.copy_(torch.tensor([0.55, 0.0, -1.0]))
    return nn.Sequential(nn.Flatten(), last).eval().requires_grad_(False)


def check_alarms() -> None:
    """A lie is caught: a broken sample called certified, and a bound slightly above the margin of a real image. Witnesses are real."""
    from cure_ray.certification.balls import Certifier
    from cure_ray.certification.job import CascadeSettings
    from cure_ray.errors import SoundnessError
    from cure_ray.threats.balls import Ball

    x, y = samples(3)
    x[:, 0, 0, 0] = 0.5
    with tempfile.TemporaryDirectory() as folder:
        for stages, eps, margins in (
            (("ibp",), 0.1, [1e-3, 1e-3]),  # misclassified inside the ball
            (("ibp",), 0.0, [0.05 + 1e-5, 0.5]),  # the margin is 0.05
            (("attack", "crown"), 0.0, [0.05 + 1e-5, 0.5]),
        ):
            liar = ScriptedEngine({50: dict.fromkeys(STAGES, margins)})
            certifier = Certifier(liar, steep(), CascadeSettings(stages), bundles=Path(folder))
            try:
                certifier.certify(x, y, Ball("linf", eps), range(3))
            except SoundnessError:
                continue
            raise AssertionError(f"no alarm at {eps} by {stages}")
    certifier = Certifier(ScriptedEngine({}), steep(), CascadeSettings(("ibp", "attack")))
    for outcome, image in zip(certifier.certify(x, y, Ball("linf", 0.1), range(3)), x, strict=True):
        assert str(outcome.status) == "falsified"
        assert steep().double()(outcome.witness[None]).argmax() != 0
        assert float((outcome.witness - image.double()).abs().max()) <= 0.1
    assert [str(o.status) for o in certifier.certify(x, y, Ball("linf", 0.01), range(3))] == ["unknown"] * 3


def check_cascade() -> None:
    """Everything here: used on every mutant of the cascade."""
    check_scripts()
    check_branching()
    check_union()
    check_alarms()
