"""Models in the shape of transformers'."""
