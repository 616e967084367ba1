"""Embedding as one call: sentences in, a directory of vectors out that heads are trained on. Continues where it stopped."""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from cure_ray import seeding
from cure_ray.api.execution import threads as cpu_threads
from cure_ray.api.progress import LINE_SECONDS
from cure_ray.data.files import search_path
from cure_ray.errors import UserError
from cure_ray.runs.stopping import StoppedError, stop_on_signals
from cure_ray.text import latents
from cure_ray.text.encoder import Encoder, load_encoder
from cure_ray.text.lists import WordList, word_lists
from cure_ray.text.tsv import Sentence, find_splits, read_sentences
from cure_ray.text.tuning import Tuning, save_encoder, tune

ENCODER = "encoder"  # the fine-tuned one, below OUT
Stop = Callable[[], None]


@dataclass(frozen=True)
class EmbedRequest:
    """What to embed, with what, and where to keep it."""

    data: str  # sst2, or a folder with train.tsv and dev.tsv
    encoder: Path
    out: Path
    pooling: str = "mean"  # or cls
    tune: int = 0  # training sentences to fine-tune the encoder on first; 0: as it is
    tune_epochs: int = 2
    train: int | None = None  # training sentences to embed; None: all
    augment: tuple[str, ...] = ()  # word lists to draw substituted training sentences from
    copies: int = 1
    wordnet: Path | None = None
    neighbours: Path | None = None
    data_dir: Path | None = None
    seed: int = 0
    device: str = "auto"
    threads: int = 1
    quiet: bool = False


class _Speaker:
    """A line every half minute."""

    def __init__(self, quiet: bool) -> None:
        self.console, self.quiet, self.spoken = Console(file=sys.stderr, highlight=False, soft_wrap=True), quiet, time.monotonic()

    def __call__(self, text: str, now: bool = False) -> None:
        if not self.quiet and (now or time.monotonic() - self.spoken > LINE_SECONDS):
            self.spoken = time.monotonic()
            self.console.print(text)


def embed(asked: EmbedRequest) -> latents.LatentsInfo:
    """Fine-tune if asked, encode every sentence, write the directory. What can be refused is refused before anything is computed."""
    began = time.perf_counter()
    files = find_splits(asked.data, search_path(asked.data_dir))
    splits = {split: read_sentences(path) for split, path in files.items()}
    _check_labels(splits)
    lists = word_lists(asked.augment, asked.wordnet, asked.neighbours)
    if asked.copies != 1 and not lists:
        raise UserError("--copies is about substituted sentences: name the lists they come from, like --augment pwws,cf8")
    ours = (latents.ABOUT, latents.PARTS, ENCODER)
    if asked.out.exists() and any(asked.out.iterdir()) and not any((asked.out / name).exists() for name in ours):
        raise UserError(f"{asked.out} is not empty and was not written by `cure-ray embed`. Choose another --out.")
    say = _Speaker(asked.quiet)
    with cpu_threads(asked.threads), stop_on_signals() as stop:
        try:
            encoder = _encoder(asked, splits["train"], say, stop)
            return _encode(asked, encoder, splits, lists, say, stop, began)
        except StoppedError as told:
            kept = "fine-tuning starts over, encoded sentences are kept"
            raise StoppedError(f"stopped by {told}; run the same command to continue ({kept})") from None


def _check_labels(splits: dict[str, list[Sentence]]) -> None:
    train, test = ({s.label for s in splits[split]} for split in ("train", "test"))
    if len(train) < 2 or not test <= train:
        raise UserError(f"training sentences have the labels {sorted(train)}, test sentences {sorted(test)}: at least two, the same ones")


def _encoder(asked: EmbedRequest, train: list[Sentence], say: _Speaker, stop: Stop) -> Encoder:
    """The encoder as it is, or fine-tuned; a fine-tuned one is kept and found again if it was made of the same things."""
    device = seeding.resolve_device(asked.device)
    base = load_encoder(asked.encoder, asked.pooling, device)
    if not asked.tune:
        return base
    tuning, target, note = Tuning(asked.tune, asked.tune_epochs, seed=asked.seed), asked.out / ENCODER, asked.out / f"{ENCODER}.txt"
    mark = f"{base.digest} {sorted(tuning.words().items())}\n"
    if not (target.is_dir() and note.is_file() and note.read_text() == mark):
        if (asked.out / latents.ABOUT).exists():
            raise UserError(f"{asked.out} holds vectors of another encoder, which heads may rest on: choose another --out")
        chosen = latents.choose(train, tuning.sentences, tuning.seed, "tune")

        def tick(done: int, steps: int, loss: float) -> None:
            stop()
            say(f"fine-tuning: step {done} of {steps}, loss {loss:.3f}")

        say(f"fine-tuning on {len(chosen)} sentences, {tuning.epochs} epochs", now=True)
        tune(base, chosen, tuning, tick)
        asked.out.mkdir(parents=True, exist_ok=True)
        save_encoder(base, target)
        note.write_text(mark)
    return load_encoder(target, asked.pooling, device)


def _encode(
    asked: EmbedRequest, encoder: Encoder, splits: dict[str, list[Sentence]], lists: dict[str, WordList], say: _Speaker, stop: Stop,
    began: float,
) -> latents.LatentsInfo:  # fmt: skip
    train, test = latents.choose(splits["train"], asked.train, asked.seed, "embed"), splits["test"]
    synonyms = [word_list.synonyms for word_list in lists.values()]
    copies = [
        latents.substituted(sentence, synonyms, asked.seed, f"{copy}/{row}")
        for copy in range(asked.copies if lists else 0)
        for row, sentence in enumerate(train)
    ]
    copies = [s for s, fits in zip(copies, encoder.fits([s.text for s in copies]), strict=True) if fits] if copies else []
    key = latents.content_key(encoder, train, test, copies)
    before = latents.finished(asked.out, key)
    if before is not None:
        return before
    total, done, parts = len(train) + len(test) + len(copies), 0, asked.out / latents.PARTS

    def tick(count: int) -> None:
        nonlocal done
        done += count
        stop()
        say(f"encoded {done} of {total} sentences")

    z_test, z_train, z_copies = (
        latents.encode_kept(encoder, [s.text for s in part], parts, tick) if part else torch.empty(0, encoder.width)
        for part in (test, train, copies)
    )
    latents.write_latents(asked.out / latents.LATENTS, (z_train, train), (z_test, test))
    if copies:
        latents.write_latents(asked.out / latents.AUGMENTED, (torch.cat([z_train, z_copies]), [*train, *copies]), (z_test, test))
    info = latents.LatentsInfo(
        data=asked.data if asked.data == "sst2" else str(Path(asked.data).absolute()),
        encoder=ENCODER if asked.tune else str(asked.encoder.absolute()),
        encoder_digest=encoder.digest,
        pooling=asked.pooling,
        width=encoder.width,
        train=len(train),
        test=len(test),
        tuned=Tuning(asked.tune, asked.tune_epochs, seed=asked.seed).words() if asked.tune else None,
        augmented={"lists": {n: w.digest for n, w in lists.items()}, "sentences": len(copies)} if copies else None,
        seconds=time.perf_counter() - began,
        key=key,
    )
    latents.write_info(asked.out, info, {"train": train, "test": test})
    shutil.rmtree(parts)
    return info
