"""What rounding can have added to a bound of auto_LiRPA: magnitudes carried through the graph, as an a-priori bound.

Carry T = |x| + eps through the network with |W| for W and |b| for b, and double it at every activation, because its relaxation adds an
intercept no larger than the bounds it is made of. In any graph T at a node then bounds the magnitudes of all terms a backward pass
from there sums, and those of all nodes below it together. A pass loses at most 8 gamma T; bounds of a hidden layer that are off by d T
put the relaxations built on them off by at most that, so with L activations a margin is off by at most 8 gamma (L + 1) T at the logits
(docs/explanation/soundness.md). Twice that is charged, and the floors of the native engine for what underflows.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cure_ray.bounds.native.rounding import CEILING, FLOOR, capped, floored
from cure_ray.errors import UserError

_POOLS = (nn.AvgPool2d, nn.AdaptiveAvgPool2d)
_SAME = (nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, *_POOLS)
_ADD = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "add_", "sub", "sub_"}
_MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_DIVIDE = {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
_KEEP = {torch.flatten, torch.reshape, "flatten", "view", "reshape", "contiguous", "mean", torch.mean, torch.cat, torch.concat,
         F.avg_pool2d, F.adaptive_avg_pool2d, operator.getitem}  # fmt: skip
_SHAPE = {"size", "dim", getattr}
_RELU = {torch.relu, torch.relu_, F.relu, "relu", "relu_"}
_SMOOTH = {torch.tanh, torch.sigmoid, F.tanh, F.sigmoid, "tanh", "sigmoid"}


@dataclass(frozen=True)
class Magnitudes:
    """T at the logits, [B, K]; the sum of T over all nodes, [B]; the number of activations and the widest node."""

    output_BK: Tensor
    total_B: Tensor
    activations: int
    widest: int

    def slack(self, C_BSK: Tensor) -> Tensor:
        """[B, S] what the bounds of these rows of the logits may be too large by; NaN where T is too large to vouch for."""
        gamma = 2 * (self.widest + 64) * 2.0**-53
        size_BS = torch.einsum("bsk,bk->bs", C_BSK.abs(), self.output_BK) + FLOOR * self.total_B[:, None]
        return 16 * gamma * (self.activations + 1) * torch.where(size_BS <= CEILING, size_BS, torch.nan)


class _Pass(fx.Interpreter):
    """Runs the graph on magnitudes. What it does not know it refuses by name: no term is charged for what is not understood."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.activations, self.widest = 0, 0
        self.total_B: Tensor | None = None
        self.constant = False  # whether the operation at hand reads a parameter of the network

    def run_node(self, n: fx.Node) -> Any:
        self.constant = any(isinstance(a, fx.Node) and a.op == "get_attr" for a in n.args)
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op not in ("get_attr", "output") and value.dim() > 1:
            self.widest = max(self.widest, value[0].numel())
            total_B = value.flatten(1).sum(1)
            self.total_B = total_B if self.total_B is None else self.total_B + total_B
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return floored(value.abs()) if isinstance(value, Tensor) and value.is_floating_point() else value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        if isinstance(module, nn.Conv2d) and module.padding_mode == "zeros":
            weight, bias = floored(module.weight.abs()), _size(module.bias)
            return capped(F.conv2d(floored(args[0]), weight, bias, module.stride, module.padding, module.dilation, module.groups))
        if isinstance(module, nn.Linear):
            return capped(F.linear(floored(args[0]), floored(module.weight.abs()), _size(module.bias)))
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and not module.training:
            return capped(_batch_norm(module, floored(args[0])))
        if isinstance(module, nn.ReLU):
            return self._activated(args[0])
        if isinstance(module, nn.LeakyReLU):
            return self._activated(args[0] * max(1.0, abs(module.negative_slope)))
        if isinstance(module, nn.Tanh | nn.Sigmoid):
            return self._activated(2 * args[0] + 2)
        if isinstance(module, nn.MaxPool2d) and not module.return_indices:
            return self._activated(module(args[0]))
        if isinstance(module, _SAME):
            return module(args[0])
        raise _unknown(type(module).__name__)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(target, args, kwargs, lambda: super(_Pass, self).call_function(target, args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._call(target, args, kwargs, lambda: super(_Pass, self).call_method(target, args, kwargs))

    def _call(self, target: Any, args: Any, kwargs: Mapping[str, Any], plain: Callable[[], Any]) -> Any:
        if target in _SHAPE or not any(isinstance(a, Tensor) for a in _flat(args)):
            return plain()
        if target in _ADD and not kwargs:
            return capped(_abs(args[0]) + _abs(args[1]))
        if target in _MULTIPLY and not kwargs and (self.constant or not all(isinstance(a, Tensor) for a in args)):
            return capped(_raised(args[0]) * _raised(args[1]))
        if target in _DIVIDE and not kwargs and isinstance(args[0], Tensor) and not isinstance(args[1], Tensor):
            return capped(floored(args[0]) / abs(args[1]))
        if target in _RELU:
            return self._activated(args[0])
        if target in _SMOOTH:
            return self._activated(2 * args[0] + 2)
        if target in (F.max_pool2d, torch.max_pool2d):
            return self._activated(plain())
        if target in _KEEP:
            return plain()
        raise _unknown(getattr(target, "__name__", str(target)))

    def _activated(self, size: Tensor) -> Tensor:
        self.activations += 1
        return 2 * size


def _flat(args: Any) -> list[Any]:
    return [b for a in args for b in (a if isinstance(a, list | tuple) else [a])]


def _abs(value: Any) -> Any:
    return value if isinstance(value, Tensor) else abs(value)


def _raised(value: Any) -> Any:
    return floored(value) if isinstance(value, Tensor) else abs(value) + FLOOR


def _size(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else floored(tensor.abs())


def _batch_norm(norm: nn.BatchNorm1d | nn.BatchNorm2d, size: Tensor) -> Tensor:
    if norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm layer has no running statistics: certification needs fixed ones")
    view = [1, -1, *[1] * (size.dim() - 2)]
    gain = torch.ones_like(norm.running_var) if norm.weight is None else floored(norm.weight.abs())
    gain = gain / (norm.running_var + norm.eps).sqrt()
    shift = torch.zeros_like(gain) if norm.bias is None else floored(norm.bias.abs())
    return gain.view(view) * (size + floored(norm.running_mean.abs()).view(view)) + shift.view(view)


def _unknown(what: str) -> UserError:
    return UserError(
        f"auto_LiRPA engine: {what!r} is not among the operations whose rounding is known here, so nothing it bounds would be a proof. "
        "Known: convolutions, linear layers, BatchNorm, ReLU, LeakyReLU, tanh, sigmoid, max and average pooling, sums, concatenation, "
        "products with constants, reshaping, slices."
    )


@torch.no_grad()
def magnitudes(model: nn.Module, reach: Tensor) -> Magnitudes:
    """`model` is the traced graph in float64, `reach` bounds the magnitudes of its inputs [B, ...]."""
    assert isinstance(model, fx.GraphModule)
    run = _Pass(model)
    output_BK = run.run(capped(floored(reach)))
    assert run.total_B is not None
    return Magnitudes(output_BK, run.total_B, run.activations, run.widest)
