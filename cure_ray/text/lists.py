"""The word lists attacks draw from, by name: pwws from WordNet, cf8 from a file of counter-fitted neighbours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cure_ray.errors import UserError, nearest
from cure_ray.text.neighbours import read_neighbours
from cure_ray.text.wordnet import find_wordnet, read_wordnet

ATTACKS = ("pwws", "cf8")
RESERVED = {
    "textfooler": "it needs counter-fitted vectors, a sentence encoder and part-of-speech tags, which are not part of cure_ray: "
    "docs/guide/text.md says how to add an attack of your own. cf8 draws from counter-fitted neighbours, but is not TextFooler"
}


class WordList(Protocol):
    """What an attack may exchange a word for, and a digest of where that comes from."""

    @property
    def digest(self) -> str: ...
    def synonyms(self, word: str) -> Sequence[str]: ...


def word_lists(names: Sequence[str], wordnet: Path | None, neighbours: Path | None) -> dict[str, WordList]:
    """The list of every attack that is named; UserError that says what to install or bring for one that is missing."""
    found: dict[str, WordList] = {}
    for name in names:
        if name in RESERVED:
            raise UserError(f"{name} is not built in: {RESERVED[name]}")
        if name not in ATTACKS:
            raise UserError(f"unknown attack on words {name!r}.{nearest(name, ATTACKS)}")
        if name in found:
            raise UserError(f"the attack {name} is named twice")
        found[name] = read_wordnet(find_wordnet(wordnet)) if name == "pwws" else read_neighbours(neighbours)
    return found
