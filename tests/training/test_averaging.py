"""What a step of the optimiser and the end of an epoch may add: accumulated gradients, decay, a moving average, exact BN statistics."""

import copy

import pytest
import torch
from helpers import experiment
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cure_ray.config import Experiment, resolve
from cure_ray.data.images import Images, load_dataset
from cure_ray.networks.build import new_network
from cure_ray.training.averaging import precise_statistics
from cure_ray.training.epochs import Learner, group_of, run_epoch
from cure_ray.training.loop import natural_learner, serial_epoch, start

CPU = torch.device("cpu")


def small(method: str = "linf", samples: int = 160, batch_norm: bool = True, **training: object) -> Experiment:
    return resolve(
        {
            "preset": "smoke",
            "dataset": {"train_samples": samples + 20, "validation": 20},
            "network": {"width": 0.25, "batch_norm": batch_norm},
            "training": {"method": method, "batch_size": 32, **training},
        }
    )


def images(described: Experiment) -> Images:
    return load_dataset(described.dataset, "train")


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_batch_is_in_one_group_and_only_the_last_may_be_smaller(batches: int, accumulate: int) -> None:
    groups = sorted({group_of(batch, batches, accumulate) for batch in range(batches)})
    assert [first + i for first, size in groups for i in range(size)] == list(range(batches))
    assert all(size == accumulate for _, size in groups[:-1])


def test_accumulating_two_batches_makes_the_step_of_one_of_twice_the_size() -> None:
    """Without BN, whose statistics are those of a batch; Adam's first moment is a tenth of the gradient after one step."""
    moments = []
    for size, accumulate in ((64, 1), (32, 2)):
        described = small("natural", 64, batch_norm=False, batch_size=size, accumulate=accumulate)
        learner = start(described, CPU).ct
        run_epoch("ct", learner, images(described), described, 1)
        moments.append(learner.optimizer_tensors())
    assert {float(v) for k, v in moments[1].items() if k.endswith(".step")} == {1.0}
    for name in moments[0]:
        assert torch.allclose(moments[0][name], moments[1][name], atol=1e-6), name


def test_the_average_is_that_of_the_weights_after_every_step() -> None:
    described = small(ema=0.9, accumulate=2)
    learner = start(described, CPU).ct
    expected = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    steps = []

    def after(done: int, total: int) -> None:
        if done % 2 == 0 or done == total:
            steps.append(done)
            for name, tensor in learner.network.state_dict().items():
                expected[name] = 0.9 * expected[name] + 0.1 * tensor if tensor.is_floating_point() else tensor.clone()

    run_epoch("ct", learner, images(described), described, 14, tick=after)
    assert steps == [2, 4, 5]
    found = learner.result.state_dict()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name
    assert not torch.equal(found["0.weight"], learner.network.state_dict()["0.weight"])


def test_a_merge_of_branches_reaches_the_average_too() -> None:
    described = small("scratch", ema=0.5, standard_epochs=0, anneal_epochs=0, epochs=1)
    progress = start(described, CPU)
    _, merged = serial_epoch(progress, images(described), described)
    assert merged is not None
    assert torch.equal(progress.ct.network.state_dict()["0.weight"], merged.state["0.weight"])
    distance = (progress.ct.result.state_dict()["0.weight"] - merged.state["0.weight"]).abs().max()
    assert 0 < distance < 0.05


def test_precise_statistics_are_those_of_the_clean_training_set_pooled_over_its_batches() -> None:
    described = experiment("linf")
    network, data = new_network(described).train(), images(described)
    reference = copy.deepcopy(network)
    counter = int(network[1].num_batches_tracked)  # type: ignore[arg-type]
    precise_statistics(network, data, 64, channels_last=False)
    assert int(network[1].num_batches_tracked) == counter  # type: ignore[arg-type]
    x = data.batch(torch.arange(len(data) // 64 * 64))[0]
    norms = [module for module in reference if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # torch then averages over all batches
        norm.reset_running_stats()
    with torch.no_grad():
        for part in x.split(64):
            reference(part)
        first = reference[0](x)
    ours = [module for module in network if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for mine, theirs in zip(ours, norms, strict=True):
        assert torch.allclose(mine.running_mean, theirs.running_mean, atol=1e-5)  # type: ignore[arg-type]
        assert torch.allclose(mine.running_var, theirs.running_var, rtol=0.1)  # type: ignore[arg-type]
    assert torch.allclose(ours[0].running_var, first.var([0, 2, 3], unbiased=False), rtol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_an_epoch_ends_with_precise_statistics_of_what_is_judged(ema: float) -> None:
    described = small(ema=ema, precise_bn=True, accumulate=1)
    progress = start(described, CPU)
    serial_epoch(progress, images(described), described)
    again = copy.deepcopy(progress.ct.result)
    precise_statistics(again, images(described), 32, channels_last=True)
    for name, tensor in progress.ct.result.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_weight_decay_is_decoupled_and_leaves_the_natural_branch_alone() -> None:
    described = small("scratch", weight_decay=0.5, nt_optimizer="copy")
    progress = start(described, CPU)
    before = [p.detach().clone() for p in progress.ct.network.parameters()]
    for learner, left in ((natural_learner(progress, described), 1.0), (progress.ct, 1 - described.training.lr * 0.5)):
        for p in learner.network.parameters():
            p.grad = torch.zeros_like(p)
        learner.step()
        for p, old in zip(learner.network.parameters(), before, strict=True):
            assert torch.allclose(p, left * old)


def test_without_switches_the_learner_is_plain_adam() -> None:
    learner = Learner.certified(new_network(small()), small().training)
    assert type(learner.optimizer) is torch.optim.Adam
    assert learner.average is None
    assert learner.result is learner.network
    assert learner.saved_tensors() == {}
