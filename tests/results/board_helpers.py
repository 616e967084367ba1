"""A board of made-up networks: a description, two seeds of one experiment, another experiment, and a recertified network."""

from pathlib import Path

from cure_ray.testing import stores

DESCRIPTION = """\
name: toy
title: A toy & <b>bold</b>
authors: A. Uthor
paper: A paper, arXiv 2001.00001
year: 2020
source: {url: "https://example.org/toy"}
weights: {format: safetensors}
network: one layer
input: [1, 8, 8]
layers: [flatten, {layer: linear, inputs: 64, outputs: 10}]
data: {name: digits, n: 30}
protocol: {threats: "linf=0.1,l2=0.35,l1=0.7"}
figures:
  - {what: clean, value: 91.5, n: 360, source: table 1}
  - {what: certified, threat: union, value: 40.0, n: 30, certifier: first, source: table 2}
  - {what: certified, threat: "l2=0.35", value: 55.0, n: 30, certifier: first, source: table 2}
  - {what: certified, threat: union, value: 30.0, certifier: second, source: table 3}
  - {what: not broken, threat: union, value: 61.0, n: 30, certifier: attack one, source: table 2}
  - {what: not broken, threat: union, value: 60.0, n: 30, certifier: attack two, source: table 3}
"""


def write_description(folder: Path, text: str = DESCRIPTION) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "toy.yaml"
    path.write_text(text)
    return path


def write_zoo(root: Path) -> Path:
    seeds = {f"max-seed-{i}": stores.experiment("max", seed=i) for i in (0, 1)}
    return stores.write_zoo(root, {**seeds, "linf": stores.experiment("linf"), "toy-again": "toy"})
