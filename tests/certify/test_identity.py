"""The identity of a network is that of the function it computes: whatever changes the function changes it, and nothing else does."""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cure_ray.certification.identity import network_identity
from cure_ray.commands.certify import certify
from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import state_digest
from cure_ray.testing import tiny


def seeded(*layers: nn.Module) -> nn.Sequential:
    """Same names and shapes of weights, same weights: the state dicts of all these networks are equal."""
    network = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network.eval()


def sequence(
    std: float = 1.0, mean: float = 0.0, stride: int = 1, padding: int = 0, dilation: int = 1, mode: str = "zeros", eps: float = 1e-5,
    image: int = 6,
) -> nn.Sequential:  # fmt: skip
    conv = nn.Conv2d(1, 2, 3, stride, padding, dilation, padding_mode=mode)
    side = (image + 2 * padding - dilation * 2 - 1) // stride + 1
    assert side == 4, "equal shapes of the weights behind it"
    return seeded(Normalize([mean], [std]), conv, nn.BatchNorm2d(2, eps), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "plain": sequence,
    "std": lambda: sequence(std=0.01),
    "mean": lambda: sequence(mean=0.5),
    "stride": lambda: sequence(stride=2, image=9),
    "padding": lambda: sequence(padding=1, image=4),
    "padding mode": lambda: sequence(padding=1, image=4, mode="circular"),
    "dilation": lambda: sequence(dilation=2, image=8),
    "eps of the BatchNorm": lambda: sequence(eps=1e-3),
}


def test_networks_with_equal_state_dicts_but_other_functions_have_other_identities() -> None:
    assert len({state_digest(make().state_dict()) for make in VARIANTS.values()}) == 1
    assert len({network_identity(make()) for make in VARIANTS.values()}) == len(VARIANTS)


def test_the_order_of_layers_counts() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    plain, swapped = nn.Sequential(one, nn.ReLU(), other).eval(), nn.Sequential(other, nn.ReLU(), one).eval()
    later, negative = nn.Sequential(one, other, nn.ReLU()).eval(), nn.Sequential(one, nn.LeakyReLU(0.0), other).eval()
    assert len({network_identity(n) for n in (plain, swapped, later, negative)}) == 4


class Free(nn.Module):
    """A forward pass of its own, with constants in every place one can stand."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self.layer = seeded(nn.Linear(4, 4))
        known = {"shift": 0.5, "buffer": torch.ones(4), "plain": torch.ones(4), "slope": 0.1, "twice": False, "method": "relu", "first": 0}
        self.known = {**known, **changed}
        self.register_buffer("buffer", self.known["buffer"], persistent=False)
        self.plain = self.known["plain"]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.layer(x - self.known["shift"]), self.known["slope"]) * self.buffer + self.plain
        for _ in range(2 if self.known["twice"] else 1):
            h = getattr(h, self.known["method"])()
        return h[:, self.known["first"] :] + torch.arange(4 - self.known["first"])


@pytest.mark.parametrize(
    "changed",
    [
        {"shift": 0.5000001}, {"buffer": torch.full((4,), 2.0)}, {"plain": torch.full((4,), 2.0)}, {"slope": 0.2}, {"twice": True},
        {"method": "sigmoid"}, {"first": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_no_constant_of_a_free_forward_pass_is_missed(changed: dict[str, Any]) -> None:
    plain, other = Free(), Free(**changed)
    assert state_digest(plain.state_dict()) == state_digest(other.state_dict())
    assert network_identity(plain) == network_identity(Free())
    assert network_identity(plain) != network_identity(other)


def test_every_attribute_of_a_layer_counts() -> None:
    """Change one at a time, of every type there is among the layers the native engine reads."""
    network, seen = sequence(), {network_identity(sequence())}
    changes = 0
    for position, layer in enumerate(network):
        for name, value in vars(layer).items():
            other: Any = None
            if isinstance(value, bool):
                other = not value
            elif isinstance(value, int | float):
                other = value + 1
            elif isinstance(value, tuple) and value:
                other = (value[0] + 1, *value[1:])
            elif isinstance(value, str):
                other = value + "x"
            if other is None or name.startswith("_is_full"):
                continue
            changed = copy.deepcopy(network)
            vars(changed[position])[name] = other
            seen.add(network_identity(changed))
            changes += 1
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            changed = copy.deepcopy(network)
            there = getattr(changed[position], name)
            with torch.no_grad():
                there.view(-1)[-1].copy_(tensor.view(-1)[-1] + 1)
            seen.add(network_identity(changed))
            changes += 1
    assert changes > 30
    assert len(seen) == changes + 1


def test_names_and_what_is_not_computed_do_not_count() -> None:
    layers = list(tiny.network())
    assert network_identity(nn.Sequential(*layers)) == network_identity(tiny.network())
    nested = nn.Sequential(nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])).eval()
    assert network_identity(nested) == network_identity(tiny.network())
    labelled = copy.deepcopy(tiny.network())
    labelled.author = object()  # type: ignore[assignment]
    assert network_identity(labelled) == network_identity(tiny.network())


def test_the_identity_leaves_the_network_as_it_was_and_can_be_taken_again() -> None:
    network = Free()
    before = set(vars(network))
    assert network_identity(network) == network_identity(network) == network_identity(copy.deepcopy(network))
    assert set(vars(network)) == before


def test_the_identity_is_the_same_in_another_process() -> None:
    imports = "from cure_ray.testing import tiny; from cure_ray.certification.identity import network_identity"
    script = f"{imports}; print(network_identity(tiny.residual().eval()))"
    here = network_identity(tiny.residual().eval())
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert there.stdout.strip() == here


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_identity_is_the_same_on_a_gpu() -> None:
    assert network_identity(copy.deepcopy(tiny.network()).cuda()) == network_identity(tiny.network())


def double(x: Tensor) -> Tensor:
    return 2 * x


fx.wrap("double")


class Wrapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return double(x)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Calling(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def hooked(register: str) -> nn.Module:
    network = sequence()
    getattr(network[1], register)(lambda *args: None)
    return network


def replaced() -> nn.Module:
    network = sequence()
    network[1].forward = lambda x: x  # type: ignore[method-assign]
    return network


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: hooked("register_forward_hook"), "forward hook"),
        (lambda: hooked("register_forward_pre_hook"), "forward hook"),
        (replaced, "had its forward replaced"),
        (lambda: nn.Sequential(Wrapped()), "depends on double"),
        (lambda: nn.Sequential(Branching()), "values of its input"),
        (lambda: nn.Sequential(Calling(2, 2)), "defines __call__"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))), "TorchScript"),
        (lambda: nn.Sequential(nn.Linear(2, 2, device="meta")), "without plain numbers"),
    ],
)
def test_what_cannot_be_identified_is_refused(make: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        network_identity(make().eval())


def test_torchs_own_hooks_are_identified() -> None:
    def normalised(dim: int, scale: float) -> nn.Module:
        with pytest.warns(FutureWarning):
            network = nn.Sequential(torch.nn.utils.weight_norm(seeded(nn.Linear(3, 3))[0], dim=dim)).eval()
        network[0].weight_g.data.fill_(scale)
        network(torch.zeros(1, 3))
        return network

    assert network_identity(normalised(0, 1.0)) == network_identity(normalised(0, 1.0)) != network_identity(normalised(0, 2.0))


FACTORY = """
from torch import nn
from cure_ray.networks.models import Network, Normalize
from cure_ray.testing import tiny

def network():
    return Network([Normalize([0.0], [{std}]), *tiny.network()], (1, 8, 8), 10)
"""


@pytest.mark.parametrize("engine", ["native", "auto_lirpa"])
def test_a_factory_that_changes_does_not_inherit_certificates(
    engine: str, foreign: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same name, same weights, same directory: only the constants of its normalisation are others."""
    monkeypatch.syspath_prepend(tmp_path)
    options = {**foreign, "network": "changing_factory:network", "weights": None, "threats": "linf=0.01", "stages": "ibp,crown"}

    def state(std: float, out: str) -> list[str]:
        (tmp_path / "changing_factory.py").write_text(FACTORY.format(std=std))
        sys.modules.pop("changing_factory", None)
        certify(**{**options, "out": out}, samples=10, engine=engine)
        return [r["status"] for r in Store.open(out).read().to_pylist()]

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    first = state(1.0, options["out"])
    with pytest.raises(UserError, match="holds results of another checkpoint"):
        state(50.0, options["out"])
    assert state(1.0, options["out"]) == first
    fresh = state(50.0, options["out"] + "-fresh")
    assert first.count("certified") > 5 > fresh.count("certified")


def test_changed_images_or_labels_do_not_inherit_certificates(foreign: dict[str, Any]) -> None:
    options = {**foreign, "threats": "linf=0.01", "stages": "ibp"}
    certify(**options, samples=4)
    x, y = tiny.samples(24)
    for images, labels in ((x, (y + 1) % 10), (x.flip(3), y)):
        np.savez(foreign["data"], images=images.numpy(), labels=labels.numpy())
        with pytest.raises(UserError, match="holds results on"):
            certify(**options, samples=4)


def test_a_checkpoint_and_the_same_layers_from_a_factory_are_the_same_network() -> None:
    own = tiny.network()
    again = tiny.architecture().eval()
    again.load_state_dict(own.state_dict())
    assert isinstance(own, Network)
    assert network_identity(own) == network_identity(nn.Sequential(*again))
