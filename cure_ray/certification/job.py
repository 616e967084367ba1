"""What a certification run is: the cascade's settings, the job they make with a checkpoint and data, and its shards."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cure_ray import __version__
from cure_ray.attacks import AttackSettings
from cure_ray.bounds.engine import Engine
from cure_ray.certification.verdict import SCHEMA_VERSION
from cure_ray.config.stages import CASCADE, DEFAULT_STAGES
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError, nearest
from cure_ray.threats import Threat
from cure_ray.threats.box import UNIT, Box

MOST_NODES = 2**63 - 1  # what a column of the results holds


@dataclass(frozen=True)
class CascadeSettings:
    """Everything about the cascade that can change a verdict, and the batch size, which cannot."""

    stages: tuple[str, ...] = DEFAULT_STAGES
    seconds: float = 0.0  # branch and bound, per sample
    nodes: int = 20_000  # branch and bound, per sample
    attack: AttackSettings = field(default_factory=AttackSettings)
    box: Box = UNIT  # the domain of the inputs: balls are cut off by it
    batch: int = 50
    patch_precheck: bool = False  # patches: first one loose bound for all positions together
    separate_logits: bool = False  # transformations: compare bounds of single logits, by IBP alone (A29)

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in CASCADE:
                raise UserError(f"unknown stage {stage!r}.{nearest(stage, CASCADE)}")
        if self.attack.begun:
            raise UserError(f"an attack is asked for from its beginning, not from restart {self.attack.begun}")
        if not self.stages:
            raise UserError(f"no stage selected. Valid: {', '.join(CASCADE)}.")
        if not self.seconds >= 0 or self.nodes < 0 or self.batch < 1:
            raise UserError(f"budgets must not be negative: seconds={self.seconds}, nodes={self.nodes}, batch={self.batch}")
        if self.nodes > MOST_NODES:
            raise UserError(f"at most {MOST_NODES:,} nodes, got {self.nodes}")
        object.__setattr__(self, "box", Box.of(self.box))  # True and False are understood
        ordered = tuple(stage for stage in CASCADE if stage in self.stages)
        object.__setattr__(self, "stages", ordered)

    def key(self) -> dict[str, Any]:
        """Every field but the sizes of batches, by construction: a new one cannot be forgotten."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "batch"}
        attack = {name: value for name, value in asdict(self.attack).items() if name not in ("rows", "begun")}
        return {**known, "stages": list(self.stages), "attack": attack, "box": str(self.box)}

    @staticmethod
    def of(key: Mapping[str, Any]) -> "CascadeSettings":
        """The settings `key` was made of, but for the sizes of batches."""
        return CascadeSettings(
            **{**key, "stages": tuple(key["stages"]), "attack": AttackSettings(**key["attack"]), "box": Box.of(key["box"])}
        )


@dataclass(frozen=True)
class Job:
    """A network, its data and how it is certified. Two jobs with the same run_id give the same verdicts."""

    checkpoint_digest: str  # the network's identity (certification/identity.py)
    dataset: str
    split: str
    data_digest: str
    engine: str
    engine_version: str
    settings: CascadeSettings
    seed: int
    union_only: bool = False
    engine_options: str = "{}"  # what the engine was made with, as JSON
    program: str = __version__  # attacks, replays and the order of stages are this program's, whichever engine bounds

    def key(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "checkpoint_digest": self.checkpoint_digest,
            "dataset": self.dataset,
            "split": self.split,
            "data_digest": self.data_digest,
            "engine": self.engine,
            "engine_version": self.engine_version,
            "settings": self.settings.key(),
            "seed": self.seed,
            "union_only": self.union_only,
            "engine_options": json.loads(self.engine_options),
            "program": self.program,
        }

    @staticmethod
    def make(identity: str, samples: Samples, engine: Engine, settings: CascadeSettings, seed: int, union_only: bool = False) -> "Job":
        """The job of certifying these samples; `identity` is `network_identity` of the network the engine bounds."""
        options = json.dumps(engine.options, sort_keys=True)
        data = (samples.dataset, samples.split, samples.digest)
        return Job(identity, *data, engine.name, engine.version, settings, seed, union_only, options)

    @staticmethod
    def of(key: Mapping[str, Any]) -> "Job":
        """The job `key` was made of."""
        known = {f.name: key[f.name] for f in fields(Job)}
        options = json.dumps(key["engine_options"], sort_keys=True)
        return Job(**{**known, "settings": CascadeSettings.of(key["settings"]), "engine_options": options})

    @property
    def run_id(self) -> str:
        return hash_key(self.key())


@dataclass(frozen=True)
class Shard:
    """Samples of a job under one threat (or, for --union-only, under several in the order they are tried)."""

    job: Job
    threats: tuple[Threat, ...]
    indices: tuple[int, ...]

    @property
    def name(self) -> str:
        """Content-addressed: the same work has the same name everywhere."""
        threats = [[str(t), t.eps.hex(), t.grid] for t in self.threats]
        key = hash_key({**self.job.key(), "threats": threats, "indices": list(self.indices)})
        readable = "+".join(str(t) for t in self.threats)
        return f"{self.job.checkpoint_digest[:12]}-{readable}-{self.indices[0]:06d}-{self.indices[-1]:06d}-{key}.parquet"


def plan(job: Job, threats: Sequence[Threat], indices: Sequence[int], done: "set[tuple[str, int]]", size: int = 100) -> list[Shard]:
    """Shards for what is not done yet: whatever the sharding of an earlier run was, no sample is computed twice."""
    groups = [tuple(threats)] if job.union_only else [(t,) for t in threats]
    shards = []
    for group in groups:
        todo = [i for i in indices if any((str(t), i) not in done for t in group)]
        shards += [Shard(job, group, tuple(todo[k : k + size])) for k in range(0, len(todo), size)]
    return shards


def hash_key(value: Any) -> str:
    """The hash by which runs and shards are named."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
