"""Descriptions of published networks: every one can be read and built, says what its sources say, and refuses what does not fit."""

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cure_ray.errors import UserError
from cure_ray.zoo.architecture import build, fitted
from cure_ray.zoo.published import UNION, all_published, find_published, parse_published

ROOT = Path(__file__).parent.parent.parent
RECOMPUTABLE = [name for name, described in all_published().items() if described.recomputable]
MINIMAL = """
name: tiny
title: Tiny
authors: A
paper: P
year: 2020
source: {url: "https://example.org"}
weights: {format: pt}
network: one layer
input: [1, 2, 2]
layers: [flatten, {layer: linear, inputs: 4, outputs: 2}]
data: {name: mnist, n: 10}
protocol: {threats: "l2=0.5"}
figures: [{what: certified, threat: "l2=1/2", value: 50, source: table 1}]
"""


def authors_arrays(name: str) -> dict[str, Tensor]:
    """Arrays as the authors' file names and shapes them, with numbers that tell their places apart."""
    described = find_published(name)
    assert described.weights is not None
    own = build(described).state_dict()
    arrays = {}
    for tensor, origin in described.weights.tensors.items():
        shape = (
            origin.shape or tuple(own[tensor].shape[origin.axes.index(i)] for i in range(own[tensor].dim()))
            if origin.axes
            else origin.shape
        )
        arrays[origin.array] = torch.arange(own[tensor].numel(), dtype=torch.float32).reshape(shape or own[tensor].shape)
    return arrays


@pytest.mark.parametrize("name", RECOMPUTABLE)
def test_a_description_builds_a_network_and_names_each_of_its_tensors(name: str) -> None:
    described = find_published(name)
    network = build(described)
    assert described.input is not None
    assert network(torch.zeros(2, *described.input)).shape == (2, 10)
    assert described.weights is not None
    assert described.weights.identity is not None
    assert set(described.weights.tensors) in (set(), set(network.state_dict()))


def test_axes_of_another_order_become_ours() -> None:
    described, arrays = find_published("mmr-universal-mnist"), authors_arrays("mmr-universal-mnist")
    state = fitted(described, arrays, "w.mat").state_dict()
    assert torch.equal(state["2.weight"][5, 3], arrays["weights_conv2"][:, :, 3, 5])  # height, width, in, out there
    hidden = arrays["weights_fc1"].reshape(7, 7, 32, 100)
    assert torch.equal(state["5.weight"].reshape(100, 32, 7, 7)[40, 9], hidden[:, :, 9, 40])
    assert torch.equal(state["7.weight"], arrays["weights_fc2"].T)


def test_a_file_under_the_networks_own_names_is_taken_as_it_is() -> None:
    described = find_published("lipschitz-cifar10-cnn-a")
    own = {k: torch.full_like(v, 0.5) for k, v in build(described).state_dict().items()}
    assert torch.equal(fitted(described, own, "w.safetensors").state_dict()["8.weight"], own["8.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("biases_fc2"), "missing biases_fc2"),
        (lambda a: a.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda a: a.update(weights_fc1=torch.zeros(1568, 99)), "weights_fc1 of shape (1568, 99) does not become 5.weight"),
        (lambda a: a.update(weights_conv1=torch.zeros(5, 5, 1, 16)), "weights_conv1 of shape (5, 5, 1, 16) does not become 0.weight"),
        (lambda a: a.update(biases_conv1=torch.full((1, 16), torch.nan)), "0.bias holds something else than finite numbers"),
        (lambda a: a.update(biases_conv1=torch.ones(16, dtype=torch.int64)), "0.bias holds something else than finite numbers"),
        (lambda a: a.update(biases_conv1=torch.full((16,), 0.1, dtype=torch.float64)), "0.bias is torch.float64 and would be rounded"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(change: object, said: str) -> None:
    arrays = authors_arrays("mmr-universal-mnist")
    change(arrays)  # type: ignore[operator]
    with pytest.raises(UserError) as refused:
        fitted(find_published("mmr-universal-mnist"), arrays, "w.mat")
    assert said in str(refused.value)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("method", ["scratch", "finetune"])
@pytest.mark.parametrize(("name", "shown"), [("mnist", "MNIST"), ("cifar10", "CIFAR-10")])
def test_claims_of_the_paper_are_those_of_its_tables(size: str, method: str, name: str, shown: str) -> None:
    described = find_published(f"cure-{name}-{size}-{method}")
    assert not described.recomputable
    table = ROOT / "analysis" / "paper" / f"main_results{'_appendix' if size == 'small' else ''}.csv"
    rows = [r for r in csv.DictReader(table.open()) if r["dataset"] == shown and r["method"] == f"CURE-{method.capitalize()}"]
    assert {r["eps"].replace(";", ",") for r in rows} == {described.protocol.threats}
    printed = {r["metric"]: float(r["value"]) for r in rows}
    ours = {
        "clean" if f.threat is None else "union" if f.threat == UNION else f"cert_{f.threat.partition('=')[0]}": f.value
        for f in described.figures
    }  # fmt: skip
    assert ours == printed


def test_a_minimal_description_is_read_and_radii_are_written_as_a_store_writes_them() -> None:
    assert parse_published(MINIMAL, "tiny.yaml").figures[0].threat == "l2=0.5"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title:", "tittle:", "tittle: unknown key. Did you mean 'title'?"),
        ("format: pt", "format: ptt", "weights.format: unknown value 'ptt'. Did you mean 'pt'?"),
        ('"l2=1/2"', '"l2=1"', "a figure is about l2=1, the protocol about l2=0.5"),
        ("value: 50", "value: 500", "figures.value"),
        (", outputs: 2", "", "a layer linear needs outputs"),
        ("name: mnist", "name: mnits", "unknown data set 'mnits'. Did you mean 'mnist'?"),
        ('threats: "l2=0.5"', 'threats: "l3=0.5"', "l3"),
        ("layers: [flatten, {layer: linear, inputs: 4, outputs: 2}]", "layers: []", "weights need source, input and layers"),
        ("n: 10}", "n: 10001}", "mnist has 10000 test images, numbered from 0"),
        ("n: 10}", "n: 1, samples: [10000]}", "mnist has 10000 test images, numbered from 0"),
        ("n: 10}", "n: 10, samples: [1, 1]}", "10 different samples are announced, 1 listed"),
    ],
)
def test_a_description_that_is_wrong_is_refused_with_what_would_be_right(old: str, new: str, said: str) -> None:
    assert old in MINIMAL
    with pytest.raises(UserError) as refused:
        parse_published(MINIMAL.replace(old, new), "tiny.yaml")
    assert said in str(refused.value)


def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    described = parse_published(MINIMAL.replace("inputs: 4", "inputs: 5"), "tiny.yaml")
    with pytest.raises(UserError, match="tiny: its layers do not fit each other"):
        build(described)


def test_an_unknown_name_gets_the_nearest_one_and_a_claim_has_nothing_to_load() -> None:
    with pytest.raises(UserError, match="Did you mean 'mmr-universal-mnist'"):
        find_published("mmr-universal-mnits")
    with pytest.raises(UserError, match="never published"):
        build(find_published("cure-mnist-small-scratch"))
