"""The auto_LiRPA engine: sound on the graphs it accepts, and it refuses the ones auto_LiRPA gets wrong."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cure_ray.attacks import AttackSettings, attack, check_witness, replay_network
from cure_ray.bounds.lirpa import compat
from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.lirpa.graph import prepare
from cure_ray.errors import UserError
from cure_ray.networks.models import Network, Normalize, cnn7, conv_small, mlp
from cure_ray.threats.balls import Ball
from cure_ray.threats.norms import Norm

THREATS = [Ball("linf", 0.03), Ball("l2", 0.3), Ball("l1", 0.8)]
STAGES = ("ibp", "crown-ibp", "crown", "alpha-crown")


def sample_ball(x: Tensor, threat: Ball, n: int, generator: torch.Generator) -> Tensor:
    """Points of ball∩[0,1], half of them on the sphere, sparse ones among them."""
    noise = torch.randn(n, *x.shape, dtype=torch.float64, generator=generator).flatten(2)
    noise[::3] *= torch.rand(noise[::3].shape, dtype=torch.float64, generator=generator) > 0.97
    p = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}[threat.norm]
    unit = noise / noise.norm(p=p, dim=2, keepdim=True).clamp_min(1e-12)
    radius = torch.rand(n, 1, 1, dtype=torch.float64, generator=generator).sqrt()
    radius[::2] = 1.0
    return (x + (unit * radius * threat.eps).view(n, *x.shape)).clamp(0, 1)


def worst_sampled_margins(network: nn.Module, x: Tensor, y: Tensor, threat: Ball, n: int = 200) -> Tensor:
    points = sample_ball(x.double(), threat, n, torch.Generator().manual_seed(7))
    logits = copy.deepcopy(network).double()(points.flatten(0, 1)).view(n, len(x), -1)
    others = [[i for i in range(logits.shape[2]) if i != label] for label in y]
    return torch.stack([(logits[:, b, y[b], None] - logits[:, b, others[b]]).min(0).values for b in range(len(x))])


class Residual(nn.Module):
    """A small residual network with in-model normalisation and average pooling, written as people write them."""

    input_shape = (2, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5]).view(1, 2, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3]).view(1, 2, 1, 1))
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.stem((x - self.mean) / self.std)))
        h = torch.relu(h + self.b(torch.relu(self.a(h))))
        return self.head(torch.flatten(self.pool(h), 1))


def build(kind: str) -> nn.Module:
    torch.manual_seed(3)
    network: nn.Module
    if kind == "conv":
        network = conv_small((1, 12, 12), 4, [0.2], [0.5], width=0.25)
    elif kind == "mlp":
        network = mlp((1, 6, 6), 5, [0.1], [0.4], width=0.2)
    elif kind == "cnn7":
        network = cnn7((2, 8, 8), 3, [0.4, 0.5], [0.2, 0.3], width=0.03)
    elif kind == "two-classes":
        network = Network([nn.Conv2d(1, 3, 3, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)], (1, 7, 7), 2)
    else:
        network = Residual()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight)
    return network.eval()


def batch(network: nn.Module, n: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, *network.input_shape, generator=torch.Generator().manual_seed(1))
    return x, network(x).argmax(1)


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("kind", ["conv", "mlp", "cnn7", "two-classes", "residual"])
def test_no_point_of_the_ball_has_a_margin_below_the_bound(kind: str, threat: Ball) -> None:
    network = build(kind)
    x, y = batch(network)
    engine = LirpaEngine(network, alpha_iterations=5)
    worst = worst_sampled_margins(network, x, y, threat)
    problem = engine.problem(x, y, threat)
    for stage in STAGES:
        bound = engine.margins(problem, stage)
        assert bound.dtype == torch.float64
        assert torch.isfinite(bound).all()
        assert (bound <= worst + 1e-9).all(), stage


@settings(max_examples=8, deadline=None)
@given(
    norm=st.sampled_from(["linf", "l2", "l1"]),
    side=st.integers(7, 11),
    layers=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.booleans()), min_size=1, max_size=2
    ),
    seed=st.integers(0, 10**6),
)
def test_odd_strides_and_paddings_stay_sound(norm: Norm, side: int, layers: list[tuple[int, int, int, bool, bool]], seed: int) -> None:
    torch.manual_seed(seed)
    modules: list[nn.Module] = [Normalize([0.3, 0.5], [0.5, 0.25])]
    channels = 2
    for kernel, stride, padding, bias, norm_layer in layers:
        modules += [nn.Conv2d(channels, 3, kernel, stride, padding, bias=bias), *([nn.BatchNorm2d(3)] if norm_layer else []), nn.ReLU()]
        channels = 3
    features = nn.Sequential(*modules, nn.Flatten()).eval()(torch.zeros(1, 2, side, side)).shape[1]
    network = Network([*modules, nn.Flatten(), nn.Linear(features, 3)], (2, side, side), 3).eval()
    x, y = batch(network, 2)
    threat = Ball(norm, {"linf": 0.05, "l2": 0.4, "l1": 1.0}[norm])
    worst = worst_sampled_margins(network, x, y, threat, 100)
    found = check_witness(replay_network(network), x, y, attack(network, x, y, threat, [0, 1], AttackSettings(10, 2)), threat)
    engine = LirpaEngine(network)
    for stage in STAGES[:3]:
        bound = engine.margins(engine.problem(x, y, threat), stage)
        assert (bound <= worst + 1e-9).all(), stage
        assert (bound.amin(1) <= found.margins + 1e-9).all(), stage


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_a_network_on_which_convolution_patches_crash_is_bounded_with_matrices(threat: Ball) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 2, 3, 1, bias=False), nn.ReLU(), nn.Conv2d(3, 3, 3, 1, 1, bias=False), nn.ReLU()]
    network = Network([*layers, nn.Flatten(), nn.Linear(27, 3)], (2, 7, 7), 3).eval()
    x, y = batch(network, 2)
    engine = LirpaEngine(network, alpha_iterations=5)
    worst = worst_sampled_margins(network, x, y, threat)
    for stage in STAGES:
        assert (engine.margins(engine.problem(x, y, threat), stage) <= worst + 1e-9).all(), stage


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_alpha_crown_is_strictly_tighter_than_crown(threat: Ball) -> None:
    """torch 2.14 and 2.15 make the gradients of the slopes zero without an error; this test is why torch is pinned."""
    network = build("conv")
    x, y = batch(network)
    engine = LirpaEngine(network)
    problem = engine.problem(x, y, Ball(threat.norm, 3 * threat.eps))
    gain = engine.margins(problem, "alpha-crown") - engine.margins(problem, "crown")
    assert gain.mean() > 1e-2
    assert gain.min() > -1e-9


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_at_radius_zero_every_bound_is_the_margin(norm: str) -> None:
    network = build("residual")
    x, y = batch(network)
    clean = worst_sampled_margins(network, x, y, Ball(norm, 0.0), 2)  # type: ignore[arg-type]
    engine = LirpaEngine(network)
    for stage in STAGES[:3]:
        bound = engine.margins(engine.problem(x, y, Ball(norm, 0.0)), stage)  # type: ignore[arg-type]
        assert torch.allclose(bound, clean, atol=1e-9)


def test_selecting_samples_keeps_their_bounds() -> None:
    network = build("conv")
    x, y = batch(network, 4)
    engine = LirpaEngine(network)
    problem = engine.problem(x, y, THREATS[1])
    index = torch.tensor([2, 0])
    whole = engine.margins(problem, "crown")
    assert torch.allclose(engine.margins(problem.select(index), "crown"), whole[index], atol=1e-9)
    assert engine.margins(problem.select(torch.empty(0, dtype=torch.long)), "crown").shape == (0, 3)


def test_folding_normalisation_keeps_the_function_at_padded_borders() -> None:
    network = Network([Normalize([0.3, 0.6], [0.2, 0.5]), nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(),
                       nn.Linear(75, 4)], (2, 5, 5), 4).eval()  # fmt: skip
    prepared = prepare(network, network.input_shape)
    x = torch.rand(6, 2, 5, 5, dtype=torch.float64)
    assert torch.allclose(prepared.model(prepared.inputs(x)), copy.deepcopy(network).double()(x), atol=1e-12)


# --- the trap ---------------------------------------------------------------------------------------------------


class InModelNormalisation(nn.Module):
    input_shape = (1, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(torch.relu(self.conv((x - 0.1307) / 0.3081)), 1))


@pytest.mark.parametrize("threat", [Ball("l2", 2.0), Ball("l1", 6.0)], ids=str)
def test_raw_auto_lirpa_certifies_falsely_behind_a_normalisation_and_the_engine_does_not(threat: Ball) -> None:
    torch.manual_seed(0)
    network = InModelNormalisation().eval()
    x, y = batch(network, 8)
    worst = worst_sampled_margins(network, x, y, threat)
    assert (worst < 0).any(), "the radius must be large enough that some margin is really negative"
    engine = LirpaEngine(network)
    for stage in STAGES[:3]:
        assert (engine.margins(engine.problem(x, y, threat), stage) <= worst + 1e-9).all()
    lirpa = compat.load()
    raw = lirpa.BoundedModule(copy.deepcopy(network), x[:1], device="cpu")
    ball = lirpa.PerturbationLpNorm(norm=2 if threat.norm == "l2" else 1, eps=threat.eps)
    lower, upper = raw.compute_bounds(x=(lirpa.BoundedTensor(x, ball),), method="IBP")
    if not torch.equal(lower, upper):
        pytest.skip(f"auto_LiRPA {compat.version()} no longer loses the radius")
    raw_margins = (lower.gather(1, y[:, None]) - upper)[torch.arange(3) != y[:, None]].view(8, 2)
    assert (raw_margins > worst + 1e-3).any(), "zero width: the clean margin sold as a bound"


class InputSkip(nn.Module):
    input_shape = (2, 6, 6)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv, self.head = how, nn.Conv2d(2, 2, 3, padding=1), nn.Linear(72, 3)
        self.pool, self.norm = nn.AvgPool2d(1), nn.BatchNorm2d(2)
        self.pixels = nn.Parameter(torch.rand(2, 6, 6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = {
            "skip": lambda: x + self.conv(x),
            "relu": lambda: self.conv(torch.relu(x)),
            "pool": lambda: self.conv(self.pool(x)),
            "batch-norm": lambda: self.conv(self.norm(x)),
            "pixel-scale": lambda: self.conv(x * self.pixels),
            "square": lambda: self.conv(x * x),
            "reciprocal": lambda: self.conv(1.0 / (x + 2.0)),
        }[self.how]()
        return self.head(torch.flatten(torch.relu(h), 1))


@pytest.mark.parametrize("how", ["skip", "relu", "pool", "batch-norm", "pixel-scale", "square", "reciprocal"])
def test_a_graph_that_would_lose_the_radius_is_refused(how: str) -> None:
    with pytest.raises(UserError, match=r"refused|cannot be folded"):
        LirpaEngine(InputSkip(how).eval())


# --- bad input --------------------------------------------------------------------------------------------------


def test_train_mode_is_refused() -> None:
    with pytest.raises(UserError, match="train mode"):
        LirpaEngine(build("conv").train())


def test_nan_weights_are_refused_by_name() -> None:
    network = build("mlp")
    with torch.no_grad():
        network[-1].bias[0] = float("nan")  # type: ignore[index,union-attr]
    with pytest.raises(UserError, match=r"bias holds NaN"):
        LirpaEngine(network)


def test_overflowing_weights_give_no_positive_bound() -> None:
    network = build("conv")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1e30)
    x, y = batch(build("conv"))
    engine = LirpaEngine(network)
    for stage in STAGES[:3]:
        margins = engine.margins(engine.problem(x, y, THREATS[0]), stage)
        assert not bool((torch.isfinite(margins) & (margins > 0)).all(1).any())


def test_wrong_shapes_and_labels_are_named() -> None:
    engine = LirpaEngine(build("conv"))
    with pytest.raises(UserError, match=r"\(1, 12, 12\) expected"):
        engine.problem(torch.rand(2, 1, 5, 5), torch.zeros(2, dtype=torch.long), THREATS[0])
    with pytest.raises(UserError, match=r"0\.\.3"):
        engine.problem(torch.rand(2, 1, 12, 12), torch.tensor([0, 4]), THREATS[0])


def test_an_unsupported_operation_is_a_user_error() -> None:
    class Sorting(nn.Module):
        input_shape = (1, 4, 4)

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.sort(self.inner(torch.flatten(x, 1)), dim=1)[0])

    with pytest.raises(UserError, match="does not support"):
        LirpaEngine(Sorting().eval())


def test_the_engine_leaves_the_network_and_the_default_dtype_alone() -> None:
    network = build("conv")
    before = {k: v.clone() for k, v in network.state_dict().items()}
    x, y = batch(network)
    engine = LirpaEngine(network)
    engine.margins(engine.problem(x, y, THREATS[0]), "alpha-crown")
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(before[k], v) and v.dtype == before[k].dtype for k, v in network.state_dict().items())
    assert not any(p.grad is not None for p in network.parameters())
