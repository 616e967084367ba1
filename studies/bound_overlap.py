"""Bound overlap with a geometrically trained network (12.4, A30).

    python studies/bound_overlap.py runs/linf runs/scratch --geometric runs/cgt --images 512

Both networks see the same interval images (one random sub-range of the CGT training width per batch). Their IBP logit bounds are
mapped per sample to [0, 1]; the overlap of a class is |intersection| / |hull|, averaged over classes; then the maximum over the
batch (and, beside it, the mean), averaged over batches. Agreement in order is what counts, not the absolute values.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from common import context, parser, start, table, title
from torch import Tensor

from cure_ray.networks.sequence import read_blocks
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.threats.transformations import training_transformation
from cure_ray.training.cgt import draw_range, interval_batch
from cure_ray.training.folding import FoldedNetwork, fold_running
from cure_ray.training.propagation import Region, propagate


@torch.no_grad()
def logit_bounds(network: FoldedNetwork, region: Region) -> tuple[Tensor, Tensor]:
    """Separate IBP bounds of every logit, mapped per sample to [0, 1]."""
    boxes, last = propagate(network, [region]), network.layers[-1]
    assert boxes.radius is not None
    centre, radius = F.linear(boxes.centre, last.weight, last.bias), F.linear(boxes.radius, last.weight.abs())
    low, high = centre - radius, centre + radius
    base, extent = low.amin(1, keepdim=True), (high.amax(1) - low.amin(1)).unsqueeze(1)
    return (low - base) / extent, (high - base) / extent


def overlap(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """[B]: mean over classes of |intersection| / |hull|, 0 where disjoint."""
    shared = (torch.minimum(a[1], b[1]) - torch.maximum(a[0], b[0])).clamp_min(0)
    hull = torch.maximum(a[1], b[1]) - torch.minimum(a[0], b[0])
    return (shared / hull.clamp_min(1e-12)).mean(1)


def main() -> None:
    options = parser(__doc__, images=512)
    options.add_argument("--geometric", type=Path, required=True, help="a run of method cgt")
    options.add_argument("--batch", type=int, default=64)
    arguments = options.parse_args()
    checkpoints, x, _ = start(arguments)
    reference = load_checkpoint(arguments.geometric)
    text = reference.experiment.training.transformation
    if text is None:
        raise SystemExit(f"{arguments.geometric} was not trained with method cgt")
    target = training_transformation(text, reference.experiment.dataset.name, reference.experiment.training.transformation_widths)
    geometric = fold_running(read_blocks(reference.network))
    rows = []
    for checkpoint in checkpoints:
        network = fold_running(read_blocks(checkpoint.network))
        rng = torch.Generator().manual_seed(0)  # the same sub-ranges for every network
        largest, mean = list[float](), list[float]()
        for images in x.split(arguments.batch):
            ranges = draw_range(target, 1.0, torch.rand(len(target.steps), generator=rng).tolist())
            region = interval_batch(target, ranges, images)
            found = overlap(logit_bounds(network, region), logit_bounds(geometric, region))
            largest.append(float(found.max()))
            mean.append(float(found.mean()))
        rows.append([title(checkpoint), f"{sum(largest) / len(largest):.3f}", f"{sum(mean) / len(mean):.3f}"])
    print(f"{context(checkpoints, len(x))}; overlap with {title(reference)}, batches of {arguments.batch}\n")
    print(table(["method", "max over batch", "mean over batch"], rows))


if __name__ == "__main__":
    main()
