"""`EngramForCausalLM` on several processes, against the same model on one: tensor parallelism, FSDP2, DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig
from transformers.distributed import DistributedConfig

from engram_peft.memory import distribute_tables
from engram_peft.models.engram import EngramForCausalLM, EngramLMConfig
from engram_peft.sharded import gathered
from engram_peft.training import create_optimizer

from ...processes import on_processes


IDS = torch.randint(3, 99, (6, 11), generator=torch.Generator().manual_seed(0))
VARIANTS = ["deepseek", "qwen_ple"]  # a convolution in the cache, and none


def new_model(variant: str = "deepseek") -> EngramForCausalLM:
    """Heads and texts that two and three processes can share out."""
    backbone = LlamaConfig(
        vocab_size=99, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6, head_dim=8,
        num_key_value_heads=6, eos_token_id=2, pad_token_id=0, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    config = EngramLMConfig.from_backbone(
        backbone, engram_variant=variant, engram_layer_ids=[0, 1], engram_n_heads=2, engram_head_dim=5,
        engram_vocab_size=101,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = EngramForCausalLM(config)
        for memory in model.memories.values():
            nn.init.normal_(memory.table.weight)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def new_optimizer(model: nn.Module, muon: bool = False) -> torch.optim.Optimizer:
    # with the usual epsilon Adam makes whole steps of gradients that are nothing but rounding
    return create_optimizer(model, lr=0.005, eps=1e-3, muon=muon)


# ------------------------------------------------------------------------------------------------ tensor parallelism


def tensor_parallel(folder: Path, **plan: str) -> EngramForCausalLM:
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan or "auto")
    return EngramForCausalLM.from_pretrained(folder, distributed_config=config).eval()


def _tensor_parallel(rank: int, folder: Path) -> None:
    expected = torch.load(folder / "expected.pt")
    for dim, plan in ((0, {}), (1, {"memories.*.table": "ngram_table_colwise"})):
        model = tensor_parallel(folder / "model", **plan)
        for memory in model.memories.values():
            assert memory.table.weight.placements == (Shard(dim),)
            assert memory.table.weight.to_local().numel() < 0.7 * memory.table.weight.numel()
        torch.testing.assert_close(logits(model), expected["logits"], rtol=1e-4, atol=1e-4)
        written = model.generate(IDS[:2], max_new_tokens=5, do_sample=False)
        assert torch.equal(written, expected["written"])
        optimizer = new_optimizer(model)
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert all(memory.table.weight.grad._local_tensor.is_sparse for memory in model.memories.values())
        optimizer.step()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(gathered(tensor), expected["stepped"][name], rtol=1e-4, atol=1e-4)
        model.save_pretrained(folder / f"saved-{dim}", is_main_process=rank == 0)


def _loaded_in_parallel(rank: int, folder: Path) -> None:
    expected = torch.load(folder / "expected.pt")
    model = tensor_parallel(folder / "saved-0")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(gathered(tensor), expected["stepped"][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensor_parallel(tmp_path: Path, variant: str):
    model = new_model(variant)
    model.save_pretrained(tmp_path / "model")
    expected: dict[str, Any] = {"logits": logits(model)}
    expected["written"] = model.generate(IDS[:2], max_new_tokens=5, do_sample=False)
    optimizer = new_optimizer(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    expected["stepped"] = model.state_dict()
    torch.save(expected, tmp_path / "expected.pt")
    on_processes(2, _tensor_parallel, tmp_path)
    for dim in (0, 1):
        saved = EngramForCausalLM.from_pretrained(tmp_path / f"saved-{dim}")
        torch.testing.assert_close(logits(saved), logits(model), rtol=1e-4, atol=1e-4)
    on_processes(3, _loaded_in_parallel, tmp_path)


# ------------------------------------------------------------------------------------------------ data parallelism


def train(model: nn.Module, ids: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        rows = (ids + step) % 96 + 3
        model(input_ids=rows, labels=rows).loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def own_texts() -> torch.Tensor:
    return IDS.chunk(dist.get_world_size())[dist.get_rank()]


def trained_alone(variant: str, muon: bool) -> EngramForCausalLM:
    model = new_model(variant)
    train(model, IDS, new_optimizer(model, muon))
    return model


def check_trained(model: nn.Module, variant: str, muon: bool) -> None:
    alone = trained_alone(variant, muon)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, tensor in alone.state_dict().items():
        tolerance = 1e-3 if muon else 1e-6  # Muon multiplies in bfloat16, and sharded matrices in another order
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


def fully_sharded(variant: str, placement: Placement) -> EngramForCausalLM:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = new_model(variant)
    tables = distribute_tables(model, mesh, placement)
    for module in (*model.backbone.model.layers, *model.memories.values()):
        fully_shard(module, mesh=mesh, ignored_params=tables)
    return fully_shard(model, mesh=mesh, ignored_params=tables)


def _fully_sharded(rank: int, variant: str, placement: Placement, folder: Path) -> None:
    for muon in (True, False) if placement == Replicate() else (False,):
        model = fully_sharded(variant, placement)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        train(model, own_texts(), new_optimizer(model, muon))
        check_trained(model, variant, muon)
    model.save_pretrained(folder)


def _distributed_alike(rank: int, folder: Path) -> None:
    model = EngramForCausalLM.from_pretrained(folder).eval()
    expected = logits(model)
    distribute_tables(model, init_device_mesh("cpu", (dist.get_world_size(),)), Shard(1))
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_fully_sharded_training_is_that_of_one_process(tmp_path: Path, placement: Placement):
    variant = VARIANTS[placement.is_shard(1)]
    on_processes(2, _fully_sharded, variant, placement, tmp_path)
    saved = EngramForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(saved.eval()), logits(trained_alone(variant, muon=False)), rtol=1e-4, atol=1e-4)
    on_processes(3, _distributed_alike, tmp_path)


def _on_a_mesh_of_two_dimensions(rank: int, folder: Path, expected: torch.Tensor) -> None:
    config = DistributedConfig(fsdp_size=2, tp_size=2)
    model = EngramForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    create_optimizer(model, muon=False)
    assert not any(memory.table.sparse for memory in model.memories.values())  # FSDP2 reduces dense gradients only
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_fully_sharded_on_top_of_tensor_parallelism(tmp_path: Path):
    model = new_model()
    model.save_pretrained(tmp_path)
    on_processes(4, _on_a_mesh_of_two_dimensions, tmp_path, logits(model))


def _train_half(rank: int, folder: Path) -> None:
    model = fully_sharded("deepseek", Shard(0))
    optimizer = new_optimizer(model, muon=False)
    train(model, own_texts(), optimizer)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(model, optimizer, options=whole)
    if rank == 0:
        torch.save(states, folder / "states.pt")


def _train_the_rest(rank: int, folder: Path, placement: Placement) -> None:
    model = fully_sharded("deepseek", placement)
    optimizer = new_optimizer(model, muon=False)
    states, steps = torch.load(folder / "states.pt", weights_only=True)
    whole = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=steps, options=whole)
    train(model, own_texts(), optimizer)
    alone = new_model()
    optimizer = new_optimizer(alone)
    train(alone, IDS, optimizer)
    train(alone, IDS, optimizer)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(gathered(model.state_dict()[name]), tensor, rtol=1e-5, atol=2e-6)


def test_training_goes_on_with_another_number_of_processes(tmp_path: Path):
    on_processes(2, _train_half, tmp_path)
    on_processes(3, _train_the_rest, tmp_path, Shard(0))
    on_processes(1, _train_the_rest, tmp_path, Shard(1))


def _fully_sharded_by_transformers(rank: int, folder: Path) -> None:
    """It knows no parameters to leave alone, so tables are gathered, and their gradients are dense."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model = EngramForCausalLM.from_pretrained(folder / "model", distributed_config=config).eval()
    train(model, own_texts(), new_optimizer(model))
    model.save_pretrained(folder / "saved", is_main_process=rank == 0)


def test_fully_sharded_by_transformers(tmp_path: Path):
    new_model().save_pretrained(tmp_path / "model")
    on_processes(2, _fully_sharded_by_transformers, tmp_path)
    alone = new_model()
    optimizer = new_optimizer(alone)
    for memory in alone.memories.values():
        memory.table.sparse = False
    train(alone, IDS, optimizer)
    saved = EngramForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-6, atol=1e-6)


def _replicated(rank: int) -> None:
    for muon in (False, True):
        model = new_model()
        optimizer = new_optimizer(model, muon)
        train(DistributedDataParallel(model), own_texts(), optimizer)
        check_trained(model, "deepseek", muon)


@pytest.mark.parametrize("processes", [2, 3])
def test_data_parallel_training_is_that_of_one_process(processes: int):
    on_processes(processes, _replicated)
