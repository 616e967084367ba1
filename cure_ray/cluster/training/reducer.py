"""The reducer: an actor where the two branches of an epoch meet, are merged by gradient projection, and from where both go on.

It is created by the leading rank and dies with it, so an attempt never meets the reducer of an earlier one.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from cure_ray.training.projection import Merge, merge

PAUSE_SECONDS, SILENCE_SECONDS = 10.0, 30.0  # between questions to a reducer that lets us wait; and until it counts as gone
Arrays = Mapping[str, np.ndarray[Any, Any]]  # arrays cross Ray's object store without a copy, tensors do not


def to_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Copies: what comes out of the object store is read-only."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


@dataclass(frozen=True)
class Part:
    """What a branch brings after an epoch. `failed` instead of a state says that it diverged."""

    state: Arrays = field(default_factory=dict)
    optimizer: Arrays = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    start: Arrays = field(default_factory=dict)  # the weights both branches started from; the certified branch brings them
    failed: str = ""


@dataclass(frozen=True)
class Outcome:
    """What everybody gets: the merged weights, the certified and natural parts (without their weights), or why there are none."""

    state: Arrays
    cosines: Mapping[str, float]
    parts: Mapping[str, Part]
    seconds: float = 0.0
    failed: str = ""

    @property
    def merged(self) -> Merge:
        return Merge(to_tensors(self.state), dict(self.cosines))


class Reducer:
    """One per attempt. Keeps only the newest epoch."""

    def __init__(self, beta: float) -> None:
        self.beta = beta
        self.epoch = -1
        self.parts: dict[str, Part] = {}
        self.ready = asyncio.Event()
        self.outcome: Outcome | None = None

    def _turn_to(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.parts, self.ready, self.outcome = epoch, {}, asyncio.Event(), None

    async def pid(self) -> int:
        return os.getpid()

    async def exchange(self, epoch: int, branch: str, part: Part | None) -> Outcome:
        """Bring a part (or only wait, as the other certified ranks do) and get the merged epoch."""
        self._turn_to(epoch)
        if part is not None:
            self.parts[branch] = part
        if len(self.parts) == 2 and self.outcome is None:
            self.outcome = self._merge()
            self.ready.set()
        await self.ready.wait()
        assert self.outcome is not None
        return self.outcome

    def _merge(self) -> Outcome:
        import time

        began = time.perf_counter()
        ct, nt = self.parts["ct"], self.parts["nt"]
        failed = ct.failed or nt.failed
        if failed:
            return Outcome({}, {}, {}, failed=failed)
        merged = merge(to_tensors(ct.start), to_tensors(nt.state), to_tensors(ct.state), self.beta)
        rest = {name: Part(optimizer=part.optimizer, metrics=part.metrics) for name, part in self.parts.items()}
        return Outcome(to_arrays(merged.state), merged.cosines, rest, time.perf_counter() - began)


def exchange(reducer: Any, epoch: int, branch: str, part: Part | None) -> Outcome:
    """A rank's side of `Reducer.exchange`.

    Told to end by SIGTERM, an async actor waits for the calls it is in and takes no more: the first branch would wait for the second,
    the second for a reducer that does not listen. So it is asked for a sign of life while we wait; without one the attempt is over.
    """
    pending = reducer.exchange.remote(epoch, branch, part)
    while not ray.wait([pending], timeout=PAUSE_SECONDS)[0]:
        if not ray.wait([pending, reducer.pid.remote()], timeout=SILENCE_SECONDS)[0]:
            raise RuntimeError("the reducer takes no calls any more")
    outcome: Outcome = ray.get(pending)
    return outcome


def create_reducer(beta: float, callers: int) -> Any:
    """No CPUs: it works only while the ranks wait for it, and an actor with CPUs inside a full placement group would never start."""
    actor = ray.remote(Reducer)
    return actor.options(num_cpus=0, max_concurrency=callers + 2).remote(beta)
