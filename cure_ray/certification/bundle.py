"""The alarm when a proof is contradicted: everything needed to reproduce it is saved, in open formats, and the run stops."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import save_file
from torch import Tensor, nn

from cure_ray.bounds.engine import Engine
from cure_ray.certification.outcome import Outcome
from cure_ray.errors import SoundnessError
from cure_ray.threats import Threat


@dataclass(frozen=True)
class Alarm:
    """Who certifies and how: what a bundle holds besides the sample. `root` is where bundles go."""

    engine: Engine
    network: nn.Module
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    root: Path = Path("soundness-failure")

    def unsound(self, image: Tensor, outcome: Outcome, threat: Threat, index: int, what: str, witness: Tensor | None = None) -> NoReturn:
        """Save the contradiction, then stop the run."""
        path = self._save(image, outcome, threat, index, what, witness)
        raise SoundnessError(
            f"SOUNDNESS FAILURE at sample {index}, {threat}, engine {self.engine.name} {self.engine.version}: {what}. "
            f"No certificate of this run can be trusted. Everything needed to reproduce it is in {path}; please report it."
        )

    def _save(self, image: Tensor, outcome: Outcome, threat: Threat, index: int, what: str, witness: Tensor | None) -> Path:
        """Write the bundle and return its directory. Weights are named as in the network's state dict."""
        directory = self.root / f"sample-{index}-{threat}-{time.strftime('%Y%m%dT%H%M%S')}"
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in self.network.state_dict().items()}, directory / "weights.safetensors")
        tensors = {"image": image, "witness": outcome.witness if witness is None else witness, "margins": outcome.margins}
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items() if v is not None}, directory / "sample.safetensors")
        facts = {
            "what": what, "sample_index": index, "label": outcome.label, "threat": str(threat), "norm": threat.norm, "eps": threat.eps,
            "engine": self.engine.name, "engine_version": self.engine.version, "settings": dict(self.settings), "seed": self.seed,
            "network": repr(self.network),
        }  # fmt: skip
        (directory / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
        return directory
