"""Certified multi-norm robustness of any runs: CGT (12.5), l2 certified against PGD training (12.12) and the literature (12.13).

python experiments/multinorm_table.py runs/cgt runs/scratch --images 100
"""

from common import context, parser, percent, start, table, title

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification.balls import certify_batch
from cure_ray.certification.job import CascadeSettings
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import NORMS


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--stages", default="ibp,crown-ibp,attack,crown,alpha-crown")
    options.add_argument("--norms", default=",".join(NORMS))
    arguments = options.parse_args()
    checkpoints, x, y = start(arguments)
    settings = CascadeSettings(tuple(arguments.stages.split(",")))
    rows = []
    for checkpoint in checkpoints:
        engine, radii = NativeEngine(checkpoint.network), checkpoint.experiment.threats
        threats = [Ball(n, radii.eps(n)) for n in NORMS if n in arguments.norms.split(",")]
        found = [certify_batch(engine, checkpoint.network, x, y, t, settings) for t in threats]
        proven = [[o.status == "certified" for o in outcomes] for outcomes in found]
        attacked = [[o.status != "falsified" and o.predicted == o.label for o in outcomes] for outcomes in found]
        counts = [sum(p) for p in proven] + [sum(map(all, zip(*proven, strict=True))), sum(map(all, zip(*attacked, strict=True)))]
        clean = sum(o.predicted == o.label for o in found[0])
        init = checkpoint.experiment.network.init
        rows.append([f"{title(checkpoint)} ({init} init)", *(percent(c, len(x)) for c in (clean, *counts))])
        print(f"done: {rows[-1]}", flush=True)
    print(f"\n{context(checkpoints, len(x))}; stages {arguments.stages}\n")
    print(table(["method", "clean", *map(str, threats), "union", "not falsified"], rows))


if __name__ == "__main__":
    main()
