"""Saving and loading: by name, by shard, by dtype, and where this package is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from engram_peft import EngramForCausalLM
from engram_peft.memory.stream import open_stream
from engram_peft.memory.token_map import build_token_map
from engram_peft.models.engram.remote_code import source_files

from .tiny import KINDS, VARIANTS, VOCAB_SIZE, backbone, engram, engram_config, fill, logits, shared, token_ids


def stream(model: EngramForCausalLM, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the memories read of `ids`: classes with the tokens before, and how far each looks back."""
    opened = open_stream(model.spec, torch.tensor(ids), vocab_size=model.vocab_size, token_map=model.token_map)
    return opened.ids, opened.reach


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    return names


@pytest.mark.parametrize(("kind", "variant"), [*zip(KINDS, VARIANTS * 3, strict=False), ("llama", "needle")])
def test_a_model_comes_back_as_it_was(kind: str, variant: str, tmp_path):
    model = shared(kind, variant)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is EngramForCausalLM and not loaded.training
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, tensor), other in zip(model.named_buffers(), loaded.buffers(), strict=True):
        assert torch.equal(tensor, other), name  # also the constants of the hash, which are not saved
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))


def test_the_backbone_keeps_the_names_of_its_weights(tmp_path):
    shared("qwen3").save_pretrained(tmp_path)
    names = stored_names(tmp_path)
    expected = {f"backbone.{name}" for name in backbone("qwen3").state_dict()} - {"backbone.lm_head.weight"}  # tied
    assert {name for name in names if name.startswith("backbone.")} == expected
    assert {name.split(".")[0] for name in names} == {"backbone", "memories"}
    assert not any("multipliers" in name or "offsets" in name for name in names)
    loaded = EngramForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_dtype_and_device_map(tmp_path):
    shared().save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.memories["1"].hash.multipliers.dtype == torch.int64
    torch.testing.assert_close(logits(half, token_ids()).float(), logits(shared(), token_ids()), atol=0.5, rtol=0)
    config = half.config
    assert AutoModelForCausalLM.from_config(config).memories["1"].table.weight.dtype == torch.bfloat16


PLACES = [
    "token_map", "backbone.model.embed_tokens", "backbone.model.norm", "backbone.model.rotary_emb", "backbone.lm_head",
    "backbone.model.layers.0", "backbone.model.layers.1", "memories.0", "memories.1",
]  # fmt: skip


@pytest.mark.parametrize("on_disk", ["backbone.model.layers.1", "memories.1"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_on_disk(variant: str, on_disk: str, tmp_path):
    model = shared(variant=variant)
    model.save_pretrained(tmp_path)
    device_map = dict.fromkeys(PLACES, "cpu") | {on_disk: "disk"}
    loaded = EngramForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
    on_meta = {name for name, parameter in loaded.named_parameters() if parameter.is_meta}
    assert all(name.startswith("backbone.model.layers.1") for name in on_meta)
    assert bool(on_meta) == (on_disk == "backbone.model.layers.1")  # memories are taken into host memory
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))
    loaded.save_pretrained(tmp_path / "again")
    again = EngramForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, token_ids()), logits(model, token_ids()))


def test_the_token_map_lies_in_the_checkpoint(tiny_tokenizer, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["The", "PARIS"])
    model = fill(EngramForCausalLM(engram_config(tokenizer=tokenizer)).eval())
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["token_map"]
    expected = build_token_map(tokenizer)
    assert torch.equal(stored[: len(expected)], expected)
    assert stored[len(expected) :].tolist() == list(
        range(len(expected.unique()), VOCAB_SIZE - 2)
    )  # rows without a token
    loaded = EngramForCausalLM.from_pretrained(tmp_path)
    loaded.check_tokenizer(tokenizer)
    upper, lower = (tokenizer.convert_tokens_to_ids(["a", word, "city"]) for word in ("The", "the"))
    heard = [loaded.memories["1"](torch.ones(1, 3, 32), *stream(loaded, [ids]))[0] for ids in (upper, lower)]
    assert torch.equal(*heard) and bool(heard[0].any())
    assert torch.equal(logits(loaded, token_ids()), logits(model, token_ids()))


def without(folder: Path, prefix: str) -> None:
    path = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(prefix)}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["memories.1.table", "memories.", "token_map"])
def test_missing_weights_of_memories_are_an_error(prefix: str, tiny_tokenizer, tmp_path):
    EngramForCausalLM(engram_config(tokenizer=tiny_tokenizer())).save_pretrained(tmp_path)
    without(tmp_path, prefix)
    with pytest.raises(ValueError, match=rf"lacks .*'{prefix}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    _, info = EngramForCausalLM.from_pretrained(tmp_path, output_loading_info=True)  # who asks is told
    assert all(name.startswith(prefix) for name in info["missing_keys"]) and info["missing_keys"]


def test_a_plain_checkpoint_gets_new_memories_that_say_nothing(tmp_path):
    plain = backbone("gpt2")
    plain.save_pretrained(tmp_path)
    model = EngramForCausalLM.from_pretrained(tmp_path, engram_layer_ids=[0], engram_n_heads=2, engram_vocab_size=50)
    assert list(model.memories) == ["0"]
    assert torch.equal(logits(model, token_ids()), logits(plain, token_ids()))
    assert float(model.memories["0"].kv_proj.weight.std()) > 0
    with pytest.raises(ValueError, match="from_backbone"):
        EngramForCausalLM.from_pretrained(tmp_path, config=engram_config("gpt2"))


def test_a_pipeline_finds_it(tiny_tokenizer, tmp_path):
    tokenizer = tiny_tokenizer()
    shared().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generate = pipeline("text-generation", str(tmp_path))
    assert type(generate.model) is EngramForCausalLM
    options = {"max_new_tokens": 4, "do_sample": False}
    out = generate("the capital of france", return_tensors=True, **options)[0]["generated_token_ids"]
    ids = AutoTokenizer.from_pretrained(tmp_path)("the capital of france", return_tensors="pt").input_ids
    expected = shared().generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(torch.as_tensor(out), expected[0])


# ------------------------------------------------------------------------------------------------- remote code

WITHOUT_THIS_PACKAGE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "engram_peft":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor(eval(sys.argv[2]))
for load, save in ((folder, folder + "/again"), (folder + "/again", None)):
    model = AutoModelForCausalLM.from_pretrained(load, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    if save:
        model.save_pretrained(save)
out = model.generate(ids, max_new_tokens=4, do_sample=False)
expected = model(input_ids=ids).logits.detach()
mapped = AutoModelForCausalLM.from_pretrained(folder + "/again", trust_remote_code=True, table_placement="mmap")
assert not any(".table." in name for name in mapped.state_dict())
assert torch.equal(mapped(input_ids=ids).logits, expected)
save_file({"logits": expected, "sequences": out}, folder + "/result.safetensors")
"""


def test_it_loads_where_this_package_is_not_installed(tmp_path):
    model = shared()
    model.save_pretrained(tmp_path)
    ids = token_ids()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THIS_PACKAGE, str(tmp_path), str(ids.tolist())],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = load_file(tmp_path / "result.safetensors")
    torch.testing.assert_close(result["logits"], logits(model, ids), rtol=0, atol=1e-6)
    assert torch.equal(result["sequences"], model.generate(ids, max_new_tokens=4, do_sample=False))
    again = {path.name for path in (tmp_path / "again").glob("*.py")}
    assert again == {path.name for path in tmp_path.glob("*.py")}


def test_the_code_beside_the_weights_needs_no_other_files(tmp_path):
    EngramForCausalLM.register_for_auto_class()  # habit; it changes nothing
    engram().save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_engram.EngramLMConfig", "AutoModelForCausalLM": "modeling_engram.EngramForCausalLM"
    }  # fmt: skip
    entry = tmp_path / "modeling_engram.py"
    written = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert source_files(entry) == written  # laid flat once, it stays as it is
    assert not any("from .." in text or "engram_peft.memory import" in text for text in written.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is EngramForCausalLM  # the installed class wins
