"""Residual blocks and average pooling, end to end: one function for training, engines, patches, transformations and files."""

import copy
from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from cure_ray.bounds.lirpa.engine import LirpaEngine
from cure_ray.bounds.native import chain
from cure_ray.bounds.native.affine import Affine
from cure_ray.bounds.native.compiled import compile_network, flatten_images
from cure_ray.bounds.native.coupled import dense_rows
from cure_ray.bounds.native.coupled import evaluate as evaluate_coupled
from cure_ray.bounds.native.coupled_ascent import start
from cure_ray.bounds.native.domain import Domain, LayerBall
from cure_ray.bounds.native.effort import Effort
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.bounds.native.linear import evaluate
from cure_ray.bounds.native.relaxation import Relaxation, interval_bounds, margin_rows, start_rows
from cure_ray.certification.boxes import box_margins
from cure_ray.certification.identity import network_identity
from cure_ray.certification.windows import clean_pass, patch_margins, positions
from cure_ray.errors import UserError
from cure_ray.interchange import load_onnx, onnx_model, write_onnx
from cure_ray.networks.models import Network, Normalize
from cure_ray.networks.residual import Residual, resnet_small
from cure_ray.networks.sequence import read_blocks
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT
from cure_ray.threats.norms import NORMS
from cure_ray.training.crown import linear_upper_bounds
from cure_ray.training.folding import clean_forward, fold_batch, fold_running
from cure_ray.training.propagation import Region, full_region, propagate, upper_bounds

SHAPE = (2, 8, 8)
conv, relu, linear, norm = nn.Conv2d, nn.ReLU, nn.Linear, nn.BatchNorm2d


def shaken(network: Network) -> Network:
    """BN away from its defaults."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.4, 1.5)
                module.weight.uniform_(-1.3, 1.3)
                module.bias.normal_(0, 0.2)
    return network.eval()


def networks() -> dict[str, Network]:
    torch.manual_seed(0)
    kinds = {
        "bottleneck-after-no-relu": [
            Normalize([0.3, 0.5], [0.2, 0.7]), conv(2, 3, 3, 1, 1), norm(3),
            Residual([conv(3, 2, 1), norm(2), relu(), conv(2, 2, 3, 2, 1), relu(), conv(2, 5, 1), norm(5)], [conv(3, 5, 1, 2), norm(5)]),
            relu(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(5, 4),
        ],
        "pooled-shortcut": [
            conv(2, 3, 3, 1, 1), relu(), Residual([conv(3, 4, 4, 2, 1), relu(), conv(4, 4, 3, 1, 1)], [nn.AvgPool2d(2), conv(3, 4, 1)]),
            relu(), nn.AvgPool2d(2), conv(4, 3, 2, 1, 1), relu(), nn.Flatten(), linear(27, 4),
        ],
        "norm-and-relu-first": [
            conv(2, 3, 3, 1, 1), Residual([norm(3), relu(), conv(3, 4, 3, 1, 1), norm(4), relu(), conv(4, 3, 3, 1, 1)]), norm(3), relu(),
            Residual([conv(3, 4, 3, 2, 1), norm(4), relu(), conv(4, 4, 3, 1, 1)], [conv(3, 4, 1, 2)]),
            Residual([relu(), conv(4, 4, 1)]), norm(4), relu(), nn.AvgPool2d(2), nn.Flatten(), linear(16, 4),
        ],
        "sums-without-relu": [
            conv(2, 3, 3, 1, 1), relu(), Residual([conv(3, 3, 3, 1, 1)]), Residual([conv(3, 4, 3, 1, 1), relu(), conv(4, 3, 5, 1, 2)]),
            nn.AvgPool2d((3, 2)), nn.Flatten(), linear(24, 6), nn.BatchNorm1d(6), relu(),
            Residual([linear(6, 5), relu(), Residual([linear(5, 4), relu(), linear(4, 5)]), relu(), linear(5, 6)]), relu(), linear(6, 4),
        ],
    }  # fmt: skip
    return {name: shaken(Network(layers, SHAPE, 4)) for name, layers in kinds.items()}


NETWORKS = networks()
BY_NAME = pytest.mark.parametrize("name", NETWORKS)


def images(count: int = 3) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(1))


@BY_NAME
def test_training_engine_and_onnx_compute_what_the_network_computes(name: str, tmp_path: Path) -> None:
    network, x = NETWORKS[name], images(5)
    with torch.no_grad():
        expected = network(x)
    assert torch.allclose(fold_running(read_blocks(network)).logits(x), expected, atol=1e-5)
    assert torch.allclose(compile_network(network, SHAPE)(flatten_images(x.double())).float(), expected, atol=1e-5)
    session = onnxruntime.InferenceSession(onnx_model(network).SerializeToString(), providers=["CPUExecutionProvider"])
    assert torch.allclose(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), expected, atol=1e-5)
    write_onnx(network, tmp_path / "net.onnx")
    back = load_onnx(tmp_path / "net.onnx")
    with torch.no_grad():
        assert torch.allclose(back(x), expected, atol=1e-5)
    assert len(compile_network(back, SHAPE).layers) == len(compile_network(network, SHAPE).layers)


@BY_NAME
def test_the_fold_of_batch_statistics_has_the_gradients_of_torch(name: str) -> None:
    mine, theirs = (copy.deepcopy(NETWORKS[name]).double().train() for _ in range(2))
    blocks, x = read_blocks(mine), images(8).double()
    logits, statistics = clean_forward(blocks, x)
    expected = theirs(x)
    assert torch.allclose(logits, expected, atol=1e-9)
    fold_batch(blocks, statistics).logits(x).square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-7), one.shape
    for one, other in zip(mine.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(one.double(), other.double(), atol=1e-9)


@BY_NAME
@pytest.mark.parametrize("of", NORMS)
def test_boxes_of_training_hold_every_point_and_linear_bounds_too(name: str, of: str) -> None:
    network = copy.deepcopy(NETWORKS[name]).double()
    folded, x, eps = fold_running(read_blocks(network)), images().double(), {"linf": 0.05, "l2": 0.3, "l1": 0.6}[of]
    with torch.no_grad():
        y = network(x).argmax(1)
        region = full_region(x, of, eps)  # type: ignore[arg-type]
        boxes = propagate(folded, [region], keep_hidden=True)
        by_lines = linear_upper_bounds(folded, [region], boxes.hidden, y)
        bounds = (upper_bounds(folded, boxes, y), by_lines)
        assert len(boxes.before_relu(folded)) == sum(block.relu for block in read_blocks(network).blocks)
        g = torch.Generator().manual_seed(0)
        for _ in range(40):
            d = torch.randn(x.shape, generator=g, dtype=torch.float64)
            size = {"linf": d.abs().flatten(1).amax(1), "l2": d.flatten(1).norm(dim=1), "l1": d.flatten(1).abs().sum(1)}[of]
            logits = network((x + eps * d / size.view(-1, 1, 1, 1)).clamp(0, 1))
            for bound in bounds:
                assert (logits - logits.gather(1, y[:, None]) <= bound + 1e-9).all()
        point = propagate(folded, [Region(x, torch.zeros_like(x), "linf")], keep_hidden=True)
        exact = network(x) - network(x).gather(1, y[:, None])
        for bound in (
            upper_bounds(folded, point, y),
            linear_upper_bounds(folded, [Region(x, torch.zeros_like(x), "linf")], point.hidden, y),
        ):
            assert torch.allclose(bound, exact, atol=1e-9)  # at radius 0 nothing is lost


@pytest.mark.parametrize("name", ["bottleneck-after-no-relu", "pooled-shortcut", "norm-and-relu-first"])  # auto_LiRPA 0.3 fails on the last
@pytest.mark.parametrize(("of", "eps"), [("linf", 0.02), ("l2", 0.15), ("l1", 0.3)])
def test_crown_equals_that_of_another_engine_on_the_graph(name: str, of: str, eps: float) -> None:
    """With interval bounds in the hidden layers both compute the same lines; where the box counts, ours may only be tighter."""
    network, x = NETWORKS[name], images()
    y, ours, theirs = network(x).argmax(1), NativeEngine(network, effort=Effort(single=False)), LirpaEngine(network)
    mine, other = (e.margins(e.problem(x, y, Ball(of, eps), box=False), "crown") for e in (ours, theirs))  # type: ignore[arg-type,attr-defined]
    assert (mine >= other - 1e-4).all()
    boxes = [e.margins(e.problem(x, y, Ball(of, eps), box=False), "ibp") for e in (ours, theirs)]  # type: ignore[arg-type,attr-defined]
    assert (boxes[0] >= boxes[1] - 1e-5).all()
    assert torch.allclose(mine, other, atol=0.05)  # the same relaxation, on hidden bounds that are nearly the same
    for stage in ("crown-ibp", "alpha-crown"):
        assert (ours.margins(ours.problem(x, y, Ball(of, eps), box=False), stage) >= boxes[0] - 1e-9).all()  # type: ignore[arg-type]


@BY_NAME
def test_a_window_of_a_patch_gives_the_bounds_of_the_whole_image(name: str) -> None:
    network, x = NETWORKS[name], images()
    y, e = network(x).argmax(1), NativeEngine(network, effort=Effort(single=False))
    assert e.decide is not None
    clean = clean_pass(e.decide, flatten_images(x.double()), y)
    for row, column in positions(SHAPE[1:], 2, 3)[::5]:
        low, high = x.double().clone(), x.double().clone()
        low[:, :, row : row + 2, column : column + 3], high[:, :, row : row + 2, column : column + 3] = 0.0, 1.0
        whole = box_margins(e, flatten_images(low), flatten_images(high), y, "ibp")
        assert torch.allclose(patch_margins(clean, (row, column), 2, 3), whole, atol=1e-4)


def test_kernels_run_on_meta_so_nothing_mixes_devices_or_reads_back() -> None:
    meta = torch.device("meta")
    for network in NETWORKS.values():
        net = compile_network(network, SHAPE).to(meta, torch.float32)
        domain = Domain.around(torch.empty(2, 128, device=meta), Ball("l2", 0.1), UNIT)
        bounds = interval_bounds(net, Domain.around(domain.x_BN, Ball("linf", 0.1), UNIT))
        relaxations = [Relaxation.of(b) for b in bounds]
        A, b, _ = start_rows(net, margin_rows(torch.empty(2, dtype=torch.long, device=meta), 4, torch.float32))
        found = evaluate(net.layers[:-1], relaxations, domain, (A, b), [r.adaptive_BN for r in relaxations], 1e-9, trace=True)
        assert found.value_BS.device == meta
        one = torch.empty(2, 1, device=meta)
        balls = tuple(LayerBall(torch.empty(2, layer.outputs, device=meta), one, one) for layer in net.layers[:-1])
        rows = dense_rows(net.layers[:-1], relaxations, replace(domain, balls=balls), A, b, 1e-9)
        assert evaluate_coupled(rows, start(rows), trace=True)[0].device == meta


def test_a_plain_network_is_compiled_into_the_layers_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains lose nothing: no layer is another, none carries anything."""
    made = list[Affine]()
    monkeypatch.setattr("cure_ray.bounds.native.compiled.chained", lambda blocks, maps: made.extend(maps) or chain.chained(blocks, maps))
    network = Network([conv(2, 3, 3, 2, 1), norm(3), relu(), nn.Flatten(), linear(48, 5), relu(), linear(5, 4)], SHAPE, 4).eval()
    layers = compile_network(network, SHAPE).layers
    for one, other in zip(layers, made, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias_N, other.bias_N)
    assert all(layer.carried_N is None for layer in layers)


def test_identity_sees_shortcuts_and_pooling() -> None:
    def build(shortcut: bool, pool: int) -> nn.Module:
        torch.manual_seed(0)
        block = [conv(2, 2, 1), relu(), conv(2, 2, 1)]
        joined = Residual(block) if shortcut else nn.Sequential(*block)
        return Network(
            [conv(2, 2, 1), relu(), joined, relu(), nn.AvgPool2d(pool), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(2, 3)], SHAPE, 3
        ).eval()

    found = {network_identity(build(shortcut, pool)) for shortcut in (True, False) for pool in (2, 4)}
    assert len(found) == 4
    assert network_identity(build(True, 2)) in found


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([Residual([conv(2, 2, 1)]), relu()], "must follow an affine layer"),
        ([conv(2, 3, 1), relu(), Residual([conv(3, 3, 1), relu()]), relu()], "must end in an affine layer"),
        ([conv(2, 3, 1), relu(), Residual([conv(3, 3, 1)], [conv(3, 3, 1), relu(), conv(3, 3, 1)]), relu()], "a shortcut is nothing"),
        ([conv(2, 3, 1), relu(), Residual([conv(3, 3, 1), relu(), relu(), conv(3, 3, 1)]), relu()], "a ReLU must follow"),
        ([conv(2, 3, 1), relu(), norm(3), conv(3, 3, 1), relu()], "BatchNorm is understood only directly after"),
        ([conv(2, 3, 1), relu(), Residual([conv(3, 3, 1)], [relu()]), relu()], "a shortcut is nothing"),
        ([conv(2, 3, 1), Residual([relu(inplace=True), conv(3, 3, 1)]), relu()], "in place it changes what the shortcut reads"),
        ([conv(2, 3, 1), nn.AvgPool2d(2), relu()], "average pooling of images must follow a ReLU"),
        ([conv(2, 3, 1), relu(), nn.AvgPool2d(3, 2), conv(3, 3, 1), relu()], "do not overlap"),
        ([conv(2, 3, 1), relu(), nn.AdaptiveAvgPool2d(2), conv(3, 3, 1), relu()], "only the mean of the whole image"),
        ([conv(2, 3, 1), relu(), nn.AvgPool2d(2), Residual([conv(3, 3, 1)]), relu()], "must follow an affine layer"),
    ],
)  # fmt: skip
def test_what_is_no_residual_block_or_pooling_is_refused_with_its_place(layers: list[nn.Module], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_blocks(Network([*layers, nn.Flatten(), linear(12, 4)], SHAPE, 4).eval())


def test_branches_that_do_not_fit_are_refused_with_their_shapes() -> None:
    stem = [conv(2, 3, 3, 1, 1), relu()]
    with pytest.raises(UserError, match="cannot be added"):
        compile_network(Network([*stem, Residual([conv(3, 3, 3)]), relu(), nn.Flatten(), linear(108, 4)], SHAPE, 4).eval(), SHAPE)
    wide = Residual([conv(3, 3, 3, 2, 1), relu(), conv(3, 3, 3, 1, 1), relu(), conv(3, 3, 1, 2)], [conv(3, 3, 1, 4)])
    with pytest.raises(UserError, match=r"does not fit beside.*auto_lirpa"):
        compile_network(Network([*stem, wide, relu(), nn.Flatten(), linear(12, 4)], SHAPE, 4).eval(), SHAPE)


def test_resnet_small_halves_twice_and_scales_with_its_width() -> None:
    for shape, features in (((1, 28, 28), 64 * 4), ((3, 32, 32), 64 * 4), ((1, 8, 8), 64 * 4), ((1, 5, 4), 64 * 2)):
        network = resnet_small(shape, 10, [0.1] * shape[0], [0.3] * shape[0])
        assert network(torch.rand(2, *shape)).shape == (2, 10)
        assert network[-1].in_features == features
    narrow = resnet_small((1, 28, 28), 10, [0.0], [1.0], 0.25, batch_norm=False)
    assert [m.out_channels for m in narrow.modules() if isinstance(m, nn.Conv2d)] == [4, 4, 4, 8, 8, 8, 16, 16, 16]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in narrow.modules())
