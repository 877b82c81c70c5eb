"""Models with n-gram memories as adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from engram_peft import NgramMemoryConfig
from engram_peft.memory.layer import BranchRMSNorm, DilatedConv, NgramMemory, NgramTable

from ...models.engram.tiny import EOS, VOCAB_SIZE, backbone


VARIANTS = ["deepseek", "deepseek_v41", "qwen_ple", "needle"]
FIRST = {"n_heads": 2, "head_dim": 4, "vocab_size": 50}
# Other layers, orders, sizes and seed than the first.
SECOND = {"n_heads": 1, "head_dim": 6, "vocab_size": 31, "seed": 5, "max_ngram_size": 4, "layers_to_transform": [1]}


def memory_config(variant: str = "qwen_ple", **changes: Any) -> NgramMemoryConfig:
    """Two orders of two heads in front of both layers; ids are hashed as they are."""
    options = {"layers_to_transform": [1, 0], "max_ngram_size": 3, "compressed_vocab_size": VOCAB_SIZE, **FIRST}
    return NgramMemoryConfig(
        **{"task_type": "CAUSAL_LM", "variant": variant, "eos_token_id": EOS, **options, **changes}
    )


def memories_of(model: nn.Module) -> list[NgramMemory]:
    return [module for module in model.modules() if isinstance(module, NgramMemory)]


@torch.no_grad()
def fill(memory: nn.Module, seed: int = 0) -> None:
    """Random rows, norms and convolutions, so that every n-gram shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for module in memory.modules():
        if isinstance(module, (NgramTable, DilatedConv)):
            module.weight.normal_(generator=generator)
        elif isinstance(module, BranchRMSNorm):
            module.weight.uniform_(0.5, 1.5, generator=generator)


def add(model: PeftModel, name: str, values: int, **config: Any) -> None:
    """A second adapter; it is not active."""
    model.add_adapter(name, memory_config(**config))
    for memory in model.base_model.memories(name).values():
        fill(memory, values)


def adapted(
    base: PreTrainedModel | str = "llama", variant: str = "qwen_ple", adapter_name: str = "default", **config: Any
) -> PeftModel:
    """A model with memories that matter; it never stops generating on its own."""
    base = backbone(base) if isinstance(base, str) else base
    base.generation_config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(base, memory_config(variant, **config), adapter_name=adapter_name).eval()
    for memory in memories_of(model):
        fill(memory)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether names, dtypes and all bits agree."""
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor) for name, tensor in expected.items()
    )


def _described(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": {name: type(module) for name, module in model.named_modules()},
        "gradients": {name: p.requires_grad for name, p in model.named_parameters()},
        "hooks": {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()},
        "configs": sorted(getattr(model, "peft_config", None) or {}),
        "active": list(model.active_adapters) if isinstance(model, PeftModel) else None,
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fails unless the model is the same afterwards: tensors, modules, hooks, gradient flags, adapters."""
    before, described = tensors(model), _described(model)
    yield
    assert _described(model) == described
    assert same(tensors(model), before)
