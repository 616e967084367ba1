"""Synonyms from WordNet's own files (index.*, data.*, *.exc): the lemmas of every synset a word, or its base form, belongs to.

The files are those of WordNet 3.0 and 3.1 (format: wndb(5WN)); Debian and Ubuntu ship them as `wordnet-base`.
"""

import functools
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from cure_ray.errors import UserError

PARTS = ("noun", "verb", "adj", "adv")
PLACES = ("/usr/share/wordnet", "/usr/local/share/wordnet", "/opt/homebrew/opt/wordnet/dict", "/usr/local/WordNet-3.0/dict")
VARIABLE = "WNSEARCHDIR"  # WordNet's own programs read it, too
# Endings that are taken off, as morphy(7WN) lists them; a form counts only if the index has it.
_ENDINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "noun": (
        ("s", ""), ("ses", "s"), ("ves", "f"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"), ("men", "man"), ("ies", "y"),
    ),
    "verb": (("s", ""), ("ies", "y"), ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", "")),
    "adj": (("er", ""), ("est", ""), ("er", "e"), ("est", "e")),
    "adv": (),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Part:
    """One part of speech: lemma -> offsets of its synsets, most frequent sense first; irregular forms; the synsets' bytes."""

    name: str
    index: dict[str, tuple[int, ...]]
    irregular: dict[str, tuple[str, ...]]
    data: bytes = field(repr=False)

    def lemmas(self, offset: int) -> list[str]:
        """The words of the synset at a byte offset: `offset lex_filenum ss_type w_cnt word lex_id [word lex_id...] ...`."""
        fields = self.data[offset : self.data.index(b"\n", offset)].decode("latin-1").split(" ")
        count = int(fields[3], 16)
        return [fields[4 + 2 * i].partition("(")[0] for i in range(count)]  # adjectives may carry a marker: galore(ip)

    def forms(self, word: str) -> list[str]:
        """The word and its base forms, as far as the index has them."""
        found = [word, *self.irregular.get(word, ())]
        if len(found) == 1:
            found += [word[: -len(end)] + start for end, start in _ENDINGS[self.name] if word.endswith(end) and len(word) > len(end)]
        return [form for form in dict.fromkeys(found) if form in self.index]


@dataclass(frozen=True, eq=False)
class WordNet:
    """The four parts of speech, and a digest of the files they were read from."""

    parts: tuple[_Part, ...]
    digest: str

    @functools.lru_cache(maxsize=100_000)  # noqa: B019 - one dictionary a process
    def synonyms(self, word: str) -> tuple[str, ...]:
        """Other lemmas of the synsets of a lower-case word in any part of speech, nouns first, the likeliest sense first.

        Base forms are found as WordNet's morphy does; a lemma is returned as it stands in the dictionary, not inflected.
        """
        found: dict[str, None] = {}
        for part in self.parts:
            forms = part.forms(word)
            for form in forms:
                for offset in part.index[form]:
                    found |= dict.fromkeys(lemma for lemma in part.lemmas(offset) if lemma.lower() not in (word, *forms))
        return tuple(found)


def find_wordnet(given: Path | None = None) -> Path:
    """The directory with WordNet's files: the one given, WNSEARCHDIR's, or where packages put it."""
    named = [str(given)] if given is not None else [os.environ.get(VARIABLE, ""), *PLACES]
    for place in filter(None, named):
        if all((Path(place) / f"{kind}.{part}").is_file() for kind in ("index", "data") for part in PARTS):
            return Path(place)
    raise UserError(
        f"the attack pwws needs WordNet's files (index.noun, data.noun, ...), which are not in {', '.join(filter(None, named))}. Install "
        f"them (Debian and Ubuntu: apt install wordnet-base; macOS: brew install wordnet), or name their folder with --wordnet"
    )


def read_wordnet(directory: Path) -> WordNet:
    """All four parts of speech; UserError naming a file that is not in WordNet's format."""
    digest, parts = hashlib.sha256(), []
    for name in PARTS:
        paths = [directory / f"index.{name}", directory / f"data.{name}", directory / f"{name}.exc"]
        index, data, irregular = (path.read_bytes() if path.is_file() else b"" for path in paths)
        for content in (index, data, irregular):
            digest.update(hashlib.sha256(content).digest())
        part = _Part(name, _index(index.decode("latin-1"), paths[0]), _irregular(irregular.decode("latin-1")), data)
        _check(part, paths[1])
        parts.append(part)
    return WordNet(tuple(parts), digest.hexdigest())


def _index(text: str, path: Path) -> dict[str, tuple[int, ...]]:
    """`lemma pos synset_cnt p_cnt [symbol...] sense_cnt tagsense_cnt offset [offset...]`; lines of the licence begin with two blanks."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("  ") or not line.strip():
            continue
        fields = line.split()
        try:
            senses = int(fields[2])
            found[fields[0]] = tuple(int(offset) for offset in fields[-senses:])
        except (IndexError, ValueError):
            raise UserError(f"{path}, line {number}: not a line of a WordNet index: {line[:60]!r}") from None
    return found


def _irregular(text: str) -> dict[str, tuple[str, ...]]:
    rows = (line.split() for line in text.splitlines() if line.strip())
    return {row[0]: tuple(row[1:]) for row in rows}


def _check(part: _Part, path: Path) -> None:
    """The first sense of some lemmas must be a synset that holds them: index and data belong together."""
    for lemma in list(part.index)[:: max(1, len(part.index) // 50)]:
        try:
            held = [word.lower() for word in part.lemmas(part.index[lemma][0])]
        except (ValueError, IndexError):
            held = []
        if lemma not in held:
            raise UserError(f"{path}: no synset of {lemma!r} where index.{part.name} says; take both files from one release of WordNet")
