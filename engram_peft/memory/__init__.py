"""Memory beside the weights: hashed n-gram tables, gated into the hidden states."""
