"""Bad input ends in an error that says what is wrong, and the model is as it was."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.utils.error import NoMatchingPeftModuleError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engram_peft import EngramConfig

from .adapters import edited, layers_of, logits, same_tensors, tensors, unchanged


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["alpha", "scale", "alpha_pattern"])
def test_a_strength_that_is_not_finite_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be a finite number.*{value}"):
        EngramConfig(**{name: {"down_proj": value} if name == "alpha_pattern" else value})


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
@pytest.mark.parametrize("name", ["r", "rank_pattern"])
def test_a_rank_that_is_not_a_positive_integer_is_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` should be a positive integer.*{value}"):
        EngramConfig(**{name: {"down_proj": value} if name == "rank_pattern" else value})


@pytest.mark.parametrize(
    "config, message",
    [
        ({"target_modules": ".*", "layers_to_transform": [1]}, "`layers_to_transform` cannot be used"),
        ({"target_modules": ".*", "layers_pattern": "layers"}, "`layers_pattern` cannot be used"),
        ({"target_modules": ["q_proj"], "layers_pattern": "layers"}, "`layers_to_transform` must also be specified"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        EngramConfig(**config)


# ------------------------------------------------------------------------------------------------ injection

BAD_TARGETS = [
    ({"target_modules": ["down_porj"]}, NoMatchingPeftModuleError, "down_porj.*not found.*nearest names.*'down_proj'"),
    ({"target_modules": ["zzz"]}, NoMatchingPeftModuleError, "zzz.*not found.*can be edited end in.*'down_proj'"),
    ({"target_modules": r".*\.mlp\.dwn_proj"}, NoMatchingPeftModuleError, "dwn_proj not found"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1, 5]}, ValueError, r"lists \[5\], but.*layers 0 to 1"),
    ({"layers_to_transform": [7]}, ValueError, r"lists \[7\], but.*layers 0 to 1"),
    ({"layers_to_transform": 7}, ValueError, r"lists \[7\], but.*layers 0 to 1"),
    ({"layers_to_transform": [-1]}, ValueError, r"lists \[-1\], but.*layers 0 to 1"),
    (
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "blocks"},
        ValueError,
        "no numbered layers",
    ),
    ({"target_modules": ["norm"]}, TypeError, "model.norm is not supported.*`LlamaRMSNorm`.*Conv1D.*register_layer"),
    ({"target_modules": ["q_proj", "input_layernorm"]}, TypeError, "input_layernorm is not supported"),
    ({"target_modules": r".*\.(q_proj|mlp)"}, TypeError, "mlp is not supported"),
    ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, ValueError, "exclude"),
]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("config, error, message", BAD_TARGETS)
def test_a_plain_model_is_untouched_by_a_config_that_does_not_fit(tiny_model, config, error, message):
    model = tiny_model("llama")
    with unchanged(model), pytest.raises(error, match=message):
        get_peft_model(model, EngramConfig(**config))


@pytest.mark.parametrize("config, error, message", BAD_TARGETS)
def test_an_adapted_model_is_untouched_by_a_config_that_does_not_fit(tiny_model, tokenizer, config, error, message):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(error, match=message):
        model.add_adapter("second", EngramConfig(**config))


BAD_NAMES = [
    ("mlp", "'mlp' is also the name of a module.*model.layers.0.mlp"),
    ("model", "'model' is also the name of a module"),
    ("layers", "'layers' is also the name of a module"),
    ("0", "'0' is also the name of a module"),
    ("down_proj", "'down_proj' is also the name of a module"),
    ("a.b", "'a.b' must not be empty or contain a dot"),
    ("", "must not be empty"),
]


@pytest.mark.parametrize("name, message", BAD_NAMES)
def test_a_name_that_saving_could_not_tell_apart_is_refused(tiny_model, tokenizer, tmp_path, name, message):
    model = tiny_model("llama")
    with unchanged(model), pytest.raises(ValueError, match=message):
        get_peft_model(model, EngramConfig(), adapter_name=name)
    model = edited(model, tokenizer)
    with unchanged(model), pytest.raises(ValueError, match=message):
        model.add_adapter(name, EngramConfig())
    model.save_pretrained(tmp_path)
    with unchanged(model), pytest.raises(ValueError, match=message):
        model.load_adapter(tmp_path, adapter_name=name)


@pytest.mark.parametrize(
    "name",
    [
        "base_layer",
        "engram_A",
        "engram_strength",
        "weight",
        "bias",
        "half",
        "keys",
        "training",
        "engram",
        "default_2",
        "foo",
    ],
)
def test_a_name_is_refused_or_saved_apart_from_the_others(tiny_model, tokenizer, ids, tmp_path, name):
    model = edited(tiny_model("gpt2"), tokenizer, "other")
    try:
        with unchanged_if_refused(model):
            model.add_adapter(name, EngramConfig(init_weights=False))
    except ValueError as error:
        assert repr(name) in str(error)
        plain = tiny_model("gpt2")
        with unchanged(plain), pytest.raises(ValueError, match=repr(name)):
            get_peft_model(plain, EngramConfig(), adapter_name=name)
        return
    model.set_adapter(name)
    model.save_pretrained(tmp_path)
    for adapter in (name, "other"):
        factors = [getattr(layer, part)[adapter] for layer in layers_of(model).values() for part in PARTS]
        saved = load_file(tmp_path / adapter / "adapter_model.safetensors")
        assert len(saved) == sum(len(factor.state_dict()) for factor in factors)
    loaded = PeftModel.from_pretrained(tiny_model("gpt2"), tmp_path / name, adapter_name=name)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


PARTS = ("engram_A", "engram_B", "engram_strength")


@contextmanager
def unchanged_if_refused(model):
    before = tensors(model)
    try:
        yield
    except ValueError:
        assert same_tensors(tensors(model), before)
        raise


def test_a_name_that_is_taken_is_refused(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    with unchanged(model), pytest.raises(ValueError, match="'default' already exists"):
        model.add_adapter("default", EngramConfig())


# ------------------------------------------------------------------------------------------------ files


def saved(tiny_model, tokenizer, folder, kind="llama", **config):
    edited(tiny_model(kind), tokenizer, **config).save_pretrained(folder)
    return folder / "adapter_model.safetensors"


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:20])


def empty(path):
    path.write_bytes(b"")


def overwrite(path):
    path.write_bytes(b"no tensors here" * 20)


def drop_one(path):
    file = load_file(path)
    file.pop(sorted(file)[0])
    save_file(file, path)


def drop_all(path):
    save_file({}, path)


def add_one(path):
    file = load_file(path)
    file["base_model.model.model.layers.9.mlp.down_proj.engram_A.weight"] = torch.zeros(2, 2)
    save_file(file, path)


def reshape_one(path):
    file = load_file(path)
    name = sorted(file)[0]
    file[name] = torch.zeros(len(file[name]) + 1, *file[name].shape[1:])
    save_file(file, path)


def break_shapes_of_another_model(path):
    file = {name: torch.zeros([2 * size for size in tensor.shape]) for name, tensor in load_file(path).items()}
    save_file(file, path)


BAD_FILES = [
    (truncate, "truncated or not a safetensors file"),
    (cut_in_the_header, "truncated or not a safetensors file"),
    (empty, "truncated or not a safetensors file"),
    (overwrite, "truncated or not a safetensors file"),
    (drop_one, "lacks 1 of .* tensors"),
    (drop_all, "lacks"),
    (add_one, "no place for.*layers.9.mlp.down_proj"),
    (reshape_one, "another model or config.*expected"),
    (break_shapes_of_another_model, "another model or config.*expected"),
]


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("damage, message", BAD_FILES)
def test_a_plain_model_is_untouched_by_a_file_that_does_not_fit(
    tiny_model, tokenizer, tmp_path, damage, message, low_cpu_mem_usage
):
    damage(saved(tiny_model, tokenizer, tmp_path))
    model = tiny_model("llama")
    with unchanged(model), pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(model, tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("damage, message", BAD_FILES)
def test_an_adapted_model_is_untouched_by_a_file_that_does_not_fit(
    tiny_model, tokenizer, ids, tmp_path, damage, message, low_cpu_mem_usage
):
    damage(saved(tiny_model, tokenizer, tmp_path))
    model = edited(tiny_model("llama"), tokenizer)
    output = logits(model, ids)
    with unchanged(model), pytest.raises(ValueError, match=message):
        model.load_adapter(tmp_path, adapter_name="second", low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(model, ids), output)


@pytest.mark.parametrize("damage", [truncate, cut_in_the_header, empty, overwrite])
def test_a_model_computes_the_same_after_transformers_met_a_truncated_file(
    tiny_model, tokenizer, ids, tmp_path, damage
):
    damage(saved(tiny_model, tokenizer, tmp_path))
    model = tiny_model("llama")
    output = logits(model, ids)
    with pytest.raises(SafetensorError):
        model.load_adapter(str(tmp_path))
    assert torch.equal(logits(model, ids), output)


def test_the_adapter_of_another_model_is_refused(tiny_model, tokenizer, tmp_path):
    saved(tiny_model, tokenizer, tmp_path, kind="gpt2")
    model = tiny_model("llama")
    with unchanged(model), pytest.raises(ValueError, match="not found in the base model|another model"):
        PeftModel.from_pretrained(model, tmp_path)


def test_the_adapter_of_a_deeper_model_is_refused(tiny_model, tokenizer, tmp_path):
    saved(tiny_model, tokenizer, tmp_path, target_modules=["down_proj"], layers_to_transform=[1])
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"layers_to_transform": [11]}))
    model = tiny_model("llama")
    with unchanged(model), pytest.raises(ValueError, match=r"lists \[11\]"):
        PeftModel.from_pretrained(model, tmp_path)


@pytest.mark.parametrize("change", [{"alpha": math.nan}, {"r": 0}, {"scale": math.inf}])
def test_a_config_file_with_bad_values_is_refused(tiny_model, tokenizer, tmp_path, change):
    saved(tiny_model, tokenizer, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    model = tiny_model("llama")
    with unchanged(model), pytest.raises(ValueError, match="should be a"):
        PeftModel.from_pretrained(model, tmp_path)
