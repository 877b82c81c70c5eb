"""A file is complete and new, or it is not there: whatever ends the export, and whoever else writes."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from io import FileIO
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.utils import logging

from engram_peft.memory.tables import TableFormatError, export, export_table, open_table
from engram_peft.memory.tables._system import LINUX

from .conftest import HEADS
from .rows import in_child, same, wild


@pytest.fixture(params=["nameless", "beside"])
def way(request, monkeypatch):
    """Both ways to a new file: without a name until it is complete, and under another name."""
    if request.param == "beside":
        monkeypatch.setattr(export, "_nameless", lambda folder: None)
    return request.param


def held(path: Path, weight: torch.Tensor) -> bool:
    with open_table(path, verify="full") as table:
        return same(torch.from_numpy(table.raw_rows(0, table.rows)).view(weight.dtype), weight)


def test_a_file_is_written_in_either_way(path, way):
    weight = wild(torch.float32, 100, 16)
    export_table(weight, None, path, chunk_bytes=1000)
    assert held(path, weight)
    assert os.listdir(path.parent) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


class Demo(nn.Module):
    """The boundary of the Engram demo."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(weight)


def test_modules_bring_their_table(tmp_path):
    weight = wild(torch.bfloat16, 151, 8)
    for number, source in enumerate([nn.Embedding.from_pretrained(weight), Demo(weight)]):
        path = tmp_path / f"{number}.safetensors"
        export_table(source, HEADS, path)
        assert held(path, weight)
    with pytest.raises(TypeError, match="ReLU has neither a `weight` nor an `embedding`"):
        export_table(nn.ReLU(), None, tmp_path / "no.safetensors")


@pytest.mark.parametrize(
    ("source", "heads", "options", "message"),
    [
        (torch.zeros(4, 4), [2, 3], {}, "`head_sizes` adds up to 5 rows, the table has 4"),
        (torch.zeros(4, 4), [2], {}, "`head_sizes` adds up to 2 rows, the table has 4"),
        (torch.zeros(4, 4), [4, 0], {}, "at least one row for every head"),
        (torch.zeros(4, 4), [-1, 5], {}, "at least one row for every head"),
        (torch.zeros(4, 4), [], {}, "at least one row for every head"),
        (torch.zeros(4), None, {}, r"\[rows, dim\], this has \[4\]"),
        (torch.zeros(0, 4), None, {}, r"\[rows, dim\], this has \[0, 4\]"),
        (torch.zeros(4, 4, dtype=torch.float64), None, {}, "torch.float64 cannot be stored. Use one of float32"),
        (torch.zeros(4, 4, device="meta"), None, {}, "meta device"),
        (torch.zeros(4, 4), None, {"chunk_bytes": 0}, "`chunk_bytes`"),
        (torch.zeros(4, 4), None, {"scales": torch.ones(4, 1)}, "`scales` go with float8_e4m3fn or int8"),
        (wild(torch.int8, 4, 4), None, {"scales": torch.ones(4, 3)}, r"\[4, a divisor of 4\] is needed"),
        (wild(torch.int8, 4, 4), None, {"scales": torch.ones(3, 1)}, r"`scales` has the shape \[3, 1\]"),
        (wild(torch.int8, 4, 4), None, {"scales": torch.ones(4, 1).double()}, "`scales` of torch.float64"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(path, source, heads, options, message):
    with pytest.raises(ValueError, match=message):
        export_table(source, heads, path, **options)
    assert os.listdir(path.parent) == []


def test_what_is_there_stays(path, way):
    for make in (lambda: path.write_text("mine"), lambda: path.symlink_to("nowhere"), path.mkdir):
        make()
        with pytest.raises(FileExistsError):
            export_table(torch.zeros(4, 4), None, path)
        if path.is_dir():
            path.rmdir()
        else:
            assert path.is_symlink() or path.read_text() == "mine"
            path.unlink()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        export_table(torch.zeros(4, 4), None, path / "deeper")


@pytest.mark.skipif(not LINUX, reason="only Linux tells")
@pytest.mark.parametrize(("source", "chunk"), [("tensor", 2**22), ("strided", 2**22), ("table", 2**18)])
def test_memory_is_that_of_two_chunks(tmp_path, source, chunk):
    """The high-water mark of resident memory above what it was with the source; the allocator may keep some to itself."""
    slack = 4 * 2**20

    def export_within() -> None:
        weight = wild(torch.float16, 400_000, 32)  # 26 MB
        if source == "strided":
            weight = torch.cat([weight, weight], dim=1)[:, :32]
        if source == "table":
            export_table(weight, None, tmp_path / "source.safetensors")
            weight = open_table(tmp_path / "source.safetensors", placement="ram")
        export_table(wild(torch.float16, 4, 4), None, tmp_path / "first.safetensors")  # so that everything is imported
        Path("/proc/self/clear_refs").write_text("5")
        before = high_water()
        export_table(weight, None, tmp_path / "target.safetensors", chunk_bytes=chunk)
        assert high_water() - before < 2 * chunk + slack

    assert in_child(export_within) == 0


def high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_export_leaves_all_or_nothing(tmp_path, way, times):
    weight = wild(torch.float16, 40_000, 64)
    started = time.perf_counter()
    export_table(weight, None, tmp_path / "first.safetensors", chunk_bytes=8192)
    whole = time.perf_counter() - started
    chance = random.Random(0)
    finished = 0
    for number in range(times):
        path = tmp_path / f"{number}.safetensors"
        child = os.fork()
        if child == 0:
            try:
                logging.disable_progress_bar()  # killed while it holds tqdm's lock, it would keep it from everybody
                export_table(weight, None, path, chunk_bytes=8192)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, 1.2 * whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if path.exists():
            finished += 1
            assert held(path, weight)
            path.unlink()
    left = [name for name in os.listdir(tmp_path) if name != "first.safetensors"]
    assert all(name.startswith(".") and name.endswith(".tmp") for name in left)
    assert way == "beside" or not left


def test_an_export_that_is_killed_at_any_write_leaves_nothing(tmp_path, way, monkeypatch):
    """At each of its writes in turn, so that no moment is left to chance."""
    weight, write = wild(torch.float16, 16, 8), FileIO.write
    path = tmp_path / "table.safetensors"
    for last in range(8):  # 1 header, 4 chunks, digests, 1 header; the last one gets through
        calls = []

        class Killing(FileIO):
            def write(self, data):
                if len(calls) == last:  # noqa: B023
                    os.kill(os.getpid(), signal.SIGKILL)
                calls.append(0)  # noqa: B023
                return write(self, data)

        monkeypatch.setattr(export, "FileIO", Killing)
        ended = in_child(lambda: export_table(weight, None, path, chunk_bytes=64))
        assert path.exists() == (ended == 0)
        assert ended == (0 if last == 7 else -signal.SIGKILL)
    assert held(path, weight)


@pytest.mark.parametrize("limit", [0, 100, 4096, 10_000])
def test_a_file_that_may_not_grow_is_not_there(tmp_path, way, limit):
    path = tmp_path / "table.safetensors"

    def export_within() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError) as error:
            export_table(wild(torch.float16, 1000, 64), None, path)
        assert error.value.errno == errno.EFBIG

    assert in_child(export_within) == 0
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path, way, monkeypatch):
    class Full(FileIO):
        def write(self, data):
            if self.tell() > 8192:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr(export, "FileIO", Full)
    with pytest.raises(OSError, match="No space left"):
        export_table(wild(torch.float16, 1000, 64), None, tmp_path / "table.safetensors", chunk_bytes=1000)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_too_small_is_said_before(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OSError, match="bytes are needed, 10 are free"):
        export_table(torch.zeros(4, 4), None, tmp_path / "table.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_may_not_be_written_is_said(way):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o555)

        def export_as_nobody() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write everywhere
            with pytest.raises(PermissionError):
                export_table(torch.zeros(4, 4), None, folder / "table.safetensors")

        assert in_child(export_as_nobody) == 0
        assert os.listdir(folder) == []


def test_of_two_exporters_one_wins_and_the_other_is_told(tmp_path, way):
    path, count = tmp_path / "table.safetensors", 6
    weights = [wild(torch.float16, 2000, 64, seed) for seed in range(count)]
    outcomes: dict[int, Exception | None] = {}
    ready = threading.Barrier(count)

    def run(number: int) -> None:
        ready.wait()
        try:
            export_table(weights[number], None, path)
            outcomes[number] = None
        except FileExistsError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number, error in outcomes.items() if error is None]
    assert len(outcomes) == count
    assert held(path, weights[winner])
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_system_without_links_is_served_too(tmp_path, monkeypatch):
    def no_links(*arguments, **options):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(export, "_nameless", lambda folder: None)
    monkeypatch.setattr(os, "link", no_links)
    weight, path = wild(torch.float16, 10, 8), tmp_path / "table.safetensors"
    export_table(weight, None, path)
    assert held(path, weight)
    old = tmp_path / "old"
    old.write_text("new content")
    with pytest.raises(FileExistsError):
        export._rename_to_free(old, path)
    assert held(path, weight)


def test_a_checkpoint_as_a_source_is_verified_when_it_is_read_again(exported, tmp_path):
    path, weight = exported()
    with open_table(path) as table:
        export_table(table, HEADS, tmp_path / "again.safetensors", chunk_bytes=77)
        with pytest.raises(ValueError, match="are in its rows already"):
            export_table(table, HEADS, tmp_path / "more.safetensors", scales=torch.ones(151, 1))
    assert held(tmp_path / "again.safetensors", weight)


def test_headers_of_two_versions_differ_in_digest_only(path):
    export_table(torch.zeros(4, 4), None, path)
    text = path.read_bytes()
    path.unlink()
    export_table(torch.ones(4, 4), None, path)
    with pytest.raises(TableFormatError, match="its header has the digest"):
        path.write_bytes(text.replace(b'"rows": "4"', b'"rows": "5"'))
        open_table(path)
