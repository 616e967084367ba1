"""A Ray session: an embedded one on loopback, or an existing cluster. What the rest of this package may assume about Ray is said here."""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cure_ray.errors import UserError

# Read by Ray when it is imported or started, and inherited by every process it starts: set before `import ray`.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}
# Only for sessions nobody else can reach; a cluster keeps its token.
EMBEDDED_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    # Despite its name: with 0 a node's address is 127.0.0.1 on every system, and Ray's servers then bind to loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
# Set by cluster.yaml: what a cluster that starts with nothing may grow to, "8xCPU:8,GPU:1" (several kinds with ";"), or "1": unknown.
AUTOSCALING = "CURE_RAY_AUTOSCALING"
OBJECT_STORE_BYTES = 1 << 29  # states of networks and rows of shards; nothing large lives there


@dataclass(frozen=True)
class Session:
    """What we are connected to."""

    embedded: bool
    address: str
    resources: Mapping[str, float]

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


def _set_environment(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def _connect(address: str | None, cpus: int | None, dashboard: bool) -> bool:
    """Start or join; True if the session is embedded."""
    _set_environment(ENVIRONMENT)
    address = address or os.environ.get("RAY_ADDRESS")
    if address in ("", "local"):
        address = None
    if address is None:
        _set_environment(EMBEDDED_ENVIRONMENT)
    import ray

    if address is None:
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False  # what the variable means, should ray have been imported before it was set
        try:
            ray.init(
                address="local",  # without it Ray joins whatever cluster it finds on this machine
                num_cpus=cpus,
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                _node_ip_address="127.0.0.1",
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray raises a bare Exception here
            raise UserError(
                f"Ray could not start on this machine ({str(error).strip().splitlines()[0]}). Most often it is overloaded, out of memory "
                "or /tmp is full: free some and run the same command again. `cure-ray doctor` looks at the usual causes."
            ) from None
        return True
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"no Ray cluster could be reached at {address!r} ({reason}). Start one (`ray start --head`, or `ray up cluster.yaml`), "
            "check the address and RAY_AUTH_TOKEN, or leave --address and RAY_ADDRESS away to run on this machine."
        ) from None
    return False


@contextmanager
def session(address: str | None = None, cpus: int | None = None, dashboard: bool = False) -> Iterator[Session]:
    """The Ray session to work in. One that is already open is used and left open; one we opened is closed."""
    import ray

    api: Any = ray  # parts of its interface carry no types
    opened = not ray.is_initialized()
    embedded = _connect(address, cpus, dashboard) if opened else ray.get_runtime_context().gcs_address.startswith("127.0.0.1")
    try:
        resources = dict(api.cluster_resources())
        resources["GPU"] = max(resources.get("GPU", 0.0), sum(node.get("GPU", 0.0) for node in grown_nodes()))
        yield Session(embedded, ray.get_runtime_context().gcs_address, resources)
    finally:
        if opened:
            ray.shutdown()


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


def require(need: Need, what: str) -> None:
    """Refuse at once what the cluster can never give; Ray itself would wait for ever."""
    nodes = usable_nodes()
    if fitting(need, nodes) >= need.workers or os.environ.get(AUTOSCALING) == "1":
        return
    has = "; ".join(f"{n.get('CPU', 0):g} CPUs" + (f", {n['GPU']:g} GPUs" if n.get("GPU") else "") for n in nodes)
    each = f"{need.cpus:g} CPUs" + (f" and {need.gpus:g} GPUs" if need.gpus else "")
    raise UserError(
        f"{what} needs {need.workers} workers with {each} each; the cluster has room for {fitting(need, nodes)} ({len(nodes)} "
        f"node{'s' if len(nodes) != 1 else ''}: {has}). Lower execution.ct_workers, cpus_per_worker or gpus_per_worker (fractions "
        f"are allowed), or start more nodes. On a cluster that grows by itself, set {AUTOSCALING}=1 to wait for it."
    )
