"""Which layers get an adapter, and with which rank and strength."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engram_peft import EngramConfig

from .adapters import KINDS, edited, layers_of, linear_names


def selected(model, **config) -> set[str]:
    return set(layers_of(get_peft_model(model, EngramConfig(**config))))


def selected_by_lora(model, **config) -> set[str]:
    model = get_peft_model(model, LoraConfig(**config)).get_base_model()
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


MLP = {"llama": "down_proj", "qwen3": "down_proj", "gpt2": "c_fc", "opt": "fc2"}
CONTAINER = {"llama": "layers", "qwen3": "layers", "gpt2": "h", "opt": "layers"}


@pytest.mark.parametrize("target_modules", [None, "all-linear"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_is_every_linear_layer_but_the_head(tiny_model, kind, target_modules):
    model = tiny_model(kind)
    expected = linear_names(model)
    assert len(expected) >= 8 and "lm_head" not in expected
    assert selected(model, target_modules=target_modules) == expected


@pytest.mark.parametrize("target_modules", [None, "all-linear"])
@pytest.mark.parametrize("layers", [[1], 0, [0, 1]])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_goes_with_layers_to_transform(tiny_model, kind, layers, target_modules):
    if target_modules == "all-linear":
        with pytest.raises(ValueError, match="layers_to_transform.*target_modules.*str"):
            EngramConfig(target_modules=target_modules, layers_to_transform=layers)
        return
    wanted = [layers] if isinstance(layers, int) else layers
    model = tiny_model(kind)
    expected = {
        name for name in linear_names(model) if any(f".{CONTAINER[kind]}.{index}." in name for index in wanted)
    }
    assert expected
    assert selected(model, layers_to_transform=layers) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_goes_with_exclude_modules(tiny_model, kind):
    model = tiny_model(kind)
    expected = {name for name in linear_names(model) if not name.endswith(MLP[kind])}
    assert selected(model, exclude_modules=[MLP[kind]]) == expected


@pytest.mark.parametrize("config", [
    {"target_modules": ["q_proj", "mlp.down_proj"]},
    {"target_modules": {"o_proj"}},
    {"target_modules": "all-linear"},
    {"target_modules": r".*\.1\..*(up|gate)_proj"},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0]},
    {"target_modules": ["down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["down_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
])  # fmt: skip
def test_layers_are_chosen_as_lora_chooses_them(tiny_model, config):
    assert selected(tiny_model("llama"), **config) == selected_by_lora(tiny_model("llama"), **config) != set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_of_strengths_goes_before_alpha(tiny_model, kind):
    config = EngramConfig(
        alpha=0.5, alpha_pattern={MLP[kind]: 0.125, rf".*\.{CONTAINER[kind]}\.1\..*": 2.0}, scale=3.0
    )
    for name, layer in layers_of(get_peft_model(tiny_model(kind), config)).items():
        in_layer_1 = f".{CONTAINER[kind]}.1." in name
        expected = 0.125 if name.endswith(MLP[kind]) else 2.0 if in_layer_1 else 0.5
        assert layer.engram_scaling["default"] == 3.0 * expected, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_of_ranks_goes_before_r(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer, r=3, rank_pattern={MLP[kind]: 2})
    for name, layer in layers_of(model).items():
        rank = 2 if name.endswith(MLP[kind]) else 3
        assert layer.engram_A["default"].weight.shape[0] == rank, name
        assert layer.engram_B["default"].weight.shape[1] == rank, name
        assert layer.engram_strength["default"].weight.shape == (rank,), name


def test_without_r_the_rank_is_at_most_that_of_the_texts(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer, forget=["the old bridge of berlin"])
    for layer in layers_of(model).values():
        assert layer.engram_A["default"].out_features <= 5  # a row a word


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_absorbed_where_there_is_one_unless_told_otherwise(tiny_model, kind):
    for absorb_bias in (True, False):
        model = get_peft_model(tiny_model(kind), EngramConfig(absorb_bias=absorb_bias))
        for layer in layers_of(model).values():
            has_bias = getattr(layer.base_layer, "bias", None) is not None
            assert (layer.engram_A["default"].bias is not None) == (has_bias and absorb_bias)
            assert layer.engram_B["default"].out_features == layer.in_features + (has_bias and absorb_bias)


def test_modules_to_save_are_trained_and_not_edited(tiny_model):
    model = get_peft_model(tiny_model("llama"), EngramConfig(modules_to_save=["lm_head"]))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad and ".engram_" not in name}
    assert trainable == {"base_model.model.lm_head.modules_to_save.default.weight"}


def test_a_new_adapter_is_trainable_and_the_base_model_is_frozen(tiny_model):
    model = get_peft_model(tiny_model("gpt2"), EngramConfig())
    assert all(parameter.requires_grad == (".engram_" in name) for name, parameter in model.named_parameters())


def test_a_model_without_a_config_needs_target_modules():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="Please specify `target_modules`"):
        get_peft_model(model, EngramConfig())
    assert selected(model, target_modules=["0"]) == {"0"}
