"""The memory layer: rows of hashed n-grams, projected to a key and a value, gated by the hidden state, convolved.

Paper: Engram (arXiv 2601.07372), section 2. With the concatenated rows `e_t` of a token, for each branch `m` of the residual
stream: `alpha_m = gate(<RMSNorm(h_m), RMSNorm(W_K_m e)> / sqrt(d))`, `u_m = alpha_m W_V e`, and
`Y = u + SiLU(Conv1D(RMSNorm(u)))`. The caller adds `Y` to the residual stream. The layer keeps no state between calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .hashing import NgramHash
from .spec import NgramMemorySpec


class NgramTable(nn.Module):
    """The tables of one layer, one below the other.

    Args:
        head_sizes (`Sequence[int]`): Slots per table.
        dim (`int`): Width of a row.

    `sparse_grad` says whether the gradient of `weight` is a `torch.sparse_coo` tensor that holds the touched rows only.
    """

    offsets: torch.Tensor

    def __init__(self, head_sizes: Sequence[int], dim: int) -> None:
        super().__init__()
        self.head_sizes = tuple(head_sizes)
        self.dim = dim
        self.sparse_grad = False
        self.weight = nn.Parameter(torch.empty(sum(self.head_sizes), dim))
        self.register_buffer("offsets", self._offsets(), persistent=False)
        self.reset_parameters()

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
        return F.embedding(rows, self.weight, sparse=self.sparse_grad)

    def extra_repr(self) -> str:
        return f"{len(self.head_sizes)} tables, {sum(self.head_sizes)} rows, dim={self.dim}"


class BranchRMSNorm(nn.Module):
    """RMS normalisation of each branch with a weight `(branches, hidden_size)` of its own.

    `eps=None` is the machine epsilon of the input, as in `torch.nn.RMSNorm`.
    """

    def __init__(self, branches: int, hidden_size: int, eps: float | None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(branches, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., branches, hidden_size)` -> the same."""
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], eps=self.eps) * self.weight


class NgramGate(nn.Module):
    """How much of the value each branch of each token lets in, from what its hidden state and the key agree on.

    | `spec.gate` | of the score `s` |
    |---|---|
    | `sigmoid` | `sigmoid(s)`; the norms have no weights |
    | `signed_sqrt` | `sigmoid(sign(s) sqrt(max(abs(s), 1e-6)))`, which is 1/2 at 0 |
    | `copysign` | the same, but a score of 0 keeps its sign |
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
        """`(batch, length, branches, hidden_size)` twice -> `(batch, length, branches, 1)`, in the dtype of the first."""
        query = self._normalised(hidden_states, self.query_norm)
        key = self._normalised(key, self.key_norm)
        dtype = torch.promote_types(query.dtype, torch.float32)
        score = (query * key).sum(-1, keepdim=True, dtype=dtype) * self.scale
        if self.kind == "signed_sqrt":
            score = score.abs().clamp_min(1e-6).sqrt() * score.sign()
        elif self.kind == "copysign":
            score = torch.copysign(score.abs().clamp_min(1e-6).sqrt(), score)
        return torch.sigmoid(score).to(hidden_states.dtype)

    def _normalised(self, states: torch.Tensor, norm: BranchRMSNorm | None) -> torch.Tensor:
        if norm is not None:
            return norm(states)
        return F.rms_norm(states.float(), states.shape[-1:], eps=self.eps)


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

    def reset_parameters(self) -> None:
        """Zero, or the identity."""
        nn.init.zeros_(self.weight)
        if self.identity:
            nn.init.ones_(self.weight[..., -1])

    def forward(self, inputs: torch.Tensor, reach: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor`): `(batch, length, channels)`.
            reach (`torch.Tensor`): `(batch, length)`.
            past (`torch.Tensor`, *optional*): `(batch, channels, (kernel_size - 1) * dilation)`, the inputs before.

        Returns:
            `torch.Tensor`: `(batch, length, channels)`.
        """
        length = inputs.shape[1]
        lookback = (self.kernel_size - 1) * self.dilation
        if past is None:
            history = F.pad(inputs, (0, 0, lookback, 0))
        else:
            history = torch.cat([past.transpose(1, 2).to(inputs.dtype), inputs], dim=1)
        taps = self.weight[:, 0].unbind(-1)
        # A handful of shifted products beats a grouped convolution, which would need channels first, on every device.
        outputs = inputs * taps[-1]
        for steps, tap in enumerate(reversed(taps[:-1]), start=1):
            shift = steps * self.dilation
            earlier = history[:, lookback - shift : lookback - shift + length]
            outputs = outputs + earlier * tap * (reach >= shift).unsqueeze(-1).to(inputs.dtype)
        return outputs


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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states (`torch.Tensor`): `(batch, length, hidden_size)` or `(batch, length, branches, hidden_size)`.
            ids (`torch.Tensor`): `(batch, spec.ids_lookback + length)` compressed ids, see `NgramHash`.
            reach (`torch.Tensor`): `(batch, length)`, see `token_reach`.
            conv_past (`torch.Tensor`, *optional*):
                `(batch, spec.conv_channels, spec.conv_lookback)`, the convolution's inputs before this call; zeros by default.

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
        key, value = self._key_value(ids, reach, hidden_states)
        conv_inputs: torch.Tensor | None = None
        if spec.conv == "taps":
            conv_inputs = value
            value = self.conv(value, reach, conv_past)  # type: ignore[misc]
        gate = self.gate(states, key) * (reach >= 0)[..., None, None].to(states.dtype)
        delta = gate * value.unsqueeze(-2)
        if spec.conv == "short_conv":
            # A masked token's value is zero, and so is its norm.
            conv_inputs = self.conv_norm(delta).flatten(-2)  # type: ignore[misc]
            local = F.silu(self.conv(conv_inputs, reach, conv_past))  # type: ignore[misc]
            delta = delta + local.view_as(delta)
        return delta.view_as(hidden_states), None if conv_inputs is None else conv_inputs.transpose(1, 2)

    def _key_value(
        self, ids: torch.Tensor, reach: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `(batch, length, branches, hidden_size)` and the value `(batch, length, hidden_size)` of the n-grams."""
        spec = self.spec
        rows = self.table(self.hash(ids, reach)).to(device=like.device, dtype=like.dtype)
        if spec.variant == "needle":  # other variants hash the fill instead
            whole = torch.stack([reach >= order - 1 for order in spec.orders], dim=-1)
            rows = rows * whole.repeat_interleave(spec.n_heads, dim=-1).unsqueeze(-1).to(rows.dtype)
        projected = self.kv_proj(rows.flatten(-2))
        key, value = projected.split([spec.hc_mult * spec.hidden_size, spec.hidden_size], dim=-1)
        return key.unflatten(-1, (spec.hc_mult, spec.hidden_size)), value
