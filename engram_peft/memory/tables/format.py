"""The file of a table: one plain safetensors file whose first row begins on a page, and the checks of what it claims.

    8 bytes           length of the header, little endian
    header            JSON, padded with blanks so that what follows is page-aligned
    table             the rows, [rows, dim]; rows with scales are uint8 records [rows, row_bytes]: the values, then their scales
    chunk_sha256      uint8 [chunks, 32]: the digest of every `chunk_bytes` bytes of the table

Each digest vouches for the next: `header_sha256` for the header, the header for `chunk_sha256`, that for the rows. Only the header
has to be read before the first row is served. Headers of any other safetensors file are read with the same distrust.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from typing import Any

import torch


PAGE = 4096
FORMAT, VERSION = "engram_peft.table", "1"
TABLE, CHUNKS = "table", "chunk_sha256"
CHUNK_BYTES = 256 * 1024
_LARGEST_HEADER = 100_000_000  # what safetensors itself refuses to read beyond
_DIGEST = "0" * 64  # holds the place of a digest that is not known yet

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_OTHER_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "BOOL": 1,
    "F8_E5M2": 1,
}
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)


class TableError(ValueError):
    """A table cannot be served. Its subclasses say why; the message says what was expected and what was found."""


class TableFormatError(TableError):
    """The header of a file is damaged, contradicts itself, or is not that of a table."""


class TableSizeError(TableError):
    """A file is shorter or longer than its header says."""


class TableDigestError(TableError):
    """Bytes of a file are not those that were written."""


class TableChangedError(TableError):
    """A file was truncated or rewritten, or could not be read, while its table was open."""


@dataclass(frozen=True)
class RowLayout:
    """What a row consists of: `dim` values and, where the dtype is a scaled one, a scale for every `scale_block` of them.

    Raises:
        `ValueError`: The dtypes cannot be stored, or the blocks do not fit the row.
    """

    dtype: torch.dtype
    dim: int
    scale_dtype: torch.dtype | None = None
    scale_block: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ROW_DTYPES:
            raise ValueError(f"Rows of {self.dtype} cannot be stored. Use one of {_shown(ROW_DTYPES)}.")
        if self.dim < 1:
            raise ValueError(f"Rows need at least one value, these have {self.dim}.")
        if self.scale_dtype is None:
            return
        if self.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise ValueError(f"`scales` go with float8_e4m3fn or int8 rows, these are {self.dtype}.")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"`scales` of {self.scale_dtype} cannot be stored. Use one of {_shown(SCALE_DTYPES)}.")
        if self.scale_block < 1 or self.dim % self.scale_block:
            raise ValueError(f"Blocks of {self.scale_block} values do not divide rows of {self.dim}.")

    @property
    def n_scales(self) -> int:
        return self.dim // self.scale_block if self.scale_dtype else 0

    @property
    def value_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        return self.n_scales * self.scale_dtype.itemsize if self.scale_dtype else 0

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes


def _shown(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a safetensors file; `start` and `end` count bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return _DTYPES.get(self.dtype)


@dataclass(frozen=True)
class SafetensorsHeader:
    """The header of any safetensors file, after its claims were checked against each other and the file's size."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]
    data_start: int


@dataclass(frozen=True)
class TableHeader:
    """The header of a file that `export_table` wrote."""

    layout: RowLayout
    head_sizes: tuple[int, ...]
    chunk_bytes: int
    table_sha256: str
    chunks_sha256: str
    hash: Mapping[str, Any] | None
    table: TensorEntry
    chunks: TensorEntry

    @property
    def rows(self) -> int:
        return sum(self.head_sizes)


def check_head_sizes(head_sizes: Sequence[int] | None, rows: int, *, padded: bool = False) -> tuple[int, ...]:
    """Rows of every head as a tuple of ints; one head of all `rows` where `head_sizes` is None.

    Args:
        padded (`bool`): Whether rows may be left over after the last head.

    Raises:
        `ValueError`: A head is empty, or the heads do not add up to the table.
    """
    sizes = (rows,) if head_sizes is None else tuple(int(size) for size in head_sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`head_sizes` has to list at least one row for every head, got {list(sizes)}.")
    if sum(sizes) > rows or (sum(sizes) < rows and not padded):
        raise ValueError(f"`head_sizes` adds up to {sum(sizes)} rows, the table has {rows}.")
    return sizes


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---------------------------------------------------------------------------------------------------- reading


def open_file(path: str | os.PathLike) -> FileIO:
    """A file for reading.

    Raises:
        `FileNotFoundError`, `OSError`: There is no such file, or it cannot be read.
        `TableFormatError`: It is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise TableFormatError(f"{path} is not a file.")
    return FileIO(os.fspath(path))


def read_header(file: FileIO, path: str | os.PathLike) -> SafetensorsHeader:
    """The header of a safetensors file. Nothing it says is believed: names, shapes, offsets and the file's size must agree.

    Raises:
        `TableSizeError`: The file ends before its header or its tensors do, or goes on after them.
        `TableFormatError`: The header is not one, or its tensors overlap, leave holes, or contradict their shapes.
    """
    size = os.fstat(file.fileno()).st_size
    length_bytes = file.read(8)
    if len(length_bytes) < 8:
        raise TableSizeError(f"{path} is no safetensors file: it has {size} bytes, the length of a header takes 8.")
    length = int.from_bytes(length_bytes, "little")
    if length > _LARGEST_HEADER:
        raise TableFormatError(f"{path} is no safetensors file: its header would have {length} bytes.")
    if 8 + length > size:
        raise TableSizeError(f"{path} is truncated: its header has {length} bytes, the file {size} in all.")
    try:
        content = json.loads(file.read(length), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TableFormatError(
            f"{path} is damaged or no safetensors file: its header is not JSON ({error})."
        ) from None
    if not isinstance(content, dict):
        raise TableFormatError(f"{path} is damaged: its header is not a JSON object.")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TableFormatError(f"{path} is damaged: its metadata is not a map of strings.")
    data_start = 8 + length
    tensors = {name: _entry(name, claim, data_start, path) for name, claim in content.items()}
    end = data_start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            how = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise TableFormatError(f"{path} is damaged: {name!r} {how}; it begins at {entry.start} instead of {end}.")
        end = entry.end
    if end != size:
        how = "truncated" if size < end else "longer than its tensors"
        raise TableSizeError(f"{path} is {how}: {end} bytes were expected, the file has {size}.")
    return SafetensorsHeader(metadata, tensors, data_start)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name is used twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _entry(name: str, claim: Any, data_start: int, path: str | os.PathLike) -> TensorEntry:
    def check(condition: bool, what: str) -> None:
        if not condition:
            raise TableFormatError(f"{path} is damaged: {name!r} {what}.")

    check(
        isinstance(claim, dict) and claim.keys() == {"dtype", "shape", "data_offsets"}, "is not described as a tensor"
    )
    dtype, shape, offsets = claim["dtype"], claim["shape"], claim["data_offsets"]
    check(isinstance(dtype, str), "has no dtype")
    check(isinstance(shape, list) and all(is_count(n) for n in shape), f"has the shape {shape!r}")
    two = isinstance(offsets, list) and len(offsets) == 2 and all(is_count(n) for n in offsets)
    check(two and offsets[0] <= offsets[1], f"has the offsets {offsets!r}")
    itemsize = _DTYPES[dtype].itemsize if dtype in _DTYPES else _OTHER_SIZES.get(dtype)
    held = offsets[1] - offsets[0]
    if itemsize is not None:  # a dtype that this version does not know belongs to a tensor that is no table
        needed = math.prod(shape) * itemsize
        check(held == needed, f"claims {dtype} {shape}, which takes {needed} bytes, and holds {held}")
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def table_header(header: SafetensorsHeader, path: str | os.PathLike) -> TableHeader:
    """What a header says about the table in the file.

    Raises:
        `TableFormatError`: The file was not written by `export_table`, or the header is damaged.
    """
    meta = header.metadata
    if meta.get("format") != FORMAT:
        raise TableFormatError(
            f"{path} was not written by export_table: its format is {meta.get('format')!r}, {FORMAT!r} was expected. "
            "To read a checkpoint in place, name its tensor: `tensor=...`."
        )
    if meta.get("version") != VERSION:
        raise TableFormatError(
            f"{path} has version {meta.get('version')!r} of the table format, this library reads {VERSION!r}. "
            "Update engram_peft."
        )

    def check(condition: bool, what: str) -> None:
        if not condition:
            raise TableFormatError(f"{path} is damaged: {what}.")

    first = -header.data_start
    shapes = {name: (e.dtype, e.shape, e.start + first, e.end + first) for name, e in header.tensors.items()}
    digest = _header_digest(meta, shapes)
    found = meta.get("header_sha256")
    check(found == digest, f"its header has the digest {digest}, {found} was expected")
    try:
        scale_dtype = _DTYPES[meta["scale_dtype"]] if "scale_dtype" in meta else None
        layout = RowLayout(
            _DTYPES[meta["dtype"]], int(meta["dim"]), scale_dtype, int(meta["scale_block"]) if scale_dtype else 0
        )
        head_sizes, offsets = json.loads(meta["head_sizes"]), json.loads(meta["head_offsets"])
        rows, chunk_bytes = int(meta["rows"]), int(meta["chunk_bytes"])
        hashing = json.loads(meta["hash"]) if "hash" in meta else None
        table, chunks = header.tensors[TABLE], header.tensors[CHUNKS]
        table_sha256, chunks_sha256 = meta["table_sha256"], meta["chunks_sha256"]
        check(isinstance(head_sizes, list) and all(is_count(n) for n in head_sizes), "its heads are not counts")
        check_head_sizes(head_sizes, rows)
        check(offsets == list(head_offsets(head_sizes)), "the offsets of its heads are not the sums of their sizes")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, TableError):
            raise
        raise TableFormatError(f"{path} is damaged: its metadata cannot be read ({error!r}).") from None
    dtype, shape = _stored(layout, rows)
    check((table.dtype, table.shape) == (dtype, shape), f"its table is {table.dtype} {list(table.shape)}")
    check(table.start % PAGE == 0, "its rows do not begin on a page")
    check(chunk_bytes > 0, f"its chunks have {chunk_bytes} bytes")
    n_chunks = -(-(table.end - table.start) // chunk_bytes)
    check((chunks.dtype, chunks.shape) == ("U8", (n_chunks, 32)), "it has not one digest for every chunk")
    return TableHeader(
        layout, tuple(head_sizes), chunk_bytes, table_sha256, chunks_sha256, hashing, table, chunks
    )  # fmt: skip


def head_offsets(head_sizes: Sequence[int]) -> tuple[int, ...]:
    """The first row of every head: the sizes of the heads before it, summed up."""
    return tuple(accumulate(head_sizes, initial=0))[:-1]


# ---------------------------------------------------------------------------------------------------- writing


def header_bytes(
    layout: RowLayout,
    head_sizes: Sequence[int],
    chunk_bytes: int,
    hash: Mapping[str, Any] | None,
    *,
    table_sha256: str = _DIGEST,
    chunks_sha256: str = _DIGEST,
) -> bytes:
    """The beginning of a file, up to its first row. Its length does not depend on the digests, so it can be written twice."""
    rows = sum(head_sizes)
    dtype, shape = _stored(layout, rows)
    table_end = rows * layout.row_bytes
    n_chunks = -(-table_end // chunk_bytes)
    tensors = {
        TABLE: (dtype, shape, 0, table_end),
        CHUNKS: ("U8", (n_chunks, 32), table_end, table_end + 32 * n_chunks),
    }
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": _NAMES[layout.dtype],
        "dim": str(layout.dim),
        "rows": str(rows),
        "head_sizes": json.dumps(list(head_sizes)),
        "head_offsets": json.dumps(list(head_offsets(head_sizes))),
        "chunk_bytes": str(chunk_bytes),
        "table_sha256": table_sha256,
        "chunks_sha256": chunks_sha256,
    }
    if layout.scale_dtype is not None:
        metadata |= {"scale_dtype": _NAMES[layout.scale_dtype], "scale_block": str(layout.scale_block)}
    if hash is not None:
        metadata["hash"] = json.dumps(hash)
    metadata["header_sha256"] = _header_digest(metadata, tensors)
    content: dict[str, Any] = {"__metadata__": metadata}
    for name, (kind, sizes, start, end) in tensors.items():
        content[name] = {"dtype": kind, "shape": list(sizes), "data_offsets": [start, end]}
    text = json.dumps(content).encode()
    padded = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _stored(layout: RowLayout, rows: int) -> tuple[str, tuple[int, int]]:
    """Dtype and shape of the tensor that holds the rows."""
    if layout.scale_dtype is not None:
        return "U8", (rows, layout.row_bytes)
    return _NAMES[layout.dtype], (rows, layout.dim)


def _header_digest(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int], int, int]]) -> str:
    claims = {
        "metadata": {key: value for key, value in metadata.items() if key != "header_sha256"},
        "tensors": {name: [dtype, list(shape), start, end] for name, (dtype, shape, start, end) in tensors.items()},
    }
    return hashlib.sha256(json.dumps(claims, sort_keys=True).encode()).hexdigest()
