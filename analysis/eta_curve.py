"""Weight eta of bound alignment (12.8): clean and union.

python analysis/eta_curve.py STORE --out analysis/out
"""

from cure_ray.results.curve import curve
from cure_ray.results.outputs import Analysis, script


def main(analysis: Analysis) -> None:
    """Weight eta of bound alignment (12.8): clean and union."""
    curve(analysis, "training.eta", ("scratch", "finetune"), ("clean", "union"), grid=(0.5, 1.0, 1.5, 2.0, 4.0))


if __name__ == "__main__":
    script(main)
