"""Robustness as files: VNN-LIB for l_inf boxes, JSON for l2 and l1 balls, which VNN-LIB cannot say."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cure_ray.errors import UserError
from cure_ray.threats.balls import Ball

BALL_FORMAT = "cure_ray-ball-1"


def vnnlib_property(image: Tensor, label: int, classes: int, eps: float, title: str) -> str:
    """An l_inf box around an image, clipped to [0, 1], in VNN-LIB. The property holds if the constraints are unsatisfiable."""
    pixels = image.detach().cpu().double().flatten()
    low, high = (pixels - eps).clamp(0, 1).tolist(), (pixels + eps).clamp(0, 1).tolist()
    lines = [f"; {title}", f"; input: pixels in channel, row, column order; robust for label {label} iff unsatisfiable", ""]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(low))]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    lines.append("")
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        lines += [f"(assert (>= X_{i} {_decimal(a)}))", f"(assert (<= X_{i} {_decimal(b)}))"]
    others = " ".join(f"(and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label)
    return "\n".join([*lines, "", f"(assert (or {others}))", ""])


def _decimal(value: float) -> str:
    """All digits and no exponent: VNN-LIB readers differ in what they accept."""
    return f"{value:.17f}".rstrip("0").rstrip(".") if 0 < value < 1 else f"{value:.1f}"


def ball_property(image: Tensor, label: int, classes: int, threat: Ball, title: str) -> str:
    """An l2 or l1 ball as JSON: every x with norm(x - centre) <= eps and domain[0] <= x <= domain[1] must get `label`."""
    return json.dumps(
        {
            "format": BALL_FORMAT,
            "title": title,
            "norm": threat.norm,
            "eps": threat.eps,
            "domain": [0.0, 1.0],
            "shape": list(image.shape),
            "order": "channel, row, column",
            "centre": image.detach().cpu().double().flatten().tolist(),
            "label": label,
            "classes": classes,
            "property": "for all x in ball and domain, for all i != label: output[label] > output[i]",
        }
    )


@dataclass(frozen=True)
class Exported:
    """The network properties are about."""

    classes: int
    source: str  # for a comment
    onnx: Path | None = None  # its file
    timeout: float = 300.0  # seconds a verifier gets for each


def write_properties(
    directory: Path, network: Exported, x_BCHW: Tensor, y_B: Tensor, indices: Sequence[int], threats: Sequence[Ball]
) -> list[Path]:
    """One file per sample and threat, and `instances.csv` (onnx, vnnlib, timeout) for the l_inf ones, as VNN-COMP tools read it."""
    written, rows = list[Path](), list[str]()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for threat in threats:
            suffix = "vnnlib" if threat.norm == "linf" else "json"
            for image, label, index in zip(x_BCHW, y_B.tolist(), indices, strict=True):
                title = f"{network.source}, sample {index}, {threat}"
                path = directory / f"sample{index:05d}_{threat.norm}_{threat.eps:g}.{suffix}"
                if threat.norm == "linf":
                    path.write_text(vnnlib_property(image, label, network.classes, threat.eps, title))
                    rows.append(f"{network.onnx.name if network.onnx else 'net.onnx'},{path.name},{network.timeout:g}")
                else:
                    path.write_text(ball_property(image, label, network.classes, threat, title) + "\n")
                written.append(path)
        if rows:
            (directory / "instances.csv").write_text("\n".join(rows) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from None
    return written
