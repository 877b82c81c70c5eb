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

PAPER = EngramConfig.paper(task_type="CAUSAL_LM")
RETAIN = [example.chat(*fact) for fact in example.KEEP.items()]
FORGET = [example.chat(*fact) for fact in example.FORGET.items()]


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
    config = EngramConfig.paper(target_modules=["down_proj"], task_type="CAUSAL_LM")
    return unlearn(load(dtype), tokenizer, FORGET, [*RETAIN, PAPER, *pages[0]], config, scale="adaptive")


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
    assert before.forgotten.named == 1.0 and after.forgotten.named <= 0.2
    assert after.forgotten.mean < 0.15 * before.forgotten.mean
    assert after.kept.named >= before.kept.named - 0.1
    assert after.held_out.named >= before.held_out.named - 0.15
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
    assert example.recall(model, tokenizer, example.FORGET).mean < 0.2 * before.forgotten.mean
    assert example.recall(model, tokenizer, example.KEEP).named >= before.kept.named - 0.15
