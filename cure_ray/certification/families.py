"""Threats of every family: each sent to the procedure that proves it, by the stages that can decide it."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from torch import Tensor, nn

from cure_ray.bounds.engine import Stage
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import Certifier
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome, isolate
from cure_ray.certification.patches import PatchSettings, certify_patch
from cure_ray.certification.transformations import GeometricSettings, certify_geometric, check_budget
from cure_ray.certification.verdict import Status
from cure_ray.errors import UserError
from cure_ray.threats import Ball, Balls, Patch, Threat, Transformation, Words
from cure_ray.threats.box import EVERYWHERE, UNIT


def enabled_stages(threat: Threat, settings: CascadeSettings) -> tuple[str, ...]:
    """What can decide a row of this threat. Leaves of transformations may be tightened by CROWN-IBP; patches are IBP alone."""
    if isinstance(threat, Ball | Balls):
        return settings.stages
    return tuple(stage for stage in settings.stages if stage in _usable(threat, settings))


def _usable(threat: Transformation | Patch | Words, settings: CascadeSettings) -> tuple[str, ...]:
    if isinstance(threat, Words):
        return ("attack",)
    linear = isinstance(threat, Transformation) and not settings.separate_logits  # linear bounds are of differences of logits
    return ("ibp", "crown-ibp", "attack") if linear else ("ibp", "attack")


def check_feasible(threats: Sequence[Threat], settings: CascadeSettings, union_only: bool, images: int, yes: bool) -> None:
    """Before anything starts: refuse what would not do what was asked, and grids nobody meant, unless confirmed."""
    for threat in threats:
        if isinstance(threat, Balls) and union_only:
            raise UserError(f"--union-only needs one radius for all images, and {threat.norm} has {len(threat.radii)}")
        if isinstance(threat, Ball | Balls):
            continue
        if isinstance(threat, Words):
            raise _not_proven(threat)
        if settings.box not in (UNIT, EVERYWHERE):
            raise UserError(f"{threat} is defined for images in [0, 1] only: certify it without the domain {settings.box.words()}")
        if union_only:
            raise UserError(f"--union-only is about norms; certify {threat} without it")
        if not enabled_stages(threat, settings):
            able, given = ", ".join(_usable(threat, settings)), ", ".join(settings.stages)
            raise UserError(f"{threat} is decided by the stages {able}, and none of them is enabled (enabled: {given})")
        if isinstance(threat, Transformation):
            check_budget(threat, images, GeometricSettings(yes=yes))


def _not_proven(threat: Words) -> UserError:
    return UserError(f"{threat} exchanges words, and nothing is proven about words: `cure-ray attack-text` attacks them")


def certify_any(certifier: Certifier, x_BCHW: Tensor, y_B: Tensor, threat: Threat, indices: Sequence[int]) -> list[Outcome]:
    """The cascade for balls; bisection or windows for the other families."""
    if isinstance(threat, Ball):
        return certifier.certify(x_BCHW, y_B, threat, indices)
    if isinstance(threat, Balls):
        return _certify_each(certifier, x_BCHW, y_B, threat, indices)
    if isinstance(threat, Words):
        raise _not_proven(threat)
    outcomes, size = [Outcome(int(label)) for label in y_B], certifier.settings.batch

    def work(members: Sequence[int]) -> None:
        part = slice(members[0], members[-1] + 1)
        outcomes[part] = certify_perturbed(certifier, x_BCHW[part], y_B[part], threat, indices[part])

    def failed(b: int, status: Status, what: str) -> None:
        outcomes[b].decide(status, enabled_stages(threat, certifier.settings)[0], what)

    for start in range(0, len(outcomes), size):  # the cascade's batches, so that bounds do not depend on the shards
        isolate(range(len(outcomes))[start : start + size], work, failed)
    for stage, decided in Counter(o.stage if o.status != Status.UNKNOWN else "open" for o in outcomes).items():
        certifier.progress(stage, decided)
    return outcomes


def _certify_each(certifier: Certifier, x_BCHW: Tensor, y_B: Tensor, balls: Balls, indices: Sequence[int]) -> list[Outcome]:
    """Images with the same radius share batches, as under a ball for all of them."""
    alike = defaultdict[Ball, list[int]](list)
    for place, index in enumerate(indices):
        alike[balls.at(index)].append(place)
    found = dict[int, Outcome]()
    for ball, places in alike.items():
        found |= zip(places, certifier.certify(x_BCHW[places], y_B[places], ball, [indices[p] for p in places]), strict=True)
    return [found[place] for place in range(len(indices))]


def certify_perturbed(c: Certifier, x_BCHW: Tensor, y_B: Tensor, threat: Transformation | Patch, indices: Sequence[int]) -> list[Outcome]:
    """Outcomes under a transformation or a patch, in order."""
    if not isinstance(c.engine, NativeEngine) or not isinstance(c.network, nn.Sequential):
        raise UserError(f"{threat}: transformations and patches are certified by the native engine on sequential networks only")
    stages = enabled_stages(threat, c.settings)
    if isinstance(threat, Patch):
        how = PatchSettings(attack="attack" in stages, prove="ibp" in stages, precheck=c.settings.patch_precheck)
        return certify_patch(c.engine, c.network, x_BCHW, y_B, threat, how, indices, c.alarm)
    bounds: tuple[Stage, ...] = tuple(s for s in ("ibp", "crown-ibp") if s in stages)
    settings = GeometricSettings(
        bounds, attack="attack" in stages, yes=True, separate_logits=c.settings.separate_logits  # asked before the run began
    )  # fmt: skip
    return certify_geometric(c.engine, c.network, x_BCHW, y_B, threat, settings, indices, c.alarm)
