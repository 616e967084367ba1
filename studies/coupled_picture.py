"""Draws one neuron of a coupled bound: what CROWN pays for it, and what two parabolas and a line pay.

python studies/coupled_picture.py --out docs/images/coupled-neuron.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

LOWER, UPPER, CENTRE, C, M = -1.0, 1.6, 0.35, -1.0, 0.9


def hull_line(t: np.ndarray, curve: np.ndarray) -> tuple[float, float]:
    """The line below the curve that touches it on both sides of 0: slope and offset."""
    best = (0.0, -np.inf)
    for slope in np.linspace(-1.5, 0.5, 4001):
        offset = float((curve - slope * t).min())
        if slope * CENTRE + offset > best[0] * CENTRE + best[1]:
            best = (float(slope), offset)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    t = np.linspace(LOWER, UPPER, 2001)
    relu, bend = C * np.maximum(t, 0), M / 2 * (t - CENTRE) ** 2
    chord = C * UPPER / (UPPER - LOWER)
    slope, offset = hull_line(t, relu + bend)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    left.plot(t, relu, color="black", label="c relu(t)")
    left.plot(t, chord * (t - LOWER), color="tab:red", label="CROWN's line")
    left.fill_between(t, chord * (t - LOWER), relu, color="tab:red", alpha=0.12)
    left.set_title("m = 0: every point may be the worst", fontsize=9)
    right.plot(t, relu, color="0.6", linewidth=1, label="c relu(t)")
    right.plot(t, relu + bend, color="black", label="c relu(t) + m/2 (t - centre)²")
    right.plot(t, slope * t + offset, color="tab:blue", label="g t + least value")
    right.fill_between(t, slope * t + offset, relu + bend, color="tab:blue", alpha=0.12)
    right.set_title("m > 0: going far costs; the layer pays m/2 radius² once", fontsize=9)
    for axes in (left, right):
        axes.axvline(CENTRE, color="0.8", linewidth=1, zorder=0)
        axes.set_xticks([LOWER, 0, CENTRE, UPPER], ["lower", "0", "centre", "upper"])
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(options.out, dpi=150)


if __name__ == "__main__":
    main()
