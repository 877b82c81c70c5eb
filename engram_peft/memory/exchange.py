"""Rows of a table that lies on several processes: fetched from those that hold them, their gradients brought back.

Ids and rows are sent, once a call each way, and nothing that is as large as a table. A table is a `DTensor` on a mesh of one
dimension, replicated, sharded by row or sharded by dimension. There are two kinds of meshes:

| processes | read | forward | backward | gradient |
|---|---|---|---|---|
| of data parallelism | each its own tokens | ids to the holders, rows back | gradients of rows to the holders | the mean over processes, as of every parameter |
| of tensor parallelism: the mesh is named `"tp"` | all the same tokens | the holders' parts are added or joined | nothing | as of one process |
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..sharded import bounds


@torch.compiler.disable
def lookup(weight: DTensor, ids: torch.Tensor, sparse: bool) -> torch.Tensor:
    """The rows of a table that lies on several processes; all of them have to call this.

    Args:
        weight (`DTensor`): `(rows, dim)`.
        ids (`torch.Tensor`): `(...)` int64, rows of the whole table.
        sparse (`bool`): Whether the gradient, a `DTensor` like `weight`, holds sparse tensors.

    Returns:
        `torch.Tensor`: `(..., dim)`.
    """
    if weight.device_mesh.mesh_dim_names == ("tp",):
        return cast(torch.Tensor, _SameTokens.apply(weight, ids, sparse))
    once, inverse = ids.unique(return_inverse=True)
    return F.embedding(inverse, _OwnTokens.apply(weight, once, sparse))


def _gradient(weight: DTensor, rows: torch.Tensor, values: torch.Tensor, sparse: bool) -> DTensor:
    """The gradient of `weight` whose part here is `values` `(n, dim)` in these of its rows."""
    shape = weight.to_local().shape
    local = torch.sparse_coo_tensor(rows[None], values, tuple(shape), check_invariants=False)
    if not sparse:
        return DTensor(local.to_dense(), weight._spec, requires_grad=False)
    # A `DTensor` takes after the layout of what it is made of, and autograd would look into it for indices. So it is made of
    # a strided tensor without memory, and holds the sparse one, on which all of torch's arithmetic with it then works.
    gradient = DTensor(values.new_zeros(()).expand(shape), weight._spec, requires_grad=False)
    gradient._local_tensor = local
    return gradient


class _SameTokens(torch.autograd.Function):
    """All processes look the same rows up, and each knows the gradient of all of them."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, ids: torch.Tensor, sparse: bool) -> torch.Tensor:
        ctx.weight, ctx.sparse = weight, sparse
        ctx.save_for_backward(ids)
        mesh, place, local = weight.device_mesh, weight.placements[0], weight.to_local()
        if isinstance(place, Replicate):
            return F.embedding(ids, local)
        if place.is_shard(0):
            start = bounds(weight.shape[0], mesh)[mesh.get_local_rank()]
            held = (ids >= start) & (ids < start + len(local))
            rows = local.new_zeros(*ids.shape, weight.shape[1])
            rows[held] = local[ids[held] - start]
            return DTensor.from_local(rows, mesh, [Partial()], run_check=False).full_tensor()
        shape = torch.Size((*ids.shape, weight.shape[1]))
        stride = torch.empty(shape, device="meta").stride()
        columns = F.embedding(ids, local)
        return DTensor.from_local(
            columns, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride
        ).full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None, None]:
        weight: DTensor = ctx.weight
        ids, values = ctx.saved_tensors[0].flatten(), gradient.flatten(0, -2)
        mesh, place = weight.device_mesh, weight.placements[0]
        if place.is_shard(0):
            start = bounds(weight.shape[0], mesh)[mesh.get_local_rank()]
            held = (ids >= start) & (ids < start + len(weight.to_local()))
            ids, values = ids[held] - start, values[held]
        elif place.is_shard(1):
            start = bounds(weight.shape[1], mesh)[mesh.get_local_rank()]
            values = values[:, start : start + weight.to_local().shape[1]]
        return _gradient(weight, ids, values, ctx.sparse), None, None


class _OwnTokens(torch.autograd.Function):
    """Every process looks its own rows up, `(n,)` of them, each once and ascending."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, ids: torch.Tensor, sparse: bool) -> torch.Tensor:
        ctx.weight, ctx.sparse = weight, sparse
        mesh, place, local = weight.device_mesh, weight.placements[0], weight.to_local()
        group = mesh.get_group()
        if isinstance(place, Replicate):
            ctx.save_for_backward(ids)
            return local[ids]
        if place.is_shard(0):
            # ascending: what goes to one holder lies together
            starts = torch.tensor(bounds(weight.shape[0], mesh), device=ids.device)
            asked = torch.diff(torch.searchsorted(ids, starts)).tolist()
            wanted, answered = _sent(ids, asked, group)
            wanted = wanted - starts[mesh.get_local_rank()]
            ctx.save_for_backward(wanted)
            ctx.counts = asked
            return _sent(local[wanted], answered, group)[0]
        # everybody holds a part of every row
        wanted, counts = _collected(ids, group)
        ctx.save_for_backward(wanted)
        ctx.counts = counts
        return _joined(local[wanted], counts, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None, None]:
        weight: DTensor = ctx.weight
        place, group = weight.placements[0], weight.device_mesh.get_group()
        rows = ctx.saved_tensors[0]
        if isinstance(place, Replicate):
            rows, values = _collected(rows, group)[0], _collected(gradient, group)[0]
        elif place.is_shard(0):
            values = _sent(gradient, ctx.counts, group)[0]
        else:
            values = _divided(gradient, ctx.counts, weight)
        return _gradient(weight, rows, values / dist.get_world_size(group), ctx.sparse), None, None


# ---------------------------------------------------------------------------------------------- what is sent


def _sent(rows: torch.Tensor, counts: list[int], group: Any) -> tuple[torch.Tensor, list[int]]:
    """Sends the first `counts[0]` rows to the first process, the next ones to the next.

    Returns:
        What has come, in the order of processes, and how many rows from each.
    """
    given = torch.tensor(counts, device=rows.device)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    received = cast(list[int], taken.tolist())
    out = rows.new_empty(sum(received), *rows.shape[1:])
    width = rows.element_size() * math.prod(rows.shape[1:])  # in bytes, since not every backend sends every dtype
    dist.all_to_all_single(
        out.flatten().view(torch.uint8),
        rows.contiguous().flatten().view(torch.uint8),
        [count * width for count in received],
        [count * width for count in counts],
        group=group,
    )
    return out, received


def _collected(rows: torch.Tensor, group: Any) -> tuple[torch.Tensor, list[int]]:
    """The rows of all processes, in their order, and how many each has."""
    everybody = dist.get_world_size(group)
    counts = torch.empty(everybody, dtype=torch.int64, device=rows.device)
    dist.all_gather_into_tensor(counts, torch.tensor([len(rows)], device=rows.device), group=group)
    most = int(counts.max())
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows)))
    gathered = rows.new_empty(everybody * most, *rows.shape[1:])
    dist.all_gather_into_tensor(gathered, padded.contiguous(), group=group)
    kept = torch.arange(most, device=rows.device) < counts[:, None]
    return gathered[kept.flatten()], cast(list[int], counts.tolist())


def _joined(columns: torch.Tensor, counts: list[int], weight: DTensor) -> torch.Tensor:
    """The rows that this process asked for, of which every process holds some columns.

    Args:
        columns (`torch.Tensor`): `(sum(counts), columns held here)`: of the rows that all processes asked for, in their order.
        counts (`list[int]`): How many rows each asked for.
        weight (`DTensor`): The table, sharded by dimension.
    """
    group, width = weight.device_mesh.get_group(), columns.shape[1]
    parts, sizes = _sent(columns.flatten(), [count * width for count in counts], group)
    count = counts[weight.device_mesh.get_local_rank()]
    widths = [end - start for start, end in pairwise(bounds(weight.shape[1], weight.device_mesh))]
    pieces = zip(parts.split(sizes), widths, strict=True)
    return torch.cat([part.view(count, width) for part, width in pieces], dim=1)


def _divided(rows: torch.Tensor, counts: list[int], weight: DTensor) -> torch.Tensor:
    """The reverse of `_joined`: this process's columns of the rows that all processes have."""
    group, starts = weight.device_mesh.get_group(), bounds(weight.shape[1], weight.device_mesh)
    parts = [rows[:, start:end].flatten() for start, end in pairwise(starts)]
    columns, _ = _sent(torch.cat(parts), [len(part) for part in parts], group)
    return columns.view(sum(counts), weight.to_local().shape[1])
