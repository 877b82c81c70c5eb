"""Moments, their file format, and merging."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engram_peft import Moment, Provenance, Statistics, files, merge_statistics
from engram_peft.editing import statistics as module

from .reference import relative_error


PROVENANCE = Provenance(
    model="org/model", model_fingerprint="abcd", tokenizer="99:1-2", mask="answer", texts=4, library_version="0.1.0"
)


def rows_of(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def moment_of(*blocks: torch.Tensor) -> Moment:
    moment = Moment(blocks[0].shape[1])
    for block in blocks:
        moment.add(block)
    return moment


def plain_sum(*blocks: torch.Tensor) -> torch.Tensor:
    rows = torch.cat(blocks).double()
    return rows.mT @ rows


def statistics_of(provenance: Provenance = PROVENANCE, seed: int = 0) -> Statistics:
    """Two layers that share a moment of sums, one of rows, one of merged parts."""
    shared = moment_of(rows_of(40, 6, seed))
    few = moment_of(rows_of(3, 8, seed + 1))
    mixed = Moment.merged([moment_of(rows_of(30, 5, seed + 2)), moment_of(rows_of(2, 5, seed + 3))])
    return Statistics({"q": shared, "down": few, "k": shared, "head": mixed}, provenance)


# ------------------------------------------------------------------------------------------------ sums


@pytest.mark.parametrize("count", [1, 5, 10, 11, 37])
def test_sum_of_one_block_is_its_gram_matrix(count):
    """Up to half the width the rows are kept, beyond that the sum."""
    rows = rows_of(count, 20)
    moment = moment_of(rows)
    assert moment.count == count
    assert bool(moment.rows) == (count <= 10)
    assert relative_error(moment.dense(), plain_sum(rows)) < 1e-6


@pytest.mark.parametrize("dim", [1, 2, 191, 192, 193, 384, 385])
def test_sum_of_widths_around_the_panel_height(dim):
    rows = rows_of(dim + 7, dim)
    dense = moment_of(rows).dense()
    assert relative_error(dense, plain_sum(rows)) < 1e-6
    assert torch.equal(dense, dense.mT)


@pytest.mark.parametrize("height", [1, 2, 3, 6, 7])
def test_sum_does_not_depend_on_the_panel_height(monkeypatch, height):
    monkeypatch.setattr(module, "PANEL_ROWS", height)
    rows = rows_of(20, 6)
    assert relative_error(moment_of(rows).dense(), plain_sum(rows)) < 1e-6


@pytest.mark.parametrize("sizes", [[3, 3, 3], [5, 1, 30], [50], [16, 16], [17, 15, 1], [1] * 40, [0, 20, 0]])
def test_sum_across_the_spill_into_float64(monkeypatch, sizes):
    monkeypatch.setattr(module, "FLOAT32_ROWS", 16)
    blocks = [rows_of(size, 6, seed) for seed, size in enumerate(sizes)]
    moment = moment_of(*blocks)
    assert moment.count == sum(sizes)
    assert relative_error(moment.dense(), plain_sum(*blocks)) < 1e-6


def test_small_rows_after_large_ones_are_not_lost(monkeypatch):
    """2^24 + 1 is 2^24 in float32, so a sum that stayed there would lose all of the forty ones."""
    monkeypatch.setattr(module, "FLOAT32_ROWS", 4)
    moment = moment_of(torch.full((1, 1), 4096.0), *[torch.ones(1, 1)] * 40)
    assert moment.dense().item() == pytest.approx(2**24 + 40, abs=4)


def test_rows_that_are_kept_are_summed_exactly():
    rows = torch.tensor([[4096.0, 1.0, 0, 0], [1.0, 4096.0, 0, 0]])
    moment = moment_of(rows)
    assert torch.equal(moment.dense(), plain_sum(rows))


@pytest.mark.parametrize("sizes", [[2, 3, 30], [1, 2]])
def test_order_of_blocks_does_not_matter(sizes):
    blocks = [rows_of(size, 12, seed) for seed, size in enumerate(sizes)]
    assert relative_error(moment_of(*blocks).dense(), moment_of(*blocks[::-1]).dense()) < 1e-6


def test_empty_moment_is_zero():
    moment = Moment(5)
    assert moment.count == 0
    assert torch.equal(moment.dense(), torch.zeros(5, 5, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------ factor


@pytest.mark.parametrize("sizes", [[1], [3, 4], [10]])
def test_factor_of_few_rows_squares_to_the_sum(sizes):
    blocks = [rows_of(size, 20, seed) for seed, size in enumerate(sizes)]
    factor = moment_of(*blocks).factor()
    assert factor.shape == (20, sum(sizes))
    assert relative_error(factor @ factor.mT, plain_sum(*blocks)) < 1e-12


def test_factor_of_few_rows_that_are_held_as_a_sum():
    rows = rows_of(3, 8)
    moment = Moment(8)
    moment.sums, moment.count = [[plain_sum(rows)]], 3
    factor = moment.factor()
    assert factor.shape == (8, 3)
    assert relative_error(factor @ factor.mT, plain_sum(rows)) < 1e-12


def test_many_rows_have_no_factor():
    assert moment_of(rows_of(11, 20)).factor() is None


def test_factor_of_no_rows_is_empty():
    assert Moment(6).factor().shape == (6, 0)


# ------------------------------------------------------------------------------------------------ merging moments


@pytest.mark.parametrize("sizes", [(3, 4), (3, 30), (30, 3), (30, 40), (0, 5), (9, 9)])
def test_merged_halves_equal_the_whole(sizes):
    halves = [rows_of(size, 20, seed) for seed, size in enumerate(sizes)]
    merged = Moment.merged([moment_of(half) for half in halves])
    assert merged.count == sum(sizes)
    assert relative_error(merged.dense(), plain_sum(*halves)) < 1e-6


@pytest.mark.parametrize("sizes", [(2, 2, 3), (30, 30, 3)])
def test_adding_to_the_merged_moment_leaves_the_parts_alone(sizes):
    first, second, more = (rows_of(size, 20, seed) for seed, size in enumerate(sizes))
    parts = [moment_of(first), moment_of(second)]
    before = [part.dense() for part in parts]
    merged = Moment.merged(parts)
    merged.add(more)
    merged.add(rows_of(50, 20, 9))
    assert all(torch.equal(part.dense(), dense) for part, dense in zip(parts, before, strict=True))
    assert [part.count for part in parts] == list(sizes[:2])
    assert relative_error(merged.dense(), plain_sum(first, second, more, rows_of(50, 20, 9))) < 1e-6


@pytest.mark.parametrize("size", [2, 30])
def test_adding_to_a_part_leaves_the_merged_moment_alone(size):
    first, second = rows_of(size, 20, 0), rows_of(size, 20, 1)
    part = moment_of(first)
    merged = Moment.merged([part, moment_of(second)])
    part.add(rows_of(30, 20, 2))
    assert merged.count == 2 * size
    assert relative_error(merged.dense(), plain_sum(first, second)) < 1e-6


@pytest.mark.parametrize("size", [2, 30])
def test_adding_to_a_copy_leaves_the_original_alone_and_the_other_way_round(size):
    rows, more = rows_of(size, 20), rows_of(30, 20, 1)
    original = moment_of(rows)
    copy, second = original.copy(), original.copy()
    copy.add(more)
    assert relative_error(original.dense(), plain_sum(rows)) < 1e-6
    original.add(more)
    assert relative_error(copy.dense(), plain_sum(rows, more)) < 1e-6
    assert relative_error(second.dense(), plain_sum(rows)) < 1e-6
    assert second.count == size


def test_widths_must_agree():
    with pytest.raises(ValueError, match="width 4 and 5"):
        Moment.merged([Moment(4), Moment(5)])


def test_merge_equals_the_reference(oracle):
    parts = []
    for i, count in enumerate(oracle.facts["merge"]["counts"]):
        moment = Moment(8)
        moment.sums, moment.count = [[oracle.tensors[f"merge.C{i}"].double() * count]], count
        parts.append(Statistics({"fc": moment}))
    merged = merge_statistics(*parts)
    assert merged.counts == {"fc": oracle.facts["merge"]["count"]}
    assert relative_error(merged.covariance("fc"), oracle.tensors["merge.C"]) < oracle.facts["tolerance"]["merge.C"]


# ------------------------------------------------------------------------------------------------ merging statistics


def test_merge_is_associative():
    a, b, c = (statistics_of(seed=seed) for seed in (0, 10, 20))
    left, right = merge_statistics(merge_statistics(a, b), c), merge_statistics(a, merge_statistics(b, c))
    together = merge_statistics(a, b, c)
    for name in a.moments:
        assert left.counts[name] == right.counts[name] == together.counts[name] == 3 * a.counts[name]
        assert relative_error(left.covariance(name), together.covariance(name)) < 1e-12
        assert relative_error(right.covariance(name), together.covariance(name)) < 1e-12
    assert left.provenance == right.provenance == together.provenance


def test_method_merge_is_the_function():
    a, b = statistics_of(seed=0), statistics_of(seed=10)
    merged, expected = a.merge(b), merge_statistics(a, b)
    assert all(torch.equal(merged.covariance(name), expected.covariance(name)) for name in a.moments)
    assert merged.provenance == expected.provenance


def test_merge_keeps_what_is_shared():
    merged = merge_statistics(statistics_of(seed=0), statistics_of(seed=10))
    assert merged.moments["q"] is merged.moments["k"]
    assert len(merged.groups()) == 3


def test_merge_separates_what_only_one_side_shares():
    shared, rows = moment_of(rows_of(9, 4)), [rows_of(9, 4, 1), rows_of(9, 4, 2)]
    one = Statistics({"q": shared, "k": shared})
    merged = merge_statistics(one, Statistics({"q": moment_of(rows[0]), "k": moment_of(rows[1])}))
    for name, own in zip(("q", "k"), rows, strict=True):
        assert relative_error(merged.moments[name].dense(), plain_sum(rows_of(9, 4), own)) < 1e-6


def test_merge_of_one_is_that_one():
    a = statistics_of()
    merged = merge_statistics(a)
    assert merged.provenance == a.provenance
    assert all(torch.equal(merged.covariance(name), a.covariance(name)) for name in a.moments)


def test_merge_adds_texts_and_joins_rules():
    a = statistics_of(replace(PROVENANCE, mask="answer", texts=3))
    b = statistics_of(replace(PROVENANCE, mask="labels", texts=5))
    merged = merge_statistics(a, b, a).provenance
    assert (merged.texts, merged.mask) == (11, "answer+labels")


def test_unknown_provenance_agrees_with_everything():
    merged = merge_statistics(statistics_of(Provenance(texts=1)), statistics_of())
    assert merged.provenance == replace(PROVENANCE, texts=5)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("model_fingerprint", "other", "different models"),
        ("tokenizer", "50:3", "different tokenizers"),
        ("mask", "predict", "different mask rules"),
        ("mask", "labels+predict", "different mask rules"),
    ],
)
def test_merge_refuses_another_provenance(field, value, message):
    with pytest.raises(ValueError, match=message):
        merge_statistics(statistics_of(), statistics_of(replace(PROVENANCE, **{field: value})))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_merge_refuses_other_layers_by_name(position):
    parts = [statistics_of() for _ in range(3)]
    del parts[position].moments["down"]
    with pytest.raises(ValueError, match="down"):
        merge_statistics(*parts)


def test_merge_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        merge_statistics()


def test_covariance_of_a_layer_that_was_never_fed_is_refused():
    with pytest.raises(ValueError, match="fc was never fed"):
        Statistics({"fc": Moment(3)}).covariance("fc")


# ------------------------------------------------------------------------------------------------ files


def assert_same(found: Statistics, expected: Statistics) -> None:
    """Equal to the bit, sharing included."""
    assert set(found.moments) == set(expected.moments)
    assert found.provenance == expected.provenance
    assert found.counts == expected.counts
    for name, moment in expected.moments.items():
        assert torch.equal(found.moments[name].dense(), moment.dense())
    assert {frozenset(names) for _, names in found.groups()} == {frozenset(names) for _, names in expected.groups()}


def test_saved_statistics_come_back_to_the_bit(tmp_path):
    expected = statistics_of()
    expected.save(tmp_path / "s.safetensors")
    assert_same(Statistics.load(tmp_path / "s.safetensors"), expected)


@pytest.mark.parametrize("dim", [1, 191, 192, 193, 385])
def test_saved_sums_of_widths_around_the_panel_height_come_back_to_the_bit(tmp_path, dim):
    expected = Statistics({"fc": moment_of(rows_of(dim, dim))})
    expected.save(tmp_path / "s.safetensors")
    assert_same(Statistics.load(tmp_path / "s.safetensors"), expected)


def test_saved_sums_in_float64_come_back_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FLOAT32_ROWS", 8)
    expected = Statistics({"fc": moment_of(*[rows_of(7, 6, seed) for seed in range(5)])})
    assert expected.moments["fc"].sums[0][0].dtype == torch.float64
    expected.save(tmp_path / "s.safetensors")
    assert_same(Statistics.load(tmp_path / "s.safetensors"), expected)


def test_saved_rows_come_back_as_an_exact_factor(tmp_path):
    expected = moment_of(rows_of(2, 8), rows_of(1, 8, 1))
    Statistics({"fc": expected}).save(tmp_path / "s.safetensors")
    loaded = Statistics.load(tmp_path / "s.safetensors").moments["fc"]
    assert torch.equal(loaded.factor(), expected.factor())


def test_a_moment_without_rows_comes_back(tmp_path):
    expected = Statistics({"fc": Moment(4)})
    expected.save(tmp_path / "s.safetensors")
    assert_same(Statistics.load(tmp_path / "s.safetensors"), expected)


def test_loaded_statistics_can_be_merged(tmp_path):
    a, b = statistics_of(seed=0), statistics_of(seed=10)
    a.save(tmp_path / "a.safetensors")
    merged = merge_statistics(Statistics.load(tmp_path / "a.safetensors"), b)
    expected = merge_statistics(a, b)
    assert merged.counts == expected.counts
    assert all(relative_error(merged.covariance(n), expected.covariance(n)) < 1e-14 for n in a.moments)


def test_a_shared_moment_is_stored_once(tmp_path):
    statistics_of().save(tmp_path / "s.safetensors")
    assert len(load_file(tmp_path / "s.safetensors")) == 3


@pytest.mark.parametrize("height", [1, 3, 192])
def test_packed_triangle_has_the_order_of_the_reference(tmp_path, monkeypatch, oracle, height):
    """Row by row, whatever the height of the panels in memory."""
    monkeypatch.setattr(module, "PANEL_ROWS", height)
    q = oracle.tensors["packed.q"]
    moment = Moment(8)
    moment.sums, moment.count = [[q[i : i + height, i:] for i in range(0, 8, height)]], 20
    Statistics({"q": moment}).save(tmp_path / "s.safetensors")
    (packed,) = load_file(tmp_path / "s.safetensors").values()
    assert torch.equal(packed, oracle.tensors["packed.q_upper_rowmajor"])


def test_names_and_provenance_are_in_the_header(tmp_path):
    statistics_of().save(tmp_path / "s.safetensors")
    with safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        header = file.metadata()
    assert header["format"] == "engram_peft.statistics"
    assert sorted(name for entry in json.loads(header["moments"]) for name in entry["names"]) == [
        "down", "head", "k", "q",
    ]  # fmt: skip
    assert json.loads(header["provenance"])["texts"] == 4


def test_move_keeps_sharing_counts_and_provenance():
    original = statistics_of()
    moved = original.to("meta")
    assert {tensor.device.type for moment in moved.moments.values() for tensor in moment.tensors()} == {"meta"}
    assert moved.moments["q"] is moved.moments["k"]
    assert (moved.counts, moved.provenance) == (original.counts, original.provenance)
    assert original.moments["q"].device.type == "cpu"
    assert_same(original.to("cpu"), original)


# ------------------------------------------------------------------------------------------------ damaged files


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "s.safetensors"
    statistics_of().save(path)
    return path


def rewrite(path, *, header: dict | None = None, entry: tuple[int, dict] | None = None, tensors: dict | None = None):
    """Writes the file again with changes to the header, to one entry of its index, or to the tensors."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    stored = load_file(path)
    if entry is not None:
        index = json.loads(metadata["moments"])
        index[entry[0]].update(entry[1])
        metadata["moments"] = json.dumps(index)
    metadata.update(header or {})
    stored.update(tensors or {})
    save_file({name: t for name, t in stored.items() if t is not None}, path, metadata=metadata)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Statistics.load(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.9999])
def test_truncated_file(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="truncated"):
        Statistics.load(saved)


def test_file_that_is_no_safetensors_file(saved):
    saved.write_text("not a safetensors file at all, but long enough to be read as a header")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Statistics.load(saved)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_foreign_safetensors_file(tmp_path, metadata):
    save_file({"lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match="not a statistics file"):
        Statistics.load(tmp_path / "adapter.safetensors")


@pytest.mark.parametrize("version", ["2", "0", ""])
def test_file_of_another_version(saved, version):
    rewrite(saved, header={"version": version})
    with pytest.raises(ValueError, match="version"):
        Statistics.load(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"header": {"moments": "{not json"}},
        {"header": {"moments": "[1, 2]"}},
        {"header": {"moments": "{}"}},
        {"header": {"provenance": "[]"}},
        {"header": {"provenance": "nothing"}},
        {"entry": (0, {"dim": 7})},
        {"entry": (0, {"dim": 0})},
        {"entry": (0, {"dim": "wide"})},
        {"entry": (0, {"count": -1})},
        {"entry": (0, {"names": []})},
        {"entry": (1, {"count": 4})},
        {"entry": (1, {"count": 2})},
        {"entry": (1, {"dim": 4})},
        {"entry": (1, {"names": ["q"]})},
        {"tensors": {"0.upper": None}},
        {"tensors": {"1.rows": None}},
        {"tensors": {"1.upper": torch.ones(36)}},
        {"tensors": {"3.upper": torch.ones(36)}},
        {"tensors": {"stray": torch.ones(1)}},
        {"tensors": {"0.upper": torch.ones(20)}},
        {"tensors": {"0.upper": torch.ones(3, 7)}},
        {"tensors": {"0.upper": torch.ones(21, dtype=torch.int64)}},
        {"tensors": {"0.upper": torch.full((21,), float("nan"))}},
        {"tensors": {"0.upper": torch.full((21,), float("inf"))}},
        {"tensors": {"1.rows": torch.full((3, 8), float("nan"))}},
    ],
    ids=str,
)
def test_header_and_tensors_that_do_not_fit(saved, change):
    rewrite(saved, **change)
    with pytest.raises(ValueError, match="damaged"):
        Statistics.load(saved)


def test_rewriting_without_a_change_is_accepted(saved):
    """The refusals above are refusals of the change, not of the rewriting."""
    rewrite(saved)
    assert_same(Statistics.load(saved), statistics_of())


def test_fields_of_a_later_library_are_ignored(saved):
    rewrite(saved, header={"provenance": json.dumps({"model": "org/model", "invented_later": 1})})
    assert Statistics.load(saved).provenance == Provenance(model="org/model")


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def disk_full(tensors, path, metadata):
        path.write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        statistics_of(seed=5).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_save_replaces_the_old_file(saved):
    expected = statistics_of(seed=5)
    expected.save(saved)
    assert_same(Statistics.load(saved), expected)
    assert list(saved.parent.iterdir()) == [saved]
