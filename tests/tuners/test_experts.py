"""Adapters of experts whose weights are stacked: forward, merge, unmerge, save, load, several at once."""

from __future__ import annotations

import copy
import warnings

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engram_peft import EngramConfig, collect_statistics, extract_engram, extract_items, merge_statistics, unlearn
from engram_peft.tuners.engram import ParamWrapper

from ..moe import EXPERTS, KINDS, moe_model, plain_rows
from . import adapters
from .adapters import FORGET, RETAIN, close, logits, same_tensors, tensors, unchanged


# Layouts with an implementation of transformers, which can be chosen.
DECORATED = ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h"]
RIDGE = {"scale": "uniform", "cut": "ridge", "ridge_delta": 1e-2}


@pytest.fixture
def ids(token_ids) -> torch.Tensor:
    return token_ids(5, 9)


def fill(model: PeftModel, ids: torch.Tensor, adapter_name: str = "default", forget: int = 0, **options) -> PeftModel:
    """Fills an adapter with one text among all."""
    with model.disable_adapter():
        target = collect_statistics(model, [{"input_ids": ids[forget : forget + 1]}])
        rest = [i for i in range(len(ids)) if i != forget]
        total = merge_statistics(target, collect_statistics(model, [{"input_ids": ids[rest]}]))
    extract_engram(model, target, total, adapter_name, **{**RIDGE, **options})
    return model


def edited(kind: str, ids: torch.Tensor, dtype: torch.dtype = torch.float32, **config) -> PeftModel:
    config = {"alpha": 0.3, "target_modules": [], "target_parameters": stacks(kind), **config}
    return fill(get_peft_model(moe_model(kind, dtype), EngramConfig(**config)).eval(), ids)


def stacks(kind: str) -> list[str]:
    """The experts' weights in the feed-forward layers."""
    names = {
        "nemotron_h": ["experts.up_proj", "experts.down_proj"],
        "dbrx": ["mlp.w1", "mlp.v1", "mlp.w2"],
        "jetmoe": ["mlp.input_linear.weight", "mlp.output_linear.weight"],
    }
    return names.get(kind, ["experts.gate_up_proj", "experts.down_proj"])


def matrices(model: nn.Module, name: str) -> torch.Tensor:
    """A stack as `(E, out, in)`, with the biases as a last column where there are any, float64."""
    parameter = model.get_parameter(name).detach().double()
    if name.endswith((".w1", ".v1", ".w2")):
        parameter = parameter.view(EXPERTS, -1, parameter.shape[-1])
    module = model.get_submodule(name.rpartition(".")[0])
    if getattr(module, "is_transposed", False) or "feed_forward.experts" in name or name.endswith(".w2"):
        parameter = parameter.mT
    bias = getattr(module, f"{name.rpartition('.')[2]}_bias", None)
    return parameter if bias is None else torch.cat([parameter, bias.detach().double()[..., None]], dim=2)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_closed_form_of_every_expert(kind, ids):
    """`W_e (I - alpha C_t (C_a + delta)^-1)` of the rows that the formula of the model says; idle experts to the bit."""
    model = moe_model(kind)
    everything = torch.ones_like(ids, dtype=torch.bool)
    forget = torch.zeros_like(everything)
    forget[0] = True
    target, total = plain_rows(model, kind, ids, forget), plain_rows(model, kind, ids, everything)
    before = copy.deepcopy(model)
    merged = edited(kind, ids).merge_and_unload()
    changed = 0
    for full in target:
        name, _, expert = full.rpartition(".")
        start, end = (matrices(m, name)[int(expert)] for m in (before, merged))
        if not len(target[full]):
            assert torch.equal(end, start)
            continue
        c_t, c_a = (x.mT @ x / len(x) for x in (target[full], total[full]))
        ridge = 1e-2 * torch.linalg.eigvalsh(c_a)[-1] * torch.eye(len(c_a), dtype=torch.float64)
        expected = start - 0.3 * start @ c_t @ torch.linalg.inv(c_a + ridge)
        assert close(end - start, expected - start, 2e-3), full
        changed += 1
    assert changed >= EXPERTS


@pytest.mark.parametrize("kind", KINDS)
def test_unmerged_equals_merged_and_unmerging_restores_to_the_bit(kind, ids):
    model = edited(kind, ids)
    with model.disable_adapter():
        base = logits(model, ids)
    unmerged = logits(model, ids)
    assert not close(unmerged, base, 1e-2)
    with unchanged(model):
        model.merge_adapter(safe_merge=True)
        assert close(logits(model, ids), unmerged, 1e-4)
        model.unmerge_adapter()
    assert torch.equal(logits(model, ids), unmerged)
    assert torch.equal(logits(moe_model(kind), ids), base)


@pytest.mark.parametrize("kind", DECORATED)
def test_implementations_agree(kind, ids):
    model = edited(kind, ids)
    results = {}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model.get_base_model().set_experts_implementation(implementation)
        results[implementation] = logits(model, ids)
        assert model.get_base_model().config._experts_implementation == implementation
    assert close(results["grouped_mm"], results["eager"], 1e-4)
    assert close(results["batched_mm"], results["eager"], 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same_to_the_bit(kind, ids, tmp_path):
    model = edited(kind, ids)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(moe_model(kind), tmp_path).eval()
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    plain = moe_model(kind)
    plain.load_adapter(tmp_path)  # transformers' own way, which goes by the names in the file
    assert torch.equal(logits(plain.eval(), ids), logits(model, ids))
    loaded.save_pretrained(tmp_path / "again")
    first, second = (folder / "adapter_model.safetensors" for folder in (tmp_path, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unfilled_adapter_is_an_identity_that_can_be_trained(kind, ids):
    base = logits(moe_model(kind), ids)
    model = get_peft_model(moe_model(kind), EngramConfig(target_modules=[], target_parameters=stacks(kind)))
    assert close(logits(model.eval(), ids), base, 1e-6)
    model.train()(input_ids=ids).logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients and all("engram_" in name for name in gradients)
    assert any(g is not None and g.abs().max() > 0 for name, g in gradients.items() if "engram_B" in name)


def test_gradients_of_the_factors_are_those_of_the_merged_weights(ids):
    """The derivative by the strength, against a difference quotient of merged models."""
    model = edited("mixtral", ids)
    model.get_base_model().set_experts_implementation("eager")
    strengths = [p for name, p in model.named_parameters() if "engram_strength" in name]
    for p in strengths:
        p.requires_grad_(True)
    loss = model.double()(input_ids=ids).logits.square().mean()
    slope = sum(float((g * p).sum()) for g, p in zip(torch.autograd.grad(loss, strengths), strengths, strict=True))

    def merged_loss(scale: float) -> float:
        model.set_scale("default", scale)
        model.merge_adapter()
        result = float(logits(model, ids).square().mean())
        model.unmerge_adapter()
        return result

    model.set_scale = model.base_model.set_scale
    assert slope == pytest.approx((merged_loss(1 + 3e-3) - merged_loss(1 - 3e-3)) / 6e-3, rel=3e-3)


class _Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        if not function.is_view:
            self.numbers = max(self.numbers, *(t.numel() for t in made if isinstance(t, torch.Tensor)), 0)
        return result


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_forward_makes_nothing_as_large_as_an_expert(ids, implementation):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = EngramConfig(target_modules=[], target_parameters=stacks("mixtral"), r=2, init_weights=False)
    model = get_peft_model(moe_model("mixtral", **shape), config).eval()
    model.get_base_model().set_experts_implementation(implementation)
    few = ids[:1, :4]
    with _Largest() as largest:
        logits(model, few)
    assert 0 < largest.numbers < 64 * 96


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "dbrx"])
def test_two_adapters_add_up_and_can_be_switched(kind, ids):
    """Together they are the sum of their changes of the weights, and alone each is what it was."""
    model = edited(kind, ids, target_parameters=stacks(kind)[:1])
    alone = logits(model, ids)
    model.add_adapter("second", EngramConfig(alpha=0.2, target_modules=[], target_parameters=stacks(kind)))
    model.set_adapter("second")
    fill(model, ids, "second", forget=1)
    second = logits(model, ids)
    assert not close(second, alone, 1e-3)
    model.base_model.set_adapter(["default", "second"])
    both = logits(model, ids)
    model.merge_adapter()
    assert close(logits(model, ids), both, 1e-4)
    model.unmerge_adapter()
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), alone)
    model.set_adapter("second")
    assert torch.equal(logits(model, ids), second)


def test_an_adapter_saved_beside_another_one_loads_alone(ids, tmp_path):
    """Wrappers of a module's Parameters are nested; what is saved does not depend on how."""
    model = edited("mixtral", ids)
    model.add_adapter("down", EngramConfig(alpha=0.2, target_modules=[], target_parameters=["experts.down_proj"]))
    model.add_adapter("up", EngramConfig(alpha=0.2, target_modules=[], target_parameters=["experts.gate_up_proj"]))
    for number, name in enumerate(("down", "up")):
        model.set_adapter(name)
        fill(model, ids, name, forget=number)
    model.save_pretrained(tmp_path)
    for name in ("down", "up"):
        model.set_adapter(name)
        loaded = PeftModel.from_pretrained(moe_model("mixtral"), tmp_path / name)
        assert torch.equal(logits(loaded, ids), logits(model, ids)), name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_weighted_sum_is_exact(kind, ids, tmp_path):
    model = edited(kind, ids)
    model.add_adapter("second", EngramConfig(alpha=0.2, target_modules=[], target_parameters=stacks(kind)[1:]))
    model.set_adapter("second")
    fill(model, ids, "second", forget=1)
    model.base_model.add_weighted_adapter(["default", "second"], [1.0, -0.5], "sum")
    layers = model.base_model.engram_layers("sum")
    deltas = {
        name: {key: layer.get_delta_weight(key) for key in ("default", "second", "sum") if key in layer.engram_A}
        for name, layer in layers.items()
    }
    assert len(layers) == 4
    for delta in deltas.values():
        expected = delta["default"] - 0.5 * delta["second"] if "second" in delta else delta["default"]
        assert close(delta["sum"], expected, 1e-5)
    model.set_adapter("sum")
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    loaded = PeftModel.from_pretrained(moe_model(kind), tmp_path / "sum")
    assert close(logits(loaded, ids), logits(model, ids), 1e-6)


def test_every_expert_is_weighed_by_its_own_counts(ids):
    model = get_peft_model(moe_model("mixtral"), EngramConfig(target_modules=[], target_parameters=stacks("mixtral")))
    target = collect_statistics(model, [{"input_ids": ids[:1]}])
    total = merge_statistics(target, collect_statistics(model, [{"input_ids": ids[1:]}]))
    report = extract_engram(model, target, total)
    fed = {name for name, count in target.counts.items() if count}
    assert report.layers.keys() == fed
    for name, diagnostics in report.layers.items():
        assert diagnostics.factor == pytest.approx(target.counts[name] / total.counts[name])
    assert len({diagnostics.factor for diagnostics in report.layers.values()}) > 3


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_rank_that_is_asked_for_holds_for_every_expert(kind, ids):
    model = edited(kind, ids, r=2)
    ranks = model.peft_config["default"].expert_ranks
    assert len(ranks) == 4 and all(len(own) == EXPERTS and max(own) == 2 for own in ranks.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rank_pattern.*")
        model = edited(kind, ids, r=2, rank_pattern={"experts.down_proj": 1})
    assert {max(own) for name, own in model.peft_config["default"].expert_ranks.items() if "down" in name} == {1}


def test_all_linear_means_experts_too(ids):
    named = {}
    for target, experts in [("all-linear", True), ("all-linear", False), (None, True), (None, False)]:
        config = EngramConfig(target_modules=target, target_experts=experts)
        model = get_peft_model(moe_model("mixtral"), config)
        named[target, experts] = model.base_model.engram_layers().keys()
    without, with_experts = named[None, False], named[None, True]
    assert len(without) == 8 and len(with_experts) == 12
    assert named["all-linear", True] == with_experts and named["all-linear", False] == without
    model = get_peft_model(moe_model("mixtral"), EngramConfig(layers_to_transform=[1]))
    assert model.base_model.engram_layers().keys() == {name for name in with_experts if ".1." in name}
    model = get_peft_model(moe_model("mixtral"), EngramConfig(exclude_modules=["experts", "q_proj"]))
    assert model.base_model.engram_layers().keys() == {name for name in without if "q_proj" not in name}
    base = logits(moe_model("mixtral"), ids)
    assert close(logits(model.eval(), ids), base, 1e-6)


def test_experts_and_layers_are_filled_together(ids):
    """All of a model, in one adapter, merged and not."""
    model = get_peft_model(moe_model("qwen3_moe"), EngramConfig(alpha=0.1)).eval()
    fill(model, ids)
    before = logits(model, ids)
    model.merge_adapter()
    assert close(logits(model, ids), before, 1e-4)


def test_unlearn_edits_experts_by_the_method_of_the_paper(tokenizer, ids):
    """Item by item it cannot, and says so before anything is done."""
    model = moe_model("mixtral")
    before = logits(model, ids)
    with unchanged(model), pytest.raises(ValueError, match=r"experts with stacked weights.*EngramConfig.paper\(\)"):
        unlearn(model, tokenizer, FORGET, RETAIN)
    edited_model = unlearn(model, tokenizer, FORGET, RETAIN, EngramConfig.paper(alpha=2.0))
    assert {name for name in edited_model.base_model.engram_layers() if "experts" in name} == {
        f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")
    }
    assert not close(logits(edited_model, ids), before, 1e-2)
    with pytest.raises(ValueError, match="edits Parameters"):
        extract_items(edited_model, tokenizer, FORGET, RETAIN)


def test_a_router_can_be_edited(ids):
    config = {"target_parameters": ["mlp.gate.weight"], "layers_to_transform": [0]}
    model = edited("mixtral", ids, **config)
    assert list(model.base_model.engram_layers()) == ["model.layers.0.mlp.gate.weight"]
    with model.disable_adapter():
        base = logits(model, ids)
    before = logits(model, ids)
    assert not close(before, base, 1e-3)
    with unchanged(model):
        model.merge_adapter()
        assert close(logits(model, ids), before, 1e-5)
        model.unmerge_adapter()


def test_unloading_leaves_the_model_that_was_there(ids):
    reference = moe_model("mixtral")
    model = edited("mixtral", ids)
    base = model.unload()
    assert {n: type(m) for n, m in base.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    assert same_tensors(tensors(base), tensors(reference))
    model = edited("mixtral", ids)
    before = logits(model, ids)
    merged = model.merge_and_unload()
    assert not any(isinstance(module, ParamWrapper) for module in merged.modules())
    assert close(logits(merged, ids), before, 1e-4)


def test_a_copy_is_independent(ids):
    model = edited("mixtral", ids)
    other = copy.deepcopy(model)
    before = logits(model, ids)
    other.base_model.set_scale("default", 0.0)
    other.merge_adapter()
    assert torch.equal(logits(model, ids), before)
    assert not close(logits(other, ids), before, 1e-3)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_bfloat16(kind, ids):
    """The closed form does not depend on the precision of the weights; outputs agree within that of bfloat16."""
    model = edited(kind, ids, torch.bfloat16)
    before = logits(model, ids).float()
    model.merge_adapter()
    # routing is discrete: compare where both go the same way, which most tokens do
    difference = (logits(model, ids).float() - before).abs().amax(-1).flatten()
    assert difference.median() < 0.05 * before.abs().max()
    model.unmerge_adapter()
    assert torch.equal(logits(model, ids).float(), before)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_offloaded_experts_are_edited_merged_and_unmerged_as_if_they_were_there(kind, ids):
    plain = edited(kind, ids)
    offloaded = accelerate.cpu_offload(moe_model(kind), execution_device="cpu")
    config = EngramConfig(alpha=0.3, target_modules=[], target_parameters=stacks(kind))
    offloaded = fill(get_peft_model(offloaded, config).eval(), ids)
    unmerged = logits(plain, ids)
    assert torch.equal(logits(offloaded, ids), unmerged)
    plain.merge_adapter()
    offloaded.merge_adapter()
    merged = logits(plain, ids)
    assert torch.equal(logits(offloaded, ids), merged) and not torch.equal(merged, unmerged)
    # in the order of merging: what one Parameter of a module gets back must not undo the other one
    for layer in offloaded.base_model.engram_layers().values():
        layer.unmerge()
    assert torch.equal(logits(offloaded, ids), unmerged)
    offloaded.merge_adapter()
    assert torch.equal(logits(offloaded, ids), merged)


def test_an_offloaded_router_is_merged(ids):
    config = EngramConfig(alpha=0.3, target_modules=[], target_parameters=["mlp.gate.weight"])
    offloaded = accelerate.cpu_offload(moe_model("mixtral"), execution_device="cpu")
    offloaded = fill(get_peft_model(offloaded, config).eval(), ids)
    with pytest.raises(ValueError, match="edited in the Parameter, which is offloaded"):
        logits(offloaded, ids)
    offloaded.merge_adapter()
    plain = edited("mixtral", ids, target_parameters=["mlp.gate.weight"])
    assert close(logits(offloaded, ids), logits(plain, ids), 1e-4)


def test_beside_lora_the_file_has_the_names_of_the_plain_model(ids, tmp_path):
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    beside = get_peft_model(moe_model("mixtral"), lora).eval()
    config = EngramConfig(alpha=0.3, target_modules=["q_proj"], target_parameters=stacks("mixtral"))
    beside = fill(get_peft_model(beside, config).eval(), ids)
    alone = edited("mixtral", ids, target_modules=["q_proj"])
    assert beside.base_model.engram_layers().keys() == alone.base_model.engram_layers().keys()
    beside.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(moe_model("mixtral"), tmp_path).eval()
    for name, layer in loaded.base_model.engram_layers().items():
        factors = beside.base_model.engram_layers()[name].factors("default")
        assert all(torch.equal(a, b) for a, b in zip(layer.factors("default"), factors, strict=True)), name


def test_experts_inside_lora_are_refused(ids):
    lora = LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = get_peft_model(moe_model("mixtral"), lora)
    with unchanged(model), pytest.raises(TypeError, match=r"experts\.\w+ is wrapped by another adapter \(lora\)"):
        get_peft_model(model, EngramConfig(target_modules=[], target_parameters=stacks("mixtral")))


def test_the_weight_of_a_layer_may_be_named_as_a_parameter(tiny_model, tokenizer):
    """Of a `Conv1D`, too, which stores it the other way round."""
    ids = tokenizer(RETAIN[:4], return_tensors="pt").input_ids
    for kind, layer in (("llama", "down_proj"), ("gpt2", "c_fc")):
        by_name = adapters.edited(tiny_model(kind), tokenizer, target_modules=[layer])
        model = adapters.edited(tiny_model(kind), tokenizer, target_modules=[], target_parameters=[f"{layer}.weight"])
        assert list(model.base_model.engram_layers())[0].endswith(f"{layer}.weight")
        assert close(logits(model, ids), logits(by_name, ids), 1e-4)
        model.merge_adapter()
        assert close(logits(model, ids), logits(by_name, ids), 1e-4)
    with pytest.raises(TypeError, match="no matrix that a `Embedding` multiplies its input with"):
        get_peft_model(tiny_model("llama"), EngramConfig(target_parameters=["embed_tokens.weight"]))


def test_bad_input_is_refused(ids, tmp_path):
    model = moe_model("mixtral")
    with unchanged(model), pytest.raises(ValueError, match="lists 'experts.up_proj', which no parameter"):
        get_peft_model(model, EngramConfig(target_parameters=["experts.down_proj", "experts.up_proj"]))
    with pytest.raises(ValueError, match="should list a rank for every expert"):
        EngramConfig(expert_ranks={"experts.down_proj": [1, -1]})
    with pytest.warns(RuntimeWarning, match=r"rank_pattern keys did not match any.*\['dwn_proj'\]"):
        get_peft_model(moe_model("mixtral"), EngramConfig(rank_pattern={"dwn_proj": 1}))
    model = edited("mixtral", ids)
    with pytest.raises(ValueError, match="Mixed batches are not supported"):
        model(input_ids=ids, adapter_names=["default"] * len(ids))
    model.save_pretrained(tmp_path)
    text = (tmp_path / "adapter_config.json").read_text()
    config = EngramConfig.from_pretrained(str(tmp_path))
    config.expert_ranks = {name: ranks[:-1] for name, ranks in config.expert_ranks.items()}
    config.save_pretrained(str(tmp_path))
    assert (tmp_path / "adapter_config.json").read_text() != text
    base = moe_model("mixtral")
    with pytest.raises(ValueError, match="`expert_ranks` has 3 entries"):
        PeftModel.from_pretrained(base, tmp_path)
