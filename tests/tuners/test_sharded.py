"""Adapters on models whose weights are sharded over processes, against the same adapter on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig

from engram_peft import EngramConfig, unlearn
from engram_peft.sharded import gathered

from ..moe import moe_model
from ..processes import on_processes
from .adapters import close, edited, layers_of, logits


IDS = torch.randint(7, 99, (3, 9), generator=torch.Generator().manual_seed(0))
ITEMS = {"france": ("the capital of france is", " paris"), "italy": ("the capital of italy is", " rome")}
KEPT = [("the capital of spain is", " madrid"), "the old red house on the long road"]
# what extraction writes down: only with it may a layer have a factor of full width (rank 0)
RECORD = dict.fromkeys(("target_rows", "total_rows", "target_texts", "total_texts", "mask", "scale", "cut"), 1)


def new_base() -> PreTrainedModel:
    """Biases everywhere, and widths that three processes cannot divide."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(std=0.2)
    return model.eval()


def new_adapter(model: PreTrainedModel, **config: Any) -> PeftModel:
    """Random factors, one of full width if it edits no bias."""
    options = {"target_modules": ["q_proj", "o_proj", "down_proj", "gate_proj"], "r": 3, "alpha": 0.1} | config
    if not options.get("absorb_bias", True):
        options |= {"rank_pattern": {"model.layers.1.mlp.down_proj": 0}, "extraction": RECORD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapter = EngramConfig(task_type="CAUSAL_LM", init_weights=False, **options)
        model = get_peft_model(model, adapter).eval()
        with torch.no_grad():
            for layer in layers_of(model).values():
                layer.modules_of("default")[2].weight.uniform_(0.5, 1)
    return model


def reference(folder: Path, **config: Any) -> None:
    """The base model, an adapter and what they say, in one process."""
    model = new_base()
    model.save_pretrained(folder / "base")
    model = new_adapter(model, **config)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    merged = new_adapter(new_base(), **config)
    merged.merge_adapter()
    said = {"adapter": logits(model, IDS), "merged": logits(merged, IDS), "base": logits(new_base(), IDS)}
    assert not close(said["adapter"], said["base"], 0.05)
    torch.save(said, folder / "logits.pt")
    weights = {n: p.detach() for n, p in merged.get_base_model().named_parameters() if ".base_layer." in n}
    torch.save(weights, folder / "merged.pt")
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.save({n: p.grad for n, p in model.named_parameters() if "engram_" in n}, folder / "gradients.pt")


def reshard(model: torch.nn.Module) -> None:
    """What FSDP2 does itself before the next forward pass, but for the outermost module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_as_on_one_process(model: PeftModel, rank: int, folder: Path) -> None:
    """Forward, saving, merging and unmerging."""
    said = torch.load(folder / "logits.pt")
    before = logits(model, IDS)
    assert close(before, said["adapter"], 1e-5)
    with torch.enable_grad():
        assert close(model(input_ids=IDS).logits.detach(), said["adapter"], 1e-5)
    with model.disable_adapter():
        assert close(logits(model, IDS), said["base"], 1e-5)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):  # which would keep what it gathers
        with torch.inference_mode():
            assert close(model(input_ids=IDS).logits, said["adapter"], 1e-5)
    model.save_pretrained(folder / "again", save_embedding_layers=False, is_main_process=rank == 0)
    dist.barrier()
    saved, expected = (load_file(folder / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert saved.keys() == expected.keys() and all(torch.equal(saved[key], expected[key]) for key in saved)
    own = {name: gathered(tensor) for name, tensor in model.get_base_model().named_parameters()}
    weights = {name: tensor.clone() for name, tensor in own.items() if ".base_layer." in name}
    reshard(model)
    model.merge_adapter()
    assert close(logits(model, IDS), said["merged"], 1e-5)
    reshard(model)
    merged = torch.load(folder / "merged.pt")
    for name, tensor in model.get_base_model().named_parameters():
        if name in merged:  # every process has computed the same whole weights as one process alone does
            assert torch.equal(gathered(tensor), merged[name]), name
    model.unmerge_adapter()
    for name, tensor in model.get_base_model().named_parameters():
        assert name not in weights or torch.equal(gathered(tensor), weights[name])
    assert torch.equal(logits(model, IDS), before)


def check_gradients(model: PeftModel, folder: Path) -> None:
    """Those of the factors, of all texts on every process."""
    model.set_requires_grad("default")
    model(input_ids=IDS, labels=IDS).loss.backward()
    expected = torch.load(folder / "gradients.pt")
    found = {name: gathered(p.grad) for name, p in model.named_parameters() if "engram_" in name}
    assert found.keys() == expected.keys()
    for name, parameter in model.named_parameters():
        if "engram_" in name and isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements
    for name, gradient in expected.items():
        assert close(found[name], gradient, 1e-4), name
    model.set_requires_grad("default", False)


# ------------------------------------------------------------------------------------------------ tensor parallelism


def tensor_parallel(folder: Path) -> PreTrainedModel:
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=config).eval()


def _tensor_parallel(rank: int, folder: Path) -> None:
    model = PeftModel.from_pretrained(tensor_parallel(folder), folder / "adapter").eval()
    layers = layers_of(model)
    row_parallel = [layer for name, layer in layers.items() if name.endswith(("o_proj", "down_proj"))]
    assert len(row_parallel) == 4
    for layer in row_parallel:
        a, b, _ = layer.modules_of("default")
        assert all(isinstance(parameter, DTensor) for module in (a, b) for parameter in module.parameters())
        assert a.weight.to_local().shape[1] < a.weight.shape[1] if hasattr(a, "weight") else True
    check_as_on_one_process(model, rank, folder)
    check_gradients(model, folder)
    lazily = PeftModel.from_pretrained(tensor_parallel(folder), folder / "adapter", low_cpu_mem_usage=True)
    assert torch.equal(logits(lazily, IDS), logits(model, IDS))
    # factors that are drawn at random are the same everywhere, whatever the seeds
    torch.manual_seed(rank)
    model.add_adapter("drawn", EngramConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"], r=2))
    for layer in layers.values():
        if "drawn" in layer.engram_A:
            right = layer.factors("drawn")[0].detach()
            others = [torch.empty_like(right) for _ in range(dist.get_world_size())]
            dist.all_gather(others, right)
            assert all(torch.equal(right, other) for other in others)
    # what is computed from several adapters
    model.base_model.add_weighted_adapter(["default", "default"], [0.5, 0.5], "halves")
    model.set_adapter("halves")
    assert close(logits(model, IDS), torch.load(folder / "logits.pt")["adapter"], 1e-5)


@pytest.mark.parametrize("absorb_bias", [True, False])
def test_tensor_parallel_of_transformers(tmp_path: Path, absorb_bias: bool):
    reference(tmp_path, absorb_bias=absorb_bias)
    on_processes(2, _tensor_parallel, tmp_path)


def _parallelized(rank: int, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole_input = Replicate()
    plan = {
        "model.layers.0.mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "model.layers.0.mlp.up_proj": ColwiseParallel(use_local_output=False),
        "model.layers.0.mlp.down_proj": RowwiseParallel(),
        "model.layers.1.mlp.down_proj": RowwiseParallel(input_layouts=whole_input),
        "model.layers.1.self_attn.q_proj": ColwiseParallel(output_layouts=Replicate()),
        "model.embed_tokens": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(base, mesh, plan)
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    check_as_on_one_process(model, rank, folder)
    check_gradients(model, folder)


def _edited(rank: int, folder: Path, tokenizer: PreTrainedTokenizerBase, expected: dict[str, torch.Tensor]) -> None:
    def all_sharded() -> PreTrainedModel:
        return fully_sharded(AutoModelForCausalLM.from_pretrained(folder / "base").eval())

    for base in (lambda: tensor_parallel(folder), all_sharded):
        model = edited(base(), tokenizer, scale="adaptive")
        assert close(logits(model, IDS), expected["texts"], 1e-4)
        assert close(logits(unlearn(base(), tokenizer, ITEMS, KEPT), IDS), expected["items"], 1e-4)


def test_sharded_models_are_edited_as_whole_ones(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    """From texts and item by item; row-parallel layers see a slice of their input."""
    new_base().save_pretrained(tmp_path / "base")
    expected = {
        "texts": logits(edited(new_base(), tokenizer, scale="adaptive"), IDS),
        "items": logits(unlearn(new_base(), tokenizer, ITEMS, KEPT), IDS),
    }
    on_processes(2, _edited, tmp_path, tokenizer, expected)


def test_modules_parallelized_by_torch_on_three_processes(tmp_path: Path):
    """Widths that do not divide, outputs that stay `DTensor`s, an input that the layer cuts itself, an embedding."""
    reference(tmp_path, target_modules=["q_proj", "o_proj", "down_proj", "gate_proj", "embed_tokens"])
    on_processes(3, _parallelized, tmp_path)


# ------------------------------------------------------------------------------------------------ FSDP2


def fully_sharded(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fully_sharded(rank: int, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    model = fully_sharded(PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    check_as_on_one_process(model, rank, folder)
    check_gradients(model, folder)
    # values loaded into an adapter that is sharded already
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    before = logits(model, IDS)
    set_peft_model_state_dict(model, {name: tensor / 2 for name, tensor in stored.items()})
    assert not close(logits(model, IDS), before, 1e-3)
    set_peft_model_state_dict(model, stored)
    assert torch.equal(logits(model, IDS), before)
    # an adapter loaded into a model that is sharded already is whole everywhere
    base = fully_sharded(AutoModelForCausalLM.from_pretrained(folder / "base").eval())
    around = PeftModel.from_pretrained(base, folder / "adapter").eval()
    check_as_on_one_process(around, rank, folder)
    reshard(around)
    assert close(logits(around.merge_and_unload(), IDS), torch.load(folder / "logits.pt")["merged"], 1e-5)
    logits(model, IDS)
    with pytest.raises(RuntimeError, match="gathered.*reshard"):
        model.merge_adapter()


def _fully_sharded_by_transformers(rank: int, folder: Path, tp_size: int) -> None:
    config = DistributedConfig(fsdp_size=2, tp_size=tp_size)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=config).eval()
    check_as_on_one_process(PeftModel.from_pretrained(base, folder / "adapter").eval(), rank, folder)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fully_sharded_by_transformers(tmp_path: Path, tp_size: int):
    """Alone, and on top of tensor parallelism, where weights lie on a mesh of two dimensions."""
    reference(tmp_path)
    on_processes(2 * tp_size, _fully_sharded_by_transformers, tmp_path, tp_size)


@pytest.mark.parametrize("processes", [2, 3])
def test_fully_sharded(tmp_path: Path, processes: int):
    reference(tmp_path, target_modules=["q_proj", "o_proj", "down_proj", "gate_proj", "embed_tokens"])
    on_processes(processes, _fully_sharded, tmp_path)


def new_mixture() -> PeftModel:
    """Random edits of experts, before anything is sharded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = EngramConfig(task_type="CAUSAL_LM", init_weights=False, r=3, alpha=0.3)
        return get_peft_model(moe_model("gpt_oss"), config).eval()


def _fully_sharded_mixture(rank: int) -> None:
    expected, model = new_mixture(), fully_sharded(new_mixture())
    before = logits(model, IDS)
    assert close(before, logits(expected, IDS), 1e-5)
    reshard(model)
    for each in (expected, model):
        each.merge_adapter()
    assert close(logits(model, IDS), logits(expected, IDS), 1e-5)
    reshard(model)
    for name, tensor in expected.named_parameters():
        if "engram_" not in name:
            assert torch.equal(gathered(model.get_parameter(name)), tensor), name
    model.unmerge_adapter()
    assert torch.equal(logits(model, IDS), before)


def test_experts_of_a_fully_sharded_model():
    """Weights and biases of experts, and a router."""
    on_processes(2, _fully_sharded_mixture)


def _sharded_along_the_input(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    fully_shard(base, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1))
    check_as_on_one_process(PeftModel.from_pretrained(base, folder / "adapter").eval(), rank, folder)


def test_fully_sharded_along_the_input(tmp_path: Path):
    """Weights look like those of row-parallel layers, but for the mesh."""
    reference(tmp_path)
    on_processes(2, _sharded_along_the_input, tmp_path)
