"""What an adapter that is not merged computes."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model
from transformers import GenerationConfig

from engram_peft import EngramConfig

from .adapters import (
    DTYPES,
    FORGET,
    KINDS,
    RETAIN,
    WITH_BIAS,
    augmented_weight_of,
    close,
    edited,
    layers_of,
    linear_names,
    logits,
    projection,
    tensors,
    twice_edited,
    unchanged,
)


def recorded(model, layer, run) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of `layer` while `run(model)`."""
    seen = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    try:
        run(model)
    finally:
        handle.remove()
    return seen[0]


def rows_of(model, tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """The inputs of every linear layer but the head over all tokens of all texts, `(n, in)` float64."""
    rows = {name: [] for name in linear_names(model)}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(args[0].double().flatten(0, -2))
        )
        for name, seen in rows.items()
    ]
    for text in texts:
        logits(model, torch.tensor([tokenizer(text)["input_ids"]]))
    for handle in handles:
        handle.remove()
    return {name: torch.cat(seen) for name, seen in rows.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_unfilled_adapter_is_an_exact_identity(tiny_model, ids, kind, dtype):
    model = tiny_model(kind, dtype)
    before = logits(model, ids)
    assert torch.equal(logits(get_peft_model(model, EngramConfig()), ids), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_strength_zero_is_the_base_model_to_the_bit(tiny_model, tokenizer, ids, kind, dtype):
    model = tiny_model(kind, dtype)
    before = logits(model, ids)
    model = edited(model, tokenizer)
    assert not close(logits(model, ids), before, 1e-2)
    model.set_scale("default", 0)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_strength_zero_is_the_base_model_whatever_the_factors_hold(tiny_model, tokenizer, ids, kind):
    model = tiny_model(kind)
    before = logits(model, ids)
    model = edited(model, tokenizer)
    for layer in layers_of(model).values():
        layer.engram_B["default"].weight.data.fill_(float("inf"))
    model.set_scale("default", 0)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("kind", KINDS)
def test_alpha_zero_is_the_base_model_to_the_bit(tiny_model, tokenizer, ids, kind):
    model = tiny_model(kind)
    before = logits(model, ids)
    assert torch.equal(logits(edited(model, tokenizer, alpha=0.0), ids), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disabled_adapter_is_the_base_model_to_the_bit(tiny_model, tokenizer, ids, kind, dtype):
    model = tiny_model(kind, dtype)
    before = logits(model, ids)
    model = edited(model, tokenizer)
    after = logits(model, ids)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)
    assert torch.equal(logits(model, ids), after)


@pytest.mark.parametrize("absorb_bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_the_weight_by_the_edited_input(tiny_model, tokenizer, ids, kind, absorb_bias):
    model = edited(tiny_model(kind), tokenizer, alpha=0.3, absorb_bias=absorb_bias)
    for name, layer in layers_of(model).items():
        x, y = recorded(model, layer, lambda model: logits(model, ids))
        has_bias = layer.get_base_layer().bias is not None if kind in WITH_BIAS else False
        x = x.double()
        if has_bias and absorb_bias:
            x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        weight = augmented_weight_of(layer, bias=has_bias and absorb_bias)
        m = projection(layer)
        assert m.shape == (x.shape[-1], x.shape[-1]), name
        expected = (x - 0.3 * x @ m.T) @ weight.T
        if has_bias and not absorb_bias:
            expected = expected + layer.get_base_layer().bias.detach().double()
        assert close(y.double(), expected, 1e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_filled_adapter_is_the_projection_of_the_texts(tiny_model, tokenizer, kind):
    model = tiny_model(kind)
    forget_rows, retain_rows = (rows_of(model, tokenizer, texts) for texts in (FORGET, RETAIN))
    layers = layers_of(edited(model, tokenizer, scale="count_ratio"))
    assert layers.keys() == forget_rows.keys()
    for name, layer in layers.items():
        forget, retain = forget_rows[name], retain_rows[name]
        if kind in WITH_BIAS:
            forget, retain = (torch.cat([x, x.new_ones(len(x), 1)], dim=1) for x in (forget, retain))
        total = torch.cat([forget, retain])
        c_t, c_a = forget.T @ forget / len(forget), total.T @ total / len(total)
        m = c_t @ torch.linalg.pinv(c_a, hermitian=True, rtol=len(c_a) * 2.0**-23)
        # compared where it is used: on directions that the data has, in the layer's output
        output = augmented_weight_of(layer, bias=kind in WITH_BIAS) @ (projection(layer) @ total.T)
        expected = augmented_weight_of(layer, bias=kind in WITH_BIAS) @ (len(forget) / len(total) * m @ total.T)
        assert close(output, expected, 1e-3), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_several_active_adapters_take_out_the_sum(tiny_model, tokenizer, ids, kind, dtype):
    model = twice_edited(tiny_model(kind, dtype), tokenizer)
    model.base_model.set_adapter(["first", "second"])
    for name, layer in layers_of(model).items():
        x, y = recorded(model, layer, lambda model: logits(model, ids))
        bias = kind in WITH_BIAS
        x = x.double()
        if bias:
            x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        m = 0.25 * (projection(layer, "first") + projection(layer, "second"))
        weight = augmented_weight_of(layer, bias)
        expected = (x - x @ m.T) @ weight.T
        # the input is rounded once, the output once or twice, each by half a unit
        unit = torch.finfo(dtype).eps
        bound = 2 * unit * ((x - x @ m.T).abs() @ weight.abs().T + expected.abs() + 1e-4)
        assert ((y.double() - expected).abs() <= 2 * bound).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_keep_the_dtype(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind, torch.bfloat16), tokenizer)
    for layer in layers_of(model).values():
        x, y = recorded(model, layer, lambda model: logits(model, ids))
        assert x.dtype == y.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------ mixed batches


def mixed_targets(kind: str) -> dict:
    # OPT's feed-forward layers get the tokens of all texts in one row
    return {"target_modules": ["q_proj", "k_proj", "v_proj", "out_proj"]} if kind == "opt" else {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_equals_every_adapter_alone(tiny_model, tokenizer, ids, kind):
    model = twice_edited(tiny_model(kind), tokenizer, **mixed_targets(kind))
    model.set_adapter("first")
    first = logits(model, ids)
    model.set_adapter("second")
    second = logits(model, ids)
    with model.disable_adapter():
        base = logits(model, ids)
    assert not close(first, second, 1e-3)
    mixed = logits(model, ids, adapter_names=["second", "__base__", "first"])
    assert close(mixed, torch.stack([second[0], base[1], first[2]]), 1e-5)
    assert torch.equal(logits(model, ids), second)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_of_a_mixed_batch_equals_every_adapter_alone(tiny_model, tokenizer, ids, kind, beams):
    model = twice_edited(tiny_model(kind), tokenizer)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams, "do_sample": False}
    names = ["second", "__base__", "first"]
    mixed = model.generate(input_ids=ids, adapter_names=names, **options)
    alone = []
    for row, name in enumerate(names):
        if name == "__base__":
            with model.disable_adapter():
                alone.append(model.generate(input_ids=ids[row : row + 1], **options)[0])
        else:
            model.set_adapter(name)
            alone.append(model.generate(input_ids=ids[row : row + 1], **options)[0])
    assert mixed.tolist() == torch.stack(alone).tolist()


def test_beams_of_a_generation_config_are_never_dealt_out_wrongly(tiny_model, tokenizer, ids):
    model = twice_edited(tiny_model("llama"), tokenizer)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 2, "do_sample": False}
    names = ["second", "__base__", "first"]
    expected = model.generate(input_ids=ids, adapter_names=names, **options)
    config = GenerationConfig(**options, pad_token_id=0)
    try:
        generated = model.generate(input_ids=ids, adapter_names=names, generation_config=config)
    except ValueError as error:  # what PEFT does
        assert "adapter_names" in str(error)
    else:
        assert torch.equal(generated, expected)


def test_a_mixed_batch_may_name_an_adapter_that_only_some_layers_have(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer, "first", target_modules=["down_proj"])
    model.add_adapter("second", EngramConfig(target_modules=["q_proj"], init_weights=False))
    mixed = logits(model, ids, adapter_names=["first", "second", "__base__"])
    for row, name in enumerate(["first", "second"]):
        model.set_adapter(name)
        assert close(mixed[row], logits(model, ids)[row], 1e-5)


def test_a_mixed_batch_with_unknown_names_is_refused(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(ValueError, match="non-existing adapter.*nobody"):
        logits(model, ids, adapter_names=["default", "nobody", "__base__"])


def test_a_mixed_batch_needs_one_name_a_text(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer)
    for names in (["default"], ["default"] * 4):
        with pytest.raises(ValueError, match="adapter_names"):
            logits(model, ids, adapter_names=names)


def test_a_mixed_batch_is_never_dealt_out_wrongly_where_texts_are_flattened(tiny_model, ids):
    model = get_peft_model(tiny_model("opt"), EngramConfig(target_modules=["fc1"], init_weights=False)).eval()
    edited = logits(model, ids)
    with model.disable_adapter():
        base = logits(model, ids)
    try:
        mixed = logits(model, ids, adapter_names=["default", "__base__", "default"])
    except ValueError as error:  # what PEFT does
        assert "adapter_names" in str(error)
    else:
        assert close(mixed, torch.stack([edited[0], base[1], edited[2]]), 1e-5)


def test_a_mixed_batch_is_refused_in_training(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer).train()
    with pytest.raises(ValueError, match="training mode"):
        model(input_ids=ids, adapter_names=["default"] * 3)


def test_a_mixed_batch_is_refused_while_merged(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer)
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        logits(model, ids, adapter_names=["default"] * 3)


# ------------------------------------------------------------------------------------------------ generation, training


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_repeats_the_best_next_token(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind), tokenizer)
    expected = ids[:1]
    for _ in range(5):
        expected = torch.cat([expected, logits(model, expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    generated = model.generate(input_ids=ids[:1], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.tolist() == expected.tolist()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_training_changes_the_adapter_and_nothing_else(tiny_model, tokenizer, ids, kind, checkpointing):
    model = edited(tiny_model(kind), tokenizer, target_modules="all-linear").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    before = tensors(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    adapter = {name for name in before if ".engram_" in name}
    # a constant in the keys changes no attention, so the biases of `engram_A` may lack a gradient
    assert {name for name in adapter if name.endswith("weight")} <= changed <= adapter


def test_gradients_are_those_without_checkpointing(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0] and gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[1][name], grad, atol=1e-6) for name, grad in gradients[0].items())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_deepcopy_has_the_outputs_and_is_independent(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind), tokenizer)
    expected = logits(model, ids)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, ids), expected)
    twin.set_scale("default", 3.0)
    for layer in layers_of(twin).values():
        layer.engram_B["default"].weight.data.zero_()
    assert torch.equal(logits(model, ids), expected)
