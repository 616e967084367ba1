"""SWEEP.yaml: a base experiment, the fields to search, how to search and how to judge. Pure data; no Ray and no files but the one read."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from cure_ray.config import Experiment, resolve
from cure_ray.config._base import Model, Positive
from cure_ray.config._explain import explain, model_at
from cure_ray.config.files import PRESETS, _load_yaml, _merge
from cure_ray.config.stages import NODES
from cure_ray.errors import UserError, nearest
from cure_ray.search.dimensions import Dimension, Point, Value, active, ordered
from cure_ray.search.layout import SUBMISSIONS, SWEEP
from cure_ray.threats.norms import NORMS

OBJECTIVES = ("union", "clean", "linf", "l2", "l1", "union_linf_l2")
MAY_CHANGE = {"trials", "hours", "concurrency", "storage", "wandb", "mlflow", "end_by_bound"}  # between calls: no part of the identity
NEWER: dict[str, Any] = {"at_least": {}, "nodes": 0}  # fields of 0.3: left out where they are off, older sweeps keep their identity
SHORT = ("preset", "profile", "scale")  # keys of a short experiment file, searchable like fields


class EarlyStopping(Model):
    """Asynchronous successive halving, on the objective measured at rungs after the radius ramp."""

    factor: Annotated[int, Field(ge=2)] = Field(3, description="At each rung the best 1/factor go on.")
    rungs: Annotated[int, Field(ge=1)] = Field(
        2, description="Rungs before the end; they lie at 1/factor, 1/factor^2, ... of the epochs after the ramp."
    )


@dataclass(frozen=True)
class Judging:
    """How a trained network is judged."""

    samples: int
    objectives: tuple[str, ...]
    constrained: tuple[str, ...] = ()
    nodes: int = 0
    seeds: int = 1  # networks whose mean makes a configuration


class Sweep(Model):
    """A search."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="A short name for tables and directories.")
    base: dict[str, Any] | str = Field(description="The experiment: its keys, or the name of a preset or file.")
    space: dict[str, Dimension] = Field(description="Fields to search, by their path, e.g. training.lambda_2.")
    search: Literal["tpe", "gp", "random", "nsga2", "grid"] = Field(
        "tpe", description="tpe, gp (Gaussian processes), random and nsga2 are Optuna's samplers; grid runs every combination."
    )
    objectives: Annotated[tuple[str, ...], Field(min_length=1)] = Field(("union",), description="What to maximise, in [0, 1].")
    at_least: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        {}, description="What a configuration must reach to count, e.g. {clean: 0.95}: any of the objectives' names."
    )
    samples: Annotated[int, Field(ge=1)] = Field(256, description="Validation images the objective is measured on.")
    nodes: Annotated[int, Field(ge=0)] = Field(
        NODES, description="Sub-problems of branch and bound the objective spends per image and norm; 0: alpha-CROWN is its last stage."
    )
    trials: Annotated[int, Field(ge=1)] | None = Field(None, description="Configurations in all; a grid runs all of its own by default.")
    hours: Positive | None = Field(None, description="Start no new configuration after so many hours of this call.")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, description="Every configuration is trained with each; objectives are means."
    )
    early_stopping: EarlyStopping | None = Field(None, description="Stop hopeless configurations early, at rungs.")
    end_by_bound: bool | None = Field(
        None,
        description="Judge a trained configuration no further than counterexamples rule out that it wins. Default: yes, but for grids.",
    )
    start_with: tuple[dict[str, Value], ...] = Field((), description="Configurations to try first.")
    concurrency: Annotated[int, Field(ge=1)] | None = Field(None, description="Trainings at once; by default what the cluster holds.")
    storage: str | None = Field(None, description="An Optuna storage URL; by default a journal in the sweep's directory.")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of the search.")
    wandb: dict[str, Any] | None = Field(None, description="Log to Weights & Biases too: arguments of Ray's WandbLoggerCallback, or {}.")
    mlflow: dict[str, Any] | None = Field(None, description="Log to MLflow too: arguments of Ray's MLflowLoggerCallback, or {}.")

    @property
    def judging(self) -> Judging:
        return Judging(self.samples, self.objectives, tuple(self.at_least), self.nodes, len(self.seeds))

    @property
    def measured(self) -> tuple[str, ...]:
        """Everything that is judged: objectives, then what is only constrained."""
        return tuple(dict.fromkeys((*self.objectives, *self.at_least)))

    @property
    def ends_by_bound(self) -> bool:
        return self.search != "grid" if self.end_by_bound is None else self.end_by_bound

    @property
    def identity(self) -> str:
        """What makes two sweeps the same one. Budgets, concurrency, storage, loggers and what ends by bound may change between calls."""
        content = self.model_dump(mode="json", by_alias=True, exclude=MAY_CHANGE)
        for name, off in NEWER.items():
            if content[name] == off:
                del content[name]
        if isinstance(self.base, dict):  # one's own images and code are known by their content, not by their place
            for section, place, written in (("dataset", "path", "content"), ("network", "factory", "code")):
                own = content["base"].get(section)
                if isinstance(own, dict) and own.get(written):
                    content["base"][section] = {key: value for key, value in own.items() if key != place}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.objectives:
            if name not in OBJECTIVES:
                raise ValueError(f"objectives: {name!r} is not produced.{nearest(name, OBJECTIVES)}")
        if len(set(self.objectives)) != len(self.objectives) or len(set(self.seeds)) != len(self.seeds):
            raise ValueError("objectives and seeds must not repeat an entry")
        for name in self.at_least:
            if name not in OBJECTIVES:
                raise ValueError(f"at_least: {name!r} is not produced.{nearest(name, OBJECTIVES)}")
        if self.search == "nsga2" and len(self.objectives) < 2:
            raise ValueError("nsga2 looks for a Pareto front: give at least two objectives, for example [clean, union]; else use tpe")
        if self.search == "grid":
            endless = [path for path, d in self.space.items() if d.values is None]
            if endless:
                raise ValueError(f"a grid needs finite values: {endless[0]} is a range; give it as choice or grid")
        elif self.trials is None and self.hours is None:
            raise ValueError(f"search {self.search} needs a budget: trials or hours")
        return self


def grid_points(sweep: Sweep, base: Experiment, limit: int = 100_000) -> Iterator[dict[str, Any]]:
    """Every combination of the examples of all fields, inactive fields left out, each once."""
    paths, seen = ordered(sweep.space), set[str]()
    for combination in itertools.islice(itertools.product(*(sweep.space[p].examples for p in paths)), limit):
        point: dict[str, Any] = {}
        for path, value in zip(paths, combination, strict=True):
            if active(sweep.space, path, point, base):
                point[path] = value
        key = json.dumps(point, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield point


def nested(point: Point) -> dict[str, Any]:
    """{"training.eta": 1} as {"training": {"eta": 1}}."""
    data: dict[str, Any] = {}
    for path, value in point.items():
        level: Any = value
        for key in reversed(path.split(".")):
            level = {key: level}
        data = _merge(data, level)
    return data


def base_data(sweep: Sweep) -> dict[str, Any]:
    """The base experiment as data that points can be laid over."""
    if isinstance(sweep.base, dict):
        return sweep.base
    if sweep.base in PRESETS:
        return {"preset": sweep.base}
    return _read_mapping(Path(sweep.base))


def pinned(sweep: Sweep) -> Sweep:
    """The sweep with the user's own images and code written out as they are now: the same in every process, and part of its identity."""
    data, base = base_data(sweep), resolve(base_data(sweep))
    own: dict[str, Any] = {}
    if base.dataset.content is not None:
        own["dataset"] = base.dataset.model_dump(mode="json", include={"path", "content", "name"})
    if base.network.factory is not None:
        own["network"] = base.network.model_dump(mode="json", include={"factory", "code", "arguments"})
    return sweep.model_copy(update={"base": _merge(data, own)}) if own else sweep


def experiment_at(sweep: Sweep, point: Point, number: int, seed: int) -> Experiment:
    """The experiment of a trial: the base with the point laid over it, one seed, and a name of its own."""
    data = _merge(base_data(sweep), nested(point))
    return resolve({**data, "seed": seed, "name": f"{sweep.name}-{number:04d}"})


def _check_paths(sweep: Sweep) -> None:
    for path in [*sweep.space, *(o for d in sweep.space.values() for o in d.when)]:
        keys = tuple(path.split("."))
        owner = model_at(Experiment, keys)
        known = list(owner.model_fields) if owner is not None else list(Experiment.model_fields)
        if path in SHORT or (owner is not None and keys[-1] in known) or path.startswith("network.arguments."):
            continue
        raise UserError(f"space: {path}: unknown field.{nearest(keys[-1], known)} `cure-ray config` lists all fields.")
    for path in sweep.space:
        if path in ("seed", "name", "origin") or path.startswith(("execution.", "certification.")):
            raise UserError(f"space: {path} is not searched: it does not change what is learnt (seeds are given by `seeds`)")


def _check_points(sweep: Sweep, base: Experiment) -> None:
    """Every combination of ends and choices must be a valid experiment: better said now than in hour ten."""
    if base.dataset.validation_size == 0:
        raise UserError("a search needs validation images, and this experiment holds none out: set dataset.validation, e.g. to 5000")
    for point in itertools.islice(grid_points(sweep, base), 256):
        try:
            experiment = experiment_at(sweep, point, 0, sweep.seeds[0])
        except UserError as error:
            shown = ", ".join(f"{k}={v}" for k, v in point.items()) or "the base"
            raise UserError(f"space: with {shown}: {error}. A field can be limited to some values of others with `when`.") from None
        for norm in NORMS:
            if norm in sweep.measured and experiment.threats.eps(norm) == 0:
                field = "objectives" if norm in sweep.objectives else "at_least"
                raise UserError(f"{field}: {norm} is not produced, its radius is 0")
            if "union_linf_l2" in sweep.measured and norm != "l1" and experiment.threats.eps(norm) == 0:
                raise UserError(f"union_linf_l2 is not produced, the radius of {norm} is 0")
    for point in sweep.start_with:
        unknown = [p for p in point if p not in sweep.space]
        if unknown:
            raise UserError(f"start_with: {unknown[0]} is not in the space.{nearest(unknown[0], list(sweep.space))}")


def _read_mapping(path: Path) -> dict[str, Any]:
    """A sweep's file, or one that comes with the program, by its name."""
    shipped = resources.files("cure_ray.presets").joinpath("sweeps", f"{path}.yaml")
    if not path.is_file() and not (path.name == str(path) and shipped.is_file()):
        raise UserError(f"{path}: no such file, and no sweep that comes with the program; `smoke` does")
    try:
        data = _load_yaml((path if path.is_file() else shipped).read_text(), str(path))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; expected YAML") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of keys, got {type(data).__name__}")
    return data


def _claimed(path: Path) -> bool:
    """Whether this is the file in a sweep's directory, where every setting is written out, and not one a person wrote."""
    return path.name == SWEEP and (path.parent / SUBMISSIONS).is_dir()


def _check_dimensions(space: Any) -> None:
    """Each on its own: pydantic's sentence about a key in a mapping of models does not name the right one."""
    for path, entry in space.items() if isinstance(space, dict) else ():
        try:
            Dimension.model_validate(entry)
        except ValidationError as error:
            raise UserError(f"space: {path}: {explain(error, Dimension)}") from None


def load_sweep(path: str | Path | Mapping[str, Any]) -> Sweep:
    """A checked sweep from its file, its name or its content: every end of its space is a valid experiment."""
    if not isinstance(path, str | Path | Mapping):
        raise UserError(f"a sweep is a YAML file, its name or its content as a dict, not {path!r}")
    data = dict(path) if isinstance(path, Mapping) else _read_mapping(Path(path))
    if not isinstance(path, Mapping) and _claimed(Path(path)):
        data = {**NEWER, **data}  # begun by an older version, which had none of these: it goes on as it began
    try:
        _check_dimensions(data.get("space"))
        try:
            sweep = Sweep.model_validate(data)
        except ValidationError as error:
            raise UserError(explain(error, Sweep)) from None
        _check_paths(sweep)
        ordered(sweep.space)
        _check_points(sweep, resolve(base_data(sweep)))
        return pinned(sweep)
    except UserError as error:
        raise UserError(f"{'the sweep' if isinstance(path, Mapping) else path}:\n{error}") from None
