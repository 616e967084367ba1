"""Results: the schema of verdicts and the store that keeps them."""
