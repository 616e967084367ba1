"""`cure-ray board`: what is proven and what was published, as one page."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer


def board(
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("board.html"),
    zoo: Annotated[
        Path | None, typer.Option("--zoo", metavar="DIR", help="The zoo; by default that of the checkout, or $CURE_RAY_ZOO.")
    ] = None,
    judgements: Annotated[
        Path | None,
        typer.Option("--judgements", metavar="DIR", help="JSON files of `cure-ray judge`; by default docs/board beside the zoo, if there."),
    ] = None,
    published: Annotated[
        list[Path],
        typer.Option("--published", metavar="FILE", help="One more description of a published network, such as your own; repeatable."),
    ] = [],  # noqa: B006 - typer reads the default, nothing mutates it
    date: Annotated[datetime | None, typer.Option("--date", formats=["%Y-%m-%d"], help="Of the edition; by default today.")] = None,
) -> None:
    """Write the board: one HTML file with every published network that is described, and every network judged here or of the zoo.

    Per protocol the certified union, what no attack breaks, clean accuracy, every norm, and the front of clean and union; proofs and
    printed numbers apart, and every number with what it rests on.
    """
    from cure_ray.api.board import board as write

    path = write(out, zoo=zoo, judgements=judgements, published=published, date=date.date() if date else None)
    print(f"board: {path} ({path.stat().st_size / 1e6:.1f} MB)")
