"""Merging and unmerging."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from engram_peft import EngramConfig, extract_engram

from .adapters import (
    DTYPES,
    KINDS,
    WITH_BIAS,
    augmented_weight_of,
    close,
    edited,
    layers_of,
    logits,
    projection,
    same_tensors,
    statistics,
    tensors,
    twice_edited,
    unchanged,
)


def half_unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of `dtype` around `x`: what one rounding may change."""
    return torch.exp2(torch.frexp(x).exponent.double() - 1) * torch.finfo(dtype).eps / 2


def base_parameters(model) -> dict[str, nn.Parameter]:
    """The Parameters of the plain model, by name, those of base layers included."""
    return {
        name.replace(".base_layer", ""): parameter
        for name, parameter in model.get_base_model().named_parameters(remove_duplicate=False)
        if ".engram_" not in name
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_unmerging_brings_back_the_very_parameters(tiny_model, tokenizer, ids, kind, dtype):
    model = edited(tiny_model(kind, dtype), tokenizer)
    parameters, before, output = base_parameters(model), tensors(model), logits(model, ids)
    model.merge_adapter()
    assert not same_tensors(tensors(model), before)
    model.unmerge_adapter()
    restored = base_parameters(model)
    assert restored.keys() == parameters.keys()
    assert all(restored[name] is parameter for name, parameter in parameters.items())
    assert same_tensors(tensors(model), before)
    assert torch.equal(logits(model, ids), output)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_weight_is_the_edit_rounded_once(tiny_model, tokenizer, kind, dtype):
    model = edited(tiny_model(kind, dtype), tokenizer, alpha=0.3)
    bias = kind in WITH_BIAS
    before = {name: augmented_weight_of(layer, bias) for name, layer in layers_of(model).items()}
    model.merge_adapter()
    for name, layer in layers_of(model).items():
        m = projection(layer)
        expected = before[name] - 0.3 * before[name] @ m
        # the sum itself is formed in float32, with an error far below a unit of bfloat16
        noise = torch.finfo(torch.float32).eps * (before[name].abs() + before[name].abs() @ m.abs()) * 32
        merged = augmented_weight_of(layer, bias)
        assert layer.get_base_layer().weight.dtype == dtype
        assert ((merged - expected).abs() <= half_unit(expected, dtype) + noise).all(), name
        assert not torch.equal(merged, before[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_layer_differs_by_the_rounding_of_its_weight(tiny_model, tokenizer, kind, dtype):
    model = edited(tiny_model(kind, dtype), tokenizer)
    layers = layers_of(model)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(20, layer.in_features, generator=generator).to(dtype) for name, layer in layers.items()
    }
    with torch.no_grad():
        unmerged = {name: layer(inputs[name]) for name, layer in layers.items()}
        edits = {name: projection(layer) for name, layer in layers.items()}
        originals = {name: augmented_weight_of(layer, kind in WITH_BIAS) for name, layer in layers.items()}
        model.merge_adapter()
        merged = {name: layer(inputs[name]) for name, layer in layers.items()}
    unit = torch.finfo(dtype).eps / 2
    for name, layer in layers.items():
        x = inputs[name].double()
        if kind in WITH_BIAS:
            x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        taken = 0.25 * x @ edits[name].T
        weight = augmented_weight_of(layer, kind in WITH_BIAS)
        # merged: every entry of W' was rounded. unmerged: every entry of x' was. Both: the output was, up to twice
        # (once more for the bias), of sums that are formed in float32.
        bound = unit * (x.abs() @ weight.abs().T + (x - taken).abs() @ originals[name].abs().T)
        bound = bound + 4 * unit * merged[name].double().abs()
        bound = bound + 100 * torch.finfo(torch.float32).eps * ((x.abs() + taken.abs()) @ originals[name].abs().T)
        assert ((merged[name].double() - unmerged[name].double()).abs() <= bound).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_what_the_adapter_does(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind), tokenizer)
    unmerged = logits(model, ids)
    model.merge_adapter()
    assert close(logits(model, ids), unmerged, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_merging_in_turn_is_merging_at_once_to_the_bit(tiny_model, tokenizer, kind, dtype):
    model = twice_edited(tiny_model(kind, dtype), tokenizer)
    model.merge_adapter(["first", "second"])
    at_once = tensors(model)
    model.unmerge_adapter()
    model.merge_adapter(["first"])
    with pytest.warns(UserWarning, match="additionally merging second"):
        model.merge_adapter(["second"])
    assert same_tensors(tensors(model), at_once)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_merging_matters_by_rounding_only(tiny_model, tokenizer, kind, dtype):
    model = twice_edited(tiny_model(kind, dtype), tokenizer)
    results = []
    for order in (["first", "second"], ["second", "first"]):
        model.merge_adapter(order)
        results.append(
            {name: augmented_weight_of(layer, kind in WITH_BIAS) for name, layer in layers_of(model).items()}
        )
        model.unmerge_adapter()
    for name, weight in results[0].items():
        difference = (results[1][name] - weight).abs()
        noise = 100 * torch.finfo(torch.float32).eps * weight.abs().max()
        assert (difference <= 2 * half_unit(weight, dtype) + noise).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_several_active_adapters_equal_their_merged_sum(tiny_model, tokenizer, ids, kind):
    model = twice_edited(tiny_model(kind), tokenizer)
    one = logits(model, ids)
    model.base_model.set_adapter(["first", "second"])
    both = logits(model, ids)
    assert not close(both, one, 1e-3)
    model.merge_adapter()
    assert close(logits(model, ids), both, 1e-4)


def test_merging_a_part_of_the_active_adapters_does_not_drop_the_others_silently(tiny_model, tokenizer, ids):
    model = twice_edited(tiny_model("llama"), tokenizer)
    model.base_model.set_adapter(["first", "second"])
    both = logits(model, ids)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model.merge_adapter(["first"])
        except ValueError as error:
            assert "second" in str(error)
            assert torch.equal(logits(model, ids), both)
            return
    told = any("second" in str(warning.message) for warning in caught)
    assert told or close(logits(model, ids), both, 1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merging_an_inactive_adapter_gives_its_model(tiny_model, tokenizer, ids, kind):
    model = twice_edited(tiny_model(kind), tokenizer)
    model.set_adapter("second")
    expected = logits(model, ids)
    model.set_adapter("first")
    model.base_model.set_adapter([])
    model.merge_adapter(["second"])
    assert close(logits(model, ids), expected, 1e-4)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_merging_twice_warns_and_changes_nothing(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.merge_adapter()
    with unchanged(model), pytest.warns(UserWarning, match="All adapters are already merged"):
        model.merge_adapter()


def test_unmerging_what_is_not_merged_warns_and_changes_nothing(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()


@pytest.mark.parametrize("kind", KINDS)
def test_strength_zero_merges_to_the_base_weights(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer, alpha=0.0)
    before = tensors(model)
    model.merge_adapter()
    assert same_tensors(tensors(model), before)


# ------------------------------------------------------------------------------------------------ safe_merge


def break_last_layer(model, adapter_name: str = "default", value: float = float("nan")) -> None:
    layer = list(layers_of(model).values())[-1]
    layer.engram_B[adapter_name].weight.data[0, 0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_safe_merge_that_raises_touches_no_layer(tiny_model, tokenizer, kind, merge, value):
    model = edited(tiny_model(kind), tokenizer)
    break_last_layer(model, value=value)
    with unchanged(model), pytest.raises(ValueError, match="NaNs detected.*default"):
        getattr(model, merge)(safe_merge=True)


@pytest.mark.parametrize("kind", WITH_BIAS)
def test_a_safe_merge_checks_the_bias_too(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    layer = list(layers_of(model).values())[-1]
    layer.engram_A["default"].bias.data.fill_(float("nan"))
    with unchanged(model), pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)


def test_a_safe_merge_refuses_what_overflows_the_dtype_of_the_weight(tiny_model, tokenizer):
    model = edited(tiny_model("llama", torch.float16), tokenizer)
    model.set_scale("default", 1e9)
    with unchanged(model), pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_safe_merge_that_raises_keeps_what_was_merged_before(tiny_model, tokenizer, kind):
    model = twice_edited(tiny_model(kind), tokenizer)
    break_last_layer(model, "second")
    model.merge_adapter(["first"])
    before = tensors(model)
    with pytest.warns(UserWarning, match="additionally merging"), pytest.raises(ValueError, match="second"):
        model.merge_adapter(["second"], safe_merge=True)
    assert all(layer.merged_adapters == ["first"] for layer in layers_of(model).values())
    assert same_tensors(tensors(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_safe_merge_is_a_merge(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.merge_adapter()
    merged = tensors(model)
    model.unmerge_adapter()
    model.merge_adapter(safe_merge=True)
    assert same_tensors(tensors(model), merged)


def test_a_merge_with_an_unknown_name_changes_nothing(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model):
        try:
            model.merge_adapter(["nobody"])
        except ValueError as error:
            assert "nobody" in str(error)


def test_a_merge_wants_a_list_of_names(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(TypeError, match="list of strings"):
        model.merge_adapter("default")


# ------------------------------------------------------------------------------------------------ unloading


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_unloading_gives_the_base_model_also_after_a_merge(tiny_model, tokenizer, kind, dtype):
    for merge in (False, True):
        base = tiny_model(kind, dtype)
        modules, before = {name: type(module) for name, module in base.named_modules()}, tensors(base)
        parameters = dict(base.named_parameters(remove_duplicate=False))
        model = edited(base, tokenizer)
        if merge:
            model.merge_adapter()
        unloaded = model.unload()
        assert {name: type(module) for name, module in unloaded.named_modules()} == modules
        assert same_tensors(tensors(unloaded), before)
        assert all(
            parameters[name] is parameter for name, parameter in unloaded.named_parameters(remove_duplicate=False)
        )


@pytest.mark.parametrize("safe_merge", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_merge_and_unload_gives_a_plain_model_with_the_merged_weights(tiny_model, tokenizer, ids, kind, safe_merge):
    base = tiny_model(kind)
    modules = {name: type(module) for name, module in base.named_modules()}
    model = edited(base, tokenizer)
    output = logits(model, ids)
    model.merge_adapter()
    expected = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor
        for name, tensor in tensors(model).items()
        if ".engram_" not in name
    }
    model.unmerge_adapter()
    plain = model.merge_and_unload(safe_merge=safe_merge)
    assert {name: type(module) for name, module in plain.named_modules()} == modules
    assert same_tensors(tensors(plain), expected)
    assert not hasattr(plain, "peft_config")
    assert close(logits(plain, ids), output, 1e-4)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merge_and_unload_takes_the_named_adapters(tiny_model, tokenizer, ids, safe_merge):
    model = twice_edited(tiny_model("llama"), tokenizer)
    model.set_adapter("second")
    expected = logits(model, ids)
    plain = model.merge_and_unload(safe_merge=safe_merge, adapter_names=["second"])
    assert close(logits(plain, ids), expected, 1e-4)


@pytest.mark.parametrize("safe_merge", [False, True])
def test_merge_and_unload_after_a_merge_keeps_it(tiny_model, tokenizer, ids, safe_merge):
    model = edited(tiny_model("llama"), tokenizer)
    expected = logits(model, ids)
    model.merge_adapter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all adapters are merged already
        plain = model.merge_and_unload(safe_merge=safe_merge)
    assert close(logits(plain, ids), expected, 1e-4)


# ------------------------------------------------------------------------------------------------ while merged


@pytest.mark.parametrize("kind", KINDS)
def test_disabling_a_merged_adapter_is_the_base_model_to_the_bit(tiny_model, tokenizer, ids, kind):
    model = tiny_model(kind)
    before = logits(model, ids)
    model = edited(model, tokenizer)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_while_merged_casts_the_original_weights_too(tiny_model, tokenizer, kind, dtype):
    model = edited(tiny_model(kind), tokenizer)
    parameters = base_parameters(model)
    expected = {name: parameter.detach().to(dtype) for name, parameter in parameters.items()}
    model.merge_adapter()
    model.to(dtype)
    model.unmerge_adapter()
    restored = base_parameters(model)
    assert all(restored[name] is parameter for name, parameter in parameters.items())
    assert all(torch.equal(restored[name], tensor) for name, tensor in expected.items())
    assert all(restored[name].dtype == dtype for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deepcopy_of_a_merged_model_unmerges_by_itself(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind), tokenizer)
    before, output = tensors(model), logits(model, ids)
    model.merge_adapter()
    twin = copy.deepcopy(model)
    with unchanged(model):
        twin.unmerge_adapter()
    assert same_tensors(tensors(twin), before)
    assert torch.equal(logits(twin, ids), output)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_the_state_dict_of_a_merged_model_holds_its_tensors_and_nothing_else(tiny_model, tokenizer, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer)
    unmerged = tensors(model)
    model.merge_adapter()
    merged = tensors(model)
    assert merged.keys() == unmerged.keys()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "merged")
    assert same_tensors(load_file(tmp_path / "merged"), merged)
    torch.save(model.state_dict(), tmp_path / "merged.pt")
    assert same_tensors(torch.load(tmp_path / "merged.pt", weights_only=True), merged)


def test_generation_is_the_same_merged_and_unmerged(tiny_model, tokenizer, ids):
    for kind in KINDS:
        model = edited(tiny_model(kind), tokenizer)
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        unmerged = model.generate(input_ids=ids, **options)
        model.merge_adapter()
        assert model.generate(input_ids=ids, **options).tolist() == unmerged.tolist(), kind


def test_extraction_into_a_merged_adapter_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    target, total = statistics(model, tokenizer)
    model.merge_adapter()
    with unchanged(model), pytest.raises(ValueError, match="unmerge_adapter"):
        extract_engram(model, target, total)


def test_an_adapter_of_a_few_layers_merges_into_those(tiny_model, tokenizer):
    model = get_peft_model(tiny_model("llama"), EngramConfig(target_modules=["down_proj"], init_weights=False))
    before = tensors(model)
    model.merge_adapter()
    changed = {name for name, tensor in tensors(model).items() if not torch.equal(tensor, before[name])}
    assert changed == {f"base_model.model.model.layers.{i}.mlp.down_proj.base_layer.weight" for i in (0, 1)}
