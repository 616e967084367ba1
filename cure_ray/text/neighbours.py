"""Neighbours of words from a file: {"movie": ["film", ...], ...} in JSON, perhaps .gz, as certified-word-sub publishes them."""

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cure_ray.errors import UserError


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Words that may stand for a word, the nearest first, and a digest of the file."""

    words: Mapping[str, Sequence[str]] = field(repr=False)
    digest: str
    limit: int

    def synonyms(self, word: str) -> Sequence[str]:
        return self.words.get(word, ())[: self.limit]


def read_neighbours(path: Path | None, limit: int = 8) -> Neighbours:
    """At most `limit` neighbours of every word. UserError where the file is missing or something else."""
    if path is None:
        raise UserError(
            'the attack cf8 needs a list of neighbours, --neighbours FILE: JSON like {"movie": ["film", "picture"]}, perhaps .gz; '
            "counterfitted_neighbors.json of certified-word-sub is one"
        )
    try:
        raw = path.read_bytes()
        found = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except FileNotFoundError:
        raise UserError(f"--neighbours {path}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"--neighbours {path}: not a JSON file ({error})") from None
    lists = isinstance(found, dict) and all(isinstance(v, list) and all(isinstance(w, str) for w in v) for v in found.values())
    if not lists or not found:
        raise UserError(f'--neighbours {path}: expected one object of lists of words, like {{"movie": ["film", "picture"]}}')
    return Neighbours(found, hashlib.sha256(raw).hexdigest(), limit)
