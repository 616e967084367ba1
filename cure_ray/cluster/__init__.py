"""Everything on Ray: parallel training, sweeps, distributed certification, clusters. No other package here imports ray."""
