"""Rows of published networks that were judged here: from the judgements that `cure-ray judge` wrote, where the zoo has no store of them."""

from collections.abc import Mapping
from pathlib import Path

from cure_ray.errors import UserError
from cure_ray.results.board.rows import Ball, Figure, Link, Row, figure, on_the_web, read_protocol
from cure_ray.results.judgement import Judgement, read_judgement
from cure_ray.results.report.sources import href
from cure_ray.zoo.published import UNION, Published


def judged_row(path: Path, published: Mapping[str, Published], page: Path) -> Row:
    """The row of one judgement; UserError if it is about another protocol or another network than the description of its name."""
    read = read_judgement(path, published)
    described = read.published
    expected = described.weights.identity if described.weights else None
    if expected not in (None, read.identity) or read.weights["recognised"] == "not verified":
        raise UserError(f"{path} judges another network than {described.name}.yaml describes (identity {read.identity[:12]})")
    protocol = read_protocol(described.data.name, described.protocol.threats, f"{described.name}.yaml")
    names = {norm: f"{norm}={eps:g}" for norm, eps in protocol.balls}
    whole = UNION if len(names) > 1 else next(iter(names.values()))
    place = Link(f"docs/board/{path.name}", href(path, page))

    def number(what: str, threat: str | None) -> Figure | None:
        found = read.ours(what, threat)
        return figure([found.value], found.n, place.text, place.href) if found else None

    union, bound = number("certified", whole), number("not broken", whole)
    return Row(
        name=described.name,
        protocol=protocol,
        network=described.name,
        title=described.title,
        by=described.authors,
        kind="recertified",
        certifier=f"cure_ray {read.settings['engine_version']} ({read.settings['engine']})",
        clean=number("clean", None),
        union=union,
        bound=bound,
        balls=tuple(Ball(norm, eps, number("certified", names[norm]), number("not broken", names[norm])) for norm, eps in protocol.balls),
        open=round(union.n * (bound.percent - union.percent) / 100, 2) if bound and union and union.n else None,
        n=union.n if union else None,
        year=described.year,
        seconds=read.seconds if read.cpu_seconds is None else read.cpu_seconds,
        facts=_facts(read),
        commands=(read.command,),
        source=place,
        links=(place, *([Link(described.source.url, on_the_web(described.source.url))] if described.source else [])),
    )  # fmt: skip


def _facts(read: Judgement) -> tuple[tuple[str, str], ...]:
    described, data, settings = read.published, read.data, read.settings
    return (
        ("paper", f"{described.authors}: {described.paper}"),
        ("network", described.network),
        ("images", f"{data['n']} of the {data['split']} split of {data['name']}"),
        ("digest of the images", str(data["digest"])),
        ("stages and budgets", f"{', '.join(settings['stages'])}; at most {settings['nodes']:,} sub-problems per image and ball"),
        ("seed of the attacks", str(settings["seed"])),
        ("weights", f"{read.weights['file']}: {read.weights['recognised']}"),
        ("SHA-256 of their file", read.weights["sha256"]),
        ("identity of the network", read.identity),
        ("certified on", read.hardware),
        ("versions", ", ".join(f"{name} {version}" for name, version in read.versions.items())),
    )
