"""One hyper-parameter on the x axis: what the curve scripts of analysis/ share."""

from collections.abc import Sequence

from cure_ray.results.figures import curves
from cure_ray.results.grids import vary
from cure_ray.results.outputs import Analysis
from cure_ray.results.tables import readable


def curve(analysis: Analysis, path: str, methods: Sequence[str], metrics: Sequence[str], grid: Sequence[float], log: bool = False) -> None:
    """A figure and a table per setting and method over the field `path`; names the values of the grid that no run has."""
    name = path.rpartition(".")[2]
    found = vary(analysis.study, path, methods)
    for i, table in enumerate(found):
        title = f"{table['method'].iloc[0]}, {table['setting'].iloc[0]}"
        here = [m for m in metrics if m in table]
        file = f"{name.replace('_', '')}_curve_{i}"
        analysis.figure(file, curves(table, name, here, title, name, log=log))
        about = table[["method", name, "seeds", "n"]].assign(**{name: table[name].map("{:g}".format)})
        analysis.table(file, table, f"{name}: {title}", shown=about.join(readable(table, here)))
    have = {float(v) for table in found for v in table[name]}
    lacking = [v for v in grid if v not in have]
    if lacking:
        values = ", ".join(f"{v:g}" for v in lacking)
        analysis.missing(f"runs of {' or '.join(methods)} with {path} = {values} that differ in nothing else")
