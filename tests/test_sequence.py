"""The one reader of networks and the one fold of BN: training, the native engine and ONNX see the same function."""

import onnxruntime
import pytest
import torch
from torch import nn

from cure_ray.bounds.native.compiled import compile_network, flatten_images
from cure_ray.errors import UserError
from cure_ray.interchange import onnx_model
from cure_ray.networks.models import Network, Normalize
from cure_ray.networks.sequence import read_blocks
from cure_ray.training.folding import clean_forward, fold_batch, fold_running


def network(last_norm: bool = False) -> Network:
    """Nested, with layers that do nothing, a convolution without bias, and BN away from its defaults."""
    torch.manual_seed(0)
    stem = nn.Sequential(Normalize([0.3, 0.5], [0.2, 0.7]), nn.Conv2d(2, 3, 3, 2, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU())
    head = [nn.Identity(), nn.Flatten(), nn.Linear(27, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)]
    found = Network([stem, nn.Sequential(*head, *([nn.BatchNorm1d(4)] if last_norm else []))], (2, 6, 6), 4)
    for module in found.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.3, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return found


@pytest.mark.parametrize("last_norm", [False, True])
def test_training_engine_and_onnx_compute_what_the_network_computes(last_norm: bool) -> None:
    judged, x = network(last_norm).eval(), torch.rand(5, 2, 6, 6)
    with torch.no_grad():
        expected = judged(x)
    assert torch.allclose(fold_running(read_blocks(judged)).logits(x), expected, atol=1e-5)
    assert torch.allclose(compile_network(judged, (2, 6, 6))(flatten_images(x.double())).float(), expected, atol=1e-5)
    session = onnxruntime.InferenceSession(onnx_model(judged).SerializeToString(), providers=["CPUExecutionProvider"])
    assert torch.allclose(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), expected, atol=1e-5)


@pytest.mark.parametrize("last_norm", [False, True])
def test_the_fold_of_batch_statistics_has_the_gradients_of_torch(last_norm: bool) -> None:
    ours, theirs, x = network(last_norm).double().train(), network(last_norm).double().train(), torch.rand(8, 2, 6, 6).double()
    blocks = read_blocks(ours)
    _, statistics = clean_forward(blocks, x)
    fold_batch(blocks, statistics).logits(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, atol=1e-8)


def test_dropout_is_nothing_when_judged_and_refused_in_training() -> None:
    layers = [nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2)]
    assert len(read_blocks(nn.Sequential(*layers).eval()).blocks) == 2
    with pytest.raises(UserError, match=r"layer 3 \(Dropout\).*leave it out"):
        read_blocks(nn.Sequential(*layers).train())


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([nn.Conv2d(1, 2, 3), nn.Flatten(), nn.BatchNorm2d(2), nn.ReLU(), nn.Linear(8, 2)], r"layer 2 \(BatchNorm2d\).*directly after"),
        ([nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(8, 2)], r"layer 2 \(Linear\).*needs a Flatten"),
        ([nn.Flatten(2), nn.Linear(4, 2)], r"layer 0 \(Flatten\).*everything but the batch"),
        ([nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 2)], r"layer 3 \(ReLU\).*must follow"),
        ([nn.Flatten(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)], r"layer 2 \(GELU\).*a network is: Normalize if any"),
    ],
)
def test_a_layer_out_of_place_is_named_with_what_would_do(layers: list[nn.Module], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_blocks(nn.Sequential(*layers))
