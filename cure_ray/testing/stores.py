"""Real stores on disk with made-up verdicts: everything behind `cure-ray certify` can be tested without certifying."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cure_ray.config import Experiment, dump_experiment, resolve
from cure_ray.results.schema import SCHEMA
from cure_ray.results.store import Store
from cure_ray.testing import fabricate
from cure_ray.zoo.manifest import CARD, RESULTS, Cost, Entry, Manifest, listed_files, write_manifest


def experiment(method: str = "max", seed: int = 0, **training: Any) -> Experiment:
    start = {"start_from": "runs/linf"} if method == "finetune" else {}
    return resolve({"preset": "smoke", "seed": seed, "training": {"method": method, **start, **training}})


def write_store(root: Path, runs: dict[str, Experiment], n: int = 30, seed: int = 0, frame: pd.DataFrame | None = None) -> Store:
    """One store with a checkpoint per run; falsified rows get a witness, and every row its margins."""
    store = Store.create(root, "digits", "test", "0" * 16, many=True)
    rng = np.random.default_rng(seed)
    rows = fabricate.verdicts(seed, n, tuple(runs)) if frame is None else frame
    rows = rows.reset_index(drop=True)
    rows["margins"] = [sorted(rng.normal(m if m == m else 0, 0.5, 9).clip(m).tolist()) if m == m else [] for m in rows["margin_lb"]]
    rows["witness"] = [store.write_witness(rng.random((1, 8, 8))) if s == "falsified" else None for s in rows["status"]]
    (root / "verdicts").mkdir(exist_ok=True)
    for (digest, threat), part in rows.groupby(["checkpoint_digest", "threat"]):
        table = pa.Table.from_pandas(part[SCHEMA.names], SCHEMA, preserve_index=False).replace_schema_metadata(SCHEMA.metadata)
        name = f"{digest[:12]}-{threat}-{part['sample_index'].min():06d}-{part['sample_index'].max():06d}-0123456789abcdef.parquet"
        pq.write_table(table, root / "verdicts" / name)
    for name, about in runs.items():
        digest = fabricate.digest(name)
        store.files.write_json(
            f"runs/{digest}.json",
            {
                "name": about.name, "method": about.training.method, "seed": about.seed, "config_hash": about.config_hash, "epoch": 20,
                "experiment": about.model_dump(mode="json"), "metrics": {"epoch_seconds": 1.5 + about.seed, "rho": 1.0},
            },
        )  # fmt: skip
        own = rows[rows["checkpoint_digest"] == digest]
        threats = {str(t): sorted(map(int, p["sample_index"])) for t, p in own.groupby("threat")}
        plan = {"run_id": digest[:16], "checkpoint_digest": digest, "settings": {}, "threats": threats}
        store.files.write_json(f"plans/{digest[:16]}.json", plan)
    return store


def write_zoo(root: Path, networks: Mapping[str, Experiment | str], n: int = 30) -> Path:
    """A zoo of digits with made-up verdicts: an experiment makes an entry of ours, a name the published network that is described by it."""
    manifest = Manifest()
    for i, (name, about) in enumerate(networks.items()):
        ours = isinstance(about, Experiment)
        store = write_store(root / name / RESULTS, {name: about if isinstance(about, Experiment) else experiment()}, n, seed=i)
        if not ours:
            store.files.write_json(f"runs/{fabricate.digest(name)}.json", {"network": name})
        (root / name / CARD).write_text(f"# {name}\n")
        entry = Entry(
            name=name, title=name.replace("-", " "), kind="ours" if ours else "published", published=None if ours else str(about),
            dataset="digits", threats=",".join(f"{norm}={eps:g}" for norm, eps in fabricate.THREATS), n=n,
            seeds=(about.seed,) if isinstance(about, Experiment) else (), identity=fabricate.digest(name),
            commands=(f"cure-ray certify {name}",), certification=Cost(seconds=12.5, hardware="a machine", version="0.3.0"), folder=name,
            files=listed_files(root / name),
        )  # fmt: skip
        manifest = manifest.with_entry(entry)
    write_manifest(root, manifest)
    return root


def write_run(directory: Path, about: Experiment, epochs: int = 12) -> None:
    """A training run as far as the report reads one."""
    directory.mkdir(parents=True)
    (directory / "experiment.yaml").write_text(dump_experiment(about))
    hardware = {"machine": "x86_64", "processor": "a CPU", "cpus": 2, "gpu": None, "device": "cpu"}
    described = {"config_hash": about.config_hash, "hardware": hardware, "versions": {"cure_ray": "0.1.0", "torch": "2.13.0"}}
    (directory / "run.json").write_text(json.dumps(described))
    lines = []
    for epoch in range(1, epochs + 1):
        row = {
            "epoch": epoch,
            "rho": min(1.0, epoch / 6),
            "loss": 2 / epoch,
            "clean": 0.9,
            "epoch_seconds": 2.0,
            "lr": 1e-3,
            "ibp_union": epoch / 50,
        }
        if about.training.uses_alignment:
            row |= {"gamma_share": 0.5, "cosine_mean": 0.1}
        lines.append(json.dumps(row))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"epoch": 13, "torn')
