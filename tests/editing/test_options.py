"""Options of the extraction: weights of what is kept, filters of the eigenvalues, and directions that must not change."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from peft import get_peft_model
from torch import nn

from engram_peft import EngramConfig, Moment, Statistics, collect_statistics, extract_engram, merge_statistics

from .reference import pinv, relative_error, square_root
from .test_extraction import FEW, MANY, assert_unchanged, edited_layers, matrix, prepared, snapshot, weight_of
from .test_statistics import assert_same, moment_of, plain_sum, rewrite, rows_of, statistics_of


SHAPES = pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])


def sums(statistics: Statistics, name: str) -> torch.Tensor:
    """`S` of a layer in float64."""
    return statistics.covariance(name) * statistics.counts[name]


def edit_of(layer) -> torch.Tensor:
    """`f W M` in float64: what the edit takes off the weight at `alpha = 1`."""
    _, _, factor = layer.factors("default")
    return float(factor.detach().flatten()[0]) * weight_of(layer) @ matrix(layer)


def one_layer(width: int, **config):
    """A model of one square layer without a bias, with an empty adapter."""
    torch.manual_seed(0)
    linear = nn.Linear(width, width, bias=False)
    return get_peft_model(nn.Sequential(linear), EngramConfig(target_modules=["0"], **config))


# ------------------------------------------------------------------------------------------------ weighted moments


@pytest.mark.parametrize("sizes", [[3], [30], [30, 3], [3, 4]], ids=str)
@pytest.mark.parametrize("weight", [0.1, 0.5, 1, 2, 30.0, 1e6])
def test_weighted_moment_is_the_weighted_sum(sizes, weight):
    blocks = [rows_of(size, 16, seed) for seed, size in enumerate(sizes)]
    moment = Moment.merged([moment_of(block) for block in blocks])
    weighted = moment.weighted(weight)
    assert relative_error(weighted.dense(), weight * plain_sum(*blocks)) < 1e-6
    assert weighted.count == pytest.approx(weight * sum(sizes))
    assert weighted.size == moment.size == sum(sizes)
    assert relative_error(moment.dense(), plain_sum(*blocks)) < 1e-6  # the original is as it was


def test_weight_does_not_change_the_covariance():
    statistics = statistics_of()
    weighted = statistics.weighted(0.3)
    for name in statistics.moments:
        assert relative_error(weighted.covariance(name), statistics.covariance(name)) < 1e-6


def test_whole_weight_is_the_same_as_listing_the_data_that_often():
    statistics = statistics_of()
    weighted, listed = statistics.weighted(3), merge_statistics(*[statistics] * 3)
    assert weighted.counts == listed.counts
    assert {type(count) for count in weighted.counts.values()} == {int}
    for name in statistics.moments:
        assert relative_error(weighted.moments[name].dense(), listed.moments[name].dense()) < 1e-6


def test_weight_one_changes_and_copies_nothing():
    statistics = statistics_of()
    weighted = statistics.weighted(1.0)
    assert_same(weighted, statistics)
    for name, moment in statistics.moments.items():
        found = [tensor.data_ptr() for tensor in weighted.moments[name].tensors()]
        assert found == [tensor.data_ptr() for tensor in moment.tensors()]


def test_powers_of_two_are_exact():
    statistics = statistics_of()
    weighted = statistics.weighted(4)
    for name, moment in statistics.moments.items():
        assert torch.equal(weighted.moments[name].dense(), 4 * moment.dense())


def test_layers_that_share_a_moment_still_do():
    weighted = statistics_of().weighted(2.5)
    assert weighted.moments["q"] is weighted.moments["k"]
    assert len(weighted.groups()) == 3
    assert weighted.provenance == statistics_of().provenance


@pytest.mark.parametrize("weight", [0.01, 50.0])
def test_few_rows_keep_their_exact_factor_whatever_they_count_for(weight):
    rows = rows_of(4, 16)
    factor = moment_of(rows).weighted(weight).factor()
    assert factor.shape == (16, 4)
    assert relative_error(factor @ factor.mT, weight * plain_sum(rows)) < 1e-6


def test_few_rows_that_are_held_as_a_sum_keep_their_factor():
    rows = rows_of(3, 8)
    moment = Moment(8)
    moment.sums, moment.count = [[plain_sum(rows)]], 3
    factor = moment.weighted(0.7).factor()
    assert factor.shape == (8, 3)
    assert relative_error(factor @ factor.mT, 0.7 * plain_sum(rows)) < 1e-12


@pytest.mark.parametrize("parts", [[30], [5, 5]], ids=str)
def test_many_rows_have_no_factor_however_little_they_count_for(parts):
    """30 rows that count a tenth are 3 by their count, and still have rank 16."""
    blocks = [rows_of(size, 16, seed) for seed, size in enumerate(parts)]
    moment = Moment.merged([moment_of(block).weighted(0.1) for block in blocks])
    assert moment.count == pytest.approx(0.1 * sum(parts))
    assert moment.count <= 16 // 2
    assert moment.factor() is None
    assert torch.linalg.matrix_rank(moment.dense()) == min(16, sum(parts))


@pytest.mark.parametrize("size", [2, 30])
def test_rows_added_to_a_weighted_moment_count_once(size):
    rows, more = rows_of(size, 20), rows_of(7, 20, 1)
    original = moment_of(rows)
    weighted = original.weighted(5)
    weighted.add(more)
    assert relative_error(weighted.dense(), 5 * plain_sum(rows) + plain_sum(more)) < 1e-6
    assert (weighted.count, weighted.size) == (5 * size + 7, size + 7)
    assert relative_error(original.dense(), plain_sum(rows)) < 1e-6


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf])
def test_weights_that_are_no_positive_numbers_are_refused(weight):
    with pytest.raises(ValueError, match="`weight` must be a positive finite number"):
        statistics_of().weighted(weight)


@pytest.mark.parametrize("weight", [0.1, 2, 2.5])
def test_weighted_statistics_come_back_to_the_bit(tmp_path, weight):
    expected = statistics_of().weighted(weight)
    expected.save(tmp_path / "s.safetensors")
    found = Statistics.load(tmp_path / "s.safetensors")
    assert_same(found, expected)
    for name, moment in expected.moments.items():
        assert found.moments[name].size == moment.size
        assert (found.moments[name].factor() is None) == (moment.factor() is None)
    merged = merge_statistics(found, statistics_of(seed=9))
    for name, count in statistics_of().counts.items():
        assert merged.counts[name] == pytest.approx((weight + 1) * count)


@pytest.mark.parametrize(
    "entry",
    [
        (0, {"count": math.nan}),
        (0, {"count": math.inf}),
        (0, {"count": 2.5}),  # without a size
        (0, {"count": 2.5, "size": 2.5}),
        (0, {"count": 2.5, "size": -1}),
        (1, {"count": 7.5, "size": 2}),  # it holds three rows
    ],
    ids=str,
)
def test_header_with_counts_that_do_not_fit_is_refused(tmp_path, entry):
    statistics_of().save(tmp_path / "s.safetensors")
    rewrite(tmp_path / "s.safetensors", entry=entry)
    with pytest.raises(ValueError, match="damaged"):
        Statistics.load(tmp_path / "s.safetensors")


# ------------------------------------------------------------------------------------------------ weighted references


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("weight", [0.25, 30])
@SHAPES
def test_edit_with_a_weighted_reference_equals_the_dense_product(tiny_model, token_ids, kind, target_shape, weight):
    """`S_t pinv(S_t + w S_retain + S_general)`, counted by the rows' weights."""
    model, target, _ = prepared(tiny_model(kind), token_ids, target_shape)
    retain, general = (collect_statistics(model, [token_ids(10, 30, seed=seed)]) for seed in (2, 3))
    total = merge_statistics(target, retain.weighted(weight), general)
    report = extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        reference = sums(target, name) + weight * sums(retain, name) + sums(general, name)
        expected = weight_of(layer) @ sums(target, name) @ pinv(reference)
        assert relative_error(edit_of(layer), expected) < 1e-3, name
        assert report.layers[name].total_count == target.counts[name] + weight * 300 + 300
        assert report.layers[name].factor == pytest.approx(target.counts[name] / report.layers[name].total_count)


@SHAPES
def test_weight_one_gives_the_same_adapter_to_the_bit(tiny_model, token_ids, target_shape):
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape)
    extract_engram(model, target, total)
    before = snapshot(model)
    extract_engram(model, target.weighted(1), total.weighted(1))
    assert_unchanged(model, before)


@pytest.mark.parametrize("cut", ["rtol", "mp_n"])
@SHAPES
def test_weight_of_everything_cancels(tiny_model, token_ids, target_shape, cut):
    """Also where the cut asks for the number of rows: no row is seen more often."""
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape)
    plain = extract_engram(model, target, total, cut=cut)
    before = {name: edit_of(layer) for name, layer in edited_layers(model).items()}
    weighted = extract_engram(model, target.weighted(7), total.weighted(7), cut=cut)
    for name, layer in edited_layers(model).items():
        assert weighted.layers[name].kept == plain.layers[name].kept
        assert relative_error(edit_of(layer), before[name]) < 1e-3, name


@SHAPES
def test_reference_that_holds_the_target_at_less_weight_is_refused(tiny_model, token_ids, target_shape):
    model, target, _ = prepared(tiny_model("llama"), token_ids, target_shape)
    retain = collect_statistics(model, [token_ids(1, 12, seed=2)])
    before = snapshot(model)
    for given, part in ((target.weighted(2), target), (target, target.weighted(0.5))):
        with pytest.raises(ValueError, match="does not contain `target`"):
            extract_engram(model, given, merge_statistics(part, retain.weighted(50)))
    assert_unchanged(model, before)


@SHAPES
def test_reference_may_hold_the_target_at_more_weight(tiny_model, token_ids, target_shape):
    """The largest share is then 1 over the weight."""
    model, target, _ = prepared(tiny_model("llama"), token_ids, target_shape)
    retain = collect_statistics(model, [token_ids(10, 30, seed=2)])
    report = extract_engram(model, target, merge_statistics(target.weighted(2), retain))
    for name, layer in edited_layers(model).items():
        expected = weight_of(layer) @ sums(target, name) @ pinv(2 * sums(target, name) + sums(retain, name))
        assert relative_error(edit_of(layer), expected) < 1e-3, name
        assert float(report.layers[name].eigenvalues[0]) < 0.5


def test_report_and_record_show_rows_by_what_they_count_for(tiny_model, token_ids):
    model, target, _ = prepared(tiny_model("llama"), token_ids)
    retain = collect_statistics(model, [token_ids(3, 7, seed=2)])
    report = extract_engram(model, target, merge_statistics(target, retain.weighted(0.3)))
    assert {line.split()[1] for line in str(report).splitlines()[1:]} == {"10/16.3"}
    record = model.peft_config["default"].extraction
    assert (record["target_rows"], record["total_rows"]) == (10, 16.3)
    assert json.loads(json.dumps(record)) == record


# ------------------------------------------------------------------------------------------------ spectral filters


def filtered(target: torch.Tensor, total: torch.Tensor, g) -> torch.Tensor:
    """`sum_i g(lambda_i) v_i w_i^T` for `S_t pinv(S_a) = sum_i lambda_i v_i w_i^T`, from a symmetric square root of `S_a`."""
    root = square_root(total)
    inverse = torch.linalg.inv(root)
    shares, vectors = torch.linalg.eigh(inverse @ target @ inverse)
    return root @ (vectors * g(shares.clamp(0, 1))) @ vectors.mT @ inverse


FILTERS = {
    "identity": lambda shares: shares,
    "power:2": lambda shares: shares * shares,
    "power:0.5": lambda shares: shares.sqrt(),
    "threshold:0.04": lambda shares: shares.where(shares >= 0.04, torch.zeros(())),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name_of_filter", FILTERS)
@SHAPES
def test_filter_acts_on_the_eigenvalues_of_the_pencil(tiny_model, token_ids, kind, target_shape, name_of_filter):
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total, spectral_filter=name_of_filter)
    for name, layer in edited_layers(model).items():
        expected = weight_of(layer) @ filtered(sums(target, name), sums(total, name), FILTERS[name_of_filter])
        assert relative_error(edit_of(layer), expected) < 1e-3, name
        # what the report shows are the eigenvalues before the filter
        pencil = torch.linalg.eigvals(pinv(sums(total, name)) @ sums(target, name)).real.max()
        assert float(report.layers[name].eigenvalues[0]) == pytest.approx(float(pencil), rel=1e-3)


def test_filtered_share_of_a_direction():
    """3 of the 4 rows along the first axis are the target's, and 1 of the 6 along the second: 3/4 and 1/6 are taken out."""
    model = one_layer(12)
    axes = torch.eye(12)
    target = collect_statistics(model, [axes[[0, 0, 0, 1]]])
    total = merge_statistics(target, collect_statistics(model, [axes[[0, 1, 1, 1, 1, 1, 2, 3, 4]]]))
    for spec, first, second in (
        ("identity", 3 / 4, 1 / 6),
        ("power:2", 9 / 16, 1 / 36),
        ("threshold:0.5", 3 / 4, 0),
        ("threshold:0.1", 3 / 4, 1 / 6),
        (lambda shares: 1 - shares, 1 / 4, 5 / 6),
    ):
        extract_engram(model, target, total, spectral_filter=spec)
        (layer,) = edited_layers(model).values()
        expected = torch.diag(torch.tensor([first, second, *[0.0] * 10], dtype=torch.float64))
        found = float(layer.factors("default")[2].detach().flatten()[0]) * matrix(layer)
        assert float((found - expected).abs().max()) < 1e-6, spec


@SHAPES
def test_identity_is_the_default_to_the_bit(tiny_model, token_ids, target_shape):
    model, target, total = prepared(tiny_model("gpt2"), token_ids, target_shape)
    extract_engram(model, target, total)
    before = snapshot(model)
    extract_engram(model, target, total, spectral_filter="identity")
    assert_unchanged(model, before)
    assert "spectral_filter" not in model.peft_config["default"].extraction


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("spec", ["power:1", lambda shares: shares], ids=["power", "function"])
@SHAPES
def test_filter_that_changes_nothing_gives_the_same_edit(tiny_model, token_ids, kind, target_shape, spec):
    """With biases, and where the cut leaves directions out."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (1, 40))
    extract_engram(model, target, total)
    before = {name: edit_of(layer) for name, layer in edited_layers(model).items()}
    extract_engram(model, target, total, spectral_filter=spec)
    for name, layer in edited_layers(model).items():
        assert relative_error(edit_of(layer), before[name]) < 1e-3, name


@SHAPES
def test_own_filter_is_the_named_one(tiny_model, token_ids, target_shape):
    def squared(shares):
        return shares**2

    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape)
    extract_engram(model, target, total, spectral_filter="power:2")
    before, record = snapshot(model), model.peft_config["default"].extraction
    assert record["spectral_filter"] == "power:2"
    extract_engram(model, target, total, spectral_filter=squared)
    assert_unchanged(model, before)
    extract_engram(model, target, total, spectral_filter=math_of_shares)
    assert model.peft_config["default"].extraction["spectral_filter"] == "math_of_shares"


def math_of_shares(shares):
    return shares


@SHAPES
def test_own_filter_is_handed_the_shares(tiny_model, token_ids, target_shape):
    seen = []

    def look(shares):
        seen.append(shares.clone())
        return shares.zero_()  # the filter's own copy

    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total, spectral_filter=look)
    groups = {id(d._group): d for d in report.layers.values()}
    assert len(seen) == len(groups)
    for shares, diagnostics in zip(seen, groups.values(), strict=True):
        assert shares.dtype == torch.float64
        assert torch.equal(shares, diagnostics.eigenvalues[: len(shares)].clamp_max(1))
        assert bool((shares[1:] <= shares[:-1]).all()) and bool((shares > 0).all())
    assert all(float(d.eigenvalues[0]) > 0 for d in report.layers.values())


@SHAPES
def test_filter_that_lets_nothing_pass_is_an_identity_adapter(tiny_model, token_ids, target_shape):
    ids = token_ids(2, 6, seed=9)
    model, target, total = prepared(tiny_model("gpt2"), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total, spectral_filter=lambda shares: shares * 0)
    assert {d.rank for d in report.layers.values()} == {1}
    assert torch.equal(model(ids).logits, tiny_model("gpt2")(ids).logits)


@SHAPES
def test_threshold_keeps_as_many_directions_as_have_the_share(tiny_model, token_ids, target_shape):
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total, spectral_filter="threshold:0.1")
    for name, layer in edited_layers(model).items():
        pencil = torch.linalg.eigvals(pinv(sums(total, name)) @ sums(target, name)).real
        above = int((pencil >= 0.1).sum())
        assert report.layers[name].rank == max(1, min(above, layer.out_features)), name


@pytest.mark.parametrize("rank", [1, 4])
@SHAPES
def test_rank_k_of_a_filtered_edit_is_optimal_in_the_error_of_the_output(tiny_model, token_ids, target_shape, rank):
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape, (16, 40), r=rank)
    extract_engram(model, target, total, spectral_filter="power:2")
    for name, layer in edited_layers(model).items():
        root = square_root(sums(total, name))
        full = weight_of(layer) @ filtered(sums(target, name), sums(total, name), FILTERS["power:2"])
        left_out = torch.linalg.svdvals(full @ root)[rank:].norm()
        assert float(((full - edit_of(layer)) @ root).norm()) == pytest.approx(float(left_out), rel=1e-3), name


def test_filtered_edit_of_high_rank_is_stored_as_a_whole(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids, MANY, (16, 40), target_modules=["up_proj"])
    report = extract_engram(model, target, total, spectral_filter="power:2")
    assert set(model.peft_config["default"].rank_pattern.values()) == {0}
    for name, layer in edited_layers(model).items():
        expected = filtered(sums(target, name), sums(total, name), FILTERS["power:2"])
        share = target.counts[name] / total.counts[name]
        assert relative_error(share * matrix(layer), expected) < 1e-3
        assert report.layers[name].rank == layer.in_features


BAD_FILTERS = [
    "",
    "power",
    "power:",
    "power:0",
    "power:-1",
    "power:inf",
    "power:two",
    "threshold:0",
    "threshold:1",
    "root:2",
    None,
    2.0,
]


@pytest.mark.parametrize("spec", BAD_FILTERS, ids=str)
def test_unknown_filters_are_refused_before_work(tiny_model, spec):
    """Before the statistics are looked at."""
    model = get_peft_model(tiny_model("llama"), EngramConfig())
    with pytest.raises(ValueError, match="`spectral_filter` must be"):
        extract_engram(model, None, None, spectral_filter=spec)


@pytest.mark.parametrize(
    "wrong",
    [lambda s: s[:-1], lambda s: s[None], lambda s: s / 0, lambda s: s * math.nan, lambda s: 1.0, lambda s: None],
    ids=["short", "shape", "infinite", "nan", "number", "none"],
)
@SHAPES
def test_filter_that_returns_no_tensor_of_shares_is_refused(tiny_model, token_ids, target_shape, wrong):
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape)
    before = snapshot(model)
    with pytest.raises(ValueError, match="`spectral_filter` must return a finite number"):
        extract_engram(model, target, total, spectral_filter=wrong)
    assert_unchanged(model, before)


@SHAPES
def test_reference_without_the_target_is_refused_with_a_filter_too(tiny_model, token_ids, target_shape):
    model = get_peft_model(tiny_model("llama"), EngramConfig())
    target = collect_statistics(model, [token_ids(*target_shape, seed=1)])
    retain = collect_statistics(model, [token_ids(3, 30, seed=2)])
    with pytest.raises(ValueError, match="does not contain `target`"):
        extract_engram(model, target, retain, spectral_filter="power:2")


# ------------------------------------------------------------------------------------------------ null space


def projector(protected: torch.Tensor, threshold: float) -> torch.Tensor:
    """`P` onto the eigenvectors of a moment with at most `threshold` times the largest eigenvalue."""
    eigenvalues, vectors = torch.linalg.eigh(protected)
    free = vectors[:, eigenvalues <= threshold * eigenvalues.max()]
    return free @ free.mT


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("absorb_bias", [True, False])
@SHAPES
def test_what_the_null_space_uses_is_mapped_to_zero(tiny_model, token_ids, kind, target_shape, absorb_bias):
    """Twelve protected rows, to the rounding of float32."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40), absorb_bias=absorb_bias)
    protected = collect_statistics(model, [token_ids(1, 12, seed=5)])
    extract_engram(model, target, total, null_space=protected, null_space_threshold=1e-10)
    for name, layer in edited_layers(model).items():
        m = matrix(layer)
        rows = torch.cat(protected.moments[name].rows).double()[:, : m.shape[1]]
        assert float((m @ rows.mT).norm()) < 1e-5 * float(m.norm() * rows.norm()), name
        assert float(m.norm()) > 0


@pytest.mark.parametrize("target_rows", [4, 30])
def test_layer_says_what_it_said_about_protected_inputs(target_rows):
    generator = torch.Generator().manual_seed(0)
    x_target, x_retain, x_null = (torch.randn(n, 16, generator=generator) for n in (target_rows, 60, 5))
    model = one_layer(16)
    plain = {key: model(x).detach() for key, x in (("null", x_null), ("target", x_target))}
    target = collect_statistics(model, [x_target])
    total = merge_statistics(target, collect_statistics(model, [x_retain]))
    null_space = collect_statistics(model, [x_null])
    extract_engram(model, target, total, null_space=null_space, null_space_threshold=1e-10)
    assert relative_error(model(x_null), plain["null"]) < 1e-5
    assert relative_error(model(x_target), plain["target"]) > 0.05


@pytest.mark.parametrize("target_rows", [4, 30])
def test_constrained_edit_is_the_least_squares_optimum(target_rows):
    """Of `sum_target |x - M x|^2 + sum_retain |M x|^2` with `M x = 0` on protected rows: solved here row by row of `M` over a basis
    of what is orthogonal to them. Projecting the free optimum afterwards does worse.
    """
    generator = torch.Generator().manual_seed(1)
    x_target, x_retain, x_null = (torch.randn(n, 16, generator=generator) for n in (target_rows, 60, 5))
    x_null += x_target[:1]  # the two have something in common
    model = one_layer(16)
    target = collect_statistics(model, [x_target])
    total = merge_statistics(target, collect_statistics(model, [x_retain]))
    null_space = collect_statistics(model, [x_null])
    extract_engram(model, target, total, null_space=null_space, null_space_threshold=1e-10)
    (layer,) = edited_layers(model).values()
    found = target_rows / (target_rows + 60) * matrix(layer)

    x, wanted = torch.cat([x_target, x_retain]).double(), torch.cat([x_target, torch.zeros(60, 16)]).double()
    orthogonal = torch.linalg.svd(x_null.double()).Vh[5:].mT  # (16, 11)
    best = (orthogonal @ torch.linalg.lstsq(x @ orthogonal, wanted).solution).mT
    assert relative_error(found, best) < 1e-5

    def loss(m):
        return float((x @ m.mT - wanted).square().sum())

    afterwards = torch.linalg.lstsq(x, wanted).solution.mT @ orthogonal @ orthogonal.mT
    assert loss(found) < 0.99 * loss(afterwards)


@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize("threshold", [0.01, 0.05])
@SHAPES
def test_constrained_edit_equals_the_dense_product(tiny_model, token_ids, kind, target_shape, threshold):
    """`W C_t P (P C_a P)^+ P`. Many protected rows leave what they use least."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40))
    protected = collect_statistics(model, [token_ids(20, 30, seed=5)])
    names = [name for name in target.moments if leaves_something(protected, total, name, threshold)]
    model = get_peft_model(tiny_model(kind), EngramConfig(target_modules=names))
    report = extract_engram(model, target, total, null_space=protected, null_space_threshold=threshold)
    assert len(edited_layers(model)) == len(names) > 1
    for name, layer in edited_layers(model).items():
        p = projector(protected.covariance(name), threshold)
        reference = total.covariance(name)
        silent = len(reference) * 2.0**-23 * torch.linalg.matrix_norm(reference, 2)
        inverse = torch.linalg.pinv(p @ reference @ p, atol=silent, rtol=0.0, hermitian=True)
        expected = weight_of(layer) @ target.covariance(name) @ p @ inverse @ p
        assert relative_error(weight_of(layer) @ matrix(layer), expected) < 1e-3, name
        assert report.layers[name].kept <= round(float(p.trace())) < report.layers[name].width
        covered = (p @ target.covariance(name) @ p).trace() / target.covariance(name).trace()
        assert report.layers[name].coverage == pytest.approx(float(covered), rel=1e-2)
        assert float(report.layers[name].eigenvalues[0]) <= 1.001


def leaves_something(protected: Statistics, total: Statistics, name: str, threshold: float) -> bool:
    """A LayerNorm with its bias leaves a direction that nothing uses."""
    p, reference = projector(protected.covariance(name), threshold), total.covariance(name)
    return float(torch.linalg.matrix_norm(p @ reference @ p, 2)) > 1e-5 * float(torch.linalg.matrix_norm(reference, 2))


def test_default_threshold_is_a_thousandth_of_the_largest():
    """Along each axis the protected rows carry another share of what the first carries."""
    model = one_layer(8)
    protected = collect_statistics(
        model, [torch.diag(torch.tensor([1.0, 0.011, 1e-3, 1.1e-3, 0.9e-3, 0, 0, 0]).sqrt())]
    )
    target = collect_statistics(model, [torch.eye(8)])
    total = merge_statistics(target, collect_statistics(model, [torch.eye(8).repeat(3, 1)]))
    extract_engram(model, target, total, null_space=protected)
    (layer,) = edited_layers(model).values()
    found = float(layer.factors("default")[2].detach().flatten()[0]) * matrix(layer)
    expected = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64) / 4
    found, expected = torch.cat([found.diagonal()[:2], found.diagonal()[3:]]), expected[[0, 1, 3, 4, 5, 6, 7]]
    assert float((found - expected).abs().max()) < 1e-6


@SHAPES
def test_null_space_that_has_nothing_in_common_with_the_rest_changes_nothing(target_shape):
    """Target and reference live on the first eight axes, what is protected on the last two."""
    generator = torch.Generator().manual_seed(3)
    x = torch.zeros(80, 10)
    x[:, :8] = torch.randn(80, 8, generator=generator)
    rows = 3 if target_shape == FEW else 40
    model = one_layer(10)
    target = collect_statistics(model, [x[:rows]])
    total = merge_statistics(target, collect_statistics(model, [x[rows:]]))
    protected = collect_statistics(model, [torch.eye(10)[8:]])
    extract_engram(model, target, total)
    (layer,) = edited_layers(model).values()
    free = matrix(layer)
    report = extract_engram(model, target, total, null_space=protected)
    assert relative_error(matrix(layer), free) < 1e-5
    assert report.layers["0"].coverage == pytest.approx(1)


@SHAPES
def test_filter_acts_within_the_null_space(tiny_model, token_ids, target_shape):
    """On the eigenvalues of the pencil of what is left: `(V^T S_t V, V^T S_a V)`."""
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape, (16, 40))
    protected = collect_statistics(model, [token_ids(1, 9, seed=5)])
    report = extract_engram(
        model, target, total, null_space=protected, null_space_threshold=1e-8, spectral_filter="power:2"
    )
    for name, layer in edited_layers(model).items():
        eigenvalues, vectors = torch.linalg.eigh(protected.covariance(name))
        v = vectors[:, eigenvalues <= 1e-8 * eigenvalues[-1]]
        inverse = torch.linalg.inv(square_root(v.mT @ sums(total, name) @ v))
        shares, u = torch.linalg.eigh(inverse @ v.mT @ sums(target, name) @ v @ inverse)
        m = sums(target, name) @ v @ inverse @ (u * shares.clamp_min(0)) @ u.mT @ inverse @ v.mT
        assert relative_error(edit_of(layer), weight_of(layer) @ m) < 1e-3, name
        assert float(report.layers[name].eigenvalues[0]) == pytest.approx(float(shares[-1]), rel=1e-4)


def test_siblings_with_different_null_spaces_get_different_edits(tiny_model, token_ids):
    """They share their inputs, but what must not change may come from anywhere."""
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
    model, target, total = prepared(tiny_model("llama"), token_ids, target_modules=names)
    rows = {name: rows_of(4, 32, seed) for seed, name in enumerate(names)}
    protected = Statistics({name: moment_of(x) for name, x in rows.items()})
    extract_engram(model, target, total, null_space=protected, null_space_threshold=1e-8)
    layers = edited_layers(model)
    for name in names:
        m = matrix(layers[name])
        for other in names:
            left = float((m @ rows[other].double().mT).norm() / (m.norm() * rows[other].norm()))
            assert left < 1e-5 if name == other else left > 1e-2


def test_null_space_is_recorded(tiny_model, tiny_tokenizer):
    model, tokenizer = get_peft_model(tiny_model("llama"), EngramConfig()), tiny_tokenizer()
    target, retain, protected = (
        collect_statistics(model, texts, tokenizer=tokenizer)
        for texts in (["one two three"], ["a red bird"], ["rome is old", "a dog"])
    )
    total = merge_statistics(target, retain)
    extract_engram(model, target, total)
    assert not [key for key in model.peft_config["default"].extraction if key.startswith("null_space")]
    extract_engram(model, target, total, null_space=protected.weighted(0.5), null_space_threshold=0.01)
    record = model.peft_config["default"].extraction
    assert (record["null_space_threshold"], record["null_space_rows"], record["null_space_texts"]) == (0.01, 2.5, 2)
    assert json.loads(json.dumps(record)) == record


@SHAPES
def test_released_report_of_a_constrained_edit_says_what_it_said_before(tiny_model, token_ids, target_shape):
    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape)
    protected = collect_statistics(model, [token_ids(1, 9, seed=5)])
    text = str(extract_engram(model, target, total, null_space=protected))
    report = extract_engram(model, target, total, null_space=protected).release()
    assert str(report) == text
    assert all(d._group.constraint is None for d in report.layers.values())


@pytest.fixture
def constrained(tiny_model, token_ids):
    """A model with a filled adapter, and a check that a null space is refused and changes nothing."""
    model, target, total = prepared(tiny_model("llama"), token_ids)
    extract_engram(model, target, total)
    before, config = snapshot(model), model.peft_config["default"].to_dict()

    def refused(message, null_space, **options):
        with pytest.raises(ValueError, match=message):
            extract_engram(model, target, total, null_space=null_space, **options)
        assert_unchanged(model, before)
        assert model.peft_config["default"].to_dict() == config

    refused.model, refused.target = model, target
    return refused


def test_null_space_that_leaves_only_silence_is_refused(tiny_model, token_ids):
    """Its one free direction is that of the LayerNorm, in which all inputs are zero up to rounding."""
    model, target, total = prepared(tiny_model("opt"), token_ids, target_modules=["q_proj"])
    silent = {name: torch.linalg.eigh(total.covariance(name))[1][:, :1] for name in total.moments}
    protected = Statistics({name: moment_of((torch.eye(len(v)) - v @ v.mT).float()) for name, v in silent.items()})
    for name, v in silent.items():
        assert float((v.mT @ total.covariance(name) @ v).abs()) < 1e-6
    with pytest.raises(ValueError, match=r"`null_space` uses every direction of model.*q_proj that `total` does"):
        extract_engram(model, target, total, null_space=protected, null_space_threshold=0.5)


def test_null_space_that_leaves_nothing_is_refused_with_the_layer(constrained):
    everywhere = Statistics(
        {name: moment_of(100 * torch.eye(m.dim)) for name, m in constrained.target.moments.items()}
    )
    constrained(r"`null_space` uses every direction of model\.layers\.0", everywhere)


def test_null_space_of_another_model_is_refused(constrained, tiny_model, token_ids):
    constrained("different models", collect_statistics(tiny_model("qwen3"), [token_ids(1, 9)]))


def test_null_space_with_a_missing_layer_is_refused(constrained):
    moments = {name: m for name, m in constrained.target.moments.items() if "up_proj" not in name}
    constrained("`null_space` holds no statistics of .*up_proj", Statistics(moments))


def test_null_space_that_was_never_fed_is_refused(constrained):
    empty = Statistics({name: Moment(m.dim) for name, m in constrained.target.moments.items()})
    constrained("`null_space` holds no rows", empty)


def test_null_space_with_nan_is_refused(constrained):
    bad = Statistics(
        {name: moment_of(torch.full((2, m.dim), math.nan)) for name, m in constrained.target.moments.items()}
    )
    constrained("`null_space` holds NaN", bad)


@pytest.mark.parametrize("threshold", [0, 1, -0.5, math.nan])
def test_thresholds_out_of_range_are_refused(constrained, threshold):
    constrained("`null_space_threshold`", constrained.target, null_space_threshold=threshold)


def test_null_space_may_hold_other_rows_than_target_and_total(tiny_model, tiny_tokenizer):
    """Rows at answers may be protected while rows that predict answers are edited; another tokenizer is another matter."""
    model, tokenizer = get_peft_model(tiny_model("llama"), EngramConfig()), tiny_tokenizer()
    target, retain = (
        collect_statistics(model, texts, tokenizer=tokenizer, token_position="predict")
        for texts in (["one two three"], ["a red bird in a tree"])
    )
    protected = collect_statistics(model, ["rome is old"], tokenizer=tokenizer, token_position="answer")
    total = merge_statistics(target, retain)
    extract_engram(model, target, total, null_space=protected)
    assert model.peft_config["default"].extraction["mask"] == "predict"
    with pytest.raises(ValueError, match="different tokenizers"):
        extract_engram(
            model,
            target,
            total,
            null_space=replace(protected, provenance=replace(protected.provenance, tokenizer="9:9")),
        )
