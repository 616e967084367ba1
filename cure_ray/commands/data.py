"""`cure-ray data`: which data sets are here, where, and whether they are intact."""

from rich.console import Console
from rich.table import Table

from cure_ray.commands.train import DataDirOption


def data(data_dir: DataDirOption = None) -> None:
    """List data sets, where they were found, and whether their files are intact.

    Looked for in --data-dir, then the directory in CURE_RAY_DATA, then the user cache; the first download goes to the first of
    these. `digits` is always there.
    """
    from cure_ray.catalogue.published import PUBLISHED
    from cure_ray.data.files import check

    table = Table("data set", "state", "where", "what", box=None, pad_edge=False)
    for name in PUBLISHED:
        found = check(name, data_dir)
        colour = {"ok": "green", "missing": "yellow", "damaged": "red"}[found.state]
        table.add_row(found.name, f"[{colour}]{found.state}[/]", found.directory, found.detail)
    Console(highlight=False, soft_wrap=True).print(table)
