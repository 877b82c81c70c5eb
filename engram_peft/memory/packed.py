"""Packed tables: most rows of a trained table are still zero, so a checkpoint and what is loaded from it hold the others only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .layer import NgramMemory, NgramTable


class PackedTable(nn.Module):
    """A table of which most rows are zero: the numbers and values of the others. Replaces an `NgramTable` for inference.

    Args:
        head_sizes (`Sequence[int]`): Slots per table.
        dim (`int`): Width of a row.
        count (`int`): How many rows are held.

    **Attributes**:
        - **rows** (`torch.Tensor`) -- `(count,)` int64, ascending: their numbers, tables below each other.
        - **weight** (`nn.Parameter`) -- `(count, dim)`: their values.
    """

    rows: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, head_sizes: Sequence[int], dim: int, count: int) -> None:
        super().__init__()
        self.head_sizes = tuple(head_sizes)
        self.weight = nn.Parameter(torch.zeros(count, dim))
        self.register_buffer("rows", torch.arange(count))
        sizes = torch.tensor(self.head_sizes)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., tables)` rows within each table -> `(..., tables, dim)`."""
        numbers = rows.to(self.rows.device) + self.offsets
        places = torch.searchsorted(self.rows, numbers).clamp_max(len(self.rows) - 1)
        held = self.rows[places] == numbers
        return torch.where(held.unsqueeze(-1), self.weight[places], 0)

    def extra_repr(self) -> str:
        count, dim = self.weight.shape
        return f"{len(self.head_sizes)} tables, {count} of {sum(self.head_sizes)} rows, dim={dim}"


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Numbers `(count,)` and values `(count, dim)` of the rows that are not zero, if they are smaller than `weight` as a whole."""
    rows = (weight != 0).any(dim=1).nonzero()[:, 0]
    bytes_per_row = weight.shape[1] * weight.element_size()
    # an empty table is held as one zero row: safetensors and transformers' loader do not love empty tensors
    rows = rows if len(rows) else rows.new_zeros(1)
    if len(rows) * (bytes_per_row + rows.element_size()) >= len(weight) * bytes_per_row:
        return None
    return rows, weight[rows]


def unpacked(rows: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """The whole weight `(count, dim)` of which `packed` returned the parts."""
    weight = values.new_zeros(count, values.shape[1])
    return weight.index_copy_(0, rows.to(values.device), values)


def row_problem(rows: torch.Tensor, values: torch.Tensor, count: int) -> str | None:
    """What is wrong with rows that a file claims a table to have, if anything."""
    if rows.dim() != 1 or values.dim() != 2 or len(rows) != len(values):
        return f"{list(rows.shape)} row numbers for {list(values.shape)} values"
    if rows.is_floating_point() or not len(rows):
        return "no row numbers"
    if int(rows.min()) < 0 or int(rows.max()) >= count or bool((rows[1:] <= rows[:-1]).any()):
        return f"row numbers that are not ascending and below {count}"
    return None


def unpack_table(memory: NgramMemory) -> NgramTable:
    """Makes sure that a memory holds all of its rows, so that any can change, and returns the table.

    Raises:
        `TypeError`: Its rows live in another kind of table.
    """
    table = memory.table
    if isinstance(table, NgramTable):
        return table
    if not isinstance(table, PackedTable):
        raise TypeError(f"The rows of a {type(table).__name__} cannot be changed here.")
    whole = NgramTable(table.head_sizes, table.weight.shape[1]).to(table.weight.device)
    weight = unpacked(table.rows, table.weight.detach(), sum(table.head_sizes))
    whole.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
    memory.table = whole
    return whole


def writable_table(memory: NgramMemory) -> NgramTable:
    """`unpack_table`, for code that writes rows of the table by their numbers.

    Raises:
        `TypeError`: The rows lie on several processes, or in another kind of table.
    """
    table = unpack_table(memory)
    if isinstance(table.weight, DTensor):
        raise TypeError(
            "The rows of this memory lie on several processes. Write them in a model on one process, save it, and load it on several."
        )
    return table
