"""A file that is not what was written is never served: damaged, truncated, replaced, rewritten or deleted."""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
from safetensors.torch import save_file

from engram_peft.memory.tables import (
    TableChangedError,
    TableDigestError,
    TableError,
    TableFormatError,
    TableSizeError,
    export_table,
    open_table,
)
from engram_peft.memory.tables._system import LINUX

from .conftest import HEADS
from .rows import bits, in_child, looked_up, same, wild


ALL = torch.stack([torch.arange(31)] * 3, dim=1)


def flip(path, offset: int, value: int = 0xFF) -> None:
    """Changes one byte, and hides it: the time of the last change stays."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ value]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def places(content: bytes) -> dict[str, range]:
    """The parts of a file, as ranges of bytes."""
    start = 8 + int.from_bytes(content[:8], "little")
    text = content[8:start].rstrip(b" ")
    end = start + sum(HEADS) * 16
    return {
        "length": range(8),
        "header": range(8, 8 + len(text)),
        "padding": range(8 + len(text), start),
        "rows": range(start, end),
        "digests": range(end, len(content)),
    }


def test_of_a_thousand_mutations_none_is_served(exported):
    path, weight = exported(chunk_bytes=256)
    content = path.read_bytes()
    expected = looked_up(weight, HEADS, ALL)
    parts = places(content)
    chance = random.Random(0)
    refused = dict.fromkeys(parts, 0)
    for number in range(1000):
        name = list(parts)[number % 5]
        mutated = bytearray(content)
        mutated[chance.choice(parts[name])] ^= chance.randrange(1, 256)
        path.write_bytes(mutated)
        try:
            with open_table(path, verify="lazy", placement=chance.choice(["mmap", "mmap", "ram"])) as table:
                assert (table.head_sizes, table.dtype) == (HEADS, torch.float16)
                found = table.gather(ALL)
        except TableError:
            refused[name] += 1
        else:
            assert same(found, expected), name
    assert refused["header"] == refused["length"] == refused["digests"] == 200
    # rows beyond 31 of a head were not asked for, and blanks may become other blanks
    assert refused["rows"] > 100 and refused["padding"] > 190


@pytest.mark.parametrize("verify", ["lazy", "full"])
@pytest.mark.parametrize("placement", ["mmap", "ram"])
def test_a_flipped_bit_in_a_row_is_found(exported, verify, placement):
    path, weight = exported(chunk_bytes=256)
    offset = places(path.read_bytes())["rows"][16 * 60 + 5]  # row 10 of head 1, in chunk 3: rows 48 to 63
    flip(path, offset, 1)
    touching = torch.tensor([[0, 12, 0]])
    if verify == "full" or placement == "ram":
        with pytest.raises(TableDigestError, match=r"rows 48 to 63 have the digest \w{64}, \w{64} was expected"):
            open_table(path, verify=verify, placement=placement)
        return
    with open_table(path, verify=verify, placement=placement) as table:
        elsewhere = torch.tensor([[0, 20, 0]])
        assert same(table.gather(elsewhere), looked_up(weight, HEADS, elsewhere))
        for _ in range(2):
            with pytest.raises(TableDigestError, match="rows 48 to 63"):
                table.gather(touching)
        with pytest.raises(TableDigestError):
            table.verify()


def test_rows_longer_than_a_chunk_are_checked_whole(path):
    weight = wild(torch.float32, 10, 100)
    export_table(weight, None, path, chunk_bytes=64)
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, start + 5 * 400 + 200)  # the middle of row 5
    with open_table(path, verify="lazy") as table:
        assert same(table.gather(torch.tensor([4, 6])), weight[[4, 6]])
        with pytest.raises(TableDigestError):
            table.gather(torch.tensor([5]))


def test_size_alone_does_not_see_a_flipped_bit(exported):
    """What the default leaves to the disk."""
    path, weight = exported()
    flip(path, places(path.read_bytes())["rows"][3])
    with open_table(path) as table:
        assert not same(table.gather(ALL), looked_up(weight, HEADS, ALL))


@pytest.mark.parametrize("placement", ["mmap", "ram"])
def test_a_whole_file_verifies(exported, placement):
    path, _ = exported(chunk_bytes=100)
    with open_table(path, verify="full", placement=placement) as table:
        table.verify()


def test_a_checkpoint_has_nothing_to_verify(tmp_path):
    save_file({"w": wild(torch.float16, 8, 8)}, tmp_path / "model.safetensors")
    with open_table(tmp_path, tensor="w") as table, pytest.raises(ValueError, match="A checkpoint holds no digests"):
        table.verify()


@pytest.mark.parametrize("verify", ["size", "lazy", "full"])
@pytest.mark.parametrize("placement", ["mmap", "ram"])
def test_a_truncated_or_longer_file_is_not_opened(exported, verify, placement):
    path, _ = exported()
    content = path.read_bytes()
    for cut in (0, 7, 8, 100, 4096, 4097, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(TableSizeError):
            open_table(path, verify=verify, placement=placement)
    path.write_bytes(content + b"\0")
    message = f"longer than its tensors: {len(content)} bytes were expected, the file has {len(content) + 1}"
    with pytest.raises(TableSizeError, match=message):
        open_table(path, verify=verify, placement=placement)


def test_other_files_are_told_apart(tmp_path, path):
    save_file({"table": wild(torch.float16, 8, 8)}, path)
    with pytest.raises(TableFormatError, match="was not written by export_table.*name its tensor"):
        open_table(path)
    save_file({"table": wild(torch.float16, 8, 8)}, path, metadata={"format": "engram_peft.table", "version": "9"})
    with pytest.raises(TableFormatError, match="version '9' .* reads '1'. Update engram_peft"):
        open_table(path)
    for content in (b"\x80\x02}q\x00.", b"x" * 100, (10).to_bytes(8, "little") + b"[" * 10):
        path.write_bytes(content)
        with pytest.raises(TableError):
            open_table(path)


def test_an_index_that_leaves_its_folder_is_refused(tmp_path):
    save_file({"w": wild(torch.float16, 8, 8)}, tmp_path / "elsewhere.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for content in ('{"weight_map": {"w": "../elsewhere.safetensors"}}', "[1]", '{"weight_map": {"w": 3}}', "{"):
        index.write_text(content)
        with pytest.raises(TableFormatError, match="index.json is damaged"):
            open_table(folder, tensor="w")


# ---------------------------------------------------------------------------------------------------- while open


def test_a_deleted_or_replaced_file_goes_on_as_it_was(exported, tmp_path):
    path, weight = exported()
    other = tmp_path / "other.safetensors"
    export_table(torch.zeros(sum(HEADS), 8, dtype=torch.float16), HEADS, other)
    table, again = open_table(path, verify="lazy"), open_table(path)
    os.replace(other, path)
    assert same(table.gather(ALL), looked_up(weight, HEADS, ALL))
    path.unlink()
    assert same(again.gather(ALL), looked_up(weight, HEADS, ALL))
    with pytest.raises(FileNotFoundError):
        again.save(tmp_path / "saved.safetensors")


def test_another_table_in_the_same_place_is_not_saved_as_this_one(exported, tmp_path):
    path, _ = exported()
    other = tmp_path / "other.safetensors"
    export_table(torch.zeros(sum(HEADS), 8, dtype=torch.float16), HEADS, other)
    with open_table(path) as table:
        os.replace(other, path)
        with pytest.raises(TableChangedError, match="holds another table"):
            table.save(tmp_path / "saved.safetensors")
    assert not (tmp_path / "saved.safetensors").exists()


def test_a_file_that_is_written_to_is_an_error(exported):
    path, _ = exported()
    with open_table(path) as table:
        table.gather(ALL)
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size - 40)
            file.write(b"x")
        for _ in range(2):
            with pytest.raises(TableChangedError, match="it was written to. Put it back"):
                table.gather(ALL)


@pytest.mark.skipif(not LINUX, reason="elsewhere the size is checked, and the signal ends the process")
@pytest.mark.parametrize("kept", [0, 4096, 8192, 1_000_001])
def test_a_file_that_shrinks_under_its_readers_is_an_error_and_no_crash(path, kept):
    weight = wild(torch.float32, 20_000, 64)
    export_table(weight, None, path)
    expected = bits(weight)

    def read_while_it_shrinks() -> None:
        table, failed, running = open_table(path), [], threading.Barrier(3)

        def read(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.cat([torch.randint(0, 20_000, (500,), generator=generator), torch.tensor([0, 19_999])])
            running.wait()
            try:
                while True:
                    assert torch.equal(bits(table.gather(ids)), expected[ids])
            except TableChangedError as error:
                assert f"it had {path_size} bytes and has {kept} now" in str(error)
                failed.append(seed)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        running.wait()
        os.truncate(path, kept)
        for thread in threads:
            thread.join()
        assert sorted(failed) == [0, 1]

    path_size = path.stat().st_size
    assert in_child(read_while_it_shrinks) == 0


@pytest.mark.skipif(not LINUX, reason="there is no handler elsewhere")
def test_a_mapping_of_somebody_else_still_ends_the_process(exported, tmp_path):
    """SIGBUS outside of tables is not swallowed."""
    import mmap
    import signal

    path, _ = exported()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * 8192)

    def stumble() -> None:
        import faulthandler

        faulthandler.disable()
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        open_table(path)
        with open(foreign, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 8192)
            os.truncate(foreign, 0)
            mapped[5000]

    assert in_child(stumble) == -signal.SIGBUS
