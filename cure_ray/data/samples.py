"""Images and labels to be certified, whatever they came from, and their digest."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Images in [0, 1] and labels; row i of the tensors is sample number i of the split."""

    dataset: str
    split: str
    images: Tensor  # [N, C, H, W] float32
    labels: Tensor  # [N]
    file: Path | None = None  # where they were read, if from a file of the user's

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """SHA-256 of the shape, every pixel and every label."""
        digest = hashlib.sha256(f"{self.images.dtype}{tuple(self.images.shape)}".encode())
        for tensor in (self.images, self.labels.to(torch.int64)):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()
