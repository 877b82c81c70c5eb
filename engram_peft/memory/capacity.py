"""How large tables have to be: what they cost, and how many n-grams of a corpus collide in them, expected and counted.

`D` n-grams hashed into a table of `M` slots: one of them shares its row with another with probability
`p = 1 - (1 - 1/M)^(D - 1)`. It has no row of its own at all if it shares in every one of the `K` tables of its order: `p^K`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .hashing import NgramHash
from .reach import token_reach
from .spec import NgramMemorySpec


@dataclass(frozen=True)
class Collisions:
    """How the n-grams of one order share the tables of one layer.

    Args:
        order (`int`): The n.
        ngrams (`int`): Different n-grams.
        slots (`int`): Rows of all tables of this order.
        shared (`float`): The share of rows looked up, over n-grams and tables, that another n-gram looks up too.
        lost (`float`): How many n-grams share their row in every table: what is written for one changes the other.
    """

    order: int
    ngrams: int
    slots: int
    shared: float
    lost: float


@dataclass(frozen=True)
class CapacityPlan:
    """What a memory costs, all its layers together.

    Args:
        slots (`int`): Rows of all tables.
        table_parameters (`int`): Numbers in them.
        other_parameters (`int`): Projections, norms and convolutions.
        bytes (`int`): Of both, in the given dtype.
        active_parameters (`int`): Numbers that one token uses: its rows and all other parameters.
        collisions (`tuple[Collisions, ...]`): Expected ones in the first layer, by order; the others have as many.
    """

    slots: int
    table_parameters: int
    other_parameters: int
    bytes: int
    active_parameters: int
    collisions: tuple[Collisions, ...]


def plan_capacity(
    spec: NgramMemorySpec, ngrams: Mapping[int, int] | None = None, dtype: torch.dtype = torch.float32
) -> CapacityPlan:
    """What a memory costs and how crowded it will be, without making one.

    Args:
        spec (`NgramMemorySpec`): The memory.
        ngrams (`Mapping[int, int]`, *optional*): How many different n-grams there are of each order (`count_ngrams`).
        dtype (`torch.dtype`): Of the parameters.
    """
    slots = sum(sum(spec.head_sizes(layer_id)) for layer_id in spec.layer_ids)
    table_parameters = slots * spec.head_dim
    outputs = (spec.hc_mult + 1) * spec.hidden_size
    norm_weights = spec.hc_mult * spec.hidden_size
    other = outputs * (spec.memory_dim + spec.bias)
    other += norm_weights * ((2 if spec.gate != "sigmoid" else 0) + (1 if spec.conv == "short_conv" else 0))
    other += spec.conv_channels * spec.kernel_size
    layers = len(spec.layer_ids)
    return CapacityPlan(
        slots=slots,
        table_parameters=table_parameters,
        other_parameters=layers * other,
        bytes=(table_parameters + layers * other) * dtype.itemsize,
        active_parameters=layers * (spec.memory_dim + other),
        collisions=() if ngrams is None else expected_collisions(spec, ngrams),
    )


def slots_for(ngrams: int, n_heads: int, lost: float = 0.01) -> int:
    """The slots per table with which a given share of the n-grams is expected to have no row of its own.

    Args:
        ngrams (`int`): Different n-grams of the order.
        n_heads (`int`): Tables per order.
        lost (`float`): That share, in (0, 1).

    Raises:
        `ValueError`: `lost` is out of its range.
    """
    if not 0 < lost < 1:
        raise ValueError(f"`lost` must be in (0, 1), got {lost}.")
    occupied = lost ** (1 / n_heads)  # the probability of sharing a row of one table
    return max(2, math.ceil(-(ngrams - 1) / math.log1p(-occupied)))


def expected_collisions(
    spec: NgramMemorySpec, ngrams: Mapping[int, int], layer_id: int | None = None
) -> tuple[Collisions, ...]:
    """The collisions that a hash without structure would have.

    Args:
        spec (`NgramMemorySpec`): The memory.
        ngrams (`Mapping[int, int]`): How many different n-grams there are of each of `spec.orders`.
        layer_id (`int`, *optional*): The layer, by default the first.

    Raises:
        `ValueError`: An order is missing.
    """
    if missing := set(spec.orders) - set(ngrams):
        raise ValueError(
            f"`ngrams` must have a number for each of the orders {spec.orders}, not for {sorted(missing)}."
        )
    found = []
    for order, sizes in _order_sizes(spec, layer_id):
        count = ngrams[order]
        sharing = [-math.expm1((count - 1) * math.log1p(-1 / size)) for size in sizes] if count else [0.0]
        found.append(Collisions(order, count, sum(sizes), sum(sharing) / len(sharing), count * math.prod(sharing)))
    return tuple(found)


def count_ngrams(spec: NgramMemorySpec, ids: torch.Tensor, reach: torch.Tensor | None = None) -> dict[int, int]:
    """How many different n-grams of each order a corpus has.

    Args:
        spec (`NgramMemorySpec`): The memory.
        ids (`torch.Tensor`): `(batch, length)` compressed ids; a long corpus may be one row.
        reach (`torch.Tensor`, *optional*): `(batch, length)` from `token_reach`; by default each row is one document.
    """
    return {order: len(ngrams) for order, ngrams in _distinct_ngrams(spec, ids, reach)}


def count_collisions(
    spec: NgramMemorySpec, ids: torch.Tensor, reach: torch.Tensor | None = None, layer_id: int | None = None
) -> tuple[Collisions, ...]:
    """The collisions between the n-grams of a corpus in the tables of one layer, by hashing them.

    Args:
        spec, ids, reach: See `count_ngrams`.
        layer_id (`int`, *optional*): The layer, by default the first.

    Returns:
        One `Collisions` an order. Only the different n-grams are hashed.
    """
    hashing = NgramHash(spec, spec.layer_ids[0] if layer_id is None else layer_id).to(ids.device)
    found = []
    for (order, ngrams), (_, sizes) in zip(
        _distinct_ngrams(spec, ids, reach), _order_sizes(spec, layer_id), strict=True
    ):
        past = ngrams.new_full((len(ngrams), spec.max_ngram_size - order), spec.fill_id)
        whole = torch.full((len(ngrams), 1), spec.ids_lookback, device=ids.device)
        rows = hashing(torch.cat([past, ngrams], dim=1), whole)[:, 0].unflatten(-1, (len(spec.orders), spec.n_heads))
        crowded = torch.stack([_repeated(column) for column in rows[:, spec.orders.index(order)].unbind(-1)])
        shared = crowded.double().mean().item() if len(ngrams) else 0.0
        found.append(Collisions(order, len(ngrams), sum(sizes), shared, int(crowded.all(dim=0).sum())))
    return tuple(found)


def _order_sizes(spec: NgramMemorySpec, layer_id: int | None) -> list[tuple[int, tuple[int, ...]]]:
    """Each order with the sizes of its tables."""
    sizes = spec.head_sizes(spec.layer_ids[0] if layer_id is None else layer_id)
    return [(order, sizes[i * spec.n_heads : (i + 1) * spec.n_heads]) for i, order in enumerate(spec.orders)]


def _distinct_ngrams(
    spec: NgramMemorySpec, ids: torch.Tensor, reach: torch.Tensor | None
) -> list[tuple[int, torch.Tensor]]:
    """Each order with its different n-grams `(n-grams, order)`, oldest token first, fills included."""
    if reach is None:
        reach = token_reach(ids, limit=spec.ids_lookback)
    history = torch.nn.functional.pad(ids, (spec.ids_lookback, 0))
    tokens = NgramHash(spec, spec.layer_ids[0]).to(ids.device).readable_tokens(history, reach).flatten(0, 1).unbind(-1)
    reach = reach.flatten()
    found = []
    for order in spec.orders:
        # Needle has no rows for an n-gram that is cut; the others complete it with the fill.
        complete = reach >= (order - 1 if spec.variant == "needle" else 0)
        ngrams = [token[complete] for token in tokens[:order]]
        one = _one_of_each(ngrams)
        found.append((order, torch.stack([token[one] for token in reversed(ngrams)], dim=-1)))
    return found


def _one_of_each(ngrams: list[torch.Tensor]) -> torch.Tensor:
    """Indices of one n-gram of each kind; `ngrams[k]` `(n-grams,)` is the token `k` steps back."""
    kinds = torch.zeros_like(ngrams[0])
    if len(kinds) == 0:
        return kinds
    for token in ngrams:  # numbered anew after each token, the kinds times the vocabulary fit into int64
        lowest = token.min()
        kinds = torch.unique(kinds * (token.max() - lowest + 1) + token - lowest, return_inverse=True)[1]
    indices = torch.arange(len(kinds), device=kinds.device)
    return kinds.new_empty(int(kinds.max()) + 1).scatter_(0, kinds, indices)


def _repeated(values: torch.Tensor) -> torch.Tensor:
    """True where a value occurs more than once."""
    _, kinds, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return counts[kinds] > 1
