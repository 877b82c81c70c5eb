"""What a gather refuses, and many at once."""

from __future__ import annotations

import threading

import pytest
import torch

from engram_peft.memory.tables import export_table, open_table

from .rows import bits, looked_up, same, wild


@pytest.mark.parametrize("placement", ["mmap", "ram"])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 0, 31]], "Row 31 at position [0, 2] of `ids` is not in head 2, which has rows 0 to 30."),
        ([[0, 0, 0], [50, 0, 0]], "Row 50 at position [1, 0] of `ids` is not in head 0, which has rows 0 to 49."),
        ([[0, -1, 0]], "Row -1 at position [0, 1] of `ids` is not in head 1, which has rows 0 to 69."),
        ([[2**62, 0, 0]], "Row 4611686018427387904"),
        ([[-(2**63), 0, 0]], "Row -9223372036854775808"),
    ],
)
def test_an_id_outside_of_its_head_is_an_error_never_the_neighbours_row(exported, placement, ids, message):
    path, _ = exported()
    with open_table(path, placement=placement) as table:
        out = torch.full((len(ids), 3, 8), 7.0, dtype=torch.float16)
        for target in (None, out):
            with pytest.raises(IndexError) as error:
                table.gather(torch.tensor(ids), out=target)
            assert message in str(error.value)
        assert torch.equal(out, torch.full_like(out, 7.0))
        with pytest.raises(IndexError):
            table.prefetch(torch.tensor(ids))


def test_an_id_past_the_end_of_one_head_is_an_error(exported):
    path, _ = exported(heads=(40,))
    with open_table(path) as table, pytest.raises(IndexError, match="Row 40 at position \\[1\\] .* rows 0 to 39"):
        table.gather(torch.tensor([3, 40], dtype=torch.int32))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.int64), ValueError, r"shape \[2, 4\], its last dimension .* 3 heads"),
        (torch.tensor(1), ValueError, r"shape \[\]"),
        (torch.zeros(2, 3), TypeError, "int32 or int64, it is torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int16), TypeError, "torch.int16"),
        (torch.zeros(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
    ],
)
def test_ids_of_a_wrong_kind_are_refused(exported, ids, error, message):
    path, _ = exported()
    with open_table(path) as table, pytest.raises(error, match=message):
        table.gather(ids)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(2, 3, 8),
        torch.empty(2, 3, 7, dtype=torch.float16),
        torch.empty(3, 3, 8, dtype=torch.float16),
        torch.empty(2, 24, dtype=torch.float16),
        torch.empty(2, 3, 16, dtype=torch.float16)[..., ::4],
    ],
)
def test_targets_of_a_wrong_kind_are_refused(exported, out):
    path, _ = exported()
    with open_table(path) as table, pytest.raises(ValueError, match=r"`out` has to be torch.float16 \[2, 3, 8\]"):
        table.gather(torch.zeros(2, 3, dtype=torch.int64), out=out)


def test_scaled_rows_have_no_target(path):
    export_table(wild(torch.int8, 4, 8), None, path, scales=torch.ones(4, 1))
    with open_table(path) as table, pytest.raises(ValueError, match="`out` cannot take rows with scales"):
        table.gather(torch.tensor([1]), out=torch.empty(1, 8, dtype=torch.int8))


def test_a_closed_table_says_so(exported):
    path, _ = exported()
    table = open_table(path)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="closed"):
        table.gather(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("placement", ["cuda", "pinned"])
def test_a_gpu_that_is_not_there_is_named(exported, placement, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, _ = exported()
    with pytest.raises(ValueError, match=f"`placement={placement}` needs CUDA"):
        open_table(path, placement=placement)
    with pytest.raises(ValueError, match="needs a CUDA device, `device` is cpu"):
        open_table(path, placement=placement, device="cpu")


@pytest.mark.parametrize(("free", "chosen"), [(1 << 40, "ram"), (10, "mmap")])
def test_auto_goes_by_free_memory(exported, monkeypatch, free, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("engram_peft.memory.tables.placement.free_memory", lambda: free)
    path, _ = exported()
    assert open_table(path, placement="auto").placement == chosen


def test_wrong_arguments_are_named(exported, tmp_path):
    path, _ = exported()
    for options, message in [
        ({"verify": "maybe"}, "`verify` is one of size, lazy, full"),
        ({"placement": "disk"}, "`placement` is one of ram, mmap, pinned, cuda, auto"),
        ({"head_sizes": [151]}, "`head_sizes` is \\[151\\], .* was written with \\[50, 70, 31\\]"),
        ({"scales": "x"}, "`scales` goes with `tensor`"),
        ({"tensor": "nothing"}, "`tensor`: .* holds no 'nothing'"),
        ({"tensor": "table", "verify": "lazy"}, "`verify=lazy` needs digests"),
        ({"tensor": "table", "head_sizes": [100, 52]}, "`head_sizes` adds up to 152 rows, the table has 151"),
        ({"tensor": "table", "head_sizes": [151, 0]}, "at least one row for every head"),
        ({"tensor": []}, "names no tensor"),
        ({"tensor": ["table", "chunk_sha256"]}, "make no one table"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_table(path, **options)
    with pytest.raises(ValueError, match="name its `tensor`"):
        open_table([path])
    with pytest.raises(FileNotFoundError):
        open_table(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="is not a file"):
        open_table(tmp_path)


@pytest.mark.parametrize("verify", ["size", "lazy"])
def test_many_threads_gather_at_once(path, verify):
    weight = wild(torch.float16, 3000, 64)
    heads = (1000, 1500, 500)
    export_table(weight, heads, path, chunk_bytes=4096)
    failed = []
    with open_table(path, verify=verify) as table:

        def gather(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(20):
                ids = torch.randint(0, 500, (16, 3), generator=generator)
                table.prefetch(ids)
                if not same(table.gather(ids), looked_up(weight, heads, ids)):
                    failed.append(seed)

        threads = [threading.Thread(target=gather, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert (table.stats().gathers, table.stats().rows) == (120, 120 * 48)


def test_a_batch_larger_than_anything_before_is_served(exported):
    """A peer's cache raises KeyError where a batch has more unique rows than it."""
    path, weight = exported(heads=(4000,))
    ids = torch.randperm(4000)
    with open_table(path) as table:
        table.gather(torch.tensor([1]))
        assert same(table.gather(ids), bits(weight)[ids].view(torch.float16))


def test_closing_lets_running_gathers_end(path):
    weight = wild(torch.float32, 5000, 64)
    export_table(weight, None, path)
    ids = torch.arange(5000).repeat(4)
    expected = bits(weight)[ids]
    for _ in range(5):
        table, right, started = open_table(path), [], threading.Event()

        def gather(table=table, right=right, started=started) -> None:
            with pytest.raises(ValueError, match="closed"):
                while True:
                    right.append(torch.equal(bits(table.gather(ids)), expected))
                    started.set()

        threads = [threading.Thread(target=gather) for _ in range(2)]
        for thread in threads:
            thread.start()
        started.wait()
        table.close()
        for thread in threads:
            thread.join()
        assert right and all(right)
