"""Puts the tables of n-gram memories on several processes."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .layer import NgramTable


def distribute_tables(model: nn.Module, mesh: DeviceMesh, placement: Placement | None = None) -> set[nn.Parameter]:
    """Makes `DTensor`s of a model's tables: processes share them, and send each other ids, rows and their gradients.

    Every other parameter is left to whoever takes care of it. Gradients of the tables are averaged over the processes, as those of
    all parameters are with data parallelism. On a mesh whose one dimension is called `"tp"` all processes read the same tokens, so
    nothing is averaged.

    Call it on all processes, with the same weights on each, before the optimizer is made and before `fully_shard`.

    Args:
        model (`nn.Module`): Any model with `NgramTable`s.
        mesh (`DeviceMesh`): The processes, in one dimension.
        placement (`Placement`, *optional*):
            `Shard(0)`, every process holds some of the rows (the default); `Shard(1)`, some columns of every row; or `Replicate()`,
            all of the table.

    Returns:
        `set[nn.Parameter]`: The tables, for `fully_shard(..., ignored_params=...)`: FSDP2 would gather them as wholes.

    Raises:
        `ValueError`: The mesh has several dimensions, the placement is another, there are no tables, or FSDP2 has sharded them.

    Example:

        ```py
        >>> mesh = init_device_mesh("cuda", (world_size,))
        >>> tables = distribute_tables(model, mesh)
        >>> for layer in model.backbone.model.layers:
        ...     fully_shard(layer, mesh=mesh, ignored_params=tables)
        >>> fully_shard(model, mesh=mesh, ignored_params=tables)
        ```
    """
    placement = Shard(0) if placement is None else placement
    if mesh.ndim != 1:
        raise ValueError(f"`mesh` must have one dimension, got {mesh}. Take one of them, as in `mesh['fsdp']`.")
    if placement not in (Replicate(), Shard(0), Shard(1)):
        raise ValueError(f"`placement` must be `Shard(0)`, `Shard(1)` or `Replicate()`, got {placement}.")
    tables = [module for module in model.modules() if isinstance(module, NgramTable)]
    if not tables:
        raise ValueError(f"{type(model).__name__} has no tables of n-gram memories that are its parameters.")
    if any(isinstance(table.weight, DTensor) for table in tables):
        raise ValueError("The tables are sharded already. Distribute them before anything else shards the model.")
    distributed = set()
    for table in tables:
        whole = DTensor.from_local(table.weight.detach().to(mesh.device_type), mesh, run_check=False)
        part = whole.redistribute(placements=[placement])
        table.weight = nn.Parameter(part, requires_grad=table.weight.requires_grad)
        table.is_distributed = True
        distributed.add(table.weight)
    return distributed
