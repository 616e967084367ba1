"""Networks: the architectures, as plain sequences of layers."""
