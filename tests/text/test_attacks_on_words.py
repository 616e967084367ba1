"""Attacks on words: what they may change, the order they change it in, their budget, and that many at once find what one alone finds."""

import math
from collections.abc import Callable

import pytest

from cure_ray.text.attacks import Attack, Found, Score, attack, changed_text
from cure_ray.text.driver import drive
from cure_ray.text.words import STOP_WORDS, split_words

TEXT = "The movie was really Great and the plot dull"
SYNONYMS = {"movie": ["film", "flick"], "great": ["big", "fine"], "plot": ["story"], "dull": ["weak"], "was": ["is"]}
UNKNOWN = "[UNK]"


def classifier(weights: dict[str, float], bias: float = 1.0) -> Callable[[str], Score]:
    """A class whose logit is a sum over words: every effect is known."""

    def score(text: str) -> Score:
        margin = bias + sum(weights.get(word.lower(), 0.0) for word in text.split())
        return Score(1 / (1 + math.exp(-margin)), margin)

    return score


def play(name: str, score: Callable[[str], Score], budget: int = 1000) -> tuple[Found, list[str]]:
    asked = list[str]()
    dialogue = attack(name, TEXT, lambda word: SYNONYMS.get(word, []), score(TEXT), UNKNOWN, budget)
    answer: list[Score] | None = None
    while True:
        try:
            texts = next(dialogue) if answer is None else dialogue.send(answer)
        except StopIteration as end:
            return end.value, asked
        asked += texts
        answer = [score(text) for text in texts]


@pytest.mark.parametrize("name", ["pwws", "cf8"])
def test_substitutions_keep_length_case_and_stop_words(name: str) -> None:
    found, asked = play(name, classifier({"big": -0.4, "film": -0.3, "story": -0.2, "weak": -0.5}))
    assert found.score.wrong
    for text in asked:
        pairs = list(zip(split_words(TEXT), split_words(text), strict=True))
        changed = [(old, new) for old, new in pairs if old != new]
        assert changed
        for old, new in changed:
            assert old.lower() not in STOP_WORDS
            assert new == UNKNOWN or new.lower() in SYNONYMS[old.lower()]
            assert new == UNKNOWN or old[0].isupper() == new[0].isupper()
    assert "Big" in changed_text(TEXT, found.changes).split() or not any(c.old == "Great" for c in found.changes)


def test_one_substitution_that_suffices_is_taken_alone() -> None:
    for name in ("pwws", "cf8"):
        found, _ = play(name, classifier({"film": -0.2, "weak": -1.5}))
        assert [(c.old, c.new) for c in found.changes] == [("dull", "weak")]
        assert found.score.wrong


def test_pwws_weighs_gains_by_saliency_and_cf8_does_not() -> None:
    """story brings the larger gain, but without `movie` (unknown) the class would lose most, so pwws begins there."""
    weights = {"movie": 1.0, "film": 0.7, "flick": 0.8, "story": -0.35, "fine": -0.34, "big": 0.2}
    _, by_gain = play("cf8", classifier(weights, 0.0))
    _, by_saliency = play("pwws", classifier(weights, 0.0))
    first = {name: next(t for t in asked if len(_changed(t)) == 2) for name, asked in (("cf8", by_gain), ("pwws", by_saliency))}
    assert _changed(first["cf8"]) == {"story", "Fine"}
    assert "film" in _changed(first["pwws"])


def _changed(text: str) -> set[str]:
    return {new for old, new in zip(TEXT.split(), text.split(), strict=True) if old != new} - {UNKNOWN}


@pytest.mark.parametrize("name", ["pwws", "cf8"])
def test_what_does_not_help_is_not_kept_and_nothing_is_found_where_nothing_is(name: str) -> None:
    found, _ = play(name, classifier({"film": 0.5, "flick": 0.2, "big": 0.1, "fine": 0.1, "story": 0.3, "weak": 0.2}))
    assert found.changes == ()
    assert not found.score.wrong
    found, _ = play(name, classifier({"flick": -0.2, "fine": -0.3, "story": 0.1, "weak": 0.1}))
    assert {c.new for c in found.changes} == {"flick", "Fine"}
    assert found.score.margin == pytest.approx(0.5)


@pytest.mark.parametrize("budget", [1, 3, 7, 9, 1000])
def test_the_budget_is_kept_and_counted(budget: int) -> None:
    for name in ("pwws", "cf8"):
        found, asked = play(name, classifier({"flick": -0.2, "fine": -0.3, "story": -0.1, "weak": -0.1}), budget)
        assert found.queries == len(asked) <= budget
        assert set(found.singles) <= set(asked)


def test_many_attacks_at_once_find_what_each_finds_alone() -> None:
    scorers = {k: classifier({"flick": -0.2 * k, "fine": -0.3, "story": -0.1 * k, "weak": -0.1}, 0.5 + 0.1 * k) for k in range(1, 6)}
    names = {k: "pwws" if k % 2 else "cf8" for k in scorers}
    rounds = list[int]()

    def classify(asked: list[tuple[int, str]]) -> list[Score]:
        rounds.append(len(asked))
        return [scorers[k](text) for k, text in asked]

    attacks: dict[int, Attack] = {
        k: attack(names[k], TEXT, lambda word: SYNONYMS.get(word, []), scorers[k](TEXT), UNKNOWN) for k in scorers
    }
    together = drive(attacks, classify)
    assert together == {k: play(names[k], scorers[k])[0] for k in scorers}
    assert sum(rounds) == sum(found.queries for found in together.values())
    assert len(rounds) < sum(rounds)
