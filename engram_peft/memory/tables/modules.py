"""Modules that take the place of an embedding and look rows up in a `Table`.

They have no parameters and no buffers: a table that is not resident is nothing that a state dict holds, an optimizer sees or
accelerate moves.
"""

from __future__ import annotations

import torch
from torch import nn

from .table import ScaledRows, Table


class MappedModule(nn.Module):
    """What `MappedEmbedding` and `MappedMultiHeadEmbedding` share.

    Args:
        table (`Table`): The rows.
        dtype (`torch.dtype`, *optional*):
            Of what comes out; by default that of the rows, and `torch.get_default_dtype()` for rows with scales.
        freeze (`bool`):
            Whether the rows stay as they are, as in `nn.Embedding.from_pretrained`. Rows that are not frozen cannot be trained here,
            so `train()` raises an error instead of training everything but them.
    """

    def __init__(self, table: Table, *, dtype: torch.dtype | None = None, freeze: bool = False) -> None:
        super().__init__()
        self.table = table
        self.freeze = freeze
        scaled = table.layout.scale_dtype is not None
        self.dtype = dtype or (torch.get_default_dtype() if scaled else table.dtype)
        self.training = False

    @property
    def weight(self) -> torch.Tensor:
        """`[rows, dim]` on the meta device: what asks for shape, dtype or device gets them, and nobody gets the rows."""
        return torch.empty(self.table.rows, self.table.dim, dtype=self.dtype, device="meta")

    def train(self, mode: bool = True) -> MappedModule:
        """As `nn.Module.train`.

        Raises:
            `RuntimeError`: The rows are trainable, and they lie in a table, which is read-only.
        """
        if mode:
            self.check_frozen()
        return super().train(mode)

    def check_frozen(self) -> None:
        """Raises a `RuntimeError` if the rows are trainable, as they lie in a table, which is read-only."""
        if not self.freeze:
            raise RuntimeError(
                f"The rows of this {type(self).__name__} lie in a read-only table ({self.table.placement}) and cannot be trained. "
                "Freeze them with `requires_grad_(False)` on this module, or load the model with its table as a parameter."
            )

    def requires_grad_(self, requires_grad: bool = True) -> MappedModule:
        """Freezes the rows, or says that they should be trained, which makes `train()` an error."""
        self.freeze = not requires_grad
        return self

    @torch.compiler.disable
    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """`[*ids.shape, dim]` on the device of `ids`."""
        if ids.is_meta:
            return torch.empty(*ids.shape, self.table.dim, dtype=self.dtype, device="meta")
        rows = self.table.gather(ids)
        rows = rows.dequantize(self.dtype) if isinstance(rows, ScaledRows) else rows.to(self.dtype)
        return rows.to(ids.device)

    def extra_repr(self) -> str:
        return f"{self.table}, dtype={self.dtype}, freeze={self.freeze}"


class MappedMultiHeadEmbedding(MappedModule):
    """Takes the place of the Engram demo's `MultiHeadEmbedding`, or of an `NgramTable`: ids within each head, one row a head.

    Args:
        table (`Table`): The rows of all heads.
        dtype (`torch.dtype`, *optional*):
            Of what comes out; by default that of the rows, and `torch.get_default_dtype()` for rows with scales.
        freeze (`bool`): Whether the rows stay as they are. If not, `train()` is an error.

    Example:

        ```py
        >>> export_table(engram.multi_head_embedding, head_sizes, "table.safetensors")
        >>> engram.multi_head_embedding = MappedMultiHeadEmbedding(open_table("table.safetensors"))
        ```
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..., heads]` -> `[..., heads, dim]`, on the device of `ids`."""
        return self._rows(ids)


class MappedEmbedding(MappedModule):
    """Takes the place of an `nn.Embedding`.

    Args:
        table (`Table`): The rows, one head.
        scale (`float`): What rows are multiplied by, as Gemma's scaled word embeddings do.
        dtype (`torch.dtype`, *optional*):
            Of what comes out; by default that of the rows, and `torch.get_default_dtype()` for rows with scales.
        freeze (`bool`): Whether the rows stay as they are. If not, `train()` is an error.

    Raises:
        `ValueError`: The table has several heads.
    """

    def __init__(
        self, table: Table, *, scale: float = 1.0, dtype: torch.dtype | None = None, freeze: bool = False
    ) -> None:
        if len(table.head_sizes) != 1:
            raise ValueError(f"An embedding is a table of one head, this has {len(table.head_sizes)}.")
        super().__init__(table, dtype=dtype, freeze=freeze)
        self.scale = scale

    @property
    def num_embeddings(self) -> int:
        return self.table.rows

    @property
    def embedding_dim(self) -> int:
        return self.table.dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`[...]` -> `[..., dim]`, on the device of `ids`."""
        rows = self._rows(ids)
        # the factor is rounded to the dtype of the rows first, as Gemma does
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype, device=rows.device)
