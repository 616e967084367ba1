"""Options of `cure-ray certify` as the library's own types."""

from fractions import Fraction

from cure_ray.certify.settings import DEFAULT_STAGES, CascadeSettings
from cure_ray.config import Certification
from cure_ray.errors import UserError
from cure_ray.threats import Threat


def parse_threats(text: str) -> list[Threat]:
    """linf=8/255,l2=0.5 as threats."""
    found: list[Threat] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        norm, separator, radius = part.partition("=")
        try:
            eps = float(Fraction(radius.strip())) if "/" in radius else float(radius)
        except (ValueError, ZeroDivisionError):
            raise UserError(f"--threats: {part!r} is not like linf=0.1 or linf=8/255") from None
        if not separator:
            raise UserError(f"--threats: {part!r} is not like linf=0.1")
        found.append(Threat(norm.strip(), eps))  # type: ignore[arg-type]  # Threat checks the name itself
    if len({t.norm for t in found}) != len(found):
        raise UserError(f"--threats: one radius per norm, got {text}")
    return found


def parse_seconds(text: str) -> float:
    """10s, 2m, 1h or plain seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        raise UserError(f"--budget: {text!r} is not a time like 10s, 2m or 0") from None
    if not 0 <= value < float("inf"):
        raise UserError(f"--budget: {text!r} must not be negative or infinite")
    return value


def cascade_settings(
    defaults: Certification | None, stages: str | None, budget: str | None, nodes: int | None, engine: str, box: bool
) -> CascadeSettings:
    base = CascadeSettings(defaults.stages if defaults else DEFAULT_STAGES)
    seconds = parse_seconds(budget) if budget is not None else (defaults.seconds if defaults else 0.0)
    picked = tuple(s.strip() for s in stages.split(",") if s.strip()) if stages else base.stages
    if stages is None and seconds > 0 and engine == "native" and "branch-and-bound" not in picked:
        picked += ("branch-and-bound",)
    if stages is None and engine != "native":
        picked = tuple(s for s in picked if s != "branch-and-bound")
    if "branch-and-bound" in picked and seconds <= 0 and stages is not None:
        raise UserError("branch-and-bound needs a time per sample, for example --budget 10s")
    return CascadeSettings(picked, seconds, nodes if nodes is not None else (defaults.nodes if defaults else base.nodes), box=box)
