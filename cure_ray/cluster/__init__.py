"""Everything on Ray: parallel training, sweeps, distributed certification, clusters. No other room imports ray."""
