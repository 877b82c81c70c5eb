"""Adapters on layers whose weight is sharded over processes, as a `DTensor`: by tensor parallelism or by FSDP2.

FSDP2 and column-parallel layers see their whole input on every process, so an edit of the input is what it is on one process, and
every process holds whole factors. A row-parallel layer sees a slice of its input. Its factors are sharded the same way: `A` by its
columns, which makes `A x` a sum over processes, and `B` by its rows. One reduction of `(..., r)` a layer is all that is sent.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

from ...editing.kinds import LayerKind
from ...sharded import bounds, gathered, joined, row_parallel_mesh, summed, with_summed_gradient


def mesh_of_input(base: nn.Module, kind: LayerKind) -> DeviceMesh | None:
    """The processes that have a slice each of the input of a row-parallel layer; `None` for any other layer.

    Raises:
        `TypeError`: It has not one slice a process of one dimension of the mesh.
    """
    mesh = row_parallel_mesh(base) if kind.rows_are_input else None
    if mesh is not None and mesh.ndim > 1:
        raise TypeError(
            f"{type(base).__name__} is sharded along its input over {mesh}, of which one dimension, with a name, should do that. Make the "
            "mesh with `mesh_dim_names`, or leave the layer out with `exclude_modules`."
        )
    return mesh


# ---------------------------------------------------------------------------------------------- factors


def shard_factors(
    a: nn.Linear | nn.Identity, b: nn.Linear, strength: nn.Module, in_features: int, mesh: DeviceMesh
) -> None:
    """Shards whole factors for a row-parallel layer: `A` by columns, `B` by rows.

    A `B` that has a row for the constant, too, stays whole: with it the rows do not fall where the layer's input is cut.
    """
    has_constant = b.out_features > in_features
    places: list[tuple[nn.Module, str, Shard | Replicate]] = [
        (b, "weight", Replicate() if has_constant else Shard(0)),
        (strength, "weight", Replicate()),
    ]
    if isinstance(a, nn.Linear):
        places.append((a, "weight", Shard(1)))
        if a.bias is not None:
            places.append((a, "bias", Replicate()))
    for module, name, place in places:
        old = cast(nn.Parameter, getattr(module, name))
        # `None`: nothing is sent, as all processes have the same values
        sharded = distribute_tensor(old.detach(), mesh, [place], src_data_rank=None)
        # not by `setattr`, since PEFT's `low_cpu_mem_usage` makes new Parameters of what is set, and knows no `DTensor`
        module._parameters[name] = nn.Parameter(sharded, requires_grad=old.requires_grad)


# ---------------------------------------------------------------------------------------------- forward


def taken_out_of_slice(
    x: torch.Tensor,
    a: nn.Linear | nn.Identity,
    b: nn.Linear,
    strength: torch.Tensor,
    in_features: int,
    mesh: DeviceMesh,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`B diag(strength) A x~` where every process has a slice of `x`, or all of it where the layer itself will cut it.

    In tensors that are no `DTensor`s, with the sums over processes spelt out, forwards and backwards: inference mode knows no
    `DTensor`s (torch 2.13).

    Returns:
        What is taken out of `x`, in its shape, and the share of the constant `(..., 1)`, if it has one.
    """
    given, start, end = x, *bounds(in_features, mesh)[(rank := mesh.get_local_rank()) : rank + 2]
    is_whole = not isinstance(x, DTensor) and x.shape[-1] == in_features and mesh.size() > 1
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Shard(-1)]).to_local()
    elif is_whole:
        x = with_summed_gradient(x, mesh)[..., start:end]
    if isinstance(a, nn.Linear):
        narrow = summed(linear(x, _local(a.weight)), mesh)
        narrow = narrow if a.bias is None else narrow + _local(a.bias)
    else:
        narrow = joined(x, in_features, mesh)
    narrow = narrow * _local(strength)
    left, share = b.weight, None
    if left.shape[0] > in_features:
        share = linear(narrow, _local(left)[in_features:])
        left = with_summed_gradient(_local(left), mesh)[start:end]
    taken = linear(with_summed_gradient(narrow, mesh), _local(left))
    if is_whole:
        return joined(taken, in_features, mesh), share
    if isinstance(given, DTensor):
        sharded = DTensor.from_local(
            taken, mesh, [Shard(-1)], run_check=False, shape=given.shape, stride=given.stride()
        )
        return sharded.redistribute(placements=given.placements), share
    return taken, share


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What a process holds of a tensor, which may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def taken_from_bias(constant: torch.Tensor, bias: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`constant (..., 1) * bias`, in the part of the output that `result` is."""
    if not isinstance(bias, DTensor):
        return constant * bias
    # as `DTensor`s, so that gradients of the constant are summed over all parts of the bias
    taken = cast(DTensor, DTensor.from_local(constant, bias.device_mesh, run_check=False) * bias)
    if isinstance(result, DTensor):
        return taken
    return taken.to_local() if len(bias.to_local()) == result.shape[-1] else gathered(taken)
