"""Threats of every family: each sent to the procedure that proves it, by the stages that can decide it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from cure_ray.bounds.arithmetic import out_of_memory
from cure_ray.bounds.engine import Engine, Stage
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import Certifier, Outcome
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.patches import PatchSettings, certify_patch
from cure_ray.certification.transformations import GeometricSettings, certify_geometric, check_budget
from cure_ray.certification.verdict import Status
from cure_ray.errors import SoundnessError, UserError
from cure_ray.threats import Ball, Patch, Threat, Transformation


def enabled_stages(threat: Threat, settings: CascadeSettings) -> tuple[str, ...]:
    """What can decide a row of this threat. Leaves of transformations may be tightened by CROWN-IBP; patches are IBP alone."""
    if isinstance(threat, Ball):
        return settings.stages
    return tuple(stage for stage in settings.stages if stage in _usable(threat, settings))


def _usable(threat: Transformation | Patch, settings: CascadeSettings) -> tuple[str, ...]:
    linear = isinstance(threat, Transformation) and not settings.separate_logits  # linear bounds are of differences of logits
    return ("ibp", "crown-ibp", "attack") if linear else ("ibp", "attack")


def check_feasible(threats: Sequence[Threat], settings: CascadeSettings, union_only: bool, images: int, yes: bool) -> None:
    """Before anything starts: refuse what would not do what was asked, and grids nobody meant, unless confirmed."""
    for threat in threats:
        if isinstance(threat, Ball):
            continue
        if union_only:
            raise UserError(f"--union-only is about norms; certify {threat} without it")
        if not enabled_stages(threat, settings):
            able, given = ", ".join(_usable(threat, settings)), ", ".join(settings.stages)
            raise UserError(f"{threat} is decided by the stages {able}, and none of them is enabled (enabled: {given})")
        if isinstance(threat, Transformation):
            check_budget(threat, images, GeometricSettings(yes=yes))


def certify_any(certifier: Certifier, x_BCHW: Tensor, y_B: Tensor, threat: Threat, indices: Sequence[int]) -> list[Outcome]:
    """The cascade for balls; bisection or windows for the other families."""
    if isinstance(threat, Ball):
        return certifier.certify(x_BCHW, y_B, threat, indices)
    outcomes, size, c = list[Outcome](), certifier.settings.batch, certifier
    for start in range(0, len(x_BCHW), size):  # the cascade's batches, so that bounds do not depend on the shards
        part = slice(start, start + size)
        outcomes += _isolated(certifier, x_BCHW[part], y_B[part], threat, list(indices[part]))
    for stage, decided in Counter(o.stage if o.status != Status.UNKNOWN else "open" for o in outcomes).items():
        c.progress(stage, decided)
    return outcomes


def _isolated(c: Certifier, x_BCHW: Tensor, y_B: Tensor, threat: Transformation | Patch, indices: list[int]) -> list[Outcome]:
    """A batch, and where that fails its halves, so that one bad sample costs only itself."""
    try:
        return certify_perturbed(c.engine, c.network, x_BCHW, y_B, threat, c.settings, c.seed, indices, c.bundles)
    except (UserError, SoundnessError):
        raise
    except Exception as error:
        if len(x_BCHW) == 1:
            outcome, stage = Outcome(int(y_B[0])), enabled_stages(threat, c.settings)[0]
            outcome.decide(Status.OOM if out_of_memory(error) else Status.ERROR, stage, f"{type(error).__name__}: {error}"[:500])
            return [outcome]
        half = len(x_BCHW) // 2
        parts = (slice(0, half), slice(half, None))
        return [o for part in parts for o in _isolated(c, x_BCHW[part], y_B[part], threat, indices[part])]


def certify_perturbed(
    engine: Engine, network: nn.Module, x_BCHW: Tensor, y_B: Tensor, threat: Transformation | Patch, cascade: CascadeSettings, seed: int,
    indices: Sequence[int], bundles: Path,
) -> list[Outcome]:  # fmt: skip
    """Outcomes under a transformation or a patch, in order."""
    if not isinstance(engine, NativeEngine) or not isinstance(network, nn.Sequential):
        raise UserError(f"{threat}: transformations and patches are certified by the native engine on sequential networks only")
    stages = enabled_stages(threat, cascade)
    if isinstance(threat, Patch):
        how = PatchSettings(attack="attack" in stages, prove="ibp" in stages, precheck=cascade.patch_precheck)
        return certify_patch(engine, network, x_BCHW, y_B, threat, how, indices, bundles)
    bounds: tuple[Stage, ...] = tuple(s for s in ("ibp", "crown-ibp") if s in stages)
    settings = GeometricSettings(
        bounds, attack="attack" in stages, yes=True, separate_logits=cascade.separate_logits  # asked before the run began
    )  # fmt: skip
    return certify_geometric(engine, network, x_BCHW, y_B, threat, settings, seed, indices, bundles)
