"""Pages: which ones rows lie on, asking for them ahead, whether they are in memory, and the numbers about it."""

from __future__ import annotations

import logging
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_peft.memory.tables import TableStats, _system, export_table, open_table
from engram_peft.memory.tables._system import LINUX
from engram_peft.memory.tables.mapping import MappedFile, page_runs
from engram_peft.memory.tables.stats import Counters

from .conftest import HEADS
from .rows import bits, in_child, looked_up, same, wild


PAGE = _system.PAGE
needs_linux = pytest.mark.skipif(not LINUX, reason="only Linux tells")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 50 * PAGE), max_size=40), st.integers(1, 3 * PAGE))
def test_runs_are_the_pages_of_all_pieces(starts, length):
    expected = {page for start in starts for page in range(start // PAGE, (start + length - 1) // PAGE + 1)}
    runs = page_runs(np.array(starts, np.int64), length).tolist()
    covered = [page for first, count in runs for page in range(first, first + count)]
    assert covered == sorted(expected)  # in order, none twice
    assert all(first + count < after for (first, count), (after, _) in zip(runs, runs[1:], strict=False))


@pytest.fixture
def large(path):
    """40 pages and more of rows, none of them in memory."""
    weight = wild(torch.float16, 3000, 128)
    export_table(weight, None, path)
    return path, weight


def forget(path) -> None:
    """Takes the pages of a file out of memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def pages_of(ids: torch.Tensor) -> set[int]:
    return {1 + row * 256 // PAGE for row in ids.tolist()}  # the header takes page 0


@needs_linux
def test_a_gather_reads_its_pages_and_no_others(large):
    path, weight = large
    with open_table(path) as table:
        forget(path)
        assert table.residency() == 0.0
        ids = torch.tensor([2900, 5, 1700, 5, 6])
        assert same(table.gather(ids), bits(weight)[ids].view(torch.float16))
        file = table._host[0]._files[0]
        held = {page for page in range(1, 188) if file.are_resident(np.array([page]))}
        assert held == pages_of(ids)


@needs_linux
def test_prefetch_brings_the_pages(large):
    path, _ = large
    with open_table(path) as table:
        forget(path)
        ids = torch.arange(0, 3000, 100)
        pages = pages_of(ids)
        assert table.prefetch(ids).result() == len(pages) == 30
        deadline = 200_000  # reading goes on in the background: look until it is done, and give up in the end
        file = table._host[0]._files[0]
        while not file.are_resident(np.array(sorted(pages))) and deadline:
            deadline -= 1
        assert deadline
        assert table.residency() == pytest.approx(len(pages) / 188, abs=0.01)
        assert table.stats().prefetched_pages == 30


@needs_linux
def test_many_pages_are_read_as_one_run(large, monkeypatch):
    path, _ = large
    asked = []
    monkeypatch.setattr(MappedFile, "advise", lambda self, runs: asked.append(runs.tolist()))
    with open_table(path) as table:
        table.prefetch(torch.arange(0, 3000, 16 * 5)).result()  # every fifth page
        table.prefetch(torch.arange(0, 3000, 16 * 3)).result()  # every third
    assert len(asked[0]) == 38 and {count for _, count in asked[0]} == {1}
    assert asked[1] == [[1, 188]]


@needs_linux
@pytest.mark.parametrize("refused", ["call", "pidfd"])
def test_where_advice_is_refused_there_is_another_way(large, monkeypatch, refused):
    path, weight = large
    if refused == "call":
        monkeypatch.setattr(_system, "_PROCESS_MADVISE", 100_000)  # no such system call
    else:
        monkeypatch.setattr(_system, "_own_pidfd", lambda: -1)
    asked = []
    fadvise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: (asked.append(given[1:]), fadvise(*given)))
    with open_table(path) as table:
        assert table.prefetch(torch.tensor([0, 2999])).result() == 2
    assert asked == [(PAGE, PAGE, os.POSIX_FADV_WILLNEED), (188 * PAGE, PAGE, os.POSIX_FADV_WILLNEED)]


@needs_linux
def test_a_gather_asks_for_pages_while_some_are_missing(large, monkeypatch):
    path, _ = large
    asked = []
    advise = MappedFile.advise
    monkeypatch.setattr(MappedFile, "advise", lambda self, runs: asked.append(runs.tolist()) or advise(self, runs))
    with open_table(path) as table:
        forget(path)
        for ids, expected in [
            ([1, 2000], [[1, 1], [126, 1]]),
            ([2000, 1], None),
            ([1, 1000], [[1, 1], [63, 1]]),
            ([1000], None),
        ]:
            table.gather(torch.tensor(ids))
            assert asked == ([] if expected is None else [expected])
            asked.clear()


@needs_linux
def test_a_gather_that_was_slow_makes_the_next_one_look(large, monkeypatch):
    path, _ = large
    clock = iter(range(0, 10**12, 1000))
    with open_table(path) as table:
        monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
        for _ in range(40):
            table.gather(torch.tensor([1]))
        assert table._host[0].looks == 0
        clock = iter(range(0, 10**12, 1_000_000))
        table.gather(torch.tensor([1]))
        assert table._host[0].looks == 1


@needs_linux
def test_many_rows_are_tried_before_all_are_taken(large, monkeypatch):
    path, weight = large
    forget(path)
    ids, asked, advise = torch.arange(3000), [], MappedFile.advise
    monkeypatch.setattr(MappedFile, "advise", lambda self, runs: asked.append(runs.tolist()) or advise(self, runs))
    clock = iter(range(0, 10**12, 1000))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    with open_table(path) as table:
        assert table.worth_prefetching(1)  # nobody knows yet
        for _ in range(40):
            table.gather(torch.tensor([1]))
        assert not table.worth_prefetching(1) and table.worth_prefetching(3000)
        asked.clear()
        clock = iter(range(0, 10**12, 1_000_000))
        assert same(table.gather(ids), bits(weight).view(torch.float16))
        assert asked == [[[1, 188]]]  # although gathers were quick so far
        assert table.worth_prefetching(1)
        clock = iter(range(0, 10**12, 1000))
        for _ in range(40):
            table.gather(torch.tensor([1]))
        asked.clear()
        table.gather(ids)
        assert asked == []
        for number in (-1, 3000):
            with pytest.raises(IndexError, match=f"Row {number} at position"):
                table.gather(torch.full((2000,), number))
    assert not open_table(path, placement="ram").worth_prefetching(3000)


def test_who_may_not_ask_gets_no_number_and_the_rows(large, monkeypatch):
    path, weight = large
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with open_table(path) as table:
        assert table.residency() is None and table.stats().residency is None
        assert "unknown resident" in str(table.stats())
        for _ in range(20):
            assert same(table.gather(torch.tensor([7])), bits(weight)[[7]].view(torch.float16))
        assert table._host[0].looks <= 0


def test_a_child_process_serves_and_prefetches_too(exported):
    path, weight = exported()
    table, ids = open_table(path), torch.tensor([[1, 2, 3]])
    table.prefetch(ids).result()

    def child() -> None:
        assert table.prefetch(ids).result() == 1
        assert same(table.gather(ids), looked_up(weight, HEADS, ids))

    assert in_child(child) == 0
    assert table.prefetch(ids).result() == 1


# ---------------------------------------------------------------------------------------------------- numbers


def test_stats_count_what_was_gathered(exported, caplog):
    path, _ = exported()
    with open_table(path) as table:
        for rows in (1, 4, 0):
            table.gather(torch.zeros(rows, 3, dtype=torch.int64))
        with pytest.raises(IndexError):
            table.gather(torch.full((1, 3), 1000))
        stats = table.stats()
        assert (stats.gathers, stats.rows, stats.bytes) == (3, 15, 15 * 16)
        assert 0 < stats.wait_p50 <= stats.wait_p95 <= stats.wait_p99 <= stats.wait_max
        logger = logging.getLogger("engram_peft.memory.tables.table")
        with caplog.at_level(logging.INFO, logger=logger.name):
            logger.propagate = True
            logger.addHandler(caplog.handler)
            table.log_stats()
        assert "(mmap): 3 gathers, 15 rows, 0.0 MB; wait in ms: p50" in caplog.text


def test_waits_are_percentiles():
    counters = Counters(2)
    for wait in range(1, 1001):
        counters.add_gather(1, wait * 1_000_000)
    stats = counters.snapshot(0.5)
    expected = TableStats(1000, 1000, 2000, 0, 0.5, 0.5, 0.95, 0.99, 1.0)
    assert stats == expected
    assert str(stats) == (
        "1000 gathers, 1000 rows, 0.0 MB; wait in ms: p50 500.000, p95 950.000, p99 990.000, max 1000.000; "
        "0 pages prefetched, 50.0% resident"
    )


def test_only_the_latest_waits_are_kept():
    counters = Counters(2)
    counters.add_gather(1, 10**12)
    for _ in range(25_000):
        counters.add_gather(1, 1000)
    stats = counters.snapshot(None)
    assert (stats.gathers, stats.rows, stats.wait_max) == (25_001, 25_001, 1e-6)
