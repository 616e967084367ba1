"""Certification: verdicts, the cascade that reaches them, and the shards it works in."""
