"""Layers that share their weight with another layer."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics

from .adapters import TIED, close, edited, layers_of, logits, projection, same_tensors, tensors, unchanged


def head_and_embedding(model) -> tuple[nn.Module, nn.Module]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    return getattr(head, "base_layer", head), base.get_input_embeddings()


@pytest.mark.parametrize("kind", TIED)
def test_an_edited_tied_head_leaves_the_embedding_alone(tiny_model, tokenizer, ids, kind):
    model = tiny_model(kind)
    embedding, tied = model.get_input_embeddings().weight, tensors(model)["lm_head.weight"]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
    model = edited(model, tokenizer, target_modules=["lm_head"])
    assert model.get_base_model().get_input_embeddings().weight is embedding
    assert head_and_embedding(model)[0].weight is embedding
    assert torch.equal(embedding, tied)
    h = hidden.double()
    expected = (h - 0.25 * h @ projection(layers_of(model)["lm_head"]).T) @ tied.double().T
    assert close(logits(model, ids).double(), expected, 1e-5)
    assert not close(expected, h @ tied.double().T, 1e-2)


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("kind", TIED)
def test_merging_into_a_tied_head_is_refused(tiny_model, tokenizer, kind, merge):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    with unchanged(model), pytest.raises(ValueError, match="lm_head shares its weight with .*untie=True"):
        getattr(model, merge)()


@pytest.mark.parametrize("kind", TIED)
def test_the_refusal_names_the_other_layer(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    name = {"qwen3": "model.embed_tokens", "gpt2": "transformer.wte"}[kind]
    with pytest.raises(ValueError, match=name):
        model.merge_adapter()


@pytest.mark.parametrize("kind", TIED)
def test_other_layers_of_a_tied_model_merge_and_keep_the_tie(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.merge_adapter()
    head, embedding = head_and_embedding(model)
    assert head.weight is embedding.weight
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("kind", TIED)
def test_untying_gives_the_head_a_weight_of_its_own(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    expected = logits(model, ids)
    embedding = model.get_base_model().get_input_embeddings().weight
    values = embedding.detach().clone()
    model.merge_adapter(untie=True)
    head, input_embedding = head_and_embedding(model)
    assert input_embedding.weight is embedding and torch.equal(embedding, values)
    assert head.weight is not embedding and head.weight.data_ptr() != embedding.data_ptr()
    assert model.config.tie_word_embeddings is False
    assert close(logits(model, ids), expected, 1e-5)


@pytest.mark.parametrize("kind", TIED)
def test_unmerging_ties_again(tiny_model, tokenizer, ids, kind):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    embedding, before, output = head_and_embedding(model)[1].weight, tensors(model), logits(model, ids)
    model.merge_adapter(untie=True)
    model.unmerge_adapter()
    head, input_embedding = head_and_embedding(model)
    assert head.weight is embedding and input_embedding.weight is embedding
    assert model.config.tie_word_embeddings is True
    assert same_tensors(tensors(model), before)
    assert torch.equal(logits(model, ids), output)


def unmerge_by_disabling(model, ids):
    with model.disable_adapter():
        logits(model, ids)


def unmerge_by_activating(model, ids):
    model.set_adapter("default")


def unmerge_by_unloading(model, ids):
    model.unload()


@pytest.mark.filterwarnings("ignore:Adapter cannot be set when the model is merged")
@pytest.mark.parametrize("unmerge", [unmerge_by_disabling, unmerge_by_activating, unmerge_by_unloading])
@pytest.mark.parametrize("kind", TIED)
def test_the_config_says_whether_the_head_is_tied_however_it_was_unmerged(tiny_model, tokenizer, ids, kind, unmerge):
    base = tiny_model(kind)
    model = edited(base, tokenizer, target_modules=["lm_head"])
    model.merge_adapter(untie=True)
    unmerge(model, ids)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    assert getattr(head, "base_layer", head).weight is embedding.weight
    assert base.config.tie_word_embeddings is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TIED)
def test_an_untied_merged_model_saves_and_loads_the_edited_function(tiny_model, tokenizer, ids, tmp_path, kind, dtype):
    model = edited(tiny_model(kind, dtype), tokenizer, target_modules=["lm_head", r"mlp.c_proj", "down_proj"])
    unmerged = logits(model, ids)
    plain = model.merge_and_unload(untie=True)
    expected = logits(plain, ids)
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    # `.to` casts the rotary frequencies as well, as the fixture does
    assert torch.equal(logits(loaded.to(dtype), ids), expected)
    assert close(expected.float(), unmerged.float(), 1e-4 if dtype == torch.float32 else 5e-2)
    assert loaded.config.tie_word_embeddings is False


@pytest.mark.parametrize("kind", TIED)
def test_an_untied_model_that_was_merged_for_a_while_saves_the_edited_function(
    tiny_model, tokenizer, ids, tmp_path, kind
):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    model.merge_adapter(untie=True)
    expected = logits(model, ids)
    plain = model.merge_and_unload(safe_merge=True, untie=True)
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded, ids), expected)


@pytest.mark.parametrize("kind", TIED)
def test_a_safe_merge_that_raises_leaves_the_tie(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    layers_of(model)["lm_head"].engram_B["default"].weight.data.fill_(float("nan"))
    with unchanged(model), pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True, untie=True)


@pytest.mark.parametrize("kind", TIED)
def test_a_deepcopy_of_an_untied_model_ties_its_own_layers_again(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer, target_modules=["lm_head"])
    model.merge_adapter(untie=True)
    twin = copy.deepcopy(model)
    twin.unmerge_adapter()
    head, embedding = head_and_embedding(twin)
    assert head.weight is embedding.weight
    assert embedding.weight is not head_and_embedding(model)[1].weight
    assert twin.config.tie_word_embeddings is True and model.config.tie_word_embeddings is False


# ------------------------------------------------------------------------------------------------ two layers, one Parameter


class Twins(nn.Module):
    """Two layers with one weight, used one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.right.weight = self.left.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(torch.tanh(self.left(x)))


def edited_twins(targets: list[str]):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twins, forget, retain = Twins(), torch.randn(3, 8), torch.randn(60, 8)
    model = get_peft_model(twins, EngramConfig(target_modules=targets, alpha=0.25))
    target = collect_statistics(model, [forget], target_modules=["left", "right"])
    total = merge_statistics(target, collect_statistics(model, [retain], target_modules=["left", "right"]))
    extract_engram(model, target, total, scale="uniform")
    return model, forget


def test_each_of_two_layers_with_one_weight_has_its_own_edit():
    model, x = edited_twins(["left", "right"])
    left, right = layers_of(model)["left"], layers_of(model)["right"]
    weight = left.base_layer.weight.detach().double()
    hidden = torch.tanh((x.double() - 0.25 * x.double() @ projection(left).T) @ weight.T)
    expected = (hidden - 0.25 * hidden @ projection(right).T) @ weight.T
    assert close(model(x).detach().double(), expected, 1e-5)


def test_merging_two_layers_with_one_weight_is_refused():
    model, _ = edited_twins(["left", "right"])
    with unchanged(model), pytest.raises(ValueError, match="shares its weight with"):
        model.merge_adapter()


def test_merging_one_of_two_layers_with_one_weight_is_refused():
    model, _ = edited_twins(["right"])
    with unchanged(model), pytest.raises(ValueError, match=r"right shares its weight with \['left'\]"):
        model.merge_adapter()


@pytest.mark.parametrize("targets", [["left", "right"], ["right"]])
def test_untying_subtracts_each_edit_once(targets):
    model, x = edited_twins(targets)
    expected, before = model(x).detach(), tensors(model)
    layers = layers_of(model)
    parameter = next(iter(layers.values())).base_layer.weight
    weight = parameter.detach().double().clone()
    model.merge_adapter(untie=True)
    for layer in layers.values():
        assert close(layer.base_layer.weight.detach().double(), weight - 0.25 * weight @ projection(layer), 1e-5)
    assert close(model(x).detach(), expected, 1e-5)
    model.unmerge_adapter()
    assert all(layer.base_layer.weight is parameter for layer in layers.values())
    assert same_tensors(tensors(model), before)
