"""From statistics to an adapter: against dense float64 algebra and the reference's edits."""

from __future__ import annotations

import math

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from engram_peft import (
    EngramConfig,
    Moment,
    Statistics,
    collect_statistics,
    compose,
    count_ratio,
    effective_rank,
    extract_engram,
    merge_statistics,
    weight_norm,
)

from .reference import covariance_of, pinv, relative_error, square_root


KINDS = ["llama", "qwen3", "gpt2", "opt"]
# widths are 32 and 48, so up to 16 target rows every layer keeps the rows, from 25 on every layer keeps the sum
FEW, MANY = (2, 5), (4, 20)


def edited_layers(model, adapter_name="default"):
    """The adapter's layers by name."""
    base = model.get_base_model()
    return {name: m for name, m in base.named_modules() if adapter_name in getattr(m, "engram_A", ())}


def matrix(layer, adapter_name="default"):
    """`M` in float64, without the factor."""
    right, left, _ = layer.factors(adapter_name)
    return (left.double() @ right.double()).detach()


def weight_of(layer, with_bias=True):
    """`[W | b]` or `W` of the base layer in float64, `(out, width)`."""
    base = layer.get_base_layer()
    weight = base.weight.detach().double()
    weight = weight.mT if isinstance(base, Conv1D) else weight
    if with_bias and base.bias is not None:
        weight = torch.cat([weight, base.bias.detach().double()[:, None]], dim=1)
    return weight


def prepared(model, token_ids, target_shape=FEW, retain_shape=(8, 30), **config):
    """A model with an empty adapter, and statistics of target and total."""
    model = get_peft_model(model, EngramConfig(**config))
    target = collect_statistics(model, [token_ids(*target_shape, seed=1)])
    retain = collect_statistics(model, [token_ids(*retain_shape, seed=2)])
    return model, target, merge_statistics(target, retain)


def above_the_cut(covariance):
    """How many eigenvalues are above `dim 2^-23` times the largest."""
    eigenvalues = torch.linalg.eigvalsh(covariance)
    return int((eigenvalues > len(covariance) * 2.0**-23 * eigenvalues[-1]).sum())


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, before):
    state = model.state_dict()
    assert set(state) == set(before)
    assert all(torch.equal(state[name], before[name]) for name in before)


# ------------------------------------------------------------------------------------------------ against dense algebra


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
def test_edit_equals_the_dense_product(tiny_model, token_ids, kind, target_shape):
    """`W M = W C_t pinv(C_a)`; `M` itself where the layer has at least as many outputs as inputs.

    After a LayerNorm with its bias one direction is empty, as its outputs lie in a plane; nothing else is cut here.
    """
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        width = report.layers[name].width
        assert report.layers[name].kept == above_the_cut(total.covariance(name)) >= width - (kind in ("gpt2", "opt"))
        expected = target.covariance(name) @ pinv(total.covariance(name))
        weight = weight_of(layer)
        assert relative_error(weight @ matrix(layer), weight @ expected) < 1e-4, name
        if layer.out_features > layer.in_features:
            assert relative_error(matrix(layer), expected) < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_shape", [(1, 5), (1, 26)], ids=["few", "many"])
def test_edit_equals_the_dense_product_where_the_cut_bites(tiny_model, token_ids, kind, target_shape):
    """31 rows or fewer leave every layer with directions that are cut."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (1, 5))
    report = extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        reference = total.covariance(name)
        assert report.layers[name].kept == above_the_cut(reference) <= total.counts[name] < len(reference)
        expected = target.covariance(name) @ pinv(reference)
        weight = weight_of(layer)
        assert relative_error(weight @ matrix(layer), weight @ expected) < 1e-3, name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
def test_ridge_equals_the_damped_inverse(tiny_model, token_ids, kind, target_shape):
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape)
    extract_engram(model, target, total, cut="ridge", ridge_delta=0.01)
    for name, layer in edited_layers(model).items():
        reference = total.covariance(name)
        damped = reference + 0.01 * torch.linalg.matrix_norm(reference, 2) * torch.eye(len(reference))
        weight = weight_of(layer)
        expected = weight @ target.covariance(name) @ torch.linalg.inv(damped)
        assert relative_error(weight @ matrix(layer), expected) < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_output_of_the_adapter_is_that_of_the_edited_weights(tiny_model, token_ids, kind):
    """Merged by hand in float64: `W - alpha n/N W C_t pinv(C_a)`, bias included."""
    model, target, total = prepared(tiny_model(kind), token_ids, MANY, (16, 40), alpha=0.6)
    extract_engram(model, target, total)
    plain = tiny_model(kind)
    ids = token_ids(3, 7, seed=5)
    untouched = plain(ids).logits
    for name in target.moments:
        layer = plain.get_submodule(name)
        share = 0.6 * target.counts[name] / total.counts[name]
        weight = layer.weight.double().mT if isinstance(layer, Conv1D) else layer.weight.double()
        if layer.bias is not None:
            weight = torch.cat([weight, layer.bias.double()[:, None]], dim=1)
        weight = weight - share * weight @ target.covariance(name) @ pinv(total.covariance(name))
        with torch.no_grad():
            inner = weight[:, :-1] if layer.bias is not None else weight
            layer.weight.copy_(inner.mT if isinstance(layer, Conv1D) else inner)
            if layer.bias is not None:
                layer.bias.copy_(weight[:, -1])
    assert relative_error(model(ids).logits, plain(ids).logits) < 1e-4
    assert relative_error(untouched, plain(ids).logits) > 1e-2


def test_alpha_one_takes_out_all_of_what_only_the_target_uses():
    """A direction of the target's alone is projected away, one of the rest's alone is left as it is."""
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8, bias=False)), EngramConfig(target_modules=["0"]))
    axes = torch.eye(8)
    target = collect_statistics(model, [axes[:2].repeat(3, 1)])
    total = merge_statistics(target, collect_statistics(model, [axes[2:].repeat(5, 1)]))
    plain = model(axes).detach()
    with model.disable_adapter():
        plain = model(axes)
    extract_engram(model, target, total)
    edited = model(axes)
    assert edited[:2].norm() < 1e-5 * plain.norm()
    assert relative_error(edited[2:], plain[2:]) < 1e-6


def test_edits_of_siblings_share_their_inverse_and_not_their_factors(tiny_model, token_ids):
    """Without a cap on the rank, `q`, `k` and `v` of one block are edited by one `M`, as far as their outputs show it."""
    model, target, total = prepared(tiny_model("opt"), token_ids, target_modules=["q_proj", "k_proj", "v_proj"])
    extract_engram(model, target, total)
    by_name = edited_layers(model)
    q, k = (by_name[f"model.decoder.layers.0.self_attn.{n}_proj"] for n in "qk")
    assert relative_error(matrix(q), matrix(k)) < 1e-6
    assert q.factors("default")[0].data_ptr() != k.factors("default")[0].data_ptr()


def test_half_precision_model_gets_the_same_edit(tiny_model, token_ids):
    """Factors take the dtype of PEFT's adapters; the edit is computed in float64 from the statistics."""
    model, target, total = prepared(tiny_model("llama", torch.bfloat16), token_ids)
    extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        expected = target.covariance(name) @ pinv(total.covariance(name))
        weight = weight_of(layer)
        assert relative_error(weight @ matrix(layer), weight @ expected) < 1e-2, name


# ------------------------------------------------------------------------------------------------ the reference


MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}


@pytest.fixture
def reference_edit(oracle):
    """`reference_edit(kind, **options)`: the reference's model and data; model with adapter, target, total and report."""

    def make(kind, **options):
        facts = oracle.facts[kind]
        config_cls, model_cls = MODELS[kind]
        model = model_cls(config_cls(**facts["config"])).eval()
        model.load_state_dict(oracle.state_dict(f"{kind}.before."), strict=False)
        batch = {name: oracle.tensors[f"{kind}.{name}"] for name in ("input_ids", "attention_mask", "labels")}
        first, last = facts["target_rows"]
        assert facts["total_rows"] == [0, 6]
        assert first == 0
        experts = {name.rpartition(".")[0] for name in facts["layers"] if ".experts." in name}
        layers = [name for name in facts["layers"] if ".experts." not in name]
        config = EngramConfig(target_modules=layers, target_parameters=sorted(experts) or None, alpha=facts["alpha"])
        model = get_peft_model(model, config)
        target = collect_statistics(model, [{name: t[:last] for name, t in batch.items()}])
        retain = collect_statistics(model, [{name: t[last:] for name, t in batch.items()}])
        total = merge_statistics(target, retain)
        return model, target, total, extract_engram(model, target, total, **options)

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_counts_and_distinct_inputs_equal_the_reference(oracle, reference_edit, kind):
    _, target, total, _ = reference_edit(kind)
    assert target.counts == oracle.facts[kind]["counts_target"]
    assert total.counts == oracle.facts[kind]["counts_total"]
    assert len(total.groups()) == oracle.facts[kind]["distinct_covariances"]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("untie", [True, False])
def test_merged_weights_equal_the_reference(oracle, reference_edit, kind, untie):
    """Every weight and bias after the edit. The reference rewrites GPT-2's embedding through its tied head; only our head does."""
    model = reference_edit(kind)[0]
    if kind == "gpt2" and not untie:
        with pytest.raises(ValueError, match="untie"):
            model.merge_and_unload(untie=untie)
        return
    merged = model.merge_and_unload(untie=untie).state_dict()
    before, after = oracle.state_dict(f"{kind}.before."), oracle.state_dict(f"{kind}.after.")
    if kind == "gpt2":
        after["lm_head.weight"] = after.pop("transformer.wte.weight")
        assert torch.equal(merged["transformer.wte.weight"], before["transformer.wte.weight"])
    for name, expected in after.items():
        assert relative_error(merged[name], expected) < oracle.facts["tolerance"][kind], name
        start = before.get(name, before.get("transformer.wte.weight"))
        # the tolerance is one of the change, too
        assert relative_error(merged[name] - start, expected - start) < 10 * oracle.facts["tolerance"][kind], name
    for name in before.keys() - after.keys():
        assert torch.equal(merged[name], before[name]), name


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_logits_equal_the_reference_merged_and_unmerged(oracle, reference_edit, kind):
    """The reference keeps those of the last position."""
    model = reference_edit(kind)[0]
    batch = {name: oracle.tensors[f"{kind}.{name}"] for name in ("input_ids", "attention_mask")}
    expected = oracle.tensors[f"{kind}.logits_after"]
    assert relative_error(model(**batch).logits[:, -1], expected) < oracle.facts["tolerance"][kind]
    merged = model.merge_and_unload()
    assert relative_error(merged(**batch).logits[:, -1], expected) < oracle.facts["tolerance"][kind]


def test_logits_of_gpt2_equal_the_reference_once_the_embedding_is_rewritten_as_well(oracle, reference_edit):
    merged = reference_edit("gpt2")[0].merge_and_unload(untie=True)
    batch = {name: oracle.tensors[f"gpt2.{name}"] for name in ("input_ids", "attention_mask")}
    expected = oracle.tensors["gpt2.logits_after"]
    assert relative_error(merged(**batch).logits[:, -1], expected) > 0.01
    merged.transformer.wte.weight.data.copy_(merged.lm_head.weight)
    assert relative_error(merged(**batch).logits[:, -1], expected) < oracle.facts["tolerance"]["gpt2"]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scale", ["weight_norm", "effective_rank"])
def test_factors_equal_the_reference(oracle, reference_edit, kind, scale):
    report = reference_edit(kind, scale=scale)[3]
    found = {name: diagnostics.factor for name, diagnostics in report.layers.items()}
    expected = oracle.facts[kind][f"{scale}_f"]
    assert found == pytest.approx(expected, rel=oracle.facts["tolerance"][kind])


@pytest.mark.parametrize("layer", ["lin24", "lin64"])
def test_default_edit_of_a_layer_equals_the_reference(oracle, layer):
    weight = oracle.tensors[f"{layer}.W"]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    model = get_peft_model(nn.Sequential(linear), EngramConfig(target_modules=["0"], alpha=0.6))
    given = []
    for name, count in (("target", oracle.facts[layer]["n"]), ("total", oracle.facts[layer]["N"])):
        if layer == "lin24":  # its rows are among the data
            given.append(collect_statistics(model, [oracle.tensors[f"lin24.X_{name}"]]))
            assert given[-1].counts == {"0": count}
            assert relative_error(given[-1].covariance("0"), oracle.tensors[f"lin24.C_{name}"]) < 1e-6
        else:
            moment = Moment(weight.shape[1])
            moment.sums, moment.count = [[oracle.tensors[f"lin64.C_{name}"].double() * count]], count
            given.append(Statistics({"0": moment}))
    report = extract_engram(model, *given)
    assert report.layers["0"].kept == oracle.facts[layer]["rank"]["rtol"]
    assert report.layers["0"].weight_norm == pytest.approx(oracle.facts[layer]["weight_fro"], rel=1e-5)
    merged = model.merge_and_unload()[0].weight
    assert relative_error(merged, oracle.tensors[f"{layer}.W_edited_default_alpha0.6"]) < 1e-4


@pytest.mark.parametrize("case", ["linear", "linear_off", "conv1d"])
def test_bias_is_edited_as_the_reference_does(oracle, case):
    facts = oracle.facts["bias"][case]
    weight, bias = oracle.tensors["bias.W"], oracle.tensors["bias.b"]
    if case == "conv1d":
        layer = Conv1D(*weight.shape)
        layer.weight.data.copy_(weight.mT)
    else:
        layer = nn.Linear(*weight.shape[::-1])
        layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    config = EngramConfig(target_modules=["0"], alpha=facts["alpha"], absorb_bias=facts["absorbed"])
    model = get_peft_model(nn.Sequential(layer), config)
    target, total = (collect_statistics(model, [oracle.tensors[f"bias.X_{name}"]]) for name in ("target", "total"))
    assert (target.counts, total.counts) == ({"0": facts["n"]}, {"0": facts["N"]})
    tolerance = oracle.facts["tolerance"][f"bias.{case}"]
    assert (
        relative_error(total.covariance("0")[: facts["D"], : facts["D"]], oracle.tensors[f"bias.{case}.C_total"])
        < 1e-6
    )
    report = extract_engram(model, target, total)
    assert report.layers["0"].width == facts["D"]
    x = oracle.tensors["bias.X_total"]
    unmerged = model(x)
    merged = model.merge_and_unload()
    assert relative_error(merged[0].weight, oracle.tensors[f"bias.{case}.W_edited"]) < tolerance
    assert relative_error(merged[0].bias, oracle.tensors[f"bias.{case}.b_edited"]) < tolerance
    assert torch.equal(merged[0].bias, bias) == (case == "linear_off")
    assert relative_error(unmerged, merged(x)) < 1e-5


# ------------------------------------------------------------------------------------------------ rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("rank", [1, 4])
def test_rank_k_is_optimal_in_the_error_of_the_output(tiny_model, token_ids, kind, target_shape, rank):
    """`||W (M - M_k) C_a^(1/2)||` is the norm of the singular values that are left out, and no rank `k` does better."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40), r=rank)
    extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        reference = total.covariance(name)
        root, weight = square_root(reference), weight_of(layer)
        full = weight @ target.covariance(name) @ pinv(reference)
        left_out = torch.linalg.svdvals(full @ root)[rank:].norm()
        found = (full - weight @ matrix(layer)) @ root
        assert layer.factors("default")[0].shape[0] == rank
        assert float(found.norm()) == pytest.approx(float(left_out), rel=1e-4), name


def test_rank_k_is_optimal_for_the_sum_over_siblings(tiny_model, token_ids):
    """Each of `q`, `k` and `v` has the best `M_k` for its own weight, so their errors add up to the least possible sum."""
    model, target, total = prepared(
        tiny_model("llama"), token_ids, MANY, target_modules=["q_proj", "k_proj", "v_proj"], r=3
    )
    extract_engram(model, target, total)
    found = least = shared = 0.0
    layers = {n: layer for n, layer in edited_layers(model).items() if ".1." in n}
    full = {n: weight_of(layer) @ target.covariance(n) @ pinv(total.covariance(n)) for n, layer in layers.items()}
    root = square_root(total.covariance(next(iter(layers))))
    stacked = torch.cat([full[n] @ root for n in layers])
    shared = float(torch.linalg.svdvals(stacked)[3:].square().sum())
    for name, layer in layers.items():
        found += float(((full[name] - weight_of(layer) @ matrix(layer)) @ root).square().sum())
        least += float(torch.linalg.svdvals(full[name] @ root)[3:].square().sum())
    assert found == pytest.approx(least, rel=1e-4)
    assert found < shared


def test_rank_that_the_data_do_not_fill_keeps_what_there_is(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids, (1, 3), r=20)
    report = extract_engram(model, target, total)
    assert {d.rank for d in report.layers.values()} == {3}


def test_rank_pattern_holds_and_extraction_records_what_it_found(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids, r=5, rank_pattern={"down_proj": 2})
    report = extract_engram(model, target, total)
    ranks = {name: layer.factors("default")[0].shape[0] for name, layer in edited_layers(model).items()}
    assert ranks == {name: 2 if name.endswith("down_proj") else 5 for name in ranks}
    assert ranks == {name: d.rank for name, d in report.layers.items()}
    assert model.peft_config["default"].rank_pattern == {f"^{name}": rank for name, rank in ranks.items()}


def test_ranks_of_layers_whose_names_end_alike_come_back(tmp_path):
    """PEFT reads a pattern `fc` as any name that ends in `.fc`."""

    def plain():
        torch.manual_seed(0)
        return nn.ModuleDict({"fc": nn.Linear(16, 16), "block": nn.ModuleDict({"fc": nn.Linear(16, 16)})})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = plain()

        def forward(self, x):
            return self.layers["fc"](x) + self.layers["block"]["fc"](x[:, :1] * torch.ones(16))

    model = get_peft_model(Model(), EngramConfig(target_modules=["fc"]))
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    target, total = collect_statistics(model, [x[:4]]), collect_statistics(model, [x[4:]])
    report = extract_engram(model, target, merge_statistics(target, total))
    assert len({d.rank for d in report.layers.values()}) == 2
    model.save_pretrained(tmp_path)
    assert torch.equal(PeftModel.from_pretrained(Model(), tmp_path)(x), model(x))


@pytest.mark.parametrize("rank", [None, 3])
def test_second_extraction_asks_for_the_same_rank(tiny_model, token_ids, rank):
    """What the first one found must not cap the second."""
    model, target, total = prepared(tiny_model("llama"), token_ids, (1, 2), r=rank)
    extract_engram(model, target, total)
    more = collect_statistics(model, [torch.arange(10, 24).view(2, 7)])
    report = extract_engram(model, more, merge_statistics(more, total))
    assert {d.rank for d in report.layers.values()} == {rank or 14}


def test_no_rank_drops_duplicates(tiny_model, token_ids):
    """A text that is listed four times spans what it spans listed once, and its `M` is the same."""
    model = get_peft_model(tiny_model("llama"), EngramConfig())
    text, other = token_ids(1, 4, seed=1), token_ids(8, 30, seed=2)
    once, four = (collect_statistics(model, [text.repeat(n, 1)]) for n in (1, 4))
    total = merge_statistics(four, collect_statistics(model, [other]))
    ranks, matrices = [], []
    for target in (once, four):
        report = extract_engram(model, target, total)
        ranks.append({d.rank for d in report.layers.values()})
        matrices.append({n: weight_of(layer) @ matrix(layer) for n, layer in edited_layers(model).items()})
    assert ranks == [{4}, {4}]
    for name in matrices[0]:
        assert relative_error(matrices[1][name], matrices[0][name]) < 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_keeps_at_most_what_the_output_can_show(tiny_model, token_ids, kind):
    model, target, total = prepared(tiny_model(kind), token_ids, MANY)
    report = extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        assert report.layers[name].rank == min(layer.out_features, above_the_cut(total.covariance(name))), name


# ------------------------------------------------------------------------------------------------ the report


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
def test_eigenvalues_are_those_of_the_pencil(tiny_model, token_ids, kind, target_shape):
    """Of `S_t v = lambda S_a v`, descending, each a share between 0 and 1."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total)
    for name, diagnostics in report.layers.items():
        pencil = pinv(total.moments[name].dense()) @ target.moments[name].dense()
        expected = torch.linalg.eigvals(pencil).real.sort(descending=True).values
        found = diagnostics.eigenvalues
        assert len(found) == min(target.counts[name], diagnostics.kept)
        assert found.dtype == torch.float64
        assert float((found - expected[: len(found)]).abs().max()) < 1e-4, name
        assert 0 <= float(found[-1]) <= float(found[0]) < 1.001


@pytest.mark.parametrize("release", [False, True])
def test_eigenvalue_of_a_direction_is_its_share(release):
    """3 of the 4 rows along the first axis are the target's, and 1 of the 6 along the second."""
    model = get_peft_model(nn.Sequential(nn.Linear(12, 12, bias=False)), EngramConfig(target_modules=["0"]))
    axes = torch.eye(12)
    target = collect_statistics(model, [axes[[0, 0, 0, 1]]])
    total = merge_statistics(target, collect_statistics(model, [axes[[0, 1, 1, 1, 1, 1, 2, 3, 4]]]))
    report = extract_engram(model, target, total)
    report = report.release() if release else report
    assert report.layers["0"].eigenvalues.tolist() == pytest.approx([3 / 4, 1 / 6], rel=1e-5)


@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("cut", [{}, {"rank_fraction": 0.5}, {"cut": "energy", "energy_fraction": 0.9}])
def test_coverage_is_the_share_of_the_target_in_what_is_inverted(tiny_model, token_ids, target_shape, cut):
    model, target, total = prepared(tiny_model("opt"), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total, **cut)
    for name, diagnostics in report.layers.items():
        covariance = target.covariance(name)
        vectors = torch.linalg.eigh(total.covariance(name))[1][:, -diagnostics.kept :]
        expected = (vectors.mT @ covariance @ vectors).trace() / covariance.trace()
        assert diagnostics.coverage == pytest.approx(float(expected), rel=1e-6), name
        assert (diagnostics.kept >= diagnostics.width - 1) == (cut == {})  # a LayerNorm leaves one direction empty


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
def test_norms_and_strength_of_a_layer(tiny_model, token_ids, kind, target_shape):
    """Of weights, not of biases: `||W C_t pinv(C_a)||`, `||W||`, and the factor times their ratio."""
    model, target, total = prepared(tiny_model(kind), token_ids, target_shape, (16, 40))
    report = extract_engram(model, target, total)
    for name, layer in edited_layers(model).items():
        diagnostics = report.layers[name]
        weight, narrow = weight_of(layer), weight_of(layer, with_bias=False)
        projection = (weight @ target.covariance(name) @ pinv(total.covariance(name)))[:, : layer.in_features]
        share = target.counts[name] / total.counts[name]
        assert diagnostics.weight_norm == pytest.approx(float(narrow.norm()), rel=1e-5)
        assert diagnostics.projection_norm == pytest.approx(float(projection.norm()), rel=1e-3)
        assert diagnostics.factor == pytest.approx(share)
        expected = share * float(projection.norm() / narrow.norm())
        assert diagnostics.relative_strength == pytest.approx(expected, rel=1e-3)
        assert (diagnostics.target_count, diagnostics.total_count) == (target.counts[name], total.counts[name])


def test_effective_ranks_of_a_layer(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids)
    report = extract_engram(model, target, total)
    for name, diagnostics in report.layers.items():
        for found, statistics in (
            (diagnostics.target_effective_rank, target),
            (diagnostics.total_effective_rank, total),
        ):
            p = torch.linalg.eigvalsh(statistics.covariance(name)).clamp_min(1e-300)
            p = p / p.sum()
            assert found == pytest.approx(math.exp(-float((p * p.log()).sum())), rel=1e-4)


SHOWN = ["eigenvalues", "coverage", "weight_norm", "projection_norm", "relative_strength"]


@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
def test_released_report_says_what_it_said_before(tiny_model, token_ids, target_shape):
    def read(report):
        return {n: {q: torch.as_tensor(getattr(d, q)) for q in SHOWN} for n, d in report.layers.items()}

    model, target, total = prepared(tiny_model("llama"), token_ids, target_shape)
    report = extract_engram(model, target, total)
    before, text = read(report), str(report)
    released = extract_engram(model, target, total).release()
    after = read(released)
    assert str(released) == text
    for name in before:
        assert all(torch.allclose(after[name][q], before[name][q]) for q in SHOWN)


def test_released_report_keeps_effective_ranks_that_were_read(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids)
    report = extract_engram(model, target, total)
    diagnostics = report.layers["model.layers.0.mlp.down_proj"]
    before = diagnostics.target_effective_rank
    report.release()
    assert diagnostics.target_effective_rank == before
    with pytest.raises(ValueError, match="released before this was read"):
        _ = diagnostics.total_effective_rank


def test_report_prints_a_line_a_layer(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids)
    report = extract_engram(model, target, total)
    header, *lines = str(report).splitlines()
    assert len(lines) == len(report.layers) == 14
    assert "rows" in header and "share" in header
    for line, (name, diagnostics) in zip(lines, report.layers.items(), strict=True):
        cells = line.split()
        assert cells[0] == name
        assert cells[1] == f"{target.counts[name]}/{total.counts[name]}"
        assert cells[2] == str(diagnostics.rank)
        assert float(cells[-1]) == pytest.approx(diagnostics.relative_strength, abs=1e-4)


@pytest.mark.parametrize("quantity", ["relative_strength", "coverage", "rank", "kept", "factor", "share"])
def test_plot_shows_a_cell_a_layer(tiny_model, token_ids, quantity):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    model, target, total = prepared(tiny_model("llama"), token_ids, target_modules=["q_proj", "down_proj"])
    report = extract_engram(model, target, total)
    ax = report.plot(quantity)
    grid = torch.tensor(ax.images[0].get_array())
    modules = [label.get_text() for label in ax.get_yticklabels()]
    indices = [label.get_text() for label in ax.get_xticklabels()]
    assert (sorted(modules), indices) == (["down_proj", "q_proj"], ["0", "1"])
    for name, diagnostics in report.layers.items():
        expected = diagnostics.eigenvalues[0] if quantity == "share" else getattr(diagnostics, quantity)
        row, column = modules.index(name.rpartition(".")[2]), indices.index(name.split(".")[2])
        assert float(grid[row, column]) == pytest.approx(float(expected))
    pyplot.close(ax.figure)


def test_plot_draws_where_it_is_asked_to_and_refuses_unknown_quantities(tiny_model, token_ids):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    model, target, total = prepared(tiny_model("llama"), token_ids, target_modules=["lm_head", "down_proj"])
    report = extract_engram(model, target, total)
    figure, ax = pyplot.subplots()
    assert report.plot(ax=ax) is ax
    assert "-" in [label.get_text() for label in ax.get_xticklabels()]  # the head is in no layer
    with pytest.raises(ValueError, match="quantity.*coverage"):
        report.plot("colour")
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------ scaling and records


def test_factor_is_what_the_scaling_made_of_all_layers(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("gpt2"), token_ids)
    seen = {}

    def own(layers):
        seen.update(layers)
        return {name: i / 10 for i, name in enumerate(layers)}

    report = extract_engram(model, target, total, scale=own)
    assert list(seen) == list(report.layers)
    for i, (name, layer) in enumerate(edited_layers(model).items()):
        assert report.layers[name].factor == i / 10
        assert torch.equal(layer.factors("default")[2], torch.full_like(layer.factors("default")[2], i / 10))


def test_adaptive_is_the_product_of_counts_and_norms(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids)
    adaptive = extract_engram(model, target, total, scale="adaptive").layers
    product = extract_engram(model, target, total, scale=compose(count_ratio(), weight_norm())).layers
    by_rank = extract_engram(model, target, total, scale=effective_rank(0.5)).layers
    norms = extract_engram(model, target, total, scale="weight_norm").layers
    for name in adaptive:
        share = target.counts[name] / total.counts[name]
        assert (
            adaptive[name].factor == pytest.approx(product[name].factor) == pytest.approx(share * norms[name].factor)
        )
        ranks = by_rank[name].target_effective_rank / by_rank[name].total_effective_rank
        assert by_rank[name].factor == pytest.approx(ranks**0.5)


def test_strength_of_the_adapter_stays_as_it_is(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids, alpha=0.25)
    extract_engram(model, target, total)
    assert model.peft_config["default"].alpha == 0.25
    assert {layer.engram_scaling["default"] for layer in edited_layers(model).values()} == {0.25}


def test_config_records_how_the_adapter_was_filled(tiny_model, tiny_tokenizer):
    model, tokenizer = get_peft_model(tiny_model("llama"), EngramConfig()), tiny_tokenizer()
    target = collect_statistics(model, ["one two three"], tokenizer=tokenizer)
    retain = collect_statistics(model, ["a red bird", ("where ?", "in rome")], tokenizer=tokenizer)
    extract_engram(model, target, merge_statistics(target, retain), scale="adaptive", cut="ridge", ridge_delta=0.1)
    record = model.peft_config["default"].extraction
    assert (record["scale"], record["cut"], record["ridge_delta"]) == ("adaptive", "ridge", 0.1)
    assert (record["target_rows"], record["total_rows"]) == (3, 8)
    assert (record["target_texts"], record["total_texts"], record["mask"]) == (1, 3, "answer")


def test_statistics_may_hold_more_layers_than_the_adapter(tiny_model, token_ids):
    plain = tiny_model("llama")
    target = collect_statistics(plain, [token_ids(*FEW, seed=1)])
    total = merge_statistics(target, collect_statistics(plain, [token_ids(8, 30, seed=2)]))
    model = get_peft_model(plain, EngramConfig(target_modules=["down_proj"]))
    assert len(extract_engram(model, target, total).layers) == 2


def test_named_adapter_is_filled_and_the_others_are_left_alone(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids)
    model.add_adapter("second", EngramConfig(target_modules=["down_proj"]))
    before = {name: t for name, t in snapshot(model).items() if ".second" not in name}
    report = extract_engram(model, target, total, "second")
    assert len(report.layers) == 2
    state = model.state_dict()
    assert all(torch.equal(state[name], t) for name, t in before.items())
    layer = edited_layers(model, "second")["model.layers.0.mlp.down_proj"]
    expected = target.covariance("model.layers.0.mlp.down_proj") @ pinv(
        total.covariance("model.layers.0.mlp.down_proj")
    )
    weight = weight_of(layer)
    assert relative_error(weight @ matrix(layer, "second"), weight @ expected) < 1e-4


def test_extraction_is_reproducible_to_the_bit(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("llama"), token_ids, MANY)
    extract_engram(model, target, total)
    before = snapshot(model)
    extract_engram(model, target, total)
    assert_unchanged(model, before)


def test_extraction_leaves_the_statistics_alone(tiny_model, token_ids):
    model, target, total = prepared(tiny_model("gpt2"), token_ids, MANY)
    before = [{name: s.covariance(name) for name in s.moments} for s in (target, total)]
    extract_engram(model, target, total)
    for statistics, old in zip((target, total), before, strict=True):
        assert all(torch.equal(statistics.covariance(name), old[name]) for name in old)


def test_saved_statistics_give_the_same_adapter(tiny_model, token_ids, tmp_path):
    model, target, total = prepared(tiny_model("gpt2"), token_ids)
    extract_engram(model, target, total)
    before = {n: weight_of(layer) @ matrix(layer) for n, layer in edited_layers(model).items()}
    loaded = []
    for name, statistics in (("target", target), ("total", total)):
        statistics.save(tmp_path / name)
        loaded.append(Statistics.load(tmp_path / name))
    extract_engram(model, *loaded)
    for name, layer in edited_layers(model).items():
        assert relative_error(weight_of(layer) @ matrix(layer), before[name]) < 1e-5, name


# ------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def filled(tiny_model, token_ids):
    """A model with a filled adapter, its statistics, and a check that an extraction is refused and changes nothing."""
    model, target, total = prepared(tiny_model("llama"), token_ids)
    extract_engram(model, target, total)
    before, config = snapshot(model), model.peft_config["default"].to_dict()

    def refused(message, target=target, total=total, error=ValueError, **options):
        with pytest.raises(error, match=message):
            extract_engram(model, target, total, **options)
        assert_unchanged(model, before)
        assert model.peft_config["default"].to_dict() == config

    refused.model, refused.target, refused.total = model, target, total
    return refused


@pytest.mark.parametrize("target_shape", [FEW, MANY], ids=["few", "many"])
def test_reference_without_the_target_is_refused(filled, token_ids, target_shape):
    target = collect_statistics(filled.model, [token_ids(*target_shape, seed=1)])
    retain = collect_statistics(filled.model, [token_ids(3, 30, seed=2)])
    filled("does not contain `target`", target, retain)


def test_reference_with_fewer_rows_than_the_target_is_refused(filled):
    filled("does not contain `target`", filled.total, filled.target)


def test_statistics_that_are_swapped_after_a_merge_are_refused(filled, token_ids):
    """Merging forgets nothing: a total of other texts does not contain the target, however many rows it has."""
    others = [collect_statistics(filled.model, [token_ids(4, 20, seed=seed)]) for seed in (5, 6)]
    filled("does not contain `target`", filled.target, merge_statistics(*others))


def test_statistics_of_another_model_are_refused(filled, tiny_model, token_ids):
    target = collect_statistics(tiny_model("qwen3"), [token_ids(*FEW)])
    total = merge_statistics(target, collect_statistics(tiny_model("qwen3"), [token_ids(8, 30, seed=1)]))
    filled("different models|another model", target, total)


def test_statistics_of_two_models_are_refused(filled, tiny_model, token_ids):
    filled("different models", filled.target, collect_statistics(tiny_model("qwen3"), [token_ids(8, 30)]))


def test_statistics_of_another_width_are_refused(filled):
    narrow = Statistics({name: Moment(7) for name in filled.target.moments})
    for moment in narrow.moments.values():
        moment.add(torch.eye(7))
    filled("another model.*width 7, expected 32", narrow, narrow)


def test_statistics_of_two_tokenizers_are_refused(filled, tiny_tokenizer):
    target, retain = (
        collect_statistics(filled.model, ["one two three"], tokenizer=tiny_tokenizer(add_bos=bos)) for bos in (0, 1)
    )
    filled("different tokenizers", target, retain)


def test_statistics_of_two_mask_rules_are_refused(filled, tiny_tokenizer):
    target, retain = (
        collect_statistics(filled.model, ["one two three"], tokenizer=tiny_tokenizer(), token_position=position)
        for position in ("answer", "predict")
    )
    filled("different mask rules", target, retain)


@pytest.mark.parametrize("role", ["target", "total"])
def test_missing_layer_is_named(filled, role):
    name = "model.layers.1.mlp.up_proj"
    statistics = getattr(filled, role)
    less = Statistics({n: m for n, m in statistics.moments.items() if n != name}, statistics.provenance)
    filled(f"`{role}`.*{name}", **{role: less})


@pytest.mark.parametrize("role", ["target", "total"])
def test_layer_that_was_never_fed_is_named(filled, role):
    name = "model.layers.1.mlp.up_proj"
    statistics = getattr(filled, role)
    empty = Statistics({**statistics.moments, name: Moment(32)}, statistics.provenance)
    filled(f"`{role}`.*{name}", **{role: empty})


def test_missing_adapter_is_named(filled):
    filled("no ENGRAM adapter 'other'", adapter_name="other")


def test_model_without_an_adapter_is_refused(tiny_model, filled):
    with pytest.raises(ValueError, match="no ENGRAM adapter"):
        extract_engram(tiny_model("llama"), filled.target, filled.total)


def test_merged_adapter_is_refused(filled):
    before = snapshot(filled.model)
    filled.model.merge_adapter()
    merged = snapshot(filled.model)
    with pytest.raises(ValueError, match="merged"):
        extract_engram(filled.model, filled.target, filled.total)
    assert_unchanged(filled.model, merged)
    filled.model.unmerge_adapter()
    assert_unchanged(filled.model, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_factor_that_is_not_finite_is_refused_with_the_layer(filled, value):
    def scale(layers):
        return {**dict.fromkeys(layers, 1.0), "model.layers.1.mlp.up_proj": value}

    filled(r"layers\.1\.mlp\.up_proj", scale=scale)


def test_factor_that_is_missing_is_refused_with_the_layer(filled):
    filled("model.layers.0.self_attn.q_proj", scale=lambda layers: {})


def test_scaling_that_fails_changes_nothing(filled):
    filled("no idea", error=RuntimeError, scale=lambda layers: (_ for _ in ()).throw(RuntimeError("no idea")))


@pytest.mark.parametrize(
    "options",
    [{"scale": "counts"}, {"cut": "svd"}, {"solver": "qr"}, {"rank_fraction": 2.0}, {"condition_cap": 0.5}],
    ids=str,
)
def test_bad_options_are_refused_by_name(filled, options):
    filled(next(iter(options)), **options)


def test_covariance_of_a_few_rows_agrees_with_its_definition(tiny_model, token_ids):
    """The helper that the tests above rest on is the mean of outer products."""
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = sum(torch.outer(row, row) for row in x) / 5
    assert relative_error(covariance_of(x), expected) < 1e-12
