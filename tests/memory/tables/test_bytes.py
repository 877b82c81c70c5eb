"""Whatever the dtype, the placement and the ids: the bytes of a row are those of the source."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engram_peft.memory.tables import ScaledRows, TableChangedError, export_table, open_table
from engram_peft.memory.tables.placement import CudaRows

from .conftest import HEADS
from .rows import PLAIN, bits, looked_up, same, scales, wild


@pytest.fixture(params=["mmap", "ram", "auto"])
def placement(request):
    return request.param


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_row_has_the_bytes_of_the_source(exported, dtype, placement):
    path, weight = exported(dtype)
    with open_table(path, placement=placement) as table:
        assert (table.dtype, table.dim, table.rows, table.head_sizes) == (dtype, 8, sum(HEADS), HEADS)
        assert table.placement != "auto"
        start = 0
        for head, size in enumerate(HEADS):
            ids = torch.zeros(size, len(HEADS), dtype=torch.int64)
            ids[:, head] = torch.arange(size)
            found = table.gather(ids)
            assert same(found[:, head], weight[start : start + size])
            start += size


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 3), (0, 3), (2, 0, 3)])
def test_ids_of_any_shape_come_back_in_it(exported, placement, dtype, shape):
    path, weight = exported(torch.bfloat16)
    ids = torch.randint(0, min(HEADS), shape, dtype=dtype)
    with open_table(path, placement=placement) as table:
        found = table.gather(ids)
        assert found.shape == (*shape, 8)
        assert same(found, looked_up(weight, HEADS, ids))
        out = torch.empty(*shape, 8, dtype=torch.bfloat16)
        assert table.gather(ids, out=out) is out
        assert same(out, found)


def test_repeated_unordered_and_strided_ids(exported, placement):
    path, weight = exported()
    ids = torch.tensor([[49, 0, 30], [0, 69, 0], [49, 0, 30], [7, 7, 7]])
    strided = torch.stack([ids, ids], dim=-1)[..., 0]
    transposed = ids.T.contiguous().T
    assert not strided.is_contiguous() and not transposed.is_contiguous()
    with open_table(path, placement=placement) as table:
        for variant in (ids, strided, transposed, ids.flip(0)):
            assert same(table.gather(variant), looked_up(weight, HEADS, variant))


def test_one_head_takes_ids_of_any_shape(exported, placement):
    path, weight = exported(heads=(40,))
    with open_table(path, placement=placement) as table:
        for shape in ((), (1,), (6,), (2, 3), (2, 3, 1)):
            ids = torch.randint(0, 40, shape)
            assert same(table.gather(ids), bits(weight)[ids].view(torch.float16))


def test_what_comes_out_owns_its_data(exported, placement):
    path, weight = exported()
    ids = torch.tensor([[1, 2, 3]])
    with open_table(path, placement=placement) as table:
        found = table.gather(ids)
        found.zero_()
        assert same(table.gather(ids), looked_up(weight, HEADS, ids))
        kept = table.gather(ids)
    assert same(kept, looked_up(weight, HEADS, ids))  # closed by now


def test_strided_targets_are_filled(exported):
    path, weight = exported()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    out = torch.zeros(2, 3, 16, dtype=torch.float16)[..., ::2]
    with open_table(path) as table:
        table.gather(ids, out=out)
    assert same(out.contiguous(), looked_up(weight, HEADS, ids))


SOURCES = {
    "columns": lambda w: torch.cat([w, w], dim=1)[:, : w.shape[1]],
    "rows": lambda w: w.repeat_interleave(3, dim=0)[::3],
    "transposed": lambda w: w.T.contiguous().T,
    "offset": lambda w: torch.cat([w.new_zeros(1, w.shape[1]), w])[1:],
    "parameter": lambda w: torch.nn.Parameter(w),
}


@pytest.mark.parametrize("strides", SOURCES.values(), ids=SOURCES)
def test_sources_need_not_be_contiguous(path, strides):
    weight = wild(torch.float16, 151, 8)
    export_table(strides(weight), HEADS, path, chunk_bytes=100)
    with open_table(path, verify="full") as table:
        assert same(torch.from_numpy(table.raw_rows(0, 151)).view(torch.float16), weight)


SCALED = [
    (torch.float8_e4m3fn, torch.float8_e8m0fnu, 4),
    (torch.float8_e4m3fn, torch.float32, 1),
    (torch.int8, torch.float32, 1),
    (torch.int8, torch.float16, 2),
]


@pytest.mark.parametrize(("dtype", "scale_dtype", "blocks"), SCALED, ids=str)
def test_rows_keep_their_scales_beside_them(path, dtype, scale_dtype, blocks, placement):
    weight, factors = wild(dtype, 151, 8), scales(scale_dtype, 151, blocks)
    export_table(weight, HEADS, path, scales=factors)
    ids = torch.randint(0, min(HEADS), (5, 3))
    with open_table(path, placement=placement, verify="lazy") as table:
        found = table.gather(ids)
        assert isinstance(found, ScaledRows)
        assert same(found.values, looked_up(weight, HEADS, ids))
        assert same(found.scales, looked_up(factors, HEADS, ids))
        assert table.layout.row_bytes == 8 * dtype.itemsize + blocks * scale_dtype.itemsize
    numbers = weight.to(torch.float64).view(151, blocks, -1) * factors.to(torch.float64).unsqueeze(-1)
    expected = looked_up(numbers.view(151, 8).float(), HEADS, ids)
    assert torch.allclose(found.dequantize(), expected, rtol=1e-6, atol=0, equal_nan=True)
    assert found.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_deepseeks_rows_of_264_bytes(path):
    weight, factors = wild(torch.float8_e4m3fn, 100, 256), scales(torch.float8_e8m0fnu, 100, 8)
    export_table(weight, None, path, scales=factors.view(torch.uint8))  # as files wrote ue8m0 before it had a name
    with open_table(path) as table:
        assert (table.layout.row_bytes, table.layout.scale_block) == (264, 32)
        found = table.gather(torch.arange(100))
        assert same(found.values, weight) and same(found.scales, factors)
        assert table.prefetch(torch.tensor([1])).result() == 1  # values and scales are on one page
    save_file({"w": weight, "s": factors.view(torch.uint8)}, path.with_name("checkpoint.safetensors"))
    with open_table(path.with_name("checkpoint.safetensors"), tensor="w", scales="s") as table:
        assert table.prefetch(torch.tensor([1])).result() == 2  # and here they are not


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_any_safetensors_reader_reads_the_file(exported, dtype):
    path, weight = exported(dtype)
    with safe_open(path, framework="pt") as file:
        assert same(file.get_tensor("table"), weight)
        assert file.metadata()["head_sizes"] == "[50, 70, 31]"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 4096 == 0  # row 0 begins on a page
    assert path.read_bytes()[8 + length :][: weight.nbytes] == bytes(bits(weight).flatten().tolist())


def test_what_the_exporter_says_about_ids_is_kept(exported):
    told = {"variant": "deepseek", "multipliers": [76632096046245, 4839876093313], "seed": 0}
    path, _ = exported(hash=told)
    with open_table(path) as table:
        assert table.hash == told


@pytest.mark.parametrize("dim", [1, 3, 6, 8])
def test_rows_for_a_gpu_are_the_same_bytes(exported, dim):
    """The class behind `cuda`, on the only device that is here."""
    path, weight = exported(dim=dim)
    table = open_table(path, verify="lazy")
    rows = CudaRows(table._columns[0], torch.device("cpu"), table._digests)
    for shape in ((4, 3), (0, 3), (2, 5, 3)):
        ids = torch.randint(0, min(HEADS), shape)
        where = table._checked_on_gpu(ids)
        assert torch.equal(where, table._flat(ids))
        assert same(table._decoded([rows.take(where)]), looked_up(weight, HEADS, ids))
    for ids in ([[0, 0, 31]], [[-1, 0, 0]]):
        with pytest.raises(IndexError, match="is not in head"):
            table._checked_on_gpu(torch.tensor(ids))
    with pytest.raises(ValueError, match="3 heads"):
        table._checked_on_gpu(torch.tensor([0]))
    with rows.parts([100, len(weight) - 100]) as (first, rest):
        assert same(first, weight[:100]) and same(rest, weight[100:])


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_the_tensors_that_hold_a_table(dtype, placement, tmp_path):
    weight = wild(dtype, 120, 8)
    save_file({"a": weight[:50].clone(), "b": weight[50:110].view(2, 30, 8).clone()}, tmp_path / "1.safetensors")
    save_file({"c": weight[110:].clone()}, tmp_path / "2.safetensors")
    for names, parts in ((["a", "c"], [weight[:50], weight[110:]]), (["b"], [weight[50:110].view(2, 30, 8)])):
        with open_table(tmp_path, tensor=names, placement=placement) as table, table.tensors() as tensors:
            assert list(tensors) == names
            assert all(same(*pair) for pair in zip(tensors.values(), parts, strict=True))
    table.close()
    with pytest.raises(ValueError, match="closed"), table.tensors():
        pass
    export_table(wild(torch.int8, 4, 8), None, tmp_path / "scaled.safetensors", scales=torch.ones(4, 1))
    scaled = open_table(tmp_path / "scaled.safetensors")
    with pytest.raises(ValueError, match="Rows with scales are no single tensor"), scaled.tensors():
        pass


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoints_tensor_is_opened_where_it_lies(tmp_path, placement):
    weight = wild(torch.bfloat16, 151, 8)
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, dtype=torch.uint8), "layer.table": weight, "z": torch.ones(7)}, file)
    ids = torch.randint(0, min(HEADS), (4, 3))
    for where in (file, tmp_path, [file], str(tmp_path)):
        with open_table(where, tensor="layer.table", head_sizes=HEADS, placement=placement) as table:
            assert same(table.gather(ids), looked_up(weight, HEADS, ids))


def test_shards_in_several_files_are_one_table(tmp_path, placement):
    weight = wild(torch.float16, 151, 8)
    parts = weight.split([60, 1, 90])
    save_file({"t.0": parts[0], "t.2": parts[2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"t.1": parts[1], "other": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    ids = torch.stack([torch.arange(31)] * 3, dim=1)
    ids[:3, 1] = 69
    with open_table(tmp_path, tensor=["t.0", "t.1", "t.2"], head_sizes=HEADS, placement=placement) as table:
        assert same(table.gather(ids), looked_up(weight, HEADS, ids))
        out = torch.empty(31, 3, 8, dtype=torch.float16)
        assert same(table.gather(ids, out=out), looked_up(weight, HEADS, ids))
        assert table.gather(ids[:0]).shape == (0, 3, 8)
        assert table.prefetch(ids).result() == (3 if table.placement == "mmap" else 0)  # a page a shard
        assert table.residency() == 1.0


def test_scales_in_a_region_of_their_own_are_found(tmp_path, placement):
    weight, factors = wild(torch.float8_e4m3fn, 151, 8), scales(torch.float8_e8m0fnu, 151, 2)
    save_file({"w": weight, "s": factors.view(torch.uint8)}, tmp_path / "model.safetensors")
    ids = torch.randint(0, min(HEADS), (4, 3))
    with open_table(tmp_path, tensor="w", scales="s", head_sizes=HEADS, placement=placement) as table:
        found = table.gather(ids)
        assert same(found.values, looked_up(weight, HEADS, ids)) and same(found.scales, looked_up(factors, HEADS, ids))
        export_table(table, HEADS, tmp_path / "table.safetensors")
    with open_table(tmp_path / "table.safetensors", verify="full") as table:
        again = table.gather(ids)
        assert same(again.values, found.values) and same(again.scales, found.scales)


def test_a_tensor_of_heads_brings_their_sizes(tmp_path):
    """As Needle stores its tables: `[heads, slots, dim]`."""
    weight = wild(torch.float32, 60, 4).view(3, 20, 4)
    save_file({"engrams_1/embedding": weight}, tmp_path / "model.safetensors")
    with open_table(tmp_path, tensor="engrams_1/embedding") as table:
        assert table.head_sizes == (20, 20, 20)
        found = table.gather(torch.tensor([[1, 2, 3]]))
    assert same(found[0], torch.stack([weight[0, 1], weight[1, 2], weight[2, 3]]))


def test_rows_after_the_last_head_are_padding(tmp_path):
    save_file({"w": wild(torch.float16, 64, 8)}, tmp_path / "model.safetensors")
    with open_table(tmp_path, tensor="w", head_sizes=[20, 30]) as table:
        assert table.rows == 50
        with pytest.raises(IndexError, match="rows 0 to 29"):
            table.gather(torch.tensor([0, 30]))


# ---------------------------------------------------------------------------------------------------- copies


def test_a_table_opened_while_a_model_is_made_on_the_meta_device(exported, tmp_path, placement):
    path, weight = exported()
    save_file({"a": weight[:60].clone(), "b": weight[60:].clone()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        tables = [
            open_table(path, placement=placement),
            open_table(tmp_path / "model.safetensors", tensor=["a", "b"], head_sizes=HEADS, placement=placement),
        ]
    ids = torch.randint(0, min(HEADS), (4, 3))
    for table in tables:
        assert same(table.gather(ids), looked_up(weight, HEADS, ids))
        with pytest.raises(IndexError, match="head 2"):
            table.gather(torch.tensor([[0, 0, 31]]))


def test_rows_that_begin_at_an_odd_byte(tmp_path, placement):
    weight = wild(torch.float32, 20, 3)
    header = json.dumps({"w": {"dtype": "F32", "shape": [20, 3], "data_offsets": [0, 240]}}).encode()
    header = header.ljust(len(header) + (len(header) + 8 + 1) % 2)
    assert (8 + len(header)) % 2 == 1
    (tmp_path / "odd.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(bits(weight).flatten().tolist())
    )
    with open_table(tmp_path / "odd.safetensors", tensor="w", placement=placement) as table:
        assert same(table.gather(torch.arange(20)), weight)


@pytest.mark.parametrize("other", ["ram", "mmap"])
def test_a_table_moves_and_stays(exported, other):
    path, weight = exported()
    ids = torch.randint(0, min(HEADS), (4, 3))
    table = open_table(path)
    moved = table.to(other)
    assert moved.placement == other
    for each in (table, moved, pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert same(each.gather(ids), looked_up(weight, HEADS, ids))


def test_saving_links_the_file(exported, tmp_path):
    path, _ = exported()
    with open_table(path) as table:
        table.save(tmp_path / "saved.safetensors")
        assert path.samefile(tmp_path / "saved.safetensors")
        with pytest.raises(FileExistsError):
            table.save(tmp_path / "saved.safetensors")


def test_saving_what_a_link_points_to(exported, tmp_path):
    """As in the Hub's cache, where snapshots are links that are relative to their folder."""
    path, _ = exported()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "table.safetensors").symlink_to(Path("..", path.relative_to(tmp_path)))
    with open_table(tmp_path / "snapshot" / "table.safetensors") as table:
        table.save(tmp_path / "saved.safetensors")
    assert path.samefile(tmp_path / "saved.safetensors")
    assert not (tmp_path / "saved.safetensors").is_symlink()


def test_moving_a_table_whose_file_was_replaced(exported, tmp_path):
    path, weight = exported()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with open_table(path) as table:
        export_table(bits(weight).flip(0).view(weight.dtype), HEADS, tmp_path / "other.safetensors")
        os.replace(tmp_path / "other.safetensors", path)
        assert same(table.gather(ids), looked_up(weight, HEADS, ids))
        with pytest.raises(TableChangedError, match="is another file than when this table was opened"):
            table.to("ram")
        path.unlink()
        with pytest.raises(FileNotFoundError):
            table.to("ram")


def test_saving_copies_where_links_are_not_possible(exported, tmp_path, monkeypatch):
    path, _ = exported()
    link = __import__("os").link

    def no_links(source, target, **options):
        if "src_dir_fd" not in options:
            raise OSError(18, "Invalid cross-device link")
        link(source, target, **options)

    monkeypatch.setattr("os.link", no_links)
    with open_table(path) as table:
        table.save(tmp_path / "saved.safetensors")
    assert not path.samefile(tmp_path / "saved.safetensors")
    assert path.read_bytes() == (tmp_path / "saved.safetensors").read_bytes()
