"""Attacks on words as dialogues: an attack yields sentences it wants classified, is sent their scores, and returns the words it changed.

Nothing here knows an encoder or a network, so many attacks can share one pass through both (text/driver.py). They are deterministic.

pwws (Ren et al. 2019, "Generating Natural Language Adversarial Examples through Probability Weighted Word Saliency"): the best
substitute of every word is found alone; words come in the order of the gain it brings times the softmax of their saliency, which is
what the class loses when the word is unknown; substitutes are put in one after another. Two differences: named entities, which the
original exchanges too, are left alone, and where a single substitution suffices it is taken at once.
cf8: the same with counter-fitted neighbours and in the order of the gains alone. It is not TextFooler: there is no similarity of
sentences and no part of speech to keep to.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from cure_ray.text.words import Change, Synonyms, candidates, exchange, split_words

BUDGET = 2000  # sentences one attack may ask for


@dataclass(frozen=True)
class Score:
    """What a classifier says of a sentence: the probability of its true class, and that class's logit above the best other."""

    probability: float
    margin: float

    @property
    def wrong(self) -> bool:
        return self.margin <= 0


UNUSABLE = Score(1.0, math.inf)  # of a sentence that cannot be classified, such as one that got too long


@dataclass(frozen=True)
class Found:
    """The worst sentence an attack came to, as changes of the original, how it scores, and how many sentences it asked for."""

    changes: tuple[Change, ...]
    score: Score
    queries: int
    singles: tuple[str, ...]  # sentences with one substitution that were tried


Attack = Generator[list[str], list[Score], Found]


def attack(name: str, text: str, synonyms: Synonyms, clean: Score, unknown: str, budget: int = BUDGET) -> Attack:
    """The attack of this name on a sentence that is classified rightly so far. `unknown` is the encoder's word for no word."""
    words = split_words(text)
    blanks = {place: Change(place, word, unknown) for place, word in enumerate(words) if candidates(word, synonyms)}
    options = [Change(place, words[place], new) for place in blanks for new in candidates(words[place], synonyms)]
    weighs = name == "pwws"
    asked = ([*blanks.values()] if weighs else []) + options
    asked = asked[:budget]
    singles = [exchange(words, [change]) for change in asked]
    scores = (yield singles) if singles else []
    queries, known = len(singles), dict(zip(asked, scores, strict=True))
    tried = tuple(text for text, change in zip(singles, asked, strict=True) if change.new != unknown)
    best = _best_of_each((change, score) for change, score in known.items() if change.new != unknown)
    order = _by_saliency(best, {p: known[c] for p, c in blanks.items() if c in known}, clean) if weighs else _by_gain(best)
    changes, score = list[Change](), clean
    worst = min(best.values(), key=lambda pair: pair[1].margin, default=None)
    if worst is not None and worst[1].wrong:
        return Found((worst[0],), worst[1], queries, tried)
    for place in order:
        change, alone = best[place]
        if alone.probability >= clean.probability or queries >= budget:
            continue
        if not changes:
            changes, score = [change], alone  # known from above
            continue
        (now,) = yield [exchange(words, [*changes, change])]
        queries += 1
        if now.probability < score.probability:
            changes, score = [*changes, change], now
        if score.wrong:
            break
    return Found(tuple(sorted(changes, key=lambda c: c.place)), score, queries, tried)


def _best_of_each(scored: Iterable[tuple[Change, Score]]) -> dict[int, tuple[Change, Score]]:
    """Per place the substitute that leaves the true class least; the first of equals."""
    best: dict[int, tuple[Change, Score]] = {}
    for change, score in scored:
        if change.place not in best or score.probability < best[change.place][1].probability:
            best[change.place] = (change, score)
    return best


def _by_gain(best: dict[int, tuple[Change, Score]]) -> list[int]:
    return sorted(best, key=lambda place: (best[place][1].probability, place))


def _by_saliency(best: dict[int, tuple[Change, Score]], blanked: dict[int, Score], clean: Score) -> list[int]:
    """Gain times the softmax of saliency, largest first."""
    saliency = {place: clean.probability - blanked[place].probability for place in best}
    total = math.fsum(math.exp(s) for s in saliency.values())
    weight = {place: (clean.probability - best[place][1].probability) * math.exp(saliency[place]) / total for place in best}
    return sorted(best, key=lambda place: (-weight[place], place))


def changed_text(text: str, changes: Sequence[Change]) -> str:
    return exchange(split_words(text), changes)
