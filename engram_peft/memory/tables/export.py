"""Writing a table to its file: streamed, hashed on the way, complete or not there at all, and never over another file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils import logging

from .digests import ChunkHasher
from .format import CHUNK_BYTES, RowLayout, check_head_sizes, header_bytes
from .table import Table


_SHOW_PROGRESS_BYTES = 2**30


def export_table(
    source: nn.Module | torch.Tensor | Table,
    head_sizes: Sequence[int] | None,
    path: str | os.PathLike,
    *,
    scales: torch.Tensor | None = None,
    hash: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Writes a table to a file that `open_table` serves from, with the bytes of every row as they are.

    Needs memory for two chunks above the source. `path` appears when the file is complete and on disk; an interrupted export leaves
    nothing there. The source must not change meanwhile.

    Args:
        source (`nn.Module`, `torch.Tensor` or `Table`):
            `[rows, dim]`, on any device and with any strides; a module with such a `weight`, itself or as its `embedding`.
        head_sizes (`Sequence[int]`, *optional*): Rows of every head; None is one head.
        path (`str` or `os.PathLike`): The file to write; it must not exist.
        scales (`torch.Tensor`, *optional*): `[rows, blocks]` for float8_e4m3fn or int8 rows. A row's scales are stored next to it.
        hash (`Mapping[str, Any]`, *optional*): How ids are made, for `Table.hash`; what JSON can hold.
        chunk_bytes (`int`): Bytes under one digest, and so what `verify="lazy"` reads for one row.

    Raises:
        `FileExistsError`: There is something at `path`, be it from another exporter that was quicker.
        `ValueError`, `TypeError`: The source has a wrong shape or dtype, or the heads or scales do not fit it.
        `OSError`: The folder does not exist or cannot be written, or the disk is full.

    Example:

        ```py
        >>> export_table(model.engram.multi_head_embedding, head_sizes, "table.safetensors")
        ```
    """
    if chunk_bytes < 1:
        raise ValueError(f"`chunk_bytes` has to be at least 1, not {chunk_bytes}.")
    layout, rows, pieces = _source(source, scales, chunk_bytes)
    sizes = check_head_sizes(head_sizes, rows)
    target, total = Path(path), rows * layout.row_bytes
    bar = logging.tqdm(
        total=total, unit="B", unit_scale=True, desc="Exporting table",
        disable=True if total < _SHOW_PROGRESS_BYTES else None,
    )  # fmt: skip
    head = header_bytes(layout, sizes, chunk_bytes, hash)
    needed = len(head) + total + 32 * -(-total // chunk_bytes)
    with new_file(target, needed) as file, bar:
        _write(file, np.frombuffer(head, np.uint8))
        hasher = ChunkHasher(chunk_bytes)
        for piece in pieces:
            hasher.update(piece)
            _write(file, piece)
            bar.update(len(piece))
            del piece  # before the next one is made
        table_sha256, chunks = hasher.finish()
        _write(file, np.frombuffer(chunks, np.uint8))
        digests = {"table_sha256": table_sha256, "chunks_sha256": hashlib.sha256(chunks).hexdigest()}
        file.seek(0)
        _write(file, np.frombuffer(header_bytes(layout, sizes, chunk_bytes, hash, **digests), np.uint8))


def copy_table_file(source: str | os.PathLike, path: str | os.PathLike) -> None:
    """Puts a file at `path` too: as a second name of it, or as a copy where that is not possible; never over another file."""
    try:
        os.link(os.path.realpath(source), path)  # of a symbolic link, the file: the Hub's cache is made of them
    except FileExistsError:
        raise
    except OSError:
        with open(source, "rb") as old, new_file(Path(path), os.fstat(old.fileno()).st_size) as new:
            shutil.copyfileobj(old, new, 2**20)


@contextmanager
def new_file(path: Path, size: int) -> Iterator[FileIO]:
    """A file to write, which gets its name when the block ends: complete, on disk, and only if nothing else has the name.

    Until then it has no name at all where the file system can do that, so not even a killed process leaves anything behind.

    Args:
        size (`int`): Bytes that will be written, which have to be free.
    """
    folder = path.absolute().parent
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "There is something already; choose another name or remove it", str(path))
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder", str(folder))
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(errno.ENOSPC, f"{size} bytes are needed, {free} are free", str(folder))
    descriptor, beside = _nameless(folder), None
    if descriptor is None:
        beside = folder / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with FileIO(descriptor, "r+") as file:
            yield file
            os.fsync(descriptor)
            if beside is None:
                _name(descriptor, folder, path)
        if beside is not None:
            _rename_to_free(beside, path)
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
    _sync_folder(folder)


def _nameless(folder: Path) -> int | None:
    """A new file without a name in the file system of `folder`; None where it has no such thing."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return None
        raise


def _name(descriptor: int, folder: Path, path: Path) -> None:
    """Gives a nameless file its name, unless something has it."""
    within = os.open(folder, os.O_RDONLY)
    try:
        # with src_dir_fd, Python calls linkat and follows the link to the open file
        os.link(f"/proc/self/fd/{descriptor}", path.absolute(), src_dir_fd=within, follow_symlinks=True)
    finally:
        os.close(within)


def _rename_to_free(old: Path, new: Path) -> None:
    """Renames a file, unless something has the new name."""
    if os.name == "nt":
        os.rename(old, new)  # refuses by itself
        return
    try:
        os.link(old, new)  # as one step of the file system; the old name goes afterwards
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        libc = ctypes.CDLL(None, use_errno=True)
        no_replace, here = 1, -100
        if libc.renameat2(here, os.fsencode(old), here, os.fsencode(new), no_replace) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(new)) from None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system opens folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write(file: FileIO, data: np.ndarray) -> None:
    view = data.data
    while len(view):
        view = view[file.write(view) :]


def _source(
    source: nn.Module | torch.Tensor | Table, scales: torch.Tensor | None, chunk_bytes: int
) -> tuple[RowLayout, int, Iterator[np.ndarray]]:
    """Layout, number of rows, and the bytes of the rows in pieces of at most a chunk or one row, uint8 `[n]`."""
    if isinstance(source, Table):
        if scales is not None:
            raise ValueError("`scales` of a table are in its rows already.")
        step = max(1, chunk_bytes // source.layout.row_bytes)
        table = source
        starts = range(0, table.rows, step)
        return table.layout, table.rows, (table.raw_rows(a, min(a + step, table.rows)).reshape(-1) for a in starts)
    weight = source if isinstance(source, torch.Tensor) else weight_of(source)
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"A table has the shape [rows, dim], this has {list(weight.shape)}.")
    rows, dim = weight.shape
    if scales is None:
        layout = RowLayout(weight.dtype, dim)
    else:
        if scales.ndim != 2 or len(scales) != rows or scales.shape[1] < 1 or dim % scales.shape[1]:
            raise ValueError(f"`scales` has the shape {list(scales.shape)}, [{rows}, a divisor of {dim}] is needed.")
        if scales.dtype == torch.uint8 and weight.dtype == torch.float8_e4m3fn:
            scales = scales.view(torch.float8_e8m0fnu)
        layout = RowLayout(weight.dtype, dim, scales.dtype, dim // scales.shape[1])
    for tensor in (weight, scales):
        if tensor is not None and tensor.is_meta:
            raise ValueError("The table has no rows: it is on the meta device.")
    return layout, rows, _pieces(weight.detach(), scales, max(1, chunk_bytes // layout.row_bytes))


def weight_of(module: nn.Module) -> torch.Tensor:
    """The table of a module: its `weight`, or that of its `embedding`.

    Raises:
        `TypeError`: It has neither.
    """
    for holder in (module, getattr(module, "embedding", None)):
        if isinstance(weight := getattr(holder, "weight", None), torch.Tensor):
            return weight
    raise TypeError(
        f"{type(module).__name__} has neither a `weight` nor an `embedding` with one. Pass the tensor itself."
    )


def _pieces(weight: torch.Tensor, scales: torch.Tensor | None, step: int) -> Iterator[np.ndarray]:
    whole = weight.is_cpu and weight.is_contiguous()  # then its rows are written as they lie
    buffer = (
        weight if whole else torch.empty((min(step, len(weight)), weight.shape[1]), dtype=weight.dtype, device="cpu")
    )
    for start in range(0, len(weight), step):
        rows = weight[start : start + step]
        values = rows if whole else buffer[: len(rows)].copy_(rows)
        if scales is None:
            yield _bytes(values).reshape(-1)
        else:
            yield np.concatenate([_bytes(values), _bytes(scales[start : start + step])], axis=1).reshape(-1)


def _bytes(rows: torch.Tensor) -> np.ndarray:
    """uint8 `[n, row_bytes]`"""
    found: np.ndarray = rows.to("cpu").contiguous().view(torch.uint8).numpy()
    return found
