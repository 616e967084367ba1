"""A network trained elsewhere, as `cure-ray certify` is given one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cure_ray.testing import tiny


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, Any]:
    """The options of a run on a network trained elsewhere."""
    save_file(tiny.network().state_dict(), tmp_path / "weights.safetensors")
    x, y = tiny.samples(24)
    np.savez(tmp_path / "data.npz", images=(x * 255).round().to(torch.uint8).numpy(), labels=y.numpy())
    return {
        "network": "cure_ray.testing.tiny:architecture",
        "weights": tmp_path / "weights.safetensors",
        "data": tmp_path / "data.npz",
        "threats": "linf=0.03,l2=0.2,l1=0.4",
        "out": str(tmp_path / "out"),
        "device": "cpu",
    }
