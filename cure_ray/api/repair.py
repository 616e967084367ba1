"""Repair of a results store: throw away what fsck named, and compute exactly what is missing then, to the same bytes."""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cure_ray.api.execution import Task, execute
from cure_ray.api.request import Execution
from cure_ray.api.subject import Subject, given_samples, run_subject
from cure_ray.certification.engines import engine_version, make_engine
from cure_ray.certification.job import Job, plan
from cure_ray.errors import UserError
from cure_ray.results.fsck import Finding
from cure_ray.results.store import Store
from cure_ray.threats import Ball, Threat, Transformation
from cure_ray.threats.balls import EACH
from cure_ray.threats.norms import NORMS
from cure_ray.threats.text import read_threats


def repair_store(store: Store, findings: Sequence[Finding], execution: Execution, data_dir: str | Path | None = None) -> None:
    """Resume is the repair: a shard that is not there is computed by the run it belongs to."""
    begun = _runs_with_rows(store)
    for goal in store.plans():
        if goal["run_id"] in begun and not _same_version(goal) and any(_concerns(finding, goal) for finding in findings):
            raise UserError(  # before anything is thrown away
                f"{store.root} was certified by the {goal['engine']} engine {goal['engine_version']}, this is "
                f"{engine_version(goal['engine'])}: verdicts of the two must not be mixed. Repair it with that version, or certify again "
                "into another directory"
            )
    for finding in findings:
        if finding.file is not None:
            store.discard(finding.file)
    _drop_broken_witnesses(store)
    for goal in store.plans():
        if _absent(store, goal) and (goal["run_id"] in begun or _same_version(goal)):  # another version's plan without rows is stale
            _recompute(store, goal, execution, data_dir)


def _same_version(goal: Mapping[str, Any]) -> bool:
    return engine_version(goal["engine"]) == goal["engine_version"]


def _concerns(finding: Finding, goal: Mapping[str, Any]) -> bool:
    """Whether its repair would compute rows of this run; one of a witness may."""
    return goal["checkpoint_digest"][:12] in f"{finding.file} {finding.what}" or "witness" in finding.what


def _runs_with_rows(store: Store) -> set[str]:
    found = set[str]()
    for name in store.shards():
        with contextlib.suppress(UserError):  # a torn one
            found |= set(store.read_shard(name, ["run_id"]).column("run_id").to_pylist())
    return found


def _drop_broken_witnesses(store: Store) -> None:
    """A row whose counterexample cannot be read is worth nothing: its shard goes, and the file, and both come again."""
    for name in store.shards():
        for digest in filter(None, store.read_shard(name).column("witness").to_pylist()):
            try:
                store.read_witness(digest)
            except UserError:
                store.discard(f"witnesses/{digest}.npy")
                store.discard(f"verdicts/{name}")


def _absent(store: Store, goal: Mapping[str, Any]) -> bool:
    rows = store.read(["checkpoint_digest", "threat", "sample_index"]).to_pydict()
    seen = set(zip(rows["checkpoint_digest"], rows["threat"], rows["sample_index"], strict=True))
    return any((goal["checkpoint_digest"], threat, i) not in seen for threat, indices in goal["threats"].items() for i in indices)


def _job(goal: Mapping[str, Any]) -> Job:
    """The job a plan was written for; its hash says whether this version of the program still means the same by it."""
    try:
        job = Job.of(goal)
    except (KeyError, TypeError):
        raise _foreign(goal) from None
    if job.run_id != goal["run_id"]:
        raise _foreign(goal)
    return job


def _foreign(goal: Mapping[str, Any]) -> UserError:
    return UserError(f"run {goal['run_id']} was made by another version of cure_ray: certify it again instead of repairing it")


def _threats(store: Store, goal: Mapping[str, Any], subject: Subject) -> list[Threat]:
    """With exact radii, from rows that are still there or from the experiment; the text of a ball is rounded."""
    several = [text for text in goal["threats"] if EACH in text]
    if several:
        raise UserError(f"{several[0]}: radii of single images are known to who gave them: run the same certification again instead")
    rows = store.read(["threat", "norm", "eps"]).to_pydict()
    known: dict[str, Threat] = {t: Ball(n, e) for t, n, e in zip(rows["threat"], rows["norm"], rows["eps"], strict=True) if n in NORMS}
    known = {**{str(ball): ball for ball in subject.threats}, **known}
    found = list[Threat]()
    for text in goal["threats"]:
        found += [known[text]] if text in known else read_threats(text, image=subject.input_shape)
    grids = goal.get("grids", {})
    return [t.cut(grids[str(t)]) if isinstance(t, Transformation) and str(t) in grids else t for t in found]


def _recompute(store: Store, goal: Mapping[str, Any], execution: Execution, data_dir: str | Path | None) -> None:
    about, job = store.about(goal["checkpoint_digest"]), _job(goal)
    where = about.get("checkpoint")
    if where is None or not Path(where).is_dir():
        raise UserError(
            f"the checkpoint {goal['checkpoint_digest'][:12]} is not where it was certified ({where or 'not recorded'}): run the same "
            "`cure-ray certify` command again, which computes what is missing"
        )
    subject = run_subject(where, given_samples(about.get("data")), job.split, data_dir)
    if subject.digest != job.checkpoint_digest:
        raise UserError(f"{where} holds another checkpoint now ({subject.digest[:12]}, not {job.checkpoint_digest[:12]})")
    samples = subject.samples
    if samples.digest != job.data_digest:
        raise UserError(f"the {job.split} images of {job.dataset} here are not those that were certified (digest {samples.digest})")
    engine = make_engine(job.engine, subject.network, torch.device("cpu"), subject.input_shape)
    if job != Job.make(subject.digest, samples, engine, job.settings, job.seed, job.union_only):
        raise _foreign(goal)
    tasks, alike = list[Task](), defaultdict[tuple[int, ...], list[Threat]](list)
    for threat in _threats(store, goal, subject):  # one that was wanted for fewer samples than another gets no more of them now
        alike[tuple(sorted(goal["threats"][str(threat)]))].append(threat)
    for indices, group in alike.items():
        done = store.begin(job, group, indices, about)
        tasks.append(Task(subject, job, tuple(group), indices, tuple(plan(job, group, indices, done, job.settings.batch))))
    execute(store, tasks, execution)
