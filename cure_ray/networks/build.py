"""The network an experiment describes, initialised from its own random stream."""

import torch

from cure_ray import seeding
from cure_ray.config import Dataset, Experiment, NetworkConfig
from cure_ray.networks.models import Network, cnn7, conv_small, ibp_init, mlp
from cure_ray.networks.own import own_network
from cure_ray.networks.residual import resnet_small

_MADE = {"conv-small": conv_small, "mlp": mlp, "resnet-small": resnet_small}


def build_network(config: NetworkConfig, dataset: Dataset, seed: int) -> Network:
    """The configured network for a data set."""
    shape, classes, mean, std = dataset.input_shape, dataset.num_classes, dataset.row.mean, dataset.row.std
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.derive(seed, "init"))
        if config.factory is not None:
            network = own_network(config, shape, classes)
        elif config.name == "cnn7":
            network = cnn7(shape, classes, mean, std, config.width, config.last_conv_stride)
        else:
            network = _MADE[config.name](shape, classes, mean, std, config.width, config.batch_norm)
    if config.init == "ibp":
        ibp_init(network, seeding.generator("cpu", seed, "ibp_init"))
    return network


def new_network(experiment: Experiment) -> Network:
    return build_network(experiment.network, experiment.dataset, experiment.seed)
