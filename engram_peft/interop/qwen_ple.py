"""The per-layer embeddings of Qwen's `qwen4_exp` (`Qwen4ExpTextPLELayer`) as an `NgramMemory`, and back.

Written against transformers 5.24. Two things differ in shape only: their table is padded to a multiple of 128 rows that no hash
reaches, and their norm weights are stored as the difference from one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..memory.spec import NgramMemorySpec


TABLE = "ple_embedding.ngram_embedding.weight"
CONV = "conv1d.weight"
NORMS = {
    "gate.key_norm.weight": "norm_key.weight",
    "gate.query_norm.weight": "norm_query.weight",
    "conv_norm.weight": "norm_conv.weight",
}


def ple_to_memory(
    state_dict: Mapping[str, torch.Tensor], spec: NgramMemorySpec, layer_id: int
) -> dict[str, torch.Tensor]:
    """The state dict of an `NgramMemory` from that of a PLE layer.

    Args:
        state_dict (`Mapping[str, torch.Tensor]`): Of the `Qwen4ExpTextPLELayer`; its hash buffers follow from the spec.
        spec (`NgramMemorySpec`): The memory, `variant="qwen_ple"`.
        layer_id (`int`): The decoder layer, 0-indexed (`ple_layer_ids` of the configuration are 1-indexed).

    Raises:
        `KeyError`: A tensor is missing.
    """
    memory = {
        "table.weight": state_dict[TABLE][: sum(spec.head_sizes(layer_id))],
        "kv_proj.weight": torch.cat([state_dict["key_proj.weight"], state_dict["value_proj.weight"]]),
        "conv.weight": state_dict[CONV],
    }
    shape = (spec.hc_mult, spec.hidden_size)
    return memory | {ours: 1 + state_dict[theirs].view(shape) for ours, theirs in NORMS.items()}


def memory_to_ple(
    state_dict: Mapping[str, torch.Tensor], spec: NgramMemorySpec, divisible_by: int = 128
) -> dict[str, torch.Tensor]:
    """The state dict of a PLE layer, but for its hash buffers, from that of an `NgramMemory`.

    Args:
        state_dict, spec: The memory, `variant="qwen_ple"`.
        divisible_by (`int`): `make_ngram_vocab_size_divisible_by` of their configuration; the padding is zero.
    """
    table = state_dict["table.weight"]
    padding = math.ceil(len(table) / divisible_by) * divisible_by - len(table)
    key, value = state_dict["kv_proj.weight"].split([spec.hc_mult * spec.hidden_size, spec.hidden_size])
    ple = {
        TABLE: torch.nn.functional.pad(table, (0, 0, 0, padding)),
        "key_proj.weight": key,
        "value_proj.weight": value,
        CONV: state_dict["conv.weight"],
    }
    return ple | {theirs: state_dict[ours].flatten() - 1 for ours, theirs in NORMS.items()}
