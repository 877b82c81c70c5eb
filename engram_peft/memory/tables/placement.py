"""Where rows live: in memory, in a mapped file, on a GPU, or in memory with a pinned way to a GPU.

Each class serves rows as bytes by their number in the table. Which ids are allowed and what the bytes mean is `Table`'s to know.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from ._system import PAGE
from .digests import ChunkDigests
from .format import TableChangedError, TableSizeError, open_file
from .mapping import MappedFile, page_runs


PLACEMENTS = ("ram", "mmap", "pinned", "cuda", "auto")
_READ_BYTES = 16 * 2**20
_SHOW_PROGRESS_BYTES = 2**30
_RING = 4  # copies to the GPU that may be under way at once
_SAMPLED_PAGES = 16
_QUICK_TAKE, _QUICK_ROW = 50_000, 100  # nanoseconds that taking rows from memory stays below, and more for every row
_COLD_GATHERS = 16  # where pages had to be read, so many gathers more look for missing ones first


@dataclass(frozen=True)
class Region:
    """Rows that follow one another in a file, from the byte `start` on."""

    path: str
    start: int
    rows: int


@dataclass(frozen=True)
class Column:
    """Rows of `row_bytes` bytes in one or several regions, whose rows are counted on from one to the next."""

    regions: tuple[Region, ...]
    row_bytes: int

    @property
    def rows(self) -> int:
        return sum(region.rows for region in self.regions)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class HostRows:
    """Rows that the CPU can read.

    Args:
        parts (`Sequence[np.ndarray]`): uint8 `[rows, row_bytes]` each; together they are the table.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self.row_bytes = parts[0].shape[1]

    def take(self, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows `ids`, int64 of any shape -> uint8 `[*ids.shape, row_bytes]`. All ids have to be rows of the table."""
        if len(self._parts) == 1:
            # "clip", since ids were checked and the other modes copy through a buffer; it also keeps reads in range
            return self._parts[0].take(ids, axis=0, out=out, mode="clip")
        if out is None:
            out = np.empty((*ids.shape, self.row_bytes), np.uint8)
        flat = out.reshape(-1, self.row_bytes)  # a view: `out` is contiguous
        for part, where, rows in self._by_part(ids):
            flat[where] = self._parts[part].take(rows, axis=0, mode="clip")
        return out

    def _by_part(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For every part that holds some of the rows: its number, where in the flattened `ids` they are, and their numbers in it."""
        flat = ids.reshape(-1)
        if not flat.size:
            return
        owners = np.searchsorted(self._ends, flat, side="right")
        order = np.argsort(owners, kind="stable")
        owners, begins = np.unique(owners[order], return_index=True)
        for part, where in zip(owners.tolist(), np.split(order, begins[1:]), strict=True):
            yield part, where, flat[where] - (self._ends[part] - len(self._parts[part]))


class MappedRows(HostRows):
    """Rows in files that are mapped into memory. What a gather needs and memory does not hold is read in one go.

    Args:
        column (`Column`): Where the rows are.
        digests (`ChunkDigests`, *optional*): Every chunk is checked against them before its first row is served.
    """

    def __init__(self, column: Column, digests: ChunkDigests | None = None) -> None:
        files: dict[str, MappedFile] = {}
        self._regions = column.regions
        for region in column.regions:
            if region.path not in files:
                files[region.path] = MappedFile(region.path)
        self._files = [files[region.path] for region in column.regions]
        parts = []
        for region, file in zip(column.regions, self._files, strict=True):
            end = region.start + region.rows * column.row_bytes
            if end > file.length:
                raise TableSizeError(f"{region.path} is truncated: {end} bytes were expected, it has {file.length}.")
            parts.append(file.bytes[region.start : end].reshape(region.rows, column.row_bytes))
        super().__init__(parts)
        self._digests = digests
        self._looks = 1  # how many of the next gathers look for missing pages first

    def take(self, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """As `HostRows.take`.

        Raises:
            `TableDigestError`: A chunk is not what was written.
            `TableChangedError`: A file changed since it was opened, so what was read from it may be anything.
        """
        if self._looks > 0:
            self._read_ahead(ids)
        if self._digests is not None:
            self._check_chunks(self._digests, self._digests.unchecked(ids))
        started = time.perf_counter_ns()
        if len(self._parts) == 1:
            rows = self._parts[0].take(ids, axis=0, out=out, mode="clip")
            self._files[0].check()
        else:
            rows = super().take(ids, out)
            for file in {self._files[part] for part in self._touched(ids)}:
                file.check()
        if time.perf_counter_ns() - started > _QUICK_TAKE + _QUICK_ROW * ids.size:
            self._looks = max(self._looks, 1)  # pages may have been read, so the next gather looks first
        return rows

    def prefetch(self, ids: np.ndarray) -> int:
        """Asks for the pages of rows to be read, without waiting. Returns how many pages these are."""
        pages = 0
        for part, runs in self._runs(ids):
            file, region = self._files[part], self._regions[part]
            first, last = region.start // PAGE, (region.start + self._parts[part].size - 1) // PAGE
            pages += (asked := int(runs[:, 1].sum()))
            if 4 * asked > last - first + 1 and len(runs) > 1:  # then one sequential read is quicker than many
                runs = np.array([[first, last - first + 1]])
            file.advise(runs)
        return pages

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
        return self._parts[0].reshape(-1)[first * digests.chunk_bytes : (first + count) * digests.chunk_bytes]

    def residency(self) -> float | None:
        """The share of the table's pages that are in memory; None where the system does not tell."""
        held, pages = 0, 0
        for part, (file, region) in enumerate(zip(self._files, self._regions, strict=True)):
            end = region.start + self._parts[part].size
            if (found := file.resident(region.start, end)) is None:
                return None
            held, pages = held + found, pages + -(-end // PAGE) - region.start // PAGE
        return held / pages

    def _read_ahead(self, ids: np.ndarray) -> None:
        """Reads ahead if a sample of the pages says that there is something to read, or nobody can say."""
        known, missing = True, False
        for part, runs in self._runs(ids):
            sample = runs[:: 1 + len(runs) // _SAMPLED_PAGES]
            resident = self._files[part].are_resident(sample.sum(axis=1) - 1)
            known, missing = known and resident is not None, missing or not resident
        if missing:
            self.prefetch(ids)
        self._looks = _COLD_GATHERS if missing and known else self._looks - 1

    def _runs(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        if len(self._parts) == 1:
            yield 0, page_runs(self._regions[0].start + ids.reshape(-1) * self.row_bytes, self.row_bytes)
            return
        for part, _, rows in self._by_part(ids):
            yield part, page_runs(self._regions[part].start + rows * self.row_bytes, self.row_bytes)

    def _touched(self, ids: np.ndarray) -> list[int]:
        return np.unique(np.searchsorted(self._ends, ids, side="right")).tolist()


class CudaRows:
    """Rows on a GPU, read there.

    Args:
        column (`Column`): Where the rows are.
        device (`torch.device`): The GPU.
        digests (`ChunkDigests`, *optional*): What is read is checked against them.
    """

    def __init__(self, column: Column, device: torch.device, digests: ChunkDigests | None = None) -> None:
        self.row_bytes = column.row_bytes
        self.rows = torch.empty(column.nbytes, dtype=torch.uint8, device=device)
        start = 0
        for piece in read_pieces(column, digests):
            self.rows[start : start + len(piece)].copy_(torch.from_numpy(piece))
            start += len(piece)
        self.rows = self.rows.view(column.rows, column.row_bytes).view(_widest(column.row_bytes))

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 on any device -> uint8 `[*ids.shape, row_bytes]` on the GPU."""
        ids = ids.to(self.rows.device)
        rows = torch.index_select(self.rows, 0, ids.reshape(-1))
        return rows.view(torch.uint8).view(*ids.shape, self.row_bytes)


class PinnedRows:
    """Rows in memory that are wanted on a GPU: gathered into a ring of pinned buffers, copied on a stream of their own.

    Args:
        rows (`HostRows`): The rows.
        device (`torch.device`): The GPU.
    """

    def __init__(self, rows: HostRows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._copied = [torch.cuda.Event() for _ in range(_RING)]
        self._next, self._lock = 0, threading.Lock()

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 on the CPU -> uint8 `[*ids.shape, row_bytes]` on the GPU; work queued on its stream waits for them."""
        size = ids.numel() * self._rows.row_bytes
        with self._lock:
            slot, self._next = self._next, (self._next + 1) % _RING
            self._copied[slot].synchronize()
            if self._buffers[slot].numel() < size:
                self._buffers[slot] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            buffer = self._buffers[slot][:size].view(*ids.shape, self._rows.row_bytes)
            self._rows.take(ids.numpy(), buffer.numpy())
            current = torch.cuda.current_stream(self._device)
            rows = torch.empty(buffer.shape, dtype=torch.uint8, device=self._device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                rows.copy_(buffer, non_blocking=True)
                self._copied[slot].record(self._stream)
            rows.record_stream(self._stream)
            current.wait_event(self._copied[slot])
        return rows


def read_rows(column: Column, digests: ChunkDigests | None = None) -> HostRows:
    """The rows of a column, read into memory and checked against `digests`."""
    rows, start = np.empty(column.nbytes, np.uint8), 0
    for piece in read_pieces(column, digests):
        rows[start : start + len(piece)] = piece
        start += len(piece)
    return HostRows([rows.reshape(column.rows, column.row_bytes)])


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
