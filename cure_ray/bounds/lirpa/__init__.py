"""auto_LiRPA as the second engine: general graphs and cross-checks."""
