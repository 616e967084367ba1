"""Branch and bound of a batch: from what alpha-CROWN has found to trees, and back to one result a sample."""

import torch
from torch import Tensor

from cure_ray.bounds.engine import Branching
from cure_ray.bounds.native.branching import Search, Settings
from cure_ray.bounds.native.climbing import Climber, Together
from cure_ray.bounds.native.compiled import Compiled
from cure_ray.bounds.native.condensed import Apart
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.problem import NativeProblem, visible
from cure_ray.bounds.native.relaxation import LayerBounds, margin_rows
from cure_ray.bounds.native.subproblems import Space, unstable_index
from cure_ray.bounds.native.vertices import vertex_numbers


def branched(
    search: Compiled, decide: Compiled, problem: NativeProblem, settings: Settings, budget: tuple[float, int], memory: tuple[int, int]
) -> list[Branching]:
    """`budget`: seconds and nodes of a sample. `memory`: coefficients of rows to hold at once, and bytes in all."""
    (seconds, nodes), (elements, everything) = budget, memory
    assert problem.bounds is not None
    shown_BS = visible(problem.margins_BS)
    live = torch.isfinite(shown_BS).all(1).nonzero(as_tuple=True)[0]
    results = [Branching(m.cpu(), 0, 0.0, bool(seconds <= 0 or nodes <= 0)) for m in shown_BS]
    if len(live) == 0 or not problem.bounds:
        return results
    bounds, domain = [b.select(live) for b in problem.bounds], problem.domain.select(live)
    C_BSK, index_BU = margin_rows(problem.y_B[live], decide.classes, torch.float64), unstable_index(bounds)
    on_cpu = shown_BS.device.type == "cpu"
    quick, exact = (_climber(net, domain, bounds, C_BSK, index_BU, everything // 16 if on_cpu else None) for net in (search, decide))
    tree = Search(quick, exact, shown_BS[live], _start(problem, live, index_BU), settings)
    first = search.layers[0]
    own = 4 * vertex_numbers(first, first.positions) if problem.domain.has_vertices and not on_cpu else 0  # one sample's share them on CPUs
    room = elements * 4 // (16 * search.neurons * (settings.candidates + 1) + own)
    batch = max(2, min(64 if on_cpu else 1024, room))
    waiting = (nodes // 2 + 1) * index_BU.shape[1] * 9 + 1  # bytes of a sample's open nodes, at most
    tree.run(seconds, nodes, batch, max(1, min(batch // settings.width[0], everything // waiting)))
    for row, (i, margin_S) in enumerate(zip(live.tolist(), tree.margins().cpu(), strict=True)):
        results[i] = Branching(margin_S, tree.nodes[row], tree.seconds[row], tree.exhausted[row])
    return results


def _climber(
    net: Compiled, domain: Domain, bounds: list[LayerBounds], C_BSK: Tensor, index_BU: Tensor, condensed_room: int | None
) -> Climber:
    """A core works best on small matrices, one sample after the other; a GPU on all samples at once."""
    if condensed_room is None:
        return Together(Space(net, domain, bounds, C_BSK, index_BU))
    return Apart(net, domain, bounds, C_BSK, index_BU, condensed_room)


def _start(problem: NativeProblem, live: Tensor, index_BU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What alpha-CROWN has found, on the unstable neurons: slopes, what is added to coefficients, multipliers of balls."""

    def compact(dense: list[Tensor]) -> Tensor:
        padded = torch.cat([t[live] for t in dense] + [dense[0][live][..., :1] * 0], 2)
        return padded.gather(2, index_BU.unsqueeze(1).expand(-1, padded.shape[1], -1))

    alpha_BSU = compact(problem.slopes or [torch.zeros_like(e, dtype=torch.float16) for e in problem.extras])
    beta_BSU = compact(problem.extras) if problem.extras else torch.zeros_like(alpha_BSU)
    price_BSL = torch.cat([p[live] for p in problem.prices], 2) if problem.prices else alpha_BSU[..., :0]
    return alpha_BSU, beta_BSU, price_BSL
