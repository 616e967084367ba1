"""`cure-ray fsck --replay`: honest stores are confirmed by their network, and whatever is tampered with in a row is contradicted."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cure_ray.api.replay import Hand, replay_store
from cure_ray.certification.job import Job, Shard
from cure_ray.certification.replay import Questioner, outside
from cure_ray.certification.verdict import Status, Verdict
from cure_ray.cli import app
from cure_ray.commands.certify import certify
from cure_ray.commands.fsck import fsck as command
from cure_ray.config import parse_experiment
from cure_ray.errors import UserError
from cure_ray.interchange import write_onnx
from cure_ray.interchange.foreign import load_npz
from cure_ray.results.fsck import fsck
from cure_ray.results.schema import from_table
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import write_checkpoint
from cure_ray.testing import tiny
from cure_ray.threats import Ball, Patch, Threat
from cure_ray.threats.box import UNIT
from cure_ray.threats.text import read_threats
from cure_ray.threats.transformations import parse_transformation
from cure_ray.threats.warps import describe, transformed
from cure_ray.training.loop import new_network

THREATS = "linf=0.03,l2=0.3;R(20);patch=2x2"
HAND = Hand("cure_ray.testing.tiny:architecture")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with rows of every family and of the statuses that mean something."""
    root = tmp_path_factory.mktemp("replay")
    save_file(tiny.network().state_dict(), root / "weights.safetensors")
    x, y = tiny.samples(16)
    y[:2] = (y[:2] + 1) % 10  # two images the network gets wrong
    np.savez(root / "data.npz", images=x.numpy(), labels=y.numpy())
    options: dict[str, Any] = {"network": HAND.network, "weights": root / "weights.safetensors", "data": root / "data.npz", "device": "cpu"}
    certify(**options, threats=THREATS, out=str(root / "out"))
    return root


@pytest.fixture
def store(honest: Path, tmp_path: Path) -> Store:
    shutil.copytree(honest / "out", tmp_path / "out")
    return Store.open(tmp_path / "out")


def test_an_honest_store_is_confirmed_in_every_family(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    command(store.root, replay=True, rows=2, network=HAND.network)
    printed = capsys.readouterr().out
    for words in ("certified (proven again", "falsified (the witness lies in the threat", "misclassified", "is whole"):
        assert words in printed
    (found,) = replay_store(store, HAND, rows=2)
    kinds = {(r.threat, str(r.status)) for r in from_table(store.read())}
    assert {("R(20)", "falsified"), ("R(20)", "certified"), ("linf=0.03", "certified"), ("patch=2x2", "falsified")} <= kinds
    assert found.asked >= 2 * len({k for k in kinds if k[1] in ("certified", "falsified", "misclassified")}) - 4
    assert found.contradicted == []


@pytest.fixture(scope="module")
def rows(honest: Path) -> list[Verdict]:
    return from_table(Store.open(honest / "out").read())


@pytest.fixture(scope="module")
def questioner(honest: Path) -> Questioner:
    return Questioner(tiny.network(), load_npz(honest / "data.npz"), 1, honest / "bundles")


def of(rows: list[Verdict], status: str, family: str = "lp") -> Verdict:
    return next(row for row in rows if row.status == status and row.family == family)


def threat_of(row: Verdict) -> Threat:
    return next(t for t in read_threats(THREATS) if str(t) == row.threat)


PROOF = {"status": Status.CERTIFIED, "stage": "crown", "margin_lb": 0.5, "margins": (0.5,) * 9, "witness": None}


@pytest.mark.parametrize(
    ("which", "changes", "sentence"),
    [
        (("certified",), {"label": 11}, "the row says 11"),
        (("certified",), {"predicted": 11}, "of the image itself"),
        (("certified",), {"sample_index": 16}, "only 16 images"),
        (("misclassified",), PROOF, "the image itself is misclassified"),
        (("misclassified",), {**PROOF, "predicted": -1}, "the image itself is misclassified"),
        (("falsified",), PROOF, "an image of the threat has margin"),
        (("falsified", "geometric"), {**PROOF, "stage": "ibp"}, "an image of the threat has margin"),
        (("falsified", "patch"), {**PROOF, "stage": "ibp"}, "an image of the threat has margin"),
        (("certified",), {"margins": (1e3,) * 9, "margin_lb": 1e3}, "the row proves 1000"),
        (("certified",), {"margins": (), "margin_lb": None}, "without positive margins"),
        (("certified",), {"status": Status.MISCLASSIFIED, "stage": "clean"}, "the image itself is classified"),
        (("falsified",), {}, "no witness"),
    ],
)
def test_a_row_that_was_tampered_with_is_contradicted(
    rows: list[Verdict], questioner: Questioner, which: tuple[str, ...], changes: dict[str, Any], sentence: str
) -> None:
    row = of(rows, *which)
    answer = questioner.ask(dataclasses.replace(row, **changes), threat_of(row), None)
    assert answer.kind == "contradicted"
    assert sentence in answer.what


@pytest.mark.parametrize("family", ["lp", "geometric", "patch"])
def test_a_witness_that_proves_nothing_is_contradicted(rows: list[Verdict], questioner: Questioner, honest: Path, family: str) -> None:
    row = of(rows, "falsified", family)
    assert row.witness is not None
    image, true = questioner.samples.images[row.sample_index], torch.from_numpy(Store.open(honest / "out").read_witness(row.witness))
    assert questioner.ask(row, threat_of(row), true).kind == "confirmed"
    harmless, strange = (questioner.ask(row, threat_of(row), w.double()) for w in (image, 1 - image))
    assert harmless.kind == strange.kind == "contradicted"
    assert ("differs" if family == "geometric" else "classified correctly") in harmless.what
    assert "no image of the threat" in strange.what


def test_a_proof_that_does_not_come_again_is_open_not_wrong(rows: list[Verdict], questioner: Questioner) -> None:
    """A budget of seconds may have been enough on another machine."""
    row = next(r for r in rows if r.status == "certified" and r.stage not in ("ibp", "crown-ibp") and r.family == "lp")
    assert questioner.ask(row, threat_of(row), None).kind == "confirmed"
    answer = questioner.ask(dataclasses.replace(row, stage="ibp", margins=(1e-9,) * 9, margin_lb=1e-9), threat_of(row), None)
    assert answer.kind == "open"
    assert "not proven again by ibp" in answer.what


def test_a_false_certificate_in_a_store_is_a_finding(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """As somebody with an editor for Parquet would write it: nothing but the network knows better."""
    rows = [r for r in from_table(store.read()) if r.threat == "l2=0.3"]
    victim = of(rows, "falsified")
    (plan,) = store.plans()
    for name in store.shards():
        if "-l2=0.3-" in name:
            store.discard(f"verdicts/{name}")
    forged = [dataclasses.replace(r, **PROOF) if r is victim else r for r in rows]
    store.write(Shard(Job.of(plan), (Ball("l2", 0.3),), tuple(r.sample_index for r in forged)), forged)
    assert fsck(store) == []
    with pytest.raises(UserError, match=r"1 rows are contradicted by their network; do not use"):
        command(store.root, replay=True, rows=50, network=HAND.network)
    assert f"contradicted: checkpoint {victim.checkpoint_digest[:12]}, sample {victim.sample_index}, l2=0.3" in capsys.readouterr().out


def test_a_stores_word_runs_no_code_and_missing_networks_are_named(store: Store, honest: Path) -> None:
    for hand, reason in (
        (Hand(), "give the factory with --network"),
        (Hand("cure_ray.testing.tiny:residual"), "computes something else|another architecture"),
        (Hand(HAND.network, data=honest / "gone.npz"), "no such file"),
    ):
        (found,) = replay_store(store, hand)
        assert found.asked == 0
        assert found.unavailable is not None
        assert any(part in found.unavailable for part in reason.split("|"))
    with pytest.raises(UserError, match="nothing could be replayed"):
        command(store.root, replay=True)
    y = np.load(honest / "data.npz")["labels"]
    np.savez(Path(store.root) / "other.npz", images=1 - np.load(honest / "data.npz")["images"], labels=y)
    (found,) = replay_store(store, Hand(HAND.network, data=Path(store.root) / "other.npz"))
    assert "others than those that were certified" in str(found.unavailable)


def test_checkpoints_and_onnx_files_are_found_where_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = parse_experiment({"network": {"name": "mlp", "width": 0.2}, "certification": {"samples": 6}})
    torch.manual_seed(0)
    write_checkpoint(tmp_path / "epoch_0001", experiment, 1, new_network(experiment).state_dict(), {}, {})
    certify(checkpoint=[tmp_path / "epoch_0001"], out=str(tmp_path / "own"), device="cpu", stages="ibp,attack", quiet=True)
    write_onnx(tiny.network(), tmp_path / "net.onnx")
    x, y = tiny.samples(4)
    np.savez(tmp_path / "data.npz", images=x.numpy(), labels=y.numpy())
    foreign = {"onnx": tmp_path / "net.onnx", "data": tmp_path / "data.npz", "threats": "linf=0.02"}
    certify(**foreign, out=str(tmp_path / "onnx"), device="cpu", stages="ibp,crown", quiet=True)  # type: ignore[arg-type]
    for name in ("own", "onnx"):
        capsys.readouterr()
        app(["fsck", str(tmp_path / name), "--replay"], standalone_mode=False)
        assert "replayed" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "epoch_0001")
    (found,) = replay_store(Store.open(tmp_path / "own"), Hand())
    assert "does not exist" in str(found.unavailable)


def test_inside_and_outside_of_every_threat() -> None:
    x = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(0)).double() * 0.8 + 0.1
    for norm, size in (("linf", 1), ("l2", 1), ("l1", 1)):
        step = torch.zeros_like(x)
        step[0, 2, 3] = 0.05 * size
        assert outside(Ball(norm, 0.0500001), x, x + step, UNIT, None) is None  # type: ignore[arg-type]
        assert "distance" in str(outside(Ball(norm, 0.0499), x, x + step, UNIT, None))  # type: ignore[arg-type]
    assert "leaves" in str(outside(Ball("linf", 2.0), x, x + 1, UNIT, None))
    patched = x.clone()
    patched[:, 1:3, 2:5] = 1.0
    assert outside(Patch(2, 3), x, patched, UNIT, None) is None
    for smaller in (Patch(1, 3), Patch(2, 2), Patch(3, 2)):
        assert "2x3" in str(outside(smaller, x, patched, UNIT, None))
    threat = parse_transformation("Sc(5),R(5),B(0.01)")
    point = [(2 * s.low + s.high) / 3 for s in threat.steps]
    message = f"misclassified at {describe(threat.steps, point)}"
    moved = transformed(threat.steps, point, x[None])[0]
    assert outside(threat, x, moved, UNIT, message) is None
    assert "differs" in str(outside(threat, x, x, UNIT, message))
    assert "leaves its range" in str(outside(parse_transformation("Sc(5),R(1),B(0.01)"), x, moved, UNIT, message))
    assert "not recorded" in str(outside(threat, x, moved, UNIT, None))
