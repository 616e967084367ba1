"""Weight alpha of Joint (12.6): clean, per norm and the two-norm union.

python analysis/alpha_curve.py STORE --out analysis/out
"""

from cure_ray.results.curve import curve
from cure_ray.results.outputs import Analysis, script


def main(analysis: Analysis) -> None:
    """Weight alpha of Joint (12.6): clean, per norm and the two-norm union."""
    curve(
        analysis,
        "training.alpha",
        ("joint",),
        ("clean", "cert_linf", "cert_l2", "union_linf_l2", "union"),
        grid=(0.0, 0.25, 0.5, 0.75, 1.0),
    )


if __name__ == "__main__":
    script(main)
