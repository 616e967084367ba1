"""The reproduction bundle of a soundness failure: weights, image, witness, bounds and settings, in open formats."""

import json
import time
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor, nn


class ThreatLike(Protocol):
    """A readable name, and the fields a row has for every threat."""

    @property
    def norm(self) -> str: ...

    @property
    def eps(self) -> float: ...


def save_bundle(
    root: Path,
    network: nn.Module,
    image: Tensor,
    label: int,
    threat: ThreatLike,
    index: int,
    what: str,
    witness: Tensor | None,
    margins: Tensor | None,
    engine: str,
    engine_version: str,
    settings: dict[str, Any],
    seed: int,
) -> Path:
    """Write the bundle and return its directory. Weights are named as in the network's state dict."""
    directory = root / f"sample-{index}-{threat}-{time.strftime('%Y%m%dT%H%M%S')}"
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}, directory / "weights.safetensors")
    tensors = {"image": image, "witness": witness, "margins": margins}
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items() if v is not None}, directory / "sample.safetensors")
    facts = {
        "what": what, "sample_index": index, "label": label, "norm": threat.norm, "eps": threat.eps, "engine": engine,
        "engine_version": engine_version, "settings": settings, "seed": seed, "network": repr(network),
    }  # fmt: skip
    (directory / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    return directory
