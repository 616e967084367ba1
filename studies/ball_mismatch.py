"""How often the attacks of one norm leave the ball of the other (12.11).

    python studies/ball_mismatch.py runs/natural --images 9984

One l_inf attack (0.1) and one l_2 attack (0.5) per image. Reported over all attack outputs, as the paper's denominators show, and
over the successful ones.
"""

import torch
from common import context, parser, percent, start, table

from cure_ray.attacks import AttackSettings, attack, margin
from cure_ray.threats.balls import Ball
from cure_ray.threats.geometry import distance


def main() -> None:
    options = parser(__doc__, images=9984)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--linf", type=float, default=0.1)
    options.add_argument("--l2", type=float, default=0.5)
    arguments = options.parse_args()
    checkpoints, x, y = start(arguments)
    balls = {"linf": Ball("linf", arguments.linf), "l2": Ball("l2", arguments.l2)}
    rows = []
    for own, other in (("linf", "l2"), ("l2", "linf")):
        outside, success, both, network = 0, 0, 0, checkpoints[0].network
        for images, labels, index in zip(x.split(256), y.split(256), torch.arange(len(x)).split(256), strict=True):
            found = attack(network, images, labels, balls[own], index.tolist(), AttackSettings(arguments.steps, 1))
            left = distance((found - images).flatten(1), balls[other].norm) > balls[other].eps
            with torch.no_grad():
                broken = margin(network(found), labels) <= 0
            outside, success, both = outside + int(left.sum()), success + int(broken.sum()), both + int((left & broken).sum())
        share = percent(both, success) if success else "-"
        rows.append([str(balls[own]), str(balls[other]), f"{outside} of {len(x)}", percent(outside, len(x)), str(success), share])
    print(f"{context(checkpoints, len(x))}; method {checkpoints[0].experiment.training.method}; {arguments.steps} steps, 1 restart\n")
    print(table(["attack", "ball", "outside", "%", "successful", "% outside among successful"], rows))


if __name__ == "__main__":
    main()
