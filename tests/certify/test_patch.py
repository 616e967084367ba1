import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cure_ray.bounds.native.compiled import flatten_images
from cure_ray.bounds.native.engine import NativeEngine
from cure_ray.certification import patches
from cure_ray.certification.boxes import BoxDomain, box_margins, proven
from cure_ray.certification.bundle import Alarm
from cure_ray.certification.patches import PatchSettings, certify_patch
from cure_ray.certification.verdict import Status
from cure_ray.certification.windows import anywhere_margins, clean_pass, patch_margins, positions
from cure_ray.errors import SoundnessError, UserError
from cure_ray.networks.models import Network, Normalize, cnn7
from cure_ray.threats.balls import Ball
from cure_ray.threats.box import UNIT
from cure_ray.threats.patches import Patch
from cure_ray.threats.text import parse_patch
from tests.certify.perturbation_tools import digits_network


def box(x: Tensor, corner: tuple[int, int], height: int, width: int) -> tuple[Tensor, Tensor]:
    """The interval images of a patch at one position, flat."""
    low, high = x.double().clone(), x.double().clone()
    part = (..., slice(corner[0], corner[0] + height), slice(corner[1], corner[1] + width))
    low[part], high[part] = 0.0, 1.0
    return flatten_images(low), flatten_images(high)


def naive(engine: NativeEngine, x: Tensor, y: Tensor, corner: tuple[int, int], height: int, width: int) -> Tensor:
    """The whole image propagated in float64."""
    assert engine.decide is not None
    low, high = box(x, corner, height, width)
    return engine._crown(engine.decide, BoxDomain(low, torch.zeros_like(low), high - low, Ball("linf", 1.0), UNIT), y, "ibp")


def strided(channels: int) -> Network:
    """Normalised, odd strides and paddings, a border that no output reads."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [
        Normalize((0.3,) * channels, (0.4,) * channels),
        nn.Conv2d(channels, 4, 3, 2, 0),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, (2, 3), (1, 2), (0, 1)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 3 * 2, 7),
        nn.ReLU(),
        nn.Linear(7, 6),
        nn.ReLU(),
        nn.Linear(6, 10),
    ]
    return Network(layers, (channels, 10, 10), 10).eval()


def narrow_cnn7() -> Network:
    torch.manual_seed(2)
    network = cnn7((3, 10, 10), 10, (0.4,) * 3, (0.2,) * 3, width=0.1)
    for module in network:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.mark.parametrize("name", ["strided", "cnn7", "mlp", "conv-small"])
@pytest.mark.parametrize(("height", "width"), [(2, 2), (1, 3)])
def test_windowed_bounds_equal_the_naive_ones_at_corners_edges_and_inside(name: str, height: int, width: int) -> None:
    if name in ("mlp", "conv-small"):
        network, x, y = digits_network(name)
        x, y = x[:5], y[:5]
    else:
        network = strided(2) if name == "strided" else narrow_cnn7()
        x = torch.rand(5, *network.input_shape, generator=torch.Generator().manual_seed(0))
        y = torch.arange(5)
    engine = NativeEngine(network)
    assert engine.decide is not None
    clean = clean_pass(engine.decide, flatten_images(x.double()), y)
    H, W = x.shape[2:]
    down, right = H - height, W - width
    for corner in [(0, 0), (0, right), (down, 0), (down, right), (0, 3), (down, 2), (3, 0), (4, right), (3, 4)]:
        windowed, whole = patch_margins(clean, corner, height, width), naive(engine, x, y, corner, height, width)
        assert torch.allclose(windowed, whole, rtol=1e-9, atol=1e-6), corner


def test_the_verdict_is_that_of_every_position_propagated_naively() -> None:
    network, x, y = digits_network()
    engine = NativeEngine(network)
    ok = torch.ones(len(x), dtype=torch.bool)
    for corner in positions((8, 8), 1, 1):
        ok &= proven(box_margins(engine, *box(x, corner, 1, 1), y, "ibp"))
    found = certify_patch(engine, network, x, y, Patch(1, 1))
    assert [o.status == Status.CERTIFIED for o in found] == ok.tolist()
    assert 0 < int(ok.sum()) < len(ok)


def test_random_patches_never_break_a_proven_margin() -> None:
    network, x, y = digits_network()
    engine = NativeEngine(network)
    assert engine.decide is not None
    clean = clean_pass(engine.decide, flatten_images(x.double()), y)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for corner in positions((8, 8), 2, 2)[::5]:
            bound = patch_margins(clean, corner, 2, 2).amin(1)
            for _ in range(20):
                image = x.double().clone()
                values = torch.rand(len(x), 1, 2, 2, generator=rng).round().double()
                image[:, :, corner[0] : corner[0] + 2, corner[1] : corner[1] + 2] = values
                logits = engine.decide(flatten_images(image))
                others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
                assert bool((logits.gather(1, y[:, None]).squeeze(1) - others >= bound - 1e-9).all())


def test_the_bound_for_all_positions_together_is_below_that_of_each() -> None:
    for name in ("conv-small", "mlp"):
        network, x, y = digits_network(name)
        engine = NativeEngine(network)
        assert engine.decide is not None
        clean = clean_pass(engine.decide, flatten_images(x.double()), y)
        together = anywhere_margins(clean, 2, 2)
        for corner in positions((8, 8), 2, 2)[::7]:
            assert bool((together <= patch_margins(clean, corner, 2, 2) + 1e-9).all())


def test_the_precheck_changes_no_verdict() -> None:
    network, x, y = digits_network()
    engine = NativeEngine(network)
    plain, checked = (certify_patch(engine, network, x, y, Patch(1, 1), PatchSettings(precheck=p, batch=16)) for p in (False, True))
    assert [o.status for o in plain] == [o.status for o in checked]


def test_a_falsified_image_differs_from_the_original_in_one_patch_and_is_misclassified() -> None:
    network, x, y = digits_network()
    found = certify_patch(NativeEngine(network), network, x, y, Patch(3, 3))
    falsified = [(b, o) for b, o in enumerate(found) if o.status == Status.FALSIFIED]
    assert falsified
    for b, outcome in falsified:
        assert outcome.witness is not None
        spots = (outcome.witness - x[b].double()).abs().sum(0).nonzero()
        assert bool(((spots.amax(0) - spots.amin(0)) < 3).all())
        assert bool(((outcome.witness >= 0) & (outcome.witness <= 1)).all())
        assert int(network(outcome.witness[None].float()).argmax()) != int(y[b])


def test_a_patch_as_large_as_the_image_is_never_certified_and_a_larger_one_is_refused() -> None:
    network, x, y = digits_network()
    engine = NativeEngine(network)
    assert all(o.status != Status.CERTIFIED for o in certify_patch(engine, network, x, y, Patch(8, 8)))
    with pytest.raises(UserError, match="larger than the image"):
        certify_patch(engine, network, x, y, Patch(9, 2))


@pytest.mark.parametrize("text", ["patch", "patch=", "patch=0x2", "patch=2x", "patch=-1", "patch=2x2x2", "patch=a"])
def test_patches_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="patch=2x2"):
        parse_patch(text)


def test_patches_are_written_as_height_times_width() -> None:
    assert parse_patch("patch=2x3") == Patch(2, 3)
    assert parse_patch(" patch = 3 ") == Patch(3, 3)
    assert parse_patch("patch(2x3)") == Patch(2, 3)
    assert str(Patch(2, 3)) == "patch=2x3"
    with pytest.raises(UserError, match="larger than the image"):
        parse_patch("patch=9", (8, 8))


def test_a_certified_image_is_attacked_again_with_patches_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where no attack came before the proof: a bound a little above the margin of some patch stops the run, with the seed."""
    network, x, y = digits_network()
    engine, settings = NativeEngine(network, "cpu"), PatchSettings(attack=False)
    alarm = Alarm(engine, network, seed=5, root=tmp_path / "bundle")
    found = certify_patch(engine, network, x, y, Patch(1, 1), settings, alarm=alarm)
    certified = [b for b, o in enumerate(found) if o.status == Status.CERTIFIED]
    assert len(certified) >= 3
    assert all(float(found[b].margins.min()) <= found[b].attack_margin for b in certified)
    b = certified[0]
    lie = found[b].attack_margin + 1e-3
    real = patches.patch_margins
    monkeypatch.setattr(patches, "patch_margins", lambda *given: torch.full_like(real(*given), lie))
    with pytest.raises(SoundnessError, match="a patched image has margin"):
        certify_patch(engine, network, x[b : b + 1], y[b : b + 1], Patch(1, 1), settings, [b], alarm)
    (bundle,) = (tmp_path / "bundle").iterdir()
    assert json.loads((bundle / "facts.json").read_text())["seed"] == 5
    witness = load_file(bundle / "sample.safetensors")["witness"]
    changed = (witness != x[b].double()).any(0).nonzero()
    assert len(changed) == 1
