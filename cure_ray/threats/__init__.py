"""What an adversary may do: norm balls, transformations and patches, their grammar and their geometry.

Torch-free but for `geometry` and `warps`.
"""

from cure_ray.threats.balls import Ball
from cure_ray.threats.box import Box
from cure_ray.threats.patches import Patch
from cure_ray.threats.transformations import Transformation

Threat = Ball | Transformation | Patch

__all__ = ["Ball", "Box", "Patch", "Threat", "Transformation"]
