"""Many attacks at once: every round all of them ask, each distinct sentence is encoded once, and every head scores its own."""

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from cure_ray.attacks import margin
from cure_ray.errors import UserError
from cure_ray.text.attacks import UNUSABLE, Attack, Found, Score
from cure_ray.text.encoder import Encoder

Key = TypeVar("Key", bound=Hashable)
Classify = Callable[[list[tuple[Key, str]]], list[Score]]
ENCODED = 512  # sentences between two looks whether to stop


class Vectors:
    """Vectors of sentences, each encoded once, and kept in a file so that another head's attack finds them."""

    def __init__(self, encoder: Encoder, folder: Path | None, name: Sequence[str], tick: Callable[[int], None]) -> None:
        key = hashlib.sha256(json.dumps([encoder.digest, *name]).encode()).hexdigest()[:24]
        self.encoder, self.tick, self.file = encoder, tick, None if folder is None else folder / f"{key}.npz"
        self.known: dict[str, Tensor] = {}
        self.kept = 0
        if self.file is not None and self.file.is_file():
            self.known = _read(self.file)
            self.kept = len(self.known)

    def of(self, texts: Sequence[str]) -> list[Tensor | None]:
        """A vector for every text; None for one that is longer than the encoder."""
        missing = [text for text in dict.fromkeys(texts) if text not in self.known]
        usable = [text for text, fits in zip(missing, self.encoder.fits(missing), strict=True) if fits] if missing else []
        for start in range(0, len(usable), ENCODED):
            part = usable[start : start + ENCODED]
            self.known |= dict(zip(part, self.encoder.encode(part), strict=True))
            self.tick(len(part))
        return [self.known.get(text) for text in texts]

    def keep(self) -> None:
        """Write what is known, if that is more than the file has."""
        if self.file is None or len(self.known) == self.kept:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        texts = np.frombuffer(json.dumps([*self.known]).encode(), dtype=np.uint8)
        partial = self.file.with_name(f".{self.file.stem}.{os.getpid()}.npz")
        np.savez(partial, allow_pickle=False, texts=texts, vectors=torch.stack([*self.known.values()]).numpy())
        partial.replace(self.file)
        self.kept = len(self.known)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        with np.load(file, allow_pickle=False) as found:
            texts, vectors = json.loads(found["texts"].tobytes()), torch.from_numpy(found["vectors"])
        return dict(zip(texts, vectors, strict=True))
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{file} is damaged ({error}): delete it, it is made anew") from error


def drive(attacks: Mapping[Key, Attack], classify: Classify[Key]) -> dict[Key, Found]:
    """What every attack found. All that are still at work ask in one round."""
    found: dict[Key, Found] = {}
    waiting: dict[Key, list[str]] = {}

    def go_on(key: Key, answer: list[Score] | None) -> None:
        try:
            waiting[key] = next(attacks[key]) if answer is None else attacks[key].send(answer)
        except StopIteration as end:
            found[key] = end.value

    for key in attacks:
        go_on(key, None)
    while waiting:
        asked, waiting = waiting, {}
        scores = iter(classify([(key, text) for key, texts in asked.items() for text in texts]))
        for key, texts in asked.items():
            go_on(key, [next(scores) for _ in texts])
    return found


@torch.no_grad()
def score_all(head: nn.Module, vectors: Sequence[Tensor | None], labels: Sequence[int]) -> list[Score]:
    """Scores of vectors under one head; unusable where there is no vector."""
    rows = [i for i, vector in enumerate(vectors) if vector is not None]
    scores = [UNUSABLE] * len(vectors)
    if not rows:
        return scores
    z_BD11 = torch.stack([v for v in vectors if v is not None])[:, :, None, None]
    logits_BK, y_B = head(z_BD11), torch.tensor([labels[i] for i in rows])
    probability_B = logits_BK.softmax(1).gather(1, y_B[:, None])[:, 0]
    for i, p, m in zip(rows, probability_B.tolist(), margin(logits_BK, y_B).tolist(), strict=True):
        scores[i] = Score(p, m)
    return scores
