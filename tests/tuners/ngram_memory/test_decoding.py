"""However tokens reach a model with an adapter, its logits are those of one pass over all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from peft import PeftModel
from transformers import DynamicCache

from ...models.engram.test_decoding import (
    GREEDY,
    beams,
    chunked_prefill,
    close,
    continued,
    decode,
    follows_full_pass,
    lazy_cache,
    left_padding,
    prompt_lookup,
    static,
    stepwise,
    unequal_lengths,
)
from ...models.engram.tiny import KINDS, backbone, logits, token_ids
from .adapters import FIRST, SECOND, VARIANTS, adapted, add, memories_of


@cache
def shared(kind: str, variant: str, seed: int = 0) -> PeftModel:
    """A model with two active adapters of different shapes; do not change it."""
    model = adapted(backbone(kind, seed=seed), variant)
    add(model, "other", values=seed + 1, **SECOND)
    model.base_model.set_adapter(["default", "other"])
    return model


def assistant(model: PeftModel, ids: torch.Tensor) -> None:
    """Another model proposes tokens, so some are taken back."""
    helper = shared(_kind(model), memories_of(model)[0].spec.variant, seed=1).get_base_model()
    helper.generation_config.assistant_confidence_threshold = 0.0
    out = model.generate(ids[:1], assistant_model=helper, **GREEDY)
    follows_full_pass(model, out, ids.shape[1])
    assert torch.equal(out.sequences, model.generate(ids[:1], **GREEDY).sequences)


def perfect_assistant(model: PeftModel, ids: torch.Tensor) -> None:
    """Everything is accepted."""
    base = model.get_base_model()
    base.generation_config.assistant_confidence_threshold = 0.0
    follows_full_pass(model, model.generate(ids[:1], assistant_model=base, **GREEDY), ids.shape[1])


def packed(model: PeftModel, ids: torch.Tensor) -> None:
    """What the memories in front of the first layer say of two documents in a row is what they say of each alone."""
    said: list[torch.Tensor] = []
    memory = model.base_model.memories()[0]
    handle = memory.register_forward_hook(lambda module, args, output: said.append(output[0]))
    parts = [ids[:1, :6], ids[1:, :5]]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    try:
        for tokens, position_ids in ((torch.cat(parts, dim=1), positions), (parts[0], None), (parts[1], None)):
            logits(model, tokens, position_ids=position_ids)
    finally:
        handle.remove()
    close(said[0], torch.cat(said[1:], dim=1))


def _kind(model: PeftModel) -> str:
    return model.config.model_type.removesuffix("_text")


PATHS = [
    decode, lazy_cache, chunked_prefill, beams, assistant, perfect_assistant, prompt_lookup, static, continued, left_padding,
    unequal_lengths, packed,
]  # fmt: skip
# A backbone with a recurrent state cannot take tokens back, and needs a cache made for it.
IMPOSSIBLE = {"qwen3_next": {assistant, perfect_assistant, prompt_lookup, lazy_cache}}
QUICK = dict(zip(["llama", "gpt2", "qwen3", "gemma3", "mixtral"], [*VARIANTS, "qwen_ple"], strict=True))


def cases() -> list:
    cases = []
    for kind, variant, path in product(KINDS, VARIANTS, PATHS):
        if path not in IMPOSSIBLE.get(kind, ()):
            marks = [] if QUICK.get(kind) == variant else [pytest.mark.slow]
            cases.append(pytest.param(kind, variant, path, id=f"{kind}-{variant}-{path.__name__}", marks=marks))
    return cases


@pytest.mark.parametrize(("kind", "variant", "path"), cases())
@torch.no_grad()
def test_logits_are_those_of_one_pass(kind: str, variant: str, path: Callable) -> None:
    path(shared(kind, variant), token_ids())


def test_a_cache_that_was_filled_without_the_memory_is_refused():
    model, ids = adapted(), token_ids()
    with torch.no_grad(), model.disable_adapter():
        cache = model(input_ids=ids, use_cache=True).cache
    with pytest.raises(ValueError, match="another model filled it"):
        model(input_ids=ids[:, -1:], cache=cache)
    add(model, "other", values=1, **{**FIRST, "seed": 4})
    cache = model(input_ids=ids, use_cache=True).cache
    model.set_adapter("other")
    with pytest.raises(ValueError, match="another model filled it"):
        model(input_ids=ids[:, -1:], cache=cache)


def test_a_call_that_failed_leaves_the_cache_as_it_was():
    model, ids = adapted(), token_ids()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        first = stepwise(model, ids, [6], cache)
        layer = model.get_base_model().model.layers[0]
        with pytest.raises(RuntimeError, match="interrupted"):
            handle = layer.register_forward_pre_hook(_interrupt)
            model(input_ids=ids[:, 6:], cache=cache)
        handle.remove()
        rest = model(input_ids=ids[:, 6:], cache=cache).logits
    close(torch.cat([first, rest], dim=1), logits(model, ids))


def _interrupt(module, args) -> None:
    raise RuntimeError("interrupted")


def test_embeddings_tell_their_tokens():
    model, ids = adapted(), token_ids()
    embeddings = model.get_input_embeddings()(ids)
    expected = model(input_ids=ids).logits
    assert torch.equal(model(inputs_embeds=embeddings).logits, expected)
    with pytest.raises(ValueError, match="do not tell them.*Pass `engram_input_ids` too"):
        model(inputs_embeds=embeddings + 0.1)
    with_soft_prompt = model(inputs_embeds=embeddings + 0.1, engram_input_ids=ids).logits
    assert not torch.equal(with_soft_prompt, expected)
    with pytest.raises(ValueError, match="Token id 99 is outside the vocabulary"):
        model(inputs_embeds=embeddings, engram_input_ids=ids + 99 - ids[0, 0])


def test_a_decoder_layer_on_its_own_says_what_to_do():
    model = adapted()
    with pytest.raises(RuntimeError, match="was called on its own"):
        model.get_base_model().model.layers[0](torch.zeros(1, 3, 32))
