"""How robust is every image: its largest certified and its smallest falsified radius, in pandas, resumable."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd
import torch

from cure_ray.api.certify import Options, build
from cure_ray.api.execution import placed, threads
from cure_ray.api.progress import Reporter, remark
from cure_ray.api.request import CertificationRequest
from cure_ray.certification.balls import Certifier
from cure_ray.certification.engines import make_engine
from cure_ray.certification.job import Job
from cure_ray.certification.radii import Bracket, Probe, RadiusSearch
from cure_ray.certification.verdict import Status
from cure_ray.errors import UserError, nearest
from cure_ray.results.store import Store
from cure_ray.runs.stopping import StoppedError
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS, Norm

if TYPE_CHECKING:
    from cure_ray.api.subject import Images, Labels, Network

ABOUT = "radius.json"


@dataclass(frozen=True, repr=False, eq=False)
class RadiusResult:
    """Brackets of every image's radius."""

    norm: Norm
    brackets: Sequence[Bracket] = field(default_factory=list)

    @property
    def table(self) -> pd.DataFrame:
        """One row per image. Between `certified` (proven up to there) and `falsified` (a counterexample is that far away, inf: none was
        found) nothing is known; a misclassified image has both at 0."""
        rows = [
            {
                "sample_index": b.index, "label": b.label, "predicted": b.predicted, "norm": self.norm, "certified": b.certified,
                "falsified": b.falsified, "status": str(b.status or "bracketed"), "probes": b.probes, "seconds": b.seconds,
                "message": b.message,
            }
            for b in self.brackets
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def witness(self, sample: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """The nearest misclassified image [C, H, W] that was found."""
        found = next((b for b in self.brackets if b.index == sample), None)
        if found is None or found.witness is None:
            raise UserError(f"no counterexample of sample {sample} was found")
        return np.asarray(found.witness.numpy())

    def summary(self) -> str:
        table = self.table
        right = table[table["status"] == "bracketed"]
        if right.empty:
            return f"{len(table)} samples, none of them classified correctly"
        narrow = right[np.isfinite(right["falsified"])]
        lines = [
            f"{len(table)} samples, {len(right)} of them classified correctly; their {self.norm} radius of robustness, in pixel units:",
            f"  certified  mean {right['certified'].mean():.4g}, median {right['certified'].median():.4g}",
            f"  falsified  mean {narrow['falsified'].mean():.4g}, median {right['falsified'].median():.4g}",
        ]
        failed = table[table["status"] == "error"]
        return "\n".join([*lines, *(f"error: sample {r.sample_index}: {r.message}" for r in failed.itertuples())])

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return str(self.table.to_html(index=False))


def radius(
    network: "Network",
    images: "Images | None" = None,
    labels: "Labels | None" = None,
    norm: str = "l2",
    *,
    samples: int | Sequence[int] | None = None,
    precision: float = 0.01,
    out: str | Path | None = None,
    **options: Unpack[Options],
) -> RadiusResult:
    """The largest certified and the smallest falsified radius of every image, by bisection.

    `network`, `images`, `labels` and the options are those of `certify`; `nodes` lets branch and bound help. Each end is found to a
    relative `precision`. With `out`, what has been learnt is kept there and the same call goes on from it.

    >>> import torch, cure_ray
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = network[1].weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    ...     _ = network[1].bias.copy_(torch.tensor([0.0, 1.0]))
    >>> image = torch.full((1, 1, 2, 2), 0.5)  # the boundary is where the pixels sum to 1: (4 * 0.5 - 1) / 2 away in l2
    >>> found = cure_ray.radius(network, image, [0], "l2", quiet=True).table.iloc[0]
    >>> bool(0.495 < found["certified"] < 0.5 <= found["falsified"] < 0.505)
    True
    """
    if norm not in NORMS:
        raise UserError(f"unknown norm {norm!r}.{nearest(str(norm), NORMS)}")
    if not isinstance(precision, int | float) or not 0 < precision < 1:
        raise UserError(f"precision must lie between 0 and 1, got {precision!r}")
    request = build(network, images, labels, [Ball(norm, 0.0)], samples, out, **options)
    if len(request.subjects) != 1:
        raise UserError(f"radius is about one network at a time, these are {len(request.subjects)}")
    if request.execution.workers > 1 or request.union_only:
        raise UserError("radius runs in one process, and has no union: leave out workers and union_only")
    return run_radius(replace(request, cascade=replace(request.cascade, unasked=0)), norm, precision)


def run_radius(request: CertificationRequest, norm: Norm, precision: float) -> RadiusResult:
    """Everything that can be refused is refused first; then probes, each kept as soon as it is done."""
    (subject,), device = request.subjects, placed(request.execution)
    with threads(request.execution.threads):
        request.check()
        remark(request.remarks(), request.execution.quiet)
        engine = make_engine(request.cascade.engine, subject.network, device, subject.input_shape)
        settings = request.settings_of(subject)
        job = Job.make(subject.digest, subject.samples, engine, settings, request.seed)
        brackets = [Bracket(i, int(subject.samples.labels[i])) for i in request.indices_of(subject)]
        store = _open(request.out, {"job": job.key(), "norm": norm}) if request.out is not None else None
        _recall(store, brackets)
        bundles = Path(store.root if store is not None and "://" not in store.root else ".") / "soundness-failure"
        certifier = Certifier(engine, subject.network.to(device), settings, request.seed, bundles, device=device)
        search = RadiusSearch(certifier, subject.samples, norm, precision)
        with Reporter(len(brackets), request.execution.quiet) as reporter:
            done = {b.index for b in brackets if b.probes and b.next(search.limit, precision) is None}
            reporter.start(len(done))

            def keep(probes: list[Probe]) -> None:
                if store is not None:
                    _keep(store, probes)
                finished = {b.index for b in brackets if b.probes and b.next(search.limit, precision) is None}
                reporter("bracketed", len(finished - done))
                done.update(finished)

            try:
                search.run(brackets, keep)
            except KeyboardInterrupt:
                if store is None:
                    raise
                raise StoppedError(f"stopped. What was learnt is kept in {store.root}; run the same command to continue.") from None
            finally:
                subject.network.cpu()
    return RadiusResult(norm, brackets)


def _open(out: str | Path, identity: dict[str, Any]) -> Store:
    """The directory of this very search, or the reason why it is not."""
    store = Store(out)
    found = store.files.read_json(ABOUT)
    if found is None:
        if store.files.names("", ""):
            raise UserError(f"{out} is not empty and holds no radii of cure_ray; choose another directory")
        store.files.write_json(ABOUT, identity)
        return store
    old, new = ({**side["job"], **side["job"]["settings"], "norm": side["norm"]} for side in (found, identity))
    changed = [f"{key}: {old.get(key)} there, {value} now" for key, value in new.items() if key != "settings" and old.get(key) != value]
    if changed:
        raise UserError(f"{out} holds radii of another search ({'; '.join(changed)}). Choose another directory.")
    return store


def _keep(store: Store, probes: Sequence[Probe]) -> None:
    """One file per batch, whole or not there; counterexamples before the rows that name them."""
    rows = []
    for probe in probes:
        digest = store.write_witness(probe.witness.numpy()) if probe.witness is not None else None
        rows.append({**{k: v for k, v in asdict(probe).items() if k != "witness"}, "status": str(probe.status), "witness": digest})
    store.files.write_json(f"probes/{uuid.uuid4().hex}.json", {"probes": rows})


def _recall(store: Store | None, brackets: Sequence[Bracket]) -> None:
    """Learn again what earlier calls found out, of these images."""
    known = {b.index: b for b in brackets}
    for name in store.files.names("probes", ".json") if store is not None else ():
        assert store is not None
        for row in (store.files.read_json(f"probes/{name}") or {}).get("probes", ()):
            if row["index"] in known:
                bracket, digest = known[row["index"]], row["witness"]
                better = digest is not None and (row["distance"] or math.inf) < bracket.falsified
                witness = torch.from_numpy(store.read_witness(digest)) if better else None
                bracket.learn(Probe(**{**row, "status": Status(row["status"]), "witness": witness}))
