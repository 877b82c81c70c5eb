"""What is particular about embeddings, convolutions and layers that were taught."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from engram_peft import (
    EngramConfig,
    LayerKind,
    Moment,
    Statistics,
    collect_statistics,
    extract_engram,
    extract_items,
    merge_statistics,
    register_layer,
)
from engram_peft.editing import kinds
from engram_peft.editing.kinds import EmbeddingKind, LinearKind, kind_of
from engram_peft.editing.selection import Selection, mlp_writers, residual_writers, select_layers

from ..layer_kinds import CASES, Model, Pairs, edited, floats, inputs, of_even_samples, statistics
from ..tuners.adapters import close, same_tensors, tensors, unchanged
from .reference import relative_error


# ---------------------------------------------------------------------------------------------------------- groups


class Split(nn.Module):
    """A grouped convolution as one convolution a group."""

    def __init__(self, grouped: nn.Conv2d) -> None:
        super().__init__()
        shape = (grouped.in_channels // grouped.groups, grouped.out_channels // grouped.groups, grouped.kernel_size)
        self.parts = nn.ModuleList(
            nn.Conv2d(*shape, grouped.stride, grouped.padding, grouped.dilation, bias=grouped.bias is not None)
            for _ in range(grouped.groups)
        )
        for number, part in enumerate(self.parts):
            for name, parameter in part.named_parameters():
                parameter.data = getattr(grouped, name).detach().chunk(grouped.groups)[number].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(y) for part, y in zip(self.parts, x.chunk(len(self.parts), 1), strict=True)], dim=1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": "effective_rank"},
        {"cut": "energy", "energy_fraction": 0.9},
        {"cut": "ridge", "ridge_delta": 0.1},
        {"cut": "mp_n"},
        {"cut": "mp"},
        {"rank_fraction": 0.4},
        {"condition_cap": 5.0},
        {"spectral_filter": "power:2"},
        {"spectral_filter": "threshold:0.2"},
        {"null_space": True, "null_space_threshold": 0.9},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
@pytest.mark.parametrize("case", ["conv2d_grouped", "conv2d_depthwise"])
@pytest.mark.parametrize("r", [None, 1])
def test_the_groups_of_a_layer_are_layers_of_their_own(case, options, r):
    grouped, split = Model(case), Split(Model(case).layer)
    changes, reports = [], []
    for plain, target_modules in ((grouped, ["layer"]), (split, r"parts\.\d+")):
        model = get_peft_model(plain, EngramConfig(target_modules=target_modules, r=r))
        data = [[{"x": inputs(case, seed)}] for seed in (1, 2, 3)]
        target, others, protected = (collect_statistics(model, batches) for batches in data)
        given = {"scale": "uniform", **options}
        if "null_space" in given:
            given["null_space"] = protected
        reports.append(extract_engram(model, target, merge_statistics(target, others), **given))
        layers = [m for m in model.modules() if hasattr(m, "engram_A")]
        factor = torch.cat([m.get_delta_weight("default") / m.engram_strength["default"].weight[0] for m in layers])
        changes.append(factor)
    assert relative_error(changes[0], changes[1]) < 1e-4
    one, several = reports[0].layers["layer"], list(reports[1].layers.values())
    assert one.kept == sum(d.kept for d in several) and one.width == sum(d.width for d in several)
    shares = torch.cat([d.eigenvalues for d in several]).sort(descending=True).values
    assert torch.allclose(one.eigenvalues, shares, atol=1e-6)
    assert one.weight_norm == pytest.approx(sum(d.weight_norm**2 for d in several) ** 0.5, rel=1e-5)
    assert one.projection_norm == pytest.approx(sum(d.projection_norm**2 for d in several) ** 0.5, rel=1e-3)
    str(reports[0])
    released = reports[0].release().layers["layer"]
    assert torch.equal(released.eigenvalues, one.eigenvalues)


def test_a_group_that_the_target_never_uses_stays_as_it_is():
    model = get_peft_model(Model("conv2d_grouped"), EngramConfig(target_modules=["layer"], absorb_bias=False))
    x = inputs("conv2d_grouped", 1)
    silent = x.clone()
    silent[:, 2:] = 0  # the channels of the second group
    target = collect_statistics(model, [{"x": silent}])
    extract_engram(model, target, merge_statistics(target, collect_statistics(model, [{"x": x}])))
    change = model.base_model.model.layer.get_delta_weight("default")
    assert float(change[3:].abs().max()) == 0 and float(change[:3].abs().max()) > 0.01


def test_moments_of_groups_are_merged_weighted_and_copied_like_others():
    rows = torch.randn(2, 40, 3, 4, generator=torch.Generator().manual_seed(0))
    parts = [Moment(4, groups=3), Moment(4, groups=3)]
    for part, some in zip(parts, rows, strict=True):
        part.add(some[:7])
        part.add(some[7:])
    copy = parts[0].copy()
    copy.add(rows[1])
    everything = torch.einsum("ngi,ngj->gij", rows.flatten(0, 1).double(), rows.flatten(0, 1).double())
    for found in (Moment.merged(parts), copy, Moment.merged([parts[0].weighted(0.5), copy]).weighted(1 / 1.5)):
        assert found.dense().shape == (3, 4, 4)
    assert close(Moment.merged(parts).dense(), everything, 1e-6) and close(copy.dense(), everything, 1e-6)
    assert close(parts[1].weighted(3).dense(), 3 * parts[1].dense(), 1e-6)
    assert parts[0].count == 40 and copy.count == Moment.merged(parts).count == 80
    with pytest.raises(ValueError, match="width 3 x 4 and 4"):
        Moment.merged([parts[0], Moment(4)])
    with pytest.raises(ValueError, match="width 3 x 4 and 2 x 4"):
        Moment.merged([parts[0], Moment(4, groups=2)])


@pytest.mark.parametrize("other", ["conv2d_grouped", "conv1d", "Embedding", "Linear"])
def test_statistics_of_another_shape_are_refused(other):
    model = get_peft_model(Model("conv2d_depthwise"), EngramConfig(target_modules=["layer"]))
    found = Statistics(statistics(Model(other), other)[0].moments)
    with unchanged(model), pytest.raises(ValueError, match="rows of width .*, expected 4 x 9"):
        extract_engram(model, found, found)


@pytest.mark.parametrize("groups, shape", [(2, [3, 10]), (3, [3, 10])])
def test_a_file_that_claims_other_groups_is_refused(tmp_path, groups, shape):
    from safetensors.torch import save_file

    index = f'[{{"dim": 4, "groups": {groups}, "count": 5, "names": ["a"]}}]'
    metadata = {"format": "engram_peft.statistics", "version": "1", "moments": index, "provenance": "{}"}
    save_file({"0.upper": torch.ones(shape)}, tmp_path / "file.safetensors", metadata)
    if groups == shape[0]:
        assert Statistics.load(tmp_path / "file.safetensors").moments["a"].groups == 3
        return
    with pytest.raises(ValueError, match="claims 20 values, holds 30"):
        Statistics.load(tmp_path / "file.safetensors")


# ------------------------------------------------------------------------------------------------------ embeddings


def test_an_embedding_keeps_the_share_of_a_token_that_is_not_the_targets():
    model = get_peft_model(Model("Embedding"), EngramConfig(target_modules=["layer"], alpha=0.6))
    before = model.base_model.model.layer.base_layer.weight.detach().clone()
    forget, keep = torch.tensor([[4, 4, 4, 7, 0]]), torch.tensor([[4, 0, 0, 0, 9]])
    target = collect_statistics(model, [forget])
    extract_engram(model, target, merge_statistics(target, collect_statistics(model, [keep])))
    kept = torch.ones(11)
    kept[4], kept[7], kept[0] = 1 - 0.6 * 3 / 4, 1 - 0.6, 1 - 0.6 / 4
    ids = torch.arange(11)[None]
    assert torch.allclose(model(ids)[0], kept[:, None] * before, rtol=1e-5)
    model.merge_adapter()
    assert torch.allclose(model.base_model.model.layer.base_layer.weight, kept[:, None] * before, rtol=1e-5)


def test_nothing_of_the_size_of_the_vocabulary_squared_is_made(tmp_path):
    """A quarter of a million tokens squared would be 256 GB."""
    plain = nn.Sequential(nn.Embedding(250_000, 4))
    model = get_peft_model(plain, EngramConfig(target_modules=["0"]))
    ids = torch.randint(0, 250_000, (4, 50), generator=torch.Generator().manual_seed(0))
    target = collect_statistics(model, [ids[:1]])
    total = merge_statistics(target, collect_statistics(model, [ids[1:]]))
    assert sum(t.numel() for t in total.moments["0"].tensors()) == 2 * 250_000
    extract_engram(model, target, total)
    layer = model.base_model.model[0]
    assert sum(p.numel() for name, p in layer.named_parameters() if "engram_" in name) <= 250_000 + 1
    total.save(tmp_path / "total.safetensors")
    assert (tmp_path / "total.safetensors").stat().st_size < 2_100_000


def gemma() -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["gemma", "qwen3", "llama"])
def test_the_embedding_of_a_language_model_is_edited_and_its_head_is_not(tiny_model, token_ids, kind):
    plain = gemma() if kind == "gemma" else tiny_model(kind)
    model = get_peft_model(plain, EngramConfig(target_modules=["embed_tokens"], alpha=0.5)).eval()
    target = collect_statistics(model, [token_ids(2, 6, seed=1)])
    extract_engram(model, target, merge_statistics(target, collect_statistics(model, [token_ids(8, 6, seed=2)])))
    ids = token_ids(2, 6, seed=1)
    layer = model.get_base_model().get_input_embeddings()
    share = (target.moments["model.embed_tokens"].dense() / (1e-30 + merge_counts(target, token_ids)))[ids, 0]
    with torch.no_grad():
        assert torch.allclose(layer(ids), layer.base_layer(ids) * (1 - 0.5 * share.float()), atol=1e-5)
        unmerged = model(input_ids=ids).logits
        head = model.get_base_model().get_output_embeddings().weight.detach().clone()
        before = tensors(model)
        if kind != "llama":  # tied
            with unchanged(model), pytest.raises(ValueError, match="embed_tokens shares its weight with .*lm_head"):
                model.merge_adapter()
        model.base_model.merge_adapter(untie=True)
        assert close(model(input_ids=ids).logits, unmerged, 1e-4)
        assert torch.equal(model.get_base_model().get_output_embeddings().weight, head)
        model.unmerge_adapter()
        assert same_tensors(tensors(model), before)


def merge_counts(target, token_ids):
    """How often each token occurs in the data of the test above, `(99, 1, 1)`."""
    ids = torch.cat([token_ids(2, 6, seed=1).flatten(), token_ids(8, 6, seed=2).flatten()])
    return torch.nn.functional.one_hot(ids, 99).sum(0).double()[:, None, None]


def test_a_null_space_protects_the_tokens_of_an_embedding_that_it_uses():
    model = get_peft_model(Model("Embedding"), EngramConfig(target_modules=["layer"]))
    target, total = (collect_statistics(model, [torch.tensor([ids])]) for ids in ([1, 2, 2], [1, 2, 2, 5]))
    protected = collect_statistics(model, [torch.tensor([[2, 8]])])
    extract_engram(model, target, total, null_space=protected)
    change = model.base_model.model.layer.get_delta_weight("default")
    assert change[1].any() and not change[2].any() and not change[8].any()
    with pytest.raises(ValueError, match="uses every direction of layer"):
        extract_engram(model, target, total, null_space=target)


def test_embeddings_that_compute_something_else_are_refused(tiny_model):
    with pytest.raises(TypeError, match="embed_positions.*OPTLearnedPositionalEmbedding"):
        get_peft_model(tiny_model("opt"), EngramConfig(target_modules=["embed_positions"]))
    assert kind_of(nn.Embedding(3, 2, max_norm=1.0)) is None
    assert isinstance(kind_of(gemma().get_input_embeddings()), EmbeddingKind)


# ---------------------------------------------------------------------------------------------------------- images


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=2, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, num_labels=3, initializer_range=0.3,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def resnet() -> ResNetForImageClassification:
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=2, embedding_size=4, hidden_sizes=[6, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return ResNetForImageClassification(config).eval()


def images(seed: int) -> torch.Tensor:
    return torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": images(seed), "labels": torch.arange(6) % 3}


MODELS = {
    "vit": (vit, ["projection", "query", "fc1", "fc2", "classifier"]),
    "resnet": (resnet, ["convolution", "classifier.1"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_vision_model_is_edited_and_saved(name, tmp_path):
    make, target_modules = MODELS[name]
    model = get_peft_model(make(), EngramConfig(target_modules=target_modules, alpha=0.3)).eval()
    target = collect_statistics(model, [batch_of(1)], mask_fn=lambda batch: batch["labels"] == 0)
    others = collect_statistics(model, [batch_of(1), batch_of(2)], mask_fn=lambda batch: batch["labels"] != 0)
    extract_engram(model, target, merge_statistics(target, others), scale="uniform")
    with torch.no_grad():
        unmerged = model(pixel_values=images(3)).logits
        model.save_pretrained(tmp_path)
        assert torch.equal(PeftModel.from_pretrained(make(), tmp_path)(pixel_values=images(3)).logits, unmerged)
        with model.disable_adapter():
            assert not close(model(pixel_values=images(3)).logits, unmerged, 1e-3)
        model.merge_adapter()
        assert close(model(pixel_values=images(3)).logits, unmerged, 1e-4)


def test_a_mask_of_samples_holds_for_all_their_positions():
    """The rows of some images are those of the images alone."""
    names = {"target_modules": ["projection", "query", "fc2", "classifier"]}
    masked = collect_statistics(vit(), [batch_of(1)], mask_fn=lambda batch: batch["labels"] == 0, **names)
    alone = collect_statistics(vit(), [{"pixel_values": images(1)[[0, 3]]}], **names)
    positions = {"projection": 4, "query": 5, "fc2": 5, "classifier": 1}
    for name, moment in masked.moments.items():
        assert moment.count == alone.moments[name].count == 2 * positions[name.rpartition(".")[2]]
        assert close(moment.dense(), alone.moments[name].dense(), 1e-5)


def test_images_whose_label_is_ignored_do_not_count_and_plain_tensors_all_do():
    labels = torch.tensor([0, -100, -100, 2, -100, -100])
    by_label = collect_statistics(vit(), [{"pixel_values": images(1), "labels": labels}])
    alone = collect_statistics(vit(), [images(1)[[0, 3]]])
    assert by_label.counts == alone.counts and by_label.provenance.mask == "labels"
    for name, moment in by_label.moments.items():
        assert close(moment.dense(), alone.moments[name].dense(), 1e-5)


def test_a_mask_that_fits_neither_samples_nor_rows_is_refused(token_ids, tiny_model):
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.reshape(-1, 2, 4))

    x = floats(4, 4)(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="fc has 24 rows, the mask has 6 entries.*one row a sample"):
        collect_statistics(Windows(), [{"x": x}], mask_fn=lambda batch: torch.arange(6) < 3)
    everything = collect_statistics(Windows(), [{"x": x}], mask_fn=lambda batch: torch.ones(6, dtype=torch.bool))
    assert everything.counts == {"fc": 24}
    with pytest.raises(ValueError, match=r"mask has shape \[2\], the batch has \[2, 5\]: one entry a token"):
        ids = token_ids(2, 5)
        collect_statistics(tiny_model("llama"), [ids], mask_fn=lambda batch: torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("change", [{}, {"stride": 2}, {"padding": 0}, {"kernel_size": 1}, {"bias": False}])
def test_convolutions_share_a_moment_where_they_see_the_same_patches(change):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 3, padding=1)
            self.b = nn.Conv2d(3, 5, **{"kernel_size": 3, "padding": 1, **change})

        def forward(self, x: torch.Tensor) -> None:
            self.a(x), self.b(x)

    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    both = collect_statistics(Branches(), [x], target_modules=["a", "b"])
    assert (both.moments["a"] is both.moments["b"]) == (not change)
    for name in "ab":
        alone = collect_statistics(Branches(), [x], target_modules=[name])
        assert torch.equal(both.moments[name].dense(), alone.moments[name].dense())


# ------------------------------------------------------------------------------------------------------- selection


def test_all_linear_leaves_embeddings_and_convolutions_alone(tiny_model):
    for plain in (vit(), tiny_model("gpt2")):
        for target_modules in (None, "all-linear"):
            chosen = select_layers(plain, Selection(target_modules=target_modules))
            assert chosen and all(isinstance(kind_of(layer), LinearKind) for layer in chosen.values())
    assert not any(
        isinstance(kind_of(layer), EmbeddingKind) for layer in residual_writers(tiny_model("gpt2")).values()
    )
    assert sorted(mlp_writers(vit())) == [0, 1]


@pytest.mark.parametrize("case", ["Embedding", "conv2d", "register_layer"])
def test_item_by_item_is_refused_for_layers_without_a_row_a_token(case, tiny_tokenizer):
    model = edited(case)
    with unchanged(model), pytest.raises(ValueError, match="layer is a `.*`, which cannot be edited item by item"):
        extract_items(model, tiny_tokenizer(), forget=[("a", "b")], retain=["c"])


def test_a_kind_covers_subclasses_that_compute_the_same(monkeypatch):
    class Same(nn.Conv2d):
        pass

    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    same, other = Same(3, 4, 2), Standardised(3, 4, 2)
    assert kind_of(same) is kind_of(nn.Conv2d(3, 4, 2)) and kind_of(other) is None
    with pytest.raises(TypeError, match="0.*Standardised.*register_layer"):
        get_peft_model(nn.Sequential(other), EngramConfig(target_modules=["0"]))
    kind = LayerKind()
    register_layer(Standardised, kind)
    assert kind_of(other) is kind
    assert kind_of(nn.ConvTranspose2d(3, 4, 2)) is None and kind_of(nn.LayerNorm(3)) is None


@pytest.mark.parametrize(
    "arguments, message", [((nn.Linear(2, 2), LayerKind()), "layer_type"), ((nn.Linear, LayerKind), "kind")]
)
def test_bad_input_of_register_layer_is_refused(arguments, message):
    with pytest.raises(TypeError, match=f"`{message}` should be"):
        register_layer(*arguments)


def test_rows_that_do_not_fit_the_matrix_are_refused(monkeypatch):
    class Wrong(LayerKind):
        """Forgets the token before."""

    monkeypatch.setattr(kinds, "_KINDS", {**kinds._KINDS, Pairs: Wrong()})
    with pytest.raises(ValueError, match="Wrong makes rows of width 3 of the input of layer, and a matrix of width 6"):
        collect_statistics(Model("register_layer"), [inputs("register_layer", 0)], target_modules=["layer"])


def test_a_convolution_whose_weight_is_offloaded_is_refused_and_an_embedding_is_not():
    for case in ("conv2d", "Embedding"):
        model = edited(case)
        with torch.no_grad():
            expected = model(inputs(case, 5))
        cpu_offload(model.base_model.model.layer.base_layer, execution_device=torch.device("cpu"))
        if case == "conv2d":
            with pytest.raises(ValueError, match="`Conv2d` is edited in its weight, which is offloaded"):
                model(inputs(case, 5))
        else:
            assert torch.equal(model(inputs(case, 5)), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_bfloat16_layer_stays_one(case):
    model = edited(case)
    model.base_model.model.layer.base_layer.bfloat16()
    x = inputs(case, 5)
    x = x.bfloat16() if x.is_floating_point() else x
    with torch.no_grad():
        unmerged = model(x)
        model.merge_adapter()
        merged = model(x)
    assert unmerged.dtype == merged.dtype == torch.bfloat16
    if case in ("Linear", "Conv1D", "Embedding"):
        assert close(merged.float(), unmerged.float(), 0.02)
    else:
        assert torch.equal(merged, unmerged)


def test_a_single_unbatched_sample_is_collected():
    x = CASES["conv2d"].inputs(torch.Generator().manual_seed(0))[0]
    batched, alone = (collect_statistics(Model("conv2d"), [y], target_modules=["layer"]) for y in (x[None], x))
    assert torch.equal(batched.moments["layer"].dense(), alone.moments["layer"].dense())


def test_half_of_the_samples_and_the_other_half_make_the_whole():
    for case in CASES:
        model, batch = Model(case), {"x": inputs(case, 1)}
        whole, even, odd = (
            collect_statistics(model, [batch], mask_fn=mask_fn, target_modules=["layer"])
            for mask_fn in (
                lambda batch: torch.ones_like(of_even_samples(batch["x"])),
                lambda batch: of_even_samples(batch["x"]),
                lambda batch: ~of_even_samples(batch["x"]),
            )
        )
        merged = merge_statistics(even, odd).moments["layer"]
        assert merged.count == whole.moments["layer"].count, case
        assert close(merged.dense(), whole.moments["layer"].dense(), 1e-6), case
