"""Tests on several processes: forked ones, which have everything imported already."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def on_processes(count: int, function: Callable[..., None], *args: Any) -> None:
    """Runs `function(rank, *args)` on `count` processes that can talk to each other; what one of them raises is raised here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Spawned processes would import everything again; those that are forked may not have a GPU.
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(_run, (count, port, function, args), nprocs=count, start_method=method)


def _run(rank: int, count: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        ""  # spawned processes: transformers makes meshes of accelerators if there are any
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    try:
        function(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
