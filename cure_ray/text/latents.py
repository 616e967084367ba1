"""Latents: a directory with the vectors of sentences, and everything needed to know whose they are.

OUT/latents.npz is a data set for `cure-ray train` (dataset.path): vectors [N, D, 1, 1] in float32 as `images` and `test_images`, labels,
and the domain, which is the whole space. OUT/augmented.npz is the same with substituted training sentences added. OUT/latents.json says
which encoder and pooling made them; OUT/sentences/{train,test}.tsv are the sentences, row by row.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cure_ray import seeding
from cure_ray.errors import UserError
from cure_ray.text.encoder import Encoder, encoder_digest
from cure_ray.text.tsv import Sentence, read_sentences, write_sentences
from cure_ray.text.words import Change, Synonyms, candidates, exchange, split_words

LATENTS, AUGMENTED, ABOUT, SENTENCES, PARTS = "latents.npz", "augmented.npz", "latents.json", "sentences", "parts"
CHUNK = 256  # sentences that are encoded and kept together
FORMAT = 1
Floats = NDArray[np.float32]
Tick = Callable[[int], None]  # so many more sentences are encoded


@dataclass(frozen=True)
class LatentsInfo:
    """What latents.json holds."""

    data: str
    encoder: str  # directory; relative to latents.json where it lies below
    encoder_digest: str
    pooling: str
    width: int
    train: int
    test: int
    tuned: dict[str, float] | None = None
    augmented: dict[str, Any] | None = None
    seconds: float = 0.0
    key: str = ""  # of the encoder and every sentence, in order
    format: int = FORMAT


def choose(sentences: Sequence[Sentence], count: int | None, seed: int, name: str) -> list[Sentence]:
    """The first `count` of a fixed shuffle, in the order of the file; all if there is no number."""
    if count is None or count >= len(sentences):
        return list(sentences)
    order = torch.randperm(len(sentences), generator=seeding.generator("cpu", seed, "sentences", name))
    return [sentences[i] for i in sorted(order[:count].tolist())]


def substituted(sentence: Sentence, lists: Sequence[Synonyms], seed: int, name: str | int, share: float = 0.5) -> Sentence:
    """The sentence with about a share of its exchangeable words exchanged, each for a word of any of the lists, all equally likely."""
    words = split_words(sentence.text)
    generator = seeding.generator("cpu", seed, "substituted", name)
    changes = []
    for place, word in enumerate(words):
        known = list(dict.fromkeys(c for synonyms in lists for c in candidates(word, synonyms)))
        keep, pick = torch.rand(2, generator=generator).tolist()
        if known and keep < share:
            changes.append(Change(place, word, known[min(int(pick * len(known)), len(known) - 1)]))
    return Sentence(exchange(words, changes), sentence.label)


def encode_kept(encoder: Encoder, texts: Sequence[str], parts: Path, tick: Tick) -> Tensor:
    """Vectors of all texts, chunk by chunk; a chunk that was encoded once is read again."""
    parts.mkdir(parents=True, exist_ok=True)
    out = []
    for start in range(0, len(texts), CHUNK):
        chunk = list(texts[start : start + CHUNK])
        key = hashlib.sha256(json.dumps([encoder.digest, chunk]).encode()).hexdigest()[:24]
        file = parts / f"{key}.npy"
        if file.exists():
            out.append(torch.from_numpy(np.load(file, allow_pickle=False)))
        else:
            out.append(encoder.encode(chunk))
            write_array(file, out[-1].numpy())
        tick(len(chunk))
    return torch.cat(out)


def content_key(encoder: Encoder, *parts: Sequence[Sentence]) -> str:
    """What a directory of vectors is of."""
    rows = [[[s.text, s.label] for s in part] for part in parts]
    return hashlib.sha256(json.dumps([encoder.digest, rows]).encode()).hexdigest()


def finished(directory: Path, key: str) -> LatentsInfo | None:
    """What an earlier call wrote, if it was about the same; UserError if the directory holds something else."""
    if not (directory / ABOUT).exists():
        return None
    info = read_info(directory)
    if info.key != key:
        raise UserError(f"{directory} holds vectors of other sentences or another encoder, which heads may rest on: choose another --out")
    return info if (directory / LATENTS).exists() else None


def write_array(file: Path, array: NDArray[Any]) -> None:
    """An .npy file, complete or not there."""
    partial = file.with_name(f".{file.stem}.{os.getpid()}.npy")
    np.save(partial, array, allow_pickle=False)
    partial.replace(file)


def write_latents(file: Path, train: tuple[Tensor, Sequence[Sentence]], test: tuple[Tensor, Sequence[Sentence]]) -> None:
    """The data set `cure-ray train` reads."""
    arrays: dict[str, NDArray[Any]] = {"domain": np.array([-math.inf, math.inf])}
    for prefix, (z_ND, sentences) in (("", train), ("test_", test)):
        arrays[f"{prefix}images"] = z_ND.numpy()[:, :, None, None]
        arrays[f"{prefix}labels"] = np.array([s.label for s in sentences], dtype=np.int64)
    partial = file.with_name(f".{file.stem}.{os.getpid()}.npz")
    np.savez(partial, allow_pickle=False, **arrays)
    partial.replace(file)


def write_info(directory: Path, info: LatentsInfo, splits: dict[str, list[Sentence]]) -> None:
    for split, sentences in splits.items():
        write_sentences(directory / SENTENCES / f"{split}.tsv", sentences)
    partial = directory / f".{ABOUT}.{os.getpid()}"
    partial.write_text(json.dumps(asdict(info), indent=2) + "\n")
    partial.replace(directory / ABOUT)


def read_info(directory: Path) -> LatentsInfo:
    """What is known of latents; UserError if the directory holds none."""
    try:
        found = json.loads((directory / ABOUT).read_text())
    except FileNotFoundError:
        raise UserError(f"{directory} holds no {ABOUT}: vectors of sentences are made by `cure-ray embed`, which writes it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / ABOUT} cannot be read ({error}): run the same `cure-ray embed` command again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{directory / ABOUT} is of another format than {FORMAT}, which this cure_ray reads: embed again")
    return LatentsInfo(**found)


def encoder_directory(directory: Path, info: LatentsInfo, given: Path | None = None) -> Path:
    """Where the encoder of these latents lies, if it is still the same encoder."""
    place = given if given is not None else (directory / info.encoder)
    if not place.is_dir():
        raise UserError(f"the encoder of {directory} is not at {place}: name its directory with --encoder")
    if encoder_digest(place, info.pooling) != info.encoder_digest:
        raise UserError(
            f"{directory} holds vectors of another encoder than {place} ({info.encoder_digest[:8]}, pooling {info.pooling}): use that one, "
            "or embed again and train heads on the new vectors"
        )
    return place


def test_sentences(directory: Path, info: LatentsInfo) -> list[Sentence]:
    """The sentences of the test split, row by row."""
    found = read_sentences(directory / SENTENCES / "test.tsv")
    if len(found) != info.test:
        raise UserError(f"{directory / SENTENCES / 'test.tsv'} has {len(found)} sentences, {ABOUT} says {info.test}: embed again")
    return found
