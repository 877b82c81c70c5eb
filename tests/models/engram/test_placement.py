"""Tables that are no parameters: the same bits wherever they live, saved as if they were parameters, and never a wrong row."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engram_peft import EngramForCausalLM, export_table, open_table
from engram_peft.memory import NgramTable
from engram_peft.memory.tables import (
    MappedMultiHeadEmbedding,
    Table,
    TableChangedError,
    TableFormatError,
    TableSizeError,
)

from .tiny import PAD, VARIANTS, backbone, engram, logits, shared, token_ids


KEYS = ["memories.0.table.weight", "memories.1.table.weight"]
ONE, MANY = "50GB", "20KB"  # the size of a shard
PLACEMENTS = ["mmap", "ram"]  # those that need no GPU; "auto" is one of them here


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny model's checkpoint, in one file or in many. Do not write to it."""

    @lru_cache
    def save(variant: str = "deepseek", size: str = ONE) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        shared(variant=variant).save_pretrained(folder, max_shard_size=size)
        for file in folder.iterdir():
            os.utime(file, (1e9, 1e9))  # written long ago: a later write shows in the time
        return folder

    return save


def load(folder: Path, placement: str | None = "mmap", **kwargs) -> EngramForCausalLM:
    options = {"table_placement": placement, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options, **kwargs)
    assert not any(info.values())
    model.generation_config.eos_token_id = None
    return model


def tables(model: EngramForCausalLM) -> list[Table]:
    return [memory.table.table for memory in model.memories.values()]


def same_logits(one: EngramForCausalLM, other: EngramForCausalLM) -> bool:
    return torch.equal(logits(one, token_ids()), logits(other, token_ids()))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


# ------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("placement", [*PLACEMENTS, "auto"])
@pytest.mark.parametrize("size", [ONE, MANY])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_those_of_the_model_with_parameters(variant: str, size: str, placement: str, saved):
    model = load(saved(variant, size), placement)
    expected = shared(variant=variant)
    assert [table.placement for table in tables(model)] == ["ram" if placement == "auto" else placement] * 2
    ids, mask = token_ids(), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3], ids[0, :3] = 0, PAD
    assert same_logits(model, expected)
    assert torch.equal(logits(model, ids, attention_mask=mask), logits(expected, ids, attention_mask=mask))
    for options in ({"do_sample": False}, {"num_beams": 3, "num_return_sequences": 2}):
        options |= {
            "max_new_tokens": 6,
            "attention_mask": mask,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        found, wanted = (each.generate(ids, **options) for each in (model, expected))
        assert torch.equal(found.sequences, wanted.sequences)
        assert all(torch.equal(*pair) for pair in zip(found.logits, wanted.logits, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_table_is_no_part_of_the_model(placement: str, saved):
    model = load(saved(), placement)
    names = {*model.state_dict(), *dict(model.named_parameters()), *dict(model.named_buffers())}
    assert not any(".table." in name for name in names)
    assert names < {*shared().state_dict(), *dict(shared().named_buffers())}
    assert model.num_parameters() == shared().num_parameters() - sum(table.rows * table.dim for table in tables(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_logits(other, model)


def test_tables_are_parameters_unless_asked(saved):
    model = load(saved(), None)
    assert all(isinstance(memory.table, NgramTable) for memory in model.memories.values())
    model.train()
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(memory.table.weight.grad is not None for memory in model.memories.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_rounded_as_parameters_are(dtype: torch.dtype, saved):
    assert same_logits(load(saved(), "mmap", dtype=dtype), load(saved(), None, dtype=dtype))
    cast = [load(saved(), placement).to(dtype) for placement in ("mmap", None)]
    assert same_logits(*cast)


@pytest.mark.parametrize("on_disk", ["backbone.model.layers.1", "memories.1"])
def test_beside_a_device_map(on_disk: str, saved, tmp_path):
    places = ["backbone.model.embed_tokens", "backbone.model.norm", "backbone.model.rotary_emb", "backbone.lm_head"]
    places += ["backbone.model.layers.0", "backbone.model.layers.1", "memories.0", "memories.1"]
    device_map = dict.fromkeys(places, "cpu") | {on_disk: "disk"}
    model = load(saved(), device_map=device_map, offload_folder=tmp_path / "offload")
    assert same_logits(model, shared())
    offloaded = [path.name for path in (tmp_path / "offload").rglob("*")]
    assert not any(".table." in name for name in offloaded)


def test_moving_the_tables(saved):
    model = load(saved())
    for placement in ("ram", "auto", "mmap", "parameter", "parameter", "mmap", "ram", "parameter"):
        assert model.table_to(placement) is model
        assert same_logits(model, shared())
        assert all(isinstance(m.table, NgramTable) == (placement == "parameter") for m in model.memories.values())
    assert model.state_dict().keys() == shared().state_dict().keys()
    assert all(torch.equal(tensor, shared().state_dict()[name]) for name, tensor in model.state_dict().items())
    model.train()
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(memory.table.weight.grad is not None for memory in model.memories.values())
    torch.optim.SGD(model.memories.parameters(), 1.0).step()  # the file is not what is trained
    assert same_logits(load(saved()), shared())


def test_rows_that_were_changed_are_not_exchanged(saved, tmp_path):
    model = load(saved(), None)
    with torch.no_grad():
        model.memories["0"].table.weight[7, 1] = -0.0 if float(model.memories["0"].table.weight[7, 1]) else 1.0
    before = logits(model, token_ids())
    with pytest.raises(ValueError, match=r"memories.0.table.weight holds other rows .* Save the model"):
        model.table_to("mmap")
    assert all(isinstance(memory.table, NgramTable) for memory in model.memories.values())
    model.save_pretrained(tmp_path)
    model.table_to("mmap", checkpoint=tmp_path)
    assert torch.equal(logits(model, token_ids()), before)


def test_a_model_that_was_never_saved_cannot_be_served():
    with pytest.raises(ValueError, match="Name its files: `checkpoint`"):
        engram().table_to("mmap")


# ------------------------------------------------------------------------------------------------- training


def test_rows_to_be_trained_are_refused(saved):
    model = load(saved())
    with pytest.raises(RuntimeError, match="read-only table .mmap. and cannot be trained"):
        model.train()
    assert not any(module.training for module in model.modules())  # nothing has changed
    resident = load(saved(), None).train()
    with pytest.raises(RuntimeError, match="Call `eval\\(\\)` or freeze them first"):
        resident.table_to("mmap")
    resident.memories["0"].table.requires_grad_(False)
    resident.memories["1"].table.requires_grad_(False)
    resident.table_to("mmap").train()
    assert all(memory.table.freeze and memory.table.training for memory in resident.memories.values())
    resident.table_to("parameter")
    assert not any(memory.table.weight.requires_grad for memory in resident.memories.values())


def test_projections_can_be_trained_beside_frozen_rows(saved):
    model = load(saved())
    for memory in model.memories.values():
        memory.table.requires_grad_(False)
    expected = load(saved(), None)
    for memory in expected.memories.values():
        memory.table.weight.requires_grad_(False)
    for each in (model, expected):
        each.train()(input_ids=token_ids(), labels=token_ids()).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in expected.named_parameters():
        if ".table." not in name:
            assert torch.equal(gradients[name], parameter.grad), name


def test_an_adapter_for_the_backbone_needs_nothing_else(saved, tmp_path):
    adapted = get_peft_model(load(saved()), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.train()
    adapted(input_ids=token_ids(), labels=token_ids()).loss.backward()
    adapted.save_pretrained(tmp_path)
    assert not any(".table." in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    adapted.eval()
    adapted.get_base_model().memories.requires_grad_(True)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        adapted.train()


# ------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("size", [ONE, MANY])
@pytest.mark.parametrize("before", [ONE, MANY])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_saved_loads_either_way(placement: str, before: str, size: str, saved, tmp_path):
    model = load(saved(size=before), placement)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert not any(".table." in name for name in model.state_dict())  # as before
    expected, found = stored(saved()), stored(tmp_path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(saved(size=size).glob("*.safetensors")))
    for again in (None, *PLACEMENTS):
        assert same_logits(load(tmp_path, again), shared())


def test_saving_over_the_folder_that_is_served(tmp_path):
    shared().save_pretrained(tmp_path)
    model = load(tmp_path)
    for size in (ONE, MANY, MANY):
        model.save_pretrained(tmp_path, max_shard_size=size)
        (tmp_path / "model.safetensors").unlink(missing_ok=size == MANY)  # which would win
        assert same_logits(model, shared())
        if size == MANY:
            assert same_logits(load(tmp_path), shared())
        else:
            with pytest.raises(FileNotFoundError):
                model.table_to("ram")
    assert same_logits(model.table_to("parameter"), shared())


def test_options_of_saving(saved, tmp_path):
    """A trainer hands the state dict over; a variant has other names; a folder may hold more than one."""
    model = load(saved())
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    model.save_pretrained(tmp_path / "parts", True, {"token_map": torch.zeros(2)})
    assert stored(tmp_path / "given").keys() == stored(saved()).keys()
    assert stored(tmp_path / "parts").keys() == {"token_map", *KEYS}
    model.save_pretrained(tmp_path / "variant" / "sub", variant="v2", max_shard_size=MANY)
    assert same_logits(load(tmp_path / "variant", subfolder="sub", variant="v2"), shared())
    with pytest.raises(FileNotFoundError, match="holds no safetensors file"):
        load(tmp_path / "variant", subfolder="sub", variant="v3")
    with pytest.raises(ValueError, match="A distributed checkpoint cannot hold tables"):
        model.save_pretrained(tmp_path / "nothing", distributed_checkpoint=True)
    assert not (tmp_path / "nothing").exists()


def test_the_one_file_wins_over_shards_as_in_transformers(saved, tmp_path):
    other = engram(seed=3)
    other.save_pretrained(tmp_path, max_shard_size=MANY)
    shared().save_pretrained(tmp_path)  # leaves the index there
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert same_logits(load(tmp_path), shared())


def test_a_table_of_export_table_is_saved_too(saved, tmp_path):
    model = load(saved())
    weight = shared().memories["1"].table.weight
    export_table(weight, model.spec.head_sizes(1), tmp_path / "table.safetensors")
    model.memories["1"].table = MappedMultiHeadEmbedding(open_table(tmp_path / "table.safetensors", verify="lazy"))
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(stored(tmp_path / "model")[KEYS[1]], weight)
    rows = torch.zeros(weight.shape, dtype=torch.int8)
    export_table(rows, model.spec.head_sizes(1), tmp_path / "scaled.safetensors", scales=torch.ones(len(rows), 1))
    model.memories["1"].table = MappedMultiHeadEmbedding(open_table(tmp_path / "scaled.safetensors"))
    with pytest.raises(ValueError, match="The rows of memories.1.table have scales"):
        model.save_pretrained(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# ------------------------------------------------------------------------------------------------- bad files


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of its own, in many files."""
    shared().save_pretrained(tmp_path, max_shard_size=MANY)
    return tmp_path


def file_of(folder: Path, key: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][key]


def test_files_that_are_missing_short_or_damaged(folder):
    path = file_of(folder, KEYS[1])
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[12] ^= 1
    for content, error in [
        (data[:-1], TableSizeError),
        (data + b"x", TableSizeError),
        (bytes(damaged), TableFormatError),
    ]:
        path.write_bytes(content)
        with pytest.raises(error, match=path.name):
            load(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        load(folder)


def test_tables_that_are_missing_or_of_another_shape(tmp_path):
    shared().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {KEYS[0]: tensors[KEYS[0]][:-1].clone()}, path, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"memories.0.table.weight is \[\d+, 4\] in the checkpoint, \[\d+, 4\] are needed"
    ):
        load(tmp_path)
    save_file({name: tensor for name, tensor in tensors.items() if name != KEYS[1]}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="The checkpoint lacks 'memories.1.table.weight'"):
        load(tmp_path)


def test_checkpoints_and_placements_that_do_not_fit(saved, tmp_path):
    with pytest.raises(ValueError, match="`placement` is one of ram, mmap, pinned, cuda, auto, not 'disk'"):
        load(saved(), "disk")
    with pytest.raises(ValueError, match="`placement` is one of"):
        load(saved()).table_to("disk")
    backbone().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="The checkpoint lacks 'memories.1.table.weight'.*Without `table_placement`"):
        EngramForCausalLM.from_pretrained(tmp_path, table_placement="mmap")


@pytest.mark.parametrize("placement", ["pinned", "cuda"])
def test_a_gpu_that_is_not_there_is_named(placement: str, saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"`placement={placement}` needs CUDA"):
        load(saved(), placement)


def test_a_file_that_changes_while_it_is_served(folder, tmp_path_factory):
    model = load(folder)
    moved = load(folder, "ram")
    path = file_of(folder, KEYS[1])
    path.write_bytes(path.read_bytes())
    os.utime(path, (1e9, 1e9))
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model"
    for attempt in (
        lambda: logits(model, token_ids()),
        lambda: model.save_pretrained(elsewhere),
        lambda: model.table_to("ram"),
        lambda: model.table_to("parameter"),
        lambda: moved.table_to("mmap"),
    ):
        with pytest.raises(TableChangedError, match=path.name):
            attempt()
    assert not elsewhere.exists()
    assert all(isinstance(memory.table, MappedMultiHeadEmbedding) for memory in model.memories.values())
    assert same_logits(moved, shared())


# ------------------------------------------------------------------------------------------------- prefetching


@pytest.fixture
def asked(monkeypatch):
    """What is prefetched and gathered, in order: the kind, the table, its rows."""
    events: list[tuple[str, Table, torch.Tensor]] = []
    for kind, own_way in (("prefetch", Table.prefetch), ("gather", Table.gather)):

        def note(self, ids, *args, kind=kind, own_way=own_way):
            events.append((kind, self, ids.clone()))
            return own_way(self, ids, *args)

        monkeypatch.setattr(Table, kind, note)
    monkeypatch.setattr(Table, "worth_prefetching", lambda self, count: self.placement == "mmap")  # warm or not
    return events


def rounds(events: list, model: EngramForCausalLM) -> list[list]:
    """The events of every forward pass, after checking their order: all tables are asked for before a row is gathered."""
    count = 2 * len(model.memories)
    passes = [events[i : i + count] for i in range(0, len(events), count)]
    in_order = [model.memories[layer].table.table for layer in sorted(model.memories)]
    for events in passes:
        assert [(kind, table) for kind, table, _ in events] == [
            (kind, table) for kind in ("prefetch", "gather") for table in in_order
        ]
    return passes


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_prefetched_for_all_layers_before_the_first(variant: str, saved, asked):
    model = load(saved(variant))
    model.generate(token_ids(), max_new_tokens=4, do_sample=False)
    passes = rounds(asked, model)
    assert [events[0][2].shape[:2] for events in passes] == [(2, 11), (2, 1), (2, 1), (2, 1)]
    for events in passes:
        for (_, _, ahead), (_, _, gathered) in zip(events[:2], events[2:], strict=True):
            assert {tuple(row) for row in gathered.flatten(0, -2).tolist()} <= {
                tuple(row) for row in ahead.flatten(0, 1).tolist()
            } or variant == "needle"  # which asks for whole n-grams only


def test_draft_tokens_are_prefetched_together(saved, asked):
    model = load(saved())
    helper = shared(seed=1)
    helper.generation_config.assistant_confidence_threshold = 0.0
    ids = token_ids(1)
    options = {"max_new_tokens": 6, "do_sample": False}
    drafted = model.generate(ids, assistant_model=helper, **options)
    lengths = [events[0][2].shape[1] for events in rounds(asked, model)]
    assert max(lengths[1:]) > 1  # several tokens in one pass
    assert torch.equal(drafted, shared().generate(ids, **options))


def test_nothing_is_prefetched_that_is_in_memory(saved, asked):
    logits(load(saved(), "ram"), token_ids())
    assert [kind for kind, _, _ in asked] == ["gather", "gather"]


def test_what_goes_wrong_while_prefetching_is_raised(saved, monkeypatch):
    model = load(saved())
    table = model.memories["1"].table.table

    def fails(ids) -> int:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(table._host[0], "prefetch", fails)
    with pytest.raises(OSError, match="the disk is on fire"):
        logits(model, token_ids())
    monkeypatch.undo()
    assert same_logits(model, shared())


def test_rows_that_a_collator_hashed_are_prefetched(saved, asked):
    model = load(saved())
    memories = [model.memories[str(layer)] for layer in model.spec.layer_ids]
    logits(model, token_ids())
    hashed = {table: ids for kind, table, ids in asked if kind == "prefetch"}
    asked.clear()
    rows = torch.stack([hashed[memory.table.table] for memory in memories], dim=2)
    found = logits(model, token_ids(), engram_rows=rows)
    assert torch.equal(found, logits(shared(), token_ids()))
    assert all(torch.equal(ids, hashed[table]) for kind, table, ids in asked if kind == "prefetch")


@pytest.mark.slow
def test_a_compiled_step_gives_the_same(saved):
    step = torch.compile(load(saved()).forward, backend="eager")
    with torch.no_grad():
        found = step(input_ids=token_ids(), use_cache=False).logits
    torch.testing.assert_close(found, logits(shared(), token_ids()), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------- memory


IN_A_CHILD = """
import gc, json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
import engram_peft

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024

torch.set_num_threads(1)
ids, found = torch.arange(3, 13)[None], []
for folder, placement, save in json.loads(sys.argv[1]):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, held = megabytes("VmHWM"), megabytes("RssAnon")
    model = AutoModelForCausalLM.from_pretrained(folder, table_placement=placement)
    text = model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False).tolist()
    peak = megabytes("VmHWM") - before
    if save:
        model.save_pretrained(save)
    found.append({"peak": peak, "held": megabytes("RssAnon") - held, "text": text})
    del model
    gc.collect()
print(json.dumps(found))
"""


def in_a_child(*runs: tuple) -> list[dict]:
    """Loads and generates for every `(folder, placement, folder to save to)`: MB at the peak, and of its own in the end."""
    command = [sys.executable, "-c", IN_A_CHILD, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def large_checkpoint(folder: Path, megabytes: int) -> None:
    """A tiny backbone and one layer's table of so many MB, whose file has holes instead of most rows."""
    width = 64
    slots = megabytes * 2**20 // (4 * width * 4)
    model = engram(engram_layer_ids=[1], engram_vocab_size=1000, engram_head_dim=width)
    config = copy.deepcopy(model.config)
    config.engram_vocab_size = slots
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[KEYS[1]]
    save_file(tensors, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    config.save_pretrained(folder)
    rows = sum(config.memory_spec().head_sizes(1))
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * width * rows]}
    header = json.dumps({"__metadata__": {"format": "pt"}, KEYS[1]: entry}).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / "model-00002-of-00002.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * width * rows)
        for start in range(8 + len(header), 8 + len(header) + 4 * width * rows - 4096, 2**20):
            file.seek(start)
            file.write(torch.ones(16).numpy().tobytes())
    weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    weight_map[KEYS[1]] = "model-00002-of-00002.safetensors"
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_by_the_table(tmp_path):
    model, small, again = (str(tmp_path / name) for name in ("model", "small", "again"))
    large_checkpoint(tmp_path / "model", 64)
    large_checkpoint(tmp_path / "small", 1)
    runs = [
        (small, "mmap", None),
        (small, "mmap", None),
        (model, "mmap", again),
        (model, "ram", None),
        (model, None, None),
    ]
    _, alone, mapped, ram, resident = in_a_child(*runs)
    assert ram["peak"] > 64 and ram["held"] > 64
    assert mapped["peak"] < alone["peak"] + 16
    assert mapped["held"] < 16  # also after saving
    assert mapped["text"] == ram["text"] == resident["text"]
    assert torch.equal(
        *(
            load_file(path)[KEYS[1]]
            for path in (file_of(tmp_path / "model", KEYS[1]), tmp_path / "again" / "model.safetensors")
        )
    )


@pytest.mark.slow
def test_4_gb_of_table_in_300_mb(tmp_path):
    model, small, again = (str(tmp_path / name) for name in ("model", "small", "again"))
    large_checkpoint(tmp_path / "model", 4096)
    large_checkpoint(tmp_path / "small", 1)
    _, alone, mapped = in_a_child((small, "mmap", None), (small, "mmap", None), (model, "mmap", again))
    assert mapped["peak"] < alone["peak"] + 300
    assert mapped["held"] < 300  # after saving
