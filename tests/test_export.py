import json
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from cure_ray.cli import app
from cure_ray.config import Experiment, parse_experiment
from cure_ray.errors import UserError
from cure_ray.interchange import Exported, ball_property, vnnlib_property, write_onnx, write_properties
from cure_ray.networks.models import Network, cnn7, conv_small, mlp
from cure_ray.runs.run import train_run
from cure_ray.threats.balls import Ball


def shaken(network: Network) -> Network:
    """BN statistics and gains away from their defaults, so that folding has something to do."""
    torch.manual_seed(3)
    for module in network:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network.eval()


def run_onnx(path: Path, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize(
    "network",
    [
        conv_small((1, 8, 8), 10, (0.0,), (1.0,)),
        conv_small((3, 12, 12), 7, (0.4, 0.5, 0.3), (0.2, 0.3, 0.25), batch_norm=False),
        mlp((1, 8, 8), 10, (0.2,), (0.5,)),
        cnn7((3, 16, 16), 10, (0.4, 0.5, 0.3), (0.2, 0.3, 0.25), width=0.1),
    ],
    ids=["conv-small", "conv-small without BN, normalised", "mlp", "cnn7"],
)
def test_onnxruntime_computes_the_same_logits(network: Network, tmp_path: Path) -> None:
    shaken(network)
    write_onnx(network, tmp_path / "sub" / "net.onnx")
    x = torch.rand(6, *network.input_shape)
    with torch.no_grad():
        expected = network(x)
    assert float((run_onnx(tmp_path / "sub" / "net.onnx", x) - expected).abs().max()) <= 1e-5 * (1 + float(expected.abs().max()))


def test_a_layer_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    network = Network([nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)], (1, 2, 2), 2)
    with pytest.raises(UserError, match="Tanh"):
        write_onnx(network, tmp_path / "net.onnx")


def test_a_vnnlib_property_is_the_clipped_box_and_the_negated_claim() -> None:
    image = torch.tensor([[[0.05, 0.5], [1.0, 0.98]]])
    text = vnnlib_property(image, 1, 3, 0.1, "title")
    bounds = {(k, int(i)): float(v) for k, i, v in re.findall(r"\(assert \(([<>]=) X_(\d+) ([\d.]+)\)\)", text)}
    assert bounds[(">=", 0)] == 0.0
    assert bounds[("<=", 0)] == pytest.approx(0.15, abs=1e-9)
    assert (bounds[(">=", 1)], bounds[("<=", 1)]) == pytest.approx((0.4, 0.6), abs=1e-9)
    assert bounds[("<=", 2)] == 1.0
    assert bounds[(">=", 3)] == pytest.approx(0.88, abs=1e-6)
    assert len(bounds) == 8
    assert "(assert (or (and (>= Y_0 Y_1)) (and (>= Y_2 Y_1))))" in text
    assert text.count("declare-const X_") == 4
    assert text.count("declare-const Y_") == 3


def test_an_l2_ball_is_written_as_documented_json() -> None:
    found = json.loads(ball_property(torch.full((1, 2, 2), 0.25), 3, 10, Ball("l2", 0.5), "title"))
    assert found["format"] == "cure_ray-ball-1"
    assert (found["norm"], found["eps"], found["label"], found["shape"], found["domain"]) == ("l2", 0.5, 3, [1, 2, 2], [0.0, 1.0])
    assert found["centre"] == [0.25] * 4


def test_one_file_per_sample_and_threat_and_instances_for_the_boxes(tmp_path: Path) -> None:
    x, y = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 1])
    written = write_properties(tmp_path, Exported(2, "x", Path("a/net.onnx")), x, y, [4, 5, 6], [Ball("linf", 0.1), Ball("l1", 1.0)])
    assert len(written) == 6
    assert (tmp_path / "instances.csv").read_text().splitlines() == [f"net.onnx,sample0000{i}_linf_0.1.vnnlib,300" for i in (4, 5, 6)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment: Experiment = parse_experiment(
        {"dataset": {"name": "digits"}, "network": {"name": "mlp", "width": 0.2}, "training": {"method": "natural", "epochs": 1}}
    )
    directory = tmp_path_factory.mktemp("run") / "r"
    train_run(experiment, directory, quiet=True)
    return directory


def test_the_export_command_writes_network_and_properties(run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(run), "--onnx", str(tmp_path / "net.onnx"), "--vnnlib", str(tmp_path / "props"), "--samples", "2"]
    result = CliRunner().invoke(app, [*arguments, "--threats", "linf=0.1,l2=0.5"])
    assert result.exit_code == 0, result.output
    assert run_onnx(tmp_path / "net.onnx", torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert len(list((tmp_path / "props").glob("*.vnnlib"))) == 2
    assert len(list((tmp_path / "props").glob("*.json"))) == 2


def test_the_export_command_wants_to_know_what_to_write(run: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run)])
    assert isinstance(result.exception, UserError)
    assert "--onnx" in str(result.exception)


def test_vnnlib_bounds_read_back_contain_the_box() -> None:
    image = torch.from_numpy(np.random.default_rng(0).random((1, 3, 3), dtype=np.float32))
    text = vnnlib_property(image, 0, 2, 1 / 255, "t")
    low = [float(v) for v in re.findall(r">= X_\d+ ([\d.]+)", text)]
    assert np.allclose(low, np.clip(image.double().numpy().ravel() - 1 / 255, 0, 1), atol=1e-15)
