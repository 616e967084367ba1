"""A published network built: its layers as a description lists them, and the tensors of a file put where they belong."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize
from cure_ray.runs.checkpoints import load_weights
from cure_ray.zoo.published import Layer, Origin, Published


def _module(layer: Layer) -> nn.Module:
    if layer.layer == "normalize":
        assert layer.mean is not None
        assert layer.std is not None
        return Normalize([*map(float, layer.mean)], [*map(float, layer.std)])
    if layer.layer in ("relu", "flatten"):
        return nn.ReLU() if layer.layer == "relu" else nn.Flatten()
    assert layer.inputs is not None
    assert layer.outputs is not None
    if layer.layer == "linear":
        return nn.Linear(layer.inputs, layer.outputs)
    assert layer.kernel is not None
    return nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding)


def build(published: Published) -> Network:
    """The network a description lists, its weights not yet set; UserError if its layers do not fit each other."""
    if published.weights is None or published.input is None:
        raise UserError(f"{published.name}: its weights were never published, so there is nothing to load; its figures are claims")
    with torch.random.fork_rng(devices=[]):  # weights that nobody sees must not move the caller's random numbers
        layers = [_module(layer) for layer in published.layers]
    try:
        with torch.no_grad():
            logits = nn.Sequential(*layers)(torch.zeros(1, *published.input))
    except RuntimeError as error:
        raise UserError(f"{published.name}: its layers do not fit each other ({str(error).splitlines()[0]})") from None
    return Network(layers, published.input, logits.shape[1])


def fitted(published: Published, arrays: Mapping[str, Tensor], where: str) -> Network:
    """The network with these weights, in evaluation mode. What does not fit is named tensor by tensor.

    A file whose tensors bear the network's own names is taken as it is, else the description says which array is which tensor.
    """
    network, origins = build(published), published.weights.tensors if published.weights else {}
    own = network.state_dict()
    if not origins or set(arrays) == set(own):
        tensors = dict(arrays)
    else:
        named = {origin.array for origin in origins.values()}
        missing = [f"missing {name}" for name in named if name not in arrays]
        strange = [f"unexpected {name}" for name in arrays if name not in named]
        if missing or strange:
            raise UserError(f"{where} does not hold the weights of {published.name}: {'; '.join(sorted(missing) + sorted(strange))}")
        tensors = {name: _taken(name, origin, arrays[origin.array], own[name], where) for name, origin in origins.items()}
    wrong = [name for name, tensor in tensors.items() if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all())]
    if wrong:
        raise UserError(f"{where}: {', '.join(wrong)} holds something else than finite numbers; a network cannot be made of it")
    lossy = [name for name, tensor in tensors.items() if not torch.equal(tensor.float().to(tensor.dtype), tensor)]
    if lossy:
        raise UserError(
            f"{where}: {', '.join(lossy)} is {tensors[lossy[0]].dtype} and would be rounded; networks are certified in float32: save it so"
        )
    load_weights(network, {name: tensor.float() for name, tensor in tensors.items()}, where)
    return network.eval()


def _taken(name: str, origin: Origin, array: Tensor, own: Tensor, where: str) -> Tensor:
    """An array of the authors' file as the tensor `name` of the network."""
    shape = tuple(array.shape)
    wanted = f"{where}: {origin.array} of shape {shape} does not become {name} of shape {tuple(own.shape)}"
    if origin.shape is not None:
        if array.numel() != torch.Size(origin.shape).numel():
            raise UserError(f"{wanted}: it should hold {torch.Size(origin.shape).numel()} numbers, it holds {array.numel()}")
        array = array.reshape(origin.shape)
    if origin.axes is not None:
        if sorted(origin.axes) != list(range(array.dim())):
            raise UserError(f"{wanted}: its axes would have to be {origin.axes}")
        array = array.permute(origin.axes)
        array = array.reshape(own.shape) if array.numel() == own.numel() and array.dim() > own.dim() else array  # what Flatten flattens
    if array.shape != own.shape:
        raise UserError(f"{wanted}: it would be {tuple(array.shape)}")
    return array.contiguous()
