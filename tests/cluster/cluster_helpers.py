"""Small experiments, comparisons and murder shared by the tests on Ray."""

import json
import os
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cure_ray.cluster import watchdog
from cure_ray.cluster.embedded import reread_environment
from cure_ray.cluster.session import ENVIRONMENT
from cure_ray.config import Experiment, resolve
from cure_ray.runs.lease import holder, take_for


def tiny(**training: Any) -> Experiment:
    """Seconds on one core: 4 steps an epoch, both branches from the first epoch on."""
    defaults = {"epochs": 3, "standard_epochs": 0, "anneal_epochs": 0, "batch_size": 64, "lr_milestones": []}
    return resolve(
        {
            "preset": "smoke",
            "name": "tiny",
            "dataset": {"name": "digits", "train_samples": 300, "validation": 40},
            "training": {**defaults, **training},
            "execution": {"device": "cpu"},
        }
    )


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Weights and optimiser states, byte by byte."""
    return {p.name: p.read_bytes() for p in sorted(checkpoint.glob("*.safetensors"))}


def own_processes(title: str) -> list[int]:
    """Descendants of this process with this in their command line: never those of somebody else's session."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                parents[int(process.name)] = int(fields[1])
                titles[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue

    def is_ours(pid: int) -> bool:
        while pid > 1:
            if pid == os.getpid():
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid, line in titles.items() if title in line and pid != os.getpid() and is_ours(pid)]


@dataclass(frozen=True)
class Doors:
    """Where the processes listen: (interface, port), and the paths of unix sockets (empty: a name only the kernel knows)."""

    tcp: frozenset[tuple[str, int]]
    unix: frozenset[str]


def listening(pids: list[int]) -> Doors:
    """By the sockets these processes hold."""
    inodes = set[str]()
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:  # it ended while we looked
            continue
    tcp, unix = set[tuple[str, int]](), set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                interface, _, port = fields[1].partition(":")
                tcp.add((interface, int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & 0x10000 and fields[6] in inodes:  # __SO_ACCEPTCON: listens
            unix.add(fields[7] if len(fields) > 7 else "")
    return Doors(frozenset(tcp), frozenset(unix))


@contextmanager
def several_nodes(count: int, cpus: int) -> Iterator[Any]:
    """A cluster on this machine, with a head that runs no work and is never killed, and nodes that may be; this process is its driver."""
    os.environ.update({**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    import ray
    from ray.cluster_utils import Cluster

    reread_environment()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(count):
        cluster.add_node(num_cpus=cpus)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def held_elsewhere(run: Path) -> Path:
    """A lease of a process on another machine, which has not said that it ended; its pulse."""
    with take_for(run, 1):
        pass
    found = holder(run)
    assert found is not None
    (found.desk / "released").unlink()
    there = {**found.about, "host": "node7", "place": "node7 another-boot pid:[1]"}
    (found.desk / "holder.json").write_text(json.dumps({**there, "caller": there}))
    return found.desk / "pulse"


def session_processes(directory: Path, driver: int) -> list[int]:
    return [*watchdog.members(str(directory), frozenset({driver})), driver]


def until(happens: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What happened, once it does."""
    deadline = time.monotonic() + seconds
    while not (result := happens()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return result


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def intrude(doors: Doors, directory: Path, touched: Path) -> dict[str, Any]:
    """What another user of this machine gets, who has no token."""
    order = {"ports": sorted(p for _, p in doors.tcp), "unix": sorted(doors.unix), "directories": [str(directory)], "touched": str(touched)}
    script = Path(__file__).with_name("intruder.py")
    done = subprocess.run([sys.executable, str(script), json.dumps(order)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def admitted(answers: dict[str, Any]) -> dict[str, Any]:
    """The doors that did more than refuse: HTTP may say 401, gRPC that it does not speak with us, and nothing else may answer."""
    found: dict[str, Any] = {}
    for port, statuses in answers["http"].items():
        said = {status for status in statuses if isinstance(status, int)} - {401}
        codes = {*answers["grpc"][port], *answers["tls"][port]} - {"UNAVAILABLE"}
        if said or codes or answers["redis"][port][:1] in ("+", "-", "$", "*", ":"):
            found[port] = {what: answers[what][port] for what in ("http", "grpc", "tls", "redis")}
    if answers["user"] != os.getuid():
        found |= {k: v for k, v in {**answers["unix"], **answers["directories"]}.items() if v != "PermissionError"}
    return found


def replaceable(path: Path) -> str:
    """The first part of a path that another user could put something else in the place of; empty: none, or out of their reach."""
    here = Path(path.anchor)
    for part in path.parts[1:]:
        mode = here.stat().st_mode
        if not mode & stat.S_IXOTH:
            return ""  # nobody else gets further
        below = here / part
        if mode & stat.S_IWOTH and not (mode & stat.S_ISVTX and below.lstat().st_uid in (0, os.getuid())):
            return str(below)
        here = below
    return ""
