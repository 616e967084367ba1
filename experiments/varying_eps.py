"""Union accuracy as one norm's radius varies and the others stay (12.10), with the monotone cache of certificates.

    python experiments/varying_eps.py runs/linf runs/l2 runs/scratch --images 50

A certificate at a radius holds at every smaller one, a counterexample at every larger one: each sample is bisected over the grid
instead of certified at every point of it. An undecided radius is taken to be undecided at larger ones too; no certificate is invented.
"""

from collections.abc import Callable, Sequence

from common import context, parser, percent, start, table, title

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import certify_batch
from cure_ray.certification.job import CascadeSettings
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the preset's radius


def certified_counts(decide: Callable[[float, list[int]], list[bool]], grid: Sequence[float], samples: int) -> tuple[list[set[int]], int]:
    """Per radius the samples certified, and how many certifications it took: all samples bisect the grid together."""
    low, high = [-1] * samples, [len(grid)] * samples  # certified at low, not certified at high
    calls = 0
    while any(h - a > 1 for a, h in zip(low, high, strict=True)):
        wanted: dict[int, list[int]] = {}
        for sample, (a, h) in enumerate(zip(low, high, strict=True)):
            if h - a > 1:
                wanted.setdefault((a + h) // 2, []).append(sample)
        for place, members in wanted.items():
            calls += len(members)
            for sample, ok in zip(members, decide(grid[place], members), strict=True):
                if ok:
                    low[sample] = place
                else:
                    high[sample] = place
    return [{s for s in range(samples) if low[s] >= place} for place in range(len(grid))], calls


def main() -> None:
    options = parser(__doc__, images=50)
    options.add_argument("--stages", default="ibp,crown-ibp,attack,alpha-crown")
    arguments = options.parse_args()
    checkpoints, x, y = start(arguments)
    settings = CascadeSettings(tuple(arguments.stages.split(",")))
    rows = []
    for checkpoint in checkpoints:
        engine = NativeEngine(checkpoint.network)
        by_norm: dict[str, list[set[int]]] = {}
        calls = 0
        for norm in NORMS:
            grid = [f * checkpoint.experiment.threats.eps(norm) for f in FACTORS]

            def decide(eps: float, members: list[int], norm: str = norm) -> list[bool]:
                found = certify_batch(engine, checkpoint.network, x[members], y[members], Ball(norm, eps), settings, members)  # noqa: B023
                return [o.status == "certified" for o in found]

            by_norm[norm], used = certified_counts(decide, grid, len(x))
            calls += used
        fixed = FACTORS.index(1.0)
        for norm in NORMS:
            others = set.intersection(*(by_norm[n][fixed] for n in NORMS if n != norm))
            unions = [percent(len(found & others), len(x)) for found in by_norm[norm]]
            rows.append([title(checkpoint), f"{norm} x", *unions])
            print(f"done: {rows[-1]}", flush=True)
        full = len(NORMS) * len(FACTORS) * len(x)
        print(f"{title(checkpoint)}: {calls} certifications instead of {full}", flush=True)
    print(f"\n{context(checkpoints, len(x))}; stages {arguments.stages}\n")
    print(table(["method", "varied radius", *(f"{f:g}" for f in FACTORS)], rows))


if __name__ == "__main__":
    main()
