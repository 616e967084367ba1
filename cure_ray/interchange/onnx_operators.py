"""The operators of an ONNX graph, each as what it adds to the layers that lead to a tensor; what cannot be read is refused by name."""

import copy
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.networks.residual import Residual

IDLE = ("Identity", "Dropout", "Cast")
POOLS = ("AveragePool", "GlobalAveragePool", "ReduceMean")
KNOWN = ("Sub", "Add", "Div", "Mul", "Conv", "Gemm", "MatMul", "BatchNormalization", "Relu", *POOLS, "Flatten", "Reshape", *IDLE)


@dataclass
class Reader:
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

    def copy(self) -> "Reader":
        """To be read on; layers are never changed, so that several paths may share them."""
        return replace(self, layers=list(self.layers))

    def flatten(self) -> None:
        if not self.flat:
            self.layers.append(nn.Flatten())
            self.shape = (math.prod(self.shape),)


def _refuse(node: Any, why: str) -> UserError:
    return UserError(f"cannot read the ONNX operator {node.op_type} ({node.name or node.output[0]}): {why}")


def _single(node: Any, value: Tensor) -> Tensor:
    """Numbers of a layer in float32, in which networks are certified; what would have to be rounded is another network."""
    single = value.float()
    if bool(((single.to(value.dtype) != value) & ~value.isnan()).any()):  # NaN is for the certifier to tell
        raise _refuse(node, "its numbers (times alpha or beta, if it has them) need more than float32, in which networks are certified")
    return single


def read(onnx: Any, node: Any, paths: dict[str, Reader]) -> Reader:
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


def _join(node: Any, one: Reader, other: Reader) -> Reader:
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


def _average(node: Any, reader: Reader, values: list[Tensor], attributes: dict[str, Any]) -> None:
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


def _arithmetic(node: Any, reader: Reader, value: Tensor, first: bool) -> None:
    """Input normalisation, or the bias of a MatMul before it."""
    value = value.double()
    awaited, reader.awaits_bias = reader.awaits_bias, False
    last = reader.layers[-1] if reader.layers else None
    if reader.has_affine():
        if node.op_type == "Add" and isinstance(last, nn.Linear) and awaited and value.numel() == last.out_features:
            biased = copy.deepcopy(last)  # another path may read the product without it
            biased.bias.data = _single(node, value.flatten())
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


def _convolution(node: Any, reader: Reader, values: list[Tensor], attributes: dict[str, Any]) -> None:
    weight = _single(node, values[0])
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
    layer.bias.data = _single(node, values[1]) if len(values) > 1 else torch.zeros(len(weight))
    height, width = ((s + 2 * p - k) // t + 1 for s, p, k, t in zip(reader.shape[1:], pads[:2], weight.shape[2:], stride, strict=True))
    reader.layers.append(layer)
    reader.shape = (len(weight), height, width)


def _dense(node: Any, reader: Reader, values: list[Tensor], attributes: dict[str, Any], first: bool) -> None:
    if not first or attributes.get("transA", 0):
        raise _refuse(node, "only input times weight is supported, not weight times input")
    weight = _single(node, values[0].double() * attributes.get("alpha", 1.0))
    weight = weight if attributes.get("transB", 0) else weight.t()
    if reader.takes_flat and not reader.has_affine():
        reader.flatten()
    if not reader.flat:
        raise _refuse(node, "a fully connected layer needs a Flatten or Reshape before it")
    if weight.dim() != 2 or weight.shape[1] != reader.shape[0]:
        raise _refuse(node, f"a matrix of {tuple(weight.shape)} does not fit {reader.shape[0]} inputs")
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight.contiguous()
    bias = _single(node, values[1].double() * attributes.get("beta", 1.0)) if len(values) > 1 else torch.zeros(1)
    layer.bias.data = bias.flatten().expand(len(weight)).clone()
    reader.awaits_bias = node.op_type == "MatMul"
    reader.layers.append(layer)
    reader.shape = (len(weight),)


def _batch_norm(node: Any, reader: Reader, values: list[Tensor], attributes: dict[str, Any]) -> None:
    behind = (nn.Conv2d, nn.Linear, nn.ReLU, Residual)  # the last two at the beginning of a residual block
    if not reader.has_affine() or not isinstance(reader.layers[-1], behind) or attributes.get("training_mode", 0):
        raise _refuse(node, "BatchNormalization is understood in inference mode, after Conv, Gemm, MatMul with Add, or an Add of branches")
    kind = nn.BatchNorm1d if reader.flat else nn.BatchNorm2d
    norm = kind(len(values[0]), eps=float(attributes.get("epsilon", 1e-5)))
    gain, shift, mean, variance = (_single(node, v) for v in values)
    norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var = gain, shift, mean, variance
    reader.layers.append(norm)


def _reshape(node: Any, reader: Reader, target: Tensor) -> None:
    sizes, count = target.tolist(), math.prod(reader.shape)
    if len(sizes) == 2 and sizes[1] in (-1, count) and sizes[0] in (-1, 0, 1):
        reader.flatten()
    elif len(sizes) == 4 and not reader.has_affine() and all(s in (-1, 0, r) for s, r in zip(sizes[1:], reader.shape, strict=False)):
        return  # flat pixels back into the image they are
    else:
        raise _refuse(node, f"only a reshape to [N, -1] is understood, got {sizes}")
