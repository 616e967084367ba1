"""The native engine: IBP, CROWN-IBP, sparse CROWN, layer-wise alpha-CROWN and branch and bound for sequential ReLU networks.

float32 searches, float64 decides: a positive margin in a sample whose margins are all positive was evaluated in float64, hidden
bounds included, and lowered by what rounding can have added, that of products in float32 too (docs/explanation/soundness.md).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cure_ray import __version__
from cure_ray.bounds.arithmetic import exact_arithmetic, out_of_memory
from cure_ray.bounds.engine import STAGES, Branching, Problem, Stage, check_domain
from cure_ray.bounds.native.balls import ball_margins, with_balls
from cure_ray.bounds.native.compiled import Compiled, check_outputs, compile_network, flatten_images, state_of
from cure_ray.bounds.native.domain import Domain
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.hidden import Nets, hidden_bounds, proven_bounds
from cure_ray.bounds.native.intermediate import crown_bounds
from cure_ray.bounds.native.linear import best_of_slopes
from cure_ray.bounds.native.margins import raised_margins
from cure_ray.bounds.native.problem import NativeProblem, joined_bounds, store, visible
from cure_ray.bounds.native.relaxation import LayerBounds, Relaxation, interval_bounds, interval_margins, margin_rows
from cure_ray.bounds.native.single import with_single_products
from cure_ray.bounds.native.trees import branched
from cure_ray.bounds.native.vertices import vertex_numbers
from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box

Out = TypeVar("Out")
NEAR = 0.02  # margins that miss 0 by less, measured by the sample's largest, may have been lost to float32 and are computed again


class NativeEngine:
    """Bounds for one network on one device. `memory_budget` (bytes) is for the tensors of a batch, besides the weights. A problem is
    about the network as it is when the problem is made; what is changed behind torch's back (`tensor.data`) goes unnoticed."""

    name = "native"
    version = __version__
    stages: tuple[Stage, ...] = STAGES

    def __init__(
        self,
        network: nn.Sequential,
        device: torch.device | str = "cpu",
        memory_budget: int = 1 << 30,
        effort: Effort | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:
        self.network, self.device, self.memory_budget = network, torch.device(device), memory_budget
        self.effort = effort or Effort()
        self.options: Mapping[str, Any] = asdict(self.effort)
        self.backoffs: list[str] = []  # every time memory ran out and the batch was halved
        self.search: Compiled | None = None
        self.decide: Compiled | None = None
        self.prove: Compiled | None = None  # decides what is clear
        self._read = list[tuple[int, int]]()  # the network's tensors as they were compiled
        shape = input_shape or getattr(network, "input_shape", None)
        if shape is not None:
            self._compile(tuple(shape))

    def _compile(self, shape: tuple[int, ...]) -> tuple[Compiled, Compiled]:
        now = state_of(self.network)
        if self.search is None or self.decide is None or self.search.in_shape != shape or self._read != now:
            with exact_arithmetic():
                compiled = compile_network(self.network, shape)
                check_outputs(self.network, compiled)
                self.search = compiled.to(self.device, torch.float32)
                self.decide = compiled.to(self.device, torch.float64)
                self.prove = with_single_products(self.decide) if self.effort.single else self.decide
            self._read = now
        return self.search, self.decide

    @torch.no_grad()
    def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: Ball, box: Box | bool = UNIT) -> NativeProblem:
        if x_BCHW.dim() != 4 or y_B.shape != x_BCHW.shape[:1]:
            raise UserError(f"expected images [B, C, H, W] and labels [B], got {tuple(x_BCHW.shape)} and {tuple(y_B.shape)}")
        search, decide = self._compile(tuple(x_BCHW.shape[1:]))
        if len(y_B) and (int(y_B.min()) < 0 or int(y_B.max()) >= search.classes):
            raise UserError(f"labels must lie in 0..{search.classes - 1}, got {int(y_B.min())}..{int(y_B.max())}")
        box, x_BN = Box.of(box), flatten_images(x_BCHW.to(self.device, torch.float64))
        usable_B = torch.isfinite(x_BN).all(1)
        x_BN = torch.where(usable_B.unsqueeze(1), x_BN, torch.full_like(x_BN, box.inside))
        check_domain(x_BN, box)
        with exact_arithmetic():
            domain = with_balls(decide, Domain.around(x_BN, threat, box))
        return NativeProblem(domain, y_B.to(self.device), usable_B, decide)

    @torch.no_grad()
    def margins(self, problem: Problem, stage: Stage) -> Tensor:
        problem, search, _ = self._own(problem)
        if stage not in self.stages or stage == "branch-and-bound":
            raise UserError(f"margins() has no stage {stage!r}: one of {', '.join(STAGES[:-1])}")
        result_BS = torch.full((problem.size, search.classes - 1), torch.nan, dtype=torch.float64, device=self.device)
        if stage == "alpha-crown":
            parts: list[tuple[Tensor, NativeProblem]] = []
            for index, part in self._batches(problem, self._optimised, self._per_sample(stage, problem)):
                result_BS[index] = visible(part.margins_BS)
                parts.append((index, part))
            store(problem, parts)
        else:
            known = []
            for index, (value_BS, bounds) in self._batches(problem, self._plain(stage), self._per_sample(stage, problem)):
                result_BS[index] = visible(value_BS)
                known.append((index, bounds))
            if stage == "crown" and known and all(bounds for _, bounds in known):
                problem.known = joined_bounds(problem.size, known)
        return result_BS

    @torch.no_grad()
    def branch(self, problem: Problem, seconds: float, nodes: int) -> list[Branching]:
        problem, search, _ = self._own(problem)
        if problem.margins_BS is None or problem.bounds is None:
            self.margins(problem, "alpha-crown")
        results = [Branching(torch.full((search.classes - 1,), torch.nan, dtype=torch.float64), 0, 0.0, False)] * problem.size
        for index, found in self._batches(problem, self._branched(seconds, nodes), self._per_sample("branch-and-bound", problem)):
            for i, one in zip(index.tolist(), found, strict=True):
                results[i] = one
        return results

    # ------------------------------------------------------------ stages, each on a batch that fits

    def _plain(self, stage: Stage) -> Callable[[NativeProblem], tuple[Tensor, list[LayerBounds]]]:
        """Margins, and the hidden bounds where they are proven for all samples of the batch."""

        def run(problem: NativeProblem) -> tuple[Tensor, list[LayerBounds]]:
            _, search, decide = self._own(problem)
            if self.prove is None or self.prove is decide:
                value_BS = self._crown(search, problem.domain.to(torch.float32), problem.y_B, stage).double()
                again_B, known = (value_BS > 0).all(1) | value_BS.isnan().any(1), list[LayerBounds]()
            else:
                known = self._stage_bounds(self.prove, problem.domain, stage)
                value_BS = self._crown(self.prove, problem.domain, problem.y_B, stage, known)
                again_B = _unclear(value_BS)
            again = again_B.nonzero(as_tuple=True)[0]
            if len(again):
                some = problem.domain.select(again)
                bounds = self._stage_bounds(decide, some, stage)
                value_BS[again] = self._crown(decide, some, problem.y_B[again], stage, bounds)
                for k, whole in enumerate(known):  # sizes stay those of the products that will read them
                    known[k] = whole.replaced(again, replace(bounds[k], scale_BN=whole.scale_BN[again]))
            return value_BS, known

        return run

    def _stage_bounds(self, net: Compiled, domain: Domain, stage: Stage) -> list[LayerBounds]:
        return crown_bounds(net, domain, self._elements(net)) if stage == "crown" else interval_bounds(net, domain)

    def _crown(self, net: Compiled, domain: Domain, y_B: Tensor, stage: Stage, bounds: list[LayerBounds] | None = None) -> Tensor:
        C_BSK = margin_rows(y_B, net.classes, domain.x_BN.dtype)
        bounds = self._stage_bounds(net, domain, stage) if bounds is None else bounds
        value_BS = interval_margins(net, domain, bounds, C_BSK)
        if domain.balls:
            value_BS = torch.maximum(value_BS, ball_margins(net, domain, C_BSK))
        if stage == "ibp" or not bounds:
            return value_BS
        rows = []
        for index in torch.arange(len(y_B), device=self.device).split(self._together(net, domain)):
            some = [b.select(index) for b in bounds]
            rows.append(best_of_slopes(net, domain.select(index), some, [Relaxation.of(b) for b in some], C_BSK[index]))
        return torch.maximum(value_BS, torch.cat(rows))

    def _optimised(self, problem: NativeProblem) -> NativeProblem:
        """On the hidden bounds that CROWN has proven, and only where that is not enough on better ones, which cost most."""
        _, search, decide = self._own(problem)
        assert self.prove is not None
        nets, whole = Nets(search, self.prove, decide), replace(problem)
        todo, parts = torch.arange(problem.size, device=self.device), list[tuple[Tensor, NativeProblem]]()
        if problem.known and search.hidden > 1 and self.effort.stop_early and self.effort.hidden in ("auto", "alpha"):
            first = raised_margins(search, decide, problem, proven_bounds(nets, problem), self.effort)
            assert first.margins_BS is not None
            proven_B = (first.margins_BS > 0).all(1)
            done, todo = proven_B.nonzero(as_tuple=True)[0], (~proven_B).nonzero(as_tuple=True)[0]
            parts = [(done, first.select(done))] if len(done) else []
        if len(todo):
            rest = problem.select(todo)
            bounds = hidden_bounds(nets, rest, self.effort, self._elements)
            parts.append((todo, raised_margins(search, decide, rest, bounds, self.effort)))
        store(whole, parts)
        return whole

    def _branched(self, seconds: float, nodes: int) -> Callable[[NativeProblem], list[Branching]]:
        def run(problem: NativeProblem) -> list[Branching]:
            _, search, decide = self._own(problem)
            return branched(search, decide, problem, self.effort.branching, (seconds, nodes), (self._elements(search), self.memory_budget))

        return run

    # ------------------------------------------------------------ batches and memory

    def _own(self, problem: Problem) -> tuple[NativeProblem, Compiled, Compiled]:
        if not isinstance(problem, NativeProblem) or self.search is None or self.decide is None or problem.about is not self.decide:
            raise UserError("this problem was made by another engine, or for images of another shape: use engine.problem(...)")
        return problem, self.search, self.decide

    def _elements(self, net: Compiled) -> int:
        """Coefficients of backward rows to hold at once; on CPUs few enough to stay near the caches. Larger tensors of doubles are handed
        back to the system as soon as they are read, and asking for them again can take longer than the arithmetic."""
        size = net.layers[0].weight.element_size()
        near = 4_000_000 if size == 4 else 1_000_000
        most = near if self.device.type == "cpu" else 1 << 40
        return max(1, min(most, self.memory_budget // (8 * size)))

    def _together(self, net: Compiled, domain: Domain) -> int:
        """How many samples' margins walk down together."""
        first, widest = net.layers[0], max(layer.outputs for layer in net.layers)
        vertices = vertex_numbers(first, first.positions) if domain.has_vertices else 0
        return max(1, self._elements(net) // max(1, (net.classes - 1) * widest + vertices // 4))

    def _per_sample(self, stage: Stage, problem: NativeProblem) -> int:
        """Rough number of bytes a sample needs."""
        net = self.decide
        assert net is not None
        first = net.layers[0]
        own = vertex_numbers(first, first.positions) if problem.domain.has_vertices and stage not in ("ibp", "branch-and-bound") else 0
        rows = net.classes - 1 if stage == "alpha-crown" else 2  # its open margins are rows of their own, in both precisions
        return 12 * rows * own + self._dense(net, stage)

    @staticmethod
    def _dense(net: Compiled, stage: Stage) -> int:
        widest, specs = max(max(a.inputs, a.outputs) for a in net.layers), net.classes - 1
        if stage == "ibp":
            return 8 * 8 * widest
        if stage in ("crown-ibp", "crown"):
            return 8 * (8 * net.neurons + 5 * specs * widest)
        return 8 * (12 * net.neurons + 6 * specs * net.neurons)

    def _batches(self, problem: NativeProblem, run: Callable[[NativeProblem], Out], per_sample: int) -> Iterator[tuple[Tensor, Out]]:
        """Run on parts of the usable samples that fit the budget; on out-of-memory halve the part and go on."""
        todo = problem.usable_B.nonzero(as_tuple=True)[0]
        limit = max(1, min(256, self.memory_budget // max(1, per_sample)))
        with exact_arithmetic():
            while len(todo):
                index = todo[:limit]
                try:
                    result = run(problem.select(index))
                except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                    if not out_of_memory(error):
                        raise
                    if limit == 1 and self.memory_budget < 1 << 20:
                        raise
                    if limit == 1:
                        self.memory_budget //= 2
                    limit = max(1, len(index) // 2)
                    self.backoffs.append(f"out of memory with {len(index)} samples, going on with {limit}: {error}"[:300])
                    continue
                yield index, result
                todo = todo[limit:]


def _unclear(value_BS: Tensor) -> Tensor:
    """Samples that products in float32 neither prove nor clearly miss, or overflowed on, [B]."""
    if not value_BS.shape[1]:  # a single class
        return torch.zeros(len(value_BS), dtype=torch.bool, device=value_BS.device)
    least_B, most_B = value_BS.amin(1), value_BS.abs().amax(1)
    return ~torch.isfinite(most_B) | ((least_B <= 0) & (least_B > -NEAR * most_B))
