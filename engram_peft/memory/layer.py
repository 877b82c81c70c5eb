"""The memory layer: rows of hashed n-grams, projected to a key and a value, gated by the hidden state, convolved.

Paper: Engram (arXiv 2601.07372), section 2. With the concatenated rows `e_t` of a token, for each branch `m` of the residual
stream: `alpha_m = gate(<RMSNorm(h_m), RMSNorm(W_K_m e)> / sqrt(d))`, `u_m = alpha_m W_V e`, and
`Y = u + SiLU(Conv1D(RMSNorm(u)))`. The caller adds `Y` to the residual stream. The layer keeps no state between calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ..sharded import sharded_like
from .exchange import lookup
from .hashing import NgramHash
from .spec import NgramMemorySpec


_MANY_TOKENS = 64  # with fewer, looking for equal n-grams costs what it saves
_WORTH_SHARING = 0.75
_FINGERPRINT = 0x1E3779B97F4A7C15  # any large odd number


class NgramTable(nn.Embedding):
    """The tables of one layer, one below the other.

    `sparse=True` makes the gradient of `weight` a `torch.sparse_coo` tensor that holds the touched rows only; it may be set at
    any time. An `nn.Embedding`, since that is what `DistributedDataParallel` asks about sparse gradients.

    `is_distributed` says that `weight` is a `DTensor` whose rows several processes exchange: see `distribute_tables`.

    Args:
        head_sizes (`Sequence[int]`): Slots per table.
        dim (`int`): Width of a row.
    """

    is_distributed = False
    offsets: torch.Tensor

    def __init__(self, head_sizes: Sequence[int], dim: int) -> None:
        super().__init__(sum(head_sizes), dim)
        self.head_sizes = tuple(head_sizes)
        self.register_buffer("offsets", self._offsets(), persistent=False)

    def _offsets(self) -> torch.Tensor:
        """`(tables,)` int64: the first row of each table."""
        sizes = torch.tensor(self.head_sizes, device="cpu")
        return sizes.cumsum(0) - sizes

    def reset_buffers(self) -> None:
        """Writes the constants again, after `to_empty`."""
        self.offsets.copy_(self._offsets())

    def reset_parameters(self) -> None:
        """All rows zero: a memory that was never trained says nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., tables)` rows within each table -> `(..., tables, dim)`, on the device of the table."""
        rows = rows.to(self.weight.device) + self.offsets
        if self.is_distributed:
            return lookup(cast(DTensor, self.weight), rows, self.sparse)
        return F.embedding(rows, self.weight, sparse=self.sparse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # a checkpoint does not depend on how many processes shared the table: every process takes its part
        if (weight := state_dict.get(f"{prefix}weight")) is not None:
            state_dict[f"{prefix}weight"] = sharded_like(weight, self.weight)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{len(self.head_sizes)} tables, {self.num_embeddings} rows, dim={self.embedding_dim}, sparse={self.sparse}"


class BranchRMSNorm(nn.Module):
    """The weight `(branches, hidden_size)` and the epsilon of an RMS normalisation of each branch.

    Whoever normalises folds both into what comes next, so there is no `forward`. `eps=None` is the machine epsilon of the
    input, as in `torch.nn.RMSNorm`.
    """

    def __init__(self, branches: int, hidden_size: int, eps: float | None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(branches, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def _mean_square(states: torch.Tensor) -> torch.Tensor:
    """`(..., width)` -> `(..., 1)`, without a second tensor of the size of the first."""
    return torch.linalg.vector_norm(states, dim=-1, keepdim=True).square() / states.shape[-1]


def _epsilon(eps: float | None, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if eps is None else eps


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What scores are computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class NgramGate(nn.Module):
    """How much of the value each branch of each token lets in, from what its hidden state and the key agree on.

    | `spec.gate` | of the score `s` |
    |---|---|
    | `sigmoid` | `sigmoid(s)`; the norms have no weights |
    | `signed_sqrt` | `sigmoid(sign(s) sqrt(max(abs(s), 1e-6)))`, which is 1/2 at 0 |
    | `copysign` | the same, but `sigmoid(0.001)` at 0, where `sign` is 0 and `copysign` is not |
    """

    def __init__(self, spec: NgramMemorySpec) -> None:
        super().__init__()
        self.kind = spec.gate
        self.eps = spec.norm_eps
        self.scale = 1 / math.sqrt(spec.hidden_size)
        weighted = spec.gate != "sigmoid"
        self.query_norm = BranchRMSNorm(spec.hc_mult, spec.hidden_size, spec.norm_eps) if weighted else None
        self.key_norm = BranchRMSNorm(spec.hc_mult, spec.hidden_size, spec.norm_eps) if weighted else None

    def forward(self, hidden_states: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """`(batch, length, branches, hidden_size)` twice -> `(batch, length, branches, 1)`, float32 at least."""
        eps = _epsilon(self.eps, hidden_states.dtype)
        query, key = hidden_states.to(_wide(hidden_states.dtype)), key.to(_wide(key.dtype))
        weighted = query
        if self.query_norm is not None and self.key_norm is not None:
            weighted = query * (self.query_norm.weight * self.key_norm.weight)
        # The norms of both are one number a branch: they are taken out of the product.
        norms = torch.rsqrt((_mean_square(query) + eps) * (_mean_square(key) + eps))
        score = (weighted * key).sum(-1, keepdim=True) * norms * self.scale
        if self.kind == "signed_sqrt":
            score = score.abs().clamp_min(1e-6).sqrt() * score.sign()
        elif self.kind == "copysign":
            score = torch.copysign(score.abs().clamp_min(1e-6).sqrt(), score)
        return torch.sigmoid(score)


class DilatedConv(nn.Module):
    """A causal depthwise convolution that reads no token beyond the reach of the current one.

    The weight has the shape of `nn.Conv1d`'s, `(channels, 1, kernel_size)`; the last tap is the current token.
    """

    def __init__(self, channels: int, kernel_size: int, dilation: int, identity: bool) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.dilation = dilation
        self.identity = identity
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.reset_parameters()

    @property
    def lookback(self) -> int:
        return (self.kernel_size - 1) * self.dilation

    def reset_parameters(self) -> None:
        """Zero, or the identity."""
        nn.init.zeros_(self.weight)
        if self.identity:
            nn.init.ones_(self.weight[..., -1])

    def forward(
        self,
        inputs: torch.Tensor,
        reach: torch.Tensor,
        past: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor`): `(batch, length, channels)`.
            reach (`torch.Tensor`): `(batch, length)`.
            past (`torch.Tensor`, *optional*): `(batch, channels, lookback)`, the inputs before; zeros by default.
            scale (`torch.Tensor`, *optional*): `(channels,)`, by which all inputs are multiplied.

        Returns:
            `torch.Tensor`: `(batch, length, channels)`.
        """
        length = inputs.shape[1]
        if past is None:
            history = F.pad(inputs, (0, 0, self.lookback, 0))
        else:
            history = torch.cat([past.transpose(1, 2).to(inputs.dtype), inputs], dim=1)
        weight = self.weight[:, 0] if scale is None else self.weight[:, 0] * scale.unsqueeze(-1)
        weight = weight.to(inputs.dtype)
        if torch.compiler.is_compiling() or inputs.device.type != "cpu" or length <= self.lookback:
            windows = history.unfold(1, self.lookback + 1, 1)[..., :: self.dilation]
            return self._masked(windows, weight, reach)
        # One call instead of products with windows: three times as fast on CPUs, but it knows no reach. So tokens that
        # must not see everything that it showed them, at most `lookback` a document, are computed again.
        channels_last = history.transpose(1, 2).unsqueeze(2).contiguous(memory_format=torch.channels_last)
        kernel = weight[:, None, None]
        outputs = F.conv2d(channels_last, kernel, dilation=(1, self.dilation), groups=len(kernel))
        outputs = outputs.squeeze(2).transpose(1, 2)
        shown = torch.arange(length) if past is None else torch.full((length,), self.lookback)
        rows, columns = (reach < shown.clamp(max=self.lookback)).nonzero(as_tuple=True)
        if len(rows) > 0:
            taps = columns.unsqueeze(1) + torch.arange(0, self.lookback + 1, self.dilation)
            windows = history[rows.unsqueeze(1), taps].transpose(1, 2)
            outputs = outputs.index_put((rows, columns), self._masked(windows, weight, reach[rows, columns]))
        return outputs

    def _masked(self, windows: torch.Tensor, weight: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        """The sum over taps of `windows` `(..., channels, taps)` times `weight` `(channels, taps)`, where `reach` `(...)` allows.

        The last tap, the token itself, is always read.
        """
        steps_back = torch.arange(self.lookback, -1, -self.dilation, device=reach.device)
        readable = reach.clamp_min(0).unsqueeze(-1) >= steps_back
        return (torch.where(readable.unsqueeze(-2), windows, 0) * weight).sum(-1)


class NgramMemory(nn.Module):
    """The n-gram memory of one decoder layer.

    `table` may be replaced by any module that maps rows `(..., tables)` to `(..., tables, head_dim)`.

    Args:
        spec (`NgramMemorySpec`): The memory.
        layer_id (`int`): One of `spec.layer_ids`.
    """

    def __init__(self, spec: NgramMemorySpec, layer_id: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_id = layer_id
        self.hash = NgramHash(spec, layer_id)
        self.table: nn.Module = NgramTable(spec.head_sizes(layer_id), spec.head_dim)
        # The keys of all branches, then the value, which they share: one product for all.
        self.kv_proj = nn.Linear(spec.memory_dim, (spec.hc_mult + 1) * spec.hidden_size, bias=spec.bias)
        self.gate = NgramGate(spec)
        self.conv: DilatedConv | None = None
        self.conv_norm: BranchRMSNorm | None = None
        if spec.conv != "none":
            self.conv = DilatedConv(spec.conv_channels, spec.kernel_size, spec.max_ngram_size, spec.conv == "taps")
        if spec.conv == "short_conv":
            self.conv_norm = BranchRMSNorm(spec.hc_mult, spec.hidden_size, spec.conv_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The memory adds nothing at first: rows and biases zero, projections random."""
        nn.init.normal_(self.kv_proj.weight, std=1 / math.sqrt(self.spec.memory_dim))
        if self.kv_proj.bias is not None:
            nn.init.zeros_(self.kv_proj.bias)
        for module in self.modules():
            if isinstance(module, (NgramTable, BranchRMSNorm, DilatedConv)):
                module.reset_parameters()

    def reset_buffers(self) -> None:
        """Writes again what is not saved but follows from the spec, after `to_empty`."""
        for module in self.modules():
            if isinstance(module, (NgramHash, NgramTable)):
                module.reset_buffers()

    def forward(
        self,
        hidden_states: torch.Tensor,
        ids: torch.Tensor,
        reach: torch.Tensor,
        conv_past: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, length, hidden_size)` or `(batch, length, branches, hidden_size)`.
            ids (`torch.Tensor`): `(batch, spec.ids_lookback + length)` compressed ids, see `NgramHash`.
            reach (`torch.Tensor`): `(batch, length)`, see `token_reach`.
            conv_past (`torch.Tensor`, *optional*):
                `(batch, spec.conv_channels, spec.conv_lookback)`, the convolution's inputs before this call; zeros by default.
            rows (`torch.Tensor`, *optional*):
                `(batch, length, tables)`: what `NgramHash` says of `ids` and `reach`, if that is known already.

        Returns:
            What to add to the hidden states, in their shape; and this call's inputs of the convolution,
            `(batch, spec.conv_channels, length)`, of which the last `conv_lookback` are the next call's past (`None` without a
            convolution).

        Raises:
            `ValueError`: The shapes do not fit.
        """
        spec = self.spec
        states = hidden_states.unsqueeze(-2) if hidden_states.dim() == 3 else hidden_states
        if states.shape[-2:] != (spec.hc_mult, spec.hidden_size):
            raise ValueError(
                f"`hidden_states` must end in {spec.hc_mult} branches of {spec.hidden_size}, got {tuple(hidden_states.shape)}."
            )
        key, value = self._key_value(ids, reach, hidden_states, rows)
        conv_inputs: torch.Tensor | None = None
        if spec.conv == "taps":
            conv_inputs = value
            value = self.conv(value, reach, conv_past)  # type: ignore[misc]
        value = value.unsqueeze(-2)
        gate = torch.where((reach >= 0)[..., None, None], self.gate(states, key), 0)
        delta = gate.to(value.dtype) * value
        if self.conv_norm is not None:
            # All branches share the value, so each one's norm follows from the value's. A masked token's gate is zero, hence
            # its input too.
            eps = _epsilon(self.conv_norm.eps, value.dtype)
            norms = torch.rsqrt(gate.square() * _mean_square(value.to(gate.dtype)) + eps)
            conv_inputs = ((gate * norms).to(value.dtype) * value).flatten(-2)
            local = self.conv(conv_inputs, reach, conv_past, self.conv_norm.weight.flatten())  # type: ignore[misc]
            delta = delta + F.silu(local).view_as(delta)
        return delta.view_as(hidden_states), None if conv_inputs is None else conv_inputs.transpose(1, 2)

    def _key_value(
        self, ids: torch.Tensor, reach: torch.Tensor, like: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `(batch, length, branches, hidden_size)` and the value `(batch, length, hidden_size)` of the n-grams."""
        spec = self.spec
        batch, length = reach.shape
        rows = self.hash(ids, reach) if rows is None else rows
        if rows.shape != (batch, length, spec.n_tables):
            raise ValueError(f"`rows` must be {(batch, length, spec.n_tables)}, got {tuple(rows.shape)}.")
        if spec.variant == "needle":  # an n-gram that is cut has no rows; other variants hash the fill instead
            whole = torch.stack([reach >= order - 1 for order in spec.orders], dim=-1)
            rows = torch.where(whole.repeat_interleave(spec.n_heads, dim=-1), rows, -1)
        once = None if torch.compiler.is_compiling() else _equal_rows(rows.flatten(0, 1))
        if once is not None:
            rows = rows.flatten(0, 1)[once[0]]
        cut = rows < 0 if spec.variant == "needle" else None
        embedded = self.table(rows if cut is None else rows.clamp_min(0)).to(device=like.device, dtype=like.dtype)
        if cut is not None:
            embedded = embedded.masked_fill(cut.unsqueeze(-1), 0)
        projected = self.kv_proj(embedded.flatten(-2))
        if once is not None:
            projected = projected.index_select(0, once[1]).view(batch, length, -1)
        key, value = projected.split([spec.hc_mult * spec.hidden_size, spec.hidden_size], dim=-1)
        return key.unflatten(-1, (spec.hc_mult, spec.hidden_size)), value


def _equal_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens whose n-grams are the same have the same key and value, whatever the hidden state.

    Args:
        rows (`torch.Tensor`): `(tokens, tables)`.

    Returns:
        One token of each kind, and for each token the index of its kind, if projecting each kind once pays: with a quarter of
        the tokens repeated, on CPUs. Text alone repeats less; beams and several answers to one prompt repeat all of it.
    """
    tokens = len(rows)
    if rows.device.type != "cpu" or tokens < _MANY_TOKENS:
        return None
    fingerprints = (rows * torch.full_like(rows[0], _FINGERPRINT).cumprod(0)).sum(-1)
    kinds = torch.unique(fingerprints, return_inverse=True)[1]
    count = int(kinds.max()) + 1
    if count > _WORTH_SHARING * tokens:
        return None
    one = torch.empty(count, dtype=torch.int64).scatter_(0, kinds, torch.arange(tokens))
    return (one, kinds) if torch.equal(rows[one][kinds], rows) else None
