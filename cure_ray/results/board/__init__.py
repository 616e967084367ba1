"""The board: what is proven, and what was published, about networks under one protocol each, as one page that can be cited."""
