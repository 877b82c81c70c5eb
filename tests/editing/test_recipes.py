"""`unlearn` is collecting, merging, adding an adapter and filling it; and nothing if one of them fails."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics, unlearn

from .reference import relative_error


PAPER = EngramConfig.paper(task_type="CAUSAL_LM")
FORGET = [("the capital of france is", "paris"), "rome is the capital of italy"]
RETAIN = [
    "the river is long and deep and the mountain is high",
    ("where is madrid ?", "madrid lies in spain by a river"),
    "a red bird in a green tree saw one two three four five six seven eight nine ten big dogs",
]


def by_hand(model, tokenizer, config, token_position="answer", **options):
    model = get_peft_model(model, config)
    target, retain = (
        collect_statistics(model, texts, tokenizer=tokenizer, token_position=token_position)
        for texts in (FORGET, RETAIN)
    )
    extract_engram(model, target, merge_statistics(target, retain), **options)
    return model


@pytest.mark.parametrize("token_position", ["answer", "predict"])
@pytest.mark.parametrize("options", [{}, {"scale": "adaptive", "cut": "ridge"}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_unlearn_equals_its_steps(tiny_model, tiny_tokenizer, token_ids, kind, token_position, options):
    tokenizer, ids = tiny_tokenizer(), token_ids(2, 8)
    config = EngramConfig.paper(task_type="CAUSAL_LM", alpha=0.7, layers_to_transform=[1])
    found = unlearn(tiny_model(kind), tokenizer, FORGET, RETAIN, config, token_position=token_position, **options)
    config = EngramConfig.paper(task_type="CAUSAL_LM", alpha=0.7, layers_to_transform=[1])
    expected = by_hand(tiny_model(kind), tokenizer, config, token_position, **options)
    assert relative_error(found(ids).logits, expected(ids).logits) < 1e-5
    assert relative_error(found(ids).logits, tiny_model(kind)(ids).logits) > 1e-4
    touched = {name.split(".")[2] for name in found.base_model.reports["default"].layers}
    assert touched == {"1"}


def test_config_is_copied_and_the_report_is_kept(tiny_model, tiny_tokenizer):
    config = EngramConfig.paper(task_type="CAUSAL_LM", target_modules=["down_proj"])
    before = config.to_dict()
    model = unlearn(tiny_model("llama"), tiny_tokenizer(), FORGET, RETAIN, config)
    assert config.to_dict() == before
    report = model.base_model.reports["default"]
    assert {d.target_count for d in report.layers.values()} == {7}
    assert len(str(report).splitlines()) == 3


def test_second_memory_goes_beside_the_first(tiny_model, tiny_tokenizer, token_ids):
    """Both are active, and the second was found on the model that lacks the first already."""
    tokenizer, ids = tiny_tokenizer(), token_ids(2, 8)
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, PAPER)
    once = model(ids).logits
    model = unlearn(model, tokenizer, ["a green house by the road"], RETAIN, PAPER, adapter_name="second")
    assert list(model.active_adapters) == ["default", "second"]
    assert relative_error(model(ids).logits, once) > 1e-4
    model.set_adapter("default")
    assert torch.equal(model(ids).logits, once)


def test_taken_name_is_refused(tiny_model, tiny_tokenizer):
    model = unlearn(tiny_model("llama"), tiny_tokenizer(), FORGET, RETAIN, PAPER)
    with pytest.raises(ValueError, match="'default' already exists"):
        unlearn(model, tiny_tokenizer(), FORGET, RETAIN, PAPER)


def failing_scale(layers):
    raise RuntimeError("no idea")


def test_model_is_as_it_was_if_the_extraction_fails(tiny_model, tiny_tokenizer):
    model = tiny_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    modules = {name: type(module) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="no idea"):
        unlearn(model, tiny_tokenizer(), FORGET, RETAIN, PAPER, scale=failing_scale)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert isinstance(unlearn(model, tiny_tokenizer(), FORGET, RETAIN, PAPER).base_model.model, type(model))


def test_first_memory_is_as_it_was_if_the_second_extraction_fails(tiny_model, tiny_tokenizer, token_ids):
    ids = token_ids(2, 8)
    model = unlearn(tiny_model("llama"), tiny_tokenizer(), FORGET, RETAIN, PAPER)
    before, flags = model(ids).logits, {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="no idea"):
        unlearn(model, tiny_tokenizer(), FORGET, RETAIN, PAPER, adapter_name="second", scale=failing_scale)
    assert list(model.peft_config) == list(model.active_adapters) == ["default"]
    assert torch.equal(model(ids).logits, before)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
