"""`alpha`, `set_scale` and the scaling of layers."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engram_peft import EngramConfig

from .adapters import KINDS, close, edited, layers_of, logits, projection, twice_edited, unchanged


def scalings(model, adapter_name: str = "default") -> set[float]:
    return {layer.engram_scaling[adapter_name] for layer in layers_of(model).values()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_multiplies_alpha(tiny_model, tokenizer, ids, kind):
    expected = logits(edited(tiny_model(kind), tokenizer, alpha=0.5), ids)
    model = edited(tiny_model(kind), tokenizer, alpha=0.25)
    model.set_scale("default", 2)
    assert torch.equal(logits(model, ids), expected)


def lora_layers(model):
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def test_strengths_follow_those_of_lora(tiny_model):
    names = ["q_proj", "down_proj"]
    lora = get_peft_model(tiny_model("llama"), LoraConfig(r=4, lora_alpha=4 * 0.5, target_modules=names))
    engram = get_peft_model(tiny_model("llama"), EngramConfig(alpha=0.5, target_modules=names))
    steps = [
        lambda layer: None,
        lambda layer: layer.set_scale("default", 3.0),
        lambda layer: layer.set_scale("default", 0.5),
        lambda layer: layer.set_scale("nobody", 7.0),
        lambda layer: layer.scale_layer(4.0),
        lambda layer: layer.scale_layer(0.5),
        lambda layer: layer.unscale_layer(2.0),
    ]
    for step in steps:
        for layer in (*lora_layers(lora), *layers_of(engram).values()):
            step(layer)
        assert scalings(engram) == {layer.scaling["default"] for layer in lora_layers(lora)}


def test_unscaling_goes_back_to_the_scale_that_was_set(tiny_model):
    model = get_peft_model(tiny_model("llama"), EngramConfig(alpha=0.5))
    model.set_scale("default", 3)
    for layer in layers_of(model).values():
        layer.scale_layer(0)
        layer.unscale_layer()
    assert scalings(model) == {1.5}


def test_scaling_a_layer_reaches_its_active_adapters_only(tiny_model, tokenizer):
    model = twice_edited(tiny_model("llama"), tokenizer)
    for layer in layers_of(model).values():
        layer.scale_layer(2)
    assert scalings(model, "first") == {0.5} and scalings(model, "second") == {0.25}


def test_the_scale_of_one_adapter_leaves_the_others(tiny_model, tokenizer, ids):
    model = twice_edited(tiny_model("llama"), tokenizer)
    output = logits(model, ids)
    model.set_scale("second", 5)
    assert torch.equal(logits(model, ids), output)
    assert model.peft_config["first"].scale == 1.0 and model.peft_config["second"].scale == 5.0


def test_a_negative_scale_adds(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    layer = layers_of(model)["model.layers.1.mlp.down_proj"]
    weight = layer.base_layer.weight.detach().double()
    model.set_scale("default", -2)
    model.merge_adapter()
    assert close(layer.base_layer.weight.detach().double(), weight + 0.5 * weight @ projection(layer), 1e-5)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_is_refused(tiny_model, tokenizer, scale):
    model = edited(tiny_model("llama"), tokenizer)
    layer = next(iter(layers_of(model).values()))
    for call in (
        lambda: model.set_scale("default", scale),
        lambda: layer.set_scale("default", scale),
        lambda: layer.scale_layer(scale),
        lambda: layer.unscale_layer(scale),
    ):
        with unchanged(model), pytest.raises(ValueError, match="should be a finite number.*(nan|inf)"):
            call()


def test_the_scale_of_an_unknown_adapter_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(ValueError, match="Adapter nobody not found.*default"):
        model.set_scale("nobody", 2)


def test_the_scale_of_a_merged_adapter_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    model.merge_adapter()
    layer = next(iter(layers_of(model).values()))
    for call in (
        lambda: model.set_scale("default", 2),
        lambda: layer.set_scale("default", 2),
        lambda: layer.scale_layer(2),
        lambda: layer.unscale_layer(),
    ):
        with unchanged(model), pytest.raises(ValueError, match="merged adapter.*unmerge_adapter"):
            call()


def test_unscaling_by_zero_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(ValueError, match="must not be 0"):
        next(iter(layers_of(model).values())).unscale_layer(0)
