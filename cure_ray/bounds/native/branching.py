"""Branch and bound on unstable ReLUs with split multipliers (beta-CROWN), many samples in one batch.

A sub-problem fixes the sign of some unstable neurons. Each constraint z >= 0 (or <= 0) enters the bound with a multiplier
beta >= 0; hidden bounds stay those of the root. Whatever slopes and multipliers the search proposes, the bound is sound, and a
sub-problem is closed only when its bound is positive in the deciding precision.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cure_ray.bounds.native.climbing import Climber
from cure_ray.bounds.native.nodes import Nodes, Pool
from cure_ray.bounds.native.outlook import Outlook

Start = tuple[Tensor, Tensor, Tensor]  # slopes [B, S, U], what is added to coefficients [B, S, U], multipliers of balls [B, S, L]
REPORTED = 64  # open leaves of a sample whose bounds are worth a float64 evaluation when a search ends


@dataclass(frozen=True)
class Settings:
    iterations: int = 4
    width: tuple[int, int] = (
        16,
        64,
    )  # nodes of a sample split at a time, whoever shares the batch: a quarter of the open ones within these
    candidates: int = 1
    rate: float = 0.1
    decay: float = 0.98
    patience: int = 60  # iterations on a sub-problem with nothing left to split before its sample is given up
    hope: float = 2.0  # a sample is given up when rising so many times as fast would not prove it (outlook.py); 0 never gives up
    trial: tuple[int, float] = (128, 3.0)  # nodes and mean depth of the tree before that is asked


class Search:
    """One run over a batch of samples.

    A margin is proven when every leaf of its tree was closed, which is counted (`leaves_BS`), not inferred from an empty list:
    whatever the search drops or forgets, it cannot turn into a proof.
    """

    def __init__(
        self,
        quick: Climber,
        exact: Climber,
        margin_BS: Tensor,
        start: Start,
        settings: Settings,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.quick, self.exact, self.settings, self.clock = quick, exact, settings, clock
        self.base_BS = margin_BS
        todo_BS = ~(margin_BS > 0)
        sample_D, spec_D = todo_BS.nonzero(as_tuple=True)
        alpha_DU, beta_DU, price_DL = (t[sample_D, spec_D].to(quick.domain.x_BN.dtype) for t in start)
        split_DU = torch.zeros_like(alpha_DU, dtype=torch.int8)
        bound_D = margin_BS[sample_D, spec_D].to(alpha_DU.dtype)
        none = torch.full((len(sample_D), settings.candidates + 1), -1, dtype=torch.long, device=margin_BS.device)
        plain_D = torch.full_like(sample_D, not quick.domain.coupled, dtype=torch.bool)
        roots = Nodes(bound_D, sample_D, spec_D, split_DU, alpha_DU, beta_DU, price_DL, none, plain_D)
        self.open = Pool(roots)
        self.open.add(roots)
        self.leaves_BS = todo_BS.long()  # leaves not closed yet
        self.closed_BS = torch.full_like(margin_BS, torch.inf)  # worst closed leaf
        self.dropped_BS = torch.full_like(margin_BS, torch.inf)  # worst leaf that was dropped open
        self.lost_B = torch.zeros(len(margin_BS), dtype=torch.bool, device=margin_BS.device)
        self.nodes = [0] * len(margin_BS)
        self.seconds = [0.0] * len(margin_BS)
        self.exhausted = [False] * len(margin_BS)
        self.outlook = Outlook(len(margin_BS), margin_BS)

    def run(self, seconds: float, nodes: int, batch: int, together: int) -> None:
        """Until everything is decided or every sample has used up its seconds or nodes. `batch` nodes are bounded at once and
        `together` samples are searched at once, which is a question of memory and changes no tree."""
        everyone = torch.arange(len(self.nodes), device=self.base_BS.device)
        if seconds <= 0 or nodes <= 0:
            self._drop(everyone, exhausted=True)
        if len(self.open):
            started = self.clock()
            roots = self.open.take(torch.arange(len(self.open), device=self.base_BS.device))
            for part in roots.parts(2 * batch):
                self.open.add(self._confirm(self._bounded(part, 3)))
            self._account(roots.sample_D, started)
        while len(self.open):
            started = self.clock()
            picked = self._pick(together, nodes)
            sample_D = picked.sample_D
            stuck_D = (picked.candidate_DK < 0).all(1)
            if bool(stuck_D.any()):
                self._finish(picked.select(stuck_D))
                lost_D = self.lost_B[picked.sample_D]
                self._note(picked.select(~stuck_D & lost_D))
                picked = picked.select(~stuck_D & ~lost_D)
            for part in picked.parts(batch):
                self.open.add(self._confirm(self._children(part)))
            self._account(sample_D, started)
            over = [b for b in range(len(self.nodes)) if self.seconds[b] > seconds or self.nodes[b] >= nodes]
            self._drop(everyone[over], exhausted=True)
            self._drop(self._hopeless(nodes), exhausted=True)

    def margins(self) -> Tensor:
        """The worst closed leaf where all closed; else the best bound known, never positive."""
        open_BS = torch.where(self.dropped_BS < torch.inf, self.dropped_BS, self.base_BS).clamp_max(0)
        searched_BS = torch.where(self.leaves_BS == 0, self.closed_BS, torch.maximum(open_BS, self.base_BS))
        return torch.where(self.base_BS > 0, self.base_BS, searched_BS)

    def _account(self, sample_D: Tensor, started: float) -> None:
        """Each sample pays for its share of the batch, so that a budget means the same whoever shares the batch."""
        spent = self.clock() - started
        share = torch.bincount(sample_D, minlength=len(self.nodes)).tolist()
        for b, count in enumerate(share):
            self.seconds[b] += spent * count / max(1, len(sample_D))

    def _hopeless(self, nodes: int) -> Tensor:
        """Samples the rest of their nodes would not prove."""
        least, deep = self.settings.trial
        trees_B = (~(self.base_BS > 0)).sum(1).clamp_min(1)
        used_B = torch.tensor(self.nodes, device=self.base_BS.device)
        root_B = self.base_BS.amin(1).clamp_max(0)
        worst_B = root_B.scatter_reduce(0, self.open.samples(), self.open.bounds().to(root_B.dtype), "amin", include_self=False)
        asked_B = (used_B >= least) & ((1 + used_B / (2 * trees_B)).log2() >= deep)
        gone_B = asked_B & self.outlook.hopeless(used_B, worst_B, nodes, self.settings.hope)
        return gone_B.nonzero(as_tuple=True)[0] if self.settings.hope > 0 else used_B[:0]

    def _drop(self, samples: Tensor, exhausted: bool) -> None:
        if len(samples) == 0 or len(self.open) == 0:
            return
        gone = torch.isin(self.open.samples(), samples).nonzero(as_tuple=True)[0]
        dropped = self.open.take(gone)
        for b in dropped.sample_D.unique().tolist():
            self.exhausted[b] = self.exhausted[b] or exhausted
        self._note(dropped)

    def _note(self, dropped: Nodes) -> None:
        """The bounds of leaves left open are reported too, so they are taken in the deciding precision; where there are many, the
        margin keeps the bound it had before the search."""
        if len(dropped) == 0:
            return
        few_D = torch.bincount(dropped.sample_D, minlength=len(self.nodes))[dropped.sample_D] <= REPORTED
        value_D = self.base_BS[dropped.sample_D, dropped.spec_D]
        value_D[few_D] = self._exactly(dropped.select(few_D)).to(value_D.dtype)
        self.dropped_BS = _worst(self.dropped_BS, dropped, value_D)

    def _finish(self, stuck: Nodes) -> None:
        """Nothing left to split, so the sub-problem is convex: work on its multipliers; unproven, its sample is lost."""
        left = self._confirm(self._bounded(stuck, self.settings.patience))
        if len(left):
            self._note(left)
            self.lost_B[left.sample_D] = True
            self._drop(left.sample_D.unique(), exhausted=False)

    def _pick(self, together: int, nodes: int) -> Nodes:
        """The worst nodes of the first samples that have any, as many as their budgets allow (an odd one is exceeded by one)."""
        sample_D = self.open.samples()
        order = self.open.bounds().argsort(stable=True)
        order = order[sample_D[order].argsort(stable=True)]
        counts = torch.bincount(sample_D, minlength=len(self.nodes))
        first_B = counts.cumsum(0) - counts
        turn_B = (counts > 0).cumsum(0)
        rank_D = torch.arange(len(order), device=order.device) - first_B[sample_D[order]]
        left_B = (nodes - torch.tensor(self.nodes, device=order.device) + 1) // 2
        most_B = torch.minimum((counts // 4).clamp(*self.settings.width), left_B.clamp_min(1))
        return self.open.take(order[(rank_D < most_B[sample_D[order]]) & (turn_B[sample_D[order]] <= together)])

    def _children(self, picked: Nodes) -> Nodes:
        """Both children of the best candidate of every node, bounded."""
        D, K = picked.candidate_DK.shape
        valid_DK = picked.candidate_DK >= 0
        split = picked.split_DU[:, None, None].expand(D, K, 2, -1).clone()
        sign = torch.tensor([1, -1], dtype=torch.int8, device=split.device).view(1, 1, 2, 1).expand(D, K, 2, 1)
        split.scatter_(3, picked.candidate_DK.clamp_min(0).view(D, K, 1, 1).expand(D, K, 2, 1), sign)
        best_D = torch.zeros(D, dtype=torch.long, device=split.device)
        unsure = (valid_DK & (picked.candidate_DK != picked.candidate_DK[:, :1])).any(1).nonzero(as_tuple=True)[0]
        if len(unsure):  # try every candidate with the parent's slopes and multipliers
            tried = picked.select(unsure.repeat_interleave(2 * K))
            tried.split_DU = split[unsure].reshape(len(unsure) * K * 2, -1)
            value_DK2 = self.quick.value(tried).view(-1, K, 2).clamp_max(0)
            value_DK2 = torch.maximum(value_DK2, picked.bound_D[unsure][:, None, None])
            score_DK = value_DK2.amin(2) + 0.3 * value_DK2.amax(2)
            best_D[unsure] = score_DK.masked_fill(~valid_DK[unsure], -torch.inf).argmax(1)
        rows = torch.arange(D, device=split.device)
        twice = rows.repeat_interleave(2)
        children = picked.select(twice)
        children.split_DU = split[rows, best_D].reshape(2 * D, -1)
        children.beta_DU = children.beta_DU.masked_fill(children.split_DU != picked.split_DU[twice], 0.0)
        one = torch.ones_like(picked.spec_D)
        self.leaves_BS.index_put_((picked.sample_D, picked.spec_D), one, accumulate=True)
        for b, count in enumerate(torch.bincount(children.sample_D, minlength=len(self.nodes)).tolist()):
            self.nodes[b] += count
        return self._bounded(children, self.settings.iterations)

    def _bounded(self, nodes: Nodes, iterations: int) -> Nodes:
        s = self.settings
        return self.quick.bounded(nodes, iterations, s.rate, s.decay, s.candidates)

    def _confirm(self, nodes: Nodes) -> Nodes:
        """Close what is positive in the deciding precision; return what stays open."""
        closed = (nodes.bound_D > 0).nonzero(as_tuple=True)[0]
        if len(closed) == 0:
            return nodes
        still_D = torch.ones_like(nodes.bound_D, dtype=torch.bool)
        picked = nodes.select(closed)
        value_D = self._exactly(picked)
        sure_D = (value_D > 0) & torch.isfinite(value_D)
        sure = picked.select(sure_D)
        self.closed_BS = _worst(self.closed_BS, sure, value_D[sure_D])
        self.leaves_BS.index_put_((sure.sample_D, sure.spec_D), -torch.ones_like(sure.spec_D), accumulate=True)
        still_D[closed[sure_D]] = False
        nodes.bound_D = nodes.bound_D.clamp_max(0)
        return nodes.select(still_D)

    def _exactly(self, nodes: Nodes) -> Tensor:
        """The bounds of these sub-problems in the deciding precision, with the slopes and multipliers the search found."""
        dtype = self.exact.domain.x_BN.dtype
        values = [torch.zeros(0, dtype=dtype, device=nodes.bound_D.device)]
        for part in nodes.parts(REPORTED):
            values.append(self.exact.value(part))
        return torch.cat(values)


def _worst(table_BS: Tensor, nodes: Nodes, value_D: Tensor) -> Tensor:
    flat = nodes.sample_D * table_BS.shape[1] + nodes.spec_D
    return table_BS.flatten().scatter_reduce(0, flat, value_D.to(table_BS.dtype), "amin").view_as(table_BS)
