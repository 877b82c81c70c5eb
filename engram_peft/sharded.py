"""Tensors that are sharded over processes (`DTensor`): as wholes, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.functional import pad


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor as a whole, for which all processes have to ask; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which every process has, sharded as `reference` is, if it is. Nothing is sent."""
    if not isinstance(reference, DTensor) or isinstance(tensor, DTensor):
        return tensor
    mesh = reference.device_mesh  # and not the reference's device, which may be the meta device
    whole = DTensor.from_local(tensor.to(mesh.device_type), mesh, run_check=False)
    return whole.redistribute(placements=reference.placements)


@torch.no_grad()
def overwrite(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes the values of a whole tensor into a parameter, or every process its shard of them."""
    new = sharded_like(tensor.to(parameter.dtype), parameter)
    if isinstance(parameter, DTensor) and isinstance(new, DTensor):
        parameter.to_local().copy_(new.to_local())
    else:
        parameter.copy_(new)


@torch.no_grad()
def share_first(tensors: Iterable[torch.Tensor], neighbours: Iterable[torch.Tensor]) -> None:
    """Makes tensors that were drawn at random the same on all processes, if a neighbour of theirs lies on several."""
    mesh = next((neighbour.device_mesh for neighbour in neighbours if isinstance(neighbour, DTensor)), None)
    if mesh is None:
        return
    for tensor in tensors:
        if not tensor.is_meta:
            of_first = distribute_tensor(tensor.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim)
            tensor.copy_(of_first.to_local())


# ---------------------------------------------------------------------------------------------- row-parallel layers


def row_parallel_mesh(layer: torch.nn.Module) -> DeviceMesh | None:
    """The processes that have a slice each of the input of a linear layer; `None` if all have all of it, as with FSDP2.

    FSDP2 can shard weights along their input, too, but gathers them for a forward pass. As in PEFT, it is told from tensor
    parallelism by the mesh, which is called `"fsdp"` or nothing.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, torch.nn.Linear) or not isinstance(weight, DTensor):
        return None
    along_input = [i for i, place in enumerate(weight.placements) if getattr(place, "dim", None) in (1, -1)]
    if not along_input:
        return None
    mesh = weight.device_mesh
    if mesh.ndim > 1 and mesh.mesh_dim_names is not None and len(along_input) == 1:
        mesh = mesh[mesh.mesh_dim_names[along_input[0]]]
    is_fsdp = getattr(layer, "_is_fsdp_managed_module", False) and set(mesh.mesh_dim_names or ()) <= {"fsdp"}
    return None if is_fsdp else mesh


def bounds(size: int, mesh: DeviceMesh) -> list[int]:
    """Where the part of every process starts along a sharded dimension, and where the last one ends."""
    chunk = -(-size // mesh.size())  # as `torch.chunk` cuts, and so `DTensor`
    return [min(chunk * rank, size) for rank in range(mesh.size() + 1)]


def summed(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of what the processes have, from which all go on alike; so gradients, which all have as wholes, go straight through."""
    return cast(torch.Tensor, _Summed.apply(part, mesh.get_group()))


def with_summed_gradient(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """`x`, which all processes have, and of which each makes something else: the gradient is the sum of theirs."""
    return cast(torch.Tensor, _SummedGradient.apply(x, mesh.get_group())) if x.requires_grad else x


def whole_input(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """The input of a layer, joined from all processes if each has only a slice of it."""
    mesh, width = row_parallel_mesh(layer), cast(int, getattr(layer, "in_features", x.shape[-1]))
    return gathered(x) if mesh is None or isinstance(x, DTensor) or x.shape[-1] == width else joined(x, width, mesh)


def joined(part: torch.Tensor, size: int, mesh: DeviceMesh) -> torch.Tensor:
    """Slices `(..., n)` of all processes side by side, `(..., size)`."""
    start = bounds(size, mesh)[mesh.get_local_rank()]
    return summed(pad(part, (start, size - start - part.shape[-1])), mesh)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
