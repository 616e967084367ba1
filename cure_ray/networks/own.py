"""A user's own network for training: made by a factory, checked layer by layer before anything is learnt."""

import torch
from torch import nn

from cure_ray.config import NetworkConfig
from cure_ray.config.factories import load_factory, source_digest
from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.networks.sequence import Blocks, UnreadableNetworkError, read_blocks


def own_network(config: NetworkConfig, shape: tuple[int, int, int], classes: int) -> Network:
    """Call the factory and check what it returns; parameters keep their names. UserError for what cannot be trained and bounded."""
    assert config.factory is not None
    where = f"network.factory {config.factory}"
    if source_digest(config.factory) != config.code:
        raise UserError(
            f"{where}: its source is not what this experiment was made with (or trained by). Restore it; for a new experiment, "
            "name the factory without `code`"
        )
    arguments = config.arguments or {}
    try:
        made = load_factory(config.factory)(**arguments)
    except UserError:
        raise
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise UserError(f"{where}: {config.name}({shown}) raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Sequential) or type(made).forward is not nn.Sequential.forward:
        raise UserError(f"{where}: it returned {type(made).__name__}, but training needs a torch.nn.Sequential (it may hold others)")
    network = Network([], shape, classes)
    for name, module in made._modules.items():  # not named_children: that leaves out a ReLU that stands twice
        network.add_module(name, module)
    try:
        blocks = read_blocks(network.train())
    except UnreadableNetworkError as error:
        raise UserError(f"{where}: {error}") from None
    _check_layers(blocks, network, where)
    _check_shapes(network, where)
    return network.train()


def _check_layers(blocks: Blocks, network: Network, where: str) -> None:
    if not any(block.relu for block in blocks.blocks):
        raise UserError(f"{where}: a linear classifier; at least one hidden layer with a ReLU is needed")
    layers = [layer for block in blocks.blocks for layer in (block.affine, block.norm) if layer is not None]
    if len(set(map(id, layers))) != len(layers):
        raise UserError(f"{where}: a layer stands twice in the network; give each place a layer of its own")
    for block in blocks.blocks:
        norm = block.norm
        if norm is not None and (not norm.affine or not norm.track_running_stats or norm.momentum is None):
            raise UserError(
                f"{where}: {norm} after layer {block.position}: BatchNorm is trained with affine=True, track_running_stats=True and a "
                "momentum that is a number (torch's defaults)"
            )
    for name, module in network.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            raise UserError(
                f"{where}: {name or 'the network'} ({type(module).__name__}) has hooks, which bounds cannot see: leave them out"
            )
    strange = next((name for name, p in network.named_parameters() if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if strange is not None:
        raise UserError(f"{where}: {strange} is not float32 on the CPU; cure_ray moves networks itself (execution.device)")


@torch.no_grad()
def _check_shapes(network: Network, where: str) -> None:
    try:
        logits = network.eval()(torch.zeros(2, *network.input_shape))
    except RuntimeError as error:
        raise UserError(f"{where}: it does not accept images of shape {network.input_shape}: {str(error).splitlines()[0]}") from error
    if tuple(logits.shape) != (2, network.num_classes):
        raise UserError(f"{where}: it returns {tuple(logits.shape[1:])} outputs per image; the data set has {network.num_classes} classes")
