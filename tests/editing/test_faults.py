"""What the reference gets wrong in silence ends here in the right result, or in an error that names the layer or argument."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from engram_peft import (
    EngramConfig,
    Moment,
    Statistics,
    collect_statistics,
    extract_engram,
    merge_statistics,
    unlearn,
)

from .reference import covariance_of, pinv, relative_error


PAPER = EngramConfig.paper(task_type="CAUSAL_LM")


def rows(count, width=8, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def adapted(module, **config):
    return get_peft_model(module, EngramConfig.paper(**config))


# ------------------------------------------------------------------------------------------------ shared weights


class SharedWeight(nn.Module):
    """Two layers that hold one Parameter and see different inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_layers_that_share_a_weight_are_not_merged_unasked():
    model = adapted(SharedWeight(), target_modules=["first", "second"])
    before = model.get_base_model().first.weight.clone()
    with pytest.raises(ValueError, match="shares its weight.*untie"):
        model.merge_adapter()
    assert torch.equal(model.get_base_model().first.weight, before)


def test_layers_that_share_a_weight_are_each_edited_once():
    """Each subtracts its own projection from the shared weight, not from what the other one left of it."""
    plain = SharedWeight()
    weight = plain.first.weight.detach().double().clone()
    model = adapted(plain, target_modules=["first", "second"])
    target = collect_statistics(model, [rows(4)])
    total = merge_statistics(target, collect_statistics(model, [rows(60, seed=1)]))
    extract_engram(model, target, total, scale="uniform")
    x = rows(10, seed=2)
    unmerged = model(x)
    merged = model.merge_and_unload(untie=True)
    for name in ("first", "second"):
        expected = weight - weight @ target.covariance(name) @ pinv(total.covariance(name))
        assert relative_error(merged.get_submodule(name).weight, expected) < 1e-5
    assert relative_error(merged(x), unmerged) < 1e-5


def test_edit_of_a_tied_head_leaves_the_embedding_alone(tiny_model, token_ids):
    """Unmerged the tie stays, and what the model reads is what it read before."""
    model = adapted(tiny_model("qwen3"), target_modules=["lm_head"])
    target = collect_statistics(model, [token_ids(1, 6)])
    total = merge_statistics(target, collect_statistics(model, [token_ids(8, 30, seed=1)]))
    plain = tiny_model("qwen3")
    extract_engram(model, target, total, scale="uniform")
    base = model.get_base_model()
    assert base.lm_head.get_base_layer().weight is base.model.embed_tokens.weight
    assert torch.equal(base.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    ids = token_ids(2, 6, seed=2)
    assert torch.equal(base.model(ids).last_hidden_state, plain.model(ids).last_hidden_state)
    assert relative_error(model(ids).logits, plain(ids).logits) > 1e-3


# ------------------------------------------------------------------------------------------------ how layers are called


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), Conv1D(8, 8)

    def forward(self, x):
        return self.conv(x=self.linear(input=x))


def test_layers_that_are_called_by_keyword_are_seen():
    model, x = ByKeyword(), rows(20)
    statistics = collect_statistics(model, [x])
    for name, given in (("linear", x), ("conv", model.linear(x).detach())):
        expected = covariance_of(torch.cat([given, torch.ones(20, 1)], dim=1))
        assert relative_error(statistics.covariance(name), expected) < 1e-6


def test_inference_mode_gives_the_same(tiny_model, token_ids):
    model, ids = tiny_model("llama"), token_ids(2, 6)
    expected = collect_statistics(model, [ids])
    with torch.inference_mode():
        found = collect_statistics(model, [ids])
    for name in expected.moments:
        assert torch.equal(found.covariance(name), expected.covariance(name)), name


def test_layer_that_does_not_see_a_row_a_token_is_named():
    """A layer on the pooled states of a sequence has no row for a token's mask."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.pooler(self.tokens(x).mean(1))

    x, mask = rows(20).view(4, 5, 8), torch.ones(4, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="pooler.*exclude_modules"):
        collect_statistics(Pooled(), [x], mask_fn=lambda batch: mask)
    found = collect_statistics(Pooled(), [x], mask_fn=lambda batch: mask, exclude_modules=["pooler"])
    assert found.counts == {"tokens": 20}


# ------------------------------------------------------------------------------------------------ models


def test_model_on_the_meta_device_is_refused(tiny_model, token_ids):
    with pytest.raises(ValueError, match="meta device"):
        collect_statistics(tiny_model("llama").to("meta"), [token_ids(1, 4)])


def test_items_of_an_encoder_decoder_model_are_refused_by_name(tiny_tokenizer):
    config = T5Config(vocab_size=99, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(TypeError, match="T5ForConditionalGeneration.*encoder-decoder.*paper"):
        unlearn(T5ForConditionalGeneration(config), tiny_tokenizer(), ["one two"], ["three four"])


def test_factors_of_lora_are_not_layers(tiny_model, token_ids):
    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    assert not [name for name in collect_statistics(model, [token_ids(1, 4)]).moments if "lora" in name]
    with pytest.raises(ValueError, match="not found"):
        collect_statistics(model, [token_ids(1, 4)], target_modules=["lora_A"])


# ------------------------------------------------------------------------------------------------ statistics


@pytest.fixture
def one_layer():
    """A model of one layer with an empty adapter, target rows and all rows."""
    model = adapted(nn.Sequential(nn.Linear(8, 8, bias=False)), target_modules=["0"])
    target = collect_statistics(model, [rows(3)])
    return model, target, merge_statistics(target, collect_statistics(model, [rows(50, seed=1)]))


def renamed(statistics, prefix):
    return Statistics({f"{prefix}{name}": m for name, m in statistics.moments.items()}, statistics.provenance)


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "_orig_mod."])
def test_names_with_the_prefix_of_a_wrapper_are_refused(one_layer, prefix):
    model, target, total = one_layer
    with pytest.raises(ValueError, match=r"holds no statistics of \['0'\]"):
        extract_engram(model, renamed(target, prefix), renamed(total, prefix))


def test_empty_statistics_are_refused(one_layer):
    model, _, total = one_layer
    with pytest.raises(ValueError, match=r"`target` holds no statistics of \['0'\]"):
        extract_engram(model, Statistics({}), total)


@pytest.mark.parametrize("role", ["target", "total"])
@pytest.mark.parametrize("count", [3, 30])
def test_nan_in_statistics_is_refused_by_the_name_of_the_layer(one_layer, role, count):
    """It never reaches the weights."""
    model, target, total = one_layer
    broken = rows(count)
    broken[0, 0] = float("nan")
    moment = Moment(8)
    moment.add(broken)
    given = {"target": target, "total": total, role: Statistics({"0": moment})}
    if role == "target":
        given["total"] = merge_statistics(given["target"], total)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"\b0\b"):
        extract_engram(model, given["target"], given["total"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("count", [2, 30])
def test_target_of_zeros_is_no_edit(one_layer, count):
    """The rows of a layer that the target leaves silent."""
    model, _, total = one_layer
    silent = collect_statistics(model, [torch.zeros(count, 8)])
    x = rows(5, seed=3)
    before = model(x)
    report = extract_engram(model, silent, merge_statistics(silent, total), scale="uniform")
    assert torch.equal(model(x), before)
    assert "0" in str(report)


@pytest.mark.parametrize("count", [2, 30])
def test_layer_that_is_always_silent_is_not_edited(count, tmp_path):
    """Its reference has no direction to invert. The other layer is edited as ever, and the adapter can be read back."""

    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.alive, self.dead = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.alive(x) + self.dead(x * 0)

    model = adapted(Dead(), target_modules=["alive", "dead"])
    target = collect_statistics(model, [rows(count)])
    total = merge_statistics(target, collect_statistics(model, [rows(60, seed=1)]))
    report = extract_engram(model, target, total, scale="uniform")
    base = model.get_base_model()
    weight, x = base.alive.get_base_layer().weight.detach().double(), rows(5, seed=3)
    expected = x.double() @ (weight - weight @ target.covariance("alive") @ pinv(total.covariance("alive"))).mT
    assert relative_error(model(x), expected) < 1e-5
    assert "dead" in str(report)
    assert torch.equal(base.dead(x), base.dead.get_base_layer()(x))
    model.save_pretrained(tmp_path)
    plain = Dead()
    plain.load_state_dict({"alive.weight": weight, "dead.weight": base.dead.get_base_layer().weight})
    assert relative_error(PeftModel.from_pretrained(plain, tmp_path)(x), model(x)) < 1e-6


def test_target_without_anything_else_is_projected_away(one_layer):
    """All is the target's: every eigenvalue is 1, and its rows give nothing any more."""
    model, target, _ = one_layer
    report = extract_engram(model, target, target)
    assert report.layers["0"].eigenvalues.tolist() == pytest.approx([1.0, 1.0, 1.0], rel=1e-6)
    assert float(model(rows(3)).norm()) < 1e-4


def test_single_row_is_enough():
    model = adapted(nn.Sequential(nn.Linear(8, 8, bias=False)), target_modules=["0"])
    target = collect_statistics(model, [rows(1)])
    total = merge_statistics(target, collect_statistics(model, [rows(50, seed=1)]))
    report = extract_engram(model, target, total, scale="uniform")
    layer = model.get_base_model()[0]
    right, left, _ = layer.factors("default")
    expected = target.covariance("0") @ pinv(total.covariance("0"))
    assert report.layers["0"].rank == 1
    assert relative_error(left @ right, expected) < 1e-5


def test_statistics_of_a_model_of_another_name_give_a_warning(tiny_model, token_ids, caplog):
    """Fine-tunes of one model have one configuration: which of them was meant, only the user knows."""
    plain = tiny_model("llama")
    plain.config._name_or_path = "org/base"
    target = collect_statistics(plain, [token_ids(1, 4)])
    total = merge_statistics(target, collect_statistics(plain, [token_ids(8, 30, seed=1)]))
    other = tiny_model("llama")
    other.config._name_or_path = "org/tuned"
    with caplog.at_level(logging.WARNING):
        extract_engram(adapted(other), target, total)
    assert "org/base" in caplog.text and "org/tuned" in caplog.text


# ------------------------------------------------------------------------------------------------ one call


@pytest.mark.parametrize("role", ["forget", "retain"])
@pytest.mark.parametrize("items", [[], "one two"])
def test_unlearn_refuses_what_is_no_list_of_texts(tiny_model, tiny_tokenizer, role, items):
    data = {"forget": ["one two"], "retain": ["three four"], role: items}
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=f"`{role}`"):
        unlearn(model, tiny_tokenizer(), **data)
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize("option", [{"scale": "counts"}, {"cut": "svd"}, {"rank_fraction": 0.0}], ids=str)
def test_unlearn_refuses_bad_options_before_it_runs_the_model(tiny_model, tiny_tokenizer, option):
    model, calls = tiny_model("llama"), []
    model.model.register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=next(iter(option))):
        unlearn(model, tiny_tokenizer(), ["one two"], ["three four"], PAPER, **option)
    assert calls == []


def test_unlearn_refuses_unknown_options_before_it_runs_the_model(tiny_model, tiny_tokenizer):
    model, calls = tiny_model("llama"), []
    model.model.register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(TypeError, match="rank_fracton"):
        unlearn(model, tiny_tokenizer(), ["one two"], ["three four"], PAPER, rank_fracton=0.5)
    assert calls == []


def test_unlearn_refuses_a_model_with_a_learned_prompt(tiny_model, tiny_tokenizer):
    """The edit would be made without the prompt."""
    model = get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="PROMPT_TUNING.*get_base_model"):
        unlearn(model, tiny_tokenizer(), ["one two"], ["three four"], PAPER)
