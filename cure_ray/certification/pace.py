"""How long a certification will still take: from what finished shards cost, kind by kind, and from nothing else.

A sample's cost varies a thousandfold between the stage that decides it at once and one that searches, and between threats; the first
decisions are the cheap ones, and starting workers takes time too. So only whole shards count, and before there is one of each kind
there is no estimate.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable

from cure_ray.certification.job import Shard

Kind = tuple[str, str]


class Pace:
    """What the shards of each kind (checkpoint and threats) took, and what of each is left."""

    def __init__(self, shards: Iterable[Shard], workers: int = 1) -> None:
        self.workers = workers
        self.heard = time.monotonic()
        self.left: Counter[Kind] = Counter()
        self.spent: dict[Kind, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for shard in shards:
            self.left[self.kind(shard)] += len(shard.indices)

    @staticmethod
    def kind(shard: Shard) -> Kind:
        """Shards of which one tells what another costs."""
        return shard.job.run_id, "+".join(map(str, shard.threats))

    def learn(self, shard: Shard, seconds: float) -> None:
        self.heard, kind = time.monotonic(), self.kind(shard)
        self.left[kind] -= len(shard.indices)
        known = self.spent[kind]
        known[0] += seconds
        known[1] += len(shard.indices)

    def _each(self, kind: Kind) -> float | None:
        """Seconds a sample of this kind takes: as others of it took, or else as the same threats took on other checkpoints."""
        known = [self.spent[kind]] if kind in self.spent else [spent for (_, threats), spent in self.spent.items() if threats == kind[1]]
        samples = sum(count for _, count in known)
        return sum(seconds for seconds, _ in known) / samples if samples else None

    def price(self, shard: Shard) -> float | None:
        """Seconds a shard will take; None where none of its kind is known."""
        each = self._each(self.kind(shard))
        return None if each is None else each * len(shard.indices)

    def seconds_left(self) -> float | None:
        """None while there is a kind of which nothing is known."""
        total = 0.0
        for kind, count in self.left.items():
            each = self._each(kind) if count else 0.0
            if each is None:
                return None
            total += count * each
        return total / self.workers

    def seconds_left_now(self) -> float | None:
        """Less the time since the last shard was finished; but if that is longer already, the one under way is no usual one."""
        left, silence = self.seconds_left(), time.monotonic() - self.heard
        return None if left is None else max(left - silence, silence)

    def one_of_each_first(self, shards: Iterable[Shard]) -> list[Shard]:
        """The order that learns soonest what everything costs."""
        first, rest, seen = list[Shard](), list[Shard](), set[Kind]()
        for shard in shards:
            kind = self.kind(shard)
            (rest if kind in seen else first).append(shard)
            seen.add(kind)
        return [*first, *rest]


class Watcher:
    """Who is told of a certification as it goes on. This one says nothing."""

    def __call__(self, stage: str, decided: int) -> None:
        """So many samples were decided by this stage."""

    def begin(self, pace: Pace) -> None:
        """Work begins; the pace is kept up to date from outside."""
