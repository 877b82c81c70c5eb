"""Memory in the weights: from data to `M = C_t pinv(C_a)`."""
