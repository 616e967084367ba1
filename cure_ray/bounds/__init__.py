"""Sound bounds on networks: interval and linear relaxations, optimised slopes, branch and bound."""
