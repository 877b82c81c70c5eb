"""Adapters of experts exported as stock LoRA, against what PEFT makes of the file."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel

from ..moe import KINDS, moe_model
from ..tuners.adapters import close, logits, unchanged
from ..tuners.test_experts import edited, fill, stacks


WITHOUT_BIAS = [kind for kind in KINDS if kind != "dbrx"]


@pytest.fixture
def ids(token_ids) -> torch.Tensor:
    return token_ids(5, 9)


@pytest.mark.parametrize("kind", WITHOUT_BIAS)
def test_peft_merges_the_export_into_the_same_weights(kind, ids, tmp_path):
    """Every layout, with ranks that differ from expert to expert: the packing of `lora_B` is PEFT's."""
    model = edited(kind, ids, absorb_bias=False)
    ranks = {tuple(own) for own in model.peft_config["default"].expert_ranks.values()}
    assert any(len(set(own)) > 1 for own in ranks)
    model.base_model.save_as_lora(tmp_path)
    before = moe_model(kind).state_dict()
    expected = model.merge_and_unload().state_dict()
    merged = PeftModel.from_pretrained(moe_model(kind), tmp_path).merge_and_unload(safe_merge=True).state_dict()
    changed = 0
    for name, start in before.items():
        if not torch.equal(expected[name], start):
            assert close(merged[name] - start, expected[name] - start, 1e-4), name
            changed += 1
        else:
            assert torch.equal(merged[name], start), name
    assert changed >= 2


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4_text"])
def test_peft_computes_the_same_unmerged(kind, ids, tmp_path):
    model = edited(kind, ids, absorb_bias=False)
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(moe_model(kind), tmp_path).eval()
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_layers_and_experts_and_a_single_stack_are_exported(ids, tmp_path):
    model = edited(
        "qwen3_moe", ids, target_modules=["q_proj", "o_proj"], target_parameters=["experts.gate_up_proj"], r=3
    )
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(moe_model("qwen3_moe"), tmp_path).eval()
    assert loaded.peft_config["default"].r == 3
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_an_embedding_beside_experts_is_exported(ids, tmp_path):
    model = edited("mixtral", ids, target_modules=["embed_tokens"], target_parameters=["experts.down_proj"])
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(moe_model("mixtral"), tmp_path).eval()
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_a_router_is_exported(ids, tmp_path):
    model = edited("mixtral", ids, target_parameters=["mlp.gate.weight"])
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(moe_model("mixtral"), tmp_path).eval()
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_the_named_adapter_is_exported(ids, tmp_path):
    model = edited("mixtral", ids)
    model.add_adapter(
        "second", type(model.peft_config["default"])(target_modules=[], target_parameters=stacks("mixtral"))
    )
    model.set_adapter("second")
    fill(model, ids, "second", forget=1)
    model.base_model.save_as_lora(tmp_path, "second")
    loaded = PeftModel.from_pretrained(moe_model("mixtral"), tmp_path).eval()
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_what_the_format_cannot_hold_is_refused(ids, tmp_path):
    for kind, reason in [("gpt_oss", "absorb_bias=False"), ("dbrx", "stored as a matrix")]:
        model = edited(kind, ids)
        with unchanged(model), pytest.raises(ValueError, match=reason):
            model.base_model.save_as_lora(tmp_path / "new")
    assert not (tmp_path / "new").exists()
