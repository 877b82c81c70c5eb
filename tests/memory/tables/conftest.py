from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engram_peft.memory.tables import export_table

from .rows import wild


HEADS = (50, 70, 31)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.safetensors"


@pytest.fixture
def exported(path: Path) -> Callable[..., tuple[Path, torch.Tensor]]:
    """`exported(dtype=float16, heads=HEADS, dim=8, **options)`: a file of wild rows, and the rows."""

    def make(dtype: torch.dtype = torch.float16, heads=HEADS, dim: int = 8, **options) -> tuple[Path, torch.Tensor]:
        weight = wild(dtype, sum(heads), dim)
        export_table(weight, heads, path, **options)
        # written long ago: clocks of files may be too coarse to tell this write from one that a test makes right after it
        os.utime(path, (1e9, 1e9))
        return path, weight

    return make
