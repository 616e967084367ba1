"""The identity of a network: a hash of the function it computes, so that no certificate is ever taken for that of another network.

A state dict is not enough: the constants of a normalisation, strides, paddings, the eps of a BatchNorm, the order of layers and the
code of a forward pass are not in it. Here the forward pass is traced (torch.fx) as both engines read it, and every operation goes into
the hash with everything it depends on: a function of torch by its name, a layer of torch by its class and all its attributes, a
tensor by its bytes. Names of attributes and of submodules do not matter. What cannot be traced, and anything whose meaning the trace
does not hold (a hook, a function of somebody else's), is refused: it has no identity that could be trusted.
"""

import functools
import hashlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from cure_ray.errors import UserError
from cure_ray.networks.models import Normalize

FORMAT = "cure_ray network 1"
_TRUSTED = ("torch", "operator", "_operator", "math", "builtins")  # code that a version of the program fixes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Of a module's own attributes these alone cannot change what its forward pass returns.
_BOOKKEEPING = {
    "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_compiled_call_impl",
}  # fmt: skip


def network_identity(network: nn.Module) -> str:
    """SHA-256 of what the network computes; the same in every process and on every device. UserError if that cannot be told."""
    _check_calls(network)
    before = set(vars(network))
    try:
        graph = _Tracer().trace(network)
        return _Digest(network).graph(graph)
    except UserError:
        raise
    except Exception as error:  # whatever the network's own code raises while it is followed
        raise UserError(
            f"the network has no identity: its forward pass cannot be followed ({type(error).__name__}: {_first_line(error)}). It must not "
            "depend on the values of its input, and be made of operations of torch."
        ) from error
    finally:
        for name in set(vars(network)) - before:  # tensors the tracer met are left on the network
            delattr(network, name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:200]


def _refuse(what: str) -> UserError:
    return UserError(f"the network has no identity: {what}. A stored certificate could be taken for another network's, so it is refused.")


def _is_torchs(thing: Any) -> bool:
    """Whether a class or function is what torch (or Python) knows by its name: not a namesake, nor made while the program runs."""
    return (getattr(thing, "__module__", None) or "torch").split(".")[0] in _TRUSTED and _named(thing) is not None


def _named(thing: Any) -> str | None:
    """The name under which `thing` itself is found again, if there is one."""
    own, name = getattr(thing, "__module__", None), getattr(thing, "__name__", None)
    if not isinstance(name, str):
        return None
    # Built-in functions of torch do not say where they live, and some Python ones are made by a factory.
    places = [("torch", name), ("torch.nn.functional", name), ("torch", f"Tensor.{name}")]
    for home, path in [(own, getattr(thing, "__qualname__", name)), *places]:
        try:
            if functools.reduce(getattr, path.split("."), sys.modules[home or "torch"]) is thing:
                return f"{home or 'torch'}.{path}"
        except (KeyError, AttributeError):
            continue
    return None


def _is_layer(kind: type) -> bool:
    return kind is Normalize or (kind.__module__.startswith("torch.nn.") and _is_torchs(kind))


class _Tracer(fx.Tracer):
    """Layers of torch are leaves, and our Normalize; everything else is followed into its operations."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_layer(type(m)) and type(m) is not nn.Sequential


def _check_calls(network: nn.Module) -> None:
    """The trace begins at `forward` and takes layers for what their class says: nothing may stand between."""
    from torch.nn.modules import module as torchs

    if torchs._global_forward_hooks or torchs._global_forward_pre_hooks:
        raise _refuse("a global forward hook is registered (torch.nn.modules.module.register_module_forward_hook), which may change it")
    for name, module in network.named_modules():
        where = f"{name or 'it'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise _refuse(f"{where} is compiled TorchScript; give the module it was made of")
        if "forward" in vars(module):
            raise _refuse(f"{where} had its forward replaced; define a class instead")
        if not isinstance(module, fx.GraphModule) and type(module).__call__ is not nn.Module.__call__:
            raise _refuse(f"{where} defines __call__ itself; define forward instead")
        for hooks in _HOOKS:
            for hook in getattr(module, hooks).values():
                kind = hook if isinstance(hook, types.FunctionType) else type(hook)
                if not _is_torchs(kind):
                    raise _refuse(f"{where} has a forward hook ({getattr(kind, '__qualname__', kind)}), which may change it; remove it")


class _Digest:
    """Everything that is met goes in with its type and length, so that no two different things read the same."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.hash, self.numbers = network, hashlib.sha256(FORMAT.encode()), dict[fx.Node, int]()

    def graph(self, graph: fx.Graph) -> str:
        for number, node in enumerate(graph.nodes):
            self.numbers[node] = number
            self.put("node", node.op)
            if node.op == "call_module":
                self.module(self.network.get_submodule(str(node.target)), str(node.target))
            elif node.op == "get_attr":
                self.value(functools.reduce(getattr, str(node.target).split("."), self.network), str(node.target))
            elif node.op == "call_function":
                self.value(node.target, node.name)
            elif node.op == "call_method":
                self.put("method", str(node.target))
            self.value(node.args, node.name)
            self.value(node.kwargs, node.name)
        return self.hash.hexdigest()

    def put(self, kind: str, data: str | bytes) -> None:
        raw = data.encode() if isinstance(data, str) else data
        self.hash.update(f"{kind}:{len(raw)}:".encode())
        self.hash.update(raw)

    def module(self, module: nn.Module, where: str) -> None:
        """A leaf: its class, and every attribute it has."""
        if not _is_layer(type(module)):
            raise _refuse(f"{where} is a {type(module).__qualname__}, whose code is hidden inside a layer of torch")
        self.put("module", f"{type(module).__module__}.{type(module).__qualname__}" if type(module) is not Normalize else "Normalize")
        for name, value in sorted(vars(module).items()):
            if name not in _BOOKKEEPING:
                self.put("attribute", name)
                self.value(list(value.values()) if name in _HOOKS else value, f"{where}.{name}")  # hooks are numbered by the process

    def value(self, value: Any, where: str) -> None:
        match value:
            case fx.Node():
                self.put("result of", str(self.numbers[value]))
            case Tensor():
                self.tensor(value, where)
            case nn.Module():
                self.module(value, where)
            case None | bool() | int() | str() | types.EllipsisType():
                self.put(type(value).__name__, str(value))
            case float() | complex():
                self.put(type(value).__name__, " ".join(part.hex() for part in (value.real, value.imag)))
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                self.put(type(value).__name__, "a device" if isinstance(value, torch.device) else str(value))
            case tuple() | list():
                self.put("sequence", str(len(value)))
                for item in value:
                    self.value(item, where)
            case slice() | range():
                self.value((type(value).__name__, value.start, value.stop, value.step), where)
            case Mapping():
                self.put("mapping", str(len(value)))
                for item in value.items():  # in the order they have, which is that of the layers of a Sequential
                    self.value(item, where)
            case torch._ops.OpOverload() if value.namespace == "aten":
                self.put("operator", str(value))
            case _ if _is_torchs(value):
                self.put("function", str(_named(value)))
            case _ if _is_layer(type(value)):  # a hook of torch's own, like the one of weight_norm
                self.put("object", str(_named(type(value))))
                self.value(vars(value), where)
            case _:
                what = getattr(value, "__qualname__", None) or type(value).__qualname__
                raise _refuse(f"it depends on {what} ({where}), of which only its own code knows what it does")

    def tensor(self, tensor: Tensor, where: str) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise _refuse(f"{where} is a {type(tensor).__name__} ({tensor.layout}) without plain numbers")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self.put("tensor", f"{plain.dtype}{tuple(plain.shape)}")
        self.put("bytes", plain.flatten().view(torch.uint8).numpy().tobytes())
