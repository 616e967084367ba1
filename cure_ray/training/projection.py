"""Gradient projection: merge a natural and a certified epoch that started from the same weights (docs/explanation/algorithms.md 7).

Computed on the CPU in float64 with one thread, tensor by tensor in sorted order and rounded once, so that any process that merges
the same bytes gets the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

State = Mapping[str, Tensor]
TINY = 1e-8


@dataclass(frozen=True)
class Merge:
    state: dict[str, Tensor]
    cosines: dict[str, float]  # per merged tensor: how well the two epochs agreed


def cosine(update_n: Tensor, update_c: Tensor) -> float:
    """In [-1, 1]; 0 if either update is 0."""
    scale = update_n.norm().clamp(min=TINY) * update_c.norm().clamp(min=TINY)
    return float((update_n.dot(update_c) / scale).clamp(-1, 1))


def merge_tensor(start: Tensor, natural: Tensor, certified: Tensor, beta: float) -> tuple[Tensor, float]:
    """beta*(1-k)*start + beta*k*natural + (1-beta)*certified with k = max(cosine, 0): a convex combination.

    Hence running variances stay non-negative and nothing leaves the hull of the three models (A21, A22: every floating tensor of
    the state, BN statistics included, is its own layer).
    """
    s, n, c = (t.detach().to("cpu", torch.float64).flatten() for t in (start, natural, certified))
    similarity = cosine(n - s, c - s)
    k = max(similarity, 0.0)
    merged = beta * (1 - k) * s + beta * k * n + (1 - beta) * c
    return merged.view(start.shape).to(start.dtype), similarity


def merge(start: State, natural: State, certified: State, beta: float) -> Merge:
    """The merged state. Integer entries (counters) come from the certified branch; beta = 0 is the certified branch bit for bit."""
    if beta == 0:
        return Merge({k: v.detach().to("cpu").clone() for k, v in certified.items()}, {})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        state, cosines = dict[str, Tensor](), dict[str, float]()
        for name in sorted(start):
            if start[name].is_floating_point():
                state[name], cosines[name] = merge_tensor(start[name], natural[name], certified[name], beta)
            else:
                state[name] = certified[name].detach().to("cpu").clone()
        return Merge(state, cosines)
    finally:
        torch.set_num_threads(threads)
