"""Puts the report together: load, compute, render, write once."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import jinja2

from cure_ray.results.evaluations import STATUSES
from cure_ray.results.frames import Loaded, load
from cure_ray.results.report import sources
from cure_ray.results.report.gallery import cards
from cure_ray.results.report.page import environment, write_page
from cure_ray.results.report.sections import first_seeds, make_setting
from cure_ray.results.report.sweeps import read_sweeps
from cure_ray.results.report.words import duration
from cure_ray.results.tables import p_text

FILE = "report.html"
_GALLERY_METHODS = 8


def _p_value(value: float) -> str:
    return "" if math.isnan(value) else p_text(value)


def _environment() -> jinja2.Environment:
    env = environment("cure_ray.results.report", "report")
    env.filters |= {"p": _p_value, "duration": duration, "anchor": sources.anchor}
    env.globals["statuses"] = STATUSES
    return env


def write_report(
    source: str | Path | Sequence[str | Path],
    out: Path | None = None,
    data_dir: Path | None = None,
    threats: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    runs: Sequence[Path] = (),
    images: int = 24,
    by_name: bool = False,
) -> Path:
    """Write the report of everything below `source`; returns its path. UserError where the results do not allow one."""
    return write_loaded(load(source, threats, checkpoints, runs, by_name), report_path(source, out), data_dir, runs, images)


def write_loaded(loaded: Loaded, target: Path, data_dir: Path | None = None, runs: Sequence[Path] = (), images: int = 24) -> Path:
    """The same from results that are loaded already."""
    settings = [make_setting(loaded, loaded.study, name) for name in loaded.study.settings]
    galleries = []
    for setting in settings:
        own = first_seeds(loaded.study.within(setting.name))
        galleries.append(cards(loaded, own[:_GALLERY_METHODS], setting.best, data_dir, images))
    roots = [loaded.study.source] if loaded.study.source else []
    html = (
        _environment()
        .get_template("report.html")
        .render(
            title=", ".join(dict.fromkeys(s.best.evaluation.dataset for s in settings)),
            settings=list(zip(settings, galleries, strict=True)),
            sweeps=read_sweeps([*roots, *runs], [Path(s.root).parent for s in loaded.stores if "://" not in s.root]),
            files={e.evaluation.checkpoint: sources.files_of(loaded, e, target) for e in loaded.study.entries},
            shard=_shard_links(loaded, target),
            href=lambda path: sources.href(path, target),
            stores=[(s.root, sources.href(s.root, target)) for s in loaded.stores],
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            rows=len(loaded.verdicts),
        )
    )
    return write_page(target, html)


def report_path(source: str | Path | Sequence[str | Path], out: Path | None) -> Path:
    if out is not None:
        return out / FILE if out.is_dir() else out
    first = source if isinstance(source, str | Path) else source[0]
    return Path(FILE) if "://" in str(first) else Path(first) / FILE


def _shard_links(loaded: Loaded, target: Path) -> dict[tuple[str, str], str]:
    """(checkpoint, threat) -> the one file its numbers come from, where it is one; several are listed under Sources."""
    links = {}
    for entry in loaded.study.entries:
        for threat in entry.everything.threats:
            found = sources.shards(loaded, entry.evaluation, threat.name)
            if len(found) == 1:
                root, name = found[0]
                links[entry.evaluation.checkpoint, threat.name] = sources.href(f"{root}/verdicts/{name}", target)
    return links
