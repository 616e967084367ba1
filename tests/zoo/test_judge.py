"""Judging a published network: from any format the same verdicts, beside the published figures; what is not it is refused by name."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nearest_mean import Nearest
from safetensors.torch import save_file
from scipy.io import savemat

from cure_ray.api.judge import judge, take
from cure_ray.api.request import Execution
from cure_ray.cli import main
from cure_ray.errors import UserError
from cure_ray.interchange import write_onnx
from cure_ray.results.cards import read_results
from cure_ray.results.judgement import measured, read_judgement
from cure_ray.zoo.architecture import fitted
from cure_ray.zoo.manifest import read_manifest
from cure_ray.zoo.published import find_published

ROOT = Path(__file__).parent.parent.parent
QUIET = Execution(device="cpu", quiet=True)


def written(nearest: Nearest, suffix: str) -> Path:
    """The weights in another format, under the authors' names where it has names."""
    path, own = nearest.folder / f"nearest{suffix}", nearest.tensors
    authors = {"first": own["1.weight"].T, "offset": own["1.bias"][None], "means": own["3.weight"], "bias": own["3.bias"][None]}
    if suffix == ".mat":
        savemat(path, {name: value.numpy() for name, value in authors.items()})
    elif suffix == ".pt":
        torch.save({"state_dict": authors}, path)
    elif suffix == ".onnx":
        write_onnx(fitted(find_published(str(nearest.description)), own, "own"), path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".mat", ".pt", ".onnx"])
def test_every_format_gives_the_same_network(nearest: Nearest, suffix: str) -> None:
    published = find_published(str(nearest.described()))
    first = take(published, nearest.weights)
    assert first.recognised == "not verified"
    known = find_published(str(nearest.described(first.identity)))
    found = take(known, written(nearest, suffix))
    assert found.identity == first.identity
    assert found.recognised == "another file, whose network computes the same function"


def test_a_judgement_sets_published_figures_beside_ours_and_continues_where_it_stopped(nearest: Nearest, tmp_path: Path) -> None:
    judged, result = judge(str(nearest.description), nearest.weights, tmp_path / "out", execution=QUIET)
    union, standing = judged.ours("certified", "union"), judged.ours("not broken", "union")
    assert union is not None
    assert standing is not None
    assert union.count == int((result.verdicts.pivot(index="sample_index", columns="threat", values="status") == "certified").all(1).sum())
    assert 0 < union.count <= standing.count <= union.n == 12
    clean = judged.ours("clean", None)
    assert clean is not None
    assert (clean.n, clean.count > 300) == (360, True)
    data = json.loads(judged.as_json())
    assert data["format"] == "cure_ray-judgement-1"
    assert data["open"][-1] == {"threat": "union", "published": [25.0, 100.0], "here": [round(m.value, 4) for m in (union, standing)]}
    assert data["cpu_seconds"] > 0
    text = judged.as_markdown()
    assert f"| union, certified | 25 (a pencil) | {union.value:.2f} |" in text
    assert "union: between 25 and 100 as published, 75.0 points open; here" in text
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(UserError, match="is no judgement"):
        read_judgement(tmp_path / "wrong.json")
    before = sorted(p.name for p in (tmp_path / "out" / "verdicts").iterdir())
    again, _ = judge(str(nearest.description), nearest.weights, tmp_path / "out", execution=QUIET)
    assert again.figures == judged.figures
    assert sorted(p.name for p in (tmp_path / "out" / "verdicts").iterdir()) == before


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["cure-ray", "judge", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_command_lists_writes_both_forms_and_says_where(
    nearest: Nearest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    assert "mmr-universal-mnist: MMR-Universal, MNIST; linf=0.1,l2=0.3,l1=1, 1000 images" in capsys.readouterr().out
    monkeypatch.chdir(nearest.folder)
    assert run(monkeypatch, nearest.description, "--weights", nearest.weights, "--samples", 4, "--nodes", 0, "--quiet") == 0
    out = nearest.folder / "certificates" / "nearest-mean"
    assert json.loads((out / "judgement.json").read_text())["data"]["n"] == 4
    assert "--samples 4 --nodes 0" in (out / "judgement.md").read_text()
    assert str(Path("certificates/nearest-mean/judgement.json")) in capsys.readouterr().out


def test_bad_input_is_a_sentence_and_exit_code_two(
    nearest: Nearest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nearest.folder)
    own, text = nearest.tensors, nearest.description
    identity = take(find_published(str(text)), nearest.weights).identity
    nearest.described(identity)
    save_file({**own, "3.bias": own["3.bias"] + 1}, nearest.folder / "other.safetensors")
    save_file({**own, "3.bias": torch.zeros(11)}, nearest.folder / "shape.safetensors")
    save_file({k: v for k, v in own.items() if k != "1.bias"}, nearest.folder / "less.safetensors")
    savemat(nearest.folder / "struct.mat", {"first": {"nested": np.zeros(3)}})
    (nearest.folder / "torn.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    np.savez(nearest.folder / "images.npz", images=np.zeros((2, 1, 8, 8), np.uint8), labels=np.zeros(2, np.int64))
    summed = nearest.folder / "summed.yaml"  # known by the checksum of a file alone
    summed.write_text(text.read_text().replace(f"  identity: {identity}", f"  sha256: {'b' * 64}"))
    chosen = nearest.folder / "chosen.yaml"
    chosen.write_text(text.read_text().replace("n: 12}", f"n: 12, given: true, digest: {'a' * 64}}}"))
    cases = [
        ((text,), "which weights? Download them from https://example.org/nearest"),
        ((text, "--weights", "nowhere.mat"), "nowhere.mat: no such file. The authors keep it at https://example.org/nearest"),
        ((text, "--weights", "other.safetensors"), "it is another network"),
        ((summed, "--weights", nearest.weights), "it is another network (SHA-256"),
        ((text, "--weights", "shape.safetensors"), "3.bias has shape (11,), the network wants (10,)"),
        ((text, "--weights", "less.safetensors"), "missing first"),
        ((text, "--weights", "struct.mat"), "first is no plain array of numbers"),
        ((text, "--weights", "torn.mat"), "torn.mat: not a MATLAB file"),
        ((chosen, "--weights", nearest.weights), "give them with --data FILE.npz"),
        ((chosen, "--weights", nearest.weights, "--data", "images.npz"), "was judged on other images"),
        (("cure-mnist-small-scratch", "--weights", nearest.weights), "never published"),
        (("cure-mnist-small-scratch",), "never published"),
        (("mmr-universal",), "Did you mean 'mmr-universal-mnist'?"),
    ]
    for arguments, said in cases:
        assert run(monkeypatch, *arguments, "--quiet") == 2, arguments
        printed = capsys.readouterr().err
        assert printed.startswith("error: ")
        assert said in printed, (arguments, printed)
    assert not (nearest.folder / "certificates").exists()
    assert take(find_published(str(text)), nearest.folder / "other.safetensors", unverified=True).recognised == "not verified"


def test_a_store_of_something_else_is_refused(nearest: Nearest, tmp_path: Path) -> None:
    judge(str(nearest.description), nearest.weights, tmp_path / "out", execution=QUIET)
    other = nearest.folder / "other.safetensors"
    save_file({**nearest.tensors, "3.bias": nearest.tensors["3.bias"] + torch.arange(10) / 64}, other)
    with pytest.raises(UserError, match="holds results of another checkpoint"):
        judge(str(nearest.description), other, tmp_path / "out", execution=QUIET)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "board").glob("*.json")), ids=lambda p: p.stem)
def test_a_judgement_in_the_documents_is_what_the_store_in_the_zoo_says(path: Path) -> None:
    judged = read_judgement(path)
    entry = read_manifest(ROOT / "zoo").find(judged.published.name)
    assert measured(read_results(ROOT / "zoo" / entry.folder, entry)) == judged.figures
    assert entry.identity == judged.identity
    assert json.loads(judged.as_json()) == json.loads(path.read_text())
