"""Adapters on layers whose weight is sharded over processes, as a `DTensor`: by tensor parallelism or by FSDP2.

FSDP2 and column-parallel layers see their whole input on every process, so an edit of the input is what it is on one process, and
every process holds whole factors. A row-parallel layer sees a slice of its input. Its factors are sharded the same way: `A` by its
columns, which makes `A x` a sum over processes, and `B` by its rows. One reduction of `(..., r)` a layer is all that is sent.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

from ...editing.kinds import LayerKind
from ...sharded import as_slice_of_input, gathered, row_parallel_mesh


def mesh_of_input(base: nn.Module, kind: LayerKind) -> DeviceMesh | None:
    """The processes that have a slice each of the input of a row-parallel layer; `None` for any other layer.

    Raises:
        `TypeError`: The layer is sharded over several dimensions of the mesh as well.
    """
    mesh = row_parallel_mesh(base.weight) if isinstance(base, nn.Linear) and kind.rows_are_input else None
    if mesh is not None and mesh.ndim > 1:
        raise TypeError(
            f"{type(base).__name__} is sharded along its input, and over several dimensions of {mesh}. Shard the layers of the adapter "
            "with tensor parallelism alone, or leave this one out with `exclude_modules`."
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

    Returns:
        The slice of what is taken out that belongs to `x`, and the share of the constant `(..., 1)`, if it has one.
    """
    given = as_slice_of_input(x, in_features, mesh)
    narrow: Any  # a `DTensor`: torch's functions of them say `Tensor`
    if isinstance(a, nn.Linear):
        # a sum over processes, reduced here, once
        narrow = linear(given.redistribute(placements=[Shard(-1)]), a.weight)
        narrow = narrow.redistribute(placements=[Replicate()])
        narrow = narrow if a.bias is None else narrow + a.bias
    else:
        narrow = given.redistribute(placements=[Replicate()])
    # what follows gives every process a part of the gradient: going through here backwards adds them up
    narrow = (narrow * strength).redistribute(placements=[Replicate()])
    left: Any = b.weight
    share = None
    if left.shape[0] > in_features:
        share = cast(DTensor, linear(narrow, left[in_features:])).to_local()
        left = left[:in_features]
    parts = narrow.redistribute(placements=[Replicate()])
    taken = cast(DTensor, linear(parts, left.redistribute(placements=[Shard(0)])))
    taken = taken.redistribute(placements=given.placements)
    return (taken if isinstance(x, DTensor) else taken.to_local()), share


def taken_from_bias(constant: torch.Tensor, bias: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`constant (..., 1) * bias`, in the part of the output that `result` is."""
    if not isinstance(bias, DTensor):
        return constant * bias
    # as `DTensor`s, so that gradients of the constant are summed over all parts of the bias
    taken = cast(DTensor, DTensor.from_local(constant, bias.device_mesh, run_check=False) * bias)
    if isinstance(result, DTensor):
        return taken
    return taken.to_local() if len(bias.to_local()) == result.shape[-1] else gathered(taken)
