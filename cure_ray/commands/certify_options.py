"""Options of `cure-ray certify` as the library's own types."""

from cure_ray.attacks import attack_settings
from cure_ray.certification.job import DEFAULT_STAGES, CascadeSettings
from cure_ray.config import Certification
from cure_ray.errors import UserError

LONG = 3600.0  # seconds a sample gets when only its nodes are limited: a guard, not a budget


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
    defaults: Certification | None, stages: str | None, budget: str | None, nodes: int | None, engine: str, box: bool,
    patch_precheck: bool = False, separate_logits: bool = False, attack: str | None = None,
) -> CascadeSettings:  # fmt: skip
    base = CascadeSettings(defaults.stages if defaults else DEFAULT_STAGES)
    seconds = parse_seconds(budget) if budget is not None else (defaults.seconds if defaults else 0.0)
    if budget is None and nodes:
        seconds = LONG
    picked = tuple(s.strip() for s in stages.split(",") if s.strip()) if stages else base.stages
    if stages is None and seconds > 0 and engine == "native" and "branch-and-bound" not in picked:
        picked += ("branch-and-bound",)
    if stages is None and engine != "native":
        picked = tuple(s for s in picked if s != "branch-and-bound")
    if "branch-and-bound" in picked and seconds <= 0 and stages is not None:
        raise UserError("branch-and-bound needs a budget per sample, for example --nodes 1000 or --budget 10s")
    if "branch-and-bound" not in picked:
        seconds = 0.0
    limit = nodes if nodes is not None else (defaults.nodes if defaults else base.nodes)
    search = attack_settings(attack or (defaults.attack if defaults else "default"))
    return CascadeSettings(picked, seconds, limit, search, box, patch_precheck=patch_precheck, separate_logits=separate_logits)
