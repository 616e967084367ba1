"""From sentences to the report with a random BERT: embed, train, certify, attack, read; stopped in the middle; refused where it must."""

import json
import shutil
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import text_tools as world
import torch

import cure_ray
from cure_ray.api.embed import EmbedRequest, embed
from cure_ray.api.replay import Hand, replay_store
from cure_ray.api.words import WordsRequest, attack_text, summary
from cure_ray.attacks import replay_network
from cure_ray.cli import main
from cure_ray.errors import SoundnessError, UserError
from cure_ray.results.attacked import read_attacked, refuse_contradictions
from cure_ray.results.fsck import fsck
from cure_ray.results.report import write_report
from cure_ray.results.store import Store
from cure_ray.runs.checkpoints import load_checkpoint
from cure_ray.text import latents
from cure_ray.text.encoder import Encoder, load_encoder
from cure_ray.text.words import STOP_WORDS

METHODS = {"natural": {"method": "natural", "anneal_epochs": 0, "standard_epochs": 0, "warmup_weight": 0.0}, "max": {"method": "max"}}


class Place:
    """Everything below one folder, made once for all tests."""

    def __init__(self, root: Path) -> None:
        self.root, self.out, self.store = root, root / "latents", root / "results"
        self.data, self.encoder = world.write_sentences(root / "data"), world.write_encoder(root / "bert")
        self.wordnet, self.neighbours = world.write_wordnet(root / "wordnet"), world.write_neighbours(root / "neighbours.json.gz")
        self.info = embed(self.request())
        self.runs = {name: self.train(name) for name in METHODS}
        self.attack()
        for run in self.runs.values():
            cure_ray.certify(run, samples=12, out=self.store, add=True, quiet=True)

    def request(self, **other: object) -> EmbedRequest:
        known = {
            "out": self.out, "augment": ("pwws", "cf8"), "wordnet": self.wordnet, "neighbours": self.neighbours, "quiet": True, "tune": 48,
            "tune_epochs": 8, "train": 40,
        }  # fmt: skip
        return EmbedRequest(str(self.data), self.encoder, **{**known, **other})  # type: ignore[arg-type]

    def train(self, name: str) -> Path:
        schedule = {"epochs": 4, "standard_epochs": 1, "anneal_epochs": 1, "batch_size": 8, "lr": 0.01}
        experiment = {
            "name": name, "dataset": {"path": str(self.out / "latents.npz"), "name": "tiny"}, "network": {"name": "mlp", "width": 0.1},
            "threats": {"linf": 0.05, "l2": 0.15, "l1": 0.4}, "training": {**schedule, **METHODS[name]},
        }  # fmt: skip
        return cure_ray.train(experiment, out=self.root / "runs" / name, quiet=True).directory

    def words(self, **other: object) -> WordsRequest:
        known = {"samples": 12, "wordnet": self.wordnet, "neighbours": self.neighbours, "add": True, "quiet": True}
        return WordsRequest(tuple(self.runs.values()), str(self.store), **{**known, **other})  # type: ignore[arg-type]

    def attack(self) -> None:
        attack_text(self.words())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("text"))


def test_latents_are_the_vectors_of_the_sentences_and_their_domain_is_the_whole_space(place: Place) -> None:
    encoder = load_encoder(latents.encoder_directory(place.out, place.info))
    texts = [s.text for s in latents.test_sentences(place.out, place.info)]
    with np.load(place.out / "latents.npz") as file, np.load(place.out / "augmented.npz") as more:
        assert file["images"].shape == (40, 16, 1, 1)
        assert file["domain"].tolist() == [-np.inf, np.inf]
        assert torch.allclose(torch.from_numpy(file["test_images"])[:, :, 0, 0], encoder.encode(texts), atol=1e-5)
        assert np.array_equal(file["test_images"], more["test_images"])
        assert more["images"].shape == (80, 16, 1, 1)
        assert np.array_equal(more["labels"], np.tile(file["labels"], 2))
    experiment = load_checkpoint(place.runs["max"]).experiment
    assert not experiment.dataset.box.bounded
    assert {plan["settings"]["box"] for plan in Store.open(place.store).plans()} == {"none"}


def test_embedding_again_gives_the_same_bytes_and_one_that_was_stopped_goes_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = place.request(out=tmp_path / "again", tune=0, train=None, augment=())
    embed(again)
    whole = (tmp_path / "again" / "latents.npz").read_bytes()
    shutil.rmtree(tmp_path / "again")
    texts = [text for _, text in world.sentences()]
    # The test sentences were finished when somebody pulled the plug.
    latents.encode_kept(load_encoder(place.encoder), texts[48:64], tmp_path / "again" / "parts", lambda count: None)
    encoded, encode = list[str](), Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, chunk: encoded.extend(chunk) or encode(self, chunk))
    embed(again)
    assert encoded == texts[:48]
    assert (tmp_path / "again" / "latents.npz").read_bytes() == whole
    assert not (tmp_path / "again" / "parts").exists()


def test_a_finished_directory_is_left_alone_and_never_taken_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in place.out.iterdir()}
    monkeypatch.setattr(Encoder, "encode", lambda self, chunk: pytest.fail("there is nothing left to encode"))
    assert embed(place.request()) == place.info
    assert {p.name: p.stat().st_mtime_ns for p in place.out.iterdir()} == before
    for other in ({"train": 24}, {"tune": 32}, {"tune": 0}, {"augment": ("cf8",)}):
        with pytest.raises(UserError, match="which heads may rest on: choose another --out"):
            embed(place.request(**other))
    with pytest.raises(UserError, match="--copies is about substituted sentences"):
        embed(place.request(copies=2, augment=()))


def test_the_commands_do_the_same_and_bad_input_ends_with_code_2(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["cure-ray", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return said.out if end.value.code in (0, None) else f"{end.value.code}: {said.err}"

    said = command("embed", place.data, "--encoder", place.encoder, "--out", tmp_path / "z", "--train", 8, "--pooling", "cls")
    assert "embedded 8 training and 16 test sentences in 16 dimensions" in said
    lists = ("--wordnet", place.wordnet, "--neighbours", place.neighbours)
    said = command("attack-text", *place.runs.values(), "--out", tmp_path / "r", "--samples", 3, *lists, "--quiet")
    assert said.count("of 3 sentences") == 4
    assert read_attacked([Store.open(tmp_path / "r")])
    assert command("embed", place.data, "--encoder", tmp_path, "--out", tmp_path / "y").startswith("2: error: encoder")
    assert "needs a list of neighbours" in command("attack-text", place.runs["max"], "--out", tmp_path / "q", "--attack", "cf8")


def test_every_broken_sentence_is_misclassified_when_it_is_tokenized_and_encoded_anew(place: Place) -> None:
    store = Store.open(place.store)
    encoder = load_encoder(latents.encoder_directory(place.out, place.info))
    heads = {load_checkpoint(run).experiment.name: replay_network(load_checkpoint(run).network) for run in place.runs.values()}
    rows = read_attacked([store])
    assert len(rows) == 2 * 2 * 12
    broken = [row for row in rows if row.status == "falsified"]
    assert broken
    for row in broken:
        words = row.record.sentence.split()
        for change in row.record.changes:
            assert words[change.place] == change.old
            assert change.old.lower() not in STOP_WORDS
            words[change.place] = change.new
        z = encoder.encode([" ".join(words)]).double()[:, :, None, None]
        assert int(heads[store.about(row.checkpoint)["name"]](z).argmax(1)) != row.label == row.predicted
    assert "clean" in summary(store)
    assert not fsck(store)


def test_the_same_command_finds_everything_done_and_another_store_finds_the_vectors(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {p.name: p.read_bytes() for p in (place.store / "verdicts").iterdir() if not p.name.startswith(".")}
    encoded, encode = list[list[str]](), Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, chunk: encoded.append([*chunk]) or encode(self, chunk))
    place.attack()
    assert {p.name: p.read_bytes() for p in (place.store / "verdicts").iterdir()} == files
    assert len(encoded) == 1  # the check that it is the same encoder
    rows = read_attacked([attack_text(replace(place.words(), out=str(tmp_path / "again")))])
    assert all(len(chunk) == 1 for chunk in encoded)  # successes, each replayed by itself; everything else was known
    key = attrgetter("checkpoint", "attack", "sample")
    assert sorted(rows, key=key) == sorted(read_attacked([Store.open(place.store)]), key=key)


def test_tables_keep_proofs_and_attacks_apart(place: Place) -> None:
    results = cure_ray.load_results(place.store, by_name=True)
    table = results.accuracies()
    assert set(table["method"]) == {"natural", "max"}
    rows = read_attacked(results.stores)
    for _, row in table.iterrows():
        mine = [r for r in rows if r.checkpoint == row["checkpoint"] and r.attack == "pwws"]
        stands = sum(r.status not in ("falsified", "misclassified") for r in mine)
        assert row["words_pwws"] == pytest.approx(100 * stands / 12)
        assert row["words_pwws"] <= row["clean"]
        assert row["n_words"] == 12
    words = results.words(baseline="max")
    assert len(words) == 4
    assert {"inside_linf", "singles_l2", "queries", "against max"} <= set(words.columns)
    assert "nothing is proven about words" in write_report(place.store, by_name=True).read_text()


def test_a_sentence_inside_a_certified_ball_that_is_misclassified_is_a_soundness_error(place: Place, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(place.store, copy)
    store = Store.open(copy)
    refuse_contradictions([store])
    table = store.read().to_pandas()
    broken = table[(table["family"] == "text") & (table["status"] == "falsified")].iloc[0]
    mine = (table["checkpoint_digest"] == broken["checkpoint_digest"]) & (table["sample_index"] == broken["sample_index"])
    table.loc[mine & (table["threat"] == "l2=0.15"), "status"] = "certified"
    near = json.loads(broken["message"])
    near["distances"]["l2"] = 0.149
    table.loc[broken.name, "message"] = json.dumps(near)

    class Tampered(Store):
        def __init__(self, frame: pd.DataFrame) -> None:
            self.frame, self.root = frame, str(copy)

        def read(self, columns: list[str] | None = None):  # type: ignore[no-untyped-def]
            import pyarrow as pa

            return pa.Table.from_pandas(self.frame[columns])

    with pytest.raises(SoundnessError, match=r"certified for l2=0\.15 in latent space, but"):
        refuse_contradictions([Tampered(table)])


def test_rows_of_words_are_replayed_as_far_as_the_head_goes(place: Place) -> None:
    for replay in replay_store(Store.open(place.store), Hand()):
        assert not replay.contradicted
        assert not replay.unavailable


def test_what_does_not_fit_is_refused_in_a_sentence(place: Place, tmp_path: Path) -> None:
    other = world.write_encoder(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="vectors of another encoder than"):
        attack_text(place.words(encoder=other))
    with pytest.raises(UserError, match="which attack"):
        attack_text(place.words(attacks=()))
    settings = {"dataset.train_samples": 200}
    run = cure_ray.train("smoke", method="natural", scale=0.04, overrides=settings, out=tmp_path / "digits", quiet=True)
    with pytest.raises(UserError, match="not on vectors of sentences"):
        attack_text(replace(place.words(), runs=(run.directory,), out=str(tmp_path / "no")))
    with pytest.raises(UserError, match="not written by `cure-ray embed`"):
        embed(place.request(out=place.data))
    alone = attack_text(replace(place.words(attacks=("cf8",), samples=2), out=str(tmp_path / "alone")))
    with pytest.raises(UserError, match="has attacks on words only, which prove nothing: certify its head"):
        cure_ray.load_results(alone.root).table()
