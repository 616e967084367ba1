"""The zoo at work: a run goes in whole, is loaded, certified again and compared; what does not belong together stays out."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nearest_mean import Nearest

import cure_ray
import cure_ray.zoo
from cure_ray.api.enrol import Offer, add
from cure_ray.api.judge import judge
from cure_ray.api.request import Execution
from cure_ray.api.zoo import Difference, Hand, recertify
from cure_ray.certification.job import Job, Shard
from cure_ray.certification.verdict import Status
from cure_ray.cli import main
from cure_ray.errors import UserError
from cure_ray.results.cards import card
from cure_ray.results.marked import protocol_table
from cure_ray.results.schema import from_table
from cure_ray.results.store import Store
from cure_ray.threats import Ball
from cure_ray.zoo.manifest import Manifest, check_entry, read_manifest, write_manifest
from cure_ray.zoo.published import find_published

ROOT = Path(__file__).parent.parent.parent
SMALL = {"dataset.train_samples": 300, "dataset.validation": 50, "network.width": 0.25, "threats.linf": "26/255"}
QUIET = Execution(device="cpu", quiet=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its verdicts on a few digits."""
    folder = tmp_path_factory.mktemp("made")
    cure_ray.train("smoke", method="max", scale=0.1, overrides=SMALL, out=folder / "run", quiet=True)
    cure_ray.certify(folder / "run", samples=16, nodes=4, out=folder / "results", device="cpu", quiet=True)
    return folder


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    root = tmp_path / "zoo"
    root.mkdir()
    (root / "manifest.json").write_text('{"format": "cure_ray-zoo-1", "entries": []}')
    return root


def offered(made: Path, zoo: Path, results: str = "results", name: str = "digits-max") -> None:
    add(Offer(str(made / "run"), made / results, name, "Max on digits"), zoo)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["cure-ray", "zoo", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_run_goes_in_whole_and_comes_out_the_same_network(made: Path, zoo: Path) -> None:
    offered(made, zoo)
    entry = read_manifest(zoo).find("digits-max")
    folder = check_entry(zoo, entry)
    assert (entry.n, entry.seeds, entry.kind, entry.dataset) == (16, (0,), "ours", "digits")
    assert entry.threats.startswith("linf=26/255,l2=")  # exactly, not by its first digits
    assert not [name for name in entry.files if "optimizer" in name]
    network, (x, y) = cure_ray.zoo.load("digits-max", zoo), (torch.rand(3, 1, 8, 8), torch.zeros(3))
    assert not network.training
    again = cure_ray.certify(folder, x, y.long(), "linf=0.1", nodes=0, device="cpu", quiet=True)  # an ordinary run directory
    assert set(again.verdicts["checkpoint_digest"]) == {entry.identity}
    assert (folder / "card.md").read_text() == card(folder, entry)
    union = cure_ray.load_results(made / "results").union
    assert f"{100 * union:.1f} % of 16 digits test images are certified against the union of {entry.threats};" in card(folder, entry)
    for about in (folder / "results" / "runs").iterdir():
        assert json.loads(about.read_text())["checkpoint"].startswith("zoo/digits-max/checkpoints/")


def test_verdicts_come_out_again_on_all_images_and_on_the_few_that_are_kept(made: Path, zoo: Path) -> None:
    offered(made, zoo)
    whole = recertify("digits-max", zoo, execution=QUIET)
    assert (whole.rows, whole.differences) == (48, ())
    assert recertify("digits-max", zoo, samples=2, execution=QUIET).rows == 6
    with np.load(zoo / "digits-max" / "images.npz") as file:
        kept = file["indices"]
        test = cure_ray.certify(made / "run", samples=16, nodes=0, device="cpu", quiet=True)
        assert np.array_equal(file["images"][2], test.image(int(kept[2])))
    few = recertify("digits-max", zoo, few=True, execution=QUIET)
    assert (few.rows, few.differences) == (3 * len(kept), ())
    stored = Store.open(zoo / "digits-max" / "results").read(["sample_index", "status"]).to_pandas()
    statuses = stored[stored["sample_index"].isin(kept)]["status"]
    assert set(statuses) <= {"certified", "falsified", "misclassified"}
    assert len(set(statuses)) > 1


def test_networks_of_one_title_are_one_row_of_a_table_by_their_mean(made: Path, zoo: Path) -> None:
    offered(made, zoo)
    offered(made, zoo, name="digits-max-again")
    entry = read_manifest(zoo).find("digits-max")
    union = f"{100 * cure_ray.load_results(made / 'results').union:.1f}"
    row = protocol_table(zoo, "digits", entry.threats).splitlines()[-1]
    assert row.startswith("| Max on digits, seeds 0, 0 |")
    assert f"| {union} ({union}, {union}) |" in row


def test_a_verdict_that_differs_is_named_and_ends_with_exit_code_one(
    made: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that claims less than is true: one certified row of it says unknown."""
    source, lie = Store.open(made / "results"), zoo.parent / "lie"
    (plan,) = source.plans()
    job = Job.of(plan)
    shutil.copytree(made / "results", lie)
    rows = from_table(source.read())
    target = next(row for row in rows if row.status == Status.CERTIFIED)
    shutil.rmtree(lie / "verdicts")
    for name in plan["threats"]:
        mine = [row for row in rows if row.threat == name]
        ball = Ball(mine[0].norm, mine[0].eps)  # type: ignore[arg-type]
        changed = [replace(row, status=Status.UNKNOWN) if row is target else row for row in mine]
        Store.open(lie).write(Shard(job, (ball,), tuple(plan["threats"][name])), changed)
    add(Offer(str(made / "run"), lie, "liar", "Less than is true"), zoo)
    assert run(monkeypatch, "certify", "liar", "--zoo", zoo) == 1
    printed = capsys.readouterr().out
    assert f"sample {target.sample_index}, {target.threat}: unknown in the zoo, certified now" in printed
    assert "liar: 1 of 48 verdicts differ, 0 of them contradictions" in printed


def test_a_proof_against_a_counterexample_is_a_contradiction_and_the_rest_is_not() -> None:
    assert Difference(1, "l2=1", "falsified", "certified").contradiction
    assert "(a contradiction)" in str(Difference(1, "l2=1", "certified", "falsified"))
    assert not Difference(1, "l2=1", "unknown", "certified").contradiction


def test_the_command_lists_adds_and_certifies(
    made: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CURE_RAY_ZOO", str(zoo))
    bare = zoo.parent / "bare" / "checkpoints" / "epoch_0003"
    shutil.copytree(made / "run" / "checkpoints" / "epoch_0003", bare)
    arguments = ("add", made / "run", made / "results", "--name", "digits-max", "--title", "Max on digits")
    assert run(monkeypatch, *arguments) == 0
    assert run(monkeypatch, "certify", "--few") == 0  # all there are
    assert run(monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "digits-max: all 24 verdicts are as in the zoo" in printed
    assert "digits-max (ours): Max on digits" in printed
    assert "1 networks" in printed
    for bad, said in (
        (arguments, "is there already"),
        (("certify", "digits-min"), "Did you mean 'digits-max'?"),
        (("certify", "--weights", "w.mat"), "are about one published network: name it"),
        (("add", made / "run", made / "results", "--name", "Mine 1", "--title", "X"), "small letters, digits, dots and hyphens"),
        (("add", bare, made / "results", "--name", "x", "--title", "X"), "is no run of `cure-ray train`"),
        (("add", "nothing", made / "results", "--name", "x", "--title", "X"), "no published network 'nothing'"),
        (("add", made / "run", made, "--name", "x", "--title", "X"), "holds no results"),
    ):
        assert run(monkeypatch, *bad) == 2
        assert said in capsys.readouterr().err
    (zoo / "digits-max" / "experiment.yaml").unlink()
    for late in ((), ("certify", "digits-max", "--few")):
        assert run(monkeypatch, *late) == 2
        assert "experiment.yaml is missing, though the manifest lists it" in capsys.readouterr().err


def test_a_store_of_another_protocol_or_network_stays_out(made: Path, zoo: Path, nearest: Nearest) -> None:
    cure_ray.certify(made / "run", samples=4, nodes=0, threats="linf=0.1", out=zoo.parent / "one", device="cpu", quiet=True)
    with pytest.raises(UserError, match=r"is of another protocol: it holds linf=0\.1; wanted are l1=.*, all in one run"):
        add(Offer(str(made / "run"), zoo.parent / "one", "x", "X"), zoo)
    cure_ray.certify(made / "run", samples=2, nodes=0, union_only=True, out=zoo.parent / "skips", device="cpu", quiet=True)
    with pytest.raises(UserError, match=r"\(the union only\); wanted are"):
        add(Offer(str(made / "run"), zoo.parent / "skips", "x", "X"), zoo)
    judge(str(nearest.description), nearest.weights, zoo.parent / "other", execution=QUIET)
    with pytest.raises(UserError, match="holds no verdicts of this network"):
        add(Offer(str(made / "run"), zoo.parent / "other", "x", "X"), zoo)
    with pytest.raises(UserError, match="a zoo refers to descriptions that are shipped"):
        add(Offer(str(nearest.description), zoo.parent / "other", "x", "X"), zoo)
    assert read_manifest(zoo).entries == ()
    assert sorted(p.name for p in zoo.iterdir()) == ["manifest.json"]


def test_of_a_store_that_holds_more_only_the_protocol_goes_in(made: Path, zoo: Path) -> None:
    shutil.copytree(made / "results", zoo.parent / "more")
    cure_ray.certify(made / "run", samples=2, nodes=4, threats="l2=0.01", out=zoo.parent / "more", device="cpu", quiet=True)
    entry = add(Offer(str(made / "run"), zoo.parent / "more", "x", "X"), zoo)
    offered(made, zoo)
    same = read_manifest(zoo).find("digits-max")
    assert {n: d for n, d in entry.files.items() if "verdicts" in n} == {n: d for n, d in same.files.items() if "verdicts" in n}


def test_a_network_goes_in_again_under_a_second_protocol(made: Path, zoo: Path) -> None:
    second = "linf=26/255,l2=0.01,l1=0.7"
    shutil.copytree(made / "results", zoo.parent / "two")
    with pytest.raises(UserError, match=r"is of another protocol.*wanted are l1=0\.7, l2=0\.01"):
        add(Offer(str(made / "run"), zoo.parent / "two", "x", "X", threats=second), zoo)
    cure_ray.certify(made / "run", samples=16, nodes=4, threats="l2=0.01", out=zoo.parent / "two", device="cpu", quiet=True)
    offered(made, zoo)
    entry = add(Offer(str(made / "run"), zoo.parent / "two", "x", "X", threats=second), zoo)
    assert entry.threats == second
    assert f"--samples 16 --threats {second} --nodes 4" in entry.commands[1]
    assert (entry.run, entry.identity) == ("digits-max", read_manifest(zoo).find("digits-max").identity)
    assert {name.partition("/")[0] for name in entry.files} == {"card.md", "images.npz", "results"}  # its weights are there already
    here, there = (cure_ray.zoo.load(name, zoo).state_dict() for name in ("x", "digits-max"))
    assert all(torch.equal(here[name], there[name]) for name in there)
    assert recertify("x", zoo, few=True, execution=QUIET).differences == ()
    assert "certified against the union of linf=26/255,l2=0.01,l1=0.7" in card(zoo / "x", entry)
    with pytest.raises(UserError, match="judged under the protocol it was published with"):
        add(Offer("mmr-universal-mnist", zoo.parent / "two", "y", "Y", threats=second), zoo)
    (zoo / "digits-max" / "run.json").unlink()
    with pytest.raises(UserError, match=r"digits-max: .*run\.json is missing"):
        cure_ray.zoo.load("x", zoo)
    write_manifest(zoo, Manifest(entries=(entry,)))
    with pytest.raises(UserError, match="its network is in digits-max, and lists no such network there"):
        cure_ray.zoo.load("x", zoo)


def test_a_network_that_is_certified_anew_takes_the_place_of_the_folder_that_was_removed(made: Path, zoo: Path) -> None:
    offer = Offer(str(made / "run"), made / "results", "digits-max", "Max on digits")
    before = add(offer, zoo)
    with pytest.raises(UserError, match="remove the folder to put this in its place"):
        add(offer, zoo)
    shutil.rmtree(zoo / "digits-max")
    assert add(offer, zoo) == before
    assert read_manifest(zoo).entries == (before,)
    assert cure_ray.zoo.load("digits-max", zoo)


def test_the_verdicts_of_a_published_network_go_in_without_its_weights(zoo: Path) -> None:
    there = ROOT / "zoo" / "mmr-universal-mnist" / "results"
    with pytest.raises(UserError, match="--no-witnesses"):
        add(Offer("mmr-universal-mnist", there, "mmr", "MMR-Universal"), zoo)
    assert not (zoo / "mmr").exists()
    entry = add(Offer("mmr-universal-mnist", there, "mmr", "MMR-Universal", witnesses=False), zoo)
    assert (entry.kind, entry.seeds, entry.training, entry.n) == ("published", (), None, 1000)
    assert not [name for name in entry.files if name.endswith((".safetensors", ".npz"))]
    assert read_manifest(ROOT / "zoo").find("mmr-universal-mnist").certification == entry.certification


def test_counterexamples_can_be_left_out(made: Path, zoo: Path) -> None:
    entry = add(Offer(str(made / "run"), made / "results", "slim", "Slim", witnesses=False), zoo)
    assert not [name for name in entry.files if "witnesses" in name]
    assert recertify("slim", zoo, few=True, execution=QUIET).differences == ()


@pytest.mark.parametrize("name", [entry.name for entry in read_manifest(ROOT / "zoo").entries])
def test_every_network_of_the_repository_is_certified_again_on_a_few_images(name: str) -> None:
    """The engine against real networks. A published network's weights are not here: its verdicts are read, and its card must agree."""
    zoo = ROOT / "zoo"
    entry = read_manifest(zoo).find(name)
    folder = check_entry(zoo, entry)
    assert (folder / "card.md").read_text() == card(folder, entry)
    if entry.published is None:
        found = recertify(name, zoo, few=True, execution=QUIET)
        assert found.rows >= 12
        assert found.differences == ()
    else:
        weights = find_published(entry.published).weights
        assert weights is not None
        assert weights.identity == entry.identity
        with pytest.raises(UserError, match="its weights are its authors'"):
            recertify(name, zoo, hand=Hand())
        with pytest.raises(UserError, match="not ours to ship"):
            cure_ray.zoo.load(name, zoo)


def test_a_card_counts_the_images_a_network_was_trained_on_without_those_held_out() -> None:
    zoo = ROOT / "zoo"
    for name, images in (("union-mnist-finish-s0", 59000), ("union-mnist-ema-l2-0.5", 60000), ("tuned-linf-s0", 5000)):
        entry = read_manifest(zoo).find(name)
        assert f", {images} training images, " in card(zoo / entry.folder, entry)
        assert (zoo / entry.folder / "card.md").read_text() == card(zoo / entry.folder, entry)
