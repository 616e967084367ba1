"""A sentence as words, and what may stand in a word's place: one word for one word, case kept, stop words and punctuation untouched."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Synonyms = Callable[[str], Sequence[str]]  # of a lower-case word, the likeliest first

# Words whose exchange changes grammar rather than wording: articles, pronouns, prepositions, conjunctions, auxiliaries, negations.
_STOPS = """
a about above across after again against all almost along already also although always am among an and another any anybody anyone
anything anywhere are around as at be because been before behind being below beside besides between beyond both but by can cannot could
did do does doing done down during each either else enough even ever every everybody everyone everything everywhere few for from further
had has have having he hence her here hers herself him himself his how however i if in indeed into is it its itself just least less many
may me might mine more most much must my myself neither never nevertheless no nobody none nor not nothing now nowhere of off often on
once one only onto or other others otherwise ought our ours ourselves out over own per perhaps quite rather same shall she should since
so some somebody someone something sometimes somewhere still such than that the their theirs them themselves then there therefore these
they this those though through throughout thus to together too toward towards under until up upon us very was we well were what whatever
when whenever where whereas wherever whether which whichever while who whoever whole whom whose why will with within without would yet
you your yours yourself yourselves
"""
STOP_WORDS = frozenset(_STOPS.split())


@dataclass(frozen=True)
class Change:
    """A word that was exchanged."""

    place: int
    old: str
    new: str


def split_words(text: str) -> list[str]:
    """The words between spaces: data sets such as SST-2 set punctuation apart already."""
    return text.split()


def may_change(word: str) -> bool:
    """Whether a word is one that may be exchanged: letters alone, at least two, and no stop word."""
    return len(word) > 1 and word.isalpha() and word.lower() not in STOP_WORDS


def in_case_of(new: str, old: str) -> str:
    """The new word in the old one's case: all capitals, a capital first, or as it is."""
    if len(old) > 1 and old.isupper():
        return new.upper()
    return new[:1].upper() + new[1:] if old[:1].isupper() else new


def candidates(word: str, synonyms: Synonyms) -> list[str]:
    """What may stand in a word's place: other single words, in its case, each once; nothing for words that may not change."""
    if not may_change(word):
        return []
    known = dict.fromkeys(s.lower() for s in synonyms(word.lower()))
    return [in_case_of(s, word) for s in known if s.isalpha() and s != word.lower() and s not in STOP_WORDS]


def exchange(words: Sequence[str], changes: Sequence[Change]) -> str:
    """The sentence with these words exchanged: as many words as before."""
    out = list(words)
    for change in changes:
        out[change.place] = change.new
    return " ".join(out)
