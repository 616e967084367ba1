"""Certification as one call: a typed request in, a result out, in memory or in a store that can be continued."""

import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import pandas as pd

from cure_ray.api.execution import MEMORY, Task, execute, in_memory, placed, prepare, threads
from cure_ray.api.progress import remark
from cure_ray.api.request import Cascade, CertificationRequest, Execution, parse_seconds, parse_stages
from cure_ray.api.results import Results
from cure_ray.api.subject import Subject, given_samples, subjects
from cure_ray.certification.crosscheck import cross_check
from cure_ray.certification.engines import make_engine
from cure_ray.errors import UserError, nearest
from cure_ray.results.frames import Loaded, run_info
from cure_ray.results.store import Store
from cure_ray.results.study import build_study
from cure_ray.results.summary import summary
from cure_ray.threats import Ball, Balls, Box, Threat

if TYPE_CHECKING:
    from cure_ray.api.subject import Images, Labels, Network


@dataclass(frozen=True, eq=False, repr=False)
class CertificationResult(Results):
    """What a certification found, restricted to what was asked: a store may hold more."""

    store: Store
    tasks: tuple[Task, ...]
    execution: Execution

    def summary(self, task: Task | None = None) -> str:
        """The table `cure-ray certify` prints, of one network: accuracies with intervals, by stage, and every status counted."""
        digest = (task or self.tasks[0]).job.checkpoint_digest
        clean = self.store.about(digest)["clean_all"]
        text = summary(self.loaded, digest)
        return f"{text}\nclean on all {clean['images']} images of the split: {100 * clean['correct'] / clean['images']:.2f} %"

    def image(self, sample: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """The unperturbed image [C, H, W] of a sample, to hold a counterexample against."""
        images = self.tasks[0].subject.samples.images
        if not 0 <= sample < len(images):
            raise UserError(f"there is no sample {sample}: samples are numbered 0..{len(images) - 1}")
        return np.asarray(images[sample].numpy())

    def cross_check(self, engine: str, task: Task | None = None) -> Iterator[str]:
        """Re-derive some certificates of every norm with another engine, and say what it confirms."""
        chosen = task or self.tasks[0]
        device, job = placed(self.execution), chosen.job
        other = make_engine(engine, chosen.subject.network.cpu(), device, chosen.subject.input_shape)
        rows = self.verdicts
        proven = rows[(rows["checkpoint_digest"] == job.checkpoint_digest) & (rows["status"] == "certified")]
        for threat in chosen.threats:
            if isinstance(threat, Ball):
                certified = proven.loc[proven["threat"] == str(threat), "sample_index"].tolist()
                found = cross_check(other, chosen.subject.samples, threat, certified, job.settings, job.seed) if certified else None
                yield str(found or f"cross-check {threat}: nothing certified, nothing to check")
            elif isinstance(threat, Balls):
                yield f"cross-check {threat}: not checked; the other engine is asked about one radius for all images"


class Options(TypedDict, total=False):
    """The rest of what `certify` takes."""

    split: str  # test, validation or train, of the experiment's data set
    data_dir: str | Path | None
    best: int | None  # how many of a sweep's best trials; default 1
    front: bool  # every trial of a sweep's Pareto front
    stages: str | Sequence[str] | None
    seconds: str | float | None
    nodes: int | None
    engine: str
    attack: str | None  # default or strong
    box: Box | bool | str | None  # where inputs lie, which cuts off balls: 0,1 (True), -1,1, none (False), ...
    patch_precheck: bool
    separate_logits: bool
    seed: int
    union_only: bool
    add: bool
    yes: bool
    grid: str | None
    device: str
    threads: int
    workers: int
    gpus_per_worker: float
    address: str | None
    quiet: bool


def certify(
    network: "Network | Iterable[Network]",
    images: "Images | None" = None,
    labels: "Labels | None" = None,
    threats: str | Threat | Sequence[Threat] | None = None,
    *,
    samples: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    **options: Unpack[Options],
) -> CertificationResult:
    """Prove or refute the robustness of every image, under every threat.

    `network` is any torch module the engines understand, a run of `train` or its directory, a checkpoint, an ONNX file, a sweep (its
    Pareto front with `front=True`) or its best trial; several make one table. `images` (N, C, H, W) in [0, 1] and `labels` are tensors or
    arrays, or `images` an .npz file with both; a run brings its own (`samples` of its `split`). `threats` is a text like
    `linf=8/255,l2=0.5,R(10),patch=2x2` or a list of Ball, Transformation and Patch; a run brings its own.
    `Ball("l2", radii)` gives every image a radius of its own.

    `nodes` (or `seconds`) is branch and bound's budget per image and threat, by default 100 sub-problems, 0 for none; `stages` chooses the
    cascade; `engine="auto_lirpa"` reads graphs that are not sequential. Without `out` everything stays in memory; with it the results are
    kept in that directory as they are found, and the same call continues where it stopped. `workers=8` certifies on Ray. Verdicts do not
    depend on where they are made.

    >>> import torch, cure_ray
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = network[1].weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    ...     _ = network[1].bias.copy_(torch.tensor([0.0, 1.0]))
    >>> images = torch.tensor([0.9, 0.3]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2)  # class 0 where the pixels sum to more than 1
    >>> result = cure_ray.certify(network, images, [0, 0], "linf=0.1,l2=0.5,l1=1", quiet=True)
    >>> result.verdicts.pivot(index="sample_index", columns="threat", values="status")
    threat              l1=1     l2=0.5   linf=0.1
    sample_index
    0              certified  certified  certified
    1              falsified  falsified  falsified
    >>> result.union
    0.5
    >>> bool(result.witness(1, "linf=0.1").sum() < 1)
    True
    """
    return run(build(network, images, labels, threats, samples, out, **options))


def build(
    network: "Network | Iterable[Network]",
    images: "Images | None",
    labels: "Labels | None",
    threats: str | Threat | Sequence[Threat] | None,
    samples: int | Sequence[int] | None,
    out: str | Path | None,
    **options: Unpack[Options],
) -> CertificationRequest:
    """The typed form of what was asked for in words."""
    given: dict[str, Any] = {**options}
    source = _part(("split", "data_dir", "best", "front"), given)
    found = subjects(network, given_samples(images, labels, source.get("split", "test")), **source)
    if not found:
        raise UserError("no network given: a torch module, a run of `train`, a directory of one, an ONNX file, or a list of them")
    given |= {"stages": parse_stages(given.get("stages")), "seconds": parse_seconds(given.get("seconds"))}
    cascade, execution = Cascade(**_part(Cascade, given)), Execution(**_part(Execution, given))
    asked = CertificationRequest(tuple(found), threats, samples, cascade, execution, out=out, **_part(CertificationRequest, given))
    if given:
        unknown = next(iter(given))
        raise UserError(f"certify has no option {unknown!r}.{nearest(unknown, [*Options.__annotations__])}")
    return asked


def _part(names: type | Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that these names (or the fields of a class) take; they are taken out."""
    wanted = names if not isinstance(names, type) else [f.name for f in fields(names)]
    return {name: given.pop(name) for name in wanted if name in given}


def run(asked: CertificationRequest) -> CertificationResult:
    """Certify what was asked for. Everything that can be refused is refused before anything is started or written."""
    many = asked.add or len(asked.subjects) > 1
    with threads(asked.execution.threads):
        asked.check()
        remark(asked.remarks(), asked.execution.quiet)
        root = str(asked.out) if asked.out is not None else f"{MEMORY}cure_ray/{uuid.uuid4().hex}"
        tasks = tuple(prepare(asked, subject, root, many) for subject in asked.subjects)
        store = Store.open(root)
        if asked.out is None:
            weakref.finalize(store, partial(store.fs.rm, store.files.path, recursive=True))
        execute(store, tasks, asked.execution)
    return CertificationResult(partial(_load, store, tasks), store, tasks, asked.execution)


def default_directory(found: Sequence[Subject]) -> str:
    """Where the command line keeps results unless told otherwise."""
    return f"certificates/{found[0].name}-{found[0].digest[:8]}" if len(found) == 1 else f"certificates/{len(found)}-checkpoints"


def _load(store: Store, tasks: Sequence[Task]) -> Loaded:
    """The rows that were asked for, of every task, and the study of them."""
    rows, parts, infos = store.read().to_pandas(), list[pd.DataFrame](), {}
    for task in tasks:
        digest = task.job.checkpoint_digest
        mine = (rows["checkpoint_digest"] == digest) & rows["sample_index"].isin(task.indices)
        parts.append(rows[mine & rows["threat"].isin([str(t) for t in task.threats])])
        infos[digest] = run_info(store.about(digest), digest, {})
    verdicts = pd.concat(parts, ignore_index=True)
    radii = verdicts.groupby("threat", observed=True)["eps"].max()
    balls = tuple((t.norm, float(radii[str(t)])) for t in tasks[0].threats if isinstance(t, Ball | Balls))
    images = tasks[0].subject.samples.images.double().numpy()
    source = None if in_memory(store) else Path(store.root)
    return Loaded(build_study(verdicts, infos, balls or None, source), (store,), verdicts, images)
