"""Submit a sweep to a cluster through Ray's Jobs API, and follow it; the job does not need us, so losing us costs nothing."""

import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cure_ray.config import resolve
from cure_ray.config.factories import check_allowed, comes_from
from cure_ray.errors import UserError
from cure_ray.search.space import base_data, load_sweep

PATIENCE = 60.0  # seconds a starting head may take to accept jobs
LOST = 20.0  # seconds of silence until a dashboard counts as lost
# What must not travel: Ray refuses a working directory of more than 500 MB, and results have their own place.
EXCLUDES = (
    ".git", ".venv", "**/__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "*.egg-info", "build", "dist",
    "data", "runs", "sweeps-out", "certificates",
)  # fmt: skip


@dataclass(frozen=True)
class Submitted:
    address: str
    job_id: str

    @property
    def follow_command(self) -> str:
        return f"ray job logs --address {self.address} --follow {self.job_id}"


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _troubles() -> tuple[type[BaseException], ...]:
    """What Ray's client raises over an unreachable dashboard, a wrong token, or a job it does not know."""
    from ray.exceptions import RayError

    return RayError, RuntimeError, ValueError, OSError  # the errors of `requests` are OSErrors


def _connect(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


def _client(address: str) -> Any:
    try:
        return _connect(address)
    except _troubles() as error:
        raise UserError(
            f"no Ray dashboard takes us in at {address} ({_reason(error)}). Is the tunnel open (`ray dashboard cluster.yaml`)? With token "
            "authentication the cluster's token must be here (RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token)."
        ) from None


def project_root(sweep: Path) -> Path:
    """The directory to ship: the nearest one above the sweep that holds the package, else the sweep's own."""
    for parent in sweep.absolute().parents:
        if (parent / "cure_ray" / "__init__.py").is_file():
            return parent
    return sweep.absolute().parent


def entrypoint(sweep: Path, root: Path, out: str | None, data_dir: str | None, allowed: Sequence[str] = ()) -> str:
    """The command the cluster runs; paths in it are the cluster's."""
    words = ["python", "-m", "cure_ray", "sweep", str(sweep.absolute().relative_to(root)), "--address", "auto"]
    words += ["--out", out] if out else []
    words += ["--data-dir", data_dir] if data_dir else []
    words += [word for module in allowed for word in ("--allow-code", module)]
    return shlex.join(words)


def check_code(factory: str | None, root: Path) -> None:
    """A network's code travels with the job from the directory it is shipped from; any other must be there already, and be allowed."""
    if factory is None:
        return
    check_allowed(factory)
    if comes_from(factory, Path.cwd()) and not comes_from(factory, root):
        raise UserError(f"{factory} lies in {Path.cwd()}, but the job ships {root}: put its module there, beside the sweep")


def submit_sweep(sweep: Path, address: str, out: str | None = None, data_dir: str | None = None, allowed: Sequence[str] = ()) -> Submitted:
    """Check the sweep here, ship the code, start it there. `out` should be a path all nodes share; it must not be relative."""
    search = load_sweep(sweep)
    name = search.name
    check_code(resolve(base_data(search)).network.factory, project_root(sweep))
    if out is None or not os.path.isabs(out):
        raise UserError(
            f"--out {out or '(not given)'}: on a cluster the sweep's directory must be an absolute path that every node sees, for example "
            "/shared/sweeps/mnist; a relative one would vanish with the job's copy of the working directory"
        )
    client, root = _client(address), project_root(sweep)
    environment = {
        "working_dir": str(root),
        "excludes": list(EXCLUDES),
        "env_vars": {"PYTHONPATH": ".", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"},
    }
    for name_of_logger in ("ray", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)  # they list every file they leave out
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            command = entrypoint(sweep, root, out, data_dir, allowed)
            return Submitted(address, client.submit_job(entrypoint=command, runtime_env=environment, metadata={"cure_ray_sweep": name}))
        except _troubles() as error:
            if "try again later" not in str(error) or time.monotonic() > deadline:  # a head that has just started says so
                raise UserError(f"the cluster at {address} did not take the job: {_reason(error)}") from None
            time.sleep(2)


def follow(job: Submitted, say: Callable[[str], None], seconds: float = 1.0) -> str:
    """Print the job's output until it ends; returns its final state. Interrupting this, or losing the dashboard, leaves the job alone."""
    shown, heard, client = 0, time.monotonic(), None
    while True:
        try:
            client = client or _connect(job.address)
            state = str(client.get_job_status(job.job_id).value)
            heard = time.monotonic()
        except _troubles() as error:  # a tunnel that is being mended, a head that restarts
            if time.monotonic() - heard > LOST:
                raise UserError(
                    f"the dashboard at {job.address} answers no more ({_reason(error)}). The job goes on without us; follow it again, "
                    f"once the dashboard is back, with: {job.follow_command}"
                ) from None
            time.sleep(seconds)
            continue
        try:
            logs = client.get_job_logs(job.job_id)
        except _troubles():  # not there yet
            logs = ""
        if len(logs) > shown:
            say(logs[shown:].rstrip("\n"))
            shown = len(logs)
        if state in ("SUCCEEDED", "FAILED", "STOPPED"):
            return state
        time.sleep(seconds)
