"""However tokens reach the model, its logits are those of one pass over all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from transformers import DynamicCache, StaticCache

from engram_peft import EngramForCausalLM

from .tiny import KINDS, PAD, VARIANTS, logits, shared, token_ids


NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def follows_full_pass(model: EngramForCausalLM, out, prompt: int) -> None:
    """The logits of every step of `generate`."""
    close(torch.stack(out.logits, dim=1), logits(model, out.sequences)[:, prompt - 1 : -1])


def stepwise(model: EngramForCausalLM, ids: torch.Tensor, ends: list[int], cache=None, step=None) -> torch.Tensor:
    """Logits of `ids` passed in pieces that end at `ends`."""
    outputs, begin = [], 0
    for end in ends:
        # As `generate` passes positions: OPT cannot be compiled without.
        kwargs = {} if step is None else {"position_ids": torch.arange(begin, end)[None]}
        run = model if begin == 0 or step is None else step
        out = run(input_ids=ids[:, begin:end], cache=cache, use_cache=True, **kwargs)
        cache, begin = out.cache, end
        outputs.append(out.logits)
    return torch.cat(outputs, dim=1)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch, filled up from the left, and its mask."""
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_full((length - len(row),), PAD), row]) for row in rows])
    mask = torch.stack([(torch.arange(length) >= length - len(row)).long() for row in rows])
    return ids, mask


def decode(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    close(stepwise(model, ids, list(range(1, ids.shape[1] + 1))), logits(model, ids))


def lazy_cache(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """A cache that makes its layers as they are used."""
    close(stepwise(model, ids, [2, 5, 6, 11], DynamicCache()), logits(model, ids))


def chunked_prefill(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    close(stepwise(model, ids, [4, 5, 7, 11]), logits(model, ids))
    follows_full_pass(model, model.generate(ids, prefill_chunk_size=4, **GREEDY), ids.shape[1])


def beams(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """A beam's score is the mean log-probability of its tokens, so it tells whether its history was its own."""
    out = model.generate(ids, num_beams=4, num_return_sequences=2, **{**GREEDY, "output_scores": True})
    likelihoods = logits(model, out.sequences).log_softmax(-1)[:, ids.shape[1] - 1 : -1]
    generated = out.sequences[:, ids.shape[1] :]
    close(out.sequences_scores, likelihoods.gather(-1, generated.unsqueeze(-1)).squeeze(-1).mean(-1))


def assistant(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    helper = shared(model.config.text_config.model_type.removesuffix("_text"), model.spec.variant, seed=1)
    helper.generation_config.assistant_confidence_threshold = 0.0
    out = model.generate(ids[:1], assistant_model=helper, **GREEDY)
    follows_full_pass(model, out, ids.shape[1])
    assert torch.equal(out.sequences, model.generate(ids[:1], **GREEDY).sequences)


def perfect_assistant(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """Everything is accepted."""
    model.generation_config.assistant_confidence_threshold = 0.0
    follows_full_pass(model, model.generate(ids[:1], assistant_model=model, **GREEDY), ids.shape[1])


def prompt_lookup(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    prompt = ids[:1, :4].repeat(1, 3)
    out = model.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY)
    follows_full_pass(model, out, prompt.shape[1])


def static(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    follows_full_pass(model, model.generate(ids, cache_implementation="static", **GREEDY), ids.shape[1])


def compiled(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    torch.compiler.reset()
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=16)
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    close(stepwise(model, ids, [4, *range(5, ids.shape[1] + 1)], cache, step), logits(model, ids))


def continued(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """A second turn, given the cache of the first, and only the tokens that are new."""
    first = model.generate(ids, **GREEDY)
    question = torch.cat([first.sequences, ids.flip(1)[:, :3]], dim=1)
    everything = torch.ones_like(question)  # whatever looks like padding was generated
    second = model.generate(question, attention_mask=everything, cache=first.cache, **GREEDY)
    follows_full_pass(model, second, question.shape[1])


def left_padding(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    batch, mask = padded([ids[0], ids[1]])
    batch, mask = (torch.nn.functional.pad(x, (3, 0)) for x in (batch, mask))
    for kwargs in ({}, {"cache_implementation": "static"}):
        out = model.generate(batch, attention_mask=mask, **kwargs, **GREEDY)
        unpadded = out.sequences[:, 3:]
        close(torch.stack(out.logits, dim=1), logits(model, unpadded)[:, ids.shape[1] - 1 : -1])


def unequal_lengths(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """Every sequence of a batch is as if it was alone, padded on either side."""
    rows = [ids[0], ids[1, :6]]
    batch, mask = padded(rows)
    out = model.generate(batch, attention_mask=mask, **GREEDY)
    for row, sequence, steps in zip(rows, out.sequences, torch.stack(out.logits, dim=1), strict=True):
        close(steps, logits(model, sequence[None, -len(row) - NEW :])[0, len(row) - 1 : -1])
    right = torch.stack([ids[0], torch.cat([ids[1, :6], torch.full((5,), PAD)])])
    together = logits(model, right, attention_mask=(torch.arange(11) < torch.tensor([[11], [6]])).long())
    for row, one in zip(rows, together, strict=True):
        close(one[: len(row)], logits(model, row[None])[0])


def packed(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """Two documents in a row, told apart by positions that restart, or by their number."""
    parts = [ids[:1, :6], ids[1:, :5]]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    numbers = torch.cat([torch.full((part.shape[1],), i) for i, part in enumerate(parts)])[None]
    row = torch.cat(parts, dim=1)
    expected = torch.cat([logits(model, part) for part in parts], dim=1)
    apart = (numbers[:, None, :, None] == numbers[:, None, None]).tril()
    if model.config.text_config.model_type != "opt":  # which does not look for documents itself
        close(logits(model, row, position_ids=positions), expected)
    close(logits(model, row, position_ids=positions, attention_mask=apart), expected)
    close(
        logits(model, row, position_ids=positions + 7, attention_mask=apart, engram_segment_ids=numbers),
        torch.cat([logits(model, part, position_ids=torch.arange(part.shape[1])[None] + 7) for part in parts], dim=1),
    )


def packed_memories(model: EngramForCausalLM, ids: torch.Tensor) -> None:
    """What the memory of the first layer says, for backbones that cannot keep documents apart themselves."""
    said: list[torch.Tensor] = []
    handle = model.memories["0"].register_forward_hook(lambda module, args, output: said.append(output[0]))
    parts = [ids[:1, :6], ids[1:, :5]]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    try:
        for tokens, position_ids in ((torch.cat(parts, dim=1), positions), (parts[0], None), (parts[1], None)):
            logits(model, tokens, position_ids=position_ids)
    finally:
        handle.remove()
    close(said[0], torch.cat(said[1:], dim=1))


PATHS = [
    decode, lazy_cache, chunked_prefill, beams, assistant, perfect_assistant, prompt_lookup, static, compiled, continued,
    left_padding, unequal_lengths, packed, packed_memories,
]  # fmt: skip
# A backbone with a recurrent state cannot take tokens back, mixes what is packed, and needs a cache made for it.
IMPOSSIBLE = {"qwen3_next": {assistant, perfect_assistant, prompt_lookup, packed, lazy_cache}}
# Each backbone with one variant, and one backbone with all; the rest of the product is slow.
QUICK = {*zip(KINDS, VARIANTS * 3, strict=False), *product(["llama"], VARIANTS)}


def cases() -> list:
    cases = []
    for kind, variant, path in product(KINDS, VARIANTS, PATHS):
        if path not in IMPOSSIBLE.get(kind, ()):
            quick = (kind, variant) in QUICK and (path is not compiled or (kind, variant) == ("llama", "deepseek"))
            marks = [] if quick else [pytest.mark.slow]
            cases.append(pytest.param(kind, variant, path, id=f"{kind}-{variant}-{path.__name__}", marks=marks))
    return cases


@pytest.mark.parametrize(("kind", "variant", "path"), cases())
@torch.no_grad()
def test_logits_are_those_of_one_pass(kind: str, variant: str, path: Callable) -> None:
    path(shared(kind, variant), token_ids())


@pytest.mark.parametrize("kind", KINDS)
def test_the_memories_of_these_models_matter(kind: str):
    for variant in VARIANTS:
        model = shared(kind, variant)
        difference = (logits(model, token_ids()) - logits(model.backbone, token_ids())).abs().amax(-1)
        assert float(difference[:, [1, 3, -1]].min()) > 0.1
