"""Bound engines by name."""

import torch
from torch import nn

from cure_ray.bounds.engine import Engine
from cure_ray.errors import UserError, nearest

ENGINES = ("native", "auto_lirpa")


def make_engine(name: str, network: nn.Module, device: torch.device, input_shape: tuple[int, ...]) -> Engine:
    """A bound engine for a network. auto_LiRPA is imported only when asked for."""
    if name == "native":
        from cure_ray.bounds.native.engine import NativeEngine

        return NativeEngine(network, device, input_shape=input_shape)  # type: ignore[arg-type]  # it says what it cannot read
    if name == "auto_lirpa":
        from cure_ray.bounds.lirpa.engine import LirpaEngine

        channels, height, width = input_shape
        return LirpaEngine(network, device, (channels, height, width))
    raise UserError(f"unknown engine {name!r}.{nearest(name, ENGINES)}")


def engine_version(name: str) -> str:
    """What an engine of this name would call its version here."""
    if name == "native":
        from cure_ray.bounds.native.engine import NativeEngine

        return NativeEngine.version
    from cure_ray.bounds.lirpa import compat

    return compat.version()
