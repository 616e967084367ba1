"""`cure-ray submit`: a sweep on a cluster, through Ray's Jobs API."""

from pathlib import Path
from typing import Annotated

import typer

from cure_ray.commands.train import AllowCodeOption
from cure_ray.errors import UserError


def submit(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="The search in YAML (docs/guide/sweeps.md).")],
    address: Annotated[
        str, typer.Option(help="The cluster's dashboard, e.g. through `ray dashboard cluster.yaml`.")
    ] = "http://127.0.0.1:8265",
    out: Annotated[str | None, typer.Option("--out", help="Sweep directory on the cluster: absolute, on shared storage.")] = None,
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="Where data sets are on the cluster.")] = None,
    allow_code: AllowCodeOption = [],  # noqa: B006 - the option's callback acts on it
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the output.")] = False,
) -> None:
    """Start a sweep on a cluster and follow its output.

    Ctrl-C stops only the following: the job goes on, and the command to follow it again is printed. The code is shipped with the job;
    data, results and virtual environments are not. A network.factory must come with it, or be on the cluster and allowed.
    """
    from cure_ray.cluster.submit import follow, submit_sweep

    job = submit_sweep(file, address, out, data_dir, allow_code)
    print(f"submitted {job.job_id}; follow it again with: {job.follow_command}")
    if detach:
        return
    try:
        state = follow(job, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print(f"\nno longer following; the job goes on. Follow: {job.follow_command}")
        print(f"Stop it: ray job stop --address {address} {job.job_id}")
        return
    if state != "SUCCEEDED":
        raise UserError(f"the job ended as {state}; its output: {job.follow_command}")
    print(f"finished: {out}")
