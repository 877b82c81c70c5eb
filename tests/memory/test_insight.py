"""Watching memories: what fired, how far the gates opened, what the output is without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engram_peft import EngramForCausalLM
from engram_peft.memory import count_collisions, memory_off, memory_report, record_memory, token_reach

from ..models.engram.tiny import engram
from .tiny import VARIANTS, forward, random_ids, random_states, tiny_spec, trained


variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
def test_a_recorded_call_is_what_the_memory_computed(variant: str) -> None:
    memory = trained(tiny_spec(variant, hc_mult=2))
    ids, states = random_ids(2, 12), random_states(memory.spec, 2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with record_memory(memory) as calls:
        delta = forward(memory, states, ids, attention_mask=mask)
    (call,) = calls["memory"]
    reach = token_reach(ids, attention_mask=mask, limit=memory.spec.lookback)
    assert torch.equal(call.ids, ids) and torch.equal(call.reach, reach)
    history = torch.nn.functional.pad(ids, (2, 0))
    assert torch.equal(call.rows.flatten(-2), memory.hash(history, reach))
    key, value = memory._key_value(history, reach, states)
    assert torch.allclose(call.gates, memory.gate(states, key).squeeze(-1) * mask.unsqueeze(-1))
    assert torch.allclose(call.strength, delta.flatten(2).norm(dim=-1) / states.flatten(2).norm(dim=-1))
    assert torch.equal(call.fired, call.read)  # every row is written
    least = [[order - 1 if variant == "needle" else 0 for order in (2, 3)]]
    assert torch.equal(call.read, reach.unsqueeze(-1) >= torch.tensor(least))
    forward(memory, states, ids)
    assert len(calls["memory"]) == 1  # the hooks are gone


def test_a_model_without_memories_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no n-gram memory"), memory_off(torch.nn.Linear(2, 2)):
        pass


@variants
def test_the_report_of_a_model(variant: str) -> None:
    model = engram("llama", variant)
    texts = [random_ids(1, 9, seed)[0] for seed in range(3)]
    texts[2] = texts[2][:1]
    memories = {name: module for name, module in model.named_modules() if type(module).__name__ == "NgramMemory"}
    with torch.no_grad():  # the n-grams that end at one token of the first text are all that is written
        with record_memory(model) as calls:
            model(input_ids=texts[0][None])
        for name, memory in memories.items():
            rows = calls[name][0].rows[0, 5].flatten() + memory.table.offsets
            kept = memory.table.weight[rows].clone()
            memory.table.weight.zero_()
            memory.table.weight[rows] = kept
    report = memory_report(model, texts)
    assert [len(text.tokens) for text in report.texts] == [9, 9, 1]
    for text, ids in zip(report.texts, texts, strict=True):
        logits = model(input_ids=ids[None]).logits[0].detach()
        without = model.backbone(input_ids=ids[None]).logits[0].detach()
        gain = (logits.log_softmax(-1) - without.log_softmax(-1))[:-1].gather(1, ids[1:, None])[:, 0]
        assert torch.allclose(text.gain[1:], gain, atol=1e-5) and text.gain[0] == 0
        assert torch.allclose(text.logit_change[1:], (logits - without)[:-1].abs().amax(-1), atol=1e-5)
    assert report.gain == pytest.approx(torch.cat([text.gain[1:] for text in report.texts]).mean().item(), abs=1e-6)
    for name, memory in memories.items():
        usage = next(usage for usage in report.usage if usage.layer == name)
        written = (memory.table.weight != 0).any(-1)
        assert (usage.rows, usage.written) == (len(written), int(written.sum()))
        assert usage.never_touched == usage.rows - usage.written
        fired = [ngram for ngram in report.ngrams if ngram.layer == name]
        tokens = [f"{token} " for token in texts[0].tolist()]
        for order in memory.spec.orders:
            (ngram,) = [f for f in fired if f.order == order and f.ngram == "".join(tokens[6 - order : 6])]
            assert ngram.count == 1 and 0 < ngram.gate < 1
        assert report.texts[0].gates[name][5] > 0
        assert usage.written == usage.read_written <= usage.read


def test_rows_that_are_read(tiny_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = tiny_tokenizer()
    model = engram("llama", "deepseek_v41")
    text = "the capital of france is paris and the capital of italy is rome"
    report = memory_report(model, [text], tokenizer, top=5)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    assert len(report.ngrams) == 5
    assert report.texts[0].tokens == text.split()
    for usage in report.usage:
        memory = model.get_submodule(usage.layer)
        reach = token_reach(ids[None], limit=memory.spec.ids_lookback)
        history = torch.nn.functional.pad(ids[None], (memory.spec.ids_lookback, 0))
        rows = memory.hash(history, reach) + memory.table.offsets
        assert usage.read == len(set(rows.flatten().tolist()))
        assert usage.collisions == count_collisions(memory.spec, ids[None], layer_id=memory.layer_id)
    with pytest.raises(ValueError, match="`tokenizer` must be given"):
        memory_report(model, [text])
    with pytest.raises(ValueError, match="at least one text"):
        memory_report(model, [])


def test_the_page_shows_the_texts_and_runs_nothing() -> None:
    model = engram("llama", "qwen_ple")

    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) % 90 + 3 for c in text]}

        def batch_decode(self, ids: list[list[int]]) -> list[str]:
            return ["<script>" for _ in ids]

    page = memory_report(model, ["abc"], Tokenizer()).to_html()
    assert page.count("&lt;script&gt;</span>") == 3 * (1 + len(model.memories))  # a map of the gain, and one a layer
    assert "<script" not in page and "http" not in page
    assert "rgba(" in page and "Never touched" in page


def test_modes_and_outputs_are_left_as_they_were() -> None:
    model: EngramForCausalLM = engram("gpt2", "deepseek")
    ids = random_ids(1, 6)
    before = model(input_ids=ids).logits
    model.train()
    memory_report(model, [ids[0]])
    assert model.training
    assert torch.equal(model.eval()(input_ids=ids).logits, before)
