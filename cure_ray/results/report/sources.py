"""Where every number came from: files of the stores and runs, as links relative to the report."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cure_ray.results.evaluations import Evaluation
from cure_ray.results.frames import Loaded
from cure_ray.results.study import Entry, RunInfo


@dataclass(frozen=True)
class File:
    name: str
    href: str
    what: str


def href(path: str | Path, report: Path) -> str:
    """Relative to the report, so that both can be moved together; a URI stays a URI."""
    if "://" in str(path):
        return str(path)
    return quote(os.path.relpath(Path(path).resolve(), report.resolve().parent))


def shards(loaded: Loaded, evaluation: Evaluation, threat: str | None = None) -> list[tuple[str, str]]:
    """(store root, shard) of a checkpoint: shard names begin with the checkpoint and the threat."""
    start = evaluation.checkpoint[:12]
    own = ((root, name) for root, name in loaded.shards if name.startswith(start))
    return [
        (root, name) for root, name in own if threat is None or threat in name.removeprefix(f"{start}-").split("+") or f"-{threat}-" in name
    ]


def files_of(loaded: Loaded, entry: Entry, report: Path) -> list[File]:
    """Everything a row of the tables rests on."""
    digest = entry.evaluation.checkpoint
    files = []
    for root, name in shards(loaded, entry.evaluation):
        files.append(File(name, href(f"{root}/verdicts/{name}", report), "verdicts"))
    for store in loaded.stores:
        if store.about(digest):
            files.append(File(f"runs/{digest[:12]}….json", href(f"{store.root}/runs/{digest}.json", report), "experiment"))
        for run_id in entry.everything.run_ids:
            plan = f"plans/{run_id}.json"
            if store.files.exists(plan):
                files.append(File(plan, href(f"{store.root}/{plan}", report), "what was to be certified"))
    return files + run_files(entry.info, report)


def run_files(info: RunInfo, report: Path) -> list[File]:
    if info.directory is None:
        return []
    names = (("experiment.yaml", "settings"), ("metrics.jsonl", "learning curves"), ("run.json", "hardware and versions"))
    return [File(n, href(info.directory / n, report), what) for n, what in names if (info.directory / n).exists()]


def anchor(text: str) -> str:
    """A label as an HTML id."""
    return "src-" + "".join(c if c.isalnum() else "-" for c in text)
