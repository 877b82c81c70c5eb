"""A file in memory, read-only, page by page: which pages rows lie on, asking for them ahead, and noticing when the file changes."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ._system import LINUX, PAGE, advise_needed, guard, resident_pages
from .format import TableChangedError, TableSizeError, open_file


_RESIDENCY_PAGES = 65_536  # asked about in one system call


class MappedFile:
    """A whole file, mapped read-only, with no read-ahead: a row costs the pages that it lies on, not the 128 kB around them.

    What was mapped stays readable when the file is renamed over or deleted, since the mapping holds on to the old file.

    Raises:
        `TableSizeError`: The file is empty, or shrank while it was being opened.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        file = open_file(path)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        found = os.fstat(self._descriptor)
        self.length, self._modified = found.st_size, found.st_mtime_ns
        self.damaged = False
        # Linux tells which pages are in memory only to those who may write the file, and "all of them" to others.
        self.residency_is_known = LINUX and os.access(path, os.W_OK)
        try:
            pages = mmap.mmap(self._descriptor, self.length, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise TableSizeError(f"{path} cannot be mapped: {error}.") from None
        if hasattr(mmap, "MADV_RANDOM"):
            pages.madvise(mmap.MADV_RANDOM)
        self._pages, self.bytes = pages, np.frombuffer(pages, np.uint8)
        self.address: int = self.bytes.ctypes.data
        guard(self)

    def check(self) -> None:
        """Raises a `TableChangedError` if the file is no longer what was opened: call it after every read."""
        damaged = self.damaged  # first: what another thread stumbles over after this is for its own check to tell
        found = os.fstat(self._descriptor)
        if found.st_size == self.length and found.st_mtime_ns == self._modified and not damaged:
            return
        if found.st_size != self.length:
            what = f"it had {self.length} bytes and has {found.st_size} now"
        elif found.st_mtime_ns != self._modified:
            what = "it was written to"
        else:
            what = "a part of it could not be read"
        raise TableChangedError(
            f"{self.path} changed while its table was open: {what}. Put it back and open it again."
        )

    def advise(self, runs: np.ndarray) -> None:
        """Asks for page runs `[n, 2]` (first page, pages) to be read, without waiting for them."""
        if advise_needed(self.address, runs) or not hasattr(os, "posix_fadvise"):
            return
        for first, count in runs.tolist():
            os.posix_fadvise(self._descriptor, first * PAGE, count * PAGE, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def read_through(self) -> Iterator[None]:
        """Read-ahead as long as the block lasts, for who reads all of the file; with none, that crawls from page to page.

        Raises:
            `TableChangedError`: The file changed, before the block or while it ran.
        """
        self.check()
        advice = hasattr(mmap, "MADV_RANDOM")
        if advice:
            self._pages.madvise(mmap.MADV_SEQUENTIAL)
        try:
            yield
        finally:
            if advice:
                self._pages.madvise(mmap.MADV_RANDOM)
        self.check()

    def are_resident(self, pages: np.ndarray) -> bool | None:
        """Whether each of the pages is in memory; None where the system does not tell."""
        if not self.residency_is_known:
            return None
        held = (resident_pages(self.address, page, 1) for page in pages.tolist())
        return all(page is not None and bool(page[0]) for page in held)

    def resident(self, start: int, end: int) -> int | None:
        """How many of the pages of the bytes `start` to `end` are in memory; None where the system does not tell."""
        if not self.residency_is_known:
            return None
        first, stop, total = start // PAGE, -(-end // PAGE), 0
        for page in range(first, stop, _RESIDENCY_PAGES):
            held = resident_pages(self.address, page, min(_RESIDENCY_PAGES, stop - page))
            if held is None:
                return None
            total += int(held.sum())
        return total


def page_runs(starts: np.ndarray, length: int) -> np.ndarray:
    """The runs of pages that pieces of a file lie on: sorted, none twice, neighbours joined.

    Args:
        starts (`np.ndarray`): Where the pieces begin, int64 `[n]`, in bytes.
        length (`int`): Bytes of every piece, at least 1.

    Returns:
        int64 `[runs, 2]`: the first page of every run and its number of pages.
    """
    if not len(starts):
        return np.empty((0, 2), np.int64)
    starts = np.sort(starts)
    first, stop = starts // PAGE, (starts + (length - 1)) // PAGE + 1  # both ascend, as the pieces have one length
    begins = np.empty(len(first), bool)
    begins[0] = True
    np.greater(first[1:], stop[:-1], out=begins[1:])
    begin = np.flatnonzero(begins)
    last = np.append(begin[1:], len(first)) - 1
    return np.stack([first[begin], stop[last] - first[begin]], axis=1)
