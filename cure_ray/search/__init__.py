"""A search: its file, study, ledger, objective and status. No Ray."""
