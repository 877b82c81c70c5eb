"""What a model writes after prompts: padded on the left, up to its stops, without disturbing the caller's random state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from .selection import unwrap
from .weights import input_device


# What is not set comes from the model's own configuration, penalties included. Plain decoding has none of them.
PLAIN = {"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def eos_token_ids(model: Any) -> list[int]:
    """The tokens at which the model's own generation stops."""
    base: Any = unwrap(model)
    eos = base.generation_config.eos_token_id
    return list(eos) if isinstance(eos, list) else [] if eos is None else [eos]


def written_texts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    stops: Collection[int],
) -> list[str]:
    """How a model in eval mode goes on after each prompt, up to the first of the `stops`, without special tokens.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer; its padding side does not matter.
        prompts (`Sequence[list[int]]`): Token ids, one batch.
        config (`GenerationConfig`): How to decode; it names a `pad_token_id`.
        stops (`Collection[int]`): Token ids that end a text.
    """
    device = input_device(model)
    length = max(len(prompt) for prompt in prompts)
    padding = [length - len(prompt) for prompt in prompts]  # on the left: what is written follows the prompt directly
    input_ids = torch.tensor([[config.pad_token_id] * n + ids for n, ids in zip(padding, prompts, strict=True)])
    attention_mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
    writer: Any = model if hasattr(model, "generate") else unwrap(model)
    written = writer.generate(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=config
    )
    texts = []
    for row in written[:, length:].tolist():
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        texts.append(tokenizer.decode(row[:end], skip_special_tokens=True))
    return texts


@contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Random numbers from `seed` on where the model is, for the time being, and nothing changed elsewhere."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # `torch.manual_seed` would also reach devices that are not restored
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
