"""Whether the rest of its nodes would prove a sample: how fast its tree has risen so far, followed to the end of its budget.

The worst open bound of a tree rises by about as much every time its nodes double, slowly at first and, once few leaves are left, slowly
again (docs/benchmarks.md). So it is the last doublings that are followed, and generously: giving up what could have been proven costs
a proof, going on with what could not costs only the rest of its budget.
"""

import torch
from torch import Tensor

DOUBLINGS = 2  # that are looked back on


class Outlook:
    """How a batch of samples stood before the nodes of each passed 2, 4, 8, 16, ...: the last state of every such span."""

    def __init__(self, samples: int, like: Tensor) -> None:
        self.doublings_BK = like.new_full((samples, 64), -1.0, dtype=torch.float64)  # log2 of the nodes; -1: none seen in time
        self.worst_BK = torch.zeros_like(self.doublings_BK)

    def hopeless(self, nodes_B: Tensor, worst_B: Tensor, budget: int, hope: float) -> Tensor:
        """Which samples would not reach 0 even if every doubling to come gained `hope` times as much as the last ones did, [B]."""
        now_B, worst_B = nodes_B.double().clamp_min(1).log2(), worst_B.double()
        before_B1 = (now_B.long() - DOUBLINGS).clamp_min(0).unsqueeze(1)
        then_B, had_B = (table.gather(1, before_B1).squeeze(1) for table in (self.doublings_BK, self.worst_BK))
        since_BK = torch.arange(self.worst_BK.shape[1], device=worst_B.device) >= now_B.floor().unsqueeze(1)
        self.doublings_BK = torch.where(since_BK, now_B.unsqueeze(1), self.doublings_BK)
        self.worst_BK = torch.where(since_BK, worst_B.unsqueeze(1), self.worst_BK)
        gained_B = (worst_B - had_B).clamp_min(0) / (now_B - then_B).clamp_min(1)
        ahead_B = (torch.full_like(now_B, max(budget, 1)).log2() - now_B).clamp_min(0)
        return (then_B >= 0) & (now_B >= DOUBLINGS) & (worst_B + hope * gained_B * ahead_B < 0)
