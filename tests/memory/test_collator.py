"""Rows that the collator computed are those that the model would have computed, and are used."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, default_data_collator

from engram_peft.memory import NgramHash
from engram_peft.memory.collator import NgramRowsCollator

from ..models.engram.tiny import VOCAB_SIZE, engram, token_ids
from ..tuners.ngram_memory.adapters import SECOND, adapted, add, memories_of


def texts() -> list[dict[str, list[int]]]:
    return [{"input_ids": row.tolist()} for row in token_ids(3, 9)]


def padded(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """The first text without its end, filled up from the left."""
    ids = torch.tensor([each["input_ids"] for each in features])
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("variant", ["deepseek", "deepseek_v41", "qwen_ple", "needle"])
@pytest.mark.parametrize(
    "collator", [default_data_collator, DataCollatorWithFlattening(), padded], ids=["plain", "packed", "padded"]
)
def test_a_step_with_computed_rows_is_the_step_without(variant, collator, monkeypatch):
    model = adapted(variant=variant)
    memory = memories_of(model)[0]
    rows = NgramRowsCollator(collator, memory.spec, VOCAB_SIZE, model.base_model.token_map())
    inputs = rows(texts())
    computed = inputs.pop("engram_rows")
    assert computed.shape == (*inputs["input_ids"].shape, 2, memory.spec.n_tables)
    inputs["labels"] = inputs["input_ids"]
    expected = model(**inputs)
    monkeypatch.setattr(NgramHash, "forward", None)  # nobody hashes again
    actual = model(**inputs, engram_rows=computed)
    assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.loss, expected.loss)


def test_the_native_model_uses_them_too(monkeypatch):
    model = engram("llama", "deepseek")
    inputs = NgramRowsCollator(default_data_collator, model.spec, VOCAB_SIZE, model.token_map)(texts())
    computed = inputs.pop("engram_rows")
    expected = model(**inputs).logits
    monkeypatch.setattr(NgramHash, "forward", None)
    assert torch.equal(model(**inputs, engram_rows=computed).logits, expected)


def test_rows_that_do_not_fit_are_refused():
    model, ids = adapted(), token_ids(2, 6)
    with pytest.raises(ValueError, match=r"must be \(2, 6, 2, 4\), got \(2, 6, 1, 4\)"):
        model(input_ids=ids, engram_rows=torch.zeros(2, 6, 1, 4, dtype=torch.int64))
    cache = model(input_ids=ids, use_cache=True).cache
    with pytest.raises(ValueError, match="the cache holds tokens that came before"):
        model(input_ids=ids, cache=cache, engram_rows=torch.zeros(2, 6, 2, 4, dtype=torch.int64))
    add(model, "other", values=1, **SECOND)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="a dictionary by adapter, since 2 of them are active"):
        model(input_ids=ids, engram_rows=torch.zeros(2, 6, 2, 4, dtype=torch.int64))
    own = {name: _computed(model, name, ids) for name in ("default", "other")}
    assert torch.equal(model(input_ids=ids, engram_rows=own).logits, model(input_ids=ids).logits)


def _computed(model, name: str, ids: torch.Tensor) -> torch.Tensor:
    spec = next(iter(model.base_model.memories(name).values())).spec
    collator = NgramRowsCollator(lambda features: {"input_ids": ids}, spec, VOCAB_SIZE)
    return collator([])["engram_rows"]
