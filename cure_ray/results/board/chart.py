"""Clean against certified accuracy of one protocol, with what may still be proven above each point, and the front."""

from collections.abc import Mapping, Sequence
from html import escape

from markupsafe import Markup

from cure_ray.results.board.rows import KINDS, Kind, Row, on_front
from cure_ray.results.report.charts import Frame, stairs

_RADIUS = 8.5


def chart(rows: Sequence[Row], numbers: Mapping[str, int]) -> Markup:
    """Every point is a link to what it rests on, and bears its row's number. Empty for fewer than two: there is no front of one."""
    drawn = [r for r in rows if r.clean and r.union]
    if len(drawn) < 2:
        return Markup("")
    xs = [r.clean.percent for r in drawn if r.clean]
    ys = [v for r in drawn for v in _range(r)]
    pad_x, pad_y = max(0.6, 0.08 * (max(xs) - min(xs))), max(1.0, 0.08 * (max(ys) - min(ys)))
    x, y = (max(0.0, min(xs) - pad_x), min(100.0, max(xs) + pad_x)), (max(0.0, min(ys) - pad_y), min(100.0, max(ys) + pad_y))
    frame = Frame(460, 330, x, y, left=56)
    headline = rows[0].protocol.headline
    body = [frame.axes("clean accuracy, %", f"{headline}, %")]
    for kind, own in (("front", [r for r in drawn if r.proven]), ("front claimed", [r for r in drawn if not r.proven])):
        points = [(r.clean.percent, r.union.percent) for r in on_front(own) if r.clean and r.union]
        body += [stairs(frame, points, kind)] if points else []
    printed = {r.network: r for r in reversed(drawn) if not r.proven}  # of several certifiers the one that proved most: rows are in order
    body += [_same(frame, printed[r.network], r) for r in drawn if r.proven and r.network in printed]
    body += [_mark(frame, r, numbers[r.name]) for r in sorted(drawn, key=lambda r: r.proven)]
    svg = frame.wrap(f"{rows[0].protocol.title}: {headline} against clean accuracy", "".join(body), "points")
    return Markup(str(svg).replace('role="img"', 'role="group"', 1))  # its points are links, which an image would hide


def words(row: Row) -> str:
    """A point, said."""
    parts = [f"{row.title} ({KINDS[row.kind]})"]
    if row.union:
        interval = f" [{row.union.low:.1f}, {row.union.high:.1f}]" if row.union.low is not None else ""
        parts.append(f"{row.protocol.headline} {row.union.percent:.1f} %{interval}")
    if row.bound:
        parts.append(f"not broken {row.bound.percent:.1f} %")
    if row.clean:
        parts.append(f"clean {row.clean.percent:.1f} %")
    return ", ".join(parts)


def _range(row: Row) -> list[float]:
    return [f.percent for f in (row.union, row.bound) if f]


def _same(frame: Frame, claim: Row, proof: Row) -> str:
    """One network twice: what was published, and what is proven now."""
    ends = [(frame.x(r.clean.percent), frame.y(r.union.percent)) for r in (claim, proof) if r.clean and r.union]
    (x1, y1), (x2, y2) = ends
    middle = f"{(x1 + x2) / 2 - 26:.1f} {(y1 + y2) / 2:.1f}"  # a bow beside the bar of the claim, which ends at its bound
    return f'<path class="same" d="M{x1:.1f} {y1:.1f}Q{middle} {x2:.1f} {y2:.1f}"/>'


def _mark(frame: Frame, row: Row, number: int) -> str:
    assert row.clean
    assert row.union
    x, y = frame.x(row.clean.percent), frame.y(row.union.percent)
    parts = []
    if row.bound:
        top = frame.y(row.bound.percent)
        parts.append(f'<line class="reach" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<line class="reach cap" x1="{x - 6:.1f}" x2="{x + 6:.1f}" y1="{top:.1f}" y2="{top:.1f}"/>')
    parts.append(shape(row.kind, x, y))
    parts.append(f'<text text-anchor="middle" x="{x:.1f}" y="{y + 3.6:.1f}">{number}</text>')
    said = escape(words(row), quote=True)
    link = f'class="point {row.kind}" href="#{row.anchor}" data-row="{row.name}" aria-label="{said}"'
    return f"<a {link}><title>{said}</title>{''.join(parts)}</a>"


def shape(kind: Kind, x: float, y: float) -> str:
    """Circles for claims and for ours, a diamond for networks of others that were proven here."""
    if kind == "recertified":
        r = _RADIUS + 2
        return f'<path class="mark" d="M{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}L{x - r:.1f} {y:.1f}Z"/>'
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}"/>'
