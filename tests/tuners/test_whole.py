"""A target of many rows: where two factors would be larger than `M`, the adapter holds `M` as a whole."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from engram_peft import EngramConfig

from .adapters import (
    DTYPES,
    close,
    edited,
    fill,
    layers_of,
    logits,
    projection,
    same_tensors,
    sentences,
    statistics,
    tensors,
    weight_of,
)


MANY = sentences(12, 9, seed=5)
WITHOUT_BIAS = ["llama", "qwen3"]


@pytest.fixture(params=WITHOUT_BIAS)
def kind(request):
    return request.param


def many(model, tokenizer, **config):
    return edited(model, tokenizer, forget=MANY, **config)


def whole_layers(model, adapter_name="default"):
    return {n: layer for n, layer in layers_of(model).items() if isinstance(layer.engram_A[adapter_name], nn.Identity)}


def test_the_smaller_of_both_is_stored(tiny_model, tokenizer, tmp_path, kind):
    model = many(tiny_model(kind), tokenizer)
    assert whole_layers(model) and len(whole_layers(model)) < len(layers_of(model))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for name, layer in layers_of(model).items():
        stored = sum(saved[f"base_model.model.{name}.engram_{part}.weight"].numel() for part in "AB" if
                     f"base_model.model.{name}.engram_{part}.weight" in saved)  # fmt: skip
        rank = torch.linalg.matrix_rank(projection(layer))
        assert stored == min(2 * int(rank), layer.in_features) * layer.in_features, name


def test_it_is_the_same_edit(tiny_model, tokenizer, kind):
    model = many(tiny_model(kind), tokenizer)
    target, total = statistics(tiny_model(kind), tokenizer, MANY)
    for name, layer in whole_layers(model).items():
        expected = target.covariance(name) @ torch.linalg.pinv(
            total.covariance(name), rtol=layer.in_features * 2.0**-23, hermitian=True
        )
        weight = weight_of(layer).double()
        assert close(weight @ projection(layer), weight @ expected, 1e-3), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
def test_it_is_saved_and_loaded_to_the_bit(tiny_model, tokenizer, ids, tmp_path, kind, dtype, low_cpu_mem_usage):
    model = many(tiny_model(kind, dtype), tokenizer)
    assert whole_layers(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(kind, dtype), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_it_is_merged_and_unmerged(tiny_model, tokenizer, ids, kind):
    plain = tiny_model(kind)
    base = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = many(plain, tokenizer, alpha=0.5)
    unmerged = logits(model, ids)
    layer = next(iter(whole_layers(model).values()))
    weight = weight_of(layer).double()
    model.merge_adapter()
    assert close(weight_of(layer).double(), weight - 0.5 * weight @ projection(layer))
    assert close(logits(model, ids), unmerged)
    model.unmerge_adapter()
    assert all(torch.equal(tensor, base[name]) for name, tensor in model.unload().state_dict().items())


def test_it_is_exported_as_lora(tiny_model, tokenizer, ids, tmp_path, kind):
    model = many(tiny_model(kind), tokenizer)
    model.save_as_lora(tmp_path)
    assert close(logits(PeftModel.from_pretrained(tiny_model(kind), tmp_path), ids), logits(model, ids))


def test_it_is_combined_with_a_thin_one(tiny_model, tokenizer, ids, tmp_path, kind):
    model = many(tiny_model(kind), tokenizer)
    model.add_adapter("thin", EngramConfig())
    fill(model, tokenizer, "thin")
    model.add_weighted_adapter(["default", "thin"], [0.5, -1.0], "both")
    for layer in layers_of(model).values():
        expected = 0.5 * 0.25 * projection(layer) - projection(layer, "thin")  # strengths of 0.25 and 1
        assert close(projection(layer, "both"), expected)
    model.set_adapter("both")
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    loaded = PeftModel.from_pretrained(tiny_model(kind), tmp_path / "both")
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_it_is_filled_anew(tiny_model, tokenizer, ids, kind):
    model = many(tiny_model(kind), tokenizer)
    fill(model, tokenizer)
    assert not whole_layers(model)
    assert torch.equal(logits(model, ids), logits(edited(tiny_model(kind), tokenizer), ids))


def test_it_can_be_trained(tiny_model, tokenizer, ids, kind):
    model = many(tiny_model(kind), tokenizer)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    for name, layer in whole_layers(model).items():
        assert layer.engram_B["default"].weight.grad.abs().sum() > 0, name


def test_a_rank_of_zero_is_not_to_be_asked_for(tiny_model):
    with pytest.raises(ValueError, match="`rank_pattern` should be a positive integer"):
        get_peft_model(tiny_model("llama"), EngramConfig(rank_pattern={"q_proj": 0}))
