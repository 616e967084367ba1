"""Data sets as rows of facts, published or a user's own: shapes, sizes, files, augmentation, transformation grids. Torch-free."""
