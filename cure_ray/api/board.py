"""The board: what is proven and what was published about networks, as one HTML file."""

from collections.abc import Sequence
from datetime import UTC, datetime
from datetime import date as Date
from pathlib import Path

from cure_ray.errors import UserError
from cure_ray.results.board.build import Sources, write_board
from cure_ray.zoo.manifest import find_zoo
from cure_ray.zoo.published import all_published, read_published


def board(
    out: str | Path = "board.html",
    *,
    zoo: str | Path | None = None,
    judgements: str | Path | None = None,
    published: Sequence[str | Path] = (),
    date: Date | None = None,
) -> Path:
    """Write the board and return its path: every published network that is described, and every network judged here or of the zoo.

    `zoo` is its directory, by default that of the checkout; `judgements` a directory of JSON files that `cure-ray judge` wrote, by default
    docs/board of the same checkout, for published networks that the zoo has no store of; `published` are further descriptions
    (NAME.yaml), such as your own before you offer it; `date` is the edition's, by default today. Links are relative: move the page
    together with the zoo.
    """
    described = dict(all_published())
    for own in (read_published(Path(path)) for path in published):
        if own.name in described:
            raise UserError(f"{own.name} is described already; give your network another name")
        described[own.name] = own
    target, home = Path(out), find_zoo(zoo)
    sources = Sources(described, home, _judgements(judgements, home))
    return write_board(sources, target / "board.html" if target.is_dir() else target, date or datetime.now(UTC).date())


def _judgements(given: str | Path | None, zoo: Path) -> Path | None:
    if given is None:
        beside = zoo.parent / "docs" / "board"
        return beside if beside.is_dir() else None
    if not Path(given).is_dir():
        raise UserError(f"--judgements {given} is not a directory; give one of JSON files that `cure-ray judge` wrote")
    return Path(given)
