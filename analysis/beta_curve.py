"""Weight beta of gradient projection (12.9): clean and union.

python analysis/beta_curve.py STORE --out analysis/out
"""

from cure_ray.results.curve import curve
from cure_ray.results.outputs import Analysis, script


def main(analysis: Analysis) -> None:
    """Weight beta of gradient projection (12.9): clean and union."""
    curve(analysis, "training.beta", ("scratch",), ("clean", "union"), grid=(0.0, 0.25, 0.5, 0.75, 1.0))


if __name__ == "__main__":
    script(main)
