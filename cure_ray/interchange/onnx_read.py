"""Bring a network from elsewhere: convolutional and residual ONNX files as a cure_ray Network; anything else is refused by name.

Understood: Sub, Add, Div and Mul by constants before the first layer (input normalisation), Conv, Gemm, MatMul with Add,
BatchNormalization, Relu, AveragePool and GlobalAveragePool, Flatten, Reshape to [N, -1], the operators that do nothing at inference,
and the Add of two branches that part at one place: a residual block.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.interchange.onnx_operators import Reader, read
from cure_ray.interchange.onnx_write import require_onnx
from cure_ray.networks.models import Network, Normalize


def load_onnx(path: Path, image_shape: tuple[int, int, int] | None = None) -> Network:
    """Read an ONNX file. `image_shape` (C, H, W) is needed where the file leaves sizes open or takes flat inputs."""
    onnx = require_onnx()
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as error:  # protobuf and the checker raise many kinds
        raise UserError(f"{path} is not a readable ONNX file: {str(error).splitlines()[0][:200]}") from None
    graph = model.graph
    constants = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in graph.initializer}
    inputs = [i for i in graph.input if i.name not in constants]
    if len(inputs) != 1 or len(graph.output) != 1:
        raise UserError(f"{path} has {len(inputs)} inputs and {len(graph.output)} outputs; a classifier has one of each")
    rank = len(inputs[0].type.tensor_type.shape.dim)
    reader = Reader(constants, _input_shape(inputs[0], image_shape, path), takes_flat=rank == 2)
    shape, output = reader.shape, graph.output[0].name
    paths = {inputs[0].name: reader}
    unread = {inputs[0].name}
    for node in graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = _constant(onnx, node)
            continue
        paths[node.output[0]] = read(onnx, node, paths)
        unread = (unread - set(node.input)) | {node.output[0]}
    if unread != {output}:
        loose = ", ".join(repr(name) for name in sorted(unread - {output})) or repr(output)
        raise UserError(f"{path} is not one network: nothing reads {loose}, and its output is {output!r}")
    return _network(paths[output], shape, path)


def _input_shape(value: Any, given: tuple[int, int, int] | None, path: Path) -> tuple[int, int, int]:
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in value.type.tensor_type.shape.dim]
    if len(sizes) == 4 and all(s > 0 for s in sizes[1:]):
        stated = (sizes[1], sizes[2], sizes[3])
        if given is not None and given != stated:
            raise UserError(f"{path} takes images of shape {stated}, the data has {given}")
        return stated
    if given is None:
        raise UserError(f"{path} takes inputs of shape {sizes}: the image shape (C, H, W) is needed, from --data")
    if len(sizes) == 2 and sizes[1] not in (0, math.prod(given)):
        raise UserError(f"{path} takes {sizes[1]} inputs, but the images {given} have {math.prod(given)} pixels")
    if len(sizes) not in (2, 4) or any(s not in (0, g) for s, g in zip(sizes[1:], given, strict=False) if len(sizes) == 4):
        raise UserError(f"{path} takes inputs of shape {sizes}, the data has {given}")
    return given


def _constant(onnx: Any, node: Any) -> Tensor:
    for attribute in node.attribute:
        if attribute.name == "value":
            return torch.from_numpy(onnx.numpy_helper.to_array(attribute.t).copy())
        if attribute.name in ("value_float", "value_int"):
            return torch.tensor(onnx.helper.get_attribute_value(attribute))
        if attribute.name in ("value_floats", "value_ints"):
            return torch.tensor(list(onnx.helper.get_attribute_value(attribute)))
    raise UserError(f"cannot read the constant {node.output[0]!r}")


def _network(reader: Reader, shape: tuple[int, ...], path: Path) -> Network:
    channels, height, width = shape
    layers = reader.layers
    last = layers[-1] if layers else None
    if not isinstance(last, nn.Linear):
        raise UserError(f"{path} does not end in a fully connected layer, but in {type(last).__name__ if last else 'nothing'}")
    if bool((reader.scale != 1).any()) or bool((reader.shift != 0).any()):
        if bool((reader.scale <= 0).any()):
            raise UserError(f"{path} multiplies the image by a negative number: no normalisation")
        mean, std = (t.expand(channels).tolist() for t in (-reader.shift / reader.scale, 1 / reader.scale))
        layers = [Normalize(mean, std), *layers]
    return Network(layers, (channels, height, width), last.out_features).eval()
