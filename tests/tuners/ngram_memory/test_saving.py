"""Saving and loading: what comes back is what was saved, to the bit; a damaged file changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engram_peft import NgramMemoryConfig
from engram_peft.memory import NgramTable
from engram_peft.memory.packed import PackedTable

from ...models.engram.tiny import backbone, logits, token_ids
from .adapters import FIRST, SECOND, VARIANTS, adapted, add, fill, memories_of, memory_config, same, tensors, unchanged


FILE = "adapter_model.safetensors"


@pytest.fixture
def ids() -> torch.Tensor:
    return token_ids(3, 9)


@torch.no_grad()
def touch_few(model: PeftModel, ids: torch.Tensor) -> None:
    """Empties the tables but for the rows that the first of the texts reads."""
    for memory in model.base_model.memories(model.active_adapter).values():
        rows: list[torch.Tensor] = []
        handle = memory.hash.register_forward_hook(lambda module, args, output, rows=rows: rows.append(output))
        logits(model, ids[:1, :4])
        handle.remove()
        table = memory.table
        read = torch.zeros(len(table.weight), dtype=torch.bool)
        read[(rows[0] + table.offsets).flatten()] = True
        table.weight[~read] = 0


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("options", [{}, {"low_cpu_mem_usage": True}, {"is_trainable": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_adapter_is_the_saved_one(dtype, options, few, ids, tmp_path):
    model = adapted(backbone("llama").to(dtype))
    if few:
        touch_few(model, ids)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(backbone("llama").to(dtype), tmp_path, **options).eval()
    assert torch.equal(logits(loaded, ids), expected)
    whole = not few or "is_trainable" in options
    assert {type(memory.table) for memory in memories_of(loaded)} == {NgramTable if whole else PackedTable}
    if whole:
        assert same(tensors(loaded), tensors(model))
    assert any(p.requires_grad for p in loaded.parameters()) == ("is_trainable" in options)


def test_a_file_holds_touched_rows(ids, tmp_path):
    model = adapted(vocab_size=5000)
    for memory in memories_of(model):
        with torch.no_grad():
            memory.table.weight.zero_()
            memory.table.weight[[7, 6000, 19000]] = torch.arange(12.0).view(3, 4) - 20
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path / FILE)
    for index, memory in model.base_model.memories().items():
        key = f"base_model.model.model.layers.{index}.memory.ngram_memory_layer.table"
        assert file[f"{key}.rows"].tolist() == [7, 6000, 19000]
        assert torch.equal(file[f"{key}.weight"], memory.table.weight[[7, 6000, 19000]])
    assert (tmp_path / FILE).stat().st_size < 30_000 < memory.table.weight.nbytes
    assert json.loads((tmp_path / "adapter_config.json").read_text())["touched_rows"] == {"0": 3, "1": 3}
    assert model.peft_config["default"].touched_rows is None


def test_saved_twice_is_saved_the_same(ids, tmp_path):
    model = adapted()
    touch_few(model, ids)
    model.save_pretrained(tmp_path / "one")
    PeftModel.from_pretrained(backbone("llama"), tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in (FILE, "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_an_empty_memory_is_saved_too(ids, tmp_path):
    model = get_peft_model(backbone("llama"), memory_config())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(backbone("llama"), tmp_path)
    assert torch.equal(logits(loaded, ids), logits(backbone("llama"), ids))


@pytest.mark.parametrize("few", [False, True])
def test_auto_classes_load_the_base_model_and_the_adapter(few, ids, tmp_path):
    backbone("llama").save_pretrained(tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval())
    if few:
        touch_few(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model, ids)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"), ids), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval(), ids), expected)
    plain = backbone("llama")
    plain.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(plain, ids), expected)


def test_the_token_map_comes_with_the_weights(tiny_tokenizer, ids, tmp_path):
    config = NgramMemoryConfig(layers_to_transform=[1, 0], task_type="CAUSAL_LM", **FIRST)
    model = get_peft_model(backbone("llama"), config.token_map_from(tiny_tokenizer())).eval()
    for memory in memories_of(model):
        fill(memory)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(backbone("llama"), tmp_path)
    assert torch.equal(loaded.base_model.token_map(), model.base_model.token_map())
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert [name for name in load_file(tmp_path / FILE) if "token_map" in name] == [
        "base_model.model.model.layers.1.memory.ngram_memory_token_map.ids"
    ]
    plain = backbone("llama")
    plain.load_adapter(str(tmp_path))
    assert torch.equal(logits(plain, ids), logits(model, ids))


def test_several_adapters_are_saved_side_by_side(ids, tmp_path):
    model = adapted()
    add(model, "other", values=1, **SECOND)
    model.save_pretrained(tmp_path)
    model.set_adapter("other")
    loaded = PeftModel.from_pretrained(backbone("llama"), tmp_path / "other", adapter_name="b").eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    loaded.load_adapter(tmp_path, adapter_name="a")
    model.set_adapter("default")
    loaded.set_adapter("a")
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_comes_back(variant, tmp_path):
    model = adapted(variant=variant, modules_to_save=["lm_head"])
    model.save_pretrained(tmp_path)
    config = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, NgramMemoryConfig)
    assert config.to_dict() == model.peft_config["default"].to_dict() | {
        "inference_mode": True,
        "touched_rows": config.touched_rows,
    }
    assert config.memory_spec(model.config) == memories_of(model)[0].spec


def test_modules_to_save_are_saved(ids, tmp_path):
    model = adapted(modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(backbone("llama"), tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    merged = model.merge_and_unload().eval()
    assert torch.equal(logits(merged, ids), logits(loaded, ids))


@pytest.mark.parametrize("few", [False, True])
def test_weights_are_swapped_in_place(few, ids, tmp_path):
    """Also rows of another number than before."""
    model = adapted()
    add(model, "other", values=1)
    model.set_adapter("other")
    if few:
        touch_few(model, ids)
    state = get_peft_model_state_dict(model, adapter_name="other")
    expected = logits(model, ids)
    for source in (adapted(), PeftModel.from_pretrained(backbone("llama"), _saved(adapted(), ids, tmp_path))):
        set_peft_model_state_dict(source, state)
        assert torch.equal(logits(source.eval(), ids), expected)


def _saved(model: PeftModel, ids: torch.Tensor, path) -> str:
    touch_few(model, ids[1:])
    model.save_pretrained(path)
    return str(path)


# ------------------------------------------------------------------------------------------------ damage


def _edit(path, change) -> None:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, metadata={"format": "pt"})


TABLE = "base_model.model.model.layers.0.memory.ngram_memory_layer.table"
DAMAGE = {
    "a tensor is missing": (lambda t: t.pop(TABLE.replace("table", "kv_proj") + ".weight"), "lacks 1 of"),
    "the table is missing": (lambda t: (t.pop(f"{TABLE}.weight"), t.pop(f"{TABLE}.rows")), "lacks"),
    "rows without values": (lambda t: t.pop(f"{TABLE}.weight"), "lacks"),
    "values without rows": (lambda t: t.pop(f"{TABLE}.rows"), "has shape"),
    "row numbers too large": (lambda t: t[f"{TABLE}.rows"].add_(1000), "not ascending and below 306"),
    "negative row numbers": (lambda t: t[f"{TABLE}.rows"].sub_(1000), "not ascending and below 306"),
    "row numbers twice": (lambda t: t[f"{TABLE}.rows"].fill_(3), "not ascending and below 306"),
    "fewer values than rows": (lambda t: t.update({f"{TABLE}.weight": t[f"{TABLE}.weight"][1:]}), "row numbers for"),
    "another width": (lambda t: t.update({f"{TABLE}.weight": t[f"{TABLE}.weight"][:, 1:].clone()}), "has shape"),
    "something else": (lambda t: t.update({TABLE.replace("0", "7"): torch.ones(1)}), "no place for"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_and_the_model_is_as_it_was(damage, ids, tmp_path):
    change, message = DAMAGE[damage]
    model = adapted()
    touch_few(model, ids)
    model.save_pretrained(tmp_path)
    _edit(tmp_path, change)
    base = backbone("llama")
    with unchanged(base), pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, tmp_path)
    with unchanged(model), pytest.raises(ValueError, match=message):
        model.load_adapter(tmp_path, adapter_name="other")


def test_a_truncated_file_is_refused(tmp_path):
    adapted().save_pretrained(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-100])
    base = backbone("llama")
    with unchanged(base), pytest.raises(ValueError, match="truncated or not a safetensors file"):
        PeftModel.from_pretrained(base, tmp_path)
