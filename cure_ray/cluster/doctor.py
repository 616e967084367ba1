"""Is this cluster (or machine) fit for a run? Every finding comes with its remedy."""

import os
import platform
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cure_ray.cluster.session import Session, session
from cure_ray.config import Experiment
from cure_ray.networks.build import new_network
from cure_ray.runs.checkpoints import checkpoint_bytes, versions

Level = Literal["ok", "warning", "problem"]
PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Check:
    """One finding; `remedy` is empty if there is nothing to do."""

    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        sign = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}[self.level]
        return sign + self.what + (f"\n          -> {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class NodeFacts:
    host: str
    versions: Mapping[str, str]
    gpus: tuple[str, ...]
    tf32: bool
    marker_seen: bool | None
    writable: str  # empty: yes; else the reason why not
    free_bytes: int


def node_facts(storage: str | None, marker: str) -> NodeFacts:
    """Runs on every node."""
    import torch

    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    writable, seen, free = "", None, 0
    if storage is not None:
        root = Path(storage)
        seen = (root / marker).exists()
        try:
            probe = root / f".doctor-{uuid.uuid4().hex[:8]}"
            probe.write_text("probe")
            probe.unlink()
            free = shutil.disk_usage(root).free
        except OSError as error:
            writable = error.strerror or str(error)
    found = {**versions(), "ray": ray.__version__, "python": platform.python_version()}
    return NodeFacts(socket.gethostname(), found, gpus, bool(torch.backends.cuda.matmul.allow_tf32), seen, writable, free)


def diagnose(storage: Path | None = None, plan: Experiment | None = None, runs: int = 1, address: str | None = None) -> list[Check]:
    """All checks; `plan` and `runs` say what the disk has to hold."""
    with session(address) as where:
        marker = f".doctor-marker-{uuid.uuid4().hex[:8]}"
        place = None if storage is None else storage.absolute()
        checks = [*_security(where), *_resources(where)]
        try:
            if place is not None:
                try:
                    place.mkdir(parents=True, exist_ok=True)
                    (place / marker).write_text("seen")
                except OSError as error:
                    what = f"storage {place} cannot be written from here: {error.strerror}"
                    return [*checks, Check("problem", what, "choose another path, or fix its owner")]
            facts = _ask_nodes(None if place is None else str(place), marker)
        finally:
            if place is not None:
                with suppress(OSError):
                    (place / marker).unlink()
        return [*checks, *_agreement(facts), *_gpus(facts), *(_storage(facts, place, plan, runs) if place is not None else ())]


def _ask_nodes(storage: str | None, marker: str) -> list[NodeFacts]:
    api: Any = ray
    nodes = [n for n in api.nodes() if n["Alive"]]
    ask = ray.remote(node_facts)
    refs = [
        ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False)).remote(storage, marker)
        for n in nodes
    ]
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=PROBE_SECONDS)
    answers: list[NodeFacts] = ray.get(ready)
    return answers


def _security(where: Session) -> Iterator[Check]:
    if where.embedded:
        yield Check(
            "ok",
            "embedded session: listens on loopback with a token of its own, its files are closed to others; other users of this machine "
            "can knock, not come in (SECURITY.md says what remains)",
        )
        return
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        yield Check(
            "problem",
            "token authentication is off: whoever reaches the cluster's ports runs code on it",
            "start every node with RAY_AUTH_MODE=token (cluster.yaml does)",
        )
    else:
        yield Check("ok", "token authentication is on")
    url = _dashboard()
    host = url.rsplit(":", 1)[0] if url else ""
    if host and host not in ("127.0.0.1", "localhost"):
        yield Check(
            "problem",
            f"the dashboard is bound to {url}: an open dashboard is remote code execution",
            "start the head with --dashboard-host=127.0.0.1 and reach it through SSH: ray dashboard cluster.yaml",
        )
    elif host:
        yield Check("ok", f"the dashboard is on loopback ({url})")


def _dashboard() -> str:
    try:
        from ray._private.worker import global_worker

        node: Any = global_worker.node
        return str(node.address_info.get("webui_url") or "")
    except Exception:  # private, and only worth a line of the report
        return ""


def _resources(where: Session) -> Iterator[Check]:
    yield Check("ok", f"cluster at {where.address}: {where.cpus:g} CPUs, {where.gpus:g} GPUs")
    memory = where.resources.get("memory", 0.0)
    if memory and memory < 2e9:
        yield Check("warning", f"only {memory / 1e9:.1f} GB of memory for workers", "each rank and certification worker takes about 1 GB")


def _agreement(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    kinds: dict[str, dict[str, list[str]]] = {}
    for fact in facts:
        for name, version in fact.versions.items():
            kinds.setdefault(name, {}).setdefault(version, []).append(fact.host)
    for name, found in kinds.items():
        if len(found) == 1:
            yield Check("ok", f"{name} {next(iter(found))} on {len(facts)} node{'s' if len(facts) != 1 else ''}")
        else:
            shown = "; ".join(f"{v} on {', '.join(hosts)}" for v, hosts in found.items())
            yield Check("problem", f"{name} differs between nodes: {shown}", "install the same versions everywhere")


def _gpus(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    names = [name for fact in facts for name in fact.gpus]
    if not names:
        yield Check("ok", "no GPUs: everything runs on CPUs, with the same bits as anywhere (one thread)")
    elif len(set(names)) > 1:
        yield Check("warning", f"different GPUs: {', '.join(sorted(set(names)))}", "rounding differs between models; pin one for a table")
    else:
        yield Check("ok", f"{len(names)} GPUs, all {names[0]}")
    if any(fact.tf32 for fact in facts):
        yield Check("warning", "TF32 is on by default somewhere", "nothing: cure_ray turns it off in every run; your own code should, too")
    else:
        yield Check("ok", "TF32 is off")


def _storage(facts: Sequence[NodeFacts], place: Path, plan: Experiment | None, runs: int) -> Iterator[Check]:
    blind = [f.host for f in facts if not f.marker_seen]
    barred = [f"{f.host} ({f.writable})" for f in facts if f.writable]
    if blind:
        yield Check(
            "problem",
            f"storage {place} is not the same directory on {', '.join(blind)}",
            "mount shared storage (NFS, EFS, FSx) under the same path on every node",
        )
    if barred:
        yield Check("problem", f"storage {place} is not writable on {', '.join(barred)}", "fix its owner or mode")
    if not blind and not barred:
        yield Check("ok", f"storage {place} is writable and visible from {len(facts)} nodes")
    free = min((f.free_bytes for f in facts if not f.writable), default=0)
    if plan is not None:
        branches = 2 if plan.training.uses_projection and plan.training.nt_optimizer == "separate" else 1
        need = runs * checkpoint_bytes(new_network(plan), branches) * (plan.execution.keep_checkpoints + 1)
        level: Level = "ok" if free > 1.2 * need else "problem"
        remedy = "" if level == "ok" else "free some space, lower execution.keep_checkpoints, or use another storage"
        yield Check(level, f"{free / 1e9:.1f} GB free, the plan needs about {need / 1e9:.1f} GB for the checkpoints of {runs} runs", remedy)
    elif free < 5e9:
        yield Check("warning", f"only {free / 1e9:.1f} GB free in {place}", "a checkpoint of CNN7 takes up to 270 MB")
