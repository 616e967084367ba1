"""Prepare a network for auto_LiRPA: fold what stands before the first affine layer into it, or refuse it.

auto_LiRPA carries an l2 or l1 ball only as far as the first operator. A convolution or a linear layer turns it into an
interval by the dual norm; any other operator drops the radius without a word, and everything after it is "certified"
(docs/explanation/in-model-normalisation.md). So the rule is a white list: the input may reach convolutions and linear layers, nothing else.
"""

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from cure_ray.errors import UserError
from cure_ray.networks.models import Normalize

_AFFINE_OPS: dict[Any, str] = {
    operator.add: "add", operator.iadd: "add", torch.add: "add", "add": "add", "add_": "add",
    operator.sub: "sub", operator.isub: "sub", torch.sub: "sub", "sub": "sub", "sub_": "sub",
    operator.mul: "mul", operator.imul: "mul", torch.mul: "mul", "mul": "mul", "mul_": "mul",
    operator.truediv: "div", operator.itruediv: "div", torch.div: "div", "div": "div", "div_": "div",
}  # fmt: skip
_FLATTEN_OPS = {torch.flatten, "flatten"}
_VIEW_OPS = {"view", "reshape", torch.reshape}


@dataclass(frozen=True)
class Prepared:
    """network(x) == model(x + offset), flattened first if `flat`. A shift moves a ball and keeps its shape."""

    model: nn.Module
    offset: Tensor  # [C, H, W]
    flat: bool
    size: Tensor  # [C, H, W], bounds the magnitudes that were summed into the offset (rounding)

    def inputs(self, x: Tensor) -> Tensor:
        moved = x + self.offset
        return moved.flatten(1) if self.flat else moved

    def reach(self, x: Tensor, eps: float) -> Tensor:
        """Bounds the magnitudes of the model's inputs, and of what they were computed from."""
        size = x.abs() + eps + self.size
        return size.flatten(1) if self.flat else size


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Normalize) or super().is_leaf_module(m, module_qualified_name)


def prepare(network: nn.Module, input_shape: tuple[int, int, int]) -> Prepared:
    """The same function in float64 that begins with affine layers; UserError if auto_LiRPA would treat it unsoundly.

    scale * x + shift = scale * (x + shift / scale): the scale goes into the weights and the shift moves the input. That
    is exact also where a convolution pads with zeros, and needs no bias that differs by position.
    """
    original = copy.deepcopy(network).double().eval().requires_grad_(False)
    graph_module = _trace(original)
    placeholder = _single_input(graph_module)
    scale = torch.ones(input_shape, dtype=torch.float64, device=_device(original))
    node, scale, shift, size, flat = _walk(graph_module, placeholder, scale)
    for user in _value_users(node):
        module = _first_affine(graph_module, user, flat)
        name = f"first_affine_{len(list(graph_module.children()))}"
        graph_module.add_submodule(name, _scaled(module, scale))
        user.target = name
        user.replace_input_with(node, placeholder)
    graph_module.graph.eliminate_dead_code()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    if bool((scale == 0).any()):
        raise UserError("auto_LiRPA engine: the network multiplies a pixel by zero before its first layer")
    prepared = Prepared(graph_module, (shift / scale).view(input_shape), flat, (size / scale.abs()).view(input_shape))
    _must_agree(original, prepared, input_shape)
    return prepared


def _device(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def _trace(network: nn.Module) -> fx.GraphModule:
    try:
        return fx.GraphModule(network, _Tracer().trace(network))
    except Exception as error:
        raise UserError(
            f"auto_LiRPA engine: {type(network).__name__} cannot be traced ({error}). "
            "Its forward pass must not depend on the values of its input."
        ) from error


def _single_input(graph_module: fx.GraphModule) -> fx.Node:
    inputs: list[fx.Node] = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    if len(inputs) != 1:
        raise UserError(f"auto_LiRPA engine: the network must take one tensor of images, it takes {len(inputs)} inputs")
    return inputs[0]


def _value_users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if not _reads_shape_only(user)]


def _reads_shape_only(node: fx.Node) -> bool:
    """As in x.view(x.size(0), -1): carries no pixel values, so it cannot lose the radius."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr and node.args[1] in ("shape", "ndim")


def _walk(graph_module: fx.GraphModule, node: fx.Node, scale: Tensor) -> tuple[fx.Node, Tensor, Tensor, Tensor, bool]:
    """Follow the input through affine operations with constants: node = scale * x + shift (flattened or not). `size` bounds the
    magnitudes that were summed into the shift."""
    shift, size, flat = torch.zeros_like(scale), torch.zeros_like(scale), False
    while True:
        users = _value_users(node)
        if len(users) != 1:
            return node, scale, shift, size, flat
        user = users[0]
        module = graph_module.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(module, Normalize):
            scale, shift = scale / module.std, (shift - module.mean) / module.std
            size = (size + module.mean.abs()) / module.std.abs()
        elif isinstance(module, nn.Identity | nn.Dropout):
            pass  # a dropout in eval mode is the identity
        elif _is_flatten(user, module):
            scale, shift, size, flat = scale.flatten(), shift.flatten(), size.flatten(), True
        elif user.op in ("call_function", "call_method") and user.target in _AFFINE_OPS and len(user.args) == 2:
            folded = _fold_constant(graph_module, user, node, scale, shift, size)
            if folded is None:
                return node, scale, shift, size, flat
            scale, shift, size = folded
        else:
            return node, scale, shift, size, flat
        node = user


def _is_flatten(node: fx.Node, module: nn.Module | None) -> bool:
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    if node.op not in ("call_function", "call_method"):
        return False
    rest = node.args[1:]
    if node.target in _FLATTEN_OPS:
        return bool(rest == (1,) or node.kwargs.get("start_dim") == 1)
    if node.target in _VIEW_OPS:
        return len(rest) == 2 and bool(rest[1] == -1) and isinstance(rest[0], fx.Node)
    return False


def _fold_constant(
    graph_module: fx.GraphModule, user: fx.Node, node: fx.Node, scale: Tensor, shift: Tensor, size: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(scale, shift, size) after `user`, or None if its other operand is not a constant that keeps the shape of the image."""
    kind = _AFFINE_OPS[user.target]
    first = user.args[0] is node
    constant = _constant(graph_module, user.args[1] if first else user.args[0], scale)
    if constant is None or user.kwargs:
        return None
    try:
        full = constant.expand(1, *scale.shape)[0] if constant.dim() > scale.dim() else constant.expand(scale.shape)
    except RuntimeError:
        return None
    sum_of_sizes = size + full.abs()
    table: dict[tuple[str, bool], Callable[[], tuple[Tensor, Tensor, Tensor]]] = {
        ("add", True): lambda: (scale, shift + full, sum_of_sizes),
        ("add", False): lambda: (scale, shift + full, sum_of_sizes),
        ("sub", True): lambda: (scale, shift - full, sum_of_sizes),
        ("sub", False): lambda: (-scale, full - shift, sum_of_sizes),
        ("mul", True): lambda: (scale * full, shift * full, size * full.abs()),
        ("mul", False): lambda: (scale * full, shift * full, size * full.abs()),
        ("div", True): lambda: (scale / full, shift / full, size / full.abs()),
    }
    rule = table.get((kind, first))
    return None if rule is None else rule()


def _constant(graph_module: fx.GraphModule, value: Any, like: Tensor) -> Tensor | None:
    if isinstance(value, int | float):
        return torch.tensor(float(value), dtype=like.dtype, device=like.device)
    if isinstance(value, fx.Node) and value.op == "get_attr":
        target: Any = graph_module
        for part in str(value.target).split("."):
            target = getattr(target, part)
        return target.to(like) if isinstance(target, Tensor) else None
    return None


def _first_affine(graph_module: fx.GraphModule, user: fx.Node, flat: bool) -> nn.Conv2d | nn.Linear:
    module = graph_module.get_submodule(str(user.target)) if user.op == "call_module" else None
    if isinstance(module, nn.Linear) and flat:
        return module
    if isinstance(module, nn.Conv2d) and not flat and module.padding_mode == "zeros":
        return module
    what = type(module).__name__ if module is not None else getattr(user.target, "__name__", str(user.target))
    raise UserError(
        f"auto_LiRPA engine: the input meets {what!r} ({user.name}) before the first convolution or linear layer. "
        "auto_LiRPA silently loses the radius of l2 and l1 balls there and would certify everything, so this network "
        "is refused. Let every path from the input begin with Conv2d (zero padding) or with Flatten and Linear; "
        "a normalisation with constant mean and std in front of them is fine and is folded."
    )


def _scaled(module: nn.Conv2d | nn.Linear, scale: Tensor) -> nn.Module:
    """The layer with x -> scale * x put in front of it."""
    if bool((scale == 1).all()):
        return module
    scaled = copy.deepcopy(module)
    if isinstance(module, nn.Conv2d):
        per_channel = scale[:, :1, :1]
        if module.groups != 1 or not bool((scale == per_channel).all()):
            raise UserError(
                "auto_LiRPA engine: the scaling in front of the first convolution differs by pixel, or that "
                "convolution is grouped, so it cannot be folded. Use one std per channel and an ungrouped first convolution."
            )
        scale = per_channel
    scaled.weight = nn.Parameter(module.weight * scale, requires_grad=False)
    if bool(((module.weight != 0) & (scaled.weight == 0)).any()):
        raise UserError("auto_LiRPA engine: folding the input normalisation turns a weight into 0: its numbers are too small")
    return scaled


@torch.no_grad()
def _must_agree(original: nn.Module, prepared: Prepared, input_shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((4, *input_shape), dtype=torch.float64, generator=generator).to(_device(original))
    expected, got = original(x), prepared.model(prepared.inputs(x))
    if not torch.allclose(expected, got, rtol=1e-9, atol=1e-9, equal_nan=True):
        raise UserError(
            "auto_LiRPA engine: folding the input normalisation changed the network's outputs by up to "
            f"{(expected - got).abs().max().item():.2e}; the network is refused rather than certified wrongly."
        )
