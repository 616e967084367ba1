"""Inline SVG, coloured by CSS classes so that light, dark and print need no second picture. All text is escaped here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

Ticks = Sequence[tuple[float, str]]  # where, and what to write there


@dataclass(frozen=True)
class Series:
    """A line: values by epoch. `tone` picks the colour, `faint` marks repetitions with other seeds."""

    name: str
    points: tuple[tuple[float, float], ...]
    tone: int
    faint: bool = False


@dataclass(frozen=True)
class Dot:
    """A point of a scatter plot with intervals in both directions."""

    name: str
    x: tuple[float, float, float]  # low, value, high
    y: tuple[float, float, float]
    tone: int
    on_front: bool


@dataclass(frozen=True)
class Point:
    """A point without intervals."""

    x: float
    y: float
    kind: Literal["front", "finished", "stopped"]
    tip: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover the range."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


class Frame:
    """Maps data to pixels and draws axes. The side margins may be changed before anything is drawn."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float], left: int = 44, bottom: int = 34) -> None:
        self.width, self.height, self.left, self.bottom, self.top, self.right = width, height, left, bottom, 10, 12
        self.x0, self.x1 = x
        self.y0, self.y1 = y

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / ((self.x1 - self.x0) or 1) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.height - self.bottom - (value - self.y0) / ((self.y1 - self.y0) or 1) * (self.height - self.bottom - self.top)

    def axes(
        self, x_label: str, y_label: str, x_count: int = 5, y_count: int = 5, x_ticks: Sequence[tuple[float, str]] | None = None
    ) -> str:
        parts = []
        for v in ticks(self.y0, self.y1, y_count):
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{self.y(v):.1f}" y2="{self.y(v):.1f}"/>')
            parts.append(f'<text class="tick" text-anchor="end" x="{self.left - 6}" y="{self.y(v) + 4:.1f}">{_number(v)}</text>')
        for v, text in [(v, _number(v)) for v in ticks(self.x0, self.x1, x_count)] if x_ticks is None else x_ticks:
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{self.x(v):.1f}" y="{self.height - self.bottom + 16}">{escape(text)}</text>'
            )
        base = self.height - self.bottom
        parts.append(f'<line class="axis" x1="{self.left}" x2="{self.width - self.right}" y1="{base}" y2="{base}"/>')
        middle = (self.left + self.width - self.right) / 2
        parts.append(f'<text class="label" text-anchor="middle" x="{middle:.0f}" y="{self.height - 3}">{escape(x_label)}</text>')
        if y_label:
            centre = (self.top + self.height - self.bottom) / 2
            parts.append(
                f'<text class="label" text-anchor="middle" transform="translate(11 {centre:.0f}) rotate(-90)">{escape(y_label)}</text>'
            )
        return "".join(parts)

    def wrap(self, title: str, body: str, kind: str = "") -> Markup:
        return Markup(
            f'<svg class="chart {kind}" role="img" viewBox="0 0 {self.width} {self.height}" aria-label="{escape(title, quote=True)}">'
            f"<title>{escape(title)}</title>{body}</svg>"
        )


def line_chart(title: str, series: Sequence[Series], x_label: str = "epoch", low: float | None = None, high: float | None = None) -> Markup:
    """Small-multiple line chart."""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points if math.isfinite(y)]
    if not xs or not ys:
        return Markup("")
    bottom, top = (min(ys) if low is None else low), (max(ys) if high is None else high)
    pad = 0.05 * ((top - bottom) or 1.0)
    y = (bottom if low is not None else bottom - pad, top if high is not None else top + pad)
    frame = Frame(340, 200, (min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1), y)
    body = [frame.axes(x_label, "", 5, 4)]
    for s in sorted(series, key=lambda s: not s.faint):
        finite = [(px, py) for px, py in s.points if math.isfinite(py)]
        path = " ".join(f"{frame.x(px):.1f},{frame.y(py):.1f}" for px, py in finite)
        faint = " faint" if s.faint else ""
        if len(finite) == 1:
            body.append(
                f'<circle class="fill t{s.tone}{faint}" cx="{frame.x(finite[0][0]):.1f}" cy="{frame.y(finite[0][1]):.1f}" r="2.5"/>'
            )
        body.append(f'<polyline class="line t{s.tone}{faint}" points="{path}"><title>{escape(s.name)}</title></polyline>')
    return frame.wrap(title, "".join(body))


def points_chart(
    title: str,
    points: Sequence[Point],
    x_label: str,
    y_label: str = "",
    x_ticks: Ticks | None = None,
    staircase: bool = False,
) -> Markup:
    """Points alone, such as the trials of a search: on the front filled, finished hollow, stopped faint. `staircase` joins the front."""
    if not points:
        return Markup("")
    xs, ys = [p.x for p in points] + [v for v, _ in x_ticks or ()], [p.y for p in points]
    pad_x, pad_y = 0.06 * ((max(xs) - min(xs)) or 1.0), 0.08 * ((max(ys) - min(ys)) or 1.0)
    frame = Frame(340, 220, (min(xs) - pad_x, max(xs) + pad_x), (min(ys) - pad_y, max(ys) + pad_y), left=52 if y_label else 44)
    body = [frame.axes(x_label, y_label, 4, 4, x_ticks)]
    if staircase:
        front = sorted((p for p in points if p.kind == "front"), key=lambda p: p.x)
        corners = [c for a, b in pairwise(front) for c in ((a.x, a.y), (a.x, b.y))] + [(p.x, p.y) for p in front[-1:]]
        body.append(f'<polyline class="front" points="{" ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in corners)}"/>')
    looks = {"front": "fill t0", "finished": "hollow t0", "stopped": "hollow t0 faint"}
    for p in sorted(points, key=lambda p: list(looks).index(p.kind), reverse=True):
        place = f'cx="{frame.x(p.x):.1f}" cy="{frame.y(p.y):.1f}" r="{3.5 if p.kind == "stopped" else 4.5}"'
        body.append(f'<circle class="{looks[p.kind]}" {place}><title>{escape(p.tip)}</title></circle>')
    return frame.wrap(title, "".join(body))


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions within the range as near to the wanted ones as a minimum distance allows, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    previous = low - gap
    for i in order:
        placed[i] = previous = max(wanted[i], previous + gap)
    following = high + gap
    for i in reversed(order):  # what ran past the end is pushed back
        placed[i] = following = min(placed[i], following - gap)
    return placed


def stairs(frame: Frame, front: Sequence[tuple[float, float]], kind: str = "front") -> str:
    """What a front of points, sorted by x, leaves to be beaten: a staircase from the left edge down to the axis."""
    corners = [(frame.x0, front[0][1])]
    for (x, y), following in zip(front, [*front[1:], None], strict=True):
        corners += [(x, y), (x, following[1] if following else frame.y0)]
    return f'<polyline class="{kind}" points="{" ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in corners)}"/>'


def scatter(title: str, dots: Sequence[Dot], x_label: str, y_label: str) -> Markup:
    """Trade-off: both axes better upwards, intervals as whiskers, the Pareto front as a staircase, names in a column beside it."""
    xs = [v for d in dots for v in (d.x[0], d.x[2])]
    ys = [v for d in dots for v in (d.y[0], d.y[2])]
    pad_x, pad_y = max(1.0, 0.06 * (max(xs) - min(xs))), max(1.0, 0.06 * (max(ys) - min(ys)))
    names = [d.name if len(d.name) <= 26 else d.name[:25] + "…" for d in dots]
    room = 34 + max(int(6.9 * len(name)) for name in names)
    size = 330 + room, max(300, 60 + 15 * len(dots))
    frame = Frame(*size, (max(0, min(xs) - pad_x), min(100, max(xs) + pad_x)), (max(0, min(ys) - pad_y), min(100, max(ys) + pad_y)))
    frame.right = room
    body = [frame.axes(x_label, y_label, x_count=4)]
    front = sorted((d for d in dots if d.on_front), key=lambda d: d.x[1])
    if front:
        body.append(stairs(frame, [(d.x[1], d.y[1]) for d in front]))
    label_x = frame.width - room + 26
    label_y = _spread([frame.y(d.y[1]) for d in dots], 15, frame.top + 6, frame.height - frame.bottom)
    for d, name, ly in zip(dots, names, label_y, strict=True):
        x, y = frame.x(d.x[1]), frame.y(d.y[1])
        tip = f"{d.name}: {x_label} {d.x[1]:.1f} [{d.x[0]:.1f}, {d.x[2]:.1f}], {y_label} {d.y[1]:.1f} [{d.y[0]:.1f}, {d.y[2]:.1f}]"
        body.append(f'<line class="whisker t{d.tone}" x1="{frame.x(d.x[0]):.1f}" x2="{frame.x(d.x[2]):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<line class="whisker t{d.tone}" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(d.y[0]):.1f}" y2="{frame.y(d.y[2]):.1f}"/>')
        body.append(f'<line class="label-line t{d.tone}" x1="{x:.1f}" x2="{label_x - 4}" y1="{y:.1f}" y2="{ly:.1f}"/>')
        kind = "fill" if d.on_front else "hollow"
        body.append(f'<circle class="{kind} t{d.tone}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(tip)}</title></circle>')
        body.append(f'<text class="dot" x="{label_x}" y="{ly + 4:.1f}">{escape(name)}</text>')
    return frame.wrap(title, "".join(body), "scatter")


def upset(title: str, norms: Sequence[str], patterns: Sequence[tuple[tuple[bool, ...], int]], total: int) -> Markup:
    """Which norms fail together: a column per combination, filled dots are the norms that fail, the bar how many samples."""
    shown = [p for p in patterns if p[1] > 0][:12]
    step, left, bar, row = 34, max(48, 18 + int(6.2 * max(map(len, norms)))), 96, 20
    width, height = left + step * max(1, len(shown)) + 8, bar + 34 + row * len(norms)
    most = max((count for _, count in shown), default=1)
    body = []
    for i, norm in enumerate(norms):
        y = bar + 34 + row * i
        body.append(f'<text class="tick" text-anchor="end" x="{left - 12}" y="{y + 4}">{escape(norm)}</text>')
        body.append(f'<line class="grid" x1="{left - 6}" x2="{width}" y1="{y}" y2="{y}"/>')
    for i, (failed, count) in enumerate(shown):
        x, size = left + step * i + step / 2 - 6, bar * count / most
        tone = "fail" if any(failed) else "pass"
        words = " and ".join(n for n, f in zip(norms, failed, strict=True) if f) or "nothing"
        tip = f"{count} of {total} samples: {words} not certified"
        body.append(
            f'<rect class="{tone}" x="{x - 9:.1f}" y="{bar + 16 - size:.1f}" width="18" height="{size:.1f}" rx="2">'
            f"<title>{escape(tip)}</title></rect>"
        )
        body.append(f'<text class="tick strong" text-anchor="middle" x="{x:.1f}" y="{bar + 11 - size:.1f}">{count}</text>')
        lit = [bar + 34 + row * k for k, f in enumerate(failed) if f]
        if len(lit) > 1:
            body.append(f'<line class="join" x1="{x:.1f}" x2="{x:.1f}" y1="{lit[0]}" y2="{lit[-1]}"/>')
        for k, f in enumerate(failed):
            body.append(f'<circle class="{"on" if f else "off"}" cx="{x:.1f}" cy="{bar + 34 + row * k}" r="5"/>')
    return Markup(
        f'<svg class="chart upset" role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-label="{escape(title, quote=True)}"><title>{escape(title)}</title>{"".join(body)}</svg>'
    )


def margin_bars(title: str, classes: Sequence[int], margins: Sequence[float], scale: float) -> Markup:
    """Lower bounds of the margin against every other class; below zero is red: not proven against that class."""
    step, full = 13, 26
    above = full if any(m > 0 for m in margins) else 3
    below = full if any(m < 0 for m in margins) else 3
    width, height = step * len(classes) + 4, above + below + 14
    body = [f'<line class="axis" x1="0" x2="{width}" y1="{above}" y2="{above}"/>']
    for i, (k, m) in enumerate(zip(classes, margins, strict=True)):
        x, known = 2 + step * i, math.isfinite(m)
        size = max(1.0, min(full - 1, full * abs(m) / scale)) if known and scale > 0 and m != 0 else 0.0
        kind = ("good" if m > 0 else "bad") + (" over" if known and abs(m) > scale else "")
        tip = f"class {k}: margin at least {m:.4g}" if known else f"class {k}: no bound"
        box = f'x="{x}" y="{above - size if m > 0 else above:.1f}" width="{step - 3}" height="{size:.1f}"'
        body.append(f'<rect class="{kind}" {box}><title>{escape(tip)}</title></rect>')
        body.append(f'<text class="mini" text-anchor="middle" x="{x + (step - 3) / 2}" y="{height - 2}">{k}</text>')
    return Markup(
        f'<svg class="margins" role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-label="{escape(title, quote=True)}"><title>{escape(title)}</title>{"".join(body)}</svg>'
    )
