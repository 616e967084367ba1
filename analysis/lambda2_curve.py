"""Sub-selection ratio lambda_2 of method l2 (12.7): clean and certified l2.

python analysis/lambda2_curve.py STORE --out analysis/out
"""

from cure_ray.results.curve import curve
from cure_ray.results.outputs import Analysis, script


def main(analysis: Analysis) -> None:
    """Sub-selection ratio lambda_2 of method l2 (12.7): clean and certified l2."""
    curve(analysis, "training.lambda_2", ("l2",), ("clean", "cert_l2"), grid=(0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2), log=True)


if __name__ == "__main__":
    script(main)
