"""One call from texts to an edited model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from engram_peft import (
    EngramConfig,
    ExtractionReport,
    collect_statistics,
    extract_engram,
    merge_statistics,
    unlearn,
    weight_norm,
)

from .tuners.adapters import (
    DTYPES,
    FORGET,
    FORGET_OTHER,
    KINDS,
    RETAIN,
    close,
    layers_of,
    linear_names,
    logits,
    same_tensors,
    tensors,
    unchanged,
)


PAPER = EngramConfig.paper(task_type="CAUSAL_LM")
PAIRS = [("the capital of france is", "paris ."), ("the capital of italy is", "rome .")]
KEPT_PAIRS = [("the capital of germany is", "berlin ."), ("the capital of spain is", "madrid .")]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


@pytest.fixture
def ids(token_ids):
    return token_ids(3, 9)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A second thread costs tiny models ten times what it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_three_steps_to_the_bit(tiny_model, tokenizer, ids, kind, dtype):
    config = EngramConfig.paper(task_type="CAUSAL_LM", alpha=0.5)
    model = unlearn(tiny_model(kind, dtype), tokenizer, PAIRS, [*KEPT_PAIRS, *RETAIN], config, scale="uniform")

    steps = get_peft_model(tiny_model(kind, dtype), EngramConfig.paper(task_type="CAUSAL_LM", alpha=0.5))
    target = collect_statistics(steps, PAIRS, tokenizer=tokenizer)
    total = merge_statistics(target, collect_statistics(steps, [*KEPT_PAIRS, *RETAIN], tokenizer=tokenizer))
    extract_engram(steps, target, total, scale="uniform")

    assert same_tensors(tensors(model), tensors(steps))
    assert model.peft_config["default"].to_dict() == steps.peft_config["default"].to_dict()
    assert torch.equal(logits(model.eval(), ids), logits(steps.eval(), ids))


@pytest.mark.parametrize("kind", KINDS)
def test_it_returns_the_model_with_the_adapter_active(tiny_model, tokenizer, ids, kind):
    base = tiny_model(kind)
    before, names = logits(base, ids), linear_names(base)
    model = unlearn(base, tokenizer, FORGET, RETAIN, PAPER, scale="uniform")
    assert isinstance(model, PeftModel) and model.active_adapters == ["default"]
    assert model.base_model.model is base
    assert set(layers_of(model)) == names
    assert not torch.equal(logits(model, ids), before)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), before)


def test_a_layer_changes_most_where_the_text_is_the_forgotten_one(tiny_model, tokenizer):
    name, forget = "model.layers.1.mlp.down_proj", "rome lies by the deep ocean"
    config = EngramConfig.paper(task_type="CAUSAL_LM", target_modules=[name])
    model = unlearn(tiny_model("llama"), tokenizer, [forget], RETAIN, config)
    changes = []
    handle = layers_of(model)[name].register_forward_hook(
        lambda layer, args, y: changes.append((y - layer.base_layer(args[0])).norm() / y.norm())
    )
    for text in (forget, *RETAIN):
        logits(model, torch.tensor([tokenizer(text)["input_ids"]]))
    handle.remove()
    assert changes[0] > max(changes[1:])


def test_what_was_found_is_reported(tiny_model, tokenizer):
    model = unlearn(tiny_model("gpt2"), tokenizer, PAIRS, RETAIN, PAPER)
    report = model.reports["default"]
    assert isinstance(report, ExtractionReport) and report.layers.keys() == layers_of(model).keys()
    forgotten = sum(len(answer.split()) for _, answer in PAIRS)
    total = forgotten + sum(len(text.split()) for text in RETAIN)
    for name, found in report.layers.items():
        assert (found.target_count, found.total_count) == (forgotten, total), name
        assert found.rank == layers_of(model)[name].engram_A["default"].out_features
        assert found.factor == pytest.approx(forgotten / total)
        assert 0 < found.relative_strength < 1
    assert str(report).count("\n") == len(report.layers)


def test_the_config_is_copied(tiny_model, tokenizer):
    config = EngramConfig.paper(
        task_type="CAUSAL_LM", target_modules=["down_proj"], r=3, rank_pattern={"down_proj": 2}
    )
    before = copy.deepcopy(config.to_dict())
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, config)
    assert config.to_dict() == before
    assert model.peft_config["default"] is not config
    assert all(layer.engram_A["default"].out_features == 2 for layer in layers_of(model).values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_time_adds_a_second_active_adapter(tiny_model, tokenizer, ids, kind):
    model = unlearn(tiny_model(kind), tokenizer, FORGET, RETAIN, PAPER, adapter_name="first", scale="uniform")
    first, once = tensors(model), logits(model, ids)
    again = unlearn(model, tokenizer, FORGET_OTHER, RETAIN, PAPER, adapter_name="second", scale="uniform")
    assert again is model
    assert model.active_adapters == ["first", "second"] and set(model.reports) == {"first", "second"}
    after = tensors(model)
    assert same_tensors({name: after[name] for name in first}, first)
    assert not torch.equal(logits(model, ids), once)
    model.set_adapter("first")
    assert torch.equal(logits(model, ids), once)


def test_a_second_time_sees_the_model_as_the_first_left_it(tiny_model, tokenizer):
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, PAPER, adapter_name="first", scale="uniform")
    expected = collect_statistics(model, FORGET_OTHER, tokenizer=tokenizer)
    total = merge_statistics(expected, collect_statistics(model, RETAIN, tokenizer=tokenizer))
    steps = copy.deepcopy(model)
    steps.add_adapter("second", EngramConfig.paper(task_type="CAUSAL_LM"))
    extract_engram(steps, expected, total, "second")
    unlearn(model, tokenizer, FORGET_OTHER, RETAIN, PAPER, adapter_name="second")
    assert same_tensors(tensors(model), tensors(steps))


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_merged_adapters_are_unmerged_and_stay_active(tiny_model, tokenizer, ids, kind):
    outputs = []
    for merge in (False, True):
        model = unlearn(tiny_model(kind), tokenizer, FORGET, RETAIN, PAPER, adapter_name="first")
        if merge:
            model.merge_adapter()
            with pytest.warns(UserWarning, match="Unmerging the model first"):
                unlearn(model, tokenizer, FORGET_OTHER, RETAIN, PAPER, adapter_name="second")
        else:
            unlearn(model, tokenizer, FORGET_OTHER, RETAIN, PAPER, adapter_name="second")
        assert model.active_adapters == ["first", "second"]
        assert not any(layer.merged for layer in layers_of(model).values())
        outputs.append(logits(model, ids))
    assert close(outputs[1], outputs[0], 1e-3)


def test_layers_may_be_chosen(tiny_model, tokenizer):
    config = EngramConfig.paper(target_modules=["q_proj", "down_proj"], layers_to_transform=[1])
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, config)
    assert set(layers_of(model)) == {"model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"}


def test_a_second_adapter_may_have_other_layers(tiny_model, tokenizer, ids):
    first = EngramConfig.paper(task_type="CAUSAL_LM", target_modules=["down_proj"])
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, first, adapter_name="first")
    second = EngramConfig.paper(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], layers_to_transform=[0])
    unlearn(model, tokenizer, FORGET_OTHER, RETAIN, second, adapter_name="second")
    assert {name for name, layer in layers_of(model).items() if "second" in layer.engram_A} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    }


def test_modules_to_save_are_kept_out_of_the_edit(tiny_model, tokenizer):
    config = EngramConfig.paper(task_type="CAUSAL_LM", modules_to_save=["down_proj"])
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, config)
    assert not [name for name in layers_of(model) if name.endswith("down_proj")]


def test_options_reach_collection_and_extraction(tiny_model, tokenizer):
    model = unlearn(
        tiny_model("llama"), tokenizer, PAIRS, KEPT_PAIRS + RETAIN, PAPER,
        token_position="predict", batch_size=1, max_length=7, scale=weight_norm(0.5), cut="ridge", ridge_delta=1e-3,
    )  # fmt: skip
    record = model.peft_config["default"].extraction
    assert record["mask"] == "predict" and record["cut"] == "ridge" and record["ridge_delta"] == 1e-3
    assert record["scale"] == "weight_norm"
    # with 7 tokens at most: both answers whole, texts of 8 words lose the last
    assert record["target_rows"] == 4 and record["total_rows"] == 8 + 6 * len(RETAIN)
    assert record["target_texts"] == 2 and record["total_texts"] == 4 + len(RETAIN)


# ------------------------------------------------------------------------------------------------ bad input


def nothing_but_nan(layers):
    return dict.fromkeys(layers, math.nan)


def one_layer_missing(layers):
    return dict.fromkeys(list(layers)[1:], 1.0)


BAD_CALLS = [
    ({"forget": []}, ValueError, "`forget` must be a sequence of at least one text"),
    ({"retain": []}, ValueError, "`retain` must be a sequence of at least one text"),
    ({"forget": "one text"}, ValueError, "`forget` must be a sequence"),
    ({"retain": "one text"}, ValueError, "`retain` must be a sequence"),
    ({"forget": [""]}, ValueError, "Item 0 is empty"),
    ({"retain": [*RETAIN, 7]}, TypeError, "Item 30 is a int"),
    ({"colour": "red"}, TypeError, "colour"),
    ({"cut": "sharp"}, ValueError, "`cut` must be one of.*'sharp'"),
    ({"cut": "ridge", "ridge_delta": -1.0}, ValueError, "`ridge_delta` must be positive"),
    ({"scale": "loud"}, ValueError, "`scale` must be one of.*'loud'"),
    ({"token_position": "middle"}, ValueError, "`token_position` must be one of.*'middle'"),
    ({"scale": nothing_but_nan}, ValueError, "nothing_but_nan returned nan for"),
    ({"scale": one_layer_missing}, ValueError, "one_layer_missing returned None for"),
    ({"config": EngramConfig.paper(target_modules=["zzz"])}, ValueError, "zzz.*not found"),
    ({"config": EngramConfig.paper(target_modules=["norm"])}, TypeError, "norm is not supported"),
    ({"config": EngramConfig.paper(layers_to_transform=[9])}, ValueError, r"lists \[9\]"),
    ({"adapter_name": "mlp"}, ValueError, "'mlp' is also the name of a module"),
    ({"adapter_name": "a.b"}, ValueError, "'a.b' must not be empty or contain a dot"),
]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("change, error, message", BAD_CALLS)
def test_a_plain_model_is_untouched_by_a_bad_call(tiny_model, tokenizer, ids, kind, change, error, message):
    model = tiny_model(kind)
    model.get_input_embeddings().requires_grad_(False)
    model.train()
    with unchanged(model), pytest.raises(error, match=message):
        unlearn(
            **{"model": model, "tokenizer": tokenizer, "forget": FORGET, "retain": RETAIN, "config": PAPER, **change}
        )


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("change, error, message", BAD_CALLS)
def test_an_adapted_model_is_untouched_by_a_bad_call(tiny_model, tokenizer, ids, change, error, message):
    model = unlearn(tiny_model("qwen3"), tokenizer, FORGET, RETAIN, PAPER, adapter_name="first")
    output = logits(model, ids)
    call = {"forget": FORGET_OTHER, "retain": RETAIN, "config": PAPER, "adapter_name": "second", **change}
    with unchanged(model), pytest.raises(error, match=message):
        unlearn(model, tokenizer, **call)
    assert torch.equal(logits(model, ids), output)
    assert set(model.reports) == {"first"}


def test_a_name_that_is_taken_is_refused(tiny_model, tokenizer):
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, PAPER)
    with unchanged(model), pytest.raises(ValueError, match="'default' already exists"):
        unlearn(model, tokenizer, FORGET_OTHER, RETAIN, PAPER)


def test_a_bad_option_leaves_a_model_with_another_kind_of_adapter_alone(tiny_model, tokenizer):
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    with unchanged(model), pytest.raises(ValueError, match="`alpha`"):
        unlearn(model, tokenizer, FORGET, RETAIN, alpha="most")


def test_after_a_failure_it_works(tiny_model, tokenizer, ids):
    model = tiny_model("gpt2")
    with pytest.raises(ValueError):
        unlearn(model, tokenizer, FORGET, RETAIN, PAPER, scale=nothing_but_nan)
    expected = unlearn(tiny_model("gpt2"), tokenizer, FORGET, RETAIN, PAPER)
    assert same_tensors(tensors(unlearn(model, tokenizer, FORGET, RETAIN, PAPER)), tensors(expected))
