"""The board: what is proven and what was published about networks, as one HTML file."""

from collections.abc import Sequence
from datetime import UTC, datetime
from datetime import date as Date
from pathlib import Path

from cure_ray.errors import UserError
from cure_ray.results.board.build import write_board
from cure_ray.zoo.manifest import find_zoo
from cure_ray.zoo.published import all_published, read_published


def board(
    out: str | Path = "board.html",
    *,
    zoo: str | Path | None = None,
    published: Sequence[str | Path] = (),
    date: Date | None = None,
) -> Path:
    """Write the board and return its path: every published network that is described, and every network of the zoo.

    `zoo` is its directory, by default that of the checkout; `published` are further descriptions (NAME.yaml), such as your own before you
    offer it; `date` is the edition's, by default today. Links to the zoo are relative: move the page together with it.
    """
    described = dict(all_published())
    for own in (read_published(Path(path)) for path in published):
        if own.name in described:
            raise UserError(f"{own.name} is described already; give your network another name")
        described[own.name] = own
    target = Path(out)
    return write_board(find_zoo(zoo), described, target / "board.html" if target.is_dir() else target, date or datetime.now(UTC).date())
