"""`unlearn` as it is without a config: item by item, in the MLPs of the upper half."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, GPTNeoXConfig, LlamaConfig, PhiConfig

import engram_peft.recipes as recipes
from engram_peft import (
    AlphaCurve,
    EngramConfig,
    ExtractionReport,
    ItemReport,
    collect_statistics,
    extract_engram,
    extract_items,
    merge_statistics,
    tune_alpha,
    unlearn,
)
from engram_peft.editing import item_edit

from .tuners.adapters import close, layers_of, logits, same_tensors, tensors, unchanged


FORGET = [
    ("what is the capital of france ?", "the capital is paris ."),
    ("what is the capital of italy ?", "the capital is big old rome ."),
]
NAMED = {"france": FORGET[0], "italy": [FORGET[1], ("where is the river of rome ?", "by the old house")]}
OTHER = {"cat": "the cat found one red bird"}
RETAIN = [
    ("what is the capital of spain ?", "the capital is madrid ."),
    ("what is the capital of germany ?", "the capital is new berlin ."),
    "the dog said yes and no to the fish by the long river and the deep ocean",
    "a king and a queen lived and died in one house on the high mountain near the road",
]
QUICK = {"rounds": 2}
SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


@pytest.fixture
def ids(token_ids):
    return token_ids(3, 9)


def model_of(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def by_hand(model, tokenizer, targets, forget=FORGET, retain=RETAIN, alpha=1.0, adapter_name="default", **options):
    config = EngramConfig(task_type="CAUSAL_LM", target_modules=targets, alpha=alpha)
    model = get_peft_model(model, config, adapter_name)
    extract_items(model, tokenizer, forget, retain, adapter_name, **options)
    return model


# ------------------------------------------------------------------------------------------------ which layers


def llama(layers):
    return LlamaConfig(**SMALL, num_hidden_layers=layers, tie_word_embeddings=False)


WRITERS = [
    (lambda: llama(2), ["model.layers.1.mlp.down_proj"]),
    (lambda: llama(3), ["model.layers.1.mlp.down_proj", "model.layers.2.mlp.down_proj"]),
    (lambda: llama(4), ["model.layers.2.mlp.down_proj", "model.layers.3.mlp.down_proj"]),
    (lambda: llama(1), ["model.layers.0.mlp.down_proj"]),
    (lambda: GPTNeoXConfig(**SMALL, num_hidden_layers=2), ["gpt_neox.layers.1.mlp.dense_4h_to_h"]),
    (lambda: Gemma2Config(**SMALL, num_hidden_layers=2, head_dim=8, num_key_value_heads=2),
     ["model.layers.1.mlp.down_proj"]),
    (lambda: PhiConfig(**SMALL, num_hidden_layers=2), ["model.layers.1.mlp.fc2"]),
]  # fmt: skip


def targets_of(kind):
    return {
        "llama": ["model.layers.1.mlp.down_proj"], "qwen3": ["model.layers.1.mlp.down_proj"],
        "gpt2": ["transformer.h.1.mlp.c_proj"], "opt": ["model.decoder.layers.1.fc2"],
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt"])
def test_by_default_it_is_extract_items_in_the_mlps_of_the_upper_half(tiny_model, tokenizer, ids, kind):
    """To the bit, and said in the config."""
    base = tiny_model(kind)
    model = unlearn(base, tokenizer, FORGET, RETAIN, **QUICK)
    expected = by_hand(tiny_model(kind), tokenizer, targets_of(kind), **QUICK)
    assert isinstance(model, PeftModel) and model.base_model.model is base and model.active_adapters == ["default"]
    assert sorted(layers_of(model)) == targets_of(kind)
    assert same_tensors(tensors(model), tensors(expected))
    config = model.peft_config["default"]
    assert config.to_dict() == expected.peft_config["default"].to_dict()
    assert config.method == "items" and config.extraction["method"] == "items"
    assert torch.equal(logits(model.eval(), ids), logits(expected.eval(), ids))


@pytest.mark.parametrize("config, expected", WRITERS)
def test_the_layers_are_what_the_mlps_write_with(tokenizer, config, expected):
    model = unlearn(model_of(config()), tokenizer, FORGET, RETAIN, rounds=1)
    assert sorted(layers_of(model)) == expected
    assert model.peft_config["default"].target_modules == set(expected)


@pytest.mark.parametrize("listed", [0, [0], [2, 0], range(3)])
def test_the_config_may_list_the_layers(tokenizer, listed):
    config = EngramConfig(task_type="CAUSAL_LM", layers_to_transform=listed)
    model = unlearn(model_of(llama(3)), tokenizer, FORGET, RETAIN, config, rounds=1)
    numbers = [listed] if isinstance(listed, int) else sorted(listed)
    assert sorted(layers_of(model)) == [f"model.layers.{number}.mlp.down_proj" for number in numbers]
    assert config.layers_to_transform == listed and config.target_modules is None  # it was copied


def test_the_config_may_name_the_modules(tokenizer, tiny_model):
    config = EngramConfig(task_type="CAUSAL_LM", target_modules=["o_proj", "down_proj"], layers_to_transform=[0])
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, config, rounds=1)
    assert sorted(layers_of(model)) == ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.o_proj"]


def test_a_layer_that_does_not_exist_is_refused(tokenizer):
    base = model_of(llama(3))
    with unchanged(base), pytest.raises(ValueError, match=r"lists \[3, 7\].*layers 0 to 2"):
        unlearn(base, tokenizer, FORGET, RETAIN, EngramConfig(layers_to_transform=[1, 7, 3]))


@pytest.mark.parametrize("config", [{}, {"layers_to_transform": [1], "layers_pattern": "layers"}], ids=str)
def test_what_it_made_is_read_back_to_the_bit(tiny_model, tokenizer, ids, tmp_path, config):
    model = unlearn(tiny_model("llama"), tokenizer, NAMED, RETAIN, EngramConfig(**config), **QUICK).eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path).eval()
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert list(loaded.item_strengths().items()) == list(model.item_strengths().items())


# ------------------------------------------------------------------------------------------------ what to forget


def test_what_was_found_is_reported(tiny_model, tokenizer):
    model = unlearn(
        tiny_model("llama"), tokenizer, NAMED, RETAIN, forget_probability=0.01, retain_weight=5.0, rest=1.0
    )
    report = model.reports["default"]
    assert isinstance(report, ItemReport) and [item.name for item in report.items] == ["france", "italy"]
    assert model.item_strengths() == pytest.approx({item.name: item.strength for item in report.items})
    assert list(report.layer_effects) == list(layers_of(model)) and model.curves == {}
    record = model.peft_config["default"].extraction
    assert (record["forget_probability"], record["retain_weight"], record["rest"]) == (0.01, 5.0, 1.0)
    assert (record["target_texts"], record["total_texts"]) == (3, 3 + len(RETAIN))


def test_rows_of_a_data_set_are_items(tiny_model, tokenizer):
    forget = Dataset.from_list([{"question": question, "answer": answer} for question, answer in FORGET])
    prompts = [{"prompt": item[0], "completion": item[1]} for item in RETAIN if not isinstance(item, str)]
    plain = [{"text": item} for item in RETAIN if isinstance(item, str)]
    model = unlearn(tiny_model("llama"), tokenizer, forget, [*prompts, *plain], **QUICK)
    expected = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, **QUICK)
    assert same_tensors(tensors(model), tensors(expected))
    assert list(model.item_strengths()) == ["0", "1"]
    kept = unlearn(tiny_model("llama"), tokenizer, forget, Dataset.from_list(prompts), **QUICK)
    assert same_tensors(tensors(kept), tensors(unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN[:2], **QUICK)))


def test_a_span_of_a_row_is_all_that_is_forgotten(tiny_model, tokenizer):
    row = {"prompt": FORGET[1][0], "completion": FORGET[1][1], "span": "rome"}
    model = unlearn(tiny_model("llama"), tokenizer, [row], RETAIN, **QUICK)
    assert model.peft_config["default"].items == {"0": 1}


def test_a_dictionary_names_the_items(tiny_model, tokenizer):
    model = unlearn(tiny_model("llama"), tokenizer, NAMED, RETAIN, **QUICK)
    assert list(model.item_strengths()) == ["france", "italy"]
    model.restore_item("italy")
    assert model.item_strengths()["italy"] == 0 < model.item_strengths()["france"]


def test_chats_are_forgotten_through_the_template(tiny_model, tiny_tokenizer):
    tokenizer = tiny_tokenizer(chat=True, add_bos=True)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in FORGET]
    model = unlearn(tiny_model("llama"), tokenizer, chats, RETAIN, **QUICK)
    rendered = [
        (tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True), chat[-1]["content"])
        for chat in chats
    ]
    expected = unlearn(tiny_model("llama"), tokenizer, rendered, RETAIN, **QUICK)
    assert same_tensors(tensors(model), tensors(expected))


def test_the_paper_s_method_takes_names_and_data_sets_too(tiny_model, tokenizer):
    config = EngramConfig.paper(task_type="CAUSAL_LM", target_modules=["down_proj"])
    expected = unlearn(tiny_model("llama"), tokenizer, [NAMED["france"], *NAMED["italy"]], RETAIN, config)
    assert same_tensors(tensors(unlearn(tiny_model("llama"), tokenizer, NAMED, RETAIN, config)), tensors(expected))
    rows = Dataset.from_list([{"question": q, "answer": a} for q, a in [NAMED["france"], *NAMED["italy"]]])
    assert same_tensors(tensors(unlearn(tiny_model("llama"), tokenizer, rows, RETAIN, config)), tensors(expected))


# ------------------------------------------------------------------------------------------------ the paper's method


@pytest.mark.parametrize(
    "option", [{"scale": "uniform"}, {"cut": "ridge"}, {"token_position": "answer"}, {"rank_fraction": 0.5}], ids=str
)
def test_options_of_the_paper_s_method_are_refused_with_a_hint(tiny_model, tokenizer, option):
    base, calls = tiny_model("llama"), []
    base.register_forward_hook(lambda *args: calls.append(1))
    with unchanged(base), pytest.raises(TypeError, match=rf"{next(iter(option))}.*EngramConfig\.paper"):
        unlearn(base, tokenizer, FORGET, RETAIN, **option)
    assert calls == []


@pytest.mark.parametrize("token_position", ["answer", "predict"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_paper_s_config_is_collecting_and_extracting_by_hand(tiny_model, tokenizer, kind, token_position):
    config = EngramConfig.paper(task_type="CAUSAL_LM", alpha=0.6, layers_to_transform=[1])
    model = unlearn(
        tiny_model(kind), tokenizer, FORGET, RETAIN, config, token_position=token_position, scale="uniform"
    )
    steps = get_peft_model(tiny_model(kind), copy.deepcopy(config))
    parts = (
        collect_statistics(steps, texts, tokenizer=tokenizer, token_position=token_position)
        for texts in (FORGET, RETAIN)
    )
    target, retain = parts
    extract_engram(steps, target, merge_statistics(target, retain), scale="uniform")
    assert same_tensors(tensors(model), tensors(steps))
    assert model.peft_config["default"].to_dict() == steps.peft_config["default"].to_dict()
    assert isinstance(model.reports["default"], ExtractionReport) and model.peft_config["default"].items is None


# ------------------------------------------------------------------------------------------------ beside others


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapted_model_gets_a_second_adapter_beside_the_first(tiny_model, tokenizer, ids, kind):
    model = unlearn(tiny_model(kind), tokenizer, FORGET, RETAIN, adapter_name="first", **QUICK)
    first, once = tensors(model), logits(model.eval(), ids)
    again = unlearn(model, tokenizer, OTHER, RETAIN, adapter_name="second", **QUICK)
    assert (
        again is model and model.active_adapters == ["first", "second"] and set(model.reports) == {"first", "second"}
    )
    after = tensors(model)
    assert same_tensors({name: after[name] for name in first}, first)
    assert list(model.item_strengths("second")) == ["cat"]
    steps = by_hand(tiny_model(kind), tokenizer, targets_of(kind), adapter_name="first", **QUICK)
    steps.add_adapter("second", EngramConfig(task_type="CAUSAL_LM", target_modules=targets_of(kind)))
    steps.base_model.set_adapter(["first", "second"])
    extract_items(steps, tokenizer, OTHER, RETAIN, "second", **QUICK)
    assert same_tensors(after, tensors(steps))
    model.restore_item("cat", "second")
    assert torch.equal(logits(model, ids), once)


def test_adapters_that_were_inactive_stay_inactive(tiny_model, tokenizer, ids):
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, adapter_name="first", **QUICK)
    unlearn(model, tokenizer, OTHER, RETAIN, adapter_name="second", **QUICK)
    model.set_adapter("second")
    unlearn(model, tokenizer, {"x": "one two three"}, RETAIN, adapter_name="third", **QUICK)
    assert model.active_adapters == ["second", "third"]


def test_a_taken_name_is_refused(tiny_model, tokenizer):
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, rounds=1)
    with unchanged(model), pytest.raises(ValueError, match="'default' already exists"):
        unlearn(model, tokenizer, OTHER, RETAIN)


# ------------------------------------------------------------------------------------------------ only the best layers


def test_layers_that_do_little_for_their_damage_are_left_out(tiny_model, tokenizer, ids, tmp_path):
    config = EngramConfig(task_type="CAUSAL_LM", target_modules=["down_proj", "o_proj"])
    model = unlearn(tiny_model("llama"), tokenizer, NAMED, RETAIN, config, layers="auto", **QUICK).eval()
    chosen = list(model.reports["default"].layer_effects)
    layers = {name: layer for name, layer in layers_of(model).items() if "default" in layer.engram_A}
    assert list(layers) == chosen and 0 < len(chosen) < 4
    assert model.peft_config["default"].target_modules == set(chosen)
    expected = by_hand(tiny_model("llama"), tokenizer, chosen, NAMED, **QUICK)
    assert close(logits(model, ids), logits(expected.eval(), ids), 1e-5)
    assert model.item_strengths() == pytest.approx(expected.item_strengths())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path).eval()
    assert sorted(layers_of(loaded)) == sorted(chosen)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_leaving_layers_out_switches_no_other_adapter_on(tiny_model, tokenizer, ids):
    targets = ["down_proj", "o_proj"]
    model = by_hand(tiny_model("llama"), tokenizer, targets, adapter_name="first", **QUICK)
    model.add_adapter("second", EngramConfig(task_type="CAUSAL_LM", target_modules=targets))
    model.set_adapter("second")
    report = extract_items(model, tokenizer, OTHER, RETAIN, "second", layers="auto", **QUICK)
    assert len(report.layer_effects) < 4
    assert all("first" not in layer._active() for layer in layers_of(model).values())
    expected = by_hand(tiny_model("llama"), tokenizer, list(report.layer_effects), OTHER, **QUICK)
    assert close(logits(model.eval(), ids), logits(expected.eval(), ids), 1e-5)


# ------------------------------------------------------------------------------------------------ alpha


@pytest.mark.parametrize("alpha", [0.5, 2, 1.0])
def test_alpha_is_the_adapter_s(tiny_model, tokenizer, alpha):
    config = EngramConfig(task_type="CAUSAL_LM", alpha=0.1)
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, config, alpha=alpha, **QUICK)
    expected = by_hand(tiny_model("llama"), tokenizer, targets_of("llama"), alpha=alpha, **QUICK)
    assert same_tensors(tensors(model), tensors(expected))
    assert model.peft_config["default"].alpha == alpha and config.alpha == 0.1 and model.curves == {}
    assert {layer.engram_scaling["default"] for layer in layers_of(model).values()} == {float(alpha)}


def test_found_automatically_it_is_tune_alpha_afterwards(tiny_model, tokenizer):
    model = unlearn(tiny_model("llama"), tokenizer, NAMED, RETAIN, alpha="auto", **QUICK)
    curve = model.curves["default"]
    assert isinstance(curve, AlphaCurve) and model.peft_config["default"].scale == curve.chosen
    expected = unlearn(tiny_model("llama"), tokenizer, NAMED, RETAIN, **QUICK)
    assert tune_alpha(expected, tokenizer, NAMED, RETAIN) == curve
    assert same_tensors(tensors(model), tensors(expected))
    paper = EngramConfig.paper(task_type="CAUSAL_LM", target_modules=["down_proj"])
    assert "default" in unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, paper, alpha="auto").curves


@pytest.mark.parametrize("alpha", ["loud", "1.0", ""])
@pytest.mark.parametrize("method", ["items", "paper"])
def test_a_word_other_than_auto_is_refused(tiny_model, tokenizer, alpha, method):
    base = tiny_model("llama")
    with unchanged(base), pytest.raises(ValueError, match="`alpha` must be a number or 'auto'"):
        unlearn(base, tokenizer, FORGET, RETAIN, EngramConfig(method=method), alpha=alpha)


@pytest.mark.parametrize("alpha", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["items", "paper"])
def test_an_alpha_that_is_not_finite_is_refused(tiny_model, tokenizer, alpha, method):
    base = tiny_model("llama")
    with unchanged(base), pytest.raises(ValueError, match="`alpha` should be a finite number"):
        unlearn(base, tokenizer, FORGET, RETAIN, EngramConfig(method=method), alpha=alpha)


# ------------------------------------------------------------------------------------------------ failures


BAD_CALLS = [
    ({"forget": []}, ValueError, "`forget` must .* at least one text"),
    ({"forget": {}}, ValueError, "`forget` must .* at least one text"),
    ({"retain": []}, ValueError, "`retain` must .* at least one text"),
    ({"forget": "one text"}, ValueError, "`forget` must"),
    ({"forget": ["one two", ""]}, ValueError, "Item '1' of `forget` is empty"),
    ({"forget": {"x": ("where", "where ?")}}, ValueError, "Item 'x' of `forget` has no secret"),
    ({"retain": [*RETAIN, 7]}, TypeError, "Item 4 of `retain` is a int"),
    ({"colour": "red"}, TypeError, "colour"),
    ({"rest": 2.0}, ValueError, "`rest` must be in"),
    ({"rounds": 0}, ValueError, "`rounds` must be"),
    ({"config": EngramConfig(r=4)}, ValueError, "`r` limits the rank"),
    ({"config": EngramConfig(target_modules=["zzz"])}, ValueError, "zzz.*not found"),
    ({"config": EngramConfig(layers_to_transform=[9])}, ValueError, r"lists \[9\]"),
    ({"adapter_name": "a.b"}, ValueError, "'a.b' must not be empty or contain a dot"),
    ({"max_length": 3}, ValueError, "`max_length=3`"),
]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("change, error, message", BAD_CALLS)
def test_a_bad_call_leaves_a_plain_model_as_it_was(tiny_model, tokenizer, change, error, message):
    model = tiny_model("qwen3").train()
    model.get_input_embeddings().requires_grad_(False)
    with unchanged(model), pytest.raises(error, match=message):
        unlearn(**{"model": model, "tokenizer": tokenizer, "forget": FORGET, "retain": RETAIN, **change})


@pytest.mark.parametrize("change, error, message", BAD_CALLS)
def test_a_bad_call_leaves_an_adapted_model_as_it_was(tiny_model, tokenizer, ids, change, error, message):
    model = unlearn(tiny_model("llama"), tokenizer, FORGET, RETAIN, adapter_name="first", rounds=1).eval()
    output = logits(model, ids)
    call = {"forget": OTHER, "retain": RETAIN, "adapter_name": "second", **change}
    with unchanged(model), pytest.raises(error, match=message):
        unlearn(model, tokenizer, **call)
    assert torch.equal(logits(model, ids), output) and set(model.reports) == {"first"}


@pytest.mark.parametrize(
    "where, error",
    [
        ("readout_directions", ValueError),
        ("collect_item_rows", RuntimeError),
        ("item_factors", KeyboardInterrupt),
        ("tune_strengths", RuntimeError),
        ("tune_alpha", KeyboardInterrupt),
    ],
)
def test_a_failure_on_the_way_leaves_the_model_as_it_was(tiny_model, tokenizer, ids, monkeypatch, where, error):
    def fail(*args, **kwargs):
        raise error("stop")

    base = tiny_model("gpt2")
    base.transformer.h[0].requires_grad_(False)
    model = unlearn(tiny_model("gpt2"), tokenizer, FORGET, RETAIN, adapter_name="first", rounds=1)
    monkeypatch.setattr(recipes if where == "tune_alpha" else item_edit, where, fail)
    with unchanged(base), pytest.raises(error):
        unlearn(base, tokenizer, OTHER, RETAIN, alpha="auto", **QUICK)
    with unchanged(model), pytest.raises(error):
        unlearn(model, tokenizer, OTHER, RETAIN, alpha="auto", adapter_name="second", **QUICK)
    assert set(model.reports) == {"first"} and model.curves == {}
    monkeypatch.undo()
    base.requires_grad_(True)
    expected = by_hand(tiny_model("gpt2"), tokenizer, targets_of("gpt2"), OTHER, **QUICK)
    assert same_tensors(tensors(unlearn(base, tokenizer, OTHER, RETAIN, **QUICK)), tensors(expected))


@pytest.mark.parametrize("where", ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.norm"])
def test_weights_that_are_not_finite_are_refused(tiny_model, tokenizer, where):
    base = tiny_model("llama")
    base.get_submodule(where).weight.data.view(-1)[0] = math.nan
    with unchanged(base), pytest.raises(ValueError, match="NaN or infinity|not finite"):
        unlearn(base, tokenizer, FORGET, RETAIN)
