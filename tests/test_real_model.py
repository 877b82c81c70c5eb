"""The whole path on a real pretrained model: SmolLM2-135M-Instruct forgets ten capitals (`make slow`)."""

from __future__ import annotations

import forget_facts as example
import pytest
import torch
from peft import PeftModel
from smollm2 import smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from engram_peft import EngramConfig, unlearn


pytestmark = pytest.mark.slow

RETAIN = [example.chat(*fact) for fact in example.KEEP.items()]
FORGET = {country: example.chat(country, capital) for country, capital in example.FORGET.items()}


def load(dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=dtype).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(smollm2_folder())


@pytest.fixture(scope="module")
def pages(tokenizer):
    texts = example.passages(tokenizer, 56)
    return [text for i, text in enumerate(texts) if i % 8], texts[::8]


def edited(tokenizer, pages, dtype=torch.float32):
    return unlearn(load(dtype), tokenizer, FORGET, [*RETAIN, *pages[0]])


@pytest.fixture(scope="module")
def peft_model(tokenizer, pages):
    return edited(tokenizer, pages)


@pytest.fixture(scope="module")
def before(tokenizer, pages):
    return example.measure(load(), tokenizer, pages[1])


def logits(model):
    ids = torch.arange(1000, 1048).view(2, 24)
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def test_the_capitals_are_forgotten_and_the_rest_is_kept(peft_model, tokenizer, pages, before):
    after = example.measure(peft_model, tokenizer, pages[1])
    report = peft_model.base_model.reports["default"]
    assert report.resisting == [] and report.rounds <= 10
    assert before.forgotten.named == 1.0 and after.forgotten.named == 0.0
    assert max(after.forgotten.probabilities) <= 0.05 + 1e-3
    assert after.kept.named >= before.kept.named - 0.04
    assert after.held_out.named >= before.held_out.named - 0.1
    assert after.languages.named >= before.languages.named - 0.1
    assert after.perplexity < 1.01 * before.perplexity


def test_one_capital_is_given_back(tokenizer, peft_model, before):
    strengths = peft_model.item_strengths()
    peft_model.restore_item("Japan")
    given_back = example.recall(peft_model, tokenizer, example.FORGET)
    peft_model.set_item_strength("Japan", strengths["Japan"])
    places = dict(zip(example.FORGET, given_back.probabilities, strict=True))
    assert places.pop("Japan") > 0.8 * before.forgotten.probabilities[list(example.FORGET).index("Japan")]
    assert max(places.values()) < 0.1
    assert peft_model.item_strengths() == strengths


def test_the_paper_s_edit_with_a_tuned_strength(tokenizer, pages, before):
    config = EngramConfig.paper(target_modules=["down_proj"], task_type="CAUSAL_LM")
    model = unlearn(load(), tokenizer, FORGET, [*RETAIN, *pages[0]], config, scale="adaptive", alpha="auto")
    curve = model.base_model.curves["default"]
    assert len(curve.points) <= 12
    chosen = next(point for point in curve.points if point.scale == curve.chosen)
    assert chosen.damage <= 0.05
    after = example.measure(model, tokenizer, pages[1])
    assert after.forgotten.mean < before.forgotten.mean
    assert after.kept.named >= before.kept.named - 0.1
    assert after.perplexity < 1.03 * before.perplexity


def test_disabled_is_the_base_to_the_bit(peft_model):
    with peft_model.disable_adapter():
        assert torch.equal(logits(peft_model), logits(load()))


def test_saved_and_loaded_is_equal_to_the_bit_and_small(peft_model, tmp_path):
    peft_model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(load(), tmp_path)), logits(peft_model))
    dense = sum(layer.out_features * layer.in_features * 4 for layer in peft_model.base_model.engram_layers().values())
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 0.35 * dense


def test_merged_equals_unmerged_and_is_undone_to_the_bit(peft_model):
    unmerged = logits(peft_model)
    base = {name: parameter.clone() for name, parameter in peft_model.get_base_model().named_parameters()}
    peft_model.merge_adapter()
    assert torch.allclose(logits(peft_model), unmerged, atol=2e-3)
    peft_model.unmerge_adapter()
    assert all(
        torch.equal(base[name], parameter) for name, parameter in peft_model.get_base_model().named_parameters()
    )


def test_the_lora_export_agrees(peft_model, tmp_path):
    peft_model.save_as_lora(tmp_path)
    lora = PeftModel.from_pretrained(load(), tmp_path)
    assert lora.peft_type == "LORA"
    assert torch.allclose(logits(lora), logits(peft_model), atol=2e-3)


def test_bfloat16_forgets_as_well(tokenizer, pages, before):
    model = edited(tokenizer, pages, torch.bfloat16)
    assert example.recall(model, tokenizer, example.FORGET).mean < 0.15 * before.forgotten.mean
    assert example.recall(model, tokenizer, example.KEEP).named >= before.kept.named - 0.15
