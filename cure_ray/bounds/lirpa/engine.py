"""The second engine: auto_LiRPA behind our protocol, for general graphs and as the independent cross-check.

Everything runs in float64 and is lowered by what rounding can have added (magnitudes.py), so what it returns is the decision. It has no
branch and bound and does not use the domain with l2 and l1 balls: sound, looser than the native engine.
"""

import contextlib
import copy
import logging
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cure_ray.bounds.arithmetic import exact_arithmetic, out_of_memory
from cure_ray.bounds.engine import Branching, Problem, Stage, check_domain
from cure_ray.bounds.lirpa import compat
from cure_ray.bounds.lirpa import graph as lirpa_graph
from cure_ray.bounds.lirpa.magnitudes import magnitudes
from cure_ray.bounds.native.rounding import LARGEST
from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.norms import P

_METHODS: dict[Stage, str] = {
    "ibp": "IBP",
    "crown-ibp": "CROWN-IBP",
    "crown": "CROWN",
    "alpha-crown": "CROWN-Optimized",
}
_default_dtype = threading.Lock()


@dataclass(frozen=True)
class LirpaProblem:
    """A batch of samples under one threat. auto_LiRPA keeps nothing between stages, so neither do we."""

    x: Tensor  # [B, C, H, W], float64
    y: Tensor  # [B]
    threat: Ball
    box: Box

    @property
    def size(self) -> int:
        return int(self.x.shape[0])

    def select(self, index: Tensor) -> "LirpaProblem":
        return replace(self, x=self.x[index], y=self.y[index])


class LirpaEngine:
    """auto_LiRPA (0.3 or 0.7.1) as an Engine: sequential networks, and graphs with skip connections and pooling."""

    name = "auto_lirpa"
    stages: tuple[Stage, ...] = ("ibp", "crown-ibp", "crown", "alpha-crown")

    def __init__(
        self,
        network: nn.Module,
        device: str | torch.device = "cpu",
        input_shape: tuple[int, int, int] | None = None,
        alpha_iterations: int = 20,
        alpha_learning_rate: float = 0.1,
    ) -> None:
        lirpa = compat.load()
        self.version = compat.version()
        shape = input_shape or getattr(network, "input_shape", None)
        if shape is None:
            raise UserError("auto_LiRPA engine: the network does not know its input_shape; pass input_shape=(C, H, W)")
        _check_network(network)
        self.device = torch.device(device)
        self.input_shape: tuple[int, int, int] = shape
        self._lirpa = lirpa
        self._prepared = lirpa_graph.prepare(copy.deepcopy(network).to(self.device), shape)
        self.options: Mapping[str, Any] = {"alpha_iterations": alpha_iterations, "alpha_learning_rate": alpha_learning_rate}
        self._options = {
            # One alpha per neuron and specification. The sparse storage of 0.3 breaks on convolutions with more than
            # 512 unstable neurons.
            "sparse_features_alpha": False,
            "sparse_spec_alpha": False,
            "optimize_bound_args": {"iteration": alpha_iterations, "lr_alpha": alpha_learning_rate},
        }
        self._bounded = self._wrap()
        with torch.no_grad():
            zeros = torch.zeros(1, *shape, dtype=torch.float64, device=self.device)
            self.num_classes = int(self._prepared.model(self._images(zeros)).shape[1])
            magnitudes(self._prepared.model, self._prepared.reach(zeros, 0.0))  # refuses what its rounding is not known of

    def problem(self, x_BCHW: Tensor, y_B: Tensor, threat: Ball, box: Box | bool = UNIT) -> LirpaProblem:
        if tuple(x_BCHW.shape[1:]) != self.input_shape:
            raise UserError(f"images of shape {self.input_shape} expected, got {tuple(x_BCHW.shape[1:])}")
        if y_B.numel() and not (int(y_B.min()) >= 0 and int(y_B.max()) < self.num_classes):
            raise UserError(f"labels must lie in 0..{self.num_classes - 1}, got {int(y_B.min())}..{int(y_B.max())}")
        x = x_BCHW.detach().to(self.device, torch.float64).contiguous()
        box = Box.of(box)
        check_domain(x, box)
        return LirpaProblem(x, y_B.detach().to(self.device, torch.int64), threat, box)

    def margins(self, problem: Problem, stage: Stage) -> Tensor:
        if not isinstance(problem, LirpaProblem):
            raise TypeError(f"a problem of the auto_LiRPA engine expected, got {type(problem).__name__}")
        if stage not in _METHODS:
            raise UserError(f"auto_LiRPA offers {', '.join(self.stages)}, not {stage}")
        if problem.size == 0:
            return torch.empty((0, self.num_classes - 1), dtype=torch.float64, device=self.device)
        # 0.3 leaves optimised slopes behind in the module and later calls would pick them up: a fresh one each time.
        bounded = self._wrap() if stage == "alpha-crown" else self._bounded
        C = _margin_specification(problem.y, self.num_classes)
        try:
            lower = self._compute(bounded, problem, C, stage)
        except (RuntimeError, IndexError, AssertionError) as error:
            if out_of_memory(error):
                raise
            # The convolution patches of 0.3 crash on some strides and paddings; dense matrices give the same bounds, slower.
            self._bounded = self._wrap()
            lower = self._compute(self._wrap("matrix"), problem, C, stage)
        if lower.dtype != torch.float64 or lower.shape != C.shape[:2]:
            raise RuntimeError(f"auto_LiRPA returned {lower.dtype} {tuple(lower.shape)}, not {C.shape[:2]} float64")
        lower = lower - self._rounding(problem, C)
        # A lower bound of +inf is no bound at all: it comes from an overflow.
        return torch.where(lower == math.inf, torch.full_like(lower, math.nan), lower)

    def _rounding(self, problem: LirpaProblem, C: Tensor) -> Tensor:
        """What the rounding of any of its passes can have added to the margins."""
        return magnitudes(self._prepared.model, self._prepared.reach(problem.x, problem.threat.eps)).slack(C)

    def _compute(self, bounded: Any, problem: LirpaProblem, C: Tensor, stage: Stage) -> Tensor:
        gradients = torch.enable_grad() if stage == "alpha-crown" else torch.no_grad()
        with exact_arithmetic(), _quiet_float64(), gradients:
            image = self._lirpa.BoundedTensor(self._images(problem.x), self._perturbation(problem))
            lower, _ = bounded.compute_bounds(x=(image,), C=C, method=_METHODS[stage], bound_upper=False)
        return lower.detach()

    def branch(self, problem: Problem, seconds: float, nodes: int) -> list[Branching]:
        raise UserError("auto_LiRPA has no branch and bound; use the native engine or leave that stage out")

    def _images(self, x: Tensor) -> Tensor:
        return self._prepared.inputs(x.to(self.device, torch.float64))

    def _perturbation(self, problem: LirpaProblem) -> Any:
        threat = problem.threat
        x_L = x_U = None
        if threat.norm == "linf":
            x_L, x_U = problem.x - threat.eps, problem.x + threat.eps
            x_L, x_U = (end.clamp(problem.box.low, problem.box.high) for end in (x_L, x_U))
            x_L, x_U = self._images(x_L), self._images(x_U)
        return self._lirpa.PerturbationLpNorm(norm=P[threat.norm], eps=threat.eps, x_L=x_L, x_U=x_U)

    def _wrap(self, conv_mode: str = "patches") -> Any:
        example = self._images(torch.zeros(1, *self.input_shape))
        try:
            with _quiet_float64():
                model, options = copy.deepcopy((self._prepared.model, {**self._options, "conv_mode": conv_mode}))
                return self._lirpa.BoundedModule(model, example, bound_opts=options, device=self.device)
        except (NotImplementedError, KeyError) as error:
            layers = sorted({type(m).__name__ for m in self._prepared.model.modules() if not list(m.children())})
            raise UserError(
                f"auto_LiRPA {self.version} does not support an operation of this network ({error or 'unnamed'}); "
                f"its layers are {', '.join(layers)}"
            ) from error


def _margin_specification(y: Tensor, num_classes: int) -> Tensor:
    """[B, K-1, K]: row i is e_y - e_i for the classes i != y in increasing order."""
    eye = torch.eye(num_classes, dtype=torch.float64, device=y.device)
    others = torch.arange(num_classes, device=y.device).expand(len(y), -1)
    others = others[others != y[:, None]].view(len(y), num_classes - 1)
    return eye[y][:, None, :] - eye[others]


def _check_network(network: nn.Module) -> None:
    training = [name or type(network).__name__ for name, module in network.named_modules() if module.training]
    if training:
        raise UserError(f"the network is in train mode ({training[0]}); call network.eval() before certification")
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"the network's {name} holds NaN or infinite values; nothing can be certified with it")
        if tensor.is_floating_point() and bool((tensor.abs() > LARGEST).any()):
            raise UserError(f"the network's {name} holds numbers beyond {LARGEST:.0e}; nothing can be certified with it")


@contextlib.contextmanager
def _quiet_float64() -> Iterator[None]:
    """auto_LiRPA allocates slopes in the default dtype: make that float64 while it runs, and silence its logs."""
    with _default_dtype, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 1/0 for the dual of l1, deprecations of the tracer
        before, disabled = torch.get_default_dtype(), logging.root.manager.disable
        torch.set_default_dtype(torch.float64)
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            logging.disable(disabled)
