"""Question a stored verdict with the network itself: the label, the clean prediction, the witness, the proof."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from cure_ray.attacks import margin, replay_network
from cure_ray.bounds.engine import Engine
from cure_ray.certification.balls import Certifier
from cure_ray.certification.engines import make_engine
from cure_ray.certification.families import certify_any
from cure_ray.certification.job import CascadeSettings
from cure_ray.certification.outcome import Outcome, check_clean
from cure_ray.certification.verdict import Status, Verdict
from cure_ray.data.samples import Samples
from cure_ray.errors import SoundnessError
from cure_ray.threats import Ball, Balls, Patch, Threat, Words
from cure_ray.threats.box import UNIT, Box
from cure_ray.threats.geometry import distance
from cure_ray.threats.transformations import Transformation
from cure_ray.threats.warps import transformed

_RECORDED = 1e-3  # of a pixel: parameters of a transformation are recorded with six digits


@dataclass(frozen=True)
class Answer:
    """`confirmed`, `contradicted`, or `open`: nothing speaks against the row, but its proof did not come again in its budget."""

    kind: Literal["confirmed", "contradicted", "open"]
    what: str = ""


class Questioner:
    """Replays rows of one network. The attack's seed is another than the row's, so that a certificate meets new attempts."""

    def __init__(self, network: nn.Module, samples: Samples, seed: int, bundles: Path) -> None:
        self.network, self.samples, self.seed, self.bundles = network, samples, seed, bundles
        self.replay, self.engines = replay_network(network), dict[str, Engine]()

    def ask(self, row: Verdict, threat: Threat, witness: Tensor | None) -> Answer:
        """One row; `witness` is its stored image, if it names one."""
        if row.sample_index >= len(self.samples):
            return Answer("contradicted", f"there are only {len(self.samples)} images")
        image, label = self.samples.images[row.sample_index], int(self.samples.labels[row.sample_index])
        clean = Outcome(label)
        check_clean(self.replay, image[None], [clean])
        if row.label != label:
            return Answer("contradicted", f"its label is {label}, the row says {row.label}")
        if row.predicted not in (-1, clean.predicted):
            return Answer("contradicted", f"the network says {clean.predicted} of the image itself, the row says {row.predicted}")
        wrong, decided = clean.status == Status.MISCLASSIFIED, row.status in (Status.CERTIFIED, Status.FALSIFIED, Status.MISCLASSIFIED)
        if wrong != (row.status == Status.MISCLASSIFIED) and (decided or row.predicted != -1):
            return Answer("contradicted", f"the row says {row.status}, but the image itself is {'mis' * wrong}classified")
        if row.status == Status.FALSIFIED:
            return self._falls(row, threat, image, witness)
        if row.status == Status.CERTIFIED:
            return self._stands(row, threat, image)
        return Answer("confirmed")

    def _falls(self, row: Verdict, threat: Threat, image: Tensor, witness: Tensor | None) -> Answer:
        if witness is None or witness.shape != image.shape:
            return Answer("contradicted", "it has no witness of the image's shape")
        why = outside(threat, image, witness, Box.of(row.box), row.message)
        if why:
            return Answer("contradicted", f"its witness is no image of the threat: {why}")
        with torch.no_grad():
            value = float(margin(self.replay(witness[None].double()), torch.tensor([row.label])))
        if value > 0:
            return Answer("contradicted", f"its witness is classified correctly, by {value:.3g}")
        if isinstance(threat, Words):
            return Answer("open", "its vector is misclassified; that it is the sentence's only the encoder can tell")
        return Answer("confirmed")

    def _stands(self, row: Verdict, threat: Threat, image: Tensor) -> Answer:
        """Attack with a fresh seed, and prove again by the stage that did."""
        if row.margin_lb is None or not all(m > 0 for m in row.margins):
            return Answer("contradicted", "it is called certified without positive margins")
        stages = tuple({row.stage, "attack"})
        settings = CascadeSettings(stages, row.budget_seconds, row.budget_nodes, box=Box.of(row.box))
        if row.engine not in self.engines:
            self.engines[row.engine] = make_engine(row.engine, self.network, torch.device("cpu"), tuple(image.shape))
        certifier = Certifier(self.engines[row.engine], self.network, settings, self.seed, self.bundles)
        try:
            (found,) = certify_any(certifier, image[None], torch.tensor([row.label]), threat, [row.sample_index])
        except SoundnessError as error:
            return Answer("contradicted", str(error))
        stored = Outcome(row.label, row.predicted, Status.CERTIFIED, margins=torch.tensor(row.margins, dtype=torch.float64))
        if found.status == Status.FALSIFIED or stored.contradicted_by(found.attack_margin):
            what = f"an image of the threat has margin {found.attack_margin:.9g}, the row proves {row.margin_lb:.9g}"
            return Answer("contradicted", what)
        if found.status == Status.CERTIFIED:
            return Answer("confirmed")
        return Answer("open", f"not proven again by {row.stage} ({found.status}), nor broken by a new attack")


def outside(threat: Threat, image: Tensor, witness: Tensor, box: Box, message: str | None) -> str | None:
    """Why a stored image does not belong to the threat around `image` [C, H, W]; None: it does."""
    assert not isinstance(threat, Balls), "a row is about one ball"
    if isinstance(threat, Words):
        return None  # whether it is the vector of that sentence only the encoder can tell
    x, w = image.double(), witness.double()
    box = box if isinstance(threat, Ball) else UNIT
    if not bool(((w >= box.low) & (w <= box.high)).all()):
        return f"it leaves {box.words()}"
    if isinstance(threat, Ball):
        far = float(distance((w - x).flatten(), threat.norm))
        return None if far <= threat.eps else f"its {threat.norm} distance is {far:.9g}"
    if isinstance(threat, Patch):
        spots = (w != x).any(0).nonzero()
        extent = (spots.amax(0) - spots.amin(0) + 1).tolist() if len(spots) else [0, 0]
        fits = extent[0] <= threat.height and extent[1] <= threat.width
        return None if fits else f"it changes {extent[0]}x{extent[1]} pixels"
    return _another_transformation(threat, x, w, message)


def _another_transformation(threat: Transformation, x: Tensor, w: Tensor, message: str | None) -> str | None:
    named = re.findall(r"([A-Z][a-z]?)=(\S+?)(?:,|$)", (message or "").partition(" at ")[2])
    if [kind for kind, _ in named] != [step.kind for step in threat.steps]:
        return f"its parameters are not recorded ({message!r})"
    values = [float(torch.deg2rad(torch.tensor(float(t), dtype=torch.float64))) if kind == "R" else float(t) for kind, t in named]
    for step, value in zip(threat.steps, values, strict=True):
        if not step.low - 1e-5 * abs(step.low) <= value <= step.high + 1e-5 * abs(step.high):
            return f"{step.kind} leaves its range"
    off = float((transformed(threat.steps, values, x[None])[0] - w).abs().max())
    return None if off <= _RECORDED else f"the image at these parameters differs by {off:.3g}"
