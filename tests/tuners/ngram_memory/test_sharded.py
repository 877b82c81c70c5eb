"""The adapter on several processes, against the same adapter on one: tensor parallelism and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from engram_peft import NgramMemoryConfig
from engram_peft.memory import distribute_tables
from engram_peft.models.engram import EngramForCausalLM, EngramLMConfig
from engram_peft.sharded import gathered
from engram_peft.training import create_optimizer

from ...processes import on_processes


IDS = torch.randint(3, 99, (6, 11), generator=torch.Generator().manual_seed(0))


def new_base() -> PreTrainedModel:
    """Heads and texts that two and three processes can share out."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6, head_dim=8,
        num_key_value_heads=6, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def new_adapter(base: PreTrainedModel, seed: int = 1) -> PeftModel:
    config = NgramMemoryConfig(
        layers_to_transform=[0, 1],
        vocab_size=101,
        compressed_vocab_size=99,
        n_heads=2,
        head_dim=5,
        init_weights=False,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(base, config).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def train(model: nn.Module, ids: torch.Tensor) -> None:
    # with the usual epsilon Adam makes whole steps of gradients that are nothing but rounding
    optimizer = create_optimizer(model, lr=0.005, eps=1e-3, muon=False)
    for step in range(3):
        optimizer.zero_grad()
        rows = (ids + step) % 96 + 3
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()


def reference(folder: Path) -> None:
    """The base model, the adapter before and after training, and what they say, in one process."""
    new_base().save_pretrained(folder / "base")
    model = new_adapter(new_base())
    model.save_pretrained(folder / "adapter")
    said = {"base": logits(new_base()), "before": logits(model)}
    train(model, IDS)
    model.save_pretrained(folder / "trained")
    torch.save(said | {"after": logits(model)}, folder / "said.pt")
    assert not torch.allclose(said["base"], said["before"], atol=0.05)


def check_saved(folder: Path, name: str) -> None:
    saved, expected = (load_file(folder / each / "adapter_model.safetensors") for each in (name, "trained"))
    assert saved.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(saved[key], tensor, rtol=1e-6, atol=1e-6)


def _fully_sharded(rank: int, folder: Path, placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = torch.load(folder / "said.pt")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval()
    tables = distribute_tables(model, mesh, placement)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=tables)
    fully_shard(model, mesh=mesh, ignored_params=tables)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.testing.assert_close(logits(model), said["before"], rtol=1e-4, atol=1e-4)
    train(model, IDS.chunk(dist.get_world_size())[rank])
    torch.testing.assert_close(logits(model), said["after"], rtol=1e-4, atol=1e-4)
    model.save_pretrained(folder / "again", is_main_process=rank == 0)


def _loaded(rank: int, folder: Path) -> None:
    """Into a model that is sharded as a whole, and into one whose adapter is sharded before its values come."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = torch.load(folder / "said.pt")
    base = fully_shard(AutoModelForCausalLM.from_pretrained(folder / "base"), mesh=mesh)
    model = PeftModel.from_pretrained(base, folder / "again").eval()
    torch.testing.assert_close(logits(model), said["after"], rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval()
    fully_shard(model, mesh=mesh, ignored_params=distribute_tables(model, mesh))
    model.load_adapter(folder / "again", "default", is_trainable=True)
    torch.testing.assert_close(logits(model), said["after"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_fully_sharded(tmp_path: Path, placement: Placement):
    reference(tmp_path)
    on_processes(2, _fully_sharded, tmp_path, placement)
    check_saved(tmp_path, "again")
    on_processes(3, _loaded, tmp_path)


def _tensor_parallel(rank: int, folder: Path) -> None:
    said = torch.load(folder / "said.pt")
    for placement in (None, Shard(0), Shard(1)):
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        base = AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=config)
        model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).eval()
        if placement is not None:
            distribute_tables(model, base._device_mesh["tp"], placement)
        torch.testing.assert_close(logits(model), said["before"], rtol=1e-4, atol=1e-4)
        if placement is not None:
            train(model, IDS)
            torch.testing.assert_close(logits(model), said["after"], rtol=1e-4, atol=1e-4)
            model.save_pretrained(folder / f"saved-{placement.dim}", is_main_process=rank == 0)


def _added(rank: int, folder: Path) -> None:
    """Memories that are drawn at random on every process: by the adapter, by the native model, by a sum of two."""
    torch.manual_seed(rank)
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=config)
    native = EngramForCausalLM.from_backbone(
        base, EngramLMConfig.from_backbone(base.config, engram_layer_ids=[1], engram_vocab_size=50)
    )
    assert same_everywhere(native.memories["1"].kv_proj.weight)
    model = new_adapter(AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=config), seed=rank)
    distribute_tables(model, base._device_mesh["tp"])
    before = logits(model)
    model.base_model.add_weighted_adapter(["default", "default"], [0.25, 0.75], "sum")
    for name in ("default", "sum"):
        for memory in model.base_model.memories(name).values():
            assert all(same_everywhere(parameter) for parameter in memory.parameters())
    model.set_adapter("sum")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def same_everywhere(tensor: torch.Tensor) -> bool:
    tensor = gathered(tensor.detach()).contiguous()
    first = tensor.clone()
    dist.broadcast(first, 0)
    return torch.equal(tensor, first)


def test_memories_drawn_at_random_are_the_same_on_all_processes(tmp_path: Path):
    new_base().save_pretrained(tmp_path / "base")
    on_processes(2, _added, tmp_path)


def test_tensor_parallel(tmp_path: Path):
    reference(tmp_path)
    on_processes(2, _tensor_parallel, tmp_path)
    for dim in (0, 1):
        check_saved(tmp_path, f"saved-{dim}")
