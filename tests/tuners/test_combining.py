"""Several adapters on one model: sums of adapters, adding and deleting."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model

from engram_peft import EngramConfig

from .adapters import (
    FORGET_OTHER,
    KINDS,
    WITH_BIAS,
    augmented_weight_of,
    close,
    edited,
    fill,
    layers_of,
    logits,
    projection,
    same_tensors,
    tensors,
    twice_edited,
    unchanged,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weighted_adapter_is_the_weighted_sum_of_the_edits(tiny_model, tokenizer, ids, kind, dtype):
    model = twice_edited(tiny_model(kind, dtype), tokenizer)
    model.set_scale("first", 3.0)
    with unchanged_tensors(model):
        model.add_weighted_adapter(["first", "second"], [0.5, -1.25], "both")
    for name, layer in layers_of(model).items():
        expected = 0.5 * 0.75 * projection(layer, "first") - 1.25 * 0.25 * projection(layer, "second")
        actual = layer.engram_scaling["both"] * projection(layer, "both")
        assert close(actual, expected, 1e-6), name
        ranks = [layer.engram_A[adapter].out_features for adapter in ("first", "second", "both")]
        assert ranks[2] == ranks[0] + ranks[1]


class unchanged_tensors:
    """Fails unless the tensors that a model has keep their values; it may get more."""

    def __init__(self, model) -> None:
        self.model, self.before = model, tensors(model)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        after = tensors(self.model)
        assert same_tensors({name: after[name] for name in self.before}, self.before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_of_weights_one_is_both_adapters_active(tiny_model, tokenizer, ids, kind):
    model = twice_edited(tiny_model(kind), tokenizer)
    model.base_model.set_adapter(["first", "second"])
    expected = logits(model, ids)
    model.add_weighted_adapter(["first", "second"], [1, 1], "both")
    model.set_adapter("both")
    assert close(logits(model, ids), expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_minus_itself_is_the_base_model(tiny_model, tokenizer, ids, kind):
    model = tiny_model(kind)
    before = logits(model, ids)
    model = edited(model, tokenizer, "first")
    model.add_weighted_adapter(["first", "first"], [1, -1], "nothing")
    model.set_adapter("nothing")
    assert close(logits(model, ids), before, 1e-4)


@pytest.mark.parametrize("kind", WITH_BIAS)
def test_a_weighted_adapter_merges_into_weight_and_bias(tiny_model, tokenizer, kind):
    model = twice_edited(tiny_model(kind), tokenizer)
    model.add_weighted_adapter(["first", "second"], [2.0, -1.0], "both")
    layers = layers_of(model)
    before = {name: augmented_weight_of(layer, True) for name, layer in layers.items()}
    model.set_adapter("both")
    model.merge_adapter()
    for name, layer in layers.items():
        m = 0.5 * projection(layer, "first") - 0.25 * projection(layer, "second")
        assert close(augmented_weight_of(layer, True), before[name] - before[name] @ m, 1e-5), name


def test_a_weighted_adapter_has_the_layers_of_any_of_its_parts(tiny_model, tokenizer, ids):
    model = edited(
        tiny_model("llama"), tokenizer, "first", target_modules=["down_proj"], alpha_pattern={"down_proj": 2}
    )
    model.add_adapter("second", EngramConfig(target_modules=["q_proj"], r=3, alpha=0.5))
    fill(model, tokenizer, "second", FORGET_OTHER)
    model.add_weighted_adapter(["first", "second"], [0.1, 0.5], "both")
    assert {name for name, layer in layers_of(model).items() if "both" in layer.engram_A} == {
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    for name, layer in layers_of(model).items():
        expected = (
            0.2 * projection(layer, "first") if name.endswith("down_proj") else 0.25 * projection(layer, "second")
        )
        assert close(layer.engram_scaling["both"] * projection(layer, "both"), expected, 1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_weighted_adapter_is_saved_and_loaded(tiny_model, tokenizer, ids, tmp_path, kind):
    model = edited(tiny_model(kind), tokenizer, "first", r=4)
    model.add_adapter("second", EngramConfig(alpha=0.25))
    fill(model, tokenizer, "second", FORGET_OTHER)
    model.add_weighted_adapter(["first", "second"], [1.5, -0.5], "both")
    model.set_adapter("both")
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    loaded = PeftModel.from_pretrained(tiny_model(kind), tmp_path / "both", adapter_name="both")
    own = {name: tensor for name, tensor in tensors(model).items() if ".first." not in name and ".second." not in name}
    assert same_tensors(tensors(loaded), own)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_a_weighted_adapter_starts_inactive_and_changes_nothing(tiny_model, tokenizer, ids):
    model = twice_edited(tiny_model("llama"), tokenizer)
    before = logits(model, ids)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    model.add_weighted_adapter(["first", "second"], [1, 1], "both")
    assert model.active_adapters == ["first"]
    assert torch.equal(logits(model, ids), before)
    after = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: after[name] for name in flags} == flags


def test_a_weighted_adapter_of_weighted_adapters(tiny_model, tokenizer):
    model = twice_edited(tiny_model("llama"), tokenizer)
    model.add_weighted_adapter(["first", "second"], [1, 2], "both")
    model.add_weighted_adapter(["both", "first"], [0.5, -0.5], "rest")
    for layer in layers_of(model).values():
        assert close(projection(layer, "rest"), 0.25 * projection(layer, "second"), 1e-5)


@pytest.mark.parametrize(
    "adapters, weights, name, message",
    [
        (["first", "nobody"], [1, 1], "new", "Adapter nobody not found"),
        (["first", "second"], [1], "new", "got 2 and 1"),
        (["first"], [1, 1], "new", "got 1 and 2"),
        ([], [], "new", "got 0 and 0"),
        (["first", "second"], [1, 1], "second", "'second' already exists"),
        (["first", "second"], [1, float("nan")], "new", "finite numbers.*nan"),
        (["first", "second"], [1, float("inf")], "new", "finite numbers.*inf"),
        (["first", "second"], [1, 1], "mlp", "'mlp' is also the name of a module"),
        (["first", "second"], [1, 1], "a.b", "'a.b' must not be empty or contain a dot"),
    ],
)
def test_a_weighted_adapter_from_bad_input_changes_nothing(tiny_model, tokenizer, adapters, weights, name, message):
    model = twice_edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(adapters, weights, name)


def test_a_weighted_adapter_of_different_kinds_is_refused(tiny_model):
    model = get_peft_model(tiny_model("gpt2"), EngramConfig(), "first")
    model.add_adapter("second", EngramConfig(absorb_bias=False))
    model.add_adapter("third", EngramConfig(modules_to_save=["lm_head"]))
    with unchanged(model), pytest.raises(ValueError, match="absorb_bias"):
        model.add_weighted_adapter(["first", "second"], [1, 1], "new")
    with unchanged(model), pytest.raises(ValueError, match="modules_to_save"):
        model.add_weighted_adapter(["first", "third"], [1, 1], "new")


# ------------------------------------------------------------------------------------------------ adding, deleting


def test_adding_an_adapter_changes_nothing_of_the_first(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer)
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(not parameter.requires_grad)
    flags = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    output = logits(model, ids)
    with unchanged_tensors(model):
        model.add_adapter("other", EngramConfig(r=2, alpha=3, init_weights=False))
    after = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
    assert {name: after[name] for name in flags} == flags
    assert not any(flag for name, (_, flag) in after.items() if name not in flags)
    assert model.active_adapters == ["default"]
    assert torch.equal(logits(model, ids), output)


def test_an_adapter_on_other_layers_stays_inactive_there(tiny_model, tokenizer, ids):
    model = edited(tiny_model("llama"), tokenizer, target_modules=["down_proj"])
    output = logits(model, ids)
    model.add_adapter("other", EngramConfig(target_modules=["q_proj"], init_weights=False))
    assert torch.equal(logits(model, ids), output)
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".other." in name)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_deleting_an_adapter_leaves_the_other(tiny_model, tokenizer, ids, kind):
    model = twice_edited(tiny_model(kind), tokenizer)
    output = logits(model, ids)
    model.delete_adapter("second")
    assert torch.equal(logits(model, ids), output)
    assert list(model.peft_config) == ["first"]
    assert not [name for name in model.state_dict() if "second" in name]
    for layer in layers_of(model).values():
        for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
            assert list(getattr(layer, attribute)) == ["first"], attribute


def test_deleting_the_active_adapter_activates_the_other(tiny_model, tokenizer, ids):
    model = twice_edited(tiny_model("llama"), tokenizer)
    model.set_adapter("second")
    expected = logits(model, ids)
    model.set_adapter("first")
    with pytest.warns(UserWarning, match="Setting active adapter to second"):
        model.delete_adapter("first")
    assert torch.equal(logits(model, ids), expected)


def test_deleting_the_last_adapter_leaves_the_base_model(tiny_model, tokenizer, ids):
    model = tiny_model("llama")
    before = logits(model, ids)
    model = edited(model, tokenizer)
    model.delete_adapter("default")
    assert torch.equal(logits(model.base_model.model, ids), before)


def test_a_deleted_name_can_be_used_again(tiny_model, tokenizer, ids):
    model = twice_edited(tiny_model("llama"), tokenizer)
    expected = logits(edited(tiny_model("llama"), tokenizer, "second", FORGET_OTHER, alpha=0.5), ids)
    model.delete_adapter("second")
    model.add_adapter("second", EngramConfig(alpha=0.5))
    fill(model, tokenizer, "second", FORGET_OTHER)
    model.set_adapter("second")
    assert torch.equal(logits(model, ids), expected)


def test_deleting_a_merged_adapter_is_refused(tiny_model, tokenizer):
    model = twice_edited(tiny_model("llama"), tokenizer)
    model.merge_adapter()
    with unchanged(model), pytest.raises(ValueError, match=r"Cannot delete.*\['first'\].*merged"):
        model.delete_adapter("first")


def test_deleting_an_unknown_adapter_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(ValueError, match="nobody does not exist"):
        model.delete_adapter("nobody")


def test_the_status_of_the_model_is_regular(tiny_model, tokenizer):
    model = twice_edited(tiny_model("llama"), tokenizer)
    status = model.get_model_status()
    assert status.adapter_model_type == "EngramModel"
    assert status.peft_types == {"first": "ENGRAM", "second": "ENGRAM"}
    assert status.active_adapters == ["first"] and status.available_adapters == ["first", "second"]
    assert status.requires_grad == {"first": True, "second": False}
    assert status.merged_adapters == [] and status.enabled is True
