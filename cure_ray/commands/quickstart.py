"""`cure-ray quickstart`: a small real experiment from start to end, with the very code that runs on a cluster."""

import time
from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("quickstart"),
    file: Annotated[str, typer.Option("--sweep", help="The sweep to run: a file, or one that comes with the program.")] = "smoke",
    trials: Annotated[int | None, typer.Option(min=1, help="Train fewer configurations than the sweep does.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Certify fewer images than the experiment says.")] = None,
) -> None:
    """Search, certify, report: train a few networks on handwritten digits, prove the best one's robustness, write the report.

    Runs Ray on this machine only (two workers), downloads nothing, takes a few minutes on two cores. Run it again to see that
    finished work is not done twice.
    """
    from cure_ray.cluster.session import session
    from cure_ray.commands.certify import certify
    from cure_ray.commands.report import report
    from cure_ray.commands.sweep import sweep

    began = time.perf_counter()
    with session(cpus=2):
        print(f"1. search: cure-ray sweep {file} --out {out / 'sweep'}", flush=True)
        sweep(Path(file), out=out / "sweep", trials=trials)
        print(f"\n2. certify the best on two workers: cure-ray certify {out / 'sweep'} --out {out / 'results'} --workers 2", flush=True)
        certify([out / "sweep"], samples=samples, out=str(out / "results"), workers=2)
    print(f"\n3. report: cure-ray report {out / 'results'}", flush=True)
    report(str(out / "results"))
    print(f"\ndone in {time.perf_counter() - began:.0f} s. Open {out / 'results' / 'report.html'} in a browser.")
