"""A network anybody can make again: nearest class mean on the handwritten digits, and its description."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from cure_ray.config import Dataset
from cure_ray.data.images import load_dataset

DESCRIPTION = """
name: nearest-mean
title: Nearest mean, digits
authors: A. Uthor
paper: A paper
year: 2020
source: {{url: "https://example.org/nearest", path: nearest.mat, licence: MIT}}
weights:
  format: mat
  tensors:
    1.weight: {{array: first, axes: [1, 0]}}
    1.bias: {{array: offset, shape: [64]}}
    3.weight: means
    3.bias: {{array: bias, shape: [10]}}
{identity}
network: the mean of every class
input: [1, 8, 8]
layers: [flatten, {{layer: linear, inputs: 64, outputs: 64}}, relu, {{layer: linear, inputs: 64, outputs: 10}}]
data: {{name: digits, n: 12}}
protocol: {{threats: "linf=0.02,l2=0.2", nodes: 20}}
figures:
  - {{what: clean, value: 90, n: 360, source: table 1}}
  - {{what: certified, threat: union, value: 25, n: 12, certifier: a pencil, source: table 1}}
  - {{what: not broken, threat: union, value: 100, n: 12, source: table 1}}
"""


@dataclass(frozen=True)
class Nearest:
    """Where its description and weights are."""

    folder: Path
    description: Path
    tensors: dict[str, Tensor]

    @property
    def weights(self) -> Path:
        return self.folder / "nearest.safetensors"

    def described(self, identity: str | None = None) -> Path:
        text = DESCRIPTION.format(identity=f"  identity: {identity}" if identity else "")
        self.description.write_text(text)
        return self.description


def make(folder: Path) -> Nearest:
    train = load_dataset(Dataset(name="digits"), "train")
    x, y = train.pixels().flatten(1), train.labels
    means = torch.stack([x[y == k].mean(0) for k in range(10)])
    tensors = {"1.weight": torch.eye(64), "1.bias": torch.zeros(64), "3.weight": means, "3.bias": -means.square().sum(1) / 2}
    made = Nearest(folder, folder / "nearest-mean.yaml", {k: v.contiguous() for k, v in tensors.items()})
    save_file(made.tensors, made.weights)
    made.described()
    return made
