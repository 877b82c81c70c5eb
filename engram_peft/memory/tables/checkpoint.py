"""Tables in checkpoints, opened where they lie: one tensor or several, in one safetensors file or in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from .format import RowLayout, SafetensorsHeader, TableFormatError, TensorEntry, open_file, read_header
from .placement import Column, Region


Paths = str | os.PathLike | Sequence[str | os.PathLike]
# The arguments of `from_pretrained` that say where its files are: those of `model_files`.
LOADING_OPTIONS = (
    "cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "variant",
)  # fmt: skip
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, by its name, and the file that holds it."""

    name: str
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
            found[name] = StoredTensor(name, str(file), entry)
    return found


def model_files(
    name: str | os.PathLike, *, subfolder: str = "", variant: str | None = None, **hub_options: Any
) -> list[Path]:
    """The safetensors files that `from_pretrained` of transformers reads with these arguments.

    Args:
        name (`str` or `os.PathLike`): A folder, or a name on the Hub, whose files are downloaded where they are not cached.
        subfolder, variant: As for `from_pretrained`.
        hub_options: What `cached_file` of transformers takes, such as `revision`.

    Raises:
        `FileNotFoundError`: There are none.
        `TableFormatError`: A folder's index is damaged.
    """
    if (folder := Path(name, subfolder)).is_dir():
        return _files_of(folder, variant)
    for file in (_SINGLE, _INDEX):
        path = cached_file(
            str(name), _with_variant(file, variant), subfolder=subfolder,
            _raise_exceptions_for_missing_entries=False, **hub_options,
        )  # fmt: skip
        if path is not None and file == _SINGLE:
            return [Path(path)]
        if path is not None:
            files = get_checkpoint_shard_files(str(name), path, subfolder=subfolder, **hub_options)[0]
            return [Path(shard) for shard in files]
    raise FileNotFoundError(f"{name} has no safetensors files, so its tables cannot be served from them.")


def files_of_model(model: nn.Module) -> list[Path]:
    """The safetensors files that a model was loaded from.

    Raises:
        `ValueError`: It does not say.
        `FileNotFoundError`: There are none.
    """
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "")
    if not name:
        raise ValueError("The model does not say where it was loaded from. Name its files: `checkpoint`.")
    return model_files(name, revision=getattr(config, "_commit_hash", None))


def _with_variant(file: str, variant: str | None) -> str:
    """`model.safetensors` -> `model.fp16.safetensors`, as transformers names the files of a variant."""
    stem, _, end = file.rpartition(".")
    return file if variant is None else f"{stem}.{variant}.{end}"


def _files_of(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of a checkpoint's folder. Where there are both one file and shards, transformers reads the one."""
    single, index = (folder / _with_variant(file, variant) for file in (_SINGLE, _INDEX))
    if single.exists():
        return [single]
    if not index.exists():
        files = [] if variant else sorted(folder.glob("*.safetensors"))
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
    regions = [
        Region(p.path, p.entry.start, (p.entry.end - p.entry.start) // row_bytes, p.name, p.entry.shape) for p in parts
    ]
    return Column(tuple(regions), row_bytes, dtype)
