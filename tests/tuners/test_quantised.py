"""Models whose weights are codes: the adapter reads and edits inputs, so it needs no float weight but to merge."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.utils.quantization_utils import ForwardOnlyQuantizationBackend
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

from engram_peft import EngramConfig, collect_statistics, extract_engram, unlearn
from engram_peft.editing import weights
from engram_peft.editing.weights import float_weight
from engram_peft.tuners.engram import stored

from ..editing.reference import covariance_of, relative_error
from .adapters import edited, layers_of, logits, statistics, twice_edited


TARGETS = ["gate_proj", "down_proj"]
ITEMS = {"france": ("the capital of france is", " paris"), "italy": ("the capital of italy is", " rome")}
KEPT = [("the capital of spain is", " madrid"), "the old red house on the long road"]
CONFIGS = {
    "bnb-int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bnb-nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bnb-nf4-double": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "torchao-int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao-int8-dynamic": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "torchao-float8": lambda: TorchAoConfig(Float8WeightOnlyConfig()),
}
# Relative errors of a product with a quantised weight where inputs are rounded to codes as well, or computed in bfloat16.
ROUNDED = {"bnb-int8": 0.03, "bnb-nf4": 0.01, "bnb-nf4-double": 0.01, "torchao-int8-dynamic": 0.03}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in float32, with widths that 4-bit blocks of 64 divide."""
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


@pytest.fixture
def load(folder):
    """`load(kind)`: the model, quantised; `load()`: in float32."""

    def make(kind=None):
        options = {} if kind is None else {"quantization_config": CONFIGS[kind]()}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    return make


every_kind = pytest.mark.parametrize("kind", CONFIGS)
one_of_each = pytest.mark.parametrize("kind", ["bnb-int8", "bnb-nf4", "torchao-int8"])


# ------------------------------------------------------------------------------------------------ reading


@every_kind
def test_statistics_are_those_of_the_inputs(load, token_ids, kind):
    model, ids = load(kind), token_ids(3, 9)
    seen = {}
    names = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: seen.update({name: args[0]}))
        for name in names
    ]
    logits(model, ids)
    for handle in handles:
        handle.remove()
    found = collect_statistics(model, [ids])
    assert len(found.moments) == 14  # every linear layer but the head, as in the model that is not quantised
    for name in names:
        assert relative_error(found.covariance(name), covariance_of(seen[name].flatten(0, 1))) < 1e-5


@every_kind
def test_float_weight_is_what_the_layer_multiplies_by(load, kind):
    """Also after forward passes, in which bitsandbytes may store a 4-bit weight in another order."""
    layer = load(kind).model.layers[0].mlp.down_proj
    before = float_weight(layer).float().clone()
    original = load().model.layers[0].mlp.down_proj.weight
    assert relative_error(before, original) < 0.11
    with torch.no_grad():
        outputs = layer(torch.eye(layer.in_features)).float().T
    assert relative_error(outputs, before) < 0.005
    assert relative_error(float_weight(layer), before) < 0.005


@one_of_each
def test_weight_norm_scales_by_the_norm_of_the_layers_own_weight(load, tokenizer, kind):
    model = get_peft_model(load(kind), EngramConfig.paper(target_modules=TARGETS))
    report = extract_engram(model, *statistics(model, tokenizer), scale="weight_norm")
    for name, layer in layers_of(model).items():
        with torch.no_grad():
            weight = layer.get_base_layer()(torch.eye(layer.in_features)).double().T
        right, left, _ = (factor.detach().double() for factor in layer.factors("default"))
        facts = report.layers[name]
        assert facts.weight_norm == pytest.approx(float(weight.norm()), rel=5e-3)
        assert facts.projection_norm == pytest.approx(float((weight @ left @ right).norm()), rel=2e-2)
    assert max(facts.factor for facts in report.layers.values()) == 1


# ------------------------------------------------------------------------------------------------ editing


@every_kind
def test_forward_is_the_quantised_layer_on_the_edited_input(load, tokenizer, kind):
    model = edited(load(kind), tokenizer, target_modules=TARGETS)
    for layer in layers_of(model).values():
        x = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(0))
        right, left, strength = (factor.detach().double() for factor in layer.factors("default"))
        taken = 0.25 * (x.double() @ right.mT * strength) @ left.mT
        with torch.no_grad():
            expected = (x.double() - taken) @ float_weight(layer.get_base_layer()).double().mT
            assert relative_error(layer(x), expected) < ROUNDED.get(kind, 1e-5)
            assert relative_error(layer(x), layer.get_base_layer()(x)) > 0.05


@every_kind
def test_saving_and_loading_changes_nothing(load, tokenizer, ids, tmp_path, kind):
    """Not even the model that is saved: bitsandbytes 0.50 reorders 4-bit weights while their state is read, and not rightly."""
    model = edited(load(kind), tokenizer, target_modules=TARGETS)
    before = logits(model, ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(model, ids), before)
    loaded = PeftModel.from_pretrained(load(kind), tmp_path).eval()
    assert torch.equal(logits(loaded, ids), before)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded, ids), logits(load(kind), ids))


@one_of_each
def test_items_are_forgotten_one_by_one(load, tokenizer, ids, kind):
    """The default of `unlearn`: the rows, the readout and the strengths."""
    model = unlearn(load(kind), tokenizer, ITEMS, KEPT)
    report = model.reports["default"]
    assert sum(item.after for item in report.items) < 0.5 * sum(item.before for item in report.items)
    for item in ITEMS:
        model.base_model.restore_item(item)
    assert torch.equal(logits(model, ids), logits(load(kind), ids))


@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-float8"])
def test_items_are_those_of_the_dequantised_model(load, tokenizer, kind):
    """Rows, readout and strengths, where no input is rounded: as of a model in float32 with the same weights."""
    quantised, dequantised = load(kind), load()
    for name, layer in quantised.named_modules():
        if isinstance(layer, nn.Linear):
            dequantised.get_submodule(name).weight.data = float_weight(layer).clone()
    found, expected = (unlearn(model, tokenizer, ITEMS, KEPT) for model in (quantised, dequantised))
    strengths = expected.base_model.item_strengths()
    assert found.base_model.item_strengths() == pytest.approx(strengths, rel=1e-2)
    for name, layer in layers_of(expected).items():
        products = []
        for other in (layers_of(found)[name], layer):
            right, left, _ = (factor.detach().double() for factor in other.factors("default"))
            products.append(left @ right)
        assert relative_error(*products) < 1e-2


# ------------------------------------------------------------------------------------------------ merging


@every_kind
def test_merging_requantises_and_reports_the_error(load, tokenizer, kind):
    model = edited(load(kind), tokenizer, target_modules=TARGETS)
    wanted, change = {}, {}
    for name, layer in layers_of(model).items():
        change[name] = layer.get_delta_weight("default")
        wanted[name] = float_weight(layer.get_base_layer()).float() + change[name]
    with pytest.warns(UserWarning, match="Merging quantised 4 weights again.*times as large"):
        model.merge_adapter()
    errors = model.base_model.requantization_errors()
    kinds = {type(module.get_base_layer().weight) for module in layers_of(model).values()}
    assert kinds == {type(load(kind).model.layers[0].mlp.down_proj.weight)}
    for name, layer in layers_of(model).items():
        missed = float_weight(layer.get_base_layer()).float() - wanted[name]
        assert errors[name] == pytest.approx(float(missed.norm() / change[name].norm()), rel=0.02)
        # a code is off by half a step at most: that of 8 bits, of 3 bits of mantissa, or of the widest gap of nf4
        step = {"float8": 2**-4, "nf4": 0.152}.get(kind.split("-")[1], 0.5 / 127)
        assert float(missed.abs().max()) < 1.1 * step * float(wanted[name].abs().max())


@every_kind
def test_unmerging_restores_to_the_bit(load, tokenizer, ids, kind):
    model = edited(load(kind), tokenizer, target_modules=TARGETS)
    unmerged = logits(model, ids)
    parameters = {name: layer.get_base_layer().weight for name, layer in layers_of(model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
        merged = logits(model, ids)
        model.unmerge_adapter()
    assert not torch.equal(merged, unmerged)
    assert torch.equal(logits(model, ids), unmerged)
    assert all(layer.get_base_layer().weight is parameters[name] for name, layer in layers_of(model).items())
    assert model.base_model.requantization_errors() == {}
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), logits(load(kind), ids))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(logits(model.merge_and_unload(), ids), merged)


@one_of_each
def test_one_merge_after_the_other_is_both_at_once(load, tokenizer, ids, kind):
    """Each change is taken from the weight that was quantised first, so nothing is rounded twice."""
    model = twice_edited(load(kind), tokenizer, target_modules=TARGETS)
    model.base_model.set_adapter(["first", "second"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.merge_adapter()
        at_once = logits(model, ids)
        model.unmerge_adapter()
        model.merge_adapter(["first"])
        model.merge_adapter(["second"])
    assert torch.equal(logits(model, ids), at_once)


@one_of_each
def test_a_safe_merge_that_fails_leaves_everything(load, tokenizer, kind):
    model = edited(load(kind), tokenizer, target_modules=TARGETS)
    with torch.no_grad():
        layers_of(model)["model.layers.1.mlp.down_proj"].engram_B["default"].weight[0, 0] = torch.inf
    with unchanged_layers(model), warnings.catch_warnings(), pytest.raises(ValueError, match="NaN"):
        warnings.simplefilter("ignore")
        model.merge_adapter(safe_merge=True)


# ------------------------------------------------------------------------------------------------ without the libraries


PLAIN = """
import sys
sys.modules["bitsandbytes"] = sys.modules["torchao"] = None  # as if they were not installed
import torch
from peft import get_peft_model
from engram_peft import EngramConfig, collect_statistics, extract_engram
model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), EngramConfig(target_modules=["0"]))
target = collect_statistics(model, [torch.randn(2, 4)])
extract_engram(model, target, target, scale="adaptive")
model.merge_adapter()
model.unmerge_adapter()
print(type(model.merge_and_unload()[0]).__name__)
"""


def test_plain_models_need_no_quantisation_library():
    found = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True)
    assert found.stdout == "Linear\n", found.stderr


def test_benchmark_names_the_package_that_is_missing(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("benchmarks_quantised", folder / "quantised.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"torchao, which is not installed.*\n.*engram-adapters\[quantised\]"):
        benchmark.quantization_config("torchao-int8")


# ------------------------------------------------------------------------------------------------ what cannot be merged


def test_torchao_without_its_config_can_be_edited_but_not_merged(load, tokenizer, ids):
    """`quantize_` on a loaded model: nothing says how to quantise a weight again."""
    plain = load()
    quantize_(plain, Int8WeightOnlyConfig())
    model = edited(plain, tokenizer, target_modules=TARGETS)
    before = logits(model, ids)
    assert relative_error(before, logits(load("torchao-int8"), ids)) > 0.01
    with unchanged_layers(model), pytest.raises(TypeError, match="TorchAoConfig.*unmerged"):
        model.merge_adapter()
    assert torch.equal(logits(model, ids), before)


@contextmanager
def unchanged_layers(model):
    """Fails unless the base layers are the same objects with the same tensors, and no adapter is merged, afterwards."""

    def held():
        bases = {name: layer.get_base_layer() for name, layer in layers_of(model).items()}
        return {
            name: (id(base), [id(t) for t in (*base.parameters(), *base.buffers())]) for name, base in bases.items()
        }

    before = held()
    yield
    assert held() == before
    assert not any(layer.merged for layer in layers_of(model).values())


class RowCodes(nn.Module):
    """A linear layer of int8 codes, one scale a row, as GPTQ and AWQ have: no `weight` and no way back."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype), self.bias)


@pytest.fixture
def forward_only(load, monkeypatch):
    """A model with `RowCodes` in its MLPs, which PEFT is made to know as a format that it can only run."""

    def resolve(layer, **kwargs):
        return ForwardOnlyQuantizationBackend("gptq") if isinstance(layer, RowCodes) else None

    for module in (weights, stored):
        monkeypatch.setattr(module, "resolve_quantization_backend", resolve)
    model = load()
    for layer in model.model.layers:
        for name in TARGETS:
            setattr(layer.mlp, name, RowCodes(getattr(layer.mlp, name)))
    return model


def test_a_format_without_dequantisation_is_read_by_its_outputs(forward_only):
    layer = forward_only.model.layers[1].mlp.gate_proj
    layer.bias = nn.Parameter(torch.arange(128.0))
    assert relative_error(float_weight(layer), layer.qweight.double() * layer.scales.double()) < 1e-5


def test_a_format_without_requantisation_does_all_but_merge(forward_only, tokenizer, ids, tmp_path):
    plain = copy.deepcopy(forward_only)
    # the query comes first and could be merged into
    model = edited(forward_only, tokenizer, target_modules=["q_proj", *TARGETS], scale="adaptive")
    after = logits(model, ids)
    names = ["self_attn.q_proj", *(f"mlp.{name}" for name in TARGETS)]
    assert set(layers_of(model)) == {f"model.layers.{i}.{name}" for i in range(2) for name in names}
    assert relative_error(after, logits(plain, ids)) > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(plain, tmp_path).eval(), ids), after)
    with unchanged_layers(model), pytest.raises(TypeError, match="gptq layer, which cannot be requantised.*unmerged"):
        model.merge_adapter()
    with unchanged_layers(model), pytest.raises(TypeError, match="gptq"):
        model.merge_and_unload()
    assert torch.equal(logits(model, ids), after)


def test_a_way_of_quantising_that_does_not_apply_to_one_layer_is_noticed(load, tokenizer, ids):
    model = edited(load("torchao-int8"), tokenizer, target_modules=TARGETS)
    before = logits(model, ids)
    for layer in layers_of(model).values():
        layer.quantization_backend.get_apply_tensor_subclass = lambda: Float8WeightOnlyConfig()
    with pytest.raises(TypeError, match="Float8Tensor in the place of a Int8Tensor"):
        model.merge_adapter()
    assert torch.equal(logits(model, ids), before)
