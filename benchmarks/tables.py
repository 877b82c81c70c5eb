"""Gathering rows of a table: ours beside `F.embedding`, a plain memory map and engramdb, warm and cold, in one run, one thread.

    python benchmarks/tables.py                          # 256 MB and 4 GB, about five minutes; needs 8 GB of disk, 9 GB of memory
    python benchmarks/tables.py --megabytes 64           # a quick look

Rows are 64 float16 numbers, 128 bytes. *Warm*: the table is in memory, methods take turns; CPU time. *Cold*: the file's pages are
dropped, then one gather in a process of its own that has just opened the table; and what the process read from disk, as a multiple
of the pages that its rows lie on. Times are the least of all runs, as whatever else a machine does can only add to them. The table
that is printed is also written to `benchmarks/results/tables.md`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engramdb
import numpy as np
import torch
import torch.nn.functional as F
from transformers.utils import logging

from engram_peft.memory.tables import Table, export_table, open_table


DIM, ROW_BYTES, HEADS = 64, 128, 16
BATCHES = (48, 16_384)
FEW_ROWS = 4096
LARGE = 4096  # MB: of a smaller table, 16,384 rows lie on so many pages that reading all of it is nearly as quick
COLD_RUNS = 8
Gather = Callable[[torch.Tensor], Any]


def draw_ids(kind: str, rows: int, count: int, seed: int) -> torch.Tensor:
    """Uniform, or by Zipf's law with exponent 1 with the frequent rows strewn over the table."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "uniform":
        return torch.randint(0, rows, (count,), generator=generator)
    rank = (rows ** torch.rand(count, generator=generator, dtype=torch.float64)).long() - 1
    return rank * 2_654_435_761 % rows


# ---------------------------------------------------------------------------------------------------- files


def make_files(folder: Path, rows: int) -> dict[str, float]:
    """One table in our format and the same rows as engramdb keeps them. Returns what exporting cost."""
    weight = torch.empty(rows, DIM, dtype=torch.float16)
    numbers = weight.view(torch.int16)
    for part in numbers.split(1_000_000):
        part.random_(-(2**15), 2**15)
    (folder / "engramdb").mkdir()
    weight.view(torch.uint8).numpy().tofile(folder / "engramdb" / "shard_000.bin")
    before = peak_megabytes(reset=True)
    started = time.perf_counter()
    export_table(weight, None, folder / "table.safetensors")
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_megabytes": peak_megabytes() - before}


def peak_megabytes(reset: bool = False) -> float:
    """The high-water mark of resident memory, which starts anew with `reset`."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def drop_pages(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------- methods


def ours(folder: Path, rows: int) -> Gather:
    return open_table(folder / "table.safetensors").gather


def plain_mmap(folder: Path, rows: int) -> Gather:
    """What a memory map does that nobody has advised."""
    table: Table = open_table(folder / "table.safetensors")
    start = table._columns[0].regions[0].start
    with open(folder / "table.safetensors", "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    weight = torch.from_numpy(np.frombuffer(pages, np.int16, rows * DIM, start)).view(rows, DIM)
    return lambda ids: torch.index_select(weight, 0, ids)


def peer(folder: Path, rows: int) -> Gather:
    store = engramdb.Store(str(folder / "engramdb"), 1, rows, ROW_BYTES)
    return lambda ids: torch.frombuffer(store.fetch(ids.tolist()), dtype=torch.float16).view(-1, DIM)


METHODS: dict[str, Callable[[Path, int], Gather]] = {"engram_peft": ours, "default mmap": plain_mmap, "engramdb": peer}


# ---------------------------------------------------------------------------------------------------- measuring


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process. The threads that it starts die with it: later forks would wait for their locks."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = json.loads(os.read(reading, 65536))
    os.close(reading)
    os.close(writing)
    return found


def cold(folder: Path, rows: int, method: str, kind: str, count: int, seed: int) -> dict[str, float]:
    """One gather in a process that has just opened the table, from a file whose pages were dropped.

    A gather from a table of few rows comes first: what a new process costs is not the method's.
    """
    METHODS[method](folder / "few", FEW_ROWS)(draw_ids(kind, FEW_ROWS, count, seed))
    gather = METHODS[method](folder, rows)
    ids = draw_ids(kind, rows, count, seed)
    before, started = bytes_read(), time.perf_counter()
    gather(ids)
    seconds = time.perf_counter() - started
    time.sleep(0.2)  # what was asked for ahead and is not there yet counts, too
    pages = len(np.unique(ids.numpy() * ROW_BYTES // 4096))
    return {"milliseconds": 1e3 * seconds, "read": (bytes_read() - before) / (4096 * pages)}


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def warm(folder: Path, rows: int, kind: str, count: int) -> dict[str, float]:
    """Milliseconds of CPU time; the methods take turns, so that what disturbs one disturbs all."""
    weight = open_table(folder / "table.safetensors", placement="ram").gather(torch.arange(rows))
    heads = rows // HEADS
    many = open_table(folder / "table.safetensors", tensor="table", head_sizes=[heads] * HEADS)
    flat = draw_ids(kind, rows, count, 0)
    local = draw_ids(kind, heads, count, 0).view(-1, HEADS)
    offsets = torch.arange(HEADS) * heads
    runs: dict[str, Callable[[], Any]] = {
        "F.embedding": lambda: F.embedding(flat, weight),
        "F.embedding, ids + offsets": lambda: F.embedding(local + offsets, weight),
        "engram_peft, 16 heads": lambda: many.gather(local),
    }
    for name, method in METHODS.items():
        gather = method(folder, rows)
        runs[name] = lambda gather=gather: gather(flat)
    expected = F.embedding(flat, weight).view(torch.int16)
    for name in METHODS:
        assert torch.equal(runs[name]().view(torch.int16), expected), name
    waits = dict.fromkeys(runs, float("inf"))
    calls = max(3, 10_000 // count)
    for _ in range(20):
        for name, run in runs.items():
            repeated = 1 if name == "engramdb" else calls  # it takes as long as the others together
            started = time.process_time()
            for _ in range(repeated):
                run()
            waits[name] = min(waits[name], (time.process_time() - started) / repeated)
    return {name: 1e3 * seconds for name, seconds in waits.items()}


def opening(folder: Path) -> float:
    waits = []
    for _ in range(50):
        started = time.perf_counter()
        open_table(folder / "table.safetensors").close()
        waits.append(time.perf_counter() - started)
    return 1e3 * min(waits)


# ---------------------------------------------------------------------------------------------------- report


def measure(folder: Path, megabytes: int) -> tuple[list[str], list[tuple[str, float, float, bool]]]:
    rows = megabytes * 2**20 // ROW_BYTES // HEADS * HEADS
    (folder / "few").mkdir()
    make_files(folder / "few", FEW_ROWS)
    exported = make_files(folder, rows)
    lines, checks = [], []

    def check(name: str, found: float, limit: float, at_least: bool = False) -> None:
        checks.append((f"{megabytes} MB: {name}", found, limit, found >= limit if at_least else found <= limit))

    check("memory above the source while exporting, in chunks of 256 kB", exported["peak_megabytes"] * 4, 2)
    lines.append(f"| {megabytes} MB | export | | {megabytes / exported['seconds']:.0f} MB/s | | |")
    for kind in ("uniform", "zipf"):
        for count in BATCHES:
            found: dict[str, dict[str, float]] = {}
            for method in METHODS:
                runs = []
                for seed in range(COLD_RUNS):
                    drop_pages(folder)
                    runs.append(in_child(partial(cold, folder, rows, method, kind, count, seed)))
                found[method] = {key: min(run[key] for run in runs) for key in runs[0]}
            lines += [
                f"| {megabytes} MB | cold | {kind}, {count} | {method} | {each['milliseconds']:.2f} ms | {each['read']:.2f} |"
                for method, each in found.items()
            ]
            ratio = found["engramdb"]["milliseconds"] / found["engram_peft"]["milliseconds"]
            if megabytes >= LARGE:
                check(f"cold, {kind}, {count} rows: times faster than engramdb", ratio, 4, at_least=True)
            check(f"cold, {kind}, {count} rows: bytes read, in touched pages", found["engram_peft"]["read"], 1.05)
    check("opening, in milliseconds", in_child(partial(opening, folder)), 1)
    for kind in ("uniform", "zipf"):
        for count in BATCHES:
            waits = in_child(partial(warm, folder, rows, kind, count))
            lines += [
                f"| {megabytes} MB | warm | {kind}, {count} | {method} | {each:.4f} ms | |"
                for method, each in waits.items()
            ]
            limit = 2.0 if count == BATCHES[0] else 1.1
            one = waits["engram_peft"] / waits["F.embedding"]
            many = waits["engram_peft, 16 heads"] / waits["F.embedding, ids + offsets"]
            check(f"warm, {kind}, {count} rows, one head: as a multiple of F.embedding", one, limit)
            check(f"warm, {kind}, {count} rows, 16 heads: as a multiple of F.embedding", many, limit)
    return lines, checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[256, 4096], help="sizes of the table")
    parser.add_argument("--folder", type=Path, help="where files are made, on the disk that is measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="The given .* is not writable")
    lines, checks = [], []
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            measured, checked = measure(Path(folder), megabytes)
        lines, checks = lines + measured, checks + checked
    report = [
        f"torch {torch.__version__}, one thread, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.platform()}",
        "",
        "| table | state | ids | method | time | bytes read / touched pages |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        "| check | found | limit | |",
        "|---|---|---|---|",
        *(
            f"| {name} | {found:.2f} | {limit} | {'yes' if fine else '**no**'} |"
            for name, found, limit, fine in checks
        ),
    ]
    text = "\n".join(report) + "\n"
    print(text)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "tables.md").write_text(text)


if __name__ == "__main__":
    main()
