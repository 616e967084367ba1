"""Clean and IBP-certified accuracy on a split: cheap, sound, and loose; logged every epoch, never used to rank methods."""

import torch
from torch import nn

from cure_ray.config import Experiment
from cure_ray.data.images import Images
from cure_ray.networks.sequence import read_blocks
from cure_ray.threats.norms import NORMS
from cure_ray.training.folding import fold_running
from cure_ray.training.propagation import certified, full_region, propagate, upper_bounds


@torch.no_grad()
def evaluate(network: nn.Sequential, images: Images, experiment: Experiment, batch_size: int = 500) -> dict[str, float]:
    """Accuracies in [0, 1] at the experiment's radii: clean, per norm by IBP, and their per-sample union."""
    folded = fold_running(read_blocks(network))
    norms = [norm for norm in NORMS if experiment.threats.eps(norm) > 0]
    counts = torch.zeros(len(norms) + 2, dtype=torch.long, device=images.raw.device)
    for start in range(0, len(images), batch_size):
        x, y = images.batch(torch.arange(start, min(start + batch_size, len(images)), device=images.raw.device))
        proven = []
        for norm in norms:
            boxes = propagate(folded, [full_region(x, norm, experiment.threats.eps(norm), experiment.dataset.box)])
            proven.append(certified(upper_bounds(folded, boxes, y), y))
        correct = folded.logits(x).argmax(1) == y
        union = torch.stack(proven).all(0) if proven else correct
        counts += torch.stack([correct.sum(), *(p.sum() for p in proven), union.sum()])
    names = ["clean", *(f"ibp_{norm}" for norm in norms), "ibp_union"]
    return {name: count / max(len(images), 1) for name, count in zip(names, counts.tolist(), strict=True)}
