"""A patch: a rectangle of pixels that may take any value, wherever it lies in the image."""

from dataclasses import dataclass

from cure_ray.errors import UserError


@dataclass(frozen=True)
class Patch:
    """A height x width rectangle of pixels, all channels."""

    family = "patch"

    height: int = 2
    width: int = 2

    norm = "patch"  # the columns every row has; a patch has no radius
    eps = 0.0
    grid = None

    def __post_init__(self) -> None:
        if not all(isinstance(side, int) and side >= 1 for side in (self.height, self.width)):
            raise UserError(f"a patch is at least 1x1 whole pixels, got {self.height}x{self.width}")

    def __str__(self) -> str:
        return f"patch={self.height}x{self.width}"


def check_size(patch: Patch, image: tuple[int, int]) -> None:
    if patch.height > image[0] or patch.width > image[1]:
        raise UserError(f"{patch} is larger than the image ({image[0]}x{image[1]} pixels): nothing of the image would be left to classify")
