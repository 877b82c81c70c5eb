"""Tensors that are sharded over processes (`DTensor`): as wholes, and the way back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


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


def row_parallel_mesh(weight: torch.Tensor | None) -> DeviceMesh | None:
    """The processes that have a slice each of the input of a linear layer, by its weight `(out, in)`; `None` if all have all of it."""
    if isinstance(weight, DTensor) and any(getattr(place, "dim", None) in (1, -1) for place in weight.placements):
        return weight.device_mesh
    return None


def as_slice_of_input(x: torch.Tensor, width: int, mesh: DeviceMesh) -> DTensor:
    """What a row-parallel layer is given: a slice of its input `(..., width)`, unless it is as wide as the whole."""
    if isinstance(x, DTensor):
        return x
    if x.shape[-1] == width and mesh.size() > 1:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    shape = torch.Size((*x.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


def whole_input(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """The input of a layer, gathered from all processes if each has only a slice of it."""
    if isinstance(layer, torch.nn.Linear) and (mesh := row_parallel_mesh(layer.weight)) is not None:
        x = as_slice_of_input(x, layer.in_features, mesh)
    return gathered(x)
