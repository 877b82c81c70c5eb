"""Models whose weights are elsewhere: offloaded by accelerate, sharded, or nowhere. What is found is what the plain model gives."""

from __future__ import annotations

import accelerate
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from engram_peft import EngramConfig, collect_statistics, unlearn
from engram_peft.editing.weights import execution_device, float_weight, input_device

from .adapters import RETAIN, close, edited, layers_of, logits, same_tensors, tensors


MAP = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
       "model.norm": "cpu", "lm_head": "disk"}  # fmt: skip
ITEMS = {"france": ("the capital of france is", " paris"), "italy": ("the capital of italy is", " rome")}
KEPT = [("the capital of spain is", " madrid"), "the old red house on the long road"]


@pytest.fixture(params=["cpu_offload", "disk_offload", "dispatch_model", "from_pretrained"])
def offloaded(request, tiny_model, tmp_path, monkeypatch):
    """`offloaded()`: the tiny model with weights that are only there while a layer computes."""
    monkeypatch.chdir(
        tmp_path
    )  # PEFT 0.21 writes the files of an offloaded model that it loads an adapter onto below it

    def make():
        model = tiny_model("llama")
        folder = tmp_path / "offloaded"
        if request.param == "cpu_offload":
            return accelerate.cpu_offload(model, execution_device="cpu")
        if request.param == "disk_offload":
            return accelerate.disk_offload(model, folder, execution_device="cpu")
        if request.param == "dispatch_model":
            return accelerate.dispatch_model(model, MAP, main_device="cpu", offload_dir=folder, force_hooks=True)
        model.save_pretrained(tmp_path / "checkpoint")
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "checkpoint", device_map=MAP, offload_folder=folder
        ).eval()

    return make


def weights_are_away(model):
    found = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not [name for name in found if "engram_" in name]
    return len(found) > 5


def test_offloaded_model_is_edited_as_if_it_were_there(offloaded, tiny_model, tokenizer, ids, tmp_path):
    expected = logits(edited(tiny_model("llama"), tokenizer, scale="adaptive"), ids)
    model = edited(offloaded(), tokenizer, scale="adaptive")
    assert weights_are_away(model)
    assert torch.equal(logits(model, ids), expected)
    model.save_pretrained(tmp_path / "adapter")
    base, options = offloaded(), {}
    if (tmp_path / "checkpoint").exists():
        # PEFT dispatches anew what `from_pretrained` dispatched, and has to be told where to
        where = {f"base_model.model.{name}": device for name, device in MAP.items()}
        options = {"device_map": where, "offload_folder": tmp_path / "again"}
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter", **options).eval()
    assert torch.equal(logits(loaded, ids), expected)


def test_offloaded_model_is_merged_and_unmerged(offloaded, tiny_model, tokenizer, ids):
    plain = edited(tiny_model("llama"), tokenizer)
    unmerged = logits(plain, ids)
    plain.merge_adapter()
    merged = logits(plain, ids)
    model = edited(offloaded(), tokenizer)
    model.merge_adapter()
    assert weights_are_away(model)
    assert torch.equal(logits(model, ids), merged)
    model.unmerge_adapter()
    assert weights_are_away(model)
    assert torch.equal(logits(model, ids), unmerged)
    assert torch.equal(logits(model.merge_and_unload(), ids), merged)


def test_merged_offloaded_layer_can_be_switched_off(offloaded, tokenizer, ids):
    """PEFT unmerges layer by layer then, without loading them first."""
    model = edited(offloaded(), tokenizer)
    with model.disable_adapter():
        base = logits(model, ids)
    model.merge_adapter()
    layer = layers_of(model)["model.layers.1.mlp.down_proj"]
    layer.enable_adapters(False)
    layer.unmerge()
    model.base_model.unload()
    assert torch.equal(logits(model, ids), base)


def test_items_of_an_offloaded_model(offloaded, tiny_model, tokenizer, ids):
    expected = unlearn(tiny_model("llama"), tokenizer, ITEMS, KEPT)
    model = unlearn(offloaded(), tokenizer, ITEMS, KEPT)
    assert weights_are_away(model)
    assert model.base_model.item_strengths() == expected.base_model.item_strengths()
    assert torch.equal(logits(model, ids), logits(expected, ids))


def test_weights_are_found_and_let_go(offloaded, tiny_model):
    model, plain = offloaded(), tiny_model("llama")
    layer = model.model.layers[1].mlp.down_proj
    assert layer.weight.is_meta and execution_device(layer) == input_device(model) == torch.device("cpu")
    assert torch.equal(float_weight(layer), plain.model.layers[1].mlp.down_proj.weight)
    assert layer.weight.is_meta


def test_weights_that_come_with_a_module_around_them(tiny_model, tokenizer):
    """They are there while the model runs, and so for collection; a layer alone cannot get at its own."""
    model = accelerate.cpu_offload(tiny_model("llama"), "cpu", preload_module_classes=["LlamaMLP"])
    plain = tiny_model("llama")
    found, expected = (collect_statistics(m, RETAIN, tokenizer=tokenizer) for m in (model, plain))
    assert all(torch.equal(found.covariance(name), expected.covariance(name)) for name in expected.moments)
    with pytest.raises(ValueError, match="module around the layer.*preload_module_classes"):
        float_weight(model.model.layers[0].mlp.down_proj)


def test_model_on_the_meta_device_is_left_as_it_was(tiny_model, tokenizer):
    model = tiny_model("llama").to("meta")
    names = [name for name, _ in model.named_modules()]
    for config in (None, EngramConfig.paper(task_type="CAUSAL_LM")):
        with pytest.raises(ValueError, match="meta device.*from_pretrained"):
            unlearn(model, tokenizer, ITEMS, KEPT, config)
        assert [name for name, _ in model.named_modules()] == names


def test_model_that_is_partly_on_the_meta_device_is_refused(tiny_model, tokenizer):
    model = tiny_model("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="meta device"):
        collect_statistics(model, RETAIN, tokenizer=tokenizer)


# ------------------------------------------------------------------------------------------------ sharded


@pytest.fixture
def mesh(tmp_path):
    """A device mesh of this process alone."""
    init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        destroy_process_group()


def test_sharded_models_are_edited_merged_and_unmerged(mesh, tiny_model, tokenizer, ids):
    """By a process alone; for several see `test_sharded.py`."""

    def parallel(model):
        plan = {"model.layers.*.mlp.gate_proj": ColwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)

    def fully_sharded(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    expected = edited(tiny_model("llama"), tokenizer, scale="adaptive")
    unmerged = logits(expected, ids)
    expected.merge_adapter()
    for shard in (parallel, fully_sharded):
        model = edited(shard(tiny_model("llama")), tokenizer, scale="adaptive")
        before = logits(model, ids)
        assert close(before, unmerged, 1e-5)
        if shard is fully_sharded:
            model.get_base_model().reshard()
        model.merge_adapter()
        assert close(logits(model, ids), logits(expected, ids), 1e-5)
        model.disable_adapter_layers() if shard is parallel else model.get_base_model().reshard()
        model.enable_adapter_layers() if shard is parallel else model.unmerge_adapter()
        assert torch.equal(logits(model, ids), before)


def test_inputs_sharded_over_some_part_of_a_mesh_are_refused(mesh, tiny_model):
    model = tiny_model("llama")
    layer, both = model.model.layers[0].mlp.down_proj, init_device_mesh("cpu", (1, 1))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), both, [Shard(0), Shard(1)]))
    with pytest.raises(TypeError, match="along its input.*exclude_modules"):
        get_peft_model(model, EngramConfig(target_modules=["down_proj"]))


def test_sharded_weights_that_others_share_are_not_merged_into(mesh, tiny_model, tokenizer, ids):
    model = edited(fully_shard(tiny_model("qwen3"), mesh=mesh), tokenizer, target_modules=["lm_head"])
    model.get_base_model().reshard()
    with pytest.raises(ValueError, match="shares its weight.*sharded"):
        model.merge_adapter(untie=True)


def test_data_parallel_models_are_looked_through(mesh, tiny_model, tokenizer, ids):
    expected = edited(tiny_model("llama"), tokenizer)
    for wrap in (nn.parallel.DistributedDataParallel, nn.DataParallel):
        model = edited(wrap(tiny_model("llama")), tokenizer)
        assert layers_of(model).keys() == layers_of(expected).keys()
        assert same_tensors(tensors(model), tensors(expected))
        assert torch.equal(logits(model, ids), logits(expected, ids))
        by_item = unlearn(wrap(tiny_model("llama")), tokenizer, ITEMS, KEPT)
        assert sorted(layers_of(by_item)) == ["model.layers.1.mlp.down_proj"]
