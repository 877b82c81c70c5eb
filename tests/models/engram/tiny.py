"""Tiny backbones, and models with memories that matter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers as t
from torch import nn

from engram_peft import EngramForCausalLM, EngramLMConfig
from engram_peft.memory import NgramTable
from engram_peft.memory.layer import DilatedConv


VOCAB_SIZE = 99
HIDDEN = 32
LAYERS = 2
PAD, EOS = 0, 2
VARIANTS = ["deepseek", "deepseek_v41", "qwen_ple", "needle"]

_SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": PAD,
    "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}
_IDS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}

BACKBONES: dict[str, t.PreTrainedConfig] = {
    "llama": t.LlamaConfig(**_GROUPED),
    "gpt2": t.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, initializer_range=0.2, **_IDS
    ),
    "qwen3": t.Qwen3Config(**_GROUPED, tie_word_embeddings=True),
    "mistral": t.MistralConfig(**_GROUPED, sliding_window=6),
    "gemma3": t.Gemma3TextConfig(
        **_GROUPED, sliding_window=6, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    ),
    "mixtral": t.MixtralConfig(**_GROUPED, num_local_experts=4),
    "opt": t.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=64, init_std=0.2, **_IDS,
    ),
    "gpt_neox": t.GPTNeoXConfig(**_SMALL),
    "qwen3_next": t.Qwen3NextConfig(
        **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
KINDS = list(BACKBONES)


def backbone_config(kind: str, **changes: Any) -> t.PreTrainedConfig:
    config = BACKBONES[kind]
    return type(config).from_dict({**config.to_dict(), **changes})


def engram_config(
    kind: str = "llama", variant: str = "deepseek", tokenizer: Any = None, **changes: Any
) -> EngramLMConfig:
    """Two orders of two heads in front of every layer; documents end with the end-of-sequence token."""
    options = {
        "engram_layer_ids": [1, 0], "engram_max_ngram_size": 3, "engram_n_heads": 2, "engram_head_dim": 4,
        "engram_vocab_size": 50, "engram_eos_token_id": EOS,
    }  # fmt: skip
    return EngramLMConfig.from_backbone(
        backbone_config(kind), tokenizer=tokenizer, engram_variant=variant, **{**options, **changes}
    )


def fill(model: EngramForCausalLM, seed: int = 0) -> EngramForCausalLM:
    """Random rows and convolutions, so that every n-gram shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.memories.modules():
            if isinstance(module, (NgramTable, DilatedConv)):
                module.weight.normal_(generator=generator)
    return model


def backbone(kind: str = "llama", seed: int = 0, **changes: Any) -> t.PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return t.AutoModelForCausalLM.from_config(backbone_config(kind, **changes)).eval()


def engram(kind: str = "llama", variant: str = "deepseek", seed: int = 0, **changes: Any) -> EngramForCausalLM:
    """A random model with memories that matter; it never stops generating on its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = EngramForCausalLM(engram_config(kind, variant, **changes)).eval()
    model.generation_config.eos_token_id = None
    return fill(model, seed)


shared = lru_cache(maxsize=None)(engram)
shared.__doc__ = "The same, made once: do not change it."


def token_ids(batch: int = 2, length: int = 11, seed: int = 0) -> torch.Tensor:
    """Random ids; the first sequence holds the end of a document."""
    ids = torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[0, length // 2] = EOS
    return ids


def logits(model: nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Those of one pass over everything, without a cache."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **kwargs).logits
