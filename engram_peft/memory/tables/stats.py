"""What a table did: rows and bytes gathered, how long gathers took, how much of it is in memory."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass


_KEPT_WAITS = 10_000


@dataclass(frozen=True)
class TableStats:
    """A look at what a table did so far. `str()` makes it one line.

    Args:
        gathers (`int`): Calls of `Table.gather` that succeeded.
        rows (`int`): Rows they returned, each as often as it was asked for.
        bytes (`int`): Bytes of those rows.
        prefetched_pages (`int`): Pages that `Table.prefetch` asked for.
        residency (`float`, *optional*): Share of the table's pages in memory; None where the system does not tell.
        wait_p50, wait_p95, wait_p99, wait_max (`float`): Seconds that the latest 10,000 gathers took.
    """

    gathers: int
    rows: int
    bytes: int
    prefetched_pages: int
    residency: float | None
    wait_p50: float
    wait_p95: float
    wait_p99: float
    wait_max: float

    def __str__(self) -> str:
        held = "unknown" if self.residency is None else f"{self.residency:.1%}"
        waits = ", ".join(
            f"{name} {1e3 * seconds:.3f}"
            for name, seconds in (
                ("p50", self.wait_p50),
                ("p95", self.wait_p95),
                ("p99", self.wait_p99),
                ("max", self.wait_max),
            )
        )
        return (
            f"{self.gathers} gathers, {self.rows} rows, {self.bytes / 1e6:.1f} MB; wait in ms: {waits}; "
            f"{self.prefetched_pages} pages prefetched, {held} resident"
        )


class Counters:
    """The running numbers behind `TableStats`; any thread may add to them.

    Args:
        row_bytes (`int`): Bytes of a row.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes, self._lock = row_bytes, threading.Lock()
        self._gathers = self._rows = self._pages = 0
        # Appending needs no lock, and plain integers are nothing that Python's garbage collector has to look through: a gather
        # of few rows would feel either.
        self._new_rows: deque[int] = deque()
        self._waits: deque[int] = deque(maxlen=_KEPT_WAITS)

    def add_gather(self, rows: int, nanoseconds: int) -> None:
        self._waits.append(nanoseconds)
        self._new_rows.append(rows)
        if len(self._new_rows) > _KEPT_WAITS:
            self._add_up()

    def add_pages(self, pages: int) -> None:
        with self._lock:
            self._pages += pages

    def snapshot(self, residency: float | None) -> TableStats:
        self._add_up()
        waits = sorted(self._waits.copy())
        p50, p95, p99, longest = (_quantile(waits, q) / 1e9 for q in (0.5, 0.95, 0.99, 1.0))
        with self._lock:
            counted = (self._gathers, self._rows, self._rows * self._row_bytes, self._pages)
        return TableStats(*counted, residency, p50, p95, p99, longest)

    def _add_up(self) -> None:
        with self._lock:
            for _ in range(len(self._new_rows)):  # nobody else takes any out
                self._rows += self._new_rows.popleft()
                self._gathers += 1


def _quantile(ascending: list[int], q: float) -> int:
    """The smallest value that a share `q` of the values does not exceed; 0 of none."""
    return ascending[max(0, -(-int(q * 1000) * len(ascending) // 1000) - 1)] if ascending else 0
