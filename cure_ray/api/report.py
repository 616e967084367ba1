"""One HTML file for people, from certification results."""

from collections.abc import Sequence
from pathlib import Path

from cure_ray.api.results import load_results


def report(
    source: str | Path,
    out: str | Path | None = None,
    *,
    threats: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    runs: Sequence[str | Path] = (),
    by_name: bool = False,
    images: int = 24,
    data_dir: str | Path | None = None,
) -> Path:
    """Write the report of certification results and return its path, by default SOURCE/report.html.

    The arguments are those of `load_results`; `images` is the number per method in the gallery.
    """
    results = load_results(source, threats=threats, checkpoints=checkpoints, runs=runs, by_name=by_name)
    return results.report(out, images=images, runs=runs, data_dir=data_dir)
