"""The workers of a certification on nodes that come and go: only those that stand get work, those that die are replaced."""

from collections.abc import Callable
from typing import Any

import ray

MAX_FALSE_STARTS = 8  # in a row, of processes that end before they stand: what ends all of them will end the next one


def node_lost(error: BaseException) -> bool:
    """Whether a worker died because its node did (spot instances, autoscaling): no fault of what it worked on."""
    return bool(getattr(error, "preempted", False)) or isinstance(error, ray.exceptions.NodeDiedError) or "node has died" in str(error)


class Staff:
    """`hire` starts an actor with a method `ready`. One that waits for a node gets no work, which others would then wait for."""

    def __init__(self, hire: Callable[[], Any], size: int) -> None:
        self.hire = hire
        self.idle: list[Any] = []
        self.starting: dict[Any, Any] = {}
        self.false_starts = 0
        for _ in range(size):
            self.add()

    def add(self) -> None:
        worker = self.hire()
        self.starting[worker.ready.remote()] = worker

    def assemble(self, seconds: float) -> None:
        """Wait until all of them stand, but not longer than this."""
        ray.wait(list(self.starting), num_returns=len(self.starting), timeout=seconds)

    def stands(self, ref: Any) -> None:
        """One of `starting` has an answer: it is idle now, or another takes its place."""
        worker = self.starting.pop(ref)
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            self.false_starts += not node_lost(error)
            if self.false_starts >= MAX_FALSE_STARTS:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise RuntimeError(f"certification workers do not start: {lines[-1][:300]}. Finished shards are kept.") from None
            self.add()
        else:
            self.false_starts = 0
            self.idle.append(worker)

    def dismiss(self) -> None:
        for worker in [*self.idle, *self.starting.values()]:
            ray.kill(worker)
