"""Take a network elsewhere: ONNX for the network, VNN-LIB for l_inf properties, JSON for l2 and l1 balls (VNN-LIB has no balls).

The graph is written layer by layer, without an exporter: Sub and Div for the normalisation, BN folded into its affine layer in
float64 (what other verifiers read best), then Conv, Gemm, Relu and Flatten.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cure_ray.errors import UserError
from cure_ray.networks import Network, Normalize
from cure_ray.threats import Threat

OPSET, IR_VERSION = 13, 8  # old enough for every verifier of the last VNN-COMPs
BALL_FORMAT = "cure_ray-ball-1"


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


def vnnlib_property(image: Tensor, label: int, classes: int, eps: float, title: str) -> str:
    """An l_inf box around an image, clipped to [0, 1], in VNN-LIB. The property holds if the constraints are unsatisfiable."""
    pixels = image.detach().cpu().double().flatten()
    low, high = (pixels - eps).clamp(0, 1).tolist(), (pixels + eps).clamp(0, 1).tolist()
    lines = [f"; {title}", f"; input: pixels in channel, row, column order; robust for label {label} iff unsatisfiable", ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(low))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    lines.append("")
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        lines += [f"(assert (>= X_{i} {_decimal(a)}))", f"(assert (<= X_{i} {_decimal(b)}))"]
    others = " ".join(f"(and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label)
    return "\n".join([*lines, "", f"(assert (or {others}))", ""])


def _decimal(value: float) -> str:
    """All digits and no exponent: VNN-LIB readers differ in what they accept."""
    return f"{value:.17f}".rstrip("0").rstrip(".") if 0 < value < 1 else f"{value:.1f}"


def ball_property(image: Tensor, label: int, classes: int, threat: Threat, title: str) -> str:
    """An l2 or l1 ball as JSON: every x with norm(x - centre) <= eps and domain[0] <= x <= domain[1] must get `label`."""
    return json.dumps(
        {
            "format": BALL_FORMAT,
            "title": title,
            "norm": threat.norm,
            "eps": threat.eps,
            "domain": [0.0, 1.0],
            "shape": list(image.shape),
            "order": "channel, row, column",
            "centre": image.detach().cpu().double().flatten().tolist(),
            "label": label,
            "classes": classes,
            "property": "for all x in ball and domain, for all i != label: output[label] > output[i]",
        }
    )


def write_properties(
    directory: Path, onnx_path: Path | None, x_BCHW: Tensor, y_B: Tensor, indices: Sequence[int], classes: int, threats: Sequence[Threat],
    source: str, timeout: float = 300.0,
) -> list[Path]:  # fmt: skip
    """One file per sample and threat, and `instances.csv` (onnx, vnnlib, timeout) for the l_inf ones, as VNN-COMP tools read it."""
    written, rows = list[Path](), list[str]()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for threat in threats:
            suffix = "vnnlib" if threat.norm == "linf" else "json"
            for image, label, index in zip(x_BCHW, y_B.tolist(), indices, strict=True):
                title = f"{source}, sample {index}, {threat}"
                path = directory / f"sample{index:05d}_{threat.norm}_{threat.eps:g}.{suffix}"
                if threat.norm == "linf":
                    path.write_text(vnnlib_property(image, label, classes, threat.eps, title))
                    rows.append(f"{onnx_path.name if onnx_path else 'net.onnx'},{path.name},{timeout:g}")
                else:
                    path.write_text(ball_property(image, label, classes, threat, title) + "\n")
                written.append(path)
        if rows:
            (directory / "instances.csv").write_text("\n".join(rows) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    return written
