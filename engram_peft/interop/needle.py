"""The engrams of Needle 3 checkpoints (safetensors) as `NgramMemory` layers, and back, bit for bit.

There a table is `(tables, slots, width)`, kernels are `(in, out)` and the first tap is the current token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..memory.spec import NgramMemorySpec


def needle_spec(config: Mapping[str, Any]) -> NgramMemorySpec:
    """The memory that a Needle configuration describes.

    Args:
        config (`Mapping[str, Any]`): The `config` entry of a checkpoint's metadata, or Needle 2's configuration.

    Returns:
        `NgramMemorySpec`: With `layer_ids` from `engram_layers`, the layers whose input the engrams are added to.
    """
    heads: Any = config.get("engram_heads") or None  # 0: by the width
    orders = tuple(config["engram_orders"])
    width = config["d_model"]
    return NgramMemorySpec(
        hidden_size=width,
        layer_ids=config["engram_layers"],
        vocab_size=config["engram_slots"],
        variant="needle",
        orders=orders,
        n_heads=heads,
        head_dim=128 if heads is None else width // (len(orders) * heads),
        seed_heads=config.get("engram_seed_heads") or None,
        pad_token_id=config.get("pad_token_id", 0),
    )


def needle_to_memory(tensors: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """The state dict of an `NgramMemory` from a Needle checkpoint.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): Of the checkpoint.
        index (`int`): Which engram, counted from 0; it belongs to `spec.layer_ids[index]`.

    Raises:
        `KeyError`: A tensor is missing.
    """
    prefix = f"engrams_{index}"
    key, value = (tensors[f"{prefix}/{name}/kernel"] for name in ("key_proj", "value_proj"))
    return {
        "table.weight": tensors[f"{prefix}/embedding"].flatten(0, 1),
        "kv_proj.weight": torch.cat([key, value], dim=1).t().contiguous(),
        "conv.weight": tensors[f"{prefix}/taps"].flip(0).t().unsqueeze(1).contiguous(),
    }


def memory_to_needle(
    state_dict: Mapping[str, torch.Tensor], spec: NgramMemorySpec, index: int
) -> dict[str, torch.Tensor]:
    """The tensors of a Needle checkpoint from the state dict of an `NgramMemory`: the inverse of `needle_to_memory`."""
    prefix = f"engrams_{index}"
    key, value = state_dict["kv_proj.weight"].t().split(spec.hidden_size, dim=1)
    return {
        f"{prefix}/embedding": state_dict["table.weight"].unflatten(0, (spec.n_tables, -1)),
        f"{prefix}/key_proj/kernel": key.contiguous(),
        f"{prefix}/value_proj/kernel": value.contiguous(),
        f"{prefix}/taps": state_dict["conv.weight"].squeeze(1).t().flip(0).contiguous(),
    }
