"""The encoder: pooling, batches, its digest, and every way in which a directory is not one."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import text_tools as world
import torch

from cure_ray.errors import UserError
from cure_ray.text.encoder import TooLongError, encoder_digest, load_encoder
from cure_ray.text.tsv import Sentence
from cure_ray.text.tuning import Tuning, save_encoder, tune


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.write_encoder(tmp_path_factory.mktemp("encoder") / "bert")


def test_the_mean_is_over_tokens_and_not_over_padding(directory: Path) -> None:
    texts = [text for _, text in world.sentences()[:7]] + ["movie"]
    mean, first = (load_encoder(directory, pooling) for pooling in ("mean", "cls"))
    together = mean.encode(texts)
    assert together.shape == (8, 16)
    for text, vector in zip(texts, together, strict=True):
        tokens = mean.tokenizer([text], return_tensors="pt")
        hidden = mean.model(**tokens).last_hidden_state[0]
        assert torch.allclose(vector, hidden.mean(0), atol=1e-5)
        assert torch.allclose(first.encode([text])[0], hidden[0], atol=1e-5)
    assert mean.digest != first.digest


def test_nothing_is_cut_off_and_a_long_sentence_is_refused(directory: Path) -> None:
    encoder = load_encoder(directory)
    long = " ".join(["great"] * 23)
    assert encoder.fits(["great movie", long]) == [True, False]
    with pytest.raises(TooLongError, match="a sentence of 25 tokens, the encoder takes 24"):
        encoder.encode(["great movie", long])


def test_a_directory_that_is_not_an_encoder_is_refused_in_words(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such directory.*nothing is downloaded"):
        load_encoder(tmp_path / "absent")
    part = tmp_path / "part"
    shutil.copytree(directory, part)
    (part / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"it lacks weights \(model.safetensors\)"):
        load_encoder(part)
    shutil.copy(directory / "model.safetensors", part)
    (part / "config.json").write_text(json.dumps({**json.loads((part / "config.json").read_text()), "model_type": "nonsense"}))
    with pytest.raises(UserError, match=r"encoder .*part"):
        load_encoder(part)
    with pytest.raises(UserError, match=r"unknown pooling 'man'. Did you mean 'mean'"):
        load_encoder(directory, "man")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its tokenizer knows .* tokens, its model 9: they do not belong together"):
        load_encoder(world.write_encoder(tmp_path / "small", rows=9))


def test_without_the_library_the_message_says_how_to_get_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'cure-ray\[text\]'"):
        load_encoder(directory)


def test_the_digest_is_of_weights_tokenizer_and_configuration(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    assert encoder_digest(copy, "mean") == encoder_digest(directory, "mean")
    (copy / "README.md").write_text("a note changes nothing")
    assert encoder_digest(copy, "mean") == encoder_digest(directory, "mean")
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert encoder_digest(copy, "mean") != encoder_digest(directory, "mean")


def test_fine_tuning_lowers_the_loss_and_is_the_same_under_a_seed(directory: Path, tmp_path: Path) -> None:
    sentences = [Sentence(text, label) for label, text in world.sentences()[:32]]
    losses, digests = list[float](), list[str]()
    for name in ("one", "two"):
        encoder = load_encoder(directory)
        tune(encoder, sentences, Tuning(32, 12, batch=16, lr=2e-2), lambda step, steps, loss: losses.append(loss))
        save_encoder(encoder, tmp_path / name)
        digests.append(load_encoder(tmp_path / name).digest)
    assert losses[:24] == losses[24:]
    assert digests[0] == digests[1] != encoder_digest(directory, "mean")
    assert sum(losses[20:24]) < 0.8 * sum(losses[:4])
