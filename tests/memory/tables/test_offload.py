"""Tables of models that others made, served from their checkpoints: the same logits, and the table never in memory."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextScaledWordEmbedding
from transformers.utils import logging

from engram_peft.memory.tables import MappedEmbedding, checkpoint, load_with_tables, offload_tables

from .rows import wild


TABLES = [f"model.layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in (0, 1)]
IDS = torch.tensor([[10, 11, 12, 10, 11, 12, 2, 40, 41, 10, 11]])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A tiny Qwen4Exp with two tables, and its checkpoint, which holds each in four shards."""
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2, linear_num_value_heads=2,
        linear_num_key_heads=1, linear_key_head_dim=16, linear_value_head_dim=16, indexer_n_heads=2, indexer_kv_heads=1,
        indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2, hc_lowrank=8, ple_layer_ids=[1, 2],
        ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=50, ple_embed_dim=32, split_ngram_parts=4,
        make_ngram_vocab_size_divisible_by=64, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen4ExpForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    return model, folder


def fresh(folder) -> Qwen4ExpForCausalLM:
    return Qwen4ExpForCausalLM.from_pretrained(folder)


def agrees(model, other) -> bool:
    with torch.no_grad():
        same = torch.equal(model(IDS).logits, other(IDS).logits)
    written = [each.generate(IDS, max_new_tokens=4, do_sample=False) for each in (model, other)]
    return same and torch.equal(*written)


def test_a_loaded_model_gives_its_tables_up(qwen):
    model, folder = qwen
    other = fresh(folder)
    before = sum(parameter.numel() for parameter in other.parameters())
    tables = offload_tables(other)
    assert list(tables) == TABLES
    assert sum(parameter.numel() for parameter in other.parameters()) == before - sum(
        t.rows * t.dim for t in tables.values()
    )
    assert not [key for key in other.state_dict() if "ngram_embedding" in key]
    assert agrees(model, other)
    assert all(table.stats().rows > 0 for table in tables.values())


def test_a_model_is_loaded_without_its_tables(qwen, monkeypatch, capsys):
    model, folder = qwen
    touched = []
    embedding = nn.Embedding.__init__

    def note(self, *args, **kwargs):
        embedding(self, *args, **kwargs)
        touched.append(self.weight.device.type)

    monkeypatch.setattr(nn.Embedding, "__init__", note)
    level = logging.get_verbosity()
    logging.set_verbosity_warning()
    other = load_with_tables(Qwen4ExpForCausalLM, folder)
    logging.set_verbosity(level)
    assert set(touched) == {"meta"}  # no table ever had memory
    assert type(other) is Qwen4ExpForCausalLM
    assert all(isinstance(other.get_submodule(name), MappedEmbedding) for name in TABLES)
    assert agrees(model, other)
    output = capsys.readouterr()
    assert "UNEXPECTED" not in output.out + output.err


@pytest.mark.parametrize("placement", ["mmap", "ram"])
@pytest.mark.parametrize("load", [True, False])
def test_what_is_saved_is_complete(qwen, tmp_path, load, placement):
    model, folder = qwen
    if load:
        other = load_with_tables(Qwen4ExpForCausalLM, folder, placement=placement)
    else:
        offload_tables(other := fresh(folder), placement=placement)
    copies = [copy.deepcopy(other), pickle.loads(pickle.dumps(other))]
    other.save_pretrained(tmp_path / "one", max_shard_size="30KB")
    assert not [key for key in other.state_dict() if "ngram_embedding" in key]  # as before
    assert agrees(model, fresh(tmp_path / "one"))
    again = load_with_tables(Qwen4ExpForCausalLM, tmp_path / "one")
    assert agrees(model, again)
    again.save_pretrained(tmp_path / "two")
    expected, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "two"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with torch.no_grad():
        other.lm_head.weight.zero_()  # copies save themselves, not what they were copied from
    for number, each in enumerate(copies):
        each.save_pretrained(tmp_path / str(number))
        assert agrees(model, fresh(tmp_path / str(number)))


def test_options_of_loading_arrive(qwen):
    _, folder = qwen
    other, info = load_with_tables(
        Qwen4ExpForCausalLM, folder, placement="ram", freeze=True, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    module = other.get_submodule(TABLES[0])
    assert (module.table.placement, module.freeze, module.dtype) == ("ram", True, torch.bfloat16)
    other.train()
    reference = Qwen4ExpForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    other.eval()
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, reference(IDS).logits)


def test_rows_that_could_be_trained_refuse(qwen):
    _, folder = qwen
    other = fresh(folder)
    offload_tables(other)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        other.train()


def test_a_table_that_was_changed_is_not_exchanged(qwen):
    _, folder = qwen
    other = fresh(folder)
    with torch.no_grad():
        other.get_submodule(TABLES[1]).weight[3] += 1
    with pytest.raises(ValueError, match=rf"{TABLES[1]} is another table than the checkpoint holds"):
        offload_tables(other)
    assert all(type(other.get_submodule(name)) is nn.Embedding for name in TABLES)  # all or nothing


def test_a_second_call_leaves_alone_what_is_served(qwen):
    _, folder = qwen
    other = fresh(folder)
    offload_tables(other, [TABLES[0]])
    assert list(offload_tables(other)) == [TABLES[1]]
    with pytest.raises(ValueError, match="has no embedding ple_embedding.ngram_embedding or embed_tokens_per_layer"):
        offload_tables(other)


# ---------------------------------------------------------------------------------------------------- any embedding


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens_per_layer = Gemma3nTextScaledWordEmbedding(50, 8, padding_idx=0, embed_scale=8**0.5)
        self.embed_tokens = nn.Embedding(50, 8)
        self.lm_head = nn.Linear(8, 50, bias=False)
        self.vision = nn.ModuleDict({"table": nn.Embedding(20, 4)})


@pytest.fixture
def model(tmp_path):
    found = Model().to(torch.bfloat16)
    parts = found.vision["table"].weight.split(10)
    tensors = {"model.language_model." + name: weight.detach() for name, weight in found.state_dict().items()}
    del tensors["model.language_model.vision.table.weight"]
    save_file(tensors, tmp_path / "a.safetensors")
    shards = {f"model.vision.table.shard_{i}.weight": part.detach().clone() for i, part in enumerate(parts)}
    save_file(shards, tmp_path / "b.safetensors")
    return found, tmp_path


def test_scaled_embeddings_stay_scaled(model):
    found, folder = model
    ids = torch.tensor([[0, 49, 7]])
    expected = found.embed_tokens_per_layer(ids).detach()
    assert list(offload_tables(found, checkpoint=folder)) == ["embed_tokens_per_layer"]
    assert torch.equal(found.embed_tokens_per_layer(ids), expected)
    assert not torch.equal(found.embed_tokens_per_layer(ids), found.embed_tokens_per_layer.table.gather(ids))


def test_any_embedding_can_be_named(model):
    found, folder = model
    ids = torch.arange(20)
    expected = {name: found.get_submodule(name)(ids).detach() for name in ("embed_tokens", "vision.table")}
    offload_tables(found, ["embed_tokens", "table"], checkpoint=folder)
    for name, rows in expected.items():
        assert torch.equal(found.get_submodule(name)(ids), rows)


def test_a_model_without_weights_gets_its_rows(model):
    found, folder = model
    with torch.device("meta"):
        empty = Model().to(torch.bfloat16)
    offload_tables(empty, checkpoint=[folder / "a.safetensors"])
    ids = torch.tensor([1, 2])
    assert torch.equal(empty.embed_tokens_per_layer(ids), found.embed_tokens_per_layer(ids).detach())


def test_what_cannot_be_served_is_said(model, tmp_path):
    found, folder = model
    for modules, message in [
        (["nothing"], "the model has no module 'nothing'"),
        (["lm_head"], "lm_head is a Linear, only embeddings"),
    ]:
        with pytest.raises(ValueError, match=message):
            offload_tables(found, modules, checkpoint=folder)
    with pytest.raises(ValueError, match="does not say where it was loaded from"):
        offload_tables(found)
    found.lm_head.weight = found.embed_tokens.weight
    with pytest.raises(ValueError, match="embed_tokens shares its weight with lm_head"):
        offload_tables(found, ["embed_tokens"], checkpoint=folder)

    class Odd(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) + 1

    found.odd, found.small = Odd(5, 4), nn.Embedding(5, 4, max_norm=1.0)
    for name, message in (("odd", "odd is a Odd, whose forward"), ("small", "renormalises")):
        with pytest.raises(ValueError, match=message):
            offload_tables(found, [name], checkpoint=folder)
    found.absent, found.embed_tokens = nn.Embedding(5, 4), nn.Embedding(51, 8)
    with pytest.raises(ValueError, match="holds no weight of absent"):
        offload_tables(found, ["absent"], checkpoint=folder)
    with pytest.raises(ValueError, match=r"embed_tokens is \[51, 8\], the checkpoint holds \[50, 8\]"):
        offload_tables(found, ["embed_tokens"], checkpoint=folder)


def test_a_table_of_another_layer_is_not_taken(tmp_path):
    save_file({"model.layers.1.table.weight": wild(torch.float32, 5, 4)}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"table": nn.Embedding(5, 4)})])
    with pytest.raises(ValueError, match="holds no weight of layers.0.table"):
        offload_tables(model, ["table"], checkpoint=tmp_path)


def test_quantised_rows_are_not_taken_for_numbers(tmp_path):
    save_file({"table.weight": wild(torch.float8_e4m3fn, 5, 4)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.ModuleDict({"table": nn.Embedding(5, 4, dtype=torch.bfloat16)})
    with pytest.raises(
        ValueError, match="as torch.float8_e4m3fn, which means something together with its scales only"
    ):
        offload_tables(model, ["table"], checkpoint=tmp_path)


def test_two_that_could_be_it_are_not_guessed(tmp_path):
    rows = wild(torch.float32, 5, 4)
    save_file({"a.table.weight": rows, "b.table.weight": rows.clone()}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.table = nn.Embedding(5, 4)
    with pytest.raises(ValueError, match="several tensors that could be table"):
        offload_tables(model, ["table"], checkpoint=tmp_path)


def test_shards_in_many_files_with_an_index(qwen, tmp_path):
    """The checkpoint again, a tensor a file but for the rest."""
    model, folder = qwen
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if "shard_" in name]
    weight_map = dict.fromkeys(tensors, "rest.safetensors")
    for number, name in enumerate(names):
        weight_map[name] = f"{number % 3}.safetensors"
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file, {"format": "pt"}
        )
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    other = load_with_tables(Qwen4ExpForCausalLM, tmp_path)
    assert agrees(model, other)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_name_of_the_hub_is_looked_up_in_the_cache(model, monkeypatch, sharded):
    found, folder = model
    asked = []
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")

    def cached(name, file, **options):
        asked.append((name, file, options["revision"]))
        if file == index.name:
            return str(index)
        return None if sharded else str(folder / "a.safetensors")

    monkeypatch.setattr(checkpoint, "cached_file", cached)
    shards = [str(folder / "a.safetensors"), str(folder / "b.safetensors")]
    monkeypatch.setattr(checkpoint, "get_checkpoint_shard_files", lambda name, path, **options: (shards, {}))
    found.config = SimpleNamespace(_name_or_path="someone/model", _commit_hash="abc")
    tables = offload_tables(found, ["embed_tokens", "table"] if sharded else ["embed_tokens"])
    assert len(tables) == (2 if sharded else 1)
    files = ["model.safetensors", index.name] if sharded else ["model.safetensors"]  # as transformers looks for them
    assert asked == [("someone/model", file, "abc") for file in files]


def test_a_model_of_the_hub_without_safetensors_is_refused(model, monkeypatch):
    found, _ = model
    monkeypatch.setattr(checkpoint, "cached_file", lambda *arguments, **options: None)
    found.config = SimpleNamespace(_name_or_path="someone/model")
    with pytest.raises(FileNotFoundError, match="someone/model has no safetensors files"):
        offload_tables(found)
