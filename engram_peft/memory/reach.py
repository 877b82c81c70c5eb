"""How far back each token may look: to the start of its document, and never through padding or masked tokens.

The reach of a token is the number of tokens directly before it that it may read; a token that is itself padding or masked
has reach -1 and reads nothing, not even itself. Hash and convolution need no other mask.
"""

from __future__ import annotations

import torch


def token_reach(
    ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    eos_token_id: int | None = None,
    blocked: torch.Tensor | None = None,
    past_reach: torch.Tensor | None = None,
    past_length: int | torch.Tensor | None = None,
    limit: int,
) -> torch.Tensor:
    """The reach of every token, from whatever says where documents start. What is not given starts none.

    Args:
        ids (`torch.Tensor`): `(batch, length)` token ids.
        attention_mask (`torch.Tensor`, *optional*):
            `(batch, keys)`, of which the last `length` columns count: 0 is padding. Or a prepared mask
            `(batch, 1, length, keys)`, boolean or additive: a token that may not attend to itself is padding.
        position_ids (`torch.Tensor`, *optional*):
            `(batch or 1, length)`: a document starts wherever a position is not the one before plus one, and at position 0.
        segment_ids (`torch.Tensor`, *optional*): `(batch, length)`: a document starts wherever they change.
        eos_token_id (`int`, *optional*): A document ends with this token.
        blocked (`torch.Tensor`, *optional*): `(batch, length)` booleans: tokens to treat like padding, such as images.
        past_reach (`torch.Tensor`, *optional*):
            `(batch,)`: what the first token may look back to, the last column of the previous call's `carried_reach`.
        past_length (`int` or `torch.Tensor`, *optional*):
            For a prepared mask: the key that the first token is, `keys - length` by default. A static cache needs it.
        limit (`int`): No reach is reported above this.

    Returns:
        `torch.Tensor`: `(batch, length)` int64, between -1 and `limit`.

    Raises:
        `ValueError`: A shape does not fit.
    """
    batch, length = ids.shape
    positions = torch.arange(length, device=ids.device)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    if position_ids is not None:
        _check_shape("position_ids", position_ids, batch, length, broadcast=True)
        starts = starts | (position_ids == 0) | _changes(position_ids - positions)
    if segment_ids is not None:
        _check_shape("segment_ids", segment_ids, batch, length)
        starts = starts | _changes(segment_ids)
    if eos_token_id is not None:
        starts = starts | torch.nn.functional.pad(ids[:, :-1] == eos_token_id, (1, 0))

    # The barrier of a token is the first position it may read; a masked token's is the one after itself.
    first = torch.zeros_like(positions) if past_reach is None else -past_reach.unsqueeze(1)
    barrier = torch.where(starts, positions, first)
    if attention_mask is not None:
        masked = ~_attended(attention_mask, length, past_length)
        blocked = masked if blocked is None else blocked | masked
    if blocked is not None:
        _check_shape("blocked", blocked, batch, length, broadcast=True)
        barrier = torch.where(blocked, positions + 1, barrier)
    return (positions - barrier.cummax(dim=1).values).clamp(max=limit)


def carried_reach(
    reach: torch.Tensor, ids: torch.Tensor | None = None, eos_token_id: int | None = None
) -> torch.Tensor:
    """What a token after each one may look back to: one more than it does, but 0 after the end of a document.

    Args:
        reach (`torch.Tensor`): `(batch, length)`.
        ids, eos_token_id (*optional*): As for `token_reach`.

    Returns:
        `torch.Tensor`: `(batch, length)` int64. The last column is the `past_reach` of the next call.
    """
    carried = reach + 1
    if ids is not None and eos_token_id is not None:
        carried = torch.where(ids == eos_token_id, 0, carried)
    return carried


def band_reach(mask: torch.Tensor, limit: int) -> torch.Tensor:
    """The reach that an attention mask grants: how many tokens directly before it each token may attend to.

    For masks that hold the documents themselves. A sliding window narrower than `limit` counts as well, as it does in Needle.

    Args:
        mask (`torch.Tensor`): `(batch, 1, length, length)` booleans, True where a query may attend to a key.
        limit (`int`): No reach is reported above this.

    Returns:
        `torch.Tensor`: `(batch, length)` int64, between -1 and `limit`.
    """
    length = mask.shape[-1]
    if mask.dim() != 4 or mask.shape[-2] != length:
        raise ValueError(f"`mask` must be (batch, 1, length, length), got {tuple(mask.shape)}.")
    bands = [
        torch.nn.functional.pad(mask[:, 0].diagonal(-shift, dim1=-2, dim2=-1), (min(shift, length), 0))
        for shift in range(min(limit, length - 1) + 1)
    ]
    return torch.stack(bands).long().cumprod(dim=0).sum(dim=0) - 1


def _changes(values: torch.Tensor) -> torch.Tensor:
    """True where a value differs from the one before it; the first one differs from nothing."""
    return torch.nn.functional.pad(values[:, 1:] != values[:, :-1], (1, 0))


def _attended(attention_mask: torch.Tensor, length: int, past_length: int | torch.Tensor | None) -> torch.Tensor:
    """`(batch, length)` booleans, False for padding."""
    if attention_mask.dim() == 2:
        if attention_mask.shape[1] < length:
            raise ValueError(
                f"`attention_mask` has {attention_mask.shape[1]} columns, fewer than the {length} tokens of this call."
            )
        return attention_mask[:, -length:] != 0
    if attention_mask.dim() != 4 or attention_mask.shape[2] != length:
        raise ValueError(
            f"`attention_mask` must be (batch, keys) or (batch, 1, {length}, keys), got {tuple(attention_mask.shape)}."
        )
    queries = torch.arange(length, device=attention_mask.device)
    last = attention_mask.shape[-1] - length
    # a static cache has room after the tokens; one with a sliding window that is full has them in its last columns
    past_length = last if past_length is None else torch.as_tensor(past_length, device=queries.device).clamp(max=last)
    diagonal = attention_mask[:, 0, queries, queries + past_length]
    if diagonal.is_floating_point():
        return diagonal > torch.finfo(diagonal.dtype).min / 2
    return diagonal != 0


def _check_shape(name: str, value: torch.Tensor, batch: int, length: int, broadcast: bool = False) -> None:
    if value.dim() != 2 or value.shape[1] != length or value.shape[0] not in ((1, batch) if broadcast else (batch,)):
        raise ValueError(f"`{name}` must be ({batch}, {length}), one entry a token, got {tuple(value.shape)}.")
