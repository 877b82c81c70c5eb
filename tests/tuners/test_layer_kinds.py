"""Every operation of the tuner on every kind of layer. `docs/layers.md` has a table of these tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from torch import nn

from engram_peft import EngramConfig, Statistics, extract_engram
from engram_peft.editing.kinds import kind_of
from engram_peft.interop.lora import engram_to_lora

from ..layer_kinds import (
    CASES,
    Model,
    by_position,
    edit_by_loops,
    edited,
    homogeneous,
    inputs,
    matrices,
    output_of,
    rows_by_loops,
    statistics,
    sums_by_loops,
)
from .adapters import close, layers_of, same_tensors, tensors, unchanged


LAYERS_PAGE = Path(__file__).parents[2] / "docs" / "layers.md"

each_case = pytest.mark.parametrize("case", CASES)


def outputs(model: nn.Module, case: str) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs(case, seed=5))


@each_case
def test_rows_and_matrix_make_up_the_layer(case):
    layer, x = Model(case).layer, inputs(case, 0)
    kind, rows = kind_of(layer), rows_by_loops(layer, x)
    assert close(output_of(layer, rows), by_position(layer, layer(x)).double(), 1e-5)  # the loops are right
    groups, out, width = kind.shape(layer)
    assert matrices(layer, layer.weight).shape == (groups, out, width)
    assert torch.equal(
        kind.matrix(layer, layer.weight).reshape(groups, out, width).double(), matrices(layer, layer.weight)
    )
    assert torch.equal(kind.weight(layer, kind.matrix(layer, layer.weight)), layer.weight)
    if kind.one_hot:
        assert torch.equal(kind.rows(layer, x), rows.argmax(2)[..., 0])
    else:
        assert torch.equal(kind.rows(layer, x).reshape(rows.shape), rows.float())


@each_case
def test_collect(case):
    model = Model(case)
    target, total = statistics(model, case)
    s_t, s_a, n, n_total = sums_by_loops(model.layer, case)
    for found, sums, count in ((target, s_t, n), (total, s_a, n_total)):
        moment = found.moments["layer"]
        assert moment.count == count
        assert close(moment.dense().reshape(sums.shape), sums, 1e-5)


@each_case
def test_statistics_are_saved_to_the_bit(case, tmp_path):
    for found in statistics(Model(case), case):
        found.save(tmp_path / "statistics.safetensors")
        loaded = Statistics.load(tmp_path / "statistics.safetensors")
        assert loaded.counts == found.counts and loaded.provenance == found.provenance
        assert torch.equal(loaded.moments["layer"].dense(), found.moments["layer"].dense())


@each_case
def test_forward(case):
    """The edit is that of a dense layer over the rows, each group a layer of its own."""
    model = edited(case)
    layer, x = Model(case).layer, inputs(case, seed=5)
    rows = homogeneous(layer, rows_by_loops(layer, x))
    kept = rows - 0.7 * torch.einsum("spgi,gji->spgj", rows, edit_by_loops(layer, case))
    weight = matrices(layer, layer.weight)
    if rows.shape[-1] > weight.shape[-1]:
        weight = torch.cat([weight, layer.bias.detach().double().reshape(*weight.shape[:2], 1)], dim=-1)
    expected = torch.einsum("spgi,goi->spgo", kept, weight)
    expected = expected.sum(2) if case == "Embedding" else expected.flatten(2)
    assert close(by_position(layer, outputs(model, case)).double(), expected, 1e-4)
    assert not close(
        by_position(layer, outputs(model, case)).double(), output_of(layer, rows_by_loops(layer, x)), 1e-2
    )


@each_case
def test_merge(case):
    model = edited(case)
    layer = model.base_model.model.layer
    unmerged, before = outputs(model, case), layer.base_layer.weight.detach().clone()
    change = layer.get_delta_weight("default")
    assert change.shape == before.shape
    model.merge_adapter()
    assert close(outputs(model, case), unmerged, 1e-5)
    assert torch.equal(layer.base_layer.weight, before + change)
    assert all(parameter.is_contiguous() for parameter in layer.base_layer.parameters())  # else it cannot be saved
    merged = model.merge_and_unload()
    assert type(merged.layer) is type(Model(case).layer) and close(outputs(merged, case), unmerged, 1e-5)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerge(case, dtype):
    model = edited(case)
    model.base_model.model.layer.base_layer.to(dtype)
    parameters = dict(model.base_model.model.layer.base_layer.named_parameters())
    before = tensors(model)
    model.merge_adapter()
    assert not same_tensors(tensors(model), before)
    model.unmerge_adapter()
    assert same_tensors(tensors(model), before)
    assert all(model.base_model.model.layer.base_layer.get_parameter(name) is p for name, p in parameters.items())


@each_case
def test_save(case, tmp_path):
    model = edited(case)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(Model(case).eval(), tmp_path)
    assert same_tensors(tensors(loaded), tensors(model))
    assert torch.equal(outputs(loaded, case), outputs(model, case))


@each_case
def test_lora_export(case):
    model = edited(case)
    if (reason := "no LoRA for a `Pairs`" if case == "register_layer" else CASES[case].no_lora) is not None:
        with unchanged(model), pytest.raises(ValueError, match=f"layer.*{reason}"):
            engram_to_lora(model.base_model)
        return
    config, state = engram_to_lora(model.base_model)
    lora = get_peft_model(Model(case).eval(), config)
    loaded = set_peft_model_state_dict(lora, state)
    assert not loaded.unexpected_keys and not [key for key in loaded.missing_keys if "lora_" in key]
    assert close(outputs(lora, case), outputs(model, case), 1e-5)
    if "groups" not in case and getattr(Model(case).layer, "groups", 1) == 1:  # PEFT cannot merge into grouped ones
        assert close(outputs(lora.merge_and_unload(), case), outputs(model, case), 1e-5)


@each_case
def test_several_adapters(case):
    model = edited(case, "first")
    base = outputs(Model(case), case)
    first = outputs(model, case)
    model.add_adapter("second", EngramConfig(target_modules=["layer"], alpha=0.4))
    with model.disable_adapter():
        assert torch.equal(outputs(model, case), base)
        found = statistics(model, case, seed=2)
    extract_engram(model, *found, "second", scale="uniform")
    model.set_adapter("second")
    second = outputs(model, case)
    model.base_model.set_adapter(["first", "second"])
    both = outputs(model, case)
    assert close(both - base, (first - base) + (second - base), 1e-4) and not close(both, first, 1e-2)
    model.merge_adapter()
    assert close(outputs(model, case), both, 1e-5)
    model.unmerge_adapter()
    model.base_model.add_weighted_adapter(["first", "second"], [1.0, -0.5], "sum")
    model.set_adapter("sum")
    assert close(outputs(model, case) - base, (first - base) - 0.5 * (second - base), 1e-4)
    names = ["first", "__base__", "second", "first", "sum", "__base__"]
    with torch.no_grad():
        mixed = model(inputs(case, seed=5), adapter_names=names)
    by_name = {"first": first, "second": second, "__base__": base, "sum": outputs(model, case)}
    expected = torch.stack([by_name[name][i] for i, name in enumerate(names)])
    assert close(mixed, expected, 1e-6)


@each_case
def test_a_strength_of_zero_is_the_base_model_to_the_bit(case):
    model = edited(case)
    model.base_model.set_scale("default", 0.0)
    assert torch.equal(outputs(model, case), outputs(Model(case), case))


@each_case
def test_gradients_reach_the_factors(case):
    """The output is linear in the strengths, so its derivative is a difference."""
    model = edited(case)
    strength = model.base_model.model.layer.engram_strength["default"].weight
    strength.requires_grad_(True)
    weights = torch.randn(outputs(model, case).shape, generator=torch.Generator().manual_seed(0))
    (model(inputs(case, seed=5)) * weights).sum().backward()
    with_edit, without = (outputs(m, case) for m in (model, Model(case)))
    expected = ((with_edit - without) * weights).sum()
    assert close(strength.grad.sum(), expected, 1e-3)


@each_case
@pytest.mark.parametrize("r", [1, 2])
def test_a_limited_rank_is_the_best_of_that_rank_a_group(case, r):
    """By the error of the output over the reference's rows, `||W (M - M_r) C_a^(1/2)||`: Eckart and Young's bound."""
    model = edited(case, r=r, absorb_bias=False)
    layer = Model(case).layer
    s_t, s_a, n, total = (s if isinstance(s, int) else s for s in sums_by_loops(layer, case))
    width = matrices(layer, layer.weight).shape[-1]
    c_t, c_a = s_t[:, :width, :width] / n, s_a[:, :width, :width] / total
    values, vectors = torch.linalg.eigh(c_a)
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    exact = matrices(layer, layer.weight) @ c_t @ torch.linalg.pinv(c_a, rtol=1e-5, hermitian=True)
    change = matrices(layer, model.base_model.model.layer.get_delta_weight("default")) / -0.7
    singular = torch.linalg.svdvals(exact @ root)
    best = singular[:, r:].square().sum(1).sqrt()
    assert close((exact - change).matmul(root).flatten(1).norm(dim=1), best, 1e-3) or float(best.max()) < 1e-6
    assert all(int(torch.linalg.matrix_rank(m, rtol=1e-4)) <= r for m in change)


def test_the_table_of_the_docs_lists_these_tests():
    text = LAYERS_PAGE.read_text()
    rows = [line for line in text.partition("| row |")[2].splitlines() if line.startswith("| `")]
    cells = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[3:-1]] for row in rows}
    assert list(cells) == list(CASES)
    for case, row in cells.items():
        refused = case == "register_layer" or CASES[case].no_lora is not None
        assert row[:-1] == ["yes"] * 5 and row[-1].startswith("no" if refused else "yes")
    for test in re.findall(r"`(test_\w+)`", text):
        assert test in globals(), test


@pytest.mark.parametrize(
    "snippet", re.findall(r"```python\n(.*?)```", LAYERS_PAGE.read_text(), re.DOTALL), ids=["vit", "own"]
)
def test_a_snippet_of_the_docs_edits_its_layers(snippet):
    names: dict[str, Any] = {}
    exec(snippet, names)
    model = names["model"]
    assert len(layers_of(model)) == {"vit": 3, "own": 2}["vit" if "batch" in names else "own"]
    x = names["batch"]["pixel_values"] if "batch" in names else torch.randn(4, 10, 8)
    model.eval()
    with torch.no_grad():
        unmerged = model(x)
        with model.disable_adapter():
            base = model(x)
        model.merge_adapter()
        merged = model(x)
    unmerged, base, merged = (getattr(y, "logits", y) for y in (unmerged, base, merged))
    assert close(merged, unmerged, 1e-4) and not close(merged, base, 1e-3)
