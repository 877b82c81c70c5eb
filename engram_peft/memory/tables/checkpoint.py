"""Tables in checkpoints, opened where they lie: one tensor or several, in one safetensors file or in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .format import RowLayout, SafetensorsHeader, TableFormatError, TensorEntry, open_file, read_header
from .placement import Column, Region


Paths = str | os.PathLike | Sequence[str | os.PathLike]
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the file that holds it."""

    path: str
    entry: TensorEntry


def file_header(path: str | os.PathLike) -> SafetensorsHeader:
    """The checked header of a safetensors file."""
    with open_file(path) as file:
        return read_header(file, path)


def stored_tensors(path: Paths) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name; only headers are read.

    Args:
        path (`str`, `os.PathLike` or a sequence of them): A folder, a safetensors file, or the files of one checkpoint.

    Raises:
        `FileNotFoundError`: There is no such file, or a folder holds no safetensors file.
        `TableFormatError`: Two files hold a tensor of one name, or the folder's index is damaged.
    """
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(part) for part in path]
    found: dict[str, StoredTensor] = {}
    for file in [file for part in paths for file in (_files_of(part) if part.is_dir() else [part])]:
        for name, entry in file_header(file).tensors.items():
            if name in found:
                raise TableFormatError(f"Both {found[name].path} and {file} hold {name!r}. Name the files to read.")
            found[name] = StoredTensor(str(file), entry)
    return found


def _files_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint's folder."""
    index = folder / _INDEX
    if not index.exists():
        files = [folder / _SINGLE] if (folder / _SINGLE).exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no safetensors file.")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
            raise ValueError("it names files outside of its folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TableFormatError(f"{index} is damaged: {error!r}.") from None
    return [folder / name for name in names]


def checkpoint_columns(
    path: Paths, tensor: str | Sequence[str], scales: str | Sequence[str] | None
) -> tuple[RowLayout, tuple[Column, ...], tuple[int, ...] | None]:
    """Where the rows of a table lie in a checkpoint.

    Returns:
        The layout of a row; its columns, the scales being one of their own; and the sizes of the heads, where the tensor has
        the shape `[heads, rows, dim]`.
    """
    tensors = stored_tensors(path)
    values = _chosen(tensors, tensor, path, "tensor")
    dtype, (*_, dim) = values[0].entry.torch_dtype, values[0].entry.shape
    if dtype is None:
        raise ValueError(f"{values[0].path} holds rows of {values[0].entry.dtype}, which cannot be served.")
    heads = None
    if len(values[0].entry.shape) == 3:
        heads = tuple(rows for part in values for rows in [part.entry.shape[1]] * part.entry.shape[0])
    value_column = _column(values, dtype, dim)
    if scales is None:
        return RowLayout(dtype, dim), (value_column,), heads
    scale_parts = _chosen(tensors, scales, path, "scales")
    scale_dtype, n_scales = scale_parts[0].entry.torch_dtype, scale_parts[0].entry.shape[-1]
    if scale_dtype == torch.uint8 and dtype == torch.float8_e4m3fn:
        scale_dtype = torch.float8_e8m0fnu  # how files name ue8m0 that were written before safetensors knew it
    if scale_dtype is None or n_scales < 1 or dim % n_scales:
        raise ValueError(
            f"`scales` of {scale_parts[0].entry.dtype}, {n_scales} a row, do not fit rows of {dim} values."
        )
    scale_column = _column(scale_parts, scale_dtype, n_scales)
    if scale_column.rows != value_column.rows:
        raise ValueError(f"`scales` has {scale_column.rows} rows, the table has {value_column.rows}.")
    return RowLayout(dtype, dim, scale_dtype, dim // n_scales), (value_column, scale_column), heads


def _chosen(
    tensors: Mapping[str, StoredTensor], names: str | Sequence[str], path: Paths, argument: str
) -> list[StoredTensor]:
    chosen = []
    for name in [names] if isinstance(names, str) else names:
        if name not in tensors:
            raise ValueError(f"`{argument}`: {path} holds no {name!r}. It holds {sorted(tensors)[:10]}.")
        chosen.append(tensors[name])
    if not chosen:
        raise ValueError(f"`{argument}` names no tensor.")
    first = chosen[0].entry
    for part in chosen:
        if len(part.entry.shape) not in (2, 3) or 0 in part.entry.shape:
            raise ValueError(
                f"`{argument}` has to name tensors [rows, dim], one has the shape {list(part.entry.shape)}."
            )
        if (part.entry.dtype, len(part.entry.shape), part.entry.shape[-1]) != (
            first.dtype,
            len(first.shape),
            first.shape[-1],
        ):
            raise ValueError(
                f"`{argument}` names tensors that make no one table: {first.dtype} {list(first.shape)} and "
                f"{part.entry.dtype} {list(part.entry.shape)}."
            )
    return chosen


def _column(parts: Sequence[StoredTensor], dtype: torch.dtype, width: int) -> Column:
    row_bytes = width * dtype.itemsize
    regions = [Region(p.path, p.entry.start, (p.entry.end - p.entry.start) // row_bytes) for p in parts]
    return Column(tuple(regions), row_bytes, dtype)
