"""Modules in the place of an embedding: the same rows, and nothing that a table in memory would drag along."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engram_peft.memory.tables import MappedEmbedding, MappedMultiHeadEmbedding, export_table, open_table

from .conftest import HEADS
from .rows import same, wild


class MultiHeadEmbedding(nn.Module):
    """The Engram demo's: ids within each head, shifted into one embedding."""

    def __init__(self, head_sizes, dim: int) -> None:
        super().__init__()
        offsets = torch.tensor([0, *head_sizes[:-1]]).cumsum(0)
        self.register_buffer("offsets", offsets)
        self.embedding = nn.Embedding(sum(head_sizes), dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids + self.offsets)


@pytest.fixture
def demo(path):
    original = MultiHeadEmbedding(HEADS, 8)
    export_table(original, HEADS, path)
    return original, MappedMultiHeadEmbedding(open_table(path))


def test_the_demos_embedding_is_replaced(demo):
    original, mapped = demo
    ids = torch.stack([torch.randint(0, size, (4, 6)) for size in HEADS], dim=-1)
    for variant in (ids, ids.int(), ids[:0], ids[0, 0], ids.transpose(0, 1)):
        assert same(mapped(variant), original(variant).detach())
    with pytest.raises(IndexError, match="head 0, which has rows 0 to 49"):
        mapped(torch.tensor([[55, 0, 0]]))  # the demo would answer with a row of head 1


def test_an_embedding_is_replaced(path):
    original = nn.Embedding(40, 8, dtype=torch.bfloat16)
    export_table(original, None, path)
    mapped = MappedEmbedding(open_table(path))
    for shape in ((), (3,), (2, 5), (0,)):
        ids = torch.randint(0, 40, shape)
        assert same(mapped(ids), original(ids).detach())
    assert (mapped.num_embeddings, mapped.embedding_dim) == (40, 8)
    assert (mapped.weight.shape, mapped.weight.dtype, mapped.weight.device.type) == (
        (40, 8),
        torch.bfloat16,
        "meta",
    )


def test_several_heads_are_no_embedding(exported):
    path, _ = exported()
    with pytest.raises(ValueError, match="a table of one head, this has 3"):
        MappedEmbedding(open_table(path))


def test_there_is_nothing_to_train_save_or_move(demo):
    _, mapped = demo
    assert [*mapped.parameters(), *mapped.buffers()] == []
    assert mapped.state_dict() == {}
    mapped.to(torch.float64)
    mapped.to("meta")
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert (mapped(ids).dtype, mapped(ids).device.type) == (torch.float32, "cpu")
    assert not mapped(ids).requires_grad
    assert copy.deepcopy(mapped).table is mapped.table
    assert mapped(torch.empty(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 8)
    assert "3 heads, mmap" in repr(mapped)


def test_trainable_rows_refuse_to_train(demo):
    _, mapped = demo
    model = nn.ModuleDict({"table": mapped, "head": nn.Linear(8, 8)})
    assert not mapped.training
    model.eval()
    with pytest.raises(RuntimeError, match="read-only table .mmap. and cannot be trained. Freeze them with"):
        model.train()
    mapped.requires_grad_(False)
    model.train()
    assert model.training and mapped.training
    mapped.requires_grad_(True)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()
    assert MappedMultiHeadEmbedding(mapped.table, freeze=True).train().training


def test_numbers_come_in_the_dtype_that_is_wanted(path):
    weight, factors = wild(torch.int8, 20, 8), torch.rand(20, 2)
    export_table(weight, None, path, scales=factors)
    table = open_table(path)
    ids = torch.tensor([3, 19, 3])
    expected = (weight.float().view(20, 2, 4) * factors.unsqueeze(-1)).view(20, 8)[ids]
    assert torch.equal(MappedEmbedding(table)(ids), expected)
    assert same(MappedEmbedding(table, dtype=torch.bfloat16)(ids), expected.bfloat16())
    assert torch.equal(MappedMultiHeadEmbedding(table)(ids.view(3, 1)), expected.view(3, 1, 8))


def test_a_compiled_model_looks_rows_up_too(demo):
    original, mapped = demo
    ids = torch.tensor([[1, 2, 3]])
    compiled = torch.compile(nn.Sequential(mapped), backend="eager")
    assert same(compiled(ids), original(ids).detach())
