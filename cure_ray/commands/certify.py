"""`cure-ray certify`: prove or refute the robustness of every sample, and print the table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cure_ray.commands.train import DataDirOption
from cure_ray.errors import UserError

if TYPE_CHECKING:
    import torch

    from cure_ray.certification.job import CascadeSettings, Job, Shard
    from cure_ray.commands.certify_reporter import Reporter
    from cure_ray.commands.certify_subject import Subject
    from cure_ray.results.store import Store
    from cure_ray.threats.balls import Ball


def certify(
    checkpoint: Annotated[
        list[Path] | None, typer.Argument(help="Runs or checkpoints of `cure-ray train`, or a directory of `cure-ray sweep` (its best).")
    ] = None,
    threats: Annotated[
        str | None, typer.Option(help="E.g. linf=8/255,l2=0.5 (radii in pixels), R(10), patch=2x2; default: the experiment's.")
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(help="Cells of transformations: standard, or as published for mnist, fashion-mnist, cifar10, cifar100, tinyimagenet."),
    ] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    samples: Annotated[int | None, typer.Option(min=1, help="How many images; default: the experiment's, or all of --data.")] = None,
    out: Annotated[str | None, typer.Option(help="Results directory or fsspec URI; default certificates/NAME-DIGEST.")] = None,
    engine: Annotated[str, typer.Option(help="native, or auto_lirpa for graphs that are not sequential.")] = "native",
    stages: Annotated[str | None, typer.Option(help="Comma separated: ibp,crown-ibp,attack,crown,alpha-crown,branch-and-bound.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Branch-and-bound time per sample and threat, e.g. 10s; 0: none. Results depend on the machine.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=0, help="Branch-and-bound sub-problems per sample and threat, e.g. 1000. Alone, time is no limit (but an hour)."),
    ] = None,
    attack: Annotated[str | None, typer.Option(help="default, or strong: finds a little more at 10 to 20 times the cost.")] = None,
    union_only: Annotated[bool, typer.Option("--union-only", help="Stop a sample at its first failed norm; gives the union only")] = False,
    no_box: Annotated[bool, typer.Option("--no-box", help="Bound the whole ball, not ball∩[0,1]: looser, as other tools do.")] = False,
    network: Annotated[str | None, typer.Option(help="package.module:factory of a network trained elsewhere.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Its weights: .safetensors, or .pt with plain tensors.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="A sequential network as an ONNX file; needs --data.")] = None,
    data: Annotated[Path | None, typer.Option(help=".npz with `images` (N,C,H,W; uint8 or floats in [0,1]) and `labels`.")] = None,
    cross_check: Annotated[str | None, typer.Option("--cross-check", help="Re-derive some certificates with this engine.")] = None,
    add: Annotated[bool, typer.Option("--add", help="Allow results of several checkpoints in one --out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the attacks.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Certify on so many Ray workers; 1: in this process.")] = 1,
    gpus_per_worker: Annotated[float, typer.Option(min=0, help="GPUs per worker with --device cuda; fractions allowed.")] = 1.0,
    address: Annotated[str | None, typer.Option(help="A running Ray cluster; default: RAY_ADDRESS, else this machine.")] = None,
    best: Annotated[int, typer.Option(min=1, help="How many of a sweep's best trials.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="Start geometric grids of any size.")] = False,
    patch_precheck: Annotated[
        bool, typer.Option("--patch-precheck", help="Patches: try one loose bound for all positions together first.")
    ] = False,
    separate_logits: Annotated[
        bool, typer.Option("--separate-logits", help="Transformations: compare bounds of single logits, as CGT does; looser.")
    ] = False,
    data_dir: DataDirOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the table.")] = False,
) -> None:
    """Certify a network for l_inf, l2, l1 and their union, geometric transformations and patches.

    Every sample ends as certified (proven), falsified (with a stored witness), unknown, timeout, oom, error or misclassified;
    `OUT/verdicts/*.parquet` says which stage decided and how far each margin is proven (docs/reference/schema.md). Finished work is
    kept: the same command continues where it stopped.

    Examples: `cure-ray certify runs/smoke --samples 100`, `cure-ray certify runs/smoke --threats "R(10);Tu(1),Tv(1);patch=2x2"`,
    `cure-ray certify --network my.nets:resnet --weights w.safetensors --data test.npz --threats linf=2/255 --engine auto_lirpa`.
    """
    import torch

    from cure_ray import seeding
    from cure_ray.certification.families import check_feasible
    from cure_ray.commands.certify_options import cascade_settings
    from cure_ray.commands.certify_reporter import Reporter
    from cure_ray.commands.certify_subject import load_subject
    from cure_ray.interchange.foreign import check_samples
    from cure_ray.results.store import Store
    from cure_ray.results.summary import summary

    torch.set_num_threads(threads)
    where = seeding.resolve_device(device if workers == 1 or device != "auto" else "cpu")
    runs: list[Path | None] = [*_runs(checkpoint, best)] if checkpoint else [None]
    tasks: list[_Task] = []
    root = out
    for run in runs:
        subject = load_subject(run, network, weights, data, split, data_dir, onnx)
        chosen = _threats(subject, threats, grid)
        settings = cascade_settings(subject.defaults, stages, budget, nodes, engine, not no_box, patch_precheck, separate_logits, attack)
        indices = _indices(subject, samples, split, data is not None)
        check_feasible(chosen, settings, union_only, len(indices), yes)
        check_samples(subject.samples, subject.network)
        root = root or (f"certificates/{subject.name}-{subject.digest[:8]}" if len(runs) == 1 else f"certificates/{len(runs)}-checkpoints")
        many = add or len(runs) > 1
        tasks.append(_task(subject, chosen, settings, indices, engine, seed, union_only, where, root, many, workers))
    assert root is not None
    store = Store.open(root)
    with Reporter(sum(t.total for t in tasks), quiet) as reporter:
        reporter.start(sum(t.total - t.left for t in tasks))
        bundles = Path(root if "://" not in root else ".") / "soundness-failure"
        if workers == 1:
            _certify_here(tasks, store, where, bundles, reporter)
        else:
            _certify_on_ray(tasks, store, where, bundles, reporter, workers, threads, gpus_per_worker, address)
    for task in tasks:
        store.compact(task.job, task.threats)
    table = store.read()
    for task in tasks:
        names = sorted((str(t) for t in task.threats), key=lambda name: {"linf": 0, "l2": 1, "l1": 2}.get(name.split("=")[0], 3))
        if len(tasks) > 1:
            print(f"\n{task.subject.name} ({task.job.checkpoint_digest[:12]})")
        print(summary(table.filter(_rows(table, task.indices)), task.job.checkpoint_digest, names))
        clean = store.about(task.job.checkpoint_digest)["clean_all"]
        print(f"clean on all {clean['images']} images of the split: {100 * clean['correct'] / clean['images']:.2f} %")
        if cross_check:
            digest = task.job.checkpoint_digest
            _cross_check(cross_check, task.subject, task.threats, table, digest, set(task.indices), task.job.settings, seed, where)
    print(f"verdicts: {root}/verdicts")


class _Task:
    """A checkpoint with its job and what of it is left to do."""

    def __init__(
        self, subject: "Subject", job: "Job", threats: "list[Ball]", indices: list[int], shards: "list[Shard]", engine: str
    ) -> None:
        self.subject, self.job, self.threats, self.indices, self.shards, self.engine = subject, job, threats, indices, shards, engine
        self.total = len(indices) * len(threats)
        self.left = sum(len(s.indices) * len(s.threats) for s in shards)


def _threats(subject: "Subject", text: str | None, grid: str | None) -> list[Any]:
    """What was asked for: on the command line, else in the experiment, else all its norms."""
    from cure_ray.threats.text import read_threats
    from cure_ray.threats.transformations import check_grid

    grid = check_grid(grid or subject.grid)
    text = text or ";".join(subject.defaults.threats if subject.defaults else ())
    radii = {threat.norm: threat.eps for threat in subject.threats}
    chosen: list[Any] = [*subject.threats]
    if text:
        chosen = [*read_threats(text, grid, subject.samples.images.shape[1:], radii)]
    if not chosen:
        raise UserError("which threats? For example --threats linf=0.1,l2=0.5,l1=1.0")
    return chosen


def _indices(subject: "Subject", samples: int | None, split: str, own_data: bool) -> list[int]:
    """The samples to certify: the experiment's number of them, or all of a file of one's own."""
    from cure_ray.data.images import select_samples

    total, defaults = len(subject.samples), subject.defaults
    if total == 0:
        raise UserError(f"the {split} split of {subject.samples.dataset} has no images")
    wanted = samples or (defaults.samples if defaults and not own_data else total)
    return select_samples(total, wanted, defaults.selection if defaults else "first").tolist()


def _task(
    subject: "Subject", threats: "list[Ball]", settings: "CascadeSettings", indices: list[int], engine: str, seed: int,
    union_only: bool, device: "torch.device", root: str, many: bool, workers: int,
) -> _Task:  # fmt: skip
    from cure_ray.certification.balls import Certifier
    from cure_ray.certification.engines import make_engine
    from cure_ray.certification.job import Job, plan
    from cure_ray.commands.certify_subject import describe
    from cure_ray.results.store import Store

    judge = make_engine(engine, subject.network, device, tuple(subject.samples.images.shape[1:]))
    job = Job.make(subject.digest, subject.samples, judge, settings, seed, union_only)
    done = Store.create(root, job.dataset, job.split, job.data_digest, many).begin(job, threats, indices, describe(subject, device))
    if union_only:
        pilot = indices[:16]
        x, y = subject.samples.images[pilot].to(device), subject.samples.labels[pilot].to(device)
        threats = Certifier(judge, subject.network.to(device), settings, seed, device=device).failure_order(x, y, threats)
        subject.network.cpu()
    # A shard of one batch on workers, of two here: the batches, and so every bit of the bounds, are the same.
    shards = plan(job, threats, indices, done, settings.batch if workers > 1 else 2 * settings.batch)
    return _Task(subject, job, threats, indices, shards, engine)


def _certify_here(tasks: list[_Task], store: "Store", device: "torch.device", bundles: Path, reporter: "Reporter") -> None:
    from cure_ray.certification.balls import Certifier
    from cure_ray.certification.engines import make_engine
    from cure_ray.certification.shard import certify_shard
    from cure_ray.runs.run import StoppedError

    finished = 0
    for task in tasks:
        judge = make_engine(task.engine, task.subject.network, device, tuple(task.subject.samples.images.shape[1:]))
        network = task.subject.network.to(device)
        certifier = Certifier(judge, network, task.job.settings, task.job.seed, bundles, reporter, device)
        for shard in task.shards:
            try:
                rows = certify_shard(certifier, shard, task.subject.samples, lambda image: store.write_witness(image.numpy()))
                store.write(shard, rows)
            except KeyboardInterrupt:
                kept = f"{finished} of {sum(len(t.shards) for t in tasks)} shards are finished and kept in {store.root}"
                raise StoppedError(f"stopped. {kept}; run the same command to continue.") from None
            finished += 1


def _certify_on_ray(
    tasks: list[_Task], store: "Store", device: "torch.device", bundles: Path, reporter: "Reporter", workers: int, threads: int,
    gpus: float, address: str | None,
) -> None:  # fmt: skip
    from cure_ray.cluster import certification
    from cure_ray.runs.run import StoppedError, stop_on_signals

    work = [
        (certification.Subject(t.subject.network.cpu(), t.subject.samples, t.engine, t.job.seed, bundles.absolute()), t.shards)
        for t in tasks
    ]
    share = gpus if device.type == "cuda" else 0.0
    with stop_on_signals() as stop:
        try:
            certification.certify_shards(store, work, workers, str(device), threads, share, address, reporter, stop)
        except StoppedError as stopped:
            kept = f"finished shards are kept in {store.root}"
            raise StoppedError(f"stopped by {stopped}; {kept}; run the same command to continue.") from None


def _runs(given: list[Path] | Path, best: int) -> list[Path]:
    """Runs and checkpoints as they are; a sweep's directory stands for its best trials. Callers in Python may pass one path."""
    found: list[Path] = []
    for path in [given] if isinstance(given, Path) else given:
        if (path / "sweep.yaml").is_file():
            from cure_ray.search.ranking import best_runs

            found += best_runs(path, best)
        else:
            found.append(path)
    return found


# ---------------------------------------------------------------- output


def _rows(table: Any, indices: list[int]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(table.column("sample_index"), value_set=pa.array(indices, type=pa.int64()))


def _cross_check(
    engine: str, subject: "Subject", threats: "list[Ball]", table: Any, digest: str, indices: set[int], settings: "CascadeSettings",
    seed: int, device: "torch.device",
) -> None:  # fmt: skip
    from cure_ray.certification.crosscheck import cross_check
    from cure_ray.certification.engines import make_engine
    from cure_ray.threats.balls import Ball

    other = make_engine(engine, subject.network.cpu(), device, tuple(subject.samples.images.shape[1:]))
    columns = ("checkpoint_digest", "threat", "status", "sample_index")
    rows = list(zip(*(table.column(c).to_pylist() for c in columns), strict=True))
    for threat in (t for t in threats if isinstance(t, Ball)):
        certified = [i for d, t, s, i in rows if d == digest and t == str(threat) and s == "certified" and i in indices]
        if certified:
            print(cross_check(other, subject.samples, threat, certified, settings, seed))
        else:
            print(f"cross-check {threat}: nothing certified, nothing to check")
