"""Bring a network from elsewhere: convolutional and residual ONNX files as a cure_ray Network; anything else is refused by name.

Understood: Sub, Add, Div and Mul by constants before the first layer (input normalisation), Conv, Gemm, MatMul with Add,
BatchNormalization, Relu, AveragePool and GlobalAveragePool, Flatten, Reshape to [N, -1], the operators that do nothing at inference,
and the Add of two branches that part at one place: a residual block.
"""

import copy
import itertools
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.interchange.onnx_write import require_onnx
from cure_ray.networks.models import Network, Normalize
from cure_ray.networks.residual import Residual

IDLE = ("Identity", "Dropout", "Cast")
POOLS = ("AveragePool", "GlobalAveragePool", "ReduceMean")
KNOWN = ("Sub", "Add", "Div", "Mul", "Conv", "Gemm", "MatMul", "BatchNormalization", "Relu", *POOLS, "Flatten", "Reshape", *IDLE)


@dataclass
class _Reader:
    """The layers from the image to one tensor. `scale` and `shift` collect the input normalisation: x * scale + shift per channel."""

    constants: dict[str, Tensor]
    shape: tuple[int, ...]  # of one image, as it flows
    layers: list[nn.Module] = field(default_factory=list)
    takes_flat: bool = False  # the file's input is [N, pixels]
    awaits_bias: bool = False  # the last node was a MatMul
    scale: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))
    shift: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    @property
    def flat(self) -> bool:
        return len(self.shape) == 1

    def has_affine(self) -> bool:
        return any(isinstance(layer, nn.Conv2d | nn.Linear | Residual) for layer in self.layers)

    def copy(self) -> "_Reader":
        """To be read on; layers are never changed, so that several paths may share them."""
        return replace(self, layers=list(self.layers))

    def flatten(self) -> None:
        if not self.flat:
            self.layers.append(nn.Flatten())
            self.shape = (math.prod(self.shape),)


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
    reader = _Reader(constants, _input_shape(inputs[0], image_shape, path), takes_flat=rank == 2)
    shape, output = reader.shape, graph.output[0].name
    paths = {inputs[0].name: reader}
    unread = {inputs[0].name}
    for node in graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = _constant(onnx, node)
            continue
        paths[node.output[0]] = _read(onnx, node, paths)
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


def _refuse(node: Any, why: str) -> UserError:
    return UserError(f"cannot read the ONNX operator {node.op_type} ({node.name or node.output[0]}): {why}")


def _read(onnx: Any, node: Any, paths: dict[str, _Reader]) -> _Reader:
    """The path to what one node gives."""
    kind = node.op_type
    if kind not in KNOWN or node.domain not in ("", "ai.onnx"):
        hint = "; certify the logits, cut it off" if kind in ("Softmax", "LogSoftmax") else ""
        raise _refuse(node, f"only networks of {', '.join(KNOWN)} are read{hint}")
    sources = [name for name in node.input if name in paths]
    if len(sources) == 2 and kind == "Add":
        return _join(node, paths[sources[0]], paths[sources[1]])
    if len(sources) != 1:
        raise _refuse(node, f"it reads {len(sources) or 'none'} of the layers before it; only Add joins two, others read one")
    current = sources[0]
    reader = paths[current].copy()
    others = [reader.constants.get(name) for name in node.input if name and name != current]
    if any(o is None for o in others):
        raise _refuse(node, "it reads something that is neither a layer before it nor a constant")
    values = [o for o in others if o is not None]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    reader.awaits_bias = reader.awaits_bias and kind in ("Add", *IDLE)
    if kind in ("Sub", "Add", "Div", "Mul"):
        _arithmetic(node, reader, values[0], first=node.input[0] == current)
    elif kind == "Conv":
        _convolution(node, reader, values, attributes)
    elif kind in ("Gemm", "MatMul"):
        _dense(node, reader, values, attributes, first=node.input[0] == current)
    elif kind == "BatchNormalization":
        _batch_norm(node, reader, values, attributes)
    elif kind == "Relu":
        reader.layers.append(nn.ReLU())
    elif kind in POOLS:
        _average(node, reader, values, attributes)
    elif kind == "Flatten":
        if attributes.get("axis", 1) != 1:
            raise _refuse(node, f"axis {attributes['axis']}; only everything but the batch can be flattened")
        reader.flatten()
    elif kind == "Reshape":
        _reshape(node, reader, values[0])
    elif kind == "Cast" and attributes.get("to") not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE):
        raise _refuse(node, "only a cast to floating point leaves the numbers as they are")
    elif kind == "Dropout" and len(values) > 1 and bool(values[1].any()):
        raise _refuse(node, "it is in training mode")
    return reader


def _join(node: Any, one: _Reader, other: _Reader) -> _Reader:
    """The sum of two branches as a residual block at the place where they part. The longer one is the main branch."""
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(one.layers, other.layers, strict=False)))
    if one.shape != other.shape:
        raise _refuse(node, f"it adds branches of shapes {one.shape} and {other.shape}, which differ")
    same_input = torch.equal(one.scale, other.scale) and torch.equal(one.shift, other.shift)
    if not any(isinstance(layer, nn.Conv2d | nn.Linear) for layer in one.layers[:shared]) or not same_input:
        raise _refuse(node, "its branches part before the first layer; a residual block must follow one")
    main, shortcut = sorted((one.layers[shared:], other.layers[shared:]), key=len, reverse=True)
    if any(isinstance(layer, nn.ReLU | Residual) for layer in shortcut) or not main:
        raise _refuse(
            node, "an unknown join: of two branches one must be nothing, or one layer with BatchNormalization if any (a shortcut)"
        )
    joined = one.copy()
    joined.layers, joined.awaits_bias = [*one.layers[:shared], Residual(main, shortcut)], False
    return joined


def _average(node: Any, reader: _Reader, values: list[Tensor], attributes: dict[str, Any]) -> None:
    if reader.flat:
        raise _refuse(node, "average pooling needs images")
    if node.op_type != "AveragePool":
        axes = values[0].tolist() if values else list(attributes.get("axes", []))
        if node.op_type == "ReduceMean" and sorted(axis % 4 for axis in axes) != [2, 3]:
            raise _refuse(node, f"only the mean over height and width is read, not over the axes {axes}")
        reader.layers.append(nn.AdaptiveAvgPool2d(1))
        reader.shape = (reader.shape[0], 1, 1)
        if not attributes.get("keepdims", 1):
            reader.flatten()
        return
    window, strides = list(attributes["kernel_shape"]), list(attributes.get("strides", [1, 1]))
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    plain = mode in ("NOTSET", "VALID") and not any(attributes.get("pads", [])) and not attributes.get("ceil_mode", 0)
    if len(window) != 2 or strides != window or not plain or any(d != 1 for d in attributes.get("dilations", [])):
        raise _refuse(node, "average pooling is read over windows that do not overlap, without padding")
    reader.layers.append(nn.AvgPool2d((window[0], window[1])))
    reader.shape = (reader.shape[0], *(n // k for n, k in zip(reader.shape[1:], window, strict=True)))


def _arithmetic(node: Any, reader: _Reader, value: Tensor, first: bool) -> None:
    """Input normalisation, or the bias of a MatMul before it."""
    value = value.double()
    awaited, reader.awaits_bias = reader.awaits_bias, False
    last = reader.layers[-1] if reader.layers else None
    if reader.has_affine():
        if node.op_type == "Add" and isinstance(last, nn.Linear) and awaited and value.numel() == last.out_features:
            biased = copy.deepcopy(last)  # another path may read the product without it
            biased.bias.data = value.flatten().float()
            reader.layers[-1] = biased
            return
        raise _refuse(node, "arithmetic is understood before the first layer (normalisation), and Add directly after MatMul")
    channels = reader.shape[0] if not reader.flat else 1
    if value.numel() not in (1, channels) or (value.numel() > 1 and value.dim() >= 3 and value.shape[-3] != channels):
        raise _refuse(node, f"a normalisation has one constant, or one per channel; this one has shape {tuple(value.shape)}")
    value = value.flatten()
    if not first and node.op_type in ("Sub", "Div"):
        raise _refuse(node, "a constant minus, or divided by, the image is no normalisation")
    if node.op_type in ("Div", "Mul") and bool((value == 0).any()):
        raise _refuse(node, "division or multiplication by zero")
    if node.op_type in ("Sub", "Add"):
        reader.shift = reader.shift + (value if node.op_type == "Add" else -value)
    else:
        factor = value if node.op_type == "Mul" else 1 / value
        reader.scale, reader.shift = reader.scale * factor, reader.shift * factor


def _convolution(node: Any, reader: _Reader, values: list[Tensor], attributes: dict[str, Any]) -> None:
    weight = values[0].float()
    if reader.flat or weight.dim() != 4 or weight.shape[1] * attributes.get("group", 1) != reader.shape[0]:
        raise _refuse(node, f"a 2-D convolution of {tuple(weight.shape)} does not fit the input {reader.shape}")
    if attributes.get("group", 1) != 1 or any(d != 1 for d in attributes.get("dilations", [])):
        raise _refuse(node, "neither groups nor dilation are supported")
    pads = list(attributes.get("pads", [0, 0, 0, 0]))
    mode = attributes.get("auto_pad", b"NOTSET").decode()
    if mode not in ("NOTSET", "VALID") or pads[:2] != pads[2:]:
        raise _refuse(node, f"only symmetric explicit padding is supported, got auto_pad={mode}, pads={pads}")
    stride = tuple(attributes.get("strides", [1, 1]))
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], (weight.shape[2], weight.shape[3]), (stride[0], stride[1]), (pads[0], pads[1]))
    layer.weight.data = weight
    assert layer.bias is not None
    layer.bias.data = values[1].float() if len(values) > 1 else torch.zeros(len(weight))
    height, width = ((s + 2 * p - k) // t + 1 for s, p, k, t in zip(reader.shape[1:], pads[:2], weight.shape[2:], stride, strict=True))
    reader.layers.append(layer)
    reader.shape = (len(weight), height, width)


def _dense(node: Any, reader: _Reader, values: list[Tensor], attributes: dict[str, Any], first: bool) -> None:
    if not first or attributes.get("transA", 0):
        raise _refuse(node, "only input times weight is supported, not weight times input")
    weight = values[0].float() * attributes.get("alpha", 1.0)
    weight = weight if attributes.get("transB", 0) else weight.t()
    if reader.takes_flat and not reader.has_affine():
        reader.flatten()
    if not reader.flat:
        raise _refuse(node, "a fully connected layer needs a Flatten or Reshape before it")
    if weight.dim() != 2 or weight.shape[1] != reader.shape[0]:
        raise _refuse(node, f"a matrix of {tuple(weight.shape)} does not fit {reader.shape[0]} inputs")
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight.contiguous()
    bias = values[1].float() * attributes.get("beta", 1.0) if len(values) > 1 else torch.zeros(1)
    layer.bias.data = bias.flatten().expand(len(weight)).clone()
    reader.awaits_bias = node.op_type == "MatMul"
    reader.layers.append(layer)
    reader.shape = (len(weight),)


def _batch_norm(node: Any, reader: _Reader, values: list[Tensor], attributes: dict[str, Any]) -> None:
    behind = (nn.Conv2d, nn.Linear, nn.ReLU, Residual)  # the last two at the beginning of a residual block
    if not reader.has_affine() or not isinstance(reader.layers[-1], behind) or attributes.get("training_mode", 0):
        raise _refuse(node, "BatchNormalization is understood in inference mode, after Conv, Gemm, MatMul with Add, or an Add of branches")
    kind = nn.BatchNorm1d if reader.flat else nn.BatchNorm2d
    norm = kind(len(values[0]), eps=float(attributes.get("epsilon", 1e-5)))
    gain, shift, mean, variance = (v.float() for v in values)
    norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var = gain, shift, mean, variance
    reader.layers.append(norm)


def _reshape(node: Any, reader: _Reader, target: Tensor) -> None:
    sizes, count = target.tolist(), math.prod(reader.shape)
    if len(sizes) == 2 and sizes[1] in (-1, count) and sizes[0] in (-1, 0, 1):
        reader.flatten()
    elif len(sizes) == 4 and not reader.has_affine() and all(s in (-1, 0, r) for s, r in zip(sizes[1:], reader.shape, strict=False)):
        return  # flat pixels back into the image they are
    else:
        raise _refuse(node, f"only a reshape to [N, -1] is understood, got {sizes}")


def _network(reader: _Reader, shape: tuple[int, ...], path: Path) -> Network:
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
