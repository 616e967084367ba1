"""A Ray session: an embedded one on loopback, or an existing cluster. What the rest of this package may assume about Ray is said here."""

import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cure_ray.cluster.embedded import embedded_ray, keep_signals
from cure_ray.cluster.voice import brief_messages
from cure_ray.config.factories import ALLOW
from cure_ray.errors import UserError

# Read by Ray when it is imported or started, and inherited by every process it starts: set before `import ray`.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
# Set by cluster.yaml: what a cluster that starts with nothing may grow to, "8xCPU:8,GPU:1" (several kinds with ";"), or "1": unknown.
AUTOSCALING = "CURE_RAY_AUTOSCALING"
KNOCK_SECONDS = 10.0
_directory: list[Path] = []  # of the embedded session that is open in this process


@dataclass(frozen=True)
class Session:
    """What we are connected to."""

    directory: Path | None  # where an embedded session of ours lives; None: somebody else's, or a cluster
    address: str
    resources: Mapping[str, float]

    @property
    def embedded(self) -> bool:
        return self.directory is not None

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


def _cluster_address(address: str | None) -> str | None:
    """The cluster to join: asked for, or in RAY_ADDRESS. None: run on this machine."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def _allowed_code() -> dict[str, Any] | None:
    """A cluster's processes do not inherit our environment: what may run here may run there."""
    return {"env_vars": {ALLOW: os.environ[ALLOW]}} if os.environ.get(ALLOW) else None


def _knock(address: str) -> None:
    """Ray itself tries an address where nothing listens for minutes, and prints a warning for every attempt."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdecimal():  # else a name such as `auto`, which Ray resolves
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS):
            pass


@contextmanager
def _joined_cluster(address: str) -> Iterator[None]:
    import ray

    try:
        _knock(address)
        with keep_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_allowed_code())
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"no Ray cluster could be reached at {address!r} ({reason}). Start one (`ray start --head`, or `ray up cluster.yaml`), "
            "check the address and RAY_AUTH_TOKEN, or leave --address and RAY_ADDRESS away to run on this machine."
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def session(address: str | None = None, cpus: int | None = None) -> Iterator[Session]:
    """The Ray session to work in. One that is already open is used and left open; one we opened is closed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    api: Any = ray  # parts of its interface carry no types
    with ExitStack() as stack:
        if not ray.is_initialized():
            cluster = _cluster_address(address)
            stack.enter_context(brief_messages())
            if cluster is None:
                _directory.append(stack.enter_context(embedded_ray(cpus)))
                stack.callback(_directory.clear)
            else:
                stack.enter_context(_joined_cluster(cluster))
        resources = dict(api.cluster_resources())
        resources["GPU"] = max(resources.get("GPU", 0.0), sum(node.get("GPU", 0.0) for node in grown_nodes()))
        yield Session(_directory[0] if _directory else None, ray.get_runtime_context().gcs_address, resources)


@dataclass(frozen=True)
class Need:
    """What a group of equal workers asks for."""

    workers: int
    cpus: float
    gpus: float = 0.0

    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


def fitting(need: Need, nodes: list[Mapping[str, float]]) -> int:
    """How many such workers the nodes hold at once; a worker never spans two nodes."""
    total = 0
    for node in nodes:
        by_cpu = math.floor(node.get("CPU", 0.0) / need.cpus + 1e-9) if need.cpus else need.workers
        by_gpu = math.floor(node.get("GPU", 0.0) / need.gpus + 1e-9) if need.gpus else by_cpu
        total += min(by_cpu, by_gpu)
    return total


def grown_nodes() -> list[Mapping[str, float]]:
    """The nodes of the cluster at its largest, as far as the environment says."""
    text = os.environ.get(AUTOSCALING, "").replace(" ", "")
    nodes: list[Mapping[str, float]] = []
    for kind in text.split(";") if text not in ("", "1") else ():
        count, _, resources = kind.partition("x")
        try:
            node = {name: float(amount) for name, amount in (pair.split(":") for pair in resources.split(","))}
            nodes += [node] * int(count)
        except ValueError:
            raise UserError(f"{AUTOSCALING}={text!r} is not understood; it should say how far the cluster grows: 8xCPU:8,GPU:1") from None
    return nodes


def usable_nodes() -> list[Mapping[str, float]]:
    """What the cluster has, or what it may grow to if that is more."""
    import ray

    api: Any = ray
    live = [node["Resources"] for node in api.nodes() if node["Alive"]]
    return max(live, grown_nodes(), key=lambda nodes: sum(n.get("CPU", 0.0) + n.get("GPU", 0.0) for n in nodes))


TRAINING = "execution.ct_workers, cpus_per_worker or gpus_per_worker (fractions are allowed)"


def require(need: Need, what: str, lower: str = TRAINING) -> None:
    """Refuse at once what the cluster can never give (Ray itself would wait for ever), and say which settings to `lower`."""
    nodes = usable_nodes()
    if fitting(need, nodes) >= need.workers or os.environ.get(AUTOSCALING) == "1":
        return
    has = "; ".join(f"{n.get('CPU', 0):g} CPUs" + (f", {n['GPU']:g} GPUs" if n.get("GPU") else "") for n in nodes)
    each = f"{need.cpus:g} CPUs" + (f" and {need.gpus:g} GPUs" if need.gpus else "")
    raise UserError(
        f"{what} needs {need.workers} workers with {each} each; the cluster has room for {fitting(need, nodes)} ({len(nodes)} "
        f"node{'s' if len(nodes) != 1 else ''}: {has}). Lower {lower}, or start more "
        f"nodes. On a cluster that grows by itself, set {AUTOSCALING}=1 to wait for it."
    )
