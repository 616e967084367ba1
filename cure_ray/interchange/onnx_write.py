"""A network as an ONNX file.

The graph is written layer by layer, without an exporter: Sub and Div for the normalisation, BN folded into its affine layer in
float64 (what other verifiers read best), then Conv, Gemm, Relu and Flatten, AveragePool and the Add of residual blocks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.networks.models import Network
from cure_ray.networks.sequence import WHOLE, folded, read_blocks

OPSET, IR_VERSION = 13, 8  # old enough for every verifier of the last VNN-COMPs


def require_onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise UserError("reading and writing ONNX needs the onnx package: pip install 'cure-ray[export]'") from None
    return onnx


class _Graph:
    """Nodes in a row, each reading the one before or, where `last` is set, another."""

    def __init__(self, onnx: Any) -> None:
        self.onnx, self.nodes, self.constants, self.last = onnx, list[Any](), list[Any](), "input"

    def add(self, operator: str, constants: Sequence[tuple[str, Tensor]] = (), other: str | None = None, **attributes: Any) -> None:
        """`other`: a second node to read."""
        number = len(self.nodes)
        names = [] if other is None else [other]
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
    sequence = read_blocks(network)
    if sequence.normalize is not None:
        graph.add("Sub", [("mean", sequence.normalize.mean.detach().cpu()[None])])
        graph.add("Div", [("std", sequence.normalize.std.detach().cpu()[None])])
    outcomes = {-1: graph.last}
    for i, block in enumerate(sequence.blocks):
        graph.last = outcomes[block.reads]
        if block.pool == WHOLE:
            graph.add("GlobalAveragePool")
        elif block.pool is not None:
            graph.add("AveragePool", kernel_shape=list(block.pool), strides=list(block.pool))
        if block.flatten:
            graph.add("Flatten", axis=1)
        weight, bias = folded(block)
        if isinstance(block.affine, nn.Conv2d):
            top, left = (int(p) for p in block.affine.padding)
            graph.add(
                "Conv", [("weight", weight), ("bias", bias)], kernel_shape=list(block.affine.kernel_size),
                strides=list(block.affine.stride), pads=[top, left, top, left],
            )  # fmt: skip
        else:
            graph.add("Gemm", [("weight", weight), ("bias", bias)], transB=1)
        if block.adds is not None:
            graph.add("Add", other=outcomes[block.adds])
        if block.relu:
            graph.add("Relu")
        outcomes[i] = graph.last
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
