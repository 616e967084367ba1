"""Architectures: exact sizes, exact initialisation, normalisation inside the network."""

import math

import pytest
import torch
from torch import nn

from cure_ray.config import load_experiment
from cure_ray.networks.build import build_network, new_network
from cure_ray.networks.models import Normalize, cnn7, conv_small, mlp, parameter_count


@pytest.mark.parametrize(
    ("shape", "classes", "stride", "parameters"),
    [
        ((1, 28, 28), 10, 1, 13_259_338),
        ((3, 32, 32), 10, 1, 17_192_650),
        ((3, 32, 32), 100, 1, 17_238_820),
        ((3, 56, 56), 200, 1, 51_893_128),
        ((3, 64, 64), 200, 1, 67_621_768),
        ((3, 64, 64), 200, 2, 17_290_120),
    ],
)
def test_cnn7_has_the_published_number_of_parameters(shape: tuple[int, int, int], classes: int, stride: int, parameters: int) -> None:
    with torch.device("meta"):
        network = cnn7(shape, classes, (0.0,) * shape[0], (1.0,) * shape[0], 1.0, stride)
    assert parameter_count(network) == parameters
    assert sum(isinstance(m, nn.ReLU) for m in network) == 6
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network) == 7


@pytest.mark.parametrize("make", [cnn7, conv_small, mlp])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_every_network_maps_images_to_logits_at_any_width(make, shape) -> None:  # type: ignore[no-untyped-def]
    network = make(shape, 7, (0.1,) * shape[0], (0.5,) * shape[0], 0.25).eval()
    assert network(torch.rand(2, *shape)).shape == (2, 7)
    assert isinstance(network[0], Normalize)


def test_ibp_initialisation_spares_the_last_layer_and_all_biases() -> None:
    experiment = load_experiment("mnist-small", ["network.width=0.25"])
    config = experiment.network
    ibp = build_network(config, experiment.dataset, seed=3)
    default = build_network(config.model_copy(update={"init": "default"}), experiment.dataset, seed=3)
    affine = [(a, b) for a, b in zip(ibp, default, strict=True) if isinstance(a, nn.Conv2d | nn.Linear)]
    for ours, theirs in affine[:-1]:
        fan_in = ours.weight[0].numel()
        assert float(ours.weight.detach().std()) == pytest.approx(math.sqrt(2 * math.pi) / fan_in, rel=0.15)
        assert torch.equal(ours.bias, theirs.bias)
    assert torch.equal(affine[-1][0].weight, affine[-1][1].weight)


def test_normalisation_is_not_part_of_the_state() -> None:
    network = new_network(load_experiment("cifar-small", ["network.width=0.1"]))
    assert isinstance(network[0], Normalize)
    assert not any("mean" in key and "running" not in key for key in network.state_dict())


def test_the_seed_decides_the_weights_and_the_global_generator_is_left_alone() -> None:
    experiment = load_experiment("smoke")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, b = new_network(experiment), new_network(experiment)
    assert torch.equal(before, torch.get_rng_state())
    c = new_network(load_experiment("smoke", ["seed=1"]))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a[0].weight, c[0].weight)


def test_normalize_refuses_a_std_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match="positive std"):
        Normalize([0.0], [0.0])
