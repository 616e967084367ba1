"""Judge a published network: its authors' weights, checked, certified under the protocol it was published with, beside its figures."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cure_ray.api.certify import CertificationResult, run
from cure_ray.api.execution import placed
from cure_ray.api.request import Cascade, CertificationRequest, Execution
from cure_ray.api.subject import Subject
from cure_ray.certification.identity import network_identity
from cure_ray.config import Dataset
from cure_ray.data.images import load_dataset
from cure_ray.data.samples import Samples
from cure_ray.errors import UserError
from cure_ray.interchange import load_onnx
from cure_ray.interchange.foreign import load_npz
from cure_ray.interchange.weights import read_weights
from cure_ray.networks.models import Network
from cure_ray.results.judgement import Judgement, measured
from cure_ray.runs.checkpoints import versions
from cure_ray.runs.directory import file_digest
from cure_ray.runs.hardware import cpu_name, hardware
from cure_ray.zoo.architecture import build, fitted
from cure_ray.zoo.published import Published, find_published

COST = "cost.json"  # CPU seconds of every call that worked on a store, those that were stopped included


@dataclass(frozen=True)
class Taken:
    """A network made of a file, and how sure it is that it is the published one."""

    network: Network
    identity: str
    file: str
    sha256: str
    recognised: str


def take(published: Published, path: Path, unverified: bool = False) -> Taken:
    """The published network from a file of weights; UserError if the file is another one, or its tensors do not fit.

    A file is recognised by its SHA-256, or by the identity of the function its network computes, which no change of format alters.
    """
    known = published.weights
    if known is None:
        build(published)  # which says why there is nothing to judge
        raise AssertionError("unreachable")
    if not path.is_file():
        raise UserError(f"--weights {path}: no such file. The authors keep it at {published.source.url if published.source else '?'}")
    network = _from_onnx(published, path) if path.suffix == ".onnx" else fitted(published, read_weights(path), str(path))
    sha256, identity = file_digest(path), network_identity(network)
    copies = {digest: what for what, digest in known.copies.items()}
    if sha256 == known.sha256:
        how = "the authors' file, by its SHA-256"
    elif sha256 in copies:
        how = f"{copies[sha256]}, by its SHA-256"
    elif identity == known.identity:
        how = "another file, whose network computes the same function"
    else:
        how = "not verified"
    recognisable = known.identity or known.sha256 or copies
    if recognisable and (how == "not verified" or known.identity not in (None, identity)) and not unverified:
        theirs = f"identity {known.identity[:12]}" if known.identity else f"SHA-256 {(known.sha256 or next(iter(copies)))[:12]}"
        raise UserError(
            f"{path} fits {published.name}, but it is another network (SHA-256 {sha256[:12]}, identity {identity[:12]}; published: "
            f"{theirs}). Its figures would be compared with somebody else's; --unverified judges it all the same."
        )
    return Taken(network, identity, path.name, sha256, how)


def _from_onnx(published: Published, path: Path) -> Network:
    """The tensors of an ONNX graph in their order: exported graphs keep no names worth trusting."""
    given, own = [*load_onnx(path, published.input).state_dict().values()], [*build(published).state_dict()]
    if len(given) != len(own):
        raise UserError(f"{path} holds {len(given)} tensors, {published.name} has {len(own)}: {', '.join(own)}")
    return fitted(published, dict(zip(own, given, strict=True)), str(path))


def published_samples(published: Published, data: Path | None = None, data_dir: str | Path | None = None) -> Samples:
    """The images the figures are about: of the data set, or of the file given; their digest is checked where it is known."""
    about = published.data
    if data is not None:
        found = load_npz(data)
        samples = Samples(about.name, about.split, found.images, found.labels)
    elif about.given:
        raise UserError(
            f"{published.name} was judged on {about.n} images its authors chose: give them with --data FILE.npz (images, labels)"
        )
    else:
        images = load_dataset(Dataset(name=about.name), about.split, data_dir)
        chosen = slice(None) if about.samples is None else torch.tensor(about.samples)
        samples = Samples(about.name, about.split, images.pixels()[chosen], images.labels[chosen])
    if about.digest is not None and samples.digest != about.digest:
        raise UserError(
            f"{published.name} was judged on other images: the digest of these {len(samples)} is {samples.digest[:12]}, "
            f"that of the published protocol {about.digest[:12]}"
        )
    return samples


@contextmanager
def _charged(out: str | Path) -> Iterator[None]:
    """Add the CPU seconds of this process to what earlier calls spent on the same store."""
    began = time.process_time()
    try:
        yield
    finally:
        folder = Path(out)
        if (folder / "store.json").is_file():
            spent = spent_seconds(folder) + time.process_time() - began
            (folder / COST).write_text(json.dumps({"cpu_seconds": round(spent, 3)}) + "\n")


def spent_seconds(store: Path) -> float:
    """CPU seconds of all calls of `judge` on a store so far."""
    try:
        return float(json.loads((store / COST).read_text())["cpu_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


@dataclass(frozen=True)
class Effort:
    """What of the protocol the caller changes: fewer images, another budget."""

    samples: int | None = None
    nodes: int | None = None
    seed: int = 0


def judge(
    name: str,
    weights: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    effort: Effort | None = None,
    execution: Execution | None = None,
    unverified: bool = False,
) -> tuple[Judgement, CertificationResult]:
    """Certify a published network from its authors' weights; verdicts go to `out`, and the same call continues there.

    `name` is one of `cure-ray judge`, or a .yaml file of one's own.
    """
    published, asked, where = find_published(name), effort or Effort(), execution or Execution()
    taken = take(published, Path(weights), unverified)
    samples = published_samples(published, Path(data) if data is not None else None, data_dir)
    about = {"published": published.name, "network": published.name, "weights_sha256": taken.sha256}
    subject = Subject(taken.network, published.name, samples, about)
    nodes = published.protocol.nodes if asked.nodes is None else asked.nodes
    n = min(published.data.n, asked.samples or published.data.n)
    request = CertificationRequest(
        (subject,), published.protocol.read(), n, Cascade(nodes=nodes), where, asked.seed, out=out
    )  # fmt: skip
    with _charged(out):
        result = run(request)
    return judgement(published, taken, result, weights), result


def judgement(published: Published, taken: Taken, result: CertificationResult, weights: str | Path) -> Judgement:
    """The figures of a finished certification beside the published ones."""
    (task,) = result.tasks
    job, n = task.job, len(task.indices)
    key = job.key()
    settings = {**key["settings"], "engine": job.engine, "engine_version": job.engine_version, "seed": job.seed}
    alone = result.execution.workers == 1
    machine = hardware(placed(result.execution))
    given = f" --samples {n}" if n != published.data.n else ""
    given += f" --nodes {job.settings.nodes}" if job.settings.nodes != published.protocol.nodes else ""
    given += f" --seed {job.seed}" if job.seed else ""
    return Judgement(
        published,
        taken.identity,
        {"file": taken.file, "sha256": taken.sha256, "recognised": taken.recognised},
        {"name": job.dataset, "split": job.split, "n": n, "digest": job.data_digest},
        settings,
        measured(result.loaded),
        f"{machine['gpu'] or cpu_name()}, {machine['cpus']} cores, {result.execution.threads} thread(s)",
        spent_seconds(Path(result.store.root)) if alone else None,
        float(result.verdicts["seconds"].sum()),
        f"cure-ray judge {published.name} --weights {Path(weights).name}{given}",
        versions(),
    )


def default_out(name: str) -> Path:
    """Where the command line keeps verdicts unless told otherwise."""
    return Path("certificates") / Path(name).stem
