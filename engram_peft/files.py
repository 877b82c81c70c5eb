"""Writing files so that an interrupted write leaves what was there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file


def replace_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file; `path` holds the whole old file or the whole new one."""
    with _replacing(path) as beside:
        save_file(tensors, beside, metadata=metadata)


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file; `path` holds the whole old file or the whole new one."""
    with _replacing(Path(path)) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name beside `path`; what is written under it is renamed to `path` at the end, or removed after an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
