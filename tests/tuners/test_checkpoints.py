"""Editing a checkpoint on disk: the same bytes as loading it, merging and saving."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engram_peft import EngramConfig, checkpoints, edit_checkpoint, extract_items

from ..moe import moe_model
from .adapters import DTYPES, FORGET_OTHER, KINDS, RETAIN, edited, fill, logits


def contents(folder) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a checkpoint, as bytes."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            tensors[key] = (tensor.dtype, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return tensors


@pytest.fixture
def saved(tmp_path, tiny_model, tokenizer):
    """A base model and an adapter of it on disk: `(base, adapter)`."""

    def save(kind="llama", dtype=torch.float32, shard="50GB", targets=None, **config):
        model = tiny_model(kind, dtype)
        model.save_pretrained(tmp_path / "base", max_shard_size=shard)
        tokenizer.save_pretrained(tmp_path / "base")
        targets = targets or (["c_fc", "c_proj"] if kind == "gpt2" else ["q_proj", "down_proj", "fc2"])
        model = fill(get_peft_model(model, EngramConfig(target_modules=targets, **config)), tokenizer)
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "base", tmp_path / "adapter"

    return save


def merged_in_memory(base, adapters, out, **options) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for i, adapter in enumerate(adapters):
        if i == 0:
            model = PeftModel.from_pretrained(model, adapter, adapter_name="edit_0")
        else:
            model.load_adapter(adapter, adapter_name=f"edit_{i}")
    model.base_model.set_adapter([f"edit_{i}" for i in range(len(adapters))])
    model.merge_and_unload().save_pretrained(out, **options)


# ------------------------------------------------------------------------------------------------ the same bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_it_is_merging_and_saving_to_the_bit(saved, tmp_path, kind, dtype, shard):
    base, adapter = saved(kind, dtype, shard)
    edit_checkpoint(base, tmp_path / "edited", adapter)
    merged_in_memory(base, [adapter], tmp_path / "merged", max_shard_size=shard)
    assert contents(tmp_path / "edited") == contents(tmp_path / "merged") != contents(base)
    # and it has everything else that the source has, in the same files
    assert {file.name for file in (tmp_path / "edited").iterdir()} == {file.name for file in base.iterdir()}
    assert len(list(base.glob("*.safetensors"))) == (1 if shard == "50GB" else len(list(base.glob("model-*"))))
    assert (tmp_path / "edited" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_several_adapters_add_up(saved, tmp_path, tiny_model, tokenizer, ids):
    base, adapter = saved()
    config = EngramConfig(target_modules=["down_proj", "o_proj"], alpha=0.5)
    other = fill(get_peft_model(tiny_model("llama"), config), tokenizer, forget=FORGET_OTHER)
    other.save_pretrained(tmp_path / "other")
    edit_checkpoint(base, tmp_path / "edited", [adapter, tmp_path / "other"])
    merged_in_memory(base, [adapter, tmp_path / "other"], tmp_path / "merged")
    assert contents(tmp_path / "edited") == contents(tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "edited").eval()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits(model, ids), logits(expected, ids))


def test_an_edit_item_by_item_has_its_strengths(tmp_path, tiny_model, tokenizer):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    model = get_peft_model(model, EngramConfig(target_modules=["down_proj"]))
    extract_items(model, tokenizer, {"a": "the river lies by rome", "b": FORGET_OTHER[0]}, RETAIN, rounds=1)
    model.base_model.set_item_strength("a", 2.5)
    model.base_model.restore_item("b")
    model.save_pretrained(tmp_path / "adapter")
    edit_checkpoint(tmp_path / "base", tmp_path / "edited", tmp_path / "adapter")
    merged_in_memory(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "merged")
    assert contents(tmp_path / "edited") == contents(tmp_path / "merged") != contents(tmp_path / "base")


def test_a_body_that_was_saved_alone_is_edited(saved, tmp_path):
    """Its weights have no prefix, and the model for causal language models finds them nevertheless."""
    base, adapter = saved()
    AutoModelForCausalLM.from_pretrained(base).model.save_pretrained(tmp_path / "body")
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    (tmp_path / "body" / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    edit_checkpoint(tmp_path / "body", tmp_path / "edited", adapter)
    edit_checkpoint(base, tmp_path / "whole", adapter)
    whole = contents(tmp_path / "whole")
    assert contents(tmp_path / "edited") == {
        key.removeprefix("model."): value for key, value in whole.items() if key.startswith("model.")
    }


def test_copies_of_the_weights_in_other_formats_are_left_out(saved, tmp_path):
    base, adapter = saved()
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", ".gitattributes", "notes.txt"):
        (base / name).write_text("unedited")
    edit_checkpoint(base, tmp_path / "edited", adapter)
    left_out = {"pytorch_model.bin", "consolidated.safetensors", "model.gguf", ".gitattributes"}
    names = {file.name for file in base.iterdir()} - left_out
    assert "notes.txt" in names and {file.name for file in (tmp_path / "edited").iterdir()} == names


def test_no_more_than_a_layer_is_loaded(saved, tmp_path, monkeypatch):
    base, adapter = saved(shard="20KB")
    loaded = []

    class Reading:
        def __init__(self, file, framework):
            self.opened = safe_open(file, framework)

        def __enter__(self):
            self.inner = self.opened.__enter__()
            return self

        def __exit__(self, *error):
            return self.opened.__exit__(*error)

        def get_tensor(self, key):
            loaded.append(key)
            return self.inner.get_tensor(key)

    monkeypatch.setattr(checkpoints, "safe_open", Reading)
    edit_checkpoint(base, tmp_path / "edited", adapter)
    weights = [key for key in loaded if not key.startswith("base_model.")]
    names = ("q_proj", "down_proj")
    assert sorted(weights) == sorted(
        f"model.layers.{i}.{'self_attn' if name == 'q_proj' else 'mlp'}.{name}.weight"
        for i in range(2)
        for name in names
    )


# ------------------------------------------------------------------------------------------------ failures


def test_an_interruption_leaves_nothing(saved, tmp_path, monkeypatch):
    base, adapter = saved()
    before, there = contents(base), {file.name for file in tmp_path.iterdir()}

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_overwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        edit_checkpoint(base, tmp_path / "edited", adapter)
    assert {file.name for file in tmp_path.iterdir()} == there and contents(base) == before


def test_a_killed_process_leaves_no_checkpoint(saved, tmp_path):
    base, adapter = saved()
    script = f"""
    import os, signal
    from engram_peft import checkpoints
    plain = checkpoints._overwrite
    def killed(*args):
        plain(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints._overwrite = killed
    checkpoints.edit_checkpoint({str(base)!r}, {str(tmp_path / "edited")!r}, {str(adapter)!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "edited").exists()
    edit_checkpoint(base, tmp_path / "edited", adapter)  # what is left is not in the way
    merged_in_memory(base, [adapter], tmp_path / "merged")
    assert contents(tmp_path / "edited") == contents(tmp_path / "merged")


def test_something_at_the_target_is_left_alone(saved, tmp_path):
    base, adapter = saved()
    (tmp_path / "edited").mkdir()
    with pytest.raises(FileExistsError, match="`dst` exists already.*edited"):
        edit_checkpoint(base, tmp_path / "edited", adapter)
    assert list((tmp_path / "edited").iterdir()) == []


def refused(src, adapter, tmp_path, message, error=ValueError) -> None:
    before = set(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        edit_checkpoint(src, tmp_path / "edited", adapter)
    assert set(tmp_path.rglob("*")) == before


def test_a_tied_head_is_refused(saved, tmp_path):
    refused(*saved("qwen3", targets=["lm_head"]), tmp_path, "lm_head shares its weight with")


def test_an_adapter_of_another_method_is_refused(saved, tmp_path, tiny_model):
    base, _ = saved()
    get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    refused(base, tmp_path / "lora", tmp_path, "LORA, not ENGRAM")
    refused(base, [], tmp_path, "`adapter` must name at least one")


def test_an_adapter_with_whole_modules_is_refused(saved, tmp_path):
    refused(*saved(modules_to_save=["lm_head"]), tmp_path, "whole modules.*lm_head")


def test_an_adapter_of_experts_is_refused(saved, tmp_path):
    moe_model("mixtral").save_pretrained(tmp_path / "experts")
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = EngramConfig(target_modules=[], target_parameters=parameters)
    get_peft_model(moe_model("mixtral"), config).save_pretrained(tmp_path / "adapter")
    refused(
        tmp_path / "experts", tmp_path / "adapter", tmp_path, "edits Parameters.*Load the model and merge it there"
    )


def test_an_adapter_of_another_model_is_refused(saved, tmp_path):
    base, adapter = saved()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["c_fc"]}))
    refused(base, adapter, tmp_path, "c_fc")


def test_factors_that_are_not_what_the_config_says_are_refused(saved, tmp_path):
    base, adapter = saved()
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "engram_A" in key)
    save_file(tensors | {key: tensors[key][:1].clone()}, file)
    refused(base, adapter, tmp_path, "has shape.*its config says")


def test_a_checkpoint_without_safetensors_is_refused(saved, tmp_path):
    base, adapter = saved()
    (base / "model.safetensors").rename(base / "weights.bin")
    refused(base, adapter, tmp_path, "must hold safetensors weights", FileNotFoundError)


def test_a_truncated_checkpoint_is_refused(saved, tmp_path):
    base, adapter = saved()
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused(base, adapter, tmp_path, "", Exception)


def test_a_quantised_checkpoint_is_refused(saved, tmp_path):
    base, adapter = saved()
    config = AutoConfig.from_pretrained(base)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config.save_pretrained(base)
    refused(base, adapter, tmp_path, "`src` is quantised")


def test_weights_under_other_names_are_refused(saved, tmp_path):
    base, adapter = saved()
    tensors = load_file(base / "model.safetensors")
    renamed = {key.replace("q_proj", "wq"): tensor for key, tensor in tensors.items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    refused(base, adapter, tmp_path, "q_proj.weight is not in the checkpoint.*converts")


def test_weights_of_another_shape_are_refused(saved, tmp_path):
    base, adapter = saved()
    tensors = load_file(base / "model.safetensors")
    key = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {key: tensors[key][:, :-1].contiguous()}, base / "model.safetensors", {"format": "pt"})
    refused(base, adapter, tmp_path, "down_proj.weight has shape")


def test_a_merge_that_is_not_finite_is_refused(saved, tmp_path):
    base, adapter = saved()
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "engram_B" in key)
    tensors[key][0, 0] = torch.nan
    save_file(tensors, file)
    refused(base, adapter, tmp_path, "NaN")


def test_an_unedited_model_edits_to_itself(saved, tmp_path, tiny_model, tokenizer):
    """An adapter at strength 0."""
    base, _ = saved()
    model = edited(tiny_model("llama"), tokenizer, target_modules=["down_proj"])
    model.base_model.set_scale("default", 0.0)
    model.save_pretrained(tmp_path / "nothing")
    edit_checkpoint(base, tmp_path / "edited", tmp_path / "nothing")
    assert contents(tmp_path / "edited") == contents(base)
