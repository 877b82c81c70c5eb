"""Adapters exported as stock LoRA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, convert_to_lora, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from engram_peft import EngramConfig
from engram_peft.interop.lora import engram_to_lora

from ..tuners.adapters import (
    KINDS,
    augmented_weight_of,
    close,
    edited,
    layers_of,
    logits,
    projection,
    twice_edited,
    unchanged,
)


WITH_BIAS_EVERYWHERE = ["gpt2", "opt"]

PLAIN_PEFT = """
import sys
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
torch.set_num_threads(1)
ids = load_file(f"{folder}/ids.safetensors")["ids"]
results = {}
for kind in sys.argv[2:]:
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}/base")
    model = PeftModel.from_pretrained(base, f"{folder}/{kind}/lora").eval()
    with torch.no_grad():
        results[kind] = model(input_ids=ids).logits
        results[f"{kind}.merged"] = model.merge_and_unload(safe_merge=True)(input_ids=ids).logits
assert not [name for name in sys.modules if name.startswith("engram_peft")]
save_file(results, f"{folder}/logits.safetensors")
"""


def test_plain_peft_loads_the_export_and_computes_the_same_also_merged(tiny_model, tokenizer, ids, tmp_path):
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    expected = {}
    for kind in KINDS:
        base = tiny_model(kind)
        base.save_pretrained(tmp_path / kind / "base")
        before = logits(base, ids)
        model = edited(base, tokenizer)
        model.set_scale("default", 1.5)
        expected[kind] = logits(model, ids)
        assert not close(expected[kind], before, 1e-2)
        model.base_model.save_as_lora(tmp_path / kind / "lora")
    command = [sys.executable, "-c", PLAIN_PEFT, str(tmp_path), *KINDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = load_file(tmp_path / "logits.safetensors")
    for kind, output in expected.items():
        assert close(results[kind], output, 1e-4), kind
        assert close(results[f"{kind}.merged"], output, 1e-4), kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_the_change_of_weight_and_bias(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer, alpha=0.3)
    config, state = engram_to_lora(model.base_model)
    bias = kind in WITH_BIAS_EVERYWHERE
    assert config.lora_alpha / config.r == 1 and config.lora_bias == bias
    for name, layer in layers_of(model).items():
        change = -0.3 * augmented_weight_of(layer, bias) @ projection(layer)
        up, down = (state[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "BA")
        assert up.shape[1] == down.shape[0] == config.r
        assert close(up @ down, change[:, : layer.in_features], 1e-5), name
        if bias:
            assert close(state[f"base_model.model.{name}.lora_B.bias"].double(), change[:, -1], 1e-5), name


def test_the_export_is_a_file_of_stock_lora(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model):
        model.base_model.save_as_lora(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert sorted(config["target_modules"]) == sorted(layers_of(model))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "adapter_model.safetensors").values())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_different_ranks_are_padded_to_the_largest(tiny_model, tokenizer, ids, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer, r=2, rank_pattern={"down_proj": 5, "c_fc": 5})
    model.base_model.save_as_lora(tmp_path)
    assert LoraConfig.from_pretrained(tmp_path).r == 5
    loaded = PeftModel.from_pretrained(tiny_model(kind), tmp_path)
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_the_named_adapter_is_exported(tiny_model, tokenizer, ids, tmp_path):
    model = twice_edited(tiny_model("llama"), tokenizer)
    model.base_model.save_as_lora(tmp_path, "second")
    model.set_adapter("second")
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_the_export_is_the_same_while_merged(tiny_model, tokenizer, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.base_model.save_as_lora(tmp_path / "unmerged")
    model.merge_adapter()
    model.base_model.save_as_lora(tmp_path / "merged")
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("unmerged", "merged"))
    assert one == two


def test_the_export_of_a_bfloat16_model_computes_the_same(tiny_model, tokenizer, ids, tmp_path):
    model = edited(tiny_model("llama", torch.bfloat16), tokenizer)
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama", torch.bfloat16), tmp_path)
    assert close(logits(loaded, ids).float(), logits(model, ids).float(), 5e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_head_is_exported(tiny_model, tokenizer, ids, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(kind), tmp_path)
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


def test_a_layer_without_a_bias_beside_one_with_a_bias_is_exported(tiny_model, tokenizer, ids, tmp_path):
    model = edited(tiny_model("opt"), tokenizer, target_modules=["fc1", "lm_head"])
    model.base_model.save_as_lora(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("opt"), tmp_path)
    assert close(logits(loaded, ids), logits(model, ids), 1e-4)


@pytest.mark.parametrize("kind, absorb_bias", [("llama", True), ("qwen3", True), ("gpt2", False), ("opt", False)])
def test_peft_converts_what_absorbs_no_bias(tiny_model, tokenizer, ids, kind, absorb_bias):
    model = edited(tiny_model(kind), tokenizer, absorb_bias=absorb_bias, r=4)
    config, state = convert_to_lora(model, rank=4)
    lora = get_peft_model(tiny_model(kind), config).eval()
    set_peft_model_state_dict(lora, state)
    assert close(logits(lora, ids), logits(model, ids), 1e-3)


@pytest.mark.parametrize("kind", WITH_BIAS_EVERYWHERE)
def test_peft_refuses_to_convert_what_absorbs_a_bias(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    with unchanged(model), pytest.raises(TypeError, match="do not support LoRA conversion"):
        convert_to_lora(model, rank=4)


def test_bad_input_of_the_export_is_refused(tiny_model, tokenizer, tmp_path):
    model = get_peft_model(tiny_model("llama"), EngramConfig(modules_to_save=["lm_head"]))
    with unchanged(model), pytest.raises(ValueError, match="modules_to_save"):
        model.base_model.save_as_lora(tmp_path / "new")
    with unchanged(model), pytest.raises(ValueError, match="nobody not found"):
        model.base_model.save_as_lora(tmp_path / "new", "nobody")
    assert not (tmp_path / "new").exists()
