"""An adapter's memory as part of a model of its own."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedConfig

from ...models.engram import EngramLMConfig
from .config import NgramMemoryConfig


def lm_config(config: NgramMemoryConfig, backbone: PreTrainedConfig, token_map: torch.Tensor | None) -> EngramLMConfig:
    """The configuration of an `EngramForCausalLM` with the memory of an adapter.

    Args:
        config (`NgramMemoryConfig`): The adapter's.
        backbone (`PreTrainedConfig`): The base model's.
        token_map (`torch.Tensor`, *optional*): The adapter's.
    """
    shared = ("variant", "max_ngram_size", "n_heads", "head_dim", "vocab_size", "compressed_vocab_size", "pad_token_id",
              "eos_token_id", "masked_token_ids", "seed", "kernel_size", "gate", "conv", "norm_eps")  # fmt: skip
    return EngramLMConfig(
        text_config=copy.deepcopy(backbone),  # a config sets the attention of those it holds
        engram_layer_ids=config.layers_to_transform,
        engram_token_map=token_map is not None,
        token_map=None if token_map is None else token_map.cpu(),
        engram_bias=config.use_bias,
        **{f"engram_{name}": getattr(config, name) for name in shared},
    )
