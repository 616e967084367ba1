"""Rows of what was published: one per network and certifier, from the files that describe published networks."""

import re

from cure_ray.results.board.rows import Ball, Figure, Link, Row, figure, on_the_web, read_protocol
from cure_ray.zoo.published import UNION, Published, strongest


def published_rows(described: Published) -> list[Row]:
    """What its authors, or others, printed about a network. Numbers of one certifier make one row; attacks belong to all of them."""
    certifiers = list(dict.fromkeys(f.certifier for f in described.figures if f.what == "certified")) or [None]
    named = len(certifiers) > 1
    return [_row(described, c, "-".join([described.name, "published", *([_slug(c)] if named else [])])) for c in certifiers]


def _row(described: Published, certifier: str | None, name: str) -> Row:
    protocol = read_protocol(described.data.name, described.protocol.threats, f"{described.name}.yaml")
    headline = UNION if len(protocol.balls) > 1 else _threat(*protocol.balls[0])
    own = [f for f in described.figures if f.what != "certified" or f.certifier == certifier]
    place = _place(described)

    def found(what: str, threat: str | None) -> Figure | None:
        printed = strongest(own, what, threat)
        if printed is None:
            return None
        return figure([printed.value], printed.n, printed.source + (f"; {printed.certifier}" if printed.certifier else ""), place)

    union = found("certified", headline)
    return Row(
        name=name,
        protocol=protocol,
        network=described.name,
        title=described.title,
        by=described.authors,
        kind="published",
        certifier=certifier or "not stated",
        clean=found("clean", None),
        union=union,
        bound=found("not broken", headline),
        balls=tuple(Ball(n, e, found("certified", _threat(n, e)), found("not broken", _threat(n, e))) for n, e in protocol.balls),
        n=union.n if union else described.data.n,
        year=described.year,
        recomputable=described.recomputable,
        facts=_facts(described),
        source=Link(union.source.partition(";")[0] if union else "the paper", place),
        links=(*([Link(place, place)] if place else []), Link(f"cure_ray/zoo/published/{described.name}.yaml")),
    )


def _place(described: Published) -> str:
    """Where a reader can go: to the paper if its address is known, else to where the weights are."""
    number = re.search(r"arXiv[ :]*(\d{4}\.\d{4,5})", described.paper)
    return f"https://arxiv.org/abs/{number[1]}" if number else on_the_web(described.source.url) if described.source else ""


def _threat(norm: str, eps: float) -> str:
    return f"{norm}={eps:g}"


def _slug(text: str | None) -> str:
    return "".join(c if c.isalnum() else "-" for c in (text or "").lower())


def _facts(described: Published) -> tuple[tuple[str, str], ...]:
    weights, source, data = described.weights, described.source, described.data
    found = [
        ("paper", f"{described.authors}: {described.paper}"),
        ("network", described.network),
        ("images", f"{data.n} of the {data.split} split of {data.name}"),
    ]
    if weights is None or source is None:
        found.append(("weights", "none are known to be published: the figures cannot be recomputed"))
    else:
        place = " ".join(filter(None, [source.url, source.path, f"at commit {source.commit[:12]}" if source.commit else ""]))
        found += [
            ("weights", f"{place} (licence: {source.licence})"),
            ("SHA-256 of their file", weights.sha256 or ""),
            ("identity of the network", weights.identity or ""),
        ]
    return tuple((name, text) for name, text in [*found, ("notes", described.notes)] if text)
