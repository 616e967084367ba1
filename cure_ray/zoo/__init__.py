"""The zoo: published networks as their authors describe them, our own networks with their verdicts, and the list of both."""
