"""What is kept of an attack on words beside its verdict: the sentence, the words that changed, and how far its vector moved."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from cure_ray.errors import UserError
from cure_ray.text.words import Change
from cure_ray.threats.norms import NORMS


@dataclass(frozen=True)
class WordsRecord:
    """The column `message` of a row of family text, as JSON."""

    sentence: str
    changes: tuple[Change, ...] = ()  # of the worst sentence that was found
    distances: Mapping[str, float] | None = None  # of its vector from the original's, by norm; None: not attacked
    singles: int = 0  # sentences with one substitution that were tried
    singles_inside: Mapping[str, int] | None = None  # those of them whose vector lies in the experiment's ball, by norm

    def to_json(self) -> str:
        changes = [[c.place, c.old, c.new] for c in self.changes]
        inside = None if self.singles_inside is None else dict(self.singles_inside)
        distances = None if self.distances is None else dict(self.distances)
        return json.dumps(
            {"sentence": self.sentence, "changes": changes, "distances": distances, "singles": self.singles, "inside": inside}
        )

    @staticmethod
    def of_json(text: str | None, where: str) -> "WordsRecord":
        try:
            found = json.loads(text or "")
            changes = tuple(Change(int(place), str(old), str(new)) for place, old, new in found["changes"])
            return WordsRecord(str(found["sentence"]), changes, found["distances"], int(found["singles"]), found["inside"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: a row of an attack on words without its record ({error}); attack again") from None


def inside(distances: Mapping[str, float], radii: Mapping[str, float]) -> dict[str, bool]:
    """Per norm that has a radius: whether a vector so far away still lies in the ball."""
    return {norm: distances[norm] <= radii[norm] for norm in NORMS if radii.get(norm)}
