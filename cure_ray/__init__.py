"""cure_ray: certified training for the union of perturbation norms (CURE), on Ray, with the proofs to go with it.

The library in a few names; everything else is behind them. Importing it loads neither torch nor ray.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from cure_ray.api.board import board as board
    from cure_ray.api.certify import CertificationResult as CertificationResult
    from cure_ray.api.certify import certify as certify
    from cure_ray.api.radius import RadiusResult as RadiusResult
    from cure_ray.api.radius import radius as radius
    from cure_ray.api.report import report as report
    from cure_ray.api.results import Results as Results
    from cure_ray.api.results import load_results as load_results
    from cure_ray.api.sweep import sweep as sweep
    from cure_ray.api.train import Run as Run
    from cure_ray.api.train import train as train
    from cure_ray.config import Experiment as Experiment
    from cure_ray.config import load_experiment as load_experiment
    from cure_ray.errors import UserError as UserError
    from cure_ray.threats import Ball as Ball
    from cure_ray.threats import Patch as Patch
    from cure_ray.threats import Transformation as Transformation

_HOMES = {
    "Ball": "threats",
    "CertificationResult": "api.certify",
    "Experiment": "config",
    "Patch": "threats",
    "RadiusResult": "api.radius",
    "Results": "api.results",
    "Run": "api.train",
    "Transformation": "threats",
    "UserError": "errors",
    "board": "api.board",
    "certify": "api.certify",
    "load_experiment": "config",
    "load_results": "api.results",
    "radius": "api.radius",
    "report": "api.report",
    "sweep": "api.sweep",
    "train": "api.train",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "zoo":
        return importlib.import_module(f"{__name__}.zoo")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
