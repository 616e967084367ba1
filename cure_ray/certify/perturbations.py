"""Threats of every family as one list: `linf=0.1,R(10),patch=2x2` read, and each sent to the procedure that proves it."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

from cure_ray.bounds.engine import Engine, Stage
from cure_ray.bounds.native import NativeEngine
from cure_ray.certify.cascade import Certifier, Outcome
from cure_ray.certify.geometric import GeometricSettings, certify_geometric, check_budget
from cure_ray.certify.patch import Patch, certify_patch, parse_patch
from cure_ray.certify.verdict import Status
from cure_ray.config.transforms import Transformation, is_geometric, parse_transformation
from cure_ray.errors import SoundnessError, UserError
from cure_ray.threats import Threat

AnyThreat = Threat | Transformation | Patch


def split_threats(text: str) -> list[str]:
    """The parts of a list. Commas separate, except between transformations, which they compose; semicolons always separate."""
    parts = list[str]()
    for group in text.split(";"):
        open_transformation = False
        for piece in _outside_parentheses(group):
            if not piece.strip():
                continue
            geometric = is_geometric(piece)
            if geometric and open_transformation:
                parts[-1] += "," + piece.strip()
            else:
                parts.append(piece.strip())
            open_transformation = geometric
    return parts


def _outside_parentheses(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def parse_any_threats(text: str, dataset: str, image_shape: Sequence[int]) -> list[AnyThreat]:
    """Norm balls, transformations (with the data set's published split widths) and patches, in the order written."""
    found = list[AnyThreat]()
    for part in split_threats(text):
        if part.startswith("patch"):
            found.append(parse_patch(part, (image_shape[-2], image_shape[-1])))
        elif is_geometric(part) and not part.startswith("l"):  # linf:0.1 is a norm misspelt
            found.append(parse_transformation(part, dataset))
        else:
            found.append(_ball(part))
    names = [str(t) for t in found]
    balls = [t.norm for t in found if isinstance(t, Threat)]
    if len(set(names)) != len(names) or len(set(balls)) != len(balls):
        raise UserError(f"--threats: one radius per norm and no threat twice, got {text}")
    return found


def _ball(part: str) -> Threat:
    norm, _, radius = part.partition("=")
    try:
        eps = float(Fraction(radius.strip())) if "/" in radius else float(radius)
    except (ValueError, ZeroDivisionError):
        raise UserError(f"--threats: {part!r} is not like linf=0.1 or linf=8/255") from None
    return Threat(norm.strip(), eps)  # type: ignore[arg-type]  # Threat checks the name itself


def family(threat: AnyThreat) -> str:
    return "lp" if isinstance(threat, Threat) else threat.norm


def enabled_stages(threat: AnyThreat, cascade: Sequence[str]) -> tuple[str, ...]:
    """What can decide a row of this threat. Leaves of transformations may be tightened by CROWN-IBP; patches are IBP alone."""
    if isinstance(threat, Threat):
        return tuple(cascade)
    usable = ("ibp", "crown-ibp", "attack") if isinstance(threat, Transformation) else ("ibp", "attack")
    return ("ibp", *(s for s in cascade if s in usable and s != "ibp"))


def check_affordable(threats: Sequence[AnyThreat], union_only: bool, images: int, yes: bool) -> None:
    """Before anything starts: refuse grids nobody meant, unless confirmed."""
    for threat in threats:
        if union_only and not isinstance(threat, Threat):
            raise UserError(f"--union-only is about norms; certify {threat} without it")
        if isinstance(threat, Transformation):
            check_budget(threat, images, GeometricSettings(yes=yes))


def certify_any(certifier: Certifier, x_BCHW: Tensor, y_B: Tensor, threat: AnyThreat, indices: Sequence[int]) -> list[Outcome]:
    """The cascade for balls; bisection or windows for the other families."""
    if isinstance(threat, Threat):
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
        return certify_perturbed(c.engine, c.network, x_BCHW, y_B, threat, c.settings.stages, c.seed, indices, c.bundles)
    except (UserError, SoundnessError):
        raise
    except Exception as error:
        if len(x_BCHW) == 1:
            text = str(error).lower()
            full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in text or "can't allocate" in text
            outcome = Outcome(int(y_B[0]))
            outcome.decide(Status.OOM if full else Status.ERROR, "ibp", f"{type(error).__name__}: {error}"[:500])
            return [outcome]
        half = len(x_BCHW) // 2
        parts = (slice(0, half), slice(half, None))
        return [o for part in parts for o in _isolated(c, x_BCHW[part], y_B[part], threat, indices[part])]


def certify_perturbed(
    engine: Engine, network: nn.Module, x_BCHW: Tensor, y_B: Tensor, threat: Transformation | Patch, stages: Sequence[str], seed: int,
    indices: Sequence[int], bundles: Path,
) -> list[Outcome]:  # fmt: skip
    """Outcomes under a transformation or a patch, in order."""
    if not isinstance(engine, NativeEngine) or not isinstance(network, nn.Sequential):
        raise UserError(f"{threat}: transformations and patches are certified by the native engine on sequential networks only")
    if isinstance(threat, Patch):
        return certify_patch(engine, network, x_BCHW, y_B, threat, None, indices, bundles)
    leaf: tuple[Stage, ...] = ("ibp", "crown-ibp") if "crown-ibp" in stages else ("ibp",)
    settings = GeometricSettings(stages=leaf, yes=True)  # asked before the run began
    return certify_geometric(engine, network, x_BCHW, y_B, threat, settings, seed, indices, bundles)
