"""Statistics of experts whose weights are stacked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engram_peft import Statistics, collect_statistics, merge_statistics
from engram_peft.editing.experts import tapped

from ..moe import EXPERTS, KINDS, moe_model, plain_rows
from .reference import covariance_of, relative_error


def batch(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs whose labels select the rows of `mask`."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.where(mask, ids, -100)}


@pytest.fixture
def ids(token_ids) -> torch.Tensor:
    return token_ids(3, 9)


@pytest.fixture
def mask() -> torch.Tensor:
    """Half of the tokens of `ids`, in no order."""
    return torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_has_the_moment_of_what_it_is_fed(kind, ids, mask):
    """Counts are exact, masks hold, and the inputs of both weights are the true ones; for every layout."""
    model = moe_model(kind)
    expected = plain_rows(model, kind, ids, mask)
    statistics = collect_statistics(model, [batch(ids, mask)])
    assert len(expected) >= 2 * EXPERTS and expected.keys() <= statistics.moments.keys()
    assert {name: statistics.counts[name] for name in expected} == {name: len(x) for name, x in expected.items()}
    assert any(len(x) > 0 for x in expected.values())
    for name, rows in expected.items():
        if len(rows):
            assert relative_error(statistics.covariance(name), covariance_of(rows)) < 1e-5, name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_implementations_agree(kind, ids, mask):
    collected = {}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model = moe_model(kind)
        model.set_experts_implementation(implementation)
        before = model(ids).logits
        collected[implementation] = collect_statistics(model, [batch(ids, mask)])
        assert model.config._experts_implementation == implementation
        assert torch.equal(model(ids).logits, before)
    reference = collected["eager"]
    for other in ("grouped_mm", "batched_mm"):
        assert collected[other].counts == reference.counts
        for name, count in reference.counts.items():
            if count:
                assert relative_error(collected[other].covariance(name), reference.covariance(name)) < 1e-4, name


@pytest.mark.parametrize("kind", KINDS)
def test_collecting_leaves_nothing_behind(kind, ids):
    model = moe_model(kind)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    collect_statistics(model, [batch(ids, torch.ones_like(ids, dtype=torch.bool))])
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {name: attributes.keys() for name, attributes in after.items()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    assert all(after[name].get("config") is attributes.get("config") for name, attributes in before.items())


def test_an_expert_that_gets_nothing_holds_nothing(ids):
    """Its moment is there, so that statistics can be merged, and has no tensor."""
    model = moe_model("mixtral", num_local_experts=32)
    statistics = collect_statistics(model, [batch(ids[:1, :4], torch.ones(1, 4, dtype=torch.bool))])
    of_experts = {name: moment for name, moment in statistics.moments.items() if ".experts." in name}
    assert len(of_experts) == 2 * 2 * 32
    idle = [moment for moment in of_experts.values() if moment.count == 0]
    assert len(idle) >= 2 * 2 * (32 - 8)
    assert not any(True for moment in idle for _ in moment.tensors())


def test_counts_add_up_to_every_routed_token(ids, mask):
    statistics = collect_statistics(moe_model("mixtral"), [batch(ids, mask)])
    for layer in range(2):
        for parameter in ("gate_up_proj", "down_proj"):
            names = [f"model.layers.{layer}.mlp.experts.{parameter}.{expert}" for expert in range(EXPERTS)]
            assert sum(statistics.counts[name] for name in names) == 2 * int(mask.sum())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "jetmoe"])
def test_two_halves_merged_are_the_whole_and_survive_a_file(kind, ids, mask, tmp_path):
    model = moe_model(kind)
    whole = collect_statistics(model, [batch(ids, mask)])
    halves = [collect_statistics(model, [batch(ids[i : i + 1], mask[i : i + 1])]) for i in range(3)]
    merged = merge_statistics(*halves)
    assert merged.counts == whole.counts
    merged.save(tmp_path / "statistics.safetensors")
    loaded = Statistics.load(tmp_path / "statistics.safetensors")
    assert loaded.counts == merged.counts
    for name, count in whole.counts.items():
        if count:
            assert relative_error(merged.covariance(name), whole.covariance(name)) < 1e-5, name
            assert relative_error(loaded.covariance(name), merged.covariance(name)) < 1e-6, name


def test_weights_that_read_the_same_input_share_its_moments(ids, mask):
    statistics = collect_statistics(moe_model("dbrx"), [batch(ids, mask)])
    name = "transformer.blocks.0.ffn.experts.mlp"
    for expert in range(EXPERTS):
        assert statistics.moments[f"{name}.w1.{expert}"] is statistics.moments[f"{name}.v1.{expert}"]
        assert statistics.moments[f"{name}.w1.{expert}"] is not statistics.moments[f"{name}.w2.{expert}"]


def test_the_names_of_the_selection_hold_for_experts(ids):
    model, everything = moe_model("mixtral"), torch.ones_like(ids, dtype=torch.bool)

    def named(**selection):
        names = collect_statistics(model, [batch(ids, everything)], **selection).moments
        return {name.rpartition(".")[0] for name in names if ".experts." in name}, {
            name for name in names if ".experts." not in name
        }

    down = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2)]
    assert named(target_parameters=["experts.down_proj"]) == (set(down), set())
    assert named(target_parameters=["mlp.experts.down_proj"], layers_to_transform=[1]) == ({down[1]}, set())
    assert named(target_parameters=["experts.down_proj"], exclude_modules=["layers.0.mlp.experts"])[0] == {down[1]}
    assert named(target_modules=["q_proj"], target_parameters=[down[0]])[0] == {down[0]}
    assert len(named(target_modules="all-linear")[0]) == 4
    assert len(named(layers_to_transform=[0])[0]) == 2
    assert named(target_modules=["q_proj"])[0] == set()
    experts, layers = named(target_experts=False)
    assert not experts and len(layers) == 8


def test_a_router_is_a_matrix_like_any_other(ids, mask):
    model = moe_model("mixtral")
    seen = []
    handle = model.model.layers[1].mlp.gate.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    statistics = collect_statistics(
        model, [batch(ids, mask)], target_parameters=["mlp.gate.weight"], layers_to_transform=[1]
    )
    handle.remove()
    assert list(statistics.moments) == ["model.layers.1.mlp.gate.weight"]
    expected = covariance_of(seen[-1].reshape(-1, 16)[mask.flatten()])
    assert relative_error(statistics.covariance("model.layers.1.mlp.gate.weight"), expected) < 1e-5


@pytest.mark.parametrize(
    "kind, names", [("mixtral", ("top_k_index", "top_k_weights")), ("gpt_oss", ("router_indices", "routing_weights"))]
)
def test_experts_may_be_called_by_keyword(kind, names):
    experts = next(module for name, module in moe_model(kind).named_modules() if name.endswith(".experts"))
    x, index, weights = torch.randn(7, 16), torch.randint(EXPERTS, (7, 2)), torch.rand(7, 2)
    expected, seen = experts(x, index, weights), []

    def tap(parameter, rows, routes):
        seen.append((parameter, len(rows)))
        return rows, None

    with tapped(experts, tap):
        found = experts(hidden_states=x, **dict(zip(names, (index, weights), strict=True)))
    assert seen == [("gate_up_proj", 14), ("down_proj", 14)]
    assert relative_error(found, expected) < 1e-6


def test_bad_input_is_refused(ids, mask):
    model = moe_model("mixtral")
    data = [batch(ids, mask)]
    with pytest.raises(ValueError, match=r"lists 'experts.dwn_proj', which no parameter.*experts.down_proj"):
        collect_statistics(model, data, target_parameters=["experts.dwn_proj"])
    with pytest.raises(TypeError, match="input_layernorm.weight is not supported. It has 1 dimensions"):
        collect_statistics(model, data, target_parameters=["input_layernorm.weight"])
    model.model.layers[1].mlp.experts.gate_up_proj.data[:, :1] = torch.nan
    with pytest.raises(ValueError, match=r"input of model.layers.1.mlp.experts.down_proj holds NaN"):
        collect_statistics(model, data, target_parameters=["experts.down_proj"])
    assert not any("_engram_taps" in vars(module) for module in model.modules())
    model = moe_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TypeError, match=r"MixtralExperts are quantised.*target_experts=False"):
        collect_statistics(model, data)
    model = moe_model("mixtral")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(TypeError, match="sharded over devices"):
        collect_statistics(model, data)
