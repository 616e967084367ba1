"""The native engine: bounds of sequential ReLU networks on ball∩box."""
