"""Memory beside the weights: hashed n-gram tables, gated into the hidden states."""

from .hashing import NgramHash
from .layer import NgramMemory, NgramTable
from .reach import band_reach, carried_reach, token_reach
from .spec import NgramMemorySpec


__all__ = [
    "NgramHash",
    "NgramMemory",
    "NgramMemorySpec",
    "NgramTable",
    "band_reach",
    "carried_reach",
    "token_reach",
]
