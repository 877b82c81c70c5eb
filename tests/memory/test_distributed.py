"""Tables on several processes, against the same table on one: rows, gradients, steps of the optimizer, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils import clip_grad_norm_

from engram_peft.memory import NgramTable, distribute_tables
from engram_peft.sharded import gathered
from engram_peft.training import create_optimizer

from ..processes import on_processes


PLACEMENTS = [Replicate(), Shard(0), Shard(1)]
OPTIONS = [{}, {"moments": "lazy"}, {"row_wise": True}]


class Reader(nn.Module):
    """A table of 18 rows of 5, which neither two nor three processes can divide, and a projection."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = NgramTable((7, 11), 5)
            self.out = nn.Linear(10, 3)
            nn.init.normal_(self.table.weight)
        self.to(dtype)

    def forward(self, rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.table(rows).flatten(-2))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), classes.flatten())


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six texts of three tokens; some rows in many of them, most in none, of the first part of the table at one time."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 3, (6, 3, 2), generator=generator) + torch.tensor([seed % 4, 0])
    return rows, torch.randint(0, 3, (6, 3), generator=generator)


def own(tensors: tuple[torch.Tensor, ...], rank: int) -> list[torch.Tensor]:
    return [tensor.chunk(dist.get_world_size())[rank] for tensor in tensors]


def trained_alone(options: dict[str, Any], steps: range) -> tuple[Reader, torch.optim.Optimizer]:
    model = Reader()
    optimizer = create_optimizer(model, lr=0.02, muon=False, **options)
    for seed in steps:
        optimizer.zero_grad()
        model(*batch(seed)).backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model, optimizer


def check_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(gathered(actual[name]), tensor, rtol=1e-6, atol=1e-6)


def check_steps(rank: int, mesh: DeviceMesh, placement: Placement, options: dict[str, Any], sparse: bool) -> None:
    model = Reader()
    tables = distribute_tables(model, mesh, placement)
    fully_shard(model, mesh=mesh, ignored_params=tables)
    optimizer = create_optimizer(model, lr=0.02, muon=False, **options)
    model.table.sparse = sparse
    alone, alone_optimizer = trained_alone(options, range(4))
    for seed in range(4):
        optimizer.zero_grad()
        model(*own(batch(seed), rank)).backward()
        assert model.table.weight.grad._local_tensor.is_sparse == sparse
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    check_close(dict(model.state_dict()), alone.state_dict())
    expected = table_state(alone_optimizer, alone)
    check_close(table_state(optimizer, model), expected)
    # what one process has saved, every process takes its part of
    resumed = create_optimizer(model, lr=1.0, muon=False, **options)
    resumed.load_state_dict(alone_optimizer.state_dict())
    check_close(table_state(resumed, model), expected)
    # and the other way round
    saved = optimizer.state_dict()
    whole = {
        index: {key: gathered_value(value) for key, value in each.items()} for index, each in saved["state"].items()
    }
    alone_optimizer.load_state_dict({**saved, "state": whole})
    check_close(table_state(alone_optimizer, alone), expected)


def gathered_value(value: Any) -> Any:
    return gathered(value) if isinstance(value, torch.Tensor) else value


def table_state(optimizer: torch.optim.Optimizer, model: Reader) -> dict[str, torch.Tensor]:
    state = optimizer.state[model.table.weight]
    return {key: torch.as_tensor(value) for key, value in state.items()}


def _train(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in PLACEMENTS:
        for options in OPTIONS:
            check_steps(rank, mesh, placement, options, sparse=True)
        check_steps(rank, mesh, placement, {"row_wise": True}, sparse=False)


@pytest.mark.parametrize("processes", [2, 3])
def test_training_steps_are_those_of_one_process(processes: int):
    on_processes(processes, _train)


def whole_gradient(table: NgramTable) -> torch.Tensor:
    """The dense gradient of the whole table, from the sparse ones of its parts."""
    gradient: Any = table.weight.grad
    return DTensor.from_local(
        gradient._local_tensor.to_dense(), gradient.device_mesh, gradient.placements, run_check=False,
        shape=gradient.shape, stride=gradient.stride(),
    ).full_tensor()  # fmt: skip


def _accumulate(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone = Reader()
    for seed in range(3):
        alone(*batch(seed)).backward()
    for placement in PLACEMENTS:
        model = Reader()
        distribute_tables(model, mesh, placement)
        create_optimizer(model)
        for seed in range(3):
            model(*own(batch(seed), rank)).backward()
        torch.testing.assert_close(whole_gradient(model.table), alone.table.weight.grad)


def test_gradients_add_up_over_several_backward_passes():
    on_processes(2, _accumulate)


def _read(rank: int) -> None:
    """All kinds of inputs: nothing, rows of one process alone, half precision; and all read the same on a mesh of that kind."""
    mesh, same = (init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,)) for name in ("dp", "tp"))
    for dtype in (torch.float32, torch.bfloat16):
        alone = Reader(dtype).table
        for placement in PLACEMENTS:
            model = Reader(dtype)
            distribute_tables(model, mesh, placement)
            for length in (4, rank, 0, 2 * (1 - rank)):
                rows = torch.randint(0, 7, (2, max(length, 0), 2), generator=torch.Generator().manual_seed(rank))
                assert torch.equal(model.table(rows), alone(rows))
            model = Reader(dtype)
            distribute_tables(model, same, placement)
            model.table.sparse = True
            rows = torch.randint(0, 7, (2, 3, 2), generator=torch.Generator().manual_seed(5))
            assert torch.equal(model.table(rows), alone(rows))
            factors = torch.randn(2, 3, 2, 5, generator=torch.Generator().manual_seed(6)).to(dtype)
            (model.table(rows) * factors).sum().backward()
            (alone(rows) * factors).sum().backward()
            assert model.table.weight.grad._local_tensor.is_sparse
            torch.testing.assert_close(whole_gradient(model.table), alone.weight.grad, rtol=1e-2, atol=1e-2)
            alone.weight.grad = None


def test_rows_and_gradients_whatever_each_process_reads():
    on_processes(2, _read)


def _save(rank: int, folder: Path, placement: Placement) -> None:
    model, _ = trained_alone({}, range(2))
    distribute_tables(model, init_device_mesh("cpu", (dist.get_world_size(),)), placement)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, folder / "state.pt")


def _load(rank: int, folder: Path) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in PLACEMENTS:
        model = Reader()
        distribute_tables(model, mesh, placement)
        model.load_state_dict(state)
        assert torch.equal(gathered(model.table.weight), state["table.weight"])
        assert model.table.weight.placements == (placement,)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_checkpoints_do_not_depend_on_the_number_of_processes(tmp_path: Path, placement: Placement):
    on_processes(2, _save, tmp_path, placement)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = trained_alone({}, range(2))[0].state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    Reader().load_state_dict(state)
    on_processes(3, _load, tmp_path)


def _refuse(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Reader()
    with pytest.raises(ValueError, match="`placement` must be"):
        distribute_tables(model, mesh, Shard(2))
    with pytest.raises(ValueError, match="`mesh` must have one dimension"):
        distribute_tables(model, init_device_mesh("cpu", (1, dist.get_world_size())))
    with pytest.raises(ValueError, match="no tables"):
        distribute_tables(model.out, mesh)
    assert not isinstance(model.table.weight, DTensor)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="sharded already"):
        distribute_tables(model, mesh)


def test_what_cannot_be_is_refused():
    on_processes(2, _refuse)


def _gathered_by_fsdp(rank: int) -> None:
    model = Reader()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = create_optimizer(model, lr=0.02, muon=False)
    assert not model.table.sparse
    for seed in range(4):
        optimizer.zero_grad()
        model(*own(batch(seed), rank)).backward()
        clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    check_close(dict(model.state_dict()), trained_alone({}, range(4))[0].state_dict())


def test_tables_that_fsdp_gathers_as_wholes_are_trained_too():
    on_processes(2, _gathered_by_fsdp)


class Counted:
    """How many bytes a collective was given, over all calls."""

    total = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.call = getattr(dist, name)
        monkeypatch.setattr(dist, name, self)

    def __call__(self, out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        Counted.total += out.nbytes + given.nbytes
        return self.call(out, given, *args, **kwargs)


def _count(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_gather_into_tensor"):
            Counted(patch, name)
        for placement in PLACEMENTS:
            table = NgramTable((100_000,), 8)
            distribute_tables(table, mesh, placement)
            table.sparse = True
            Counted.total = 0
            rows = torch.randint(0, 100_000, (16, 1), generator=torch.Generator().manual_seed(rank))
            table(rows).sum().backward()
            rows_there_and_back = 2 * 2 * 2 * 16 * 8 * 4
            ids = 2 * 2 * 2 * 16 * 8
            assert 0 < Counted.total < rows_there_and_back + ids + 200 < 0.01 * table.weight.nbytes


def test_what_is_sent_is_as_large_as_what_is_read():
    on_processes(2, _count)
