"""Where the tables of a model's memories live: opened in its checkpoint, compared with what the model holds, and back again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...memory.layer import NgramTable
from ...memory.tables.checkpoint import stored_tensors
from ...memory.tables.modules import MappedMultiHeadEmbedding
from ...memory.tables.table import Table, open_table


_COMPARED_ROWS = 65_536  # at a time


def table_key(layer: str) -> str:
    """The name of a layer's table in a checkpoint."""
    return f"memories.{layer}.table.weight"


def tables_in(files: Sequence[str | os.PathLike], memories: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of `memories`, which are parameters, in the files of a checkpoint: opened where they lie, by layer.

    Raises:
        `ValueError`: One is missing, or has another shape.
        `TableError`, `FileNotFoundError`: A file is missing, truncated or damaged.
    """
    stored = stored_tensors(files)
    tables = {}
    for layer, memory in memories.items():
        key, table = table_key(layer), memory.table
        if key not in stored:
            raise ValueError(
                f"The checkpoint lacks {key!r}, so it cannot be served from there. Without `table_placement`, it is made anew."
            )
        found, expected = stored[key].entry.shape, tuple(table.weight.shape)
        if found != expected:
            raise ValueError(f"{key} is {list(found)} in the checkpoint, {list(expected)} are needed.")
        tables[layer] = open_table(stored[key].path, tensor=key, head_sizes=table.head_sizes)
    return tables


def check_same_rows(memories: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    """Raises a `ValueError` unless tables hold the rows of `memories`, every bit of them."""
    for layer, memory in memories.items():
        weight = memory.table.weight.detach()
        with tables[layer].tensors() as tensors:
            rows = tensors[table_key(layer)]
            for start in range(0, len(rows), _COMPARED_ROWS):
                held, stored = (part[start : start + _COMPARED_ROWS].cpu() for part in (weight, rows))
                if not torch.equal(held.view(torch.uint8), stored.to(held.dtype).view(torch.uint8)):
                    raise ValueError(
                        f"{table_key(layer)} holds other rows in the checkpoint than in the model, which was changed since it was "
                        "loaded. Save the model, and name the folder: `checkpoint`."
                    )


def serve(memories: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    """Lets `memories` read their rows from `tables`; they are as trainable as they were, and of the dtype that they had."""
    for layer, memory in memories.items():
        old = memory.table
        freeze = old.freeze if isinstance(old, MappedMultiHeadEmbedding) else not old.weight.requires_grad
        memory.table = MappedMultiHeadEmbedding(tables[layer], dtype=old.weight.dtype, freeze=freeze)
        memory.table.training = old.training


def as_parameter(memory: Any) -> NgramTable:
    """The table of a memory with its rows, which are served, as a parameter beside the other weights."""
    served: MappedMultiHeadEmbedding = memory.table
    device = memory.kv_proj.weight.device
    with torch.device("meta"):  # which keeps the rows from being made twice
        table = NgramTable(served.table.head_sizes, served.table.dim)
    table.offsets = torch.empty_like(table.offsets, device=device)
    table.reset_buffers()
    with served.table.tensors() as tensors:
        (rows,) = tensors.values()
        weight = torch.empty(rows.shape, dtype=served.dtype, device=device).copy_(rows)
    table.weight = nn.Parameter(weight, requires_grad=not served.freeze)
    return table.train(served.training)


@contextmanager
def frozen(tables: Iterable[MappedMultiHeadEmbedding]) -> Iterator[None]:
    """`tables` count as frozen as long as the block lasts."""
    thawed = [table for table in tables if not table.freeze]
    for table in thawed:
        table.freeze = True
    try:
        yield
    finally:
        for table in thawed:
            table.freeze = False
