"""Words: an adversary who exchanges words of a sentence. It is attacked, never certified: proofs are about vectors, not about words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Substitutions as one attack makes them, by its name."""

    family = "text"

    attack: str

    norm = "text"  # the columns every row has; words have no radius
    eps = 0.0
    grid = None

    def __str__(self) -> str:
        return self.attack
