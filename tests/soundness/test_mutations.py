"""Deliberate mistakes, one at a time, in a copy of the package: the compact soundness check must catch every one.

A check that lets a wrong sign pass is worth nothing; this is the test of the tests.
"""

import importlib
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import soundness_tools

import cure_ray

PACKAGE = Path(cure_ray.__file__).parent

# (what is wrong, file, text, replacement)
MISTAKES = [
    ("offsets: a box that is too small", "threats.py", "torch.maximum(low, -x)", "torch.maximum(low, -x / 2)"),
    ("wrong dual norm", "threats.py", "P[DUAL[norm]], dim=-1", "math.inf, dim=-1"),
    ("l2 dual: sign of the constant", "threats.py", "- m.squeeze(-1) * (eps * eps / 2)", "+ m.squeeze(-1) * (eps * eps / 2)"),
    ("l1: room on the wrong side", "threats.py", "torch.where(A < 0, high, -low)", "torch.where(A < 0, -low, high)"),
    ("linf: radius added", "threats.py", "- _dot(A.abs(), radius)", "+ _dot(A.abs(), radius)"),
    ("BatchNorm not folded into the weights", "bounds/compiled.py", "weight = weight * gain.view", "weight = weight * (gain * 0 + 1).view"),
    ("BatchNorm mean forgotten", "bounds/compiled.py", "gain * (bias - mean) + shift", "gain * bias + shift"),
    (
        "eps after normalisation: weights not divided",
        "bounds/compiled.py",
        "weight = weight / normalize.std",
        "weight = weight / 1 + 0 * normalize.std",
    ),
    (
        "Normalize: constant bias map despite padding",
        "bounds/compiled.py",
        "bias.view(-1, 1, 1) + shift,",
        "bias.view(-1, 1, 1) + shift.amax((1, 2), keepdim=True) + 0 * shift,",
    ),
    (
        "flatten in the wrong order",
        "bounds/compiled.py",
        "weight.view(-1, *shape).permute(0, 2, 3, 1).reshape(weight.shape[0], -1)",
        "weight.reshape(weight.shape[0], -1)",
    ),
    ("transposed convolution: padding ignored", "bounds/affine.py", "top, left = self.padding", "top, left = 0, 0"),
    (
        "transposed convolution: stride transposed",
        "bounds/affine.py",
        "out[:, i : i + sy * (H - 1) + 1 : sy, j :",
        "out[:, j : j + sy * (H - 1) + 1 : sy, i :",
    ),
    ("convolution: bias missing", "bounds/affine.py", "return self.linear(x_RN) + self.bias_N", "return self.linear(x_RN)"),
    ("first layer: ball too small", "bounds/domain.py", "ball_N = domain.threat.eps *", "ball_N = 0.8 * domain.threat.eps *"),
    (
        "first layer: pixel and channel confused",
        "bounds/domain.py",
        "neuron_R // layer.out_shape[0], neuron_R % layer.out_shape[0]",
        "neuron_R % (layer.outputs // layer.out_shape[0]), neuron_R // (layer.outputs // layer.out_shape[0])",
    ),
    (
        "IBP: W for |W|",
        "bounds/relaxation.py",
        "layer.linear((high - low) / 2, layer.weight_abs)",
        "layer.linear((high - low) / 2, layer.weight)",
    ),
    (
        "IBP: ReLU forgotten above",
        "bounds/relaxation.py",
        "low, high = below.lower_BN.clamp_min(0), below.upper_BN.clamp_min(0)",
        "low, high = below.lower_BN.clamp_min(0), below.upper_BN",
    ),
    (
        "IBP margins: radius added",
        "bounds/relaxation.py",
        '+ b_BS - torch.einsum("bsn,bn->bs", A_BSN.abs(), radius_BN)',
        '+ b_BS + torch.einsum("bsn,bn->bs", A_BSN.abs(), radius_BN)',
    ),
    ("margins in the wrong order", "bounds/relaxation.py", "(step >= y_B.unsqueeze(1))", "(step > y_B.unsqueeze(1))"),
    (
        "relaxation: upper slope too flat",
        "bounds/relaxation.py",
        "upper - lower, torch.ones_like(lower)",
        "upper - 2 * lower, torch.ones_like(lower)",
    ),
    (
        "relaxation: unstable taken for stable",
        "bounds/relaxation.py",
        "(self.lower_BN < 0) & (self.upper_BN > 0)",
        "(self.lower_BN < -0.05) & (self.upper_BN > 0)",
    ),
    (
        "relaxation: lower slope above 1",
        "bounds/relaxation.py",
        "return torch.where(unstable, alpha, active)",
        "return torch.where(unstable, 1.5 * alpha, active)",
    ),
    (
        "CROWN: slopes swapped",
        "bounds/linear.py",
        "torch.addcmul(upper_BSN, A_BSN - negative_BSN, slope)",
        "torch.addcmul(negative_BSN * slope, A_BSN - negative_BSN, relaxation.upper_slope_BN.unsqueeze(1))",
    ),
    ("CROWN: intercept missing", "bounds/linear.py", "b_BS = b_BS + intercept_BS", "b_BS = b_BS + 0 * intercept_BS"),
    ("CROWN: bias missing", "bounds/linear.py", "b_BS = b_BS + A_BSN @ layer.bias_N", "b_BS = b_BS + 0 * (A_BSN @ layer.bias_N)"),
    ("CROWN: sign of a clamp", "bounds/linear.py", "negative_BSN = A_BSN.clamp_max(0)", "negative_BSN = A_BSN.clamp_min(0)"),
    ("windows: padding forgotten", "bounds/windows.py", "(self.shift[0] * sy + py,", "(self.shift[0] * sy,"),
    (
        "windows: intercept missing",
        "bounds/windows.py",
        "b_2R = b_2R + (negative * g.upper_intercept)",
        "b_2R = b_2R + 0 * (negative * g.upper_intercept)",
    ),
    ("windows: channels confused", "bounds/windows.py", "neuron_R % C, neuron_R // C % W", "neuron_R // C % C, neuron_R // C % W"),
    ("hidden bounds: sign of the upper plane", "bounds/intermediate.py", "-value_G2S[:, S:])", "value_G2S[:, S:])"),
    (
        "hidden bounds: kept for the wrong neuron",
        "bounds/intermediate.py",
        "self._keep(rows, neuron_GS,",
        "self._keep(rows, neuron_GS.flip(1),",
    ),
    (
        "hidden bounds: bias of the row missing",
        "bounds/intermediate.py",
        "return layer.weight[neuron_GS], layer.bias_N[neuron_GS]",
        "return layer.weight[neuron_GS], 0 * layer.bias_N[neuron_GS]",
    ),
    ("splits: multiplier of the wrong sign", "bounds/subproblems.py", "force_DU = -split_DU", "force_DU = split_DU"),
    (
        "splits: the wrong side is clipped",
        "bounds/subproblems.py",
        "torch.where(split_DN > 0, lower_DN.clamp_min(0), lower_DN)",
        "torch.where(split_DN < 0, lower_DN.clamp_min(0), lower_DN)",
    ),
    (
        "branching: a child forgotten",
        "bounds/branching.py",
        "one = torch.ones_like(picked.spec_D)",
        "one = torch.zeros_like(picked.spec_D)",
    ),
    (
        "branching: open leaves reported as closed",
        "bounds/branching.py",
        "torch.where(self.leaves_BS == 0, self.closed_BS",
        "torch.where(self.leaves_BS >= 0, self.closed_BS",
    ),
    (
        "deciding in float32",
        "bounds/native.py",
        "self.decide = compiled.to(self.device, torch.float64)",
        "self.decide = compiled.to(self.device, torch.float32)",
    ),
    ("claims not re-evaluated", "bounds/native.py", "if len(claimed):", "if len(claimed) < 0:"),
    ("rounding ignored", "bounds/compiled.py", "gamma = 2 * (widest + 64) * 2.0**-53", "gamma = 0.0 * widest"),
]
FAST = 10  # always run; the others with `make soundness`


@contextmanager
def package_at(root: Path):
    """Import cure_ray from `root` instead, and put everything back afterwards."""
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "cure_ray"}
    for name in saved:
        del sys.modules[name]
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "cure_ray"]:
            del sys.modules[name]
        sys.modules.update(saved)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("__init__.py", "errors.py", "norms.py", "threats.py", "networks.py", "bounds"):
        source, target = PACKAGE / name, tmp_path / "cure_ray" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*lirpa*"))
        else:
            shutil.copy(source, target)
    return tmp_path


def caught(root: Path, file: str, text: str, replacement: str) -> bool:
    path = root / "cure_ray" / file
    source = path.read_text()
    assert source.count(text) == 1, f"{file}: the mistake no longer applies, {source.count(text)} places read {text!r}"
    path.write_text(source.replace(text, replacement))
    with package_at(root):
        try:
            soundness_tools.check_compact()
        except Exception:
            return True
    return False


def test_the_unchanged_copy_passes(copy):
    with package_at(copy):
        import cure_ray.bounds.native as altered

        assert str(copy) in altered.__file__
        soundness_tools.check_compact()


# Spread over the files, so that the fast part is not all of one kind.
ORDER = [MISTAKES[i] for i in range(len(MISTAKES)) if i % 4 == 0] + [MISTAKES[i] for i in range(len(MISTAKES)) if i % 4]


@pytest.mark.parametrize("mistake", ORDER[:FAST], ids=lambda m: m[0])
def test_a_mistake_is_caught(copy, mistake):
    assert caught(copy, *mistake[1:]), f"survived: {mistake[0]}"


@pytest.mark.soundness_long
@pytest.mark.parametrize("mistake", ORDER[FAST:], ids=lambda m: m[0])
def test_another_mistake_is_caught(copy, mistake):
    assert caught(copy, *mistake[1:]), f"survived: {mistake[0]}"
