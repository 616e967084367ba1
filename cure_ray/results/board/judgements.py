"""Rows of published networks that were judged here: from the judgements that `cure-ray judge` wrote, where the zoo has no store of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cure_ray.config._explain import explain
from cure_ray.errors import UserError
from cure_ray.results.board.rows import Ball, Figure, Link, Row, figure, read_protocol
from cure_ray.results.judgement import FORMAT
from cure_ray.results.report.sources import href
from cure_ray.zoo.published import UNION, Published


class Measured(BaseModel):
    """One number of a judgement: so many of n images."""

    what: str
    threat: str | None
    count: int = Field(ge=0)
    n: int = Field(ge=1)


class Weights(BaseModel):
    file: str
    sha256: str
    recognised: str


class Settings(BaseModel):
    """Of the cascade; only what a reader needs to know."""

    engine: str
    engine_version: str
    nodes: int
    seed: int
    stages: tuple[str, ...]


class Read(BaseModel):
    """A judgement as it stands in its file."""

    model_config = ConfigDict(extra="ignore")

    format: str = Field(pattern=f"^{FORMAT}$")
    name: str
    threats: str
    identity: str
    weights: Weights
    data: Mapping[str, Any]
    settings: Settings
    figures: tuple[Measured, ...]
    hardware: str
    cpu_seconds: float | None
    seconds: float
    command: str
    versions: Mapping[str, str]


def read_judgement(path: Path) -> Read:
    try:
        return Read.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        said = explain(error, Read) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"{path} is not a judgement that `cure-ray judge` wrote: {said}") from None


def judged_row(path: Path, published: Mapping[str, Published], page: Path) -> Row:
    """The row of one judgement; UserError if it is about another protocol or another network than the description of its name."""
    read = read_judgement(path)
    described = published.get(read.name)
    if described is None:
        raise UserError(f"{path} judges {read.name!r}, which no file describes")
    protocol = read_protocol(described.data.name, described.protocol.threats, f"{described.name}.yaml")
    if read_protocol(str(read.data.get("name")), read.threats, str(path)) != protocol:
        raise UserError(
            f"{path} judges {read.name} on {read.data.get('name')} under {read.threats}, its description says {described.data.name} under "
            f"{described.protocol.threats}: another protocol. Judge it again."
        )
    expected = described.weights.identity if described.weights else None
    if expected not in (None, read.identity) or read.weights.recognised == "not verified":
        raise UserError(f"{path} judges another network than {described.name}.yaml describes (identity {read.identity[:12]})")
    names = {norm: f"{norm}={eps:g}" for norm, eps in protocol.balls}
    whole = UNION if len(names) > 1 else next(iter(names.values()))
    place = Link(f"docs/board/{path.name}", href(path, page))

    def number(what: str, threat: str | None) -> Figure | None:
        found = [m for m in read.figures if (m.what, m.threat) == (what, threat)]
        best = max(found, key=lambda m: m.n) if found else None
        return figure([100 * best.count / best.n], best.n, place.text, place.href) if best else None

    union, bound = number("certified", whole), number("not broken", whole)
    return Row(
        anchor=described.name,
        protocol=protocol,
        network=described.name,
        title=described.title,
        by=described.authors,
        kind="recertified",
        certifier=f"cure_ray {read.settings.engine_version} ({read.settings.engine})",
        clean=number("clean", None),
        union=union,
        bound=bound,
        balls=tuple(Ball(norm, eps, number("certified", names[norm]), number("not broken", names[norm])) for norm, eps in protocol.balls),
        open=round(union.n * (bound.percent - union.percent) / 100, 2) if bound and union and union.n else None,
        n=union.n if union else None,
        year=described.year,
        seconds=read.seconds if read.cpu_seconds is None else read.cpu_seconds,
        facts=_facts(read, described),
        commands=(read.command,),
        source=place,
        links=(place, *([Link(described.source.url, described.source.url)] if described.source else [])),
    )


def _facts(read: Read, described: Published) -> tuple[tuple[str, str], ...]:
    settings = read.settings
    return (
        ("paper", f"{described.authors}: {described.paper}"),
        ("network", described.network),
        ("images", f"{read.data.get('n')} of the {read.data.get('split')} split of {read.data.get('name')}"),
        ("digest of the images", str(read.data.get("digest"))),
        ("stages and budgets", f"{', '.join(settings.stages)}; at most {settings.nodes:,} sub-problems per image and ball"),
        ("seed of the attacks", str(settings.seed)),
        ("weights", f"{read.weights.file}: {read.weights.recognised}"),
        ("SHA-256 of their file", read.weights.sha256),
        ("identity of the network", read.identity),
        ("certified on", read.hardware),
        ("versions", ", ".join(f"{name} {version}" for name, version in read.versions.items())),
    )
