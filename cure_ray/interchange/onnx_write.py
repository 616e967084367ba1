"""A network as an ONNX file.

The graph is written layer by layer, without an exporter: Sub and Div for the normalisation, BN folded into its affine layer in
float64 (what other verifiers read best), then Conv, Gemm, Relu and Flatten.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize

OPSET, IR_VERSION = 13, 8  # old enough for every verifier of the last VNN-COMPs


def require_onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise UserError("reading and writing ONNX needs the onnx package: pip install 'cure-ray[export]'") from None
    return onnx


def _folded(affine: nn.Conv2d | nn.Linear, norm: nn.BatchNorm1d | nn.BatchNorm2d | None) -> tuple[Tensor, Tensor]:
    weight = affine.weight.detach().cpu().double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if affine.bias is None else affine.bias.detach().cpu().double()
    if norm is not None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        gain = (norm.running_var.detach().cpu().double() + norm.eps).rsqrt()
        shift = torch.zeros_like(gain)
        if norm.affine:
            gain, shift = gain * norm.weight.detach().cpu().double(), norm.bias.detach().cpu().double()
        weight = weight * gain.view(-1, *[1] * (weight.dim() - 1))
        bias = gain * (bias - norm.running_mean.detach().cpu().double()) + shift
    return weight, bias


class _Graph:
    """Nodes in a row, each reading the one before."""

    def __init__(self, onnx: Any) -> None:
        self.onnx, self.nodes, self.constants, self.last = onnx, list[Any](), list[Any](), "input"

    def add(self, operator: str, constants: Sequence[tuple[str, Tensor]] = (), **attributes: Any) -> None:
        number = len(self.nodes)
        names = []
        for name, value in constants:
            names.append(f"{operator.lower()}_{number}.{name}")
            self.constants.append(self.onnx.numpy_helper.from_array(value.float().contiguous().numpy(), names[-1]))
        output = f"{operator.lower()}_{number}"
        self.nodes.append(self.onnx.helper.make_node(operator, [self.last, *names], [output], name=output, **attributes))
        self.last = output


def onnx_model(network: Network) -> Any:
    """The ONNX model of a network in evaluation mode: input [N, C, H, W] in [0, 1], output [N, classes]."""
    onnx = require_onnx()
    graph = _Graph(onnx)
    modules = list(network)
    for position, module in enumerate(modules):
        follower = modules[position + 1] if position + 1 < len(modules) else None
        norm = follower if isinstance(follower, nn.BatchNorm1d | nn.BatchNorm2d) else None
        if isinstance(module, Normalize):
            graph.add("Sub", [("mean", module.mean.detach().cpu()[None])])
            graph.add("Div", [("std", module.std.detach().cpu()[None])])
        elif isinstance(module, nn.Conv2d):
            weight, bias = _folded(module, norm)
            top, left = (int(p) for p in module.padding)
            graph.add(
                "Conv", [("weight", weight), ("bias", bias)], kernel_shape=list(module.kernel_size), strides=list(module.stride),
                pads=[top, left, top, left],
            )  # fmt: skip
        elif isinstance(module, nn.Linear):
            weight, bias = _folded(module, norm)
            graph.add("Gemm", [("weight", weight), ("bias", bias)], transB=1)
        elif isinstance(module, nn.ReLU):
            graph.add("Relu")
        elif isinstance(module, nn.Flatten):
            graph.add("Flatten", axis=1)
        elif not (isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and isinstance(modules[position - 1], nn.Conv2d | nn.Linear)):
            raise UserError(f"cannot export layer {position}, {type(module).__name__}: only Normalize, affine layers, BN, ReLU and Flatten")
    graph.nodes[-1].output[0] = "logits"
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    proto = helper.make_graph(
        graph.nodes,
        "cure_ray",
        [helper.make_tensor_value_info("input", kind, ["N", *network.input_shape])],
        [helper.make_tensor_value_info("logits", kind, ["N", network.num_classes])],
        graph.constants,
    )
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="cure_ray")
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model)
    return model


def write_onnx(network: Network, path: Path) -> None:
    model = onnx_model(network)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.SerializeToString())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
