"""`cure-ray status`: what a sweep or a training run has done, what runs where, and when it will be over."""

from pathlib import Path
from typing import Annotated

import typer


def status(directory: Annotated[Path, typer.Argument(help="A directory of `cure-ray sweep` or `cure-ray train`.")]) -> None:
    """Show a sweep or a run, while it runs or afterwards, from any shell that sees its directory. Starts nothing and writes nothing."""
    from cure_ray.search.status import describe_directory

    print(describe_directory(directory))
