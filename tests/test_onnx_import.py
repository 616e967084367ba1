from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.errors import UserError
from cure_ray.interchange import load_onnx, write_onnx
from cure_ray.networks.models import Normalize, cnn7, conv_small, mlp
from cure_ray.networks.residual import resnet_small
from cure_ray.threats.balls import Ball
from tests.test_export import run_onnx, shaken

RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def save(path: Path, nodes: Sequence[Any], constants: dict[str, np.ndarray], shape: Sequence[Any], output: str = "out") -> Path:
    graph = helper.make_graph(
        list(nodes), "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["N", "K"])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.save(model, str(path))
    return path


def same_logits(path: Path, shape: tuple[int, int, int], flat: bool = False) -> None:
    network = load_onnx(path, shape)
    x = torch.rand(4, *shape)
    with torch.no_grad():
        expected = network(x)
    found = run_onnx(path, x.flatten(1) if flat else x)
    assert float((found - expected).abs().max()) <= 1e-4 * (1 + float(expected.abs().max()))


@pytest.mark.parametrize("make", [conv_small, mlp, cnn7, resnet_small])
def test_what_is_exported_comes_back_with_the_same_logits_and_can_be_bounded(make: Any, tmp_path: Path) -> None:
    network = shaken(make((3, 12, 12), 10, (0.4, 0.5, 0.3), (0.2, 0.3, 0.25), 0.2))
    write_onnx(network, tmp_path / "net.onnx")
    back = load_onnx(tmp_path / "net.onnx")
    x = torch.rand(5, 3, 12, 12)
    with torch.no_grad():
        assert torch.allclose(back(x), network(x), atol=1e-4, rtol=1e-4)
    engine = NativeEngine(back)
    assert engine.margins(engine.problem(x, torch.zeros(5, dtype=torch.long), Ball("linf", 0.01)), "ibp").shape == (5, 9)


def test_a_foreign_style_network_with_batch_norm_matmul_and_reshape_is_read(tmp_path: Path) -> None:
    constants = {
        "mean": array(1, 3, 1, 1), "std": np.abs(array(1, 3, 1, 1)) + 0.5, "w": array(4, 3, 3, 3), "b": array(4),
        "g": array(4), "s": array(4), "m": array(4), "v": np.abs(array(4)) + 0.1, "to": np.array([-1, 64], np.int64),
        "W": array(64, 6), "B": array(6), "W2": array(5, 6), "b2": array(5),
    }  # fmt: skip
    nodes = [
        helper.make_node("Sub", ["x", "mean"], ["a"]),
        helper.make_node("Div", ["a", "std"], ["b0"]),
        helper.make_node("Conv", ["b0", "w", "b"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "g", "s", "m", "v"], ["d"], epsilon=1e-4),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Reshape", ["e", "to"], ["f"]),
        helper.make_node("MatMul", ["f", "W"], ["h"]),
        helper.make_node("Add", ["h", "B"], ["i"]),
        helper.make_node("Relu", ["i"], ["j"]),
        helper.make_node("Gemm", ["j", "W2", "b2"], ["out"], transB=1),
    ]
    path = save(tmp_path / "f.onnx", nodes, constants, ["N", 3, 8, 8])
    same_logits(path, (3, 8, 8))
    network = load_onnx(path)
    assert isinstance(network[0], Normalize)
    assert isinstance(network[2], nn.BatchNorm2d)
    NativeEngine(network)


@pytest.mark.parametrize(
    ("weight", "alpha", "read"),
    [(0.1, 1.0, False), (0.5, 1.0, True), (np.float32(0.1), 0.3, False), (np.float32(0.1), 0.5, True), (1e300, 1.0, False)],
)
def test_numbers_that_float32_cannot_hold_are_another_network_and_refused(weight: float, alpha: float, read: bool, tmp_path: Path) -> None:
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "w"], ["out"], alpha=alpha)]
    path = save(tmp_path / "net.onnx", nodes, {"w": np.full((4, 2), weight, np.float64)}, ["N", 1, 2, 2])
    if read:
        assert float(load_onnx(path)[-1].weight.detach().max()) == weight * alpha
    else:
        with pytest.raises(UserError, match="need more than float32"):
            load_onnx(path)


def test_flat_inputs_take_the_image_shape_from_the_data(tmp_path: Path) -> None:
    constants = {"W": array(12, 6), "B": array(6), "W2": array(6, 3), "half": np.array(0.5, np.float32)}
    nodes = [
        helper.make_node("Mul", ["x", "half"], ["s"]),
        helper.make_node("MatMul", ["s", "W"], ["a"]),
        helper.make_node("Add", ["B", "a"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "W2"], ["out"]),
    ]
    path = save(tmp_path / "flat.onnx", nodes, constants, ["N", 12])
    with pytest.raises(UserError, match="image shape"):
        load_onnx(path)
    with pytest.raises(UserError, match="12 inputs"):
        load_onnx(path, (1, 5, 5))
    same_logits(path, (1, 3, 4), flat=True)


def residual_file(path: Path, **changes: Any) -> Path:
    """As exporters write residual networks: BN apart, a projection, a block whose sum names the shortcut first, the mean of the image."""
    constants = {
        "k0": array(3, 2, 3, 3), "k1": array(4, 3, 3, 3), "k2": array(4, 4, 3, 3), "kp": array(4, 3, 1, 1), "k3": array(2, 4, 1, 1),
        "k4": array(4, 2, 3, 3), "W": array(5, 4), "B": array(5), "g": array(4), "s": array(4), "m": array(4), "v": np.abs(array(4)) + 0.2,
        "mean": array(1, 2, 1, 1),
    }  # fmt: skip
    same, half = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}, {"strides": [2, 2]}
    nodes = {
        "n": helper.make_node("Sub", ["x", "mean"], ["n"]),
        "c0": helper.make_node("Conv", ["n", "k0"], ["c0"], **same),
        "r0": helper.make_node("Relu", ["c0"], ["r0"]),
        "p": helper.make_node("Conv", ["r0", "kp"], ["p"], **half),
        "pn": helper.make_node("BatchNormalization", ["p", "g", "s", "m", "v"], ["pn"]),
        "c1": helper.make_node("Conv", ["r0", "k1"], ["c1"], **same, **half),
        "n1": helper.make_node("BatchNormalization", ["c1", "s", "g", "m", "v"], ["n1"]),
        "r1": helper.make_node("Relu", ["n1"], ["r1"]),
        "c2": helper.make_node("Conv", ["r1", "k2"], ["c2"], **same),
        "a": helper.make_node("Add", ["pn", "c2"], ["a"]),
        "r2": helper.make_node("Relu", ["a"], ["r2"]),
        "c3": helper.make_node("Conv", ["r2", "k3"], ["c3"]),
        "r3": helper.make_node("Relu", ["c3"], ["r3"]),
        "c4": helper.make_node("Conv", ["r3", "k4"], ["c4"], **same),
        "b": helper.make_node("Add", ["r2", "c4"], ["b"]),
        "r4": helper.make_node("Relu", ["b"], ["r4"]),
        "mean": helper.make_node("GlobalAveragePool", ["r4"], ["means"]),
        "f": helper.make_node("Flatten", ["means"], ["f"]),
        "out": helper.make_node("Gemm", ["f", "W", "B"], ["out"], transB=1),
        **changes,
    }
    return save(path, [node for node in nodes.values() if node is not None], constants, ["N", 2, 8, 8])


def test_a_foreign_residual_network_is_read_bounded_and_written_again(tmp_path: Path) -> None:
    path = residual_file(tmp_path / "r.onnx")
    same_logits(path, (2, 8, 8))
    network, x = load_onnx(path), torch.rand(3, 2, 8, 8)
    assert [type(layer).__name__ for layer in network].count("Residual") == 2
    engine = NativeEngine(network)
    y = network(x).argmax(1)
    for norm in ("linf", "l2", "l1"):
        margins = engine.margins(engine.problem(x, y, Ball(norm, 1e-5)), "crown")
        logits = network(x)
        clean = logits.gather(1, y[:, None]) - logits
        assert torch.allclose(margins.amin(1).float(), clean.scatter(1, y[:, None], torch.inf).amin(1), atol=0.05, rtol=0.01)
    write_onnx(network, tmp_path / "again.onnx")
    assert torch.allclose(run_onnx(tmp_path / "again.onnx", x), run_onnx(path, x), atol=1e-4, rtol=1e-4)


def test_pooling_is_read_in_the_forms_exporters_give_it(tmp_path: Path) -> None:
    for name, node in {
        "mean": helper.make_node("ReduceMean", ["r4"], ["means"], axes=[-1, -2]),
        "flat": helper.make_node("ReduceMean", ["r4"], ["means"], axes=[2, 3], keepdims=0),
        "pool": helper.make_node("AveragePool", ["r4"], ["means"], kernel_shape=[4, 4], strides=[4, 4]),
    }.items():
        same_logits(residual_file(tmp_path / f"{name}.onnx", mean=node), (2, 8, 8))


def test_a_norm_behind_a_sum_is_read(tmp_path: Path) -> None:
    path = residual_file(tmp_path / "norm.onnx", r2=helper.make_node("BatchNormalization", ["a", "g", "s", "m", "v"], ["r2"]))
    same_logits(path, (2, 8, 8))
    NativeEngine(load_onnx(path))  # compares what it compiled with the network


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"a": helper.make_node("Mul", ["pn", "c2"], ["a"])}, "only Add joins two"),
        ({"a": helper.make_node("Add", ["p", "x"], ["a"])}, "shapes"),
        ({"b": helper.make_node("Add", ["r2", "r2"], ["b"])}, "unknown join"),
        ({"b": helper.make_node("Concat", ["r2", "c4"], ["b"], axis=1)}, "Concat"),
        ({"c4": helper.make_node("Relu", ["r2"], ["c4"])}, "nothing reads 'r3'"),
        ({"p": helper.make_node("Relu", ["p0"], ["p"]), "c0": helper.make_node("Conv", ["n", "k0"], ["c0"], pads=[1, 1, 1, 1]),
          "r0": helper.make_node("Relu", ["c0"], ["r0"])}, "readable"),
        ({"mean": helper.make_node("AveragePool", ["r4"], ["means"], kernel_shape=[3, 3], strides=[1, 1])}, "do not overlap"),
        ({"mean": helper.make_node("ReduceMean", ["r4"], ["means"], axes=[1])}, "height and width"),
    ],
)  # fmt: skip
def test_joins_and_pooling_that_are_not_understood_are_a_sentence(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        load_onnx(residual_file(tmp_path / "bad.onnx", **changes))


def test_a_join_of_two_long_branches_and_a_loop_are_refused(tmp_path: Path) -> None:
    both = residual_file(tmp_path / "two.onnx", pn=helper.make_node("Relu", ["p"], ["pn"]))
    with pytest.raises(UserError, match="unknown join"):
        load_onnx(both)
    kinds = {"k": TensorProto.INT64, "go": TensorProto.BOOL, "on": TensorProto.BOOL, "h": TensorProto.FLOAT, "i": TensorProto.FLOAT}
    infos = {name: helper.make_tensor_value_info(name, kind, None if name in "hi" else []) for name, kind in kinds.items()}
    steps = [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["h"], ["i"])]
    body = helper.make_graph(steps, "body", [infos[n] for n in ("k", "go", "h")], [infos[n] for n in ("on", "i")])
    with pytest.raises(UserError, match="operator Loop"):
        load_onnx(residual_file(tmp_path / "loop.onnx", r4=helper.make_node("Loop", ["", "", "b"], ["r4"], body=body)))


LAST = helper.make_node("Gemm", ["z", "W", "B"], ["out"])


@pytest.mark.parametrize(
    ("nodes", "word"),
    [
        ([helper.make_node("Sigmoid", ["x"], ["z"])], "Sigmoid"),
        ([helper.make_node("MaxPool", ["x"], ["z"], kernel_shape=[2, 2])], "MaxPool"),
        ([helper.make_node("Transpose", ["x"], ["z"], perm=[0, 2, 3, 1])], "Transpose"),
        ([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Add", ["x", "y"], ["z"])], "Add"),
        ([helper.make_node("Conv", ["x", "K"], ["z"], dilations=[2, 2])], "dilation"),
        ([helper.make_node("Conv", ["x", "K"], ["z"], pads=[0, 0, 1, 1])], "padding"),
        ([helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Sub", ["c", "f"], ["z"])], "no normalisation"),
        ([helper.make_node("Reshape", ["x", "odd"], ["z"])], "reshape"),
        ([helper.make_node("Cast", ["x"], ["z"], to=TensorProto.INT32)], "Cast"),
        ([helper.make_node("Gemm", ["x", "W", "B"], ["z"])], "Flatten"),
    ],
)
def test_what_is_not_a_sequence_of_known_operators_is_refused_by_name(nodes: list[Any], word: str, tmp_path: Path) -> None:
    constants = {"W": array(16, 3), "B": array(3), "K": array(2, 1, 2, 2), "c": np.array(1.0, np.float32)}
    constants["odd"] = np.array([-1, 8, 2], np.int64)
    path = save(tmp_path / "bad.onnx", [*nodes, LAST], constants, ["N", 1, 4, 4])
    with pytest.raises(UserError, match=word):
        load_onnx(path)


def test_a_softmax_at_the_end_is_refused_with_advice(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Flatten", ["x"], ["z"]),
        helper.make_node("Gemm", ["z", "W"], ["l"]),
        helper.make_node("Softmax", ["l"], ["out"]),
    ]
    with pytest.raises(UserError, match="cut it off"):
        load_onnx(save(tmp_path / "s.onnx", nodes, {"W": array(16, 3)}, ["N", 1, 4, 4]))


def test_a_file_that_is_not_onnx_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"not a model")
    with pytest.raises(UserError, match="not a readable ONNX file"):
        load_onnx(tmp_path / "no.onnx")
    with pytest.raises(UserError, match="does not exist"):
        load_onnx(tmp_path / "missing.onnx")
