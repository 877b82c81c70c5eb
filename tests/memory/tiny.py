"""Memories small enough to test, with weights as if they were trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engram_peft.memory import NgramMemory, NgramMemorySpec, carried_reach, token_reach


VARIANTS = ("deepseek", "deepseek_v41", "qwen_ple", "needle")
VOCAB, PAD, EOS, HIDDEN = 50, 0, 2, 8


def tiny_spec(variant: str, **changes: Any) -> NgramMemorySpec:
    settings = {
        "hidden_size": HIDDEN,
        "layer_ids": [1, 3],
        "vocab_size": 97,
        "compressed_vocab_size": VOCAB,
        "variant": variant,
        "max_ngram_size": 3,
        "n_heads": 2,
        "head_dim": 4,
        "pad_token_id": PAD,
        "eos_token_id": EOS if variant == "qwen_ple" else None,
    }
    return NgramMemorySpec(**{**settings, **changes})


def trained(spec: NgramMemorySpec, seed: int = 0) -> NgramMemory:
    memory = NgramMemory(spec, spec.layer_ids[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return memory


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_states(spec: NgramMemorySpec, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    shape = (batch, length, spec.hc_mult, spec.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward(memory: NgramMemory, states: torch.Tensor, ids: torch.Tensor, **documents: Any) -> torch.Tensor:
    """One pass over whole texts; what stands before them must not matter, so it is nonsense."""
    history = F.pad(ids, (memory.spec.ids_lookback, 0), value=VOCAB - 1)
    return memory(states, history, token_reach(ids, limit=memory.spec.lookback, **documents))[0]


def forward_in_steps(
    memory: NgramMemory, states: torch.Tensor, ids: torch.Tensor, steps: list[int], **documents: torch.Tensor
) -> torch.Tensor:
    """The same in several calls, with what one has to remember for the next."""
    spec = memory.spec
    past_ids = torch.full((len(ids), spec.ids_lookback), VOCAB - 1)
    past_reach = torch.zeros(len(ids), dtype=torch.int64)
    conv_past = torch.zeros(len(ids), spec.conv_channels, spec.conv_lookback)
    deltas, start = [], 0
    for length in steps:
        here = slice(start, start + length)
        new = {name: value[:, here] for name, value in documents.items()}
        reach = token_reach(ids[:, here], past_reach=past_reach, limit=spec.lookback, **new)
        history = torch.cat([past_ids, ids[:, here]], dim=1)
        delta, conv_inputs = memory(states[:, here], history, reach, conv_past if spec.conv != "none" else None)
        deltas.append(delta)
        past_ids = history[:, length:]
        past_reach = carried_reach(reach)[:, -1]
        if conv_inputs is not None:
            conv_past = torch.cat([conv_past, conv_inputs], dim=-1)[..., length:]
        start += length
    return torch.cat(deltas, dim=1)
