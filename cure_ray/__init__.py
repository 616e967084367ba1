"""cure_ray: certified training for the union of perturbation norms (CURE), on Ray, with the proofs to go with it."""

__version__ = "0.3.0"
