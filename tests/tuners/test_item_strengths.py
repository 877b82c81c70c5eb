"""One strength an item: looking at them, setting them, giving items back; alone, in sums, saved, merged and exported."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model

from engram_peft import EngramConfig, extract_engram, extract_items

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
    logits,
    projection,
    same_tensors,
    statistics,
    tensors,
    twice_edited,
    unchanged,
)


ITEMS = {"rome": 3, "the capital of france": 2, "10": 1, "2": 4}  # in an order that sorting would change
STRENGTHS = {"rome": 0.5, "the capital of france": 1.25, "10": 2.0, "2": 0.75}


def put_items(model, adapter_name="default", items=ITEMS, strengths=STRENGTHS, seed=0):
    """Fills an adapter with random factors whose rows belong to `items`."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(items.values())
    each = torch.tensor([strengths[name] for name, count in items.items() for _ in range(count)])
    layers = {name: layer for name, layer in layers_of(model).items() if adapter_name in layer.engram_A}
    for layer in layers.values():
        width = layer.in_features + layer.absorbs_bias(adapter_name)
        right, left = (torch.randn(rows, width, generator=generator) / width for _ in range(2))
        layer.fill(adapter_name, right, left.T, each)
    counts = {"target_rows": rows, "total_rows": 100, "target_texts": len(items), "total_texts": 10}
    record = {"method": "items", "mask": "predict", "library_version": "0", **counts}
    model.peft_config[adapter_name].record_extraction(dict.fromkeys(layers, rows), record, dict(items))
    return model


def with_items(model, adapter_name="default", seed=0, items=ITEMS, strengths=STRENGTHS, **config):
    config = EngramConfig(**{"task_type": "CAUSAL_LM", **config})
    return put_items(get_peft_model(model, config, adapter_name).eval(), adapter_name, items, strengths, seed)


def add_items(model, adapter_name, items, strengths, seed=1, **config):
    model.add_adapter(adapter_name, EngramConfig(**{"task_type": "CAUSAL_LM", **config}))
    return put_items(model, adapter_name, items, strengths, seed)


def row_strengths(model, adapter_name="default") -> list[list[float]]:
    layers = layers_of(model).values()
    return [layer.factors(adapter_name)[2].tolist() for layer in layers if adapter_name in layer.engram_A]


def expected_rows(strengths, items=ITEMS) -> list[float]:
    return [strengths[name] for name, count in items.items() for _ in range(count)]


# ------------------------------------------------------------------------------------------------ setting


def test_the_strengths_are_those_of_the_items_rows(tiny_model):
    model = with_items(tiny_model("llama"))
    assert model.item_strengths() == STRENGTHS and list(model.item_strengths()) == list(ITEMS)


@pytest.mark.parametrize("item", ["rome", "the capital of france", "10", "2", 0, 1, 2, 3, -1, -4])
def test_setting_one_changes_its_rows_in_every_layer_and_no_others(tiny_model, item):
    """By its name, or by its place among the items: a name that is a number is a name."""
    model = with_items(tiny_model("gpt2"))
    before = tensors(model)
    name = item if isinstance(item, str) else list(ITEMS)[item]
    model.set_item_strength(item, 3.5)
    strengths = {**STRENGTHS, name: 3.5}
    assert model.item_strengths() == strengths
    assert row_strengths(model) == [expected_rows(strengths)] * len(layers_of(model))
    after = tensors(model)
    others = {key: tensor for key, tensor in before.items() if "engram_strength" not in key}
    assert same_tensors({key: after[key] for key in others}, others)
    model.set_item_strength(item, STRENGTHS[name])
    assert same_tensors(tensors(model), before)


@pytest.mark.parametrize("item", ["2", 3, -1])
def test_restoring_one_sets_it_to_nothing(tiny_model, ids, item):
    model = with_items(tiny_model("llama"))
    model.restore_item(item)
    assert model.item_strengths() == {**STRENGTHS, "2": 0.0}
    without = dict(list(ITEMS.items())[:-1])
    expected = with_items(tiny_model("llama"))
    for layer in layers_of(expected).values():
        right, left, strengths = (tensor.detach() for tensor in layer.factors("default"))
        kept = sum(without.values())
        layer.fill("default", right[:kept], left[:, :kept], strengths[:kept])
    assert close(logits(model, ids), logits(expected, ids), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_multiply_by_the_formula(tiny_model, kind):
    """`y = W~ (x~ - alpha scale B diag(a) A x~)`, in float64."""
    model = with_items(tiny_model(kind), alpha=0.5)
    model.set_scale("default", 3.0)
    model.set_item_strength("rome", -1.0)
    strengths = torch.tensor(expected_rows({**STRENGTHS, "rome": -1.0}), dtype=torch.float64)
    for name, layer in layers_of(model).items():
        absorbs = layer.absorbs_bias("default")
        right, left, _ = (tensor.detach().double() for tensor in layer.factors("default"))
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
        extended = torch.cat([x.double(), torch.ones(5, 1, dtype=torch.float64)], 1) if absorbs else x.double()
        taken = extended @ right.T * strengths @ left.T
        expected = (extended - 1.5 * taken) @ augmented_weight_of(layer, absorbs).T
        with torch.no_grad():
            assert close(layer(x).double(), expected, 1e-5), name
        assert (kind in WITH_BIAS) == absorbs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_with_all_items_restored_it_is_the_base_model_to_the_bit(tiny_model, ids, kind, dtype):
    """Nothing is taken out of the inputs, and nothing is written when merging."""
    base = tiny_model(kind, dtype)
    before, weights = logits(base, ids), {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = with_items(base)
    assert not torch.equal(logits(model, ids), before)
    for item in range(len(ITEMS)):
        model.restore_item(item)
    assert torch.equal(logits(model, ids), before)
    merged = model.merge_and_unload(untie=True)
    assert torch.equal(logits(merged, ids), before)
    assert same_tensors({name: tensor.detach() for name, tensor in merged.state_dict().items()}, weights)


def test_what_extraction_made_can_be_given_back_item_by_item(tiny_model, tokenizer, ids):
    base = tiny_model("llama")
    before = logits(base, ids)
    model = get_peft_model(base, EngramConfig(target_modules=["down_proj"])).eval()
    forget = {"b": FORGET[0], "a": [FORGET[1], "the river lies by rome"]}
    report = extract_items(model, tokenizer, forget, RETAIN, rounds=2)
    assert model.item_strengths() == pytest.approx({item.name: item.strength for item in report.items})
    # random weights know neither answer, so what the tuning settles on may be 0: both items are given a strength
    for name in forget:
        model.set_item_strength(name, 1.0)
    edit = logits(model, ids)
    model.restore_item("b")
    once = logits(model, ids)
    assert not torch.equal(once, edit) and not torch.equal(once, before)
    model.restore_item("a")
    assert torch.equal(logits(model, ids), before)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "item, message",
    [
        ("romes", "no item 'romes'. It has 4; the nearest are .'rome'"),
        ("xyzzy", "no item 'xyzzy'. It has 4, for example .'rome'"),
        (4, "no item 4"), (-5, "no item -5"), (True, "no item True"), (None, "no item None"), (1.0, "no item 1.0"),
    ],
)  # fmt: skip
def test_an_unknown_item_is_refused(tiny_model, item, message):
    model = with_items(tiny_model("llama"))
    for call in (lambda: model.set_item_strength(item, 1.0), lambda: model.restore_item(item)):
        with unchanged(model), pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_strength_that_is_not_finite_is_refused(tiny_model, value):
    model = with_items(tiny_model("llama"))
    with unchanged(model), pytest.raises(ValueError, match="finite"):
        model.set_item_strength("rome", value)


def calls_of(model, adapter_name="default"):
    return (
        lambda: model.item_strengths(adapter_name),
        lambda: model.set_item_strength("rome", 1.0, adapter_name),
        lambda: model.restore_item(0, adapter_name),
    )


def test_an_unknown_adapter_is_refused(tiny_model):
    model = with_items(tiny_model("llama"))
    for call in calls_of(model, "nobody"):
        with unchanged(model), pytest.raises(ValueError, match="Adapter nobody not found.*default"):
            call()


def test_an_adapter_that_was_not_made_item_by_item_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    for call in calls_of(model):
        with unchanged(model), pytest.raises(ValueError, match="not made item by item.*`set_scale`"):
            call()


def test_an_adapter_that_was_filled_anew_has_no_items_any_more(tiny_model, tokenizer):
    model = with_items(tiny_model("llama"))
    with model.disable_adapter():
        found = statistics(model, tokenizer)
    extract_engram(model, *found)
    assert model.peft_config["default"].items is None
    with pytest.raises(ValueError, match="not made item by item"):
        model.item_strengths()


def test_a_merged_adapter_is_refused_and_can_be_looked_at(tiny_model):
    model = with_items(tiny_model("llama"))
    model.merge_adapter()
    assert model.item_strengths() == STRENGTHS
    for call in calls_of(model)[1:]:
        with unchanged(model), pytest.raises(ValueError, match="merged adapter.*unmerge_adapter"):
            call()
    model.unmerge_adapter()
    model.set_item_strength("rome", 7.0)
    assert model.item_strengths() == {**STRENGTHS, "rome": 7.0}


# ------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_strengths_and_items_come_back_to_the_bit(tiny_model, ids, tmp_path, kind, dtype):
    model = with_items(tiny_model(kind, dtype))
    model.set_item_strength("10", 1 / 3)
    model.restore_item("rome")
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model(kind, dtype), tmp_path).eval()
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.item_strengths() == model.item_strengths()


def test_the_order_of_the_items_comes_back(tiny_model, ids, tmp_path):
    """It says which rows are whose."""
    model = with_items(tiny_model("llama"))
    model.save_pretrained(tmp_path)
    assert list(PeftConfig.from_pretrained(tmp_path).items) == list(ITEMS)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path).eval()
    assert list(loaded.item_strengths()) == list(ITEMS)
    for item in ITEMS:
        for each in (loaded, model):
            each.restore_item(item)
        assert row_strengths(loaded) == row_strengths(model), item
        assert torch.equal(logits(loaded, ids), logits(model, ids)), item


def test_more_than_ten_unnamed_items_come_back_in_order(tiny_model, tmp_path):
    items = {str(i): 1 + i % 3 for i in range(12)}
    model = with_items(tiny_model("llama"), items=items, strengths={name: float(name) for name in items})
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    assert list(loaded.item_strengths().items()) == [(name, float(name)) for name in items]


def test_a_config_is_the_same_after_it_was_written_twice(tiny_model, tmp_path):
    model = with_items(tiny_model("llama"))
    model.save_pretrained(tmp_path / "one")
    PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "one").save_pretrained(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "two"))
    assert one["items"] == two["items"]


# ------------------------------------------------------------------------------------------------ sums

OTHER_ITEMS, OTHER_STRENGTHS = {"b": 2, "a": 3}, {"b": 1.5, "a": 0.25}


def two(model, items=OTHER_ITEMS, strengths=OTHER_STRENGTHS, **config):
    return add_items(with_items(model, "first", alpha=0.5), "second", items, strengths, **config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_has_the_items_of_both_and_their_rows(tiny_model, kind):
    model = two(tiny_model(kind), alpha=2.0)
    model.set_scale("second", 3.0)
    model.add_weighted_adapter(["first", "second"], [4.0, -0.5], "both")
    assert list(model.peft_config["both"].items.items()) == [*ITEMS.items(), *OTHER_ITEMS.items()]
    expected = {name: 4.0 * 0.5 * value for name, value in STRENGTHS.items()}
    expected |= {name: -0.5 * 2.0 * 3.0 * value for name, value in OTHER_STRENGTHS.items()}
    assert model.item_strengths("both") == pytest.approx(expected)
    for name, layer in layers_of(model).items():
        total = 4.0 * 0.5 * projection(layer, "first") - 0.5 * 6.0 * projection(layer, "second")
        assert layer.engram_scaling["both"] == 1.0
        assert close(projection(layer, "both"), total, 1e-6), name


@pytest.mark.parametrize("item", ["10", "a"])
def test_an_item_of_a_sum_can_be_given_back(tiny_model, ids, item):
    model = two(tiny_model("llama"))
    model.add_weighted_adapter(["first", "second"], [1.0, 1.0], "both")
    model.restore_item(item, "both")
    model.restore_item(item, "first" if item in ITEMS else "second")
    model.base_model.set_adapter(["first", "second"])
    expected = logits(model, ids)
    model.set_adapter("both")
    assert close(logits(model, ids), expected, 1e-5)


def test_a_sum_is_saved_with_its_items(tiny_model, ids, tmp_path):
    model = two(tiny_model("llama"))
    model.add_weighted_adapter(["second", "first"], [1.0, 1.0], "both")
    model.set_adapter("both")
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "both").eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert list(loaded.item_strengths().items()) == list(model.item_strengths("both").items())


def test_items_of_the_same_name_are_told_apart(tiny_model):
    model = two(tiny_model("llama"), {"rome": 1, "x": 2}, {"rome": 9.0, "x": 1.0})
    model.add_weighted_adapter(["first", "second"], [1.0, 1.0], "both")
    expected = {f"first/{name}": 0.5 * value for name, value in STRENGTHS.items()}
    assert model.item_strengths("both") == {**expected, "second/rome": 9.0, "second/x": 1.0}


@pytest.mark.parametrize("case", ["other layers", "twice", "without items"])
def test_a_sum_whose_rows_do_not_lie_alike_has_no_items(tiny_model, tokenizer, case):
    if case == "other layers":
        model = two(tiny_model("llama"), target_modules=["down_proj"])
    elif case == "twice":
        model = two(tiny_model("llama"))
    else:
        model = twice_edited(tiny_model("llama"), tokenizer)
        put_items(model, "first")
    adapters = ["first", "first"] if case == "twice" else ["first", "second"]
    model.add_weighted_adapter(adapters, [1.0, 1.0], "both")
    assert model.peft_config["both"].items is None
    with pytest.raises(ValueError, match="'both' was not made item by item"):
        model.item_strengths("both")
    for name, layer in layers_of(model).items():
        if "both" in layer.engram_A:
            parts = [layer.engram_scaling[a] * projection(layer, a) for a in adapters if a in layer.engram_A]
            assert close(projection(layer, "both"), sum(parts), 1e-6), name


def test_the_items_of_one_adapter_leave_the_other_alone(tiny_model, ids):
    model = two(tiny_model("gpt2"))
    model.set_adapter("first")
    output = logits(model, ids)
    model.restore_item("a", "second")
    assert torch.equal(logits(model, ids), output)
    assert model.item_strengths("first") == STRENGTHS
    assert model.item_strengths("second") == {"b": 1.5, "a": 0.0}


# ------------------------------------------------------------------------------------------------ merging, exporting


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_it_is_the_base_model_and_merging_can_be_undone_to_the_bit(tiny_model, ids, kind):
    base = tiny_model(kind)
    before = logits(base, ids)
    model = with_items(base)
    model.set_item_strength("2", -0.4)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)
    output, state = logits(model, ids), tensors(model)
    weights = {
        name: augmented_weight_of(layer, layer.absorbs_bias("default")) for name, layer in layers_of(model).items()
    }
    model.merge_adapter()
    assert close(logits(model, ids), output, 1e-4)
    for name, layer in layers_of(model).items():
        expected = weights[name] - weights[name] @ projection(layer)
        assert close(augmented_weight_of(layer, layer.absorbs_bias("default")), expected, 1e-5), name
    model.unmerge_adapter()
    assert same_tensors(tensors(model), state) and torch.equal(logits(model, ids), output)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_as_lora_it_says_the_same(tiny_model, ids, tmp_path, kind):
    model = with_items(tiny_model(kind), alpha=0.5)
    model.restore_item("rome")
    model.set_item_strength("10", 4.0)
    model.base_model.save_as_lora(tmp_path)
    lora = PeftModel.from_pretrained(tiny_model(kind), tmp_path).eval()
    assert lora.peft_config["default"].peft_type == "LORA"
    assert close(logits(lora, ids), logits(model, ids), 1e-4)
    assert not close(logits(lora, ids), logits(tiny_model(kind), ids), 1e-3)
