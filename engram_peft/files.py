"""Writing files so that an interrupted write leaves what was there."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file


def replace_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file beside `path` and renames it: `path` holds the whole old file or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, beside, metadata=metadata)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
