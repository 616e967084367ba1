"""A row of the board: one network under one protocol, judged by one certifier, every number with what it rests on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cure_ray.catalogue.published import PUBLISHED
from cure_ray.errors import UserError
from cure_ray.results.report.words import pretty
from cure_ray.results.statistics import pareto_front, wilson
from cure_ray.threats.norms import NORMS
from cure_ray.threats.text import parse_balls

Kind = Literal["ours", "recertified", "published"]
KINDS: dict[Kind, str] = {
    "ours": "trained and proven here",
    "recertified": "weights of others, proven here",
    "published": "as its authors printed it",
}


@dataclass(frozen=True)
class Protocol:
    """The data set and the balls whose union is certified: what must be equal for two rows to be compared."""

    dataset: str
    balls: tuple[tuple[str, float], ...]  # in the order of NORMS

    @property
    def data(self) -> str:
        return (PUBLISHED[self.dataset].display if self.dataset in PUBLISHED else "") or self.dataset

    @property
    def threats(self) -> str:
        """As `--threats` takes them."""
        return ",".join(f"{norm}={radius(eps)}" for norm, eps in self.balls)

    @property
    def title(self) -> str:
        return f"{self.data}: {' ∪ '.join(ball_name(norm, eps) for norm, eps in self.balls)}"

    @property
    def anchor(self) -> str:
        return "".join(c if c.isalnum() or c == "." else "-" for c in f"{self.dataset}-{self.threats}")

    @property
    def headline(self) -> str:
        return "certified union" if len(self.balls) > 1 else "certified"


def read_protocol(dataset: str, threats: str, who: str) -> Protocol:
    """From the text of a file; `who` is named where it is not about norm balls."""
    try:
        balls = [(ball.norm, float(ball.eps)) for ball in parse_balls(threats)]
    except UserError as error:
        raise UserError(f"{who}: the board is about unions of norm balls; {error}") from None
    return Protocol(dataset, tuple(sorted(balls, key=lambda ball: NORMS.index(ball[0]))))


def radius(eps: float) -> str:
    """As people write it: levels of 8-bit images as fractions."""
    levels = eps * 255
    short = f"{eps:g}"
    return f"{round(levels)}/255" if len(short) > 5 and round(levels) > 0 and abs(levels - round(levels)) < 1e-6 else short


def ball_name(norm: str, eps: float) -> str:
    return f"{pretty(norm)}\u00a0{radius(eps)}"


@dataclass(frozen=True)
class Figure:
    """A percentage, the images it is a share of, and where it can be looked up."""

    percent: float
    n: int | None = None  # None: the source does not say
    low: float | None = None  # 95 % Wilson interval for n images
    high: float | None = None
    sd: float | None = None  # over seeds
    source: str = ""
    href: str = ""


def figure(values: Sequence[float], n: int | None, source: str = "", href: str = "") -> Figure:
    """The mean over seeds. Its interval is that of the mean for n images, as in every table: seeds share their images."""
    mean = sum(values) / len(values)
    spread = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else None
    if n is None:
        return Figure(mean, None, None, None, spread, source, href)
    low, high = wilson(mean / 100 * n, n)
    return Figure(mean, n, 100 * float(low), 100 * float(high), spread, source, href)


@dataclass(frozen=True)
class Ball:
    """What is known under one ball of the protocol."""

    norm: str
    eps: float
    certified: Figure | None = None
    bound: Figure | None = None  # correct and not broken

    @property
    def name(self) -> str:
        return ball_name(self.norm, self.eps)


@dataclass(frozen=True)
class Link:
    """Something to look up, and its address where there is one."""

    text: str
    href: str = ""


def on_the_web(url: str) -> str:
    """An address that a file names, if it is one of the web: under other schemes a link may be a program."""
    return url if url.startswith(("https://", "http://")) else ""


@dataclass(frozen=True)
class Row:
    """A network, what is claimed or proven about it, and everything a reader needs to check that."""

    name: str  # of its own, whatever else is on the board
    protocol: Protocol
    network: str  # the same for a published network and its recertification
    title: str
    by: str
    kind: Kind
    certifier: str
    clean: Figure | None = None
    union: Figure | None = None
    bound: Figure | None = None  # correct and not broken under any ball
    balls: tuple[Ball, ...] = ()
    open: float | None = None  # images whose union is neither proven nor refuted; the mean over seeds
    n: int | None = None
    seeds: int | None = None
    year: int | None = None
    seconds: float | None = None  # of certification, per seed
    recomputable: bool = True  # whether the weights can be had
    facts: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()
    source: Link | None = None
    links: tuple[Link, ...] = ()  # more of them

    @property
    def anchor(self) -> str:
        """Its address on the page, where other things have names too."""
        return f"net-{self.name}"

    @property
    def proven(self) -> bool:
        """Whether there is a verdict here for every image, rather than a number in a paper."""
        return self.kind != "published"


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Proven here first, then the largest union; names decide between equals."""
    return sorted(rows, key=lambda r: (not r.proven, -(r.union.percent if r.union else -1.0), r.title, r.name))


def protocols(rows: Sequence[Row]) -> list[Protocol]:
    """By data set; unions of more balls first, then small radii; norms decide between equals."""
    known = {name: i for i, name in enumerate(PUBLISHED)}
    found = {r.protocol for r in rows}
    return sorted(found, key=lambda p: (known.get(p.dataset, len(known)), p.dataset, -len(p.balls), [(eps, norm) for norm, eps in p.balls]))


def on_front(rows: Sequence[Row]) -> list[Row]:
    """The rows no other one beats in clean and certified accuracy at once, by clean accuracy."""
    drawn = [r for r in rows if r.clean and r.union]
    if not drawn:
        return []
    best = pareto_front([(r.clean.percent, r.union.percent) for r in drawn if r.clean and r.union])
    return sorted((r for r, keep in zip(drawn, best, strict=True) if keep), key=lambda r: r.clean.percent if r.clean else 0.0)
