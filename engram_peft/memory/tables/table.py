"""A table of rows, wherever it lives: opening, gathering, moving."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils import logging

from .checkpoint import Paths, checkpoint_columns
from .digests import ChunkDigests
from .format import (
    TABLE,
    RowLayout,
    TableChangedError,
    TableHeader,
    TableSizeError,
    check_head_sizes,
    head_offsets,
    open_file,
    read_header,
    table_header,
)
from .placement import (
    QUICK_GATHER,
    Column,
    CudaRows,
    HostRows,
    MappedRows,
    PinnedRows,
    Region,
    check_placement,
    choose_placement,
    cuda_device,
    read_pieces,
    read_rows,
    typed,
)
from .prefetch import in_background
from .stats import Counters, TableStats


_QUICK_ROW = 100  # nanoseconds that one row more takes at most, from memory
_MANY_ROWS = 1024  # cost more if they are missing, one after the other, than finding out
VERIFY = ("size", "lazy", "full")
logger = logging.get_logger(__name__)


class ScaledRows(NamedTuple):
    """Rows that are stored as small numbers and a scale for every block of them.

    Args:
        values (`torch.Tensor`): `[..., dim]`, float8_e4m3fn or int8.
        scales (`torch.Tensor`): `[..., dim / block]`.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers that are meant, `[..., dim]`: values times scales, computed in float32."""
        blocks = self.values.float().unflatten(-1, (self.scales.shape[-1], -1))
        return (blocks * self.scales.float().unsqueeze(-1)).flatten(-2).to(dtype)


class Table:
    """Rows in one or several heads, read-only. `open_table` makes one; any number of threads may gather from it at once.

    Attributes:
        head_sizes (`tuple[int, ...]`): Rows of every head.
        layout (`RowLayout`): dtype and width of a row, and its scales.
        placement (`str`): `"ram"`, `"mmap"`, `"pinned"` or `"cuda"`.
        device (`torch.device`): Where gathered rows are.
        hash (`Mapping`, *optional*): What the exporter wrote about how ids are made.
    """

    def __init__(
        self,
        paths: Paths,
        layout: RowLayout,
        head_sizes: tuple[int, ...],
        columns: tuple[Column, ...],
        *,
        header: TableHeader | None,
        verify: str,
        placement: str,
        device: str | torch.device | None,
        reopen: partial[Table],
    ) -> None:
        self.paths, self.layout, self.head_sizes = paths, layout, head_sizes
        self.hash: Mapping[str, Any] | None = None if header is None else header.hash
        self._columns, self._header, self._reopen = columns, header, reopen
        self._files = {region.path: _identity(region.path) for column in columns for region in column.regions}
        nbytes = sum(column.nbytes for column in columns)
        self.placement = choose_placement(nbytes, device) if placement == "auto" else placement
        self._on_gpu = self.placement in ("pinned", "cuda")
        self.device = cuda_device(self.placement, device) if self._on_gpu else torch.device("cpu")
        self._scaled = layout.scale_dtype is not None
        self._heads = len(head_sizes)
        self._offsets = self._zeros = self._last = None
        if self._heads > 1:
            self._offsets = torch.tensor(head_offsets(head_sizes), device="cpu")
            self._last = torch.tensor(head_sizes, device="cpu") - 1
            self._zeros = torch.zeros_like(self._last)
        self._counters = Counters(layout.row_bytes)
        self._digests = None if header is None or verify == "size" else _digests_of(header, columns[0].regions[0].path)
        self._host: list[HostRows] = []
        self._gpu: list[PinnedRows | CudaRows] = []
        if self.placement == "cuda":
            self._gpu = [CudaRows(column, self.device, self._digests) for column in columns]
        else:
            held = MappedRows if self.placement == "mmap" else read_rows
            self._host = [held(column, self._digests) for column in columns]
        if self.placement == "pinned":
            self._gpu = [PinnedRows(*each, self.device) for each in zip(self._host, columns, strict=True)]
            self._host = []
        if verify == "full" and self.placement == "mmap":
            self.verify()

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def dim(self) -> int:
        return self.layout.dim

    @property
    def rows(self) -> int:
        """Rows of all heads together."""
        return sum(self.head_sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows on disk."""
        return sum(column.nbytes for column in self._columns)

    @property
    def has_digests(self) -> bool:
        """Whether `verify` can check it: a file of `export_table` can be, a checkpoint cannot."""
        return self._header is not None

    # ------------------------------------------------------------------------------------------------ reading

    def gather(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | ScaledRows:
        """The rows of ids, with the bytes that are stored.

        Args:
            ids (`torch.Tensor`):
                Row numbers within each head, int32 or int64, `[..., heads]`; with one head any shape. In any order, as often as
                wanted, on any device.
            out (`torch.Tensor`, *optional*): Where to put the rows, `[*ids.shape, dim]` of the table's dtype. Not with scales.

        Returns:
            `[*ids.shape, dim]` of the table's dtype on the table's `device`, owning its data; `ScaledRows` where rows have scales.

        Raises:
            `IndexError`: An id is not a row of its own head.
            `TypeError`, `ValueError`: `ids` or `out` has a wrong dtype or shape; the table was closed.
            `TableDigestError`: With `verify="lazy"`, a chunk that holds a row is not what was written.
            `TableChangedError`: A mapped file changed since it was opened.
        """
        started = time.perf_counter_ns()
        columns, looked, count = self._host, 0, ids.numel()
        if self._on_gpu:
            rows = self._decoded(self._taken_on_gpu(ids))
        elif not columns:
            raise ValueError("This table was closed.")
        else:
            where, looked = self._flat(ids), columns[0].looks
            target = None  # where rows can be put at once
            if out is not None and out.is_cpu and out.is_contiguous() and not self._scaled:
                self._check_out(target := out, ids.shape)
                self._check_rows(where, ids)
            try:
                if count >= _MANY_ROWS and looked <= 0:
                    for column in columns:
                        column.probe(where)
                if self._scaled:
                    rows = self._decoded([column.take(where) for column in columns])
                else:
                    rows = columns[0].take(where, target)
            except IndexError:
                raise self._outside(ids) from None
        waited = time.perf_counter_ns() - started
        self._counters.add_gather(count, waited)
        if not looked and waited > QUICK_GATHER + _QUICK_ROW * count:
            for column in columns:
                column.looks = max(
                    column.looks, 1
                )  # pages may have been read, so the next gather looks for missing ones first
        if out is None or rows is out:
            return rows
        if isinstance(rows, ScaledRows):
            raise ValueError("`out` cannot take rows with scales.")
        self._check_out(out, ids.shape)
        return out.copy_(rows)

    def _taken_on_gpu(self, ids: torch.Tensor) -> list[torch.Tensor]:
        columns = self._gpu
        if not columns:
            raise ValueError("This table was closed.")
        if self.placement == "cuda" and ids.is_cuda:
            where = self._checked_on_gpu(ids)
        else:
            where = self._flat(ids)
            self._check_rows(where, ids)
        return [column.take(where) for column in columns]

    def prefetch(self, ids: torch.Tensor) -> Future[int]:
        """Has the pages of rows read from disk, on a thread of its own, for a `gather` that will follow.

        Args:
            ids (`torch.Tensor`): As for `gather`.

        Returns:
            What says when it was asked for, and for how many pages; 0 where nothing is on disk. Nobody needs to wait for it.
        """
        where = self._flat(ids)
        if (
            self._heads == 1
        ):  # nobody has looked yet; and the caller may change its ids before the thread comes to them
            self._check_rows(where, ids)
            where = where.clone()
        rows = where.numpy()
        mapped = [column for column in self._host if isinstance(column, MappedRows)]
        if not mapped:
            done: Future[int] = Future()
            done.set_result(0)
            return done

        def ask() -> int:
            pages = sum(column.prefetch(rows) for column in mapped)
            self._counters.add_pages(pages)
            return pages

        return in_background(ask)

    def worth_prefetching(self, count: int) -> bool:
        """Whether to `prefetch` so many rows: not those that are in memory, as few are when gathers were quick lately.

        To ask for few rows takes longer than to gather them when they are there.
        """
        return self.placement == "mmap" and (count >= _MANY_ROWS or any(column.looks > 0 for column in self._host))

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        """The bytes of rows `start` to `stop`, counted over all heads, as a file of one table holds them: uint8 `[n, row_bytes]`."""
        if not self._host:
            raise ValueError("This table was closed, or is on a GPU. Open it with `placement='mmap'`.")
        parts = [
            column.take(torch.arange(start, stop, device="cpu")).view(torch.uint8).numpy() for column in self._host
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _flat(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids as row numbers of the whole table, int64 on the CPU. With one head nobody has looked yet whether they are rows."""
        if ids.dtype is not torch.int64:
            ids = self._as_int64(ids)
        if not ids.is_cpu:
            ids = ids.cpu()
        if self._offsets is None:
            return ids
        try:
            inside = torch.clamp(ids, self._zeros, self._last)
        except RuntimeError:
            raise self._wrong_heads(ids) from None
        if not inside.equal(ids):  # also where ids were broadcast to the heads
            raise self._outside(ids) if ids.shape[-1:] == inside.shape[-1:] else self._wrong_heads(ids)
        return inside.add_(self._offsets)

    def _check_rows(self, where: torch.Tensor, ids: torch.Tensor) -> None:
        """Raises an `IndexError` if row numbers of the whole table are none."""
        if not torch.equal(where.clamp(0, self.rows - 1), where):
            raise self._outside(ids)

    def _checked_on_gpu(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self._as_int64(ids)
        if self._heads > 1 and ids.shape[-1:] != (self._heads,):
            raise self._wrong_heads(ids)
        inside = (ids >= 0) & (ids < torch.tensor(self.head_sizes, device=ids.device))
        if not bool(inside.all()):
            raise self._outside(ids)
        return ids.to(self.device) + torch.tensor(head_offsets(self.head_sizes), device=self.device)

    def _as_int64(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype is torch.int64:
            return ids
        if ids.dtype is torch.int32:
            return ids.long()
        raise TypeError(f"`ids` has to be int32 or int64, it is {ids.dtype}.")

    def _wrong_heads(self, ids: torch.Tensor) -> ValueError:
        return ValueError(
            f"`ids` has the shape {list(ids.shape)}, its last dimension has to be the table's {len(self.head_sizes)} heads."
        )

    def _outside(self, ids: torch.Tensor) -> IndexError:
        sizes = torch.tensor(self.head_sizes, device="cpu")
        where = tuple(((ids.cpu() < 0) | (ids.cpu() >= sizes)).view(ids.shape).nonzero()[0].tolist())
        head = where[-1] if len(self.head_sizes) > 1 else 0
        return IndexError(
            f"Row {int(ids[where])} at position {list(where)} of `ids` is not in head {head}, which has rows 0 to "
            f"{self.head_sizes[head] - 1}."
        )

    def _check_out(self, out: torch.Tensor, shape: Sequence[int]) -> None:
        expected = (*shape, self.dim)
        if out.shape != expected or out.dtype is not self.dtype:
            raise ValueError(f"`out` has to be {self.dtype} {list(expected)}, it is {out.dtype} {list(out.shape)}.")

    def _decoded(self, parts: list[torch.Tensor]) -> torch.Tensor | ScaledRows:
        """Rows of the columns as what they mean: a record's values and scales apart."""
        layout = self.layout
        if layout.scale_dtype is None:
            return parts[0]
        if len(parts) == 2:
            return ScaledRows(*parts)
        values, scales = parts[0][..., : layout.value_bytes], parts[0][..., layout.value_bytes :]
        return ScaledRows(typed(values, layout.dtype), typed(scales, layout.scale_dtype))

    # ------------------------------------------------------------------------------------------------ the whole

    def verify(self) -> None:
        """Checks every byte of the file against its digests.

        Raises:
            `ValueError`: There are none, since this is a checkpoint opened in place.
            `TableDigestError`: A byte is not what was written.
        """
        if self._header is None:
            raise ValueError("A checkpoint holds no digests. `export_table` writes a file that does.")
        column = self._columns[0]
        digests = _digests_of(self._header, column.regions[0].path)
        if self._host and isinstance(mapped := self._host[0], MappedRows):
            mapped.verify(digests)
            return
        whole = hashlib.sha256()
        for piece in read_pieces(column, digests):
            whole.update(piece.data)
        digests.check_whole(whole.hexdigest())

    def to(self, placement: str, device: str | torch.device | None = None) -> Table:
        """The same table in another place, opened from the same files. This one stays open.

        Raises:
            `FileNotFoundError`: A file was renamed or deleted since this table was opened.
            `TableChangedError`: A file is another one by now.
        """
        moved = self._reopen(placement=placement, device=device)
        for path, identity in self._files.items():
            if moved._files[path] != identity:
                raise TableChangedError(
                    f"{path} is another file than when this table was opened. Put it back, or open the table that it holds."
                )
        return moved

    @contextmanager
    def tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of the file or the checkpoint that hold the rows, by their names there. Views: do not write to them.

        Raises:
            `ValueError`: Rows have scales, or the table was closed.
            `TableChangedError`: A mapped file changed, before the block or while it ran.
        """
        if self._scaled:
            raise ValueError("Rows with scales are no single tensor.")
        if not (held := self._host or self._gpu):
            raise ValueError("This table was closed.")
        regions = self._columns[0].regions
        with held[0].parts([region.rows for region in regions]) as parts:
            yield {region.name: part.view(region.shape) for region, part in zip(regions, parts, strict=True)}

    def save(self, path: str | os.PathLike) -> None:
        """Puts the table's file at `path` too, without reading it where the file system can link; never over another file.

        Raises:
            `FileExistsError`: There is something at `path`.
            `TableChangedError`: The file is another one by now.
        """
        from .export import copy_table_file, export_table

        if self._header is None:
            export_table(self, self.head_sizes, path)
            return
        source = self._columns[0].regions[0].path
        if _own_header(source) != self._header:
            raise TableChangedError(f"{source} holds another table than when it was opened.")
        copy_table_file(source, path)

    def residency(self) -> float | None:
        """The share of the pages on disk that are in memory; 1 for other placements, None where the system does not tell."""
        shares = [column.residency() if isinstance(column, MappedRows) else 1.0 for column in self._host or self._gpu]
        known = [share for share in shares if share is not None]
        if len(known) < len(shares):
            return None
        return sum(share * c.nbytes for share, c in zip(known, self._columns, strict=True)) / max(self.nbytes, 1)

    def stats(self) -> TableStats:
        """What was gathered so far, how long it took, and how much of the table is in memory."""
        return self._counters.snapshot(self.residency())

    def log_stats(self) -> None:
        """Logs `stats()` as one line, at the level of information."""
        logger.info(f"table {self.paths} ({self.placement}): {self.stats()}")

    def close(self) -> None:
        """Lets go of the rows. Gathers that are running end well, later ones raise a `ValueError`."""
        self._host, self._gpu = [], []

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        return self  # read-only, and serves any number of models

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    def __repr__(self) -> str:
        scales = f", {self.layout.scale_dtype} scales a {self.layout.scale_block}" if self.layout.scale_dtype else ""
        return f"Table({self.rows} x {self.dim} {self.dtype}{scales}, {len(self.head_sizes)} heads, {self.placement})"


def open_table(
    path: Paths,
    *,
    tensor: str | Sequence[str] | None = None,
    scales: str | Sequence[str] | None = None,
    head_sizes: Sequence[int] | None = None,
    verify: str = "size",
    placement: str = "mmap",
    device: str | torch.device | None = None,
) -> Table:
    """Opens a table: a file of `export_table`, or a tensor of a checkpoint where it lies.

    Args:
        path (`str`, `os.PathLike` or a sequence of them):
            The file; or a checkpoint's file, files or folder, with `tensor`.
        tensor (`str` or `Sequence[str]`, *optional*):
            Name of a checkpoint's tensor `[rows, dim]` or `[heads, rows, dim]`; several are one table, one below the other.
        scales (`str` or `Sequence[str]`, *optional*): The tensor `[rows, blocks]` of a checkpoint that holds the scales of its rows.
        head_sizes (`Sequence[int]`, *optional*):
            Rows of every head of a checkpoint's tensor; by default it is one head. Rows after the last head are padding.
        verify (`str`):
            `"size"`: header, shapes and the size of the file are right. `"lazy"`: so is every chunk, before a row of it is
            served for the first time. `"full"`: so is every byte, now. A checkpoint has no digests, so there it is `"size"`.
        placement (`str`):
            `"mmap"`: on disk, through the page cache. `"ram"`: in memory. `"cuda"`: on the GPU. `"pinned"`: in memory, and
            gathered rows go to the GPU through pinned buffers. `"auto"`: the quickest of them for which half of what is free suffices.
        device (`str` or `torch.device`, *optional*): The GPU of `"cuda"` and `"pinned"`.

    Raises:
        `FileNotFoundError`, `OSError`: A file cannot be read.
        `TableFormatError`, `TableSizeError`, `TableDigestError`: A file is not what it says.
        `ValueError`: An argument does not fit the others or the file.

    Example:

        ```py
        >>> with open_table("table.safetensors", verify="lazy") as table:
        ...     rows = table.gather(ids)  # [..., heads] -> [..., heads, dim]
        >>> table = open_table("DeepSeek-V4.1-Flash", tensor="layers.1.engram.weight", scales="layers.1.engram.scale")
        ```
    """
    if verify not in VERIFY:
        raise ValueError(f"`verify` is one of {', '.join(VERIFY)}, not {verify!r}.")
    check_placement(placement)
    arguments: dict[str, Any] = {"tensor": tensor, "scales": scales, "head_sizes": head_sizes, "verify": verify}
    reopen = partial(open_table, path, **arguments, placement=placement, device=device)
    header = None
    if tensor is None:
        if not isinstance(path, str | os.PathLike):
            raise ValueError("Several files are a checkpoint: name its `tensor`.")
        if scales is not None:
            raise ValueError("`scales` goes with `tensor`; a file of export_table holds the scales in its rows.")
        header = _own_header(path)
        if head_sizes is not None and tuple(head_sizes) != header.head_sizes:
            raise ValueError(f"`head_sizes` is {list(head_sizes)}, {path} was written with {list(header.head_sizes)}.")
        layout, sizes = header.layout, header.head_sizes
        columns: tuple[Column, ...] = (
            Column(
                (Region(os.fspath(path), header.table.start, header.rows, TABLE, header.table.shape),),
                layout.row_bytes,
                torch.uint8 if layout.scale_dtype else layout.dtype,
            ),
        )
    else:
        if verify != "size":
            raise ValueError(
                f"`verify={verify}` needs digests, which a checkpoint has not. `export_table` writes them."
            )
        layout, columns, heads = checkpoint_columns(path, tensor, scales)
        sizes = check_head_sizes(heads if head_sizes is None else head_sizes, columns[0].rows, padded=True)
    return Table(
        path, layout, sizes, columns, header=header, verify=verify, placement=placement, device=device, reopen=reopen
    )  # fmt: skip


def _identity(path: str) -> tuple[int, ...]:
    """What tells a file from another one, and from what it was before somebody wrote to it."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _own_header(path: str | os.PathLike) -> TableHeader:
    with open_file(path) as file:
        return table_header(read_header(file, path), path)


def _digests_of(header: TableHeader, path: str) -> ChunkDigests:
    with open_file(path) as file:
        file.seek(header.chunks.start)
        digests = file.read(header.chunks.end - header.chunks.start)
    if len(digests) != header.chunks.end - header.chunks.start:
        raise TableSizeError(f"{path} is truncated: {header.chunks.end} bytes were expected.")
    return ChunkDigests(header, digests, path)
