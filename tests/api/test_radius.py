"""`cure_ray.radius`: both ends of every image's bracket, against radii that are known exactly, and what monotonicity owes."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import cure_ray
from cure_ray.certification import radii
from cure_ray.certification.balls import Certifier
from cure_ray.certification.radii import between
from cure_ray.certification.verdict import Status
from cure_ray.errors import SoundnessError
from cure_ray.testing import tiny

QUICK: dict[str, Any] = {"quiet": True, "device": "cpu"}
DUAL = {"linf": 1, "l2": 2, "l1": math.inf}


def linear(weights: torch.Tensor) -> nn.Sequential:
    """Class 0 where w.(x - 1/2) > -1/4: two logits, so that the distance to the boundary is a division."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(weights.numel(), 2))
    with torch.no_grad():
        network[1].weight.copy_(torch.stack([weights, torch.zeros_like(weights)]))
        network[1].bias.copy_(torch.tensor([0.25 - float(weights.sum()) / 2, 0.0]))
    return network


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_brackets_of_a_linear_network_hold_the_exact_radius(norm: str) -> None:
    weights = torch.tensor([1.0, -0.5, 0.75, 0.25, -1.0, 0.5, -0.25, 0.125, 0.625])
    shifts = torch.linspace(-0.04, 0.02, 6)
    images = 0.5 + shifts.reshape(6, 1, 1, 1) * weights.sign().reshape(1, 1, 3, 3)
    found = cure_ray.radius(linear(weights), images, [0] * 6, norm, precision=0.01, **QUICK).table
    margins = (images - 0.5).flatten(1).double() @ weights.double() + 0.25
    exact = (margins / torch.linalg.vector_norm(weights.double(), DUAL[norm])).numpy()
    assert (exact < 0.44).all(), "the domain must cut nothing off these balls"
    assert (found["certified"] <= exact).all()
    assert (found["falsified"] >= exact).all()
    assert (found["falsified"] - found["certified"] <= 0.03 * exact).all()
    assert (found["certified"] >= 0.98 * exact).all()


def test_a_network_s_brackets_agree_with_single_certifications() -> None:
    x, y = tiny.samples(6)
    y[5] = (y[5] + 1) % 10
    result = cure_ray.radius(tiny.network(), x, y, "l2", precision=0.1, stages="ibp,crown-ibp,attack,crown", **QUICK)
    table = result.table.set_index("sample_index")
    assert table.loc[5, ["certified", "falsified", "status"]].tolist() == [0.0, 0.0, "misclassified"]
    right = table[table["status"] == "bracketed"]
    assert (right["certified"] > 0).all()
    assert (right["certified"] < right["falsified"]).all()
    replay = tiny.architecture()
    replay.load_state_dict(tiny.network().state_dict())
    replay.double().eval()
    for i, row in right.iterrows():
        threats = [cure_ray.Ball("l2", row["certified"])]
        proven = cure_ray.certify(tiny.network(), x, y, threats, samples=[int(str(i))], stages="ibp,crown-ibp,crown", **QUICK).verdicts
        assert proven["status"].tolist() == ["certified"]
        witness = torch.tensor(result.witness(int(str(i))))
        assert float((witness - x[int(str(i))]).norm()) <= row["falsified"]
        assert bool(((witness >= 0) & (witness <= 1)).all())
        assert int(replay(witness[None]).argmax()) != int(y[int(str(i))])
    assert "5 of them classified correctly" in result.summary()


def test_a_search_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tiny.samples(4)
    options: dict[str, Any] = {"precision": 0.2, "stages": "ibp,crown-ibp,attack", "out": tmp_path / "radii", **QUICK}
    calls: list[float] = []
    real = Certifier.certify

    def counted(self: Certifier, x: Any, y: Any, threat: Any, indices: Any) -> Any:
        calls.append(threat.eps)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, x, y, threat, indices)

    monkeypatch.setattr(Certifier, "certify", counted)
    with pytest.raises(Exception, match="run the same command to continue"):
        cure_ray.radius(tiny.network(), x, y, "linf", **options)
    kept = len(list((tmp_path / "radii" / "probes").iterdir()))
    assert kept == 3
    first = cure_ray.radius(tiny.network(), x, y, "linf", **options)
    before = len(calls)
    again = cure_ray.radius(tiny.network(), x, y, "linf", **options)
    assert len(calls) == before, "everything was known"
    pd.testing.assert_frame_equal(first.table.drop(columns="seconds"), again.table.drop(columns="seconds"))
    assert np.array_equal(first.witness(0), again.witness(0))
    assert sum(b.probes for b in first.brackets) == sum(b.probes for b in again.brackets)
    with pytest.raises(cure_ray.UserError, match="norm: linf there, l2 now"):
        cure_ray.radius(tiny.network(), x, y, "l2", **options)


def test_a_proof_beyond_a_counterexample_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm between radii: each probe alone is believed, together they contradict each other."""
    monkeypatch.chdir(tmp_path)
    x, y = tiny.samples(1)
    real = Certifier.certify

    def lying(self: Certifier, x: Any, y: Any, threat: Any, indices: Any) -> Any:
        found = real(self, x, y, threat, indices)
        if self.settings.stages != ("attack",):
            for outcome in found:
                outcome.decide(Status.CERTIFIED, "ibp")
        return found

    monkeypatch.setattr(Certifier, "certify", lying)
    monkeypatch.setattr(radii, "closer", lambda replay, x, label, witness: witness)  # a witness far out, so that a proof goes past others
    monkeypatch.setattr(radii.Bracket, "next", lambda self, limit, precision: [(limit, "attack"), (limit, "prove"), None][self.probes])
    with pytest.raises(SoundnessError, match=r"proven at 1, and a misclassified image is .* away"):
        cure_ray.radius(tiny.network(), x, y, "linf", stages="ibp", **QUICK)
    assert list((tmp_path / "soundness-failure").iterdir())


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.3), (0.2, 0.21), (1e-9, 784.0), (3.0, 3.0001)])
def test_the_next_radius_is_round_and_in_the_middle_half(low: float, high: float) -> None:
    middle = between(low, high)
    assert low + (high - low) / 4 <= middle <= high - (high - low) / 4
    assert between(low * 1.001, high * 1.001) == middle or low > 0.1, "like brackets meet"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"norm": "l3"}, "unknown norm 'l3'"),
        ({"precision": 0.0}, "between 0 and 1"),
        ({"precision": 2.0}, "between 0 and 1"),
        ({"workers": 2}, "in one process"),
        ({"images": torch.zeros(1, 8, 8)}, r"\(N, C, H, W\)"),
    ],
)
def test_bad_input_raises_a_sentence(change: dict[str, Any], sentence: str) -> None:
    x, y = tiny.samples(1)
    given: dict[str, Any] = {"network": tiny.architecture(), "images": x, "labels": y, "norm": "l2", **QUICK}
    with pytest.raises(cure_ray.UserError, match=sentence):
        cure_ray.radius(**{**given, **change})


def test_the_command_prints_and_writes_the_brackets(tmp_path: Path) -> None:
    x, y = tiny.samples(2)
    np.savez(tmp_path / "d.npz", images=x.numpy(), labels=y.numpy())
    torch.save(tiny.network().state_dict(), tmp_path / "w.pt")
    words = ["radius", "--network", "cure_ray.testing.tiny:architecture", "--weights", "w.pt", "--data", "d.npz", "--norm", "linf"]
    more = ["--precision", "0.2", "--stages", "ibp,crown-ibp,attack", "--table", "radii.csv", "--quiet", "--device", "cpu"]
    places = str(Path(cure_ray.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "cure_ray", *words, *more], cwd=tmp_path, env={"PYTHONPATH": places, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 samples, 2 of them classified correctly; their linf radius" in done.stdout
    assert (pd.read_csv(tmp_path / "radii.csv")["certified"] > 0).all()
