"""From token ids to table rows: suffix n-grams, hashed once for every table.

Four published hashes, bit for bit; `NgramMemorySpec.variant` says which. All arithmetic is int64 on the device of the ids.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .spec import NgramMemorySpec


# Needle's hash: FNV-1a's prime, seeds that are multiples of the golden ratio, all modulo 2^32.
_NEEDLE_SEED = 0x9E3779B9
_NEEDLE_PRIME = 0x01000193
_MASK32 = 0xFFFFFFFF


class NgramHash(nn.Module):
    """The rows that each token's n-grams fall on in the tables of one layer.

    For the XOR variants, with the multipliers `m` of the layer and a table of size `P`,
    `row_t = (x_t m_0 ^ x_{t-1} m_1 ^ ... ^ x_{t-n+1} m_{n-1}) mod P`, floored. For `needle`, Needle's 32-bit FNV.

    Args:
        spec (`NgramMemorySpec`): The memory.
        layer_id (`int`): One of `spec.layer_ids`.
    """

    multipliers: torch.Tensor
    head_sizes: torch.Tensor
    seeds: torch.Tensor

    def __init__(self, spec: NgramMemorySpec, layer_id: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_id = layer_id
        for name, value in self._constants().items():
            self.register_buffer(name, value, persistent=False)

    def _constants(self) -> dict[str, torch.Tensor]:
        """What follows from the spec: head sizes and Needle's seeds `(orders, heads)`, multipliers `(N,)`; int64."""
        spec = self.spec
        stride = spec.seed_heads or spec.n_heads
        seeds = [
            [_NEEDLE_SEED * (index * stride + head + 1) & _MASK32 for head in range(spec.n_heads)]
            for index in range(len(spec.orders))
        ]
        return {
            "multipliers": torch.tensor(spec.multipliers(self.layer_id), dtype=torch.int64, device="cpu"),
            "head_sizes": torch.tensor(spec.head_sizes(self.layer_id), device="cpu").view(
                len(spec.orders), spec.n_heads
            ),
            "seeds": torch.tensor(seeds, device="cpu"),
        }

    def reset_buffers(self) -> None:
        """Writes the constants again. They are not saved, so a module made on the meta device needs it after `to_empty`."""
        for name, value in self._constants().items():
            getattr(self, name).copy_(value)

    def forward(self, ids: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        """
        Args:
            ids (`torch.Tensor`): `(batch, N - 1 + length)` int64, compressed; the first `N - 1` came before.
            reach (`torch.Tensor`):
                `(batch, length)` int64: how many tokens directly before it each token may look back to, and -1 for one that
                reads nothing (`reach.token_reach`).

        Returns:
            `torch.Tensor`: `(batch, length, tables)` int64, rows within each table, order-major.

        Raises:
            `ValueError`: The shapes do not fit.
        """
        spec = self.spec
        length = reach.shape[1]
        if ids.shape[1] != spec.ids_lookback + length:
            raise ValueError(
                f"`ids` must hold the {spec.ids_lookback} tokens before this call and its {length} tokens, got {tuple(ids.shape)}."
            )
        tokens = self.readable_tokens(ids, reach)
        rows = self._needle_rows(tokens) if spec.variant == "needle" else self._xor_rows(tokens)
        return rows.flatten(-2)

    def readable_tokens(self, ids: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        """`(batch, length, N)`: of each token the one `k` steps back, or the fill where that must not be read."""
        spec = self.spec
        tokens = ids.unfold(1, spec.max_ngram_size, 1).flip(-1)
        readable = reach.unsqueeze(-1) >= torch.arange(spec.max_ngram_size, device=reach.device)
        if spec.variant == "qwen_ple":  # no end-of-sequence token in between
            unbroken = torch.ne(tokens[..., 1:], spec.eos_token_id).cumprod(-1)  # type: ignore[arg-type]  # the spec has one
            readable = readable & F.pad(unbroken, (1, 0), value=1).bool()
        return torch.where(readable, tokens, spec.fill_id)

    def _xor_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(batch, length, orders, heads)`."""
        mixes = list((tokens * self.multipliers).unbind(-1))
        for shift in range(1, len(mixes)):
            mixes[shift] = mixes[shift - 1] ^ mixes[shift]
        mixed = torch.stack([mixes[order - 1] for order in self.spec.orders], dim=-1)
        return mixed.unsqueeze(-1) % self.head_sizes

    def _needle_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(batch, length, orders, heads)`. A 32-bit accumulator times a 25-bit prime fits into int64."""
        words = (tokens & _MASK32).unsqueeze(-2).unbind(-1)
        rows = []
        for order, seeds in zip(self.spec.orders, self.seeds.unbind(), strict=True):
            mixed = seeds
            for word in words[:order]:
                mixed = ((mixed ^ word) * _NEEDLE_PRIME) & _MASK32
            rows.append(mixed ^ (mixed >> 15))
        return torch.stack(rows, dim=-2) % self.head_sizes
