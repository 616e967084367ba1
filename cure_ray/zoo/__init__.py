"""The zoo: published networks as their authors describe them, our own networks with their verdicts, and the list of both."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cure_ray.networks.models import Network


def load(name: str, zoo: str | Path | None = None, weights: str | Path | None = None) -> "Network":
    """A network of the zoo, in evaluation mode, every file of it checked against the manifest.

    A published network needs the file its authors keep: `weights`.
    """
    from cure_ray.zoo.networks import load_network

    return load_network(name, zoo, weights)
