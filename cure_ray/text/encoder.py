"""The encoder: a transformers directory (BERT and its kin) that turns sentences into vectors, frozen, offline, known by its digest."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cure_ray.data._torchvision_compat import declare_missing_operators
from cure_ray.errors import UserError, nearest

POOLINGS = ("mean", "cls")
BATCH = 64
_INSTALL = "pip install 'cure-ray[text]'"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "vocab.json")
# What decides how a sentence becomes numbers; notes beside them do not.
_DIGESTED = (".safetensors", ".txt", ".json", ".model")
_UNDIGESTED = ("README", "data_config", "modules", "config_sentence_transformers", "sentence_bert_config")


class TooLongError(UserError):
    """A sentence with more tokens than the encoder has positions."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen model with its tokenizer. Two encoders of one digest give the same vectors, up to the rounding of batches."""

    model: Any
    tokenizer: Any
    pooling: str  # one of POOLINGS
    digest: str
    limit: int  # tokens of a sentence, the special ones included
    device: torch.device

    @property
    def width(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def unknown(self) -> str:
        """The word that stands for no word."""
        return str(self.tokenizer.unk_token)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of every text."""
        return [len(ids) for ids in self.tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]]

    def fits(self, texts: Sequence[str]) -> list[bool]:
        return [length <= self.limit for length in self.lengths(texts)]

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Vectors [N, D] in float32 on the CPU. Texts of like length go together; none is ever cut."""
        lengths = self.lengths(texts) if texts else []
        for text, length in zip(texts, lengths, strict=True):
            if length > self.limit:
                raise TooLongError(
                    f"a sentence of {length} tokens, the encoder takes {self.limit}: {text[:60]!r}... Shorten it or take it out: a vector "
                    "of a part of it would be another sentence's"
                )
        out = torch.empty(len(texts), self.width)
        order = sorted(range(len(texts)), key=lambda i: (lengths[i], i))
        for start in range(0, len(order), BATCH):
            rows = order[start : start + BATCH]
            out[rows] = pooled(self, [texts[i] for i in rows]).float().cpu()
        return out


def pooled(encoder: Encoder, texts: Sequence[str]) -> Tensor:
    """Vectors of a batch, with gradients where they are wanted: the mean over the words' last hidden states, or the first token's."""
    tokens = encoder.tokenizer(list(texts), padding=True, return_tensors="pt").to(encoder.device)
    hidden_BTD = encoder.model(**tokens).last_hidden_state
    if encoder.pooling == "cls":
        return hidden_BTD[:, 0]
    mask_BT1 = tokens["attention_mask"][:, :, None].to(hidden_BTD.dtype)
    return (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)


def load_encoder(directory: Path, pooling: str = "mean", device: torch.device | None = None) -> Encoder:
    """Read an encoder from its files, never from a network. UserError where it is not whole or does not fit together."""
    if pooling not in POOLINGS:
        raise UserError(f"unknown pooling {pooling!r}.{nearest(pooling, POOLINGS)}")
    _check_files(directory)
    transformers = import_transformers()
    try:
        model = transformers.AutoModel.from_pretrained(str(directory), local_files_only=True, use_safetensors=True, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever damaged files make transformers raise
        raise UserError(f"encoder {directory}: {_first_line(error)}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"encoder {directory}: its tokenizer knows {len(tokenizer)} tokens, its model {rows}: they do not belong together; take both "
            "from one release"
        )
    if tokenizer.unk_token is None or tokenizer.pad_token is None:
        raise UserError(f"encoder {directory}: its tokenizer has no token for unknown words or for padding, which BERT and its kin have")
    places = int(getattr(model.config, "max_position_embeddings", 512))
    place, limit = device or torch.device("cpu"), min(int(tokenizer.model_max_length), places)
    model.eval().requires_grad_(False).to(place)
    return Encoder(model, tokenizer, pooling, encoder_digest(directory, pooling), limit, place)


def import_transformers() -> Any:
    """The library, quiet; UserError with what to install where it is missing."""
    try:
        declare_missing_operators()  # transformers imports torchvision, too
        import transformers
    except ImportError:
        raise UserError(f"sentences need the library transformers, which is not installed: {_INSTALL}") from None
    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def encoder_digest(directory: Path, pooling: str) -> str:
    """SHA-256 over the files that decide what a sentence becomes, and how it is pooled."""
    digest = hashlib.sha256(f"cure_ray encoder 1;{pooling};".encode())
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.suffix in _DIGESTED and file.stem not in _UNDIGESTED:
            with file.open("rb") as stream:
                digest.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()};".encode())
    return digest.hexdigest()


def _check_files(directory: Path) -> None:
    if not directory.is_dir():
        raise UserError(f"encoder {directory}: no such directory. It must be a local transformers directory; nothing is downloaded")
    needed = {"config.json": ("config.json",), "weights (model.safetensors)": _WEIGHTS, "a tokenizer (tokenizer.json)": _TOKENIZERS}
    missing = [what for what, names in needed.items() if not any((directory / name).is_file() for name in names)]
    if missing:
        raise UserError(f"encoder {directory}: it lacks {', '.join(missing)}; expected what model.save_pretrained and tokenizer's write")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
