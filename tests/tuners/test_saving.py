"""Saving and loading: what comes back is what was saved, to the bit."""

from __future__ import annotations

import json

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engram_peft import EngramConfig

from .adapters import (
    DTYPES,
    FORGET_OTHER,
    KINDS,
    close,
    edited,
    fill,
    layers_of,
    logits,
    same_tensors,
    tensors,
    twice_edited,
    unchanged,
)


def adapter_tensors(model) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors(model).items() if ".engram_" in name}


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_adapter_is_the_saved_one(tiny_model, tokenizer, ids, tmp_path, kind, dtype, low_cpu_mem_usage):
    model = edited(tiny_model(kind, dtype), tokenizer)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(kind, dtype), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_the_factors_under_the_names_of_the_layers(tiny_model, tokenizer, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.save_pretrained(tmp_path)
    expected = {
        f"base_model.model.{name}.{key.replace('.default', '')}": tensor.detach()
        for name, layer in layers_of(model).items()
        for key, tensor in layer.state_dict().items()
        if key.startswith("engram_")
    }
    assert same_tensors(load_file(tmp_path / "adapter_model.safetensors"), expected)


def test_saved_twice_is_saved_the_same(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("gpt2"), tokenizer)
    model.save_pretrained(tmp_path / "one")
    PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in ("adapter_model.safetensors",):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    one, two = (json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("one", "two"))
    assert {key: (sorted(v) if isinstance(v, list) else v) for key, v in one.items()} == {
        key: (sorted(v) if isinstance(v, list) else v) for key, v in two.items()
    }


def test_the_config_comes_back(tiny_model, tokenizer, tmp_path):
    model = edited(
        tiny_model("llama"), tokenizer, r=3, alpha_pattern={"down_proj": 0.5}, description="two capitals",
        target_modules=["q_proj", "down_proj"], layers_to_transform=[1], rank_pattern={"q_proj": 2},
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, EngramConfig)
    expected = model.peft_config["default"].to_dict() | {"inference_mode": True}
    assert config.to_dict() == expected


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_auto_classes_load_the_base_model_and_the_adapter(tiny_model, tokenizer, ids, tmp_path, kind):
    tiny_model(kind).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    model = edited(base, tokenizer)
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model, ids)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert layers_of(loaded).keys() == layers_of(model).keys()
    assert torch.equal(logits(loaded, ids), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_loads_an_adapter(tiny_model, tokenizer, ids, tmp_path, kind, dtype):
    model = edited(tiny_model(kind, dtype), tokenizer)
    model.save_pretrained(tmp_path)
    plain = tiny_model(kind, dtype)
    plain.load_adapter(str(tmp_path))
    # transformers holds adapters in the dtype of the model
    expected = {name: tensor.to(dtype) for name, tensor in tensors(model).items()}
    assert same_tensors({f"base_model.model.{name}": tensor for name, tensor in tensors(plain).items()}, expected)
    set_peft_model_state_dict(
        model, {name: tensor.to(dtype) for name, tensor in get_peft_model_state_dict(model).items()}
    )
    model.base_model.to(dtype)
    assert torch.equal(logits(plain, ids), logits(model, ids))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_several_adapters_are_saved_and_loaded_each(tiny_model, tokenizer, ids, tmp_path, kind, low_cpu_mem_usage):
    model = twice_edited(tiny_model(kind), tokenizer)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        tiny_model(kind), tmp_path / "first", adapter_name="first", low_cpu_mem_usage=low_cpu_mem_usage
    )
    loaded.load_adapter(tmp_path / "second", adapter_name="second", low_cpu_mem_usage=low_cpu_mem_usage)
    assert same_tensors(tensors(loaded), tensors(model))
    for name in ("first", "second"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_an_adapter_may_be_loaded_under_another_name(tiny_model, tokenizer, ids, tmp_path):
    model = edited(tiny_model("llama"), tokenizer)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path, adapter_name="elsewhere")
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_the_scale_is_kept(tiny_model, tokenizer, ids, tmp_path, low_cpu_mem_usage):
    model = edited(tiny_model("llama"), tokenizer)
    model.set_scale("default", 1.75)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert {layer.engram_scaling["default"] for layer in layers_of(loaded).values()} == {0.25 * 1.75}
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    loaded.set_scale("default", 1)
    assert {layer.engram_scaling["default"] for layer in layers_of(loaded).values()} == {0.25}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_strength_of_every_row_is_kept(tiny_model, tokenizer, ids, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer)
    generator = torch.Generator().manual_seed(0)
    for layer in layers_of(model).values():
        right, left, strength = (tensor.detach().clone() for tensor in layer.factors("default"))
        layer.fill("default", right, left, torch.rand(len(strength), generator=generator))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(kind), tmp_path)
    assert same_tensors(adapter_tensors(loaded), adapter_tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_is_saved_as_the_unmerged_one(tiny_model, tokenizer, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.save_pretrained(tmp_path / "unmerged")
    model.merge_adapter()
    model.save_pretrained(tmp_path / "merged")
    names = ["adapter_model.safetensors"]
    for name in names:
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "unmerged" / name).read_bytes()


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_modules_to_save_are_saved_and_loaded(tiny_model, tokenizer, ids, tmp_path, low_cpu_mem_usage):
    model = edited(tiny_model("llama"), tokenizer, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2.0)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_an_unfilled_adapter_is_saved_and_loaded(tiny_model, ids, tmp_path):
    for r in (None, 3):
        model = get_peft_model(tiny_model("gpt2"), EngramConfig(r=r))
        model.save_pretrained(tmp_path / str(r))
        loaded = PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path / str(r))
        assert same_tensors(tensors(loaded), tensors(model))


def test_a_loaded_adapter_can_be_trained_and_filled_again(tiny_model, tokenizer, ids, tmp_path):
    model = edited(tiny_model("llama"), tokenizer)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path, is_trainable=True)
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == set(adapter_tensors(loaded))
    fill(loaded, tokenizer, forget=FORGET_OTHER)
    assert torch.equal(logits(loaded, ids), logits(edited(tiny_model("llama"), tokenizer, forget=FORGET_OTHER), ids))


def test_the_rank_that_was_asked_for_outlives_filling_and_saving(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("llama"), tokenizer, r=5, rank_pattern={"down_proj": 2})
    model.save_pretrained(tmp_path)
    loaded = fill(PeftModel.from_pretrained(tiny_model("llama"), tmp_path), tokenizer)
    for name, layer in layers_of(loaded).items():
        assert layer.engram_A["default"].out_features == (2 if name.endswith("down_proj") else 5), name


def test_loading_another_adapter_changes_nothing_of_the_first(tiny_model, tokenizer, ids, tmp_path):
    model = edited(tiny_model("llama"), tokenizer)
    model.save_pretrained(tmp_path)
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(not parameter.requires_grad)  # flags as no rule would set them
    before, output = tensors(model), logits(model, ids)
    flags = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    model.load_adapter(tmp_path, adapter_name="other")
    after = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    assert {name: after[name] for name in flags} == flags
    assert not any(flag for name, (_, flag) in after.items() if name not in flags)
    assert same_tensors({name: tensor for name, tensor in tensors(model).items() if name in before}, before)
    assert torch.equal(logits(model, ids), output)


def test_the_state_dict_of_peft_is_the_file(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("opt"), tokenizer)
    model.save_pretrained(tmp_path)
    assert same_tensors(get_peft_model_state_dict(model), load_file(tmp_path / "adapter_model.safetensors"))


def test_an_adapter_is_swapped_in_place(tiny_model, tokenizer, ids, tmp_path):
    from peft import load_peft_weights, set_peft_model_state_dict

    model = edited(tiny_model("llama"), tokenizer, r=2)
    other = edited(tiny_model("llama"), tokenizer, r=2, forget=FORGET_OTHER)
    other.save_pretrained(tmp_path)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    set_peft_model_state_dict(model, load_peft_weights(str(tmp_path)), "default")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert torch.equal(logits(model, ids), logits(other, ids))


def test_saving_changes_nothing(tiny_model, tokenizer, tmp_path):
    model = edited(tiny_model("qwen3"), tokenizer)
    with unchanged(model):
        model.save_pretrained(tmp_path)


def test_the_base_model_and_the_adapter_survive_a_change_of_dtype(tiny_model, tokenizer, ids, tmp_path):
    model = edited(tiny_model("llama"), tokenizer)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama", torch.float64), tmp_path)
    assert close(logits(loaded, ids).float(), logits(model, ids), 1e-4)
