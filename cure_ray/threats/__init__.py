"""What an adversary may do: norm balls, transformations, patches and exchanged words, their grammar and their geometry.

Torch-free but for `geometry` and `warps`.
"""

from cure_ray.threats.balls import Ball, Balls
from cure_ray.threats.box import Box
from cure_ray.threats.patches import Patch
from cure_ray.threats.transformations import Transformation
from cure_ray.threats.words import Words

Threat = Ball | Balls | Transformation | Patch | Words

__all__ = ["Ball", "Balls", "Box", "Patch", "Threat", "Transformation", "Words"]
