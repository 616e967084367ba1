"""`cure-ray quickstart`: a small real experiment from start to end, with the very code that runs on a cluster."""

import time
from pathlib import Path
from typing import Annotated

import typer

from cure_ray.errors import UserError

SWEEP = Path("sweeps/smoke.yaml")


def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("quickstart"),
    file: Annotated[Path, typer.Option("--sweep", help="The sweep to run.")] = SWEEP,
) -> None:
    """Search, certify, report: train a few networks on handwritten digits, prove the best one's robustness, write the report.

    Runs Ray on this machine only (two workers), downloads nothing, takes a few minutes on two cores. Run it again to see that
    finished work is not done twice.
    """
    from cure_ray.cluster.session import session
    from cure_ray.commands.certify import certify
    from cure_ray.commands.report import report
    from cure_ray.commands.sweep import sweep

    if not file.is_file():
        raise UserError(f"{file} is not here: run quickstart in a clone of the repository, or name a sweep with --sweep")
    began = time.perf_counter()
    with session(cpus=2):
        print(f"1. search: cure-ray sweep {file} --out {out / 'sweep'}", flush=True)
        sweep(file, out=out / "sweep")
        print(f"\n2. certify the best on two workers: cure-ray certify {out / 'sweep'} --out {out / 'results'} --workers 2", flush=True)
        certify([out / "sweep"], out=str(out / "results"), workers=2)
    print(f"\n3. report: cure-ray report {out / 'results'}", flush=True)
    report(str(out / "results"))
    print(f"\ndone in {time.perf_counter() - began:.0f} s. Open {out / 'results' / 'report.html'} in a browser.")
