"""Where rows live: in memory, in a mapped file, on a GPU, or in memory with a pinned way to a GPU.

Each class serves rows as bytes by their number in the table. Which ids are allowed and what the bytes mean is `Table`'s to know.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from ._system import PAGE, bytes_at
from .digests import ChunkDigests
from .format import TableChangedError, TableSizeError, open_file
from .mapping import MappedFile, page_runs


PLACEMENTS = ("ram", "mmap", "pinned", "cuda", "auto")
_READ_BYTES = 16 * 2**20
_SHOW_PROGRESS_BYTES = 2**30
_RING = 4  # copies to the GPU that may be under way at once
_SAMPLED_PAGES = 16
_PROBED_ROWS = 8
QUICK_GATHER = (
    200_000  # nanoseconds that a gather of few rows from memory stays below, in a process that does other things
)
_COLD_GATHERS = 16  # where pages had to be read, so many gathers more look for missing ones first


@dataclass(frozen=True)
class Region:
    """Rows that follow one another in a file, from the byte `start` on: the tensor `name` of `shape`."""

    path: str
    start: int
    rows: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Column:
    """Rows of `row_bytes` bytes, numbers of `dtype`, in one or several regions, whose rows are counted on from one to the next."""

    regions: tuple[Region, ...]
    row_bytes: int
    dtype: torch.dtype = torch.uint8

    @property
    def rows(self) -> int:
        return sum(region.rows for region in self.regions)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class HostRows:
    """Rows that the CPU can read.

    Args:
        rows (`torch.Tensor`): `[rows, width]`, all of a column.
    """

    looks = 0  # how many of the next gathers look for missing pages first

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def take(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows `ids`, int64 of any shape -> `[*ids.shape, width]`; `out` is contiguous.

        Raises:
            `IndexError`: An id is not a row of the table.
        """
        if out is None:
            return torch.embedding(self._rows, ids)
        torch.index_select(self._rows, 0, ids.reshape(-1), out=out.view(-1, out.shape[-1]))
        return out

    def probe(self, ids: torch.Tensor) -> None:
        """Finds out whether rows `ids`, which are many, are in memory. These are."""

    @contextmanager
    def parts(self, counts: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """All rows as `[count, width]` tensors, one for each of the column's regions. Nothing is copied, so do not write to them.

        Raises:
            `TableChangedError`: A mapped file changed, before the block or while it ran.
        """
        yield list(self._rows.split(counts))


class MappedRows(HostRows):
    """Rows in files that are mapped into memory. What a gather needs and memory does not hold is read in one go.

    Args:
        column (`Column`): Where the rows are.
        digests (`ChunkDigests`, *optional*): Every chunk is checked against them before its first row is served.
    """

    def __init__(self, column: Column, digests: ChunkDigests | None = None) -> None:
        files: dict[str, MappedFile] = {}
        self._column, self._regions = column, column.regions
        for region in column.regions:
            if region.path not in files:
                files[region.path] = MappedFile(region.path)
            if (end := region.start + region.rows * column.row_bytes) > files[region.path].length:
                raise TableSizeError(
                    f"{region.path} is truncated: {end} bytes were expected, it has {files[region.path].length}."
                )
        self._files = [files[region.path] for region in column.regions]
        # all constants say where they are: a table may be opened while a model is being made on the meta device
        counts = torch.tensor([region.rows for region in column.regions], device="cpu")
        self._ends = counts.cumsum(0)
        addresses = [file.address + region.start for file, region in zip(self._files, self._regions, strict=True)]
        if len(addresses) == 1:
            super().__init__(bytes_at(addresses[0], column.nbytes).view(column.dtype).view(column.rows, -1))
        else:
            # Rows at every byte from the first file to the last, one byte apart: whatever lies between the regions is never
            # addressed, and rows of all regions are found in one operation, by where they begin.
            first, last = min(file.address for file in self._files), max(f.address + f.length for f in self._files)
            every = bytes_at(first, last - first)
            super().__init__(every.as_strided((last - first - column.row_bytes + 1, column.row_bytes), (1, 1)))
            # what to add to the number of a row times its size, for each region
            self._shifts = torch.tensor(addresses, device="cpu") - first - (self._ends - counts) * column.row_bytes
        self._digests = digests
        self._is_plain = digests is None and len(column.regions) == 1
        self._check = self._files[0].check
        self.looks = 1

    def take(self, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `HostRows.take`.

        Raises:
            `IndexError`: An id is not a row of the table.
            `TableDigestError`: A chunk is not what was written.
            `TableChangedError`: A file changed since it was opened, so what was read from it may be anything.
        """
        if self.looks > 0 or not self._is_plain:
            ids = self._in_range(ids)
            if self.looks > 0:
                self._read_ahead(ids.numpy())
            if self._digests is not None:
                self._check_chunks(self._digests, self._digests.unchecked(ids.numpy()))
            if len(self._regions) > 1:
                return self._take_from_regions(ids, out)
        # A few rows take two microseconds, of which a call more is a tenth: so what `HostRows.take` does is written again.
        rows = torch.embedding(self._rows, ids) if out is None else super().take(ids, out)
        self._check()
        return rows

    def probe(self, ids: torch.Tensor) -> None:
        """Takes a few of the rows `ids`; if that is slow, pages are missing, and the next `take` looks for them first.

        Raises:
            `IndexError`: An id is not a row of the table.
        """
        started = time.perf_counter_ns()
        sample = ids.reshape(-1)[:: -(-ids.numel() // _PROBED_ROWS)]
        if len(self._regions) == 1:
            torch.embedding(self._rows, sample)
        else:
            self._take_from_regions(self._in_range(sample), None)
        if time.perf_counter_ns() - started > QUICK_GATHER:
            self.looks = max(self.looks, 1)

    def _take_from_regions(self, ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        owners = torch.searchsorted(self._ends, ids, right=True)
        found = torch.embedding(self._rows, ids * self._column.row_bytes + self._shifts[owners])
        for file in {self._files[region] for region in set(owners.reshape(-1).tolist())}:
            file.check()
        found = typed(found, self._column.dtype)
        return found if out is None else out.copy_(found)

    def _in_range(self, ids: torch.Tensor) -> torch.Tensor:
        """A copy of ids that all are rows, which nobody else can change afterwards."""
        rows = ids.clamp(0, self._column.rows - 1)
        if not torch.equal(rows, ids):
            raise IndexError("A row is not in the table.")
        return rows

    def prefetch(self, ids: np.ndarray) -> int:
        """Asks for the pages of rows to be read, without waiting. Returns how many pages these are."""
        return self._ask(self._runs(ids))

    def _ask(self, wanted: Iterable[tuple[MappedFile, Region, np.ndarray]]) -> int:
        pages = 0
        for file, region, runs in wanted:
            first, last = region.start // PAGE, (region.start + region.rows * self._column.row_bytes - 1) // PAGE
            pages += (asked := int(runs[:, 1].sum()))
            if 4 * asked > last - first + 1 and len(runs) > 1:  # then one sequential read is quicker than many
                runs = np.array([[first, last - first + 1]])
            file.advise(runs)
        return pages

    @contextmanager
    def parts(self, counts: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """As `HostRows.parts`, with read-ahead as long as the block lasts."""
        with ExitStack() as stack:
            for file in dict.fromkeys(self._files):
                stack.enter_context(file.read_through())
            row_bytes, dtype = self._column.row_bytes, self._column.dtype
            yield [
                bytes_at(file.address + region.start, region.rows * row_bytes).view(dtype).view(region.rows, -1)
                for file, region in zip(self._files, self._regions, strict=True)
            ]

    def verify(self, digests: ChunkDigests) -> None:
        """Checks all rows against the digests of their file."""
        whole, step = hashlib.sha256(), max(1, _READ_BYTES // digests.chunk_bytes)
        for start in range(0, len(digests), step):
            chunks = list(range(start, min(start + step, len(digests))))
            self._check_chunks(digests, chunks)
            whole.update(self._chunk(digests, chunks[0], len(chunks)).data)
        self._files[0].check()
        digests.check_whole(whole.hexdigest())

    def _check_chunks(self, digests: ChunkDigests, chunks: list[int]) -> None:
        if not chunks:
            return
        starts = self._regions[0].start + np.array(chunks) * digests.chunk_bytes
        self._files[0].advise(
            page_runs(starts, digests.chunk_bytes)
        )  # hashing reads every page, so let them come at once
        for chunk in chunks:
            digests.check_chunk(chunk, self._chunk(digests, chunk))

    def _chunk(self, digests: ChunkDigests, first: int, count: int = 1) -> np.ndarray:
        table = self._files[0].bytes[self._regions[0].start :][: self._column.nbytes]
        return table[first * digests.chunk_bytes : (first + count) * digests.chunk_bytes]

    def residency(self) -> float | None:
        """The share of the table's pages that are in memory; None where the system does not tell."""
        held, pages = 0, 0
        for file, region in zip(self._files, self._regions, strict=True):
            end = region.start + region.rows * self._column.row_bytes
            if (found := file.resident(region.start, end)) is None:
                return None
            held, pages = held + found, pages + -(-end // PAGE) - region.start // PAGE
        return held / pages

    def _read_ahead(self, ids: np.ndarray) -> None:
        """Reads ahead if a sample of the pages says that there is something to read, or nobody can say."""
        known, missing, wanted = True, False, list(self._runs(ids))
        for file, _, runs in wanted:
            sample = runs[:: 1 + len(runs) // _SAMPLED_PAGES]
            resident = file.are_resident(sample.sum(axis=1) - 1)
            known, missing = known and resident is not None, missing or not resident
        if missing:
            self._ask(wanted)
        self.looks = _COLD_GATHERS if missing and known else self.looks - 1

    def _runs(self, ids: np.ndarray) -> Iterator[tuple[MappedFile, Region, np.ndarray]]:
        """The page runs of rows in each region that holds some of them."""
        flat, row_bytes = ids.reshape(-1), self._column.row_bytes
        if len(self._regions) == 1:
            yield self._files[0], self._regions[0], page_runs(self._regions[0].start + flat * row_bytes, row_bytes)
            return
        flat, ends = np.sort(flat), self._ends.numpy()
        cuts = np.searchsorted(flat, ends).tolist()
        for number in np.unique(np.searchsorted(ends, flat, side="right")).tolist():
            file, region = self._files[number], self._regions[number]
            rows = flat[cuts[number - 1] if number else 0 : cuts[number]] - (int(ends[number]) - region.rows)
            yield file, region, page_runs(region.start + rows * row_bytes, row_bytes)


class CudaRows:
    """Rows on a GPU, read there.

    Args:
        column (`Column`): Where the rows are.
        device (`torch.device`): The GPU.
        digests (`ChunkDigests`, *optional*): What is read is checked against them.
    """

    def __init__(self, column: Column, device: torch.device, digests: ChunkDigests | None = None) -> None:
        self._column = column
        self.rows = torch.empty(column.nbytes, dtype=torch.uint8, device=device)
        start = 0
        for piece in read_pieces(column, digests):
            self.rows[start : start + len(piece)].copy_(torch.from_numpy(piece))
            start += len(piece)
        self.rows = self.rows.view(column.rows, column.row_bytes).view(_widest(column.row_bytes))

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 on any device -> `[*ids.shape, width]` on the GPU."""
        ids = ids.to(self.rows.device)
        rows = torch.index_select(self.rows, 0, ids.reshape(-1))
        return typed(rows.view(torch.uint8).view(*ids.shape, self._column.row_bytes), self._column.dtype)

    @contextmanager
    def parts(self, counts: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """As `HostRows.parts`, on the GPU."""
        yield list(typed(self.rows.view(torch.uint8), self._column.dtype).split(counts))


class PinnedRows:
    """Rows in memory that are wanted on a GPU: gathered into a ring of pinned buffers, copied on a stream of their own.

    Args:
        rows (`HostRows`): The rows.
        column (`Column`): What they are.
        device (`torch.device`): The GPU.
    """

    def __init__(self, rows: HostRows, column: Column, device: torch.device) -> None:
        self._rows, self._column, self._device = rows, column, device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_RING)]
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._next, self._lock = 0, threading.Lock()

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 on the CPU -> `[*ids.shape, width]` on the GPU; work queued on its stream waits for them."""
        size = ids.numel() * self._column.row_bytes
        with self._lock:
            slot, self._next = self._next, (self._next + 1) % _RING
            self._copied[slot].synchronize()
            if self._buffers[slot].numel() < size:
                self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            buffer = typed(self._buffers[slot][:size].view(*ids.shape, self._column.row_bytes), self._column.dtype)
            self._rows.take(ids, buffer)
            current = torch.cuda.current_stream(self._device)
            rows = torch.empty_like(buffer, device=self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                rows.copy_(buffer, non_blocking=True)
                self._copied[slot].record(self._stream)
            rows.record_stream(self._stream)
            current.wait_event(self._copied[slot])
        return rows

    @contextmanager
    def parts(self, counts: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        """As `HostRows.parts`, on the CPU."""
        with self._rows.parts(counts) as parts:
            yield parts


def read_rows(column: Column, digests: ChunkDigests | None = None) -> HostRows:
    """The rows of a column, read into memory and checked against `digests`."""
    rows, start = torch.empty(column.nbytes, dtype=torch.uint8, device="cpu"), 0
    for piece in read_pieces(column, digests):
        rows[start : start + len(piece)] = torch.from_numpy(piece)
        start += len(piece)
    return HostRows(rows.view(column.dtype).view(column.rows, -1))


def typed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes `[..., n]` as numbers `[..., n / itemsize]`."""
    if not rows.numel():  # whose strides may be anything
        return rows.new_empty((*rows.shape[:-1], rows.shape[-1] // dtype.itemsize), dtype=dtype)
    return rows.contiguous().view(dtype)


def read_pieces(column: Column, digests: ChunkDigests | None) -> Iterator[np.ndarray]:
    """The bytes of a column, uint8 `[n]`, piece by piece; a piece is valid until the next one is asked for.

    Raises:
        `TableSizeError`, `TableChangedError`: A file ended early, or was written to meanwhile.
        `TableDigestError`: Bytes are not those that were written.
    """
    step = _READ_BYTES if digests is None else digests.chunk_bytes
    bar = logging.tqdm(
        total=column.nbytes, unit="B", unit_scale=True, desc="Loading table",
        disable=True if column.nbytes < _SHOW_PROGRESS_BYTES else None,
    )  # fmt: skip
    with bar:
        buffer, chunk = np.empty(min(step, max(column.nbytes, 1)), np.uint8), 0
        for region in column.regions:
            with open_file(region.path) as file:
                before = os.fstat(file.fileno())
                file.seek(region.start)
                left = region.rows * column.row_bytes
                while left:
                    piece = buffer[: min(left, len(buffer))]
                    _read_into(file, piece, region.path)
                    if digests is not None:
                        digests.check_chunk(chunk, piece)
                    chunk, left = chunk + 1, left - len(piece)
                    bar.update(len(piece))
                    yield piece
                after = os.fstat(file.fileno())
                if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                    raise TableChangedError(
                        f"{region.path} was written to while its table was being read. Open it again."
                    )


def _read_into(file: FileIO, piece: np.ndarray, path: str) -> None:
    view = piece.data
    while len(view):
        if not (count := file.readinto(view)):
            raise TableSizeError(f"{path} is truncated: {len(view)} more bytes were expected at {file.tell()}.")
        view = view[count:]


def _widest(row_bytes: int) -> torch.dtype:
    """The widest integers that a row divides into, so that a GPU reads few of them."""
    return next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % dtype.itemsize == 0
    )


def cuda_device(placement: str, device: str | torch.device | None) -> torch.device:
    """The GPU that a placement is about.

    Raises:
        `ValueError`: There is none.
    """
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"`placement={placement}` needs a CUDA device, `device` is {found}.")
    if not torch.cuda.is_available():
        raise ValueError(
            f"`placement={placement}` needs CUDA, which this machine or this build of torch has not. Use mmap or ram."
        )
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def check_placement(placement: str) -> None:
    """Raises a `ValueError` unless there is such a placement."""
    if placement not in PLACEMENTS:
        raise ValueError(f"`placement` is one of {', '.join(PLACEMENTS)}, not {placement!r}.")


def choose_placement(nbytes: int, device: str | torch.device | None = None) -> str:
    """The quickest placement that leaves half of what is free: on the GPU, in memory, or on disk."""
    gpu = torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")
    if gpu and 2 * nbytes <= torch.cuda.mem_get_info(device)[0]:
        return "cuda"
    if 2 * nbytes <= free_memory():
        return "pinned" if gpu else "ram"
    return "mmap"


def free_memory() -> int:
    """Bytes of memory that this process may still take, by the system and by its control group; 0 where nothing is known."""
    free = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            free.append(int(limit) - int(used))
    except (OSError, StopIteration, ValueError):
        pass
    return min(free, default=0)
