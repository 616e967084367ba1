"""The stages of the cascade by name, cheapest first: the one list every reader, writer and table takes."""

from typing import Literal, get_args

Stage = Literal["ibp", "crown-ibp", "attack", "crown", "alpha-crown", "branch-and-bound"]
"""The attack comes after the bounds that decide most samples of a certified-trained network for nothing."""
BoundStage = Literal["ibp", "crown-ibp", "crown", "alpha-crown", "branch-and-bound"]
"""What an engine may offer; only these certify."""

CASCADE: tuple[Stage, ...] = get_args(Stage)
BOUND_STAGES: tuple[BoundStage, ...] = get_args(BoundStage)
DEFAULT_STAGES = CASCADE[:-1]
assert tuple(stage for stage in CASCADE if stage != "attack") == BOUND_STAGES
NODES = 100
"""Sub-problems of branch and bound per sample and threat where nothing is asked for: alpha-CROWN alone was seen 12 to 26 points too low on
networks trained with boxes, and to reverse the order of methods (docs/results.md)."""
GUARD_SECONDS = 3600.0
"""What a sample gets when only its sub-problems are limited: a guard against hanging, not a budget."""
