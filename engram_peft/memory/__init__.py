"""Memory beside the weights: hashed n-gram tables, gated into the hidden states."""

from .capacity import (
    CapacityPlan,
    Collisions,
    count_collisions,
    count_ngrams,
    expected_collisions,
    plan_capacity,
    slots_for,
)
from .distributed import distribute_tables
from .hashing import NgramHash
from .insight import MemoryReport, memory_off, memory_report, record_memory
from .layer import NgramMemory, NgramTable
from .reach import band_reach, carried_reach, token_reach
from .spec import NgramMemorySpec
from .token_map import build_token_map, check_token_map, compress_ids, compressed_vocab_size, grow_token_map


__all__ = [
    "CapacityPlan",
    "Collisions",
    "MemoryReport",
    "NgramHash",
    "NgramMemory",
    "NgramMemorySpec",
    "NgramTable",
    "band_reach",
    "build_token_map",
    "carried_reach",
    "check_token_map",
    "compress_ids",
    "compressed_vocab_size",
    "count_collisions",
    "count_ngrams",
    "distribute_tables",
    "expected_collisions",
    "grow_token_map",
    "memory_off",
    "memory_report",
    "plan_capacity",
    "record_memory",
    "slots_for",
    "token_reach",
]
