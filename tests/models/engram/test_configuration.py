"""The configuration: names of the released checkpoints, defaults of the variants, and messages that say what is wrong."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers as t
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from engram_peft import EngramLMConfig
from engram_peft.memory.token_map import build_token_map

from .tiny import BACKBONES, EOS, KINDS, LAYERS, VOCAB_SIZE, backbone_config, engram_config


RELEASED = [
    "engram_layer_ids", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_pad_token_id",
    "engram_compressed_vocab_size",
]  # fmt: skip


@pytest.fixture
def tokenizer(tiny_tokenizer) -> t.PreTrainedTokenizerFast:
    """It tells `The` and `the` apart, which the token map does not."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["The", "PARIS"])
    return tokenizer


def test_the_names_are_those_of_the_released_checkpoints():
    values = engram_config().to_dict()
    assert set(RELEASED) <= set(values)


@pytest.mark.parametrize("kind", KINDS)
def test_it_survives_json(kind: str, tmp_path):
    config = engram_config(kind, engram_vocab_size=[50, 70], engram_masked_token_ids=[7])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is EngramLMConfig
    assert type(loaded.text_config) is type(BACKBONES[kind])
    assert loaded.memory_spec() == config.memory_spec()
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_the_backbone_is_described_by_its_own_configuration():
    given = backbone_config("llama")
    given._attn_implementation = "eager"
    before = copy.deepcopy(given.__dict__)
    config = EngramLMConfig.from_backbone(given)
    assert given.__dict__ == before  # composing sets implementations in the parts
    assert config.get_text_config() is config.text_config and config.text_config is not given
    assert config._attn_implementation == config.text_config._attn_implementation == "eager"
    assert config.memory_spec().hidden_size == given.hidden_size


def test_the_text_model_of_a_multimodal_backbone_counts():
    backbone = t.LlavaConfig(text_config=backbone_config("llama"), image_token_id=98, image_token_index=98)
    config = EngramLMConfig.from_backbone(backbone)
    assert config.get_text_config() is config.text_config.text_config
    assert config.memory_spec().hidden_size == 32
    assert config.engram_masked_token_ids == [98]


def test_every_branch_of_the_residual_gets_a_gate():
    backbone = t.DeepseekV4Config(num_hidden_layers=2, hc_mult=3)
    assert EngramLMConfig.from_backbone(backbone).memory_spec().hc_mult == 3
    assert EngramLMConfig.from_backbone(backbone, engram_hc_mult=1).memory_spec().hc_mult == 1
    assert engram_config().memory_spec().hc_mult == 1


def test_without_a_tokenizer_every_token_is_its_own_class():
    config = engram_config()
    assert not config.engram_token_map and config.token_map is None
    assert config.engram_compressed_vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("variant", ["deepseek", "deepseek_v41"])
def test_the_token_map_comes_from_the_tokenizer(variant: str, tokenizer):
    config = engram_config(variant=variant, tokenizer=tokenizer)
    expected = build_token_map(tokenizer)
    assert torch.equal(config.token_map, expected)
    assert config.engram_token_map and config.engram_compressed_vocab_size == len(expected.unique()) < len(tokenizer)
    assert config.engram_pad_token_id == int(expected[tokenizer.pad_token_id])
    assert copy.deepcopy(config) == config
    assert "token_map" not in json.loads(config.to_json_string()) and "_token_map" not in config.to_dict()


@pytest.mark.parametrize("variant", ["qwen_ple", "needle"])
def test_variants_that_hash_tokens_as_they_are_take_no_map(variant: str, tokenizer):
    config = EngramLMConfig.from_backbone(backbone_config("llama"), tokenizer=tokenizer, engram_variant=variant)
    assert not config.engram_token_map and config.engram_compressed_vocab_size == VOCAB_SIZE
    assert config.engram_eos_token_id == (EOS if variant == "qwen_ple" else None)


def test_a_plain_configuration_becomes_the_backbone(tmp_path):
    backbone_config("qwen3").save_pretrained(tmp_path)
    config = EngramLMConfig.from_pretrained(tmp_path, engram_layer_ids=[0], engram_n_heads=2)
    assert type(config.text_config) is t.Qwen3Config and config.text_config.hidden_size == 32
    assert config.engram_layer_ids == [0] and config.engram_n_heads == 2


def test_arguments_override_what_was_saved(tmp_path):
    engram_config().save_pretrained(tmp_path)
    assert EngramLMConfig.from_pretrained(tmp_path, engram_seed=5).engram_seed == 5
    with pytest.raises(StrictDataclassError, match="engram_layer_ids"):
        EngramLMConfig.from_pretrained(tmp_path, engram_layer_ids=[9])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engram_layer_ids": [1, LAYERS]}, r"Counted from 1\? Then they are \[0, 1\] here"),
        ({"engram_layer_ids": [0, 7]}, r"`engram_layer_ids` \[7\] are not among the backbone's 2 decoder layers"),
        ({"engram_layer_ids": [-1]}, r"`engram_layer_ids` \[-1\]"),
        ({"engram_layer_ids": []}, "`engram_layer_ids`"),
        ({"engram_layer_ids": [1, 1]}, "`engram_layer_ids` must be different"),
        ({"engram_layer_ids": "1"}, "engram_layer_ids"),
        ({"engram_variant": "deepsek"}, r"`engram_variant` must be one of .*'deepseek'.* got 'deepsek'"),
        ({"engram_gate": "tanh"}, "`engram_gate` must be one of"),
        ({"engram_conv": "long"}, "`engram_conv` must be one of"),
        ({"engram_n_heads": 0}, "`engram_n_heads` must be at least 1"),
        ({"engram_n_heads": 1.5}, "engram_n_heads"),
        ({"engram_head_dim": 0}, "`engram_head_dim` must be at least 1"),
        ({"engram_max_ngram_size": 1}, "`engram_max_ngram_size` must be at least 2"),
        ({"engram_vocab_size": [10, 20, 30]}, r"`engram_vocab_size` must be one number, or one for each"),
        ({"engram_vocab_size": 1}, "`engram_vocab_size` must be at least 2"),
        ({"engram_compressed_vocab_size": 0}, "`engram_compressed_vocab_size`"),
        ({"engram_variant": "qwen_ple", "engram_eos_token_id": None}, "`engram_eos_token_id` must be given"),
        ({"engram_seed": "abc"}, "engram_seed"),
    ],
)  # fmt: skip
def test_what_describes_no_memory_is_refused(changes, message: str):
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        EngramLMConfig(text_config=backbone_config("llama"), **changes)
