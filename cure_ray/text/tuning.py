"""Fine-tuning an encoder on labelled sentences, naturally and once: cross-entropy through a linear layer that is thrown away."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from cure_ray import seeding
from cure_ray.text.encoder import Encoder, pooled
from cure_ray.text.tsv import Sentence


@dataclass(frozen=True)
class Tuning:
    """How an encoder is fine-tuned."""

    sentences: int
    epochs: int = 2
    batch: int = 32
    lr: float = 5e-5
    seed: int = 0

    def words(self) -> dict[str, float]:
        return asdict(self)


Tick = Callable[[int, int, float], None]  # steps done, steps in all, loss


def tune(encoder: Encoder, sentences: Sequence[Sentence], tuning: Tuning, tick: Tick) -> None:
    """Change the encoder's weights in place. AdamW, a linear decay of its rate, dropout as the model's own configuration says."""
    classes = 1 + max(s.label for s in sentences)
    model, steps = encoder.model, tuning.epochs * (len(sentences) // tuning.batch or 1)
    with torch.random.fork_rng(devices=[encoder.device] if encoder.device.type == "cuda" else []):
        torch.manual_seed(seeding.derive(tuning.seed, "tune"))
        head = nn.Linear(encoder.width, classes).to(encoder.device)
        model.train().requires_grad_(True)
        parameters = [p for p in [*model.parameters(), *head.parameters()] if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=tuning.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for step in range(steps):
            rows = _batch(len(sentences), step, tuning)
            labels = torch.tensor([sentences[i].label for i in rows], device=encoder.device)
            loss = F.cross_entropy(head(pooled(encoder, [sentences[i].text for i in rows])), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            tick(step + 1, steps, float(loss.detach()))
    model.eval().requires_grad_(False)


def _batch(total: int, step: int, tuning: Tuning) -> list[int]:
    """The rows of a step: every epoch is a shuffle of its own, its incomplete last batch is left out."""
    size = min(tuning.batch, total)
    epoch, place = divmod(step, total // size)
    order = torch.randperm(total, generator=seeding.generator("cpu", tuning.seed, "tune", epoch))
    return [int(i) for i in order[place * size : (place + 1) * size]]


def save_encoder(encoder: Encoder, directory: Path) -> None:
    """The encoder as a transformers directory, complete or not there."""
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    encoder.model.save_pretrained(str(partial))
    encoder.tokenizer.save_pretrained(str(partial))
    if directory.exists():
        shutil.rmtree(directory)
    partial.replace(directory)
