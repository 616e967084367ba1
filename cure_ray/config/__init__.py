"""Experiments as data: frozen pydantic models, YAML in and out, presets.

Every field is documented once, in its description: the same sentence is the command line's help and docs/reference/configuration.md.
Ambiguities of the paper are named A1..A30 (docs/explanation/algorithms.md); only those an experiment needs are fields.
"""

from cure_ray.config.experiment import Certification, Execution, Experiment
from cure_ray.config.files import (
    PRESETS,
    dump_experiment,
    load_experiment,
    parse_experiment,
    parse_override,
    resolve,
)
from cure_ray.config.methods import METHODS, Method
from cure_ray.config.problem import Dataset, NetworkConfig, Threats
from cure_ray.config.regions import Attack, Regions
from cure_ray.config.training import Training

__all__ = [
    "METHODS",
    "PRESETS",
    "Attack",
    "Certification",
    "Dataset",
    "Execution",
    "Experiment",
    "Method",
    "NetworkConfig",
    "Regions",
    "Threats",
    "Training",
    "dump_experiment",
    "load_experiment",
    "parse_experiment",
    "parse_override",
    "resolve",
]
