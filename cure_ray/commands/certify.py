"""`cure-ray certify`: prove or refute the robustness of every sample, and print the table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cure_ray.commands.train import DataDirOption
from cure_ray.errors import UserError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cure_ray.bounds.engine import Engine
    from cure_ray.certify.runner import Samples
    from cure_ray.certify.settings import CascadeSettings
    from cure_ray.config import Certification
    from cure_ray.threats import Threat

ENGINES = ("native", "auto_lirpa")


def certify(
    checkpoint: Annotated[Path | None, typer.Argument(help="A run or checkpoint directory of `cure-ray train`.")] = None,
    threats: Annotated[str | None, typer.Option(help="Radii in pixels, e.g. linf=8/255,l2=0.5,l1=1.0; default: the experiment's.")] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    samples: Annotated[int | None, typer.Option(min=1, help="How many images; default: the experiment's, or all of --data.")] = None,
    out: Annotated[str | None, typer.Option(help="Results directory or fsspec URI; default certificates/NAME-DIGEST.")] = None,
    engine: Annotated[str, typer.Option(help="native, or auto_lirpa for graphs that are not sequential.")] = "native",
    stages: Annotated[str | None, typer.Option(help="Comma separated: ibp,crown-ibp,attack,crown,alpha-crown,branch-and-bound.")] = None,
    budget: Annotated[str | None, typer.Option(help="Branch-and-bound time per sample and threat, e.g. 10s; 0 leaves it out.")] = None,
    nodes: Annotated[int | None, typer.Option(min=0, help="Branch-and-bound sub-problems per sample and threat.")] = None,
    union_only: Annotated[bool, typer.Option("--union-only", help="Stop a sample at its first failed norm; gives the union only")] = False,
    no_box: Annotated[bool, typer.Option("--no-box", help="Bound the whole ball, not ball∩[0,1]: looser, as other tools do.")] = False,
    network: Annotated[str | None, typer.Option(help="package.module:factory of a network trained elsewhere.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Its weights: .safetensors, or .pt with plain tensors.")] = None,
    data: Annotated[Path | None, typer.Option(help=".npz with `images` (N,C,H,W; uint8 or floats in [0,1]) and `labels`.")] = None,
    cross_check: Annotated[str | None, typer.Option("--cross-check", help="Re-derive some certificates with this engine.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Allow results of several checkpoints in one --out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    data_dir: DataDirOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Certify a network for l_inf, l2, l1 and their union.

    Every sample ends as certified (proven), falsified (with a stored witness), unknown, timeout, oom, error or misclassified;
    `OUT/verdicts/*.parquet` says which stage decided and how far each margin is proven (docs/results-schema.md). Finished work is
    kept: the same command continues where it stopped.

    Examples: `cure-ray certify runs/smoke --samples 100`,
    `cure-ray certify --network my.nets:resnet --weights w.safetensors --data test.npz --threats linf=2/255 --engine auto_lirpa`.
    """
    import torch

    from cure_ray import seeding
    from cure_ray.certify.cascade import Certifier
    from cure_ray.certify.foreign import check_samples
    from cure_ray.certify.runner import certify_shard
    from cure_ray.certify.settings import Job, plan
    from cure_ray.commands.certify_options import cascade_settings, parse_threats
    from cure_ray.commands.certify_reporter import Reporter
    from cure_ray.datasets import select_samples
    from cure_ray.results.store import Store
    from cure_ray.results.summary import summary
    from cure_ray.run import StoppedError

    torch.set_num_threads(threads)
    where = seeding.resolve_device(device)
    subject = _subject(checkpoint, network, weights, data, split, data_dir)
    chosen = parse_threats(threats) if threats else subject.threats
    if not chosen:
        raise UserError("which threats? For example --threats linf=0.1,l2=0.5,l1=1.0")
    check_samples(subject.samples, subject.network)
    settings = cascade_settings(subject.defaults, stages, budget, nodes, engine, not no_box)
    total = len(subject.samples)
    wanted = samples or (subject.defaults.samples if subject.defaults and data is None else total)
    if total == 0:
        raise UserError(f"the {split} split of {subject.samples.dataset} has no images")
    indices = select_samples(total, wanted, subject.defaults.selection if subject.defaults else "first").tolist()

    judge = make_engine(engine, subject.network, where, tuple(subject.samples.images.shape[1:]))
    job = Job(
        subject.digest, subject.samples.dataset, split, subject.samples.digest, judge.name, judge.version, settings, seed, union_only
    )
    root = out or f"certificates/{subject.name}-{subject.digest[:8]}"
    store = Store.create(root, job.dataset, split, job.data_digest, many=add)
    done = store.begin(job, chosen, indices, subject.about)
    with Reporter(len(indices) * len(chosen), quiet) as reporter:
        bundles = Path(root if "://" not in root else ".") / "soundness-failure"
        certifier = Certifier(judge, subject.network.to(where), settings, seed, bundles, reporter, where)
        if union_only:
            pilot = indices[:16]
            chosen = certifier.failure_order(subject.samples.images[pilot].to(where), subject.samples.labels[pilot].to(where), chosen)
        shards = plan(job, chosen, indices, done)
        reporter.start(len(indices) * len(chosen) - sum(len(s.indices) * len(s.threats) for s in shards))
        for number, shard in enumerate(shards):
            try:
                rows = certify_shard(certifier, shard, subject.samples, lambda image: store.write_witness(image.numpy()))
                store.write(shard, rows)
            except KeyboardInterrupt:
                kept = f"{number} of {len(shards)} shards are finished and kept in {root}"
                raise StoppedError(f"stopped. {kept}; run the same command to continue.") from None
    store.compact(job, chosen)
    table = store.read()
    names = sorted((str(t) for t in chosen), key=lambda name: ("linf", "l2", "l1").index(name.split("=")[0]))
    print(summary(table.filter(_rows(table, indices)), job.checkpoint_digest, names))
    if cross_check:
        _cross_check(cross_check, subject, chosen, table, job.checkpoint_digest, set(indices), settings, seed, where)
    print(f"verdicts: {root}/verdicts")


# ---------------------------------------------------------------- what is certified


class Subject:
    """A network, its images, and what is known of it."""

    def __init__(self, network: "nn.Module", digest: str, name: str, samples: "Samples", threats: "list[Threat]",
                 defaults: "Certification | None", about: dict[str, Any]) -> None:  # fmt: skip
        self.network, self.digest, self.name, self.samples = network, digest, name, samples
        self.threats, self.defaults, self.about = threats, defaults, about


def _subject(
    checkpoint: Path | None, network: str | None, weights: Path | None, data: Path | None, split: str, data_dir: Path | None
) -> Subject:
    from cure_ray.certify.foreign import load_foreign_network, load_npz
    from cure_ray.checkpoints import load_checkpoint, state_digest

    if (checkpoint is None) == (network is None):
        raise UserError("give either a CHECKPOINT directory of `cure-ray train`, or --network package.module:factory with --data")
    if network is not None:
        if data is None:
            raise UserError("--network needs --data file.npz with the images and labels to certify")
        module = load_foreign_network(network, weights)
        about: dict[str, Any] = {"network": network, "weights": str(weights) if weights else None, "data": str(data)}
        name = (weights.stem if weights else network.partition(":")[2]).replace("/", "-")
        return Subject(module, state_digest(module.state_dict()), name, load_npz(data), [], None, about)
    from cure_ray.norms import NORMS
    from cure_ray.threats import Threat

    assert checkpoint is not None
    loaded = load_checkpoint(checkpoint)
    experiment = loaded.experiment
    samples = load_npz(data) if data is not None else _dataset(experiment.dataset, split, data_dir)
    threats = [Threat(norm, experiment.threats.eps(norm)) for norm in NORMS if experiment.threats.eps(norm) > 0]
    about = {
        "name": experiment.name, "method": experiment.training.method, "seed": experiment.seed, "config_hash": experiment.config_hash,
        "epoch": loaded.epoch, "experiment": experiment.model_dump(mode="json"), "metrics": loaded.meta.get("metrics", {}),
    }  # fmt: skip
    return Subject(loaded.network, loaded.digest, experiment.name, samples, threats, experiment.certification, about)


def _dataset(config: Any, split: str, data_dir: Path | None) -> "Samples":
    from cure_ray.certify.runner import Samples
    from cure_ray.datasets import load_dataset

    valid = ("test", "validation", "train")
    if split not in valid:
        raise UserError(f"unknown split {split!r}.{nearest(split, valid)}")
    images = load_dataset(config.model_copy(update={"augment": False}), split, data_dir)  # type: ignore[arg-type]
    return Samples(config.name, split, images.pixels(), images.labels)


def make_engine(name: str, network: "nn.Module", device: "torch.device", input_shape: tuple[int, ...]) -> "Engine":
    """A bound engine by name."""
    if name == "native":
        from cure_ray.bounds.native import NativeEngine

        return NativeEngine(network, device)  # type: ignore[arg-type]  # it reads any nn.Module or says what it cannot read
    if name == "auto_lirpa":
        from cure_ray.bounds.lirpa import LirpaEngine

        channels, height, width = input_shape
        return LirpaEngine(network, device, (channels, height, width))
    raise UserError(f"unknown engine {name!r}.{nearest(name, ENGINES)}")


# ---------------------------------------------------------------- output


def _rows(table: Any, indices: list[int]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(table.column("sample_index"), value_set=pa.array(indices, type=pa.int64()))


def _cross_check(
    engine: str, subject: Subject, threats: "list[Threat]", table: Any, digest: str, indices: set[int], settings: "CascadeSettings",
    seed: int, device: "torch.device",
) -> None:  # fmt: skip
    from cure_ray.certify.crosscheck import cross_check

    other = make_engine(engine, subject.network.cpu(), device, tuple(subject.samples.images.shape[1:]))
    columns = ("checkpoint_digest", "threat", "status", "sample_index")
    rows = list(zip(*(table.column(c).to_pylist() for c in columns), strict=True))
    for threat in threats:
        certified = [i for d, t, s, i in rows if d == digest and t == str(threat) and s == "certified" and i in indices]
        if certified:
            print(cross_check(other, subject.samples, threat, certified, settings, seed))
        else:
            print(f"cross-check {threat}: nothing certified, nothing to check")
