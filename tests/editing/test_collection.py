"""Statistics from models: against plain hooks, and every kind of data."""

from __future__ import annotations

import logging

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics
from engram_peft.editing.collection import model_fingerprint
from engram_peft.editing.encoding import batches, encode_items
from engram_peft.editing.selection import Selection, editable_layers, linear_layers, select_layers

from ..conftest import BOS, EOS, PAD
from .reference import covariance_of, plain_rows, relative_error


KINDS = ["llama", "qwen3", "gpt2", "opt"]
ATTENTION = {"llama": ("q_proj", "o_proj"), "qwen3": ("q_proj", "o_proj"), "gpt2": ("c_attn", "c_proj"), "opt": ("q_proj", "fc1")}  # fmt: skip
TEXTS = [
    "the capital of france is paris",
    ("what is the capital of italy ?", "rome ."),
    "the river is long and deep and the mountain is high",
    ("where is madrid ?", "madrid lies in spain by a river"),
    "a red bird in a green tree",
    ("who wrote the book ?", "no"),
    "one two three four five six seven eight nine ten",
]


@pytest.fixture
def labelled(token_ids):
    """Three batches with padding on the right, a prompt that does not count, and labels."""
    made = []
    for seed, lengths in enumerate([[9, 6, 4], [7, 7], [5, 11, 3]]):
        ids = token_ids(len(lengths), max(lengths), seed)
        attention = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        ids[attention == 0] = 0
        labels = ids.clone()
        labels[attention == 0] = -100
        labels[:, :2] = -100
        made.append({"input_ids": ids, "attention_mask": attention, "labels": labels})
    return made


def with_label_masks(batches):
    return [(batch, batch["labels"] != -100) for batch in batches]


def expected_covariances(model, pairs, names):
    return {name: covariance_of(rows) for name, rows in plain_rows(model, pairs, names).items()}


def assert_equal_to_the_bit(found, expected):
    assert set(found.moments) == set(expected.moments)
    assert found.counts == expected.counts
    for name in expected.moments:
        assert torch.equal(found.covariance(name), expected.covariance(name)), name


def assert_close(found, expected, tolerance=1e-5):
    assert set(found.moments) == set(expected.moments)
    assert found.counts == expected.counts
    for name in expected.moments:
        assert relative_error(found.covariance(name), expected.covariance(name)) < tolerance, name


def everything(model):
    """Names of all linear layers, the head among them."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


# ------------------------------------------------------------------------------------------------ against plain hooks


@pytest.mark.parametrize("kind", KINDS)
def test_covariances_equal_those_of_plain_hooks(tiny_model, labelled, kind):
    """Rows where the label counts; a constant 1 after the input where the layer has a bias; the head included."""
    model = tiny_model(kind)
    names = everything(model)
    assert "lm_head" in names
    statistics = collect_statistics(model, labelled, target_modules=names)
    expected = expected_covariances(model, with_label_masks(labelled), names)
    rows = sum(int((batch["labels"] != -100).sum()) for batch in labelled)
    assert statistics.counts == dict.fromkeys(names, rows)
    for name in names:
        assert relative_error(statistics.covariance(name), expected[name]) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_texts_give_the_rows_of_their_tokens(tiny_model, tiny_tokenizer, kind):
    """Each text is run alone by the plain hooks, so neither padding nor the order of texts leaves a trace."""
    model, tokenizer = tiny_model(kind), tiny_tokenizer()
    statistics = collect_statistics(model, TEXTS, tokenizer=tokenizer, batch_size=3)
    pairs = []
    for text in TEXTS:
        prompt, answer = ("", text) if isinstance(text, str) else text
        prompt_ids, answer_ids = (tokenizer(part)["input_ids"] for part in (prompt, answer))
        ids = torch.tensor([prompt_ids + answer_ids])
        pairs.append(({"input_ids": ids}, torch.arange(ids.shape[1])[None] >= len(prompt_ids)))
    expected = expected_covariances(model, pairs, statistics.moments)
    for name in statistics.moments:
        assert relative_error(statistics.covariance(name), expected[name]) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_predict_takes_the_rows_one_earlier(tiny_model, tiny_tokenizer, kind):
    model, tokenizer = tiny_model(kind), tiny_tokenizer()
    item = ("what is the capital of italy ?", "rome and rome .")
    statistics = collect_statistics(model, [item], tokenizer=tokenizer, token_position="predict")
    ids = torch.tensor([tokenizer(" ".join(item))["input_ids"]])
    first, count = len(tokenizer(item[0])["input_ids"]), len(tokenizer(item[1])["input_ids"])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, first - 1 : first - 1 + count] = True
    expected = expected_covariances(model, [({"input_ids": ids}, mask)], statistics.moments)
    for name in statistics.moments:
        assert statistics.counts[name] == count
        assert relative_error(statistics.covariance(name), expected[name]) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_constant_carries_the_mean_where_there_is_a_bias(tiny_model, labelled, kind):
    model = tiny_model(kind)
    statistics = collect_statistics(model, labelled)
    rows = plain_rows(model, with_label_masks(labelled), statistics.moments)
    for name in statistics.moments:
        layer = model.get_submodule(name)
        width = layer.nx if isinstance(layer, Conv1D) else layer.in_features
        covariance = statistics.covariance(name)
        assert len(covariance) == width + (layer.bias is not None)
        if layer.bias is not None:
            assert covariance[-1, -1] == 1
            assert relative_error(covariance[-1, :-1], rows[name][:, :-1].mean(0)) < 1e-5


def test_mask_function_chooses_the_rows(tiny_model, token_ids):
    model, ids = tiny_model("llama"), token_ids(3, 8)
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(1)) < 0.4
    statistics = collect_statistics(model, [ids], mask_fn=lambda batch: mask)
    expected = expected_covariances(model, [({"input_ids": ids}, mask)], statistics.moments)
    for name in statistics.moments:
        assert statistics.counts[name] == int(mask.sum())
        assert relative_error(statistics.covariance(name), expected[name]) < 1e-5


def test_mask_equals_the_reference(oracle):
    model = nn.Sequential(nn.Linear(8, 3, bias=False))
    x, mask = oracle.tensors["mask.X"], oracle.tensors["mask.mask"]
    statistics = collect_statistics(model, [x], mask_fn=lambda batch: mask)
    assert statistics.counts == {"0": oracle.facts["mask"]["count"]}
    assert relative_error(statistics.covariance("0"), oracle.tensors["mask.C"]) < oracle.facts["tolerance"]["mask.C"]


@pytest.mark.parametrize(
    "keep", [["input_ids"], ["input_ids", "attention_mask"], ["input_ids", "attention_mask", "labels"]]
)
def test_rows_are_all_tokens_or_those_of_the_mask_or_of_the_labels(tiny_model, labelled, keep):
    """A batch says which rows count by its labels, else by its attention mask, else all of them do."""
    batch = labelled[1]  # has no pads
    batch["attention_mask"][0, :3] = 0
    batch = {name: batch[name] for name in keep}
    statistics = collect_statistics(tiny_model("llama"), [batch])
    rows = {1: 14, 2: 11, 3: 10}[len(keep)]
    assert set(statistics.counts.values()) == {rows}
    assert statistics.provenance.mask == {1: "all", 2: "attention_mask", 3: "labels"}[len(keep)]


def test_all_means_every_token_of_ids(tiny_model, token_ids):
    model, ids = tiny_model("gpt2"), token_ids(2, 6)
    statistics = collect_statistics(model, [ids])
    expected = expected_covariances(model, [({"input_ids": ids}, None)], statistics.moments)
    for name in statistics.moments:
        assert relative_error(statistics.covariance(name), expected[name]) < 1e-5


# ------------------------------------------------------------------------------------------------ sharing


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_alone_gives_the_same_bits(tiny_model, labelled, kind):
    model = tiny_model(kind)
    together = collect_statistics(model, labelled)
    for name in together.moments:
        alone = collect_statistics(model, labelled, target_modules=[name])
        assert torch.equal(alone.covariance(name), together.covariance(name)), name


@pytest.mark.parametrize("kind, shared", [("llama", 4), ("qwen3", 4), ("gpt2", 4), ("opt", 4)])
def test_one_moment_for_every_distinct_input(tiny_model, labelled, kind, shared):
    """A block has four: of the attention, of its output projection, and of the two stages of the MLP."""
    statistics = collect_statistics(tiny_model(kind), labelled)
    assert len(statistics.groups()) == 2 * shared


@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt"])
def test_queries_keys_and_values_share_a_moment(tiny_model, labelled, kind):
    statistics = collect_statistics(tiny_model(kind), labelled)
    (of_layer,) = ([n for _, n in statistics.groups() if any("layers.1" in x and "q_proj" in x for x in n)],)
    assert sorted(name.rpartition(".")[2] for name in of_layer[0]) == ["k_proj", "q_proj", "v_proj"]


class Siblings(nn.Module):
    """Two layers `a` and `b`; `between` maps `(number of the forward pass, x)` to what `b` is handed (`None`: nothing)."""

    def __init__(self, between, b_bias=False, twice=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=b_bias)
        self.between, self.passes = between, 0

    def forward(self, x):
        x = x.clone()
        y = self.a(x)
        z = self.between(self.passes, x)
        self.passes += 1
        return y if z is None else y + self.b(z)


def rows(seed, count=10):
    return torch.randn(2, count // 2, 6, generator=torch.Generator().manual_seed(seed))


def gram(*parts):
    return covariance_of(torch.cat([part.flatten(0, 1) for part in parts]))


FIRST, SECOND, THIRD = (rows(seed) for seed in range(3))


@pytest.mark.parametrize("since", [0, 1, 2])
def test_change_in_place_between_siblings_is_noticed(since):
    """From the first, the second or the third pass on."""
    model = Siblings(lambda i, x: x.mul_(2) if i >= since else x)
    statistics = collect_statistics(model, [FIRST, SECOND, THIRD])
    factors = [2.0 if i >= since else 1.0 for i in range(3)]
    assert statistics.counts == {"a": 30, "b": 30}
    assert relative_error(statistics.covariance("a"), gram(FIRST, SECOND, THIRD)) < 1e-6
    changed = [f * x for f, x in zip(factors, (FIRST, SECOND, THIRD), strict=True)]
    assert relative_error(statistics.covariance("b"), gram(*changed)) < 1e-6


@pytest.mark.parametrize("since", [0, 1, 2])
def test_sibling_that_gets_another_tensor_counts_for_itself(since):
    model = Siblings(lambda i, x: x + 1 if i >= since else x)
    statistics = collect_statistics(model, [FIRST, SECOND, THIRD])
    changed = [x + 1 if i >= since else x for i, x in enumerate((FIRST, SECOND, THIRD))]
    assert relative_error(statistics.covariance("a"), gram(FIRST, SECOND, THIRD)) < 1e-6
    assert relative_error(statistics.covariance("b"), gram(*changed)) < 1e-6


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_sibling_that_is_left_out_of_a_pass_has_no_rows_of_it(skipped):
    model = Siblings(lambda i, x: None if i == skipped else x)
    statistics = collect_statistics(model, [FIRST, SECOND, THIRD])
    fed = [x for i, x in enumerate((FIRST, SECOND, THIRD)) if i != skipped]
    assert statistics.counts == {"a": 30, "b": 20}
    assert relative_error(statistics.covariance("a"), gram(FIRST, SECOND, THIRD)) < 1e-6
    assert relative_error(statistics.covariance("b"), gram(*fed)) < 1e-6


@pytest.mark.parametrize("count", [2, 30])
def test_change_in_place_after_a_layer_leaves_its_rows_alone(count):
    """Few rows are kept as they are, so they must have been copied."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6, bias=False)

        def forward(self, x):
            y = self.a(x)
            x.mul_(5)
            return y

    x = rows(0, count)
    statistics = collect_statistics(Model(), [x.clone()])
    assert relative_error(statistics.covariance("a"), gram(x)) < 1e-6


def test_siblings_with_and_without_bias_do_not_share():
    statistics = collect_statistics(Siblings(lambda i, x: x, b_bias=True), [FIRST, SECOND])
    assert statistics.covariance("a").shape == (6, 6)
    assert statistics.covariance("b").shape == (7, 7)
    assert torch.equal(statistics.covariance("b")[:6, :6], statistics.covariance("a"))


class Twice(nn.Module):
    """Calls `a` a second time, in the passes that `again` holds."""

    def __init__(self, again, sibling=True):
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False) if sibling else None
        self.again, self.passes = again, 0

    def forward(self, x):
        y = self.a(x)
        if self.passes in self.again:
            y = y + self.a(x * 3)
        if self.b is not None:
            y = y + self.b(x)
        self.passes += 1
        return y


@pytest.mark.parametrize("sibling", [True, False])
@pytest.mark.parametrize("again", [{0, 1, 2}, {1}, {2}])
def test_layer_that_is_called_twice_has_the_rows_of_both_calls(again, sibling):
    statistics = collect_statistics(Twice(again, sibling), [FIRST, SECOND, THIRD])
    seen = [FIRST, SECOND, THIRD, *(3 * x for i, x in enumerate((FIRST, SECOND, THIRD)) if i in again)]
    assert statistics.counts["a"] == 10 * len(seen)
    assert relative_error(statistics.covariance("a"), gram(*seen)) < 1e-6
    if sibling:
        assert statistics.counts["b"] == 30
        assert relative_error(statistics.covariance("b"), gram(FIRST, SECOND, THIRD)) < 1e-6


def test_layer_that_is_called_twice_with_the_same_tensor_counts_twice():
    layer = nn.Linear(6, 6, bias=False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = layer

        def forward(self, x):
            return self.a(x) + self.a(x)

    statistics = collect_statistics(Model(), [FIRST, SECOND])
    assert statistics.counts == {"a": 40}
    assert relative_error(statistics.covariance("a"), gram(FIRST, SECOND)) < 1e-6


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("kind", KINDS)
def test_merged_halves_equal_the_whole(tiny_model, tiny_tokenizer, kind):
    model, tokenizer = tiny_model(kind), tiny_tokenizer()
    whole = collect_statistics(model, TEXTS, tokenizer=tokenizer)
    halves = [collect_statistics(model, part, tokenizer=tokenizer) for part in (TEXTS[:3], TEXTS[3:])]
    merged = merge_statistics(*halves)
    assert_close(merged, whole)
    assert merged.provenance == whole.provenance
    assert merged.provenance.texts == len(TEXTS)


def test_order_of_batches_does_not_matter(tiny_model, labelled):
    model = tiny_model("gpt2")
    assert_close(collect_statistics(model, labelled[::-1]), collect_statistics(model, labelled), 1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_batch_size_does_not_matter(tiny_model, tiny_tokenizer, batch_size):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    found = collect_statistics(model, TEXTS, tokenizer=tokenizer, batch_size=batch_size)
    assert_close(found, collect_statistics(model, TEXTS, tokenizer=tokenizer, batch_size=3))


def test_sums_are_kept_where_they_are_asked_for(tiny_model, token_ids):
    statistics = collect_statistics(tiny_model("llama"), [token_ids(2, 20)], device="cpu")
    assert {t.device.type for moment in statistics.moments.values() for t in moment.tensors()} == {"cpu"}


def test_same_data_gives_the_same_bits(tiny_model, labelled):
    model = tiny_model("opt")
    assert_equal_to_the_bit(collect_statistics(model, labelled), collect_statistics(model, labelled))


# ------------------------------------------------------------------------------------------------ the output head


@pytest.mark.parametrize("kind", KINDS)
def test_head_has_the_rows_of_the_final_hidden_state_and_is_not_run(tiny_model, labelled, kind):
    model = tiny_model(kind)
    calls = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    statistics = collect_statistics(model, labelled, target_modules=["lm_head"])
    handle.remove()
    # once, on two tokens, to see that its input is the body's output
    assert [tuple(shape[:2]) for shape in calls] == [(1, 2)]
    final = []
    for batch in labelled:
        hidden = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
        final.append(hidden.hidden_states[-1][batch["labels"] != -100].detach())
    assert statistics.counts == {"lm_head": len(torch.cat(final))}
    assert relative_error(statistics.covariance("lm_head"), covariance_of(torch.cat(final))) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_head_is_never_run_for_layers_of_the_body(tiny_model, labelled, kind):
    model = tiny_model(kind)
    calls = []
    model.lm_head.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    collect_statistics(model, labelled)
    assert calls == []


def test_head_whose_input_is_changed_on_the_way_is_run(tiny_model, labelled):
    """A model that scales the hidden state before the head: its head's rows are the scaled ones."""
    model = tiny_model("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 3,), prepend=True)
    statistics = collect_statistics(model, labelled, target_modules=["lm_head"])
    plain = collect_statistics(tiny_model("llama"), labelled, target_modules=["lm_head"])
    assert relative_error(statistics.covariance("lm_head"), 9 * plain.covariance("lm_head")) < 1e-5


# ------------------------------------------------------------------------------------------------ side effects


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def mixed_modes(model):
    model.train()
    model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith(".1"))).eval()
    return model


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_model_is_left_in_the_modes_it_came_in_and_run_without_dropout(tiny_model, labelled, kind):
    model = mixed_modes(tiny_model(kind))
    before = modes(model)
    assert set(before.values()) == {True, False}
    statistics = collect_statistics(model, labelled)
    assert modes(model) == before
    assert hooks(model) == 0
    assert_equal_to_the_bit(statistics, collect_statistics(tiny_model(kind), labelled))


def test_model_is_as_it_was_after_an_error(tiny_model, labelled):
    model = mixed_modes(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[0, 0] = float("nan")
    before = modes(model)
    with pytest.raises(ValueError, match="NaN"):
        collect_statistics(model, labelled)
    assert modes(model) == before
    assert hooks(model) == 0


def test_model_is_as_it_was_after_an_error_of_the_data(tiny_model, labelled):
    def stream():
        yield labelled[0]
        raise RuntimeError("the disk is gone")

    model = mixed_modes(tiny_model("llama"))
    before = modes(model)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        collect_statistics(model, stream())
    assert modes(model) == before
    assert hooks(model) == 0


def test_parameters_gradients_and_the_configuration_are_left_alone(tiny_model, labelled):
    model = tiny_model("qwen3")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    collect_statistics(model, labelled)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.is_grad_enabled()


def test_batches_are_left_alone(tiny_model, labelled):
    before = [{name: tensor.clone() for name, tensor in batch.items()} for batch in labelled]
    collect_statistics(tiny_model("llama"), labelled)
    for batch, old in zip(labelled, before, strict=True):
        assert set(batch) == set(old)
        assert all(torch.equal(batch[name], old[name]) for name in old)


def test_no_cache_is_made(tiny_model, labelled):
    model = tiny_model("llama")
    assert model.config.use_cache
    outputs = []
    model.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    collect_statistics(model, labelled)
    assert len(outputs) == 3
    assert all(output.past_key_values is None for output in outputs)


def test_autocast_outside_does_not_change_the_sums():
    """Rows that float32 holds and bfloat16 does not: a product in bfloat16 would err by 1e-2."""
    model = Siblings(lambda i, x: x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        statistics = collect_statistics(model, [FIRST, SECOND])
    assert relative_error(statistics.covariance("a"), gram(FIRST, SECOND)) < 1e-6
    assert statistics.covariance("a").dtype == torch.float64


def test_precision_of_products_outside_does_not_change_the_sums_and_is_put_back():
    torch.set_float32_matmul_precision("medium")
    try:
        statistics = collect_statistics(Siblings(lambda i, x: x), [FIRST])
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert relative_error(statistics.covariance("a"), gram(FIRST)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_summed_up_in_float32(tiny_model, labelled, dtype):
    model = tiny_model("llama", dtype)
    names = everything(model)
    statistics = collect_statistics(model, labelled, target_modules=names)
    expected = expected_covariances(model, with_label_masks(labelled), names)
    for name in names:
        assert relative_error(statistics.covariance(name), expected[name]) < 1e-5, name


# ------------------------------------------------------------------------------------------------ refusals


class Unfed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.used(x)


def test_layer_that_is_never_fed_is_named():
    with pytest.raises(ValueError, match="idle"):
        collect_statistics(Unfed(), [FIRST])


def test_layer_that_is_never_fed_may_be_left_out():
    assert list(collect_statistics(Unfed(), [FIRST], exclude_modules=["idle"]).moments) == ["used"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_activations_that_are_not_finite_name_the_layer(tiny_model, labelled, value):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj"):
        collect_statistics(model, labelled)


def test_pads_may_hold_anything():
    """A masked row is not a row, not even to be refused."""
    x = FIRST.clone()
    x[0, 0] = float("nan")
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 0] = False
    statistics = collect_statistics(Siblings(lambda i, x: x), [x], mask_fn=lambda batch: mask)
    assert relative_error(statistics.covariance("a"), covariance_of(x[mask])) < 1e-6


@pytest.mark.parametrize("convert", [lambda m: m.long(), lambda m: m.float(), lambda m: m.tolist(), lambda m: None])
def test_mask_that_is_not_boolean_is_refused(tiny_model, token_ids, convert):
    with pytest.raises(ValueError, match="mask_fn.*boolean"):
        collect_statistics(tiny_model("llama"), [token_ids(2, 5)], mask_fn=lambda b: convert(torch.ones(2, 5) > 0))


@pytest.mark.parametrize("shape", [(2, 4), (5, 2), (10,), (2, 5, 1), (1, 5)])
def test_mask_of_another_shape_is_refused(tiny_model, token_ids, shape):
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask"):
        collect_statistics(tiny_model("llama"), [token_ids(2, 5)], mask_fn=lambda b: mask)


def test_labels_of_another_shape_are_refused(tiny_model, token_ids):
    with pytest.raises(ValueError, match="mask"):
        collect_statistics(tiny_model("llama"), [{"input_ids": token_ids(2, 5), "labels": token_ids(2, 4)}])


def test_mask_that_is_empty_everywhere_is_refused(tiny_model, token_ids):
    with pytest.raises(ValueError, match="mask selects no token"):
        collect_statistics(
            tiny_model("llama"), [token_ids(2, 5)], mask_fn=lambda b: torch.zeros_like(b, dtype=torch.bool)
        )


def test_labels_that_are_all_ignored_are_refused(tiny_model, token_ids):
    ids = token_ids(2, 5)
    with pytest.raises(ValueError, match="mask selects no token"):
        collect_statistics(tiny_model("llama"), [{"input_ids": ids, "labels": torch.full_like(ids, -100)}])


def test_a_batch_without_rows_among_others_is_fine(tiny_model, labelled):
    empty = {**labelled[0], "labels": torch.full_like(labelled[0]["labels"], -100)}
    model = tiny_model("opt")
    assert_close(collect_statistics(model, [empty, *labelled]), collect_statistics(model, labelled), 1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_without_an_attention_mask_are_refused(tiny_model, token_ids, side):
    ids = token_ids(2, 5)
    ids[0, 0 if side == "left" else -1] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        collect_statistics(tiny_model("llama"), [{"input_ids": ids}])
    with pytest.raises(ValueError, match="attention_mask"):
        collect_statistics(tiny_model("llama"), [ids])


def test_left_padding_with_its_mask_gives_the_same_rows(tiny_model, token_ids):
    model, ids = tiny_model("llama"), token_ids(1, 6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = (padded != 0).long()
    found = collect_statistics(model, [{"input_ids": padded, "attention_mask": mask}])
    assert_close(found, collect_statistics(model, [ids]))


@pytest.mark.parametrize("length", [7, 8])
def test_prompt_that_leaves_no_room_for_the_answer_is_refused(tiny_model, tiny_tokenizer, length):
    item = ("the capital of the old country is big", "paris")
    with pytest.raises(ValueError, match="Item 1.*max_length"):
        collect_statistics(tiny_model("llama"), ["one", item], tokenizer=tiny_tokenizer(), max_length=length)


def test_prompt_that_leaves_room_for_one_token_of_the_answer(tiny_model, tiny_tokenizer):
    item = ("the capital of the old country is big", "paris and rome")
    statistics = collect_statistics(tiny_model("llama"), [item], tokenizer=tiny_tokenizer(), max_length=9)
    assert set(statistics.counts.values()) == {1}


def test_long_texts_are_cut_on_the_right(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    cut = collect_statistics(model, ["one two three four five"], tokenizer=tokenizer, max_length=3)
    assert_equal_to_the_bit(cut, collect_statistics(model, ["one two three"], tokenizer=tokenizer))


@pytest.mark.parametrize("item", ["", "   ", ("what ?", ""), ("what ?", " ")])
def test_empty_texts_are_refused_by_number(tiny_model, tiny_tokenizer, item):
    with pytest.raises(ValueError, match="Item 1 is empty"):
        collect_statistics(tiny_model("llama"), ["one", item], tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("item", [3, None, ("a", "b", "c"), (1, 2), [], {"a": 1}, ["a", {"role": "user"}]])
def test_items_of_another_kind_are_refused_by_number(tiny_model, tiny_tokenizer, item):
    with pytest.raises((TypeError, ValueError), match="Item 1"):
        collect_statistics(tiny_model("llama"), ["one", item], tokenizer=tiny_tokenizer())


def test_text_of_one_token_predicts_nothing(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="Item 0 has a single token"):
        collect_statistics(tiny_model("llama"), ["one"], tokenizer=tiny_tokenizer(), token_position="predict")


def test_empty_data_is_refused(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="`data` is empty"):
        collect_statistics(tiny_model("llama"), [], tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("data", [[], iter([])])
def test_empty_loader_is_refused(tiny_model, data):
    with pytest.raises(ValueError):
        collect_statistics(tiny_model("llama"), data)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_single_string_is_refused(tiny_model, tiny_tokenizer, with_tokenizer):
    with pytest.raises(TypeError, match="list of texts"):
        collect_statistics(tiny_model("llama"), "one two", tokenizer=tiny_tokenizer() if with_tokenizer else None)


@pytest.mark.parametrize("data", [["one two"], [("what ?", "one")]])
def test_texts_without_a_tokenizer_are_refused(tiny_model, data):
    with pytest.raises(ValueError, match="tokenizer"):
        collect_statistics(tiny_model("llama"), data)


def test_mask_function_for_texts_is_refused(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="mask_fn"):
        collect_statistics(tiny_model("llama"), TEXTS, tokenizer=tiny_tokenizer(), mask_fn=lambda b: None)


def test_batch_of_another_kind_is_refused(tiny_model):
    with pytest.raises(TypeError, match="batch"):
        collect_statistics(tiny_model("llama"), [{1, 2, 3}])


def test_unknown_token_position_is_refused(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="token_position"):
        collect_statistics(tiny_model("llama"), TEXTS, tokenizer=tiny_tokenizer(), token_position="last")


# ------------------------------------------------------------------------------------------------ tokenizers


def test_tokenizer_without_pad_token_warns_and_gives_the_same(tiny_model, tiny_tokenizer, caplog):
    model = tiny_model("gpt2")
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = collect_statistics(model, TEXTS, tokenizer=tiny_tokenizer(pad=None), batch_size=3)
    assert "no pad token" in caplog.text
    assert_equal_to_the_bit(found, collect_statistics(model, TEXTS, tokenizer=tiny_tokenizer(), batch_size=3))


def test_pad_that_is_the_end_token_is_still_text_where_it_was_text(tiny_model, tiny_tokenizer):
    texts = [f"the capital of france is paris {EOS}", f"one {EOS} two", "a red bird in a green tree by the long river"]
    model = tiny_model("llama")
    found = collect_statistics(model, texts, tokenizer=tiny_tokenizer(pad=EOS))
    assert set(found.counts.values()) == {7 + 3 + 11}
    assert_close(found, collect_statistics(model, texts, tokenizer=tiny_tokenizer(pad=PAD)))


def test_chat_is_its_rendered_prompt_and_answer(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(chat=True, add_bos=True)
    chat = [
        {"role": "user", "content": "what is the capital of italy ?"},
        {"role": "assistant", "content": "rome ."},
        {"role": "user", "content": "and of france ?"},
        {"role": "assistant", "content": "paris ."},
    ]
    found = collect_statistics(model, [chat], tokenizer=tokenizer)
    ids = tokenizer(
        f"{BOS} <user> what is the capital of italy ? <end> <assistant> rome . <end> <user> and of france ? <end> "
        "<assistant> paris .",
        add_special_tokens=False,
    )["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    mask = torch.arange(len(ids))[None] >= len(ids) - 2
    expected = expected_covariances(model, [({"input_ids": torch.tensor([ids])}, mask)], found.moments)
    for name in found.moments:
        assert found.counts[name] == 2
        assert relative_error(found.covariance(name), expected[name]) < 1e-5


def test_chat_without_a_template_is_refused(tiny_model, tiny_tokenizer):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    with pytest.raises(ValueError, match="Item 0.*chat template"):
        collect_statistics(tiny_model("llama"), [chat], tokenizer=tiny_tokenizer())


def test_chat_that_ends_with_the_user_is_refused(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="Item 0.*assistant"):
        collect_statistics(
            tiny_model("llama"), [[{"role": "user", "content": "one"}]], tokenizer=tiny_tokenizer(chat=True)
        )


@pytest.mark.parametrize("item", ["one two", ("one", "two three")])
def test_begin_token_is_added_once(tiny_tokenizer, item):
    tokenizer = tiny_tokenizer(add_bos=True)
    (encoded,) = encode_items(tokenizer, [item], 20, "answer")
    assert encoded.input_ids[0] == tokenizer.bos_token_id
    assert encoded.input_ids.count(tokenizer.bos_token_id) == 1


CHAT = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "a big city"}]


@pytest.mark.parametrize(
    "row, item",
    [
        ({"text": "one two three"}, "one two three"),
        ({"prompt": "what ?", "completion": "a city"}, ("what ?", "a city")),
        ({"question": "what ?", "answer": "a city"}, ("what ?", "a city")),
        ({"prompt": "what ?", "answer": "a city"}, ("what ?", "a city")),
        ({"messages": CHAT}, CHAT),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"question": "what ?", "answer": "a city", "text": "not this"}, ("what ?", "a city")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_rows_of_a_dataset_are_items(tiny_model, tiny_tokenizer, row, item):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(chat=True)
    found = collect_statistics(model, datasets.Dataset.from_list([row, row]), tokenizer=tokenizer)
    assert_equal_to_the_bit(found, collect_statistics(model, [item, item], tokenizer=tokenizer))


def test_dataset_with_other_columns_is_refused_by_name(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="Item 0.*body.*text"):
        collect_statistics(
            tiny_model("llama"), datasets.Dataset.from_list([{"body": "one"}]), tokenizer=tiny_tokenizer()
        )


def test_loader_with_labels(tiny_model, labelled):
    model = tiny_model("llama")
    examples = [{name: t[i] for name, t in labelled[0].items()} for i in range(3)]
    found = collect_statistics(model, DataLoader(examples, batch_size=3))
    assert_equal_to_the_bit(found, collect_statistics(model, [labelled[0]]))
    assert found.provenance.mask == "labels"
    assert found.provenance.texts == 3


def test_loader_without_a_length(tiny_model, labelled):
    model = tiny_model("llama")
    found = collect_statistics(model, (batch for batch in labelled))
    assert_equal_to_the_bit(found, collect_statistics(model, labelled))


def test_encoding_of_a_tokenizer_is_a_batch(tiny_model, tiny_tokenizer):
    model, tokenizer, texts = tiny_model("llama"), tiny_tokenizer(), ["one two three", "a red bird in a tree"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    found = collect_statistics(model, [batch])
    assert_close(found, collect_statistics(model, texts, tokenizer=tokenizer), 1e-6)


def test_embeddings_in_place_of_ids(tiny_model, token_ids):
    model, ids = tiny_model("llama"), token_ids(2, 5)
    found = collect_statistics(model, [{"inputs_embeds": model.get_input_embeddings()(ids)}])
    assert_close(found, collect_statistics(model, [ids]), 1e-6)


def test_provenance_names_model_tokenizer_rule_and_version(tiny_model, tiny_tokenizer):
    import engram_peft

    model = tiny_model("llama")
    model.config._name_or_path = "org/tiny"
    found = collect_statistics(model, TEXTS, tokenizer=tiny_tokenizer(), token_position="predict").provenance
    assert (found.model, found.mask, found.texts) == ("org/tiny", "predict", len(TEXTS))
    assert found.library_version == engram_peft.__version__
    again = collect_statistics(tiny_model("llama", seed=1), ["one two"], tokenizer=tiny_tokenizer()).provenance
    assert (found.model_fingerprint, found.tokenizer) == (again.model_fingerprint, again.tokenizer)
    other = collect_statistics(tiny_model("qwen3"), ["one two"], tokenizer=tiny_tokenizer(add_bos=True)).provenance
    assert other.model_fingerprint != found.model_fingerprint
    assert other.tokenizer != found.tokenizer


# ------------------------------------------------------------------------------------------------ selection


def test_default_is_every_layer_but_the_head(tiny_model, token_ids):
    for kind in KINDS:
        model = tiny_model(kind)
        assert set(collect_statistics(model, [token_ids(1, 4)]).moments) == set(everything(model)) - {"lm_head"}


def test_layers_to_transform_that_do_not_exist_are_named(tiny_model, token_ids):
    with pytest.raises(ValueError, match=r"layers_to_transform.*\[7\].*0 to 1"):
        collect_statistics(
            tiny_model("llama"), [token_ids(1, 4)], target_modules=["q_proj"], layers_to_transform=[0, 7]
        )


@pytest.mark.parametrize("targets", [None, "all-linear", ["q_proj", "up_proj"]])
def test_layers_to_transform_hold_for_every_choice_of_modules(tiny_model, token_ids, targets):
    found = collect_statistics(
        tiny_model("llama"), [token_ids(1, 4)], target_modules=targets, layers_to_transform=[1]
    ).moments
    assert len(found) == (2 if isinstance(targets, list) else 7)
    assert all(name.startswith("model.layers.1.") for name in found)


def test_excluded_modules_are_left_out(tiny_model, token_ids):
    model = tiny_model("opt")
    found = set(collect_statistics(model, [token_ids(1, 4)], exclude_modules=["fc1", "out_proj"]).moments)
    assert found == {n for n in everything(model) if n != "lm_head" and not n.endswith(("fc1", "out_proj"))}


@pytest.mark.parametrize("targets, near", [(["qproj"], "q_proj"), (["dwn_proj"], "down_proj"), ("lmhead", "lm_head")])
def test_no_match_lists_near_names(tiny_model, token_ids, targets, near):
    with pytest.raises(ValueError, match=near):
        collect_statistics(tiny_model("llama"), [token_ids(1, 4)], target_modules=targets)


@pytest.mark.parametrize("targets", [["norm"], ["q_proj", "input_layernorm"], ["self_attn"]])
def test_modules_that_cannot_be_edited_are_refused_by_name(tiny_model, token_ids, targets):
    with pytest.raises(TypeError, match=targets[-1]):
        collect_statistics(tiny_model("llama"), [token_ids(1, 4)], target_modules=targets)


def nested(names: list[str]) -> nn.Module:
    """A model with a linear layer at every one of these names."""
    model = nn.Module()
    for name in names:
        parent = model
        *path, last = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, nn.Linear(2, 2))
    return model


def selection_cases(section: str) -> list[int]:
    return list(range({"target_modules": 10, "layers": 9}[section]))


@pytest.mark.parametrize("number", selection_cases("target_modules"))
def test_target_modules_mean_what_they_mean_to_the_reference(oracle, number):
    section = oracle.facts["selection"]
    targets, expected = section["target_modules"][number]
    assert len(section["target_modules"]) == 10
    model, selection = nested(section["names"]), Selection(target_modules=targets)
    if targets == "all-linear":
        # the reference reads it as a regular expression that matches nothing; to us and to PEFT it is every layer
        expected = section["names"]
    elif isinstance(targets, str) and targets.endswith(r"\..*"):
        # it matches the blocks' containers, too; the reference never looks at those, PEFT and we refuse them
        with pytest.raises(TypeError, match="self_attn"):
            select_layers(model, selection)
        selection.exclude_modules = ["self_attn", "mlp"]
    if expected:
        assert set(select_layers(model, selection)) == set(expected)
    else:
        with pytest.raises(ValueError, match="not found"):
            select_layers(model, selection)


def test_none_leaves_the_head_alone_unlike_the_reference(tiny_model):
    """To the reference `None` is every layer. A head is known in transformers models only, so in others it is to us, too."""
    model = tiny_model("llama")
    assert "lm_head" in editable_layers(model)
    assert set(linear_layers(model)) - set(select_layers(model, Selection())) == {"lm_head"}
    assert set(editable_layers(model)) - set(linear_layers(model)) == {"model.embed_tokens"}


@pytest.mark.parametrize("number", selection_cases("layers"))
def test_layers_to_transform_mean_what_they_mean_to_the_reference(oracle, number):
    section = oracle.facts["selection"]
    layers, pattern, expected = section["layers"][number]
    assert len(section["layers"]) == 9
    selection = Selection(layers_to_transform=layers, layers_pattern=pattern)
    if layers == []:
        # the reference selects nothing, without a word; to PEFT an empty list is no restriction
        expected = section["names"]
    assert set(select_layers(nested(section["names"]), selection)) == set(expected)


# ------------------------------------------------------------------------------------------------ the reference's encoding


@pytest.fixture
def reference_tokenizer():
    """One token a letter, blanks dropped, as the reference's data were made with."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<unk>": 1, **{chr(c): 2 + c % 40 for c in range(ord("a"), ord("z") + 1)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_encoding_equals_the_reference(oracle, reference_tokenizer, number):
    section = oracle.facts["encode"]
    item, expected = section["items"][number], section["expect"][number]
    (found,) = encode_items(reference_tokenizer, [item], section["max_length"], "answer")
    assert found.input_ids == expected["input_ids"]
    assert found.mask == [label != -100 for label in expected["labels"]]


def test_prompt_that_the_reference_cuts_to_nothing_is_refused(oracle, reference_tokenizer):
    section = oracle.facts["encode"]
    assert set(section["expect"][2]["labels"]) == {-100}
    with pytest.raises(ValueError, match="max_length=12"):
        encode_items(reference_tokenizer, section["items"][2:3], section["max_length"], "answer")


def test_batch_equals_the_reference(oracle, reference_tokenizer):
    """The first two of its three texts: the third is the one that we refuse."""
    section = oracle.facts["encode"]
    encoded = encode_items(reference_tokenizer, section["items"][:2], section["max_length"], "answer")
    (batch,) = batches(encoded, 8, reference_tokenizer.pad_token_id)
    expected = {name: torch.tensor(rows[:2]) for name, rows in section["batch"].items()}
    assert torch.equal(batch.input_ids, expected["input_ids"])
    assert torch.equal(batch.attention_mask, expected["attention_mask"])
    assert torch.equal(batch.mask, expected["labels"] != -100)


# ------------------------------------------------------------------------------------------------ wrapped models


def test_lora_takes_part_and_is_not_a_layer(tiny_model, labelled):
    """Names are the unwrapped model's; the covariances those of the model with its active adapter."""
    model = tiny_model("llama")
    names = set(everything(model)) - {"lm_head"}
    plain = collect_statistics(model, labelled)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    found = collect_statistics(wrapped, labelled)
    assert set(found.moments) == names
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    assert torch.equal(found.covariance(first), plain.covariance(first))
    assert relative_error(found.covariance(last), plain.covariance(last)) > 1e-3
    with wrapped.disable_adapter():
        assert_equal_to_the_bit(collect_statistics(wrapped, labelled), plain)
    merged = wrapped.merge_and_unload()
    assert_close(found, collect_statistics(merged, labelled))


@pytest.mark.parametrize("kind", KINDS)
def test_unfilled_engram_adapter_is_an_identity_and_names_the_layers(tiny_model, labelled, kind):
    model = tiny_model(kind)
    plain = collect_statistics(model, labelled, target_modules=everything(model))
    wanted = {"llama": "down_proj", "qwen3": "down_proj", "gpt2": "c_proj", "opt": "fc2"}[kind]
    wrapped = get_peft_model(model, EngramConfig(target_modules=[wanted, "lm_head"]))
    found = collect_statistics(wrapped, labelled)
    assert set(found.moments) == {name for name in plain.moments if name.endswith((wanted, "lm_head"))}
    for name in found.moments:
        assert torch.equal(found.covariance(name), plain.covariance(name)), name


def test_filled_engram_adapter_takes_part(tiny_model, labelled, token_ids):
    """A layer's rows are its own inputs, before its edit and after the edits of the layers before it."""
    wrapped = get_peft_model(tiny_model("llama"), EngramConfig(target_modules=["down_proj"]))
    plain = collect_statistics(wrapped, labelled)
    target = collect_statistics(wrapped, [token_ids(1, 4)])
    extract_engram(wrapped, target, merge_statistics(target, plain), scale="uniform")
    found = collect_statistics(wrapped, labelled)
    first, last = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
    assert torch.equal(found.covariance(first), plain.covariance(first))
    assert relative_error(found.covariance(last), plain.covariance(last)) > 1e-3
    merged = wrapped.merge_and_unload()
    assert_close(found, collect_statistics(merged, labelled, target_modules=["down_proj"]))


def test_choice_of_modules_holds_for_a_model_with_engram_layers(tiny_model, labelled):
    wrapped = get_peft_model(tiny_model("llama"), EngramConfig(target_modules=["down_proj"]))
    found = collect_statistics(wrapped, labelled, target_modules=["q_proj"])
    assert {name.rpartition(".")[2] for name in found.moments} == {"q_proj"}


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compile", "DataParallel"])
def test_wrappers_are_looked_through(tiny_model, labelled, wrap):
    model = tiny_model("llama")
    plain = collect_statistics(model, labelled)
    assert_equal_to_the_bit(collect_statistics(wrap(model), labelled), plain)


def test_fingerprint_does_not_depend_on_wrappers(tiny_model, labelled):
    plain = collect_statistics(tiny_model("llama"), labelled).provenance
    wrapped = get_peft_model(tiny_model("llama"), EngramConfig(target_modules=["down_proj"]))
    assert collect_statistics(wrapped, labelled).provenance == plain


# ------------------------------------------------------------------------------------------------ progress


def test_progress_bar_follows_the_switch_of_transformers(tiny_model, labelled, capsys):
    model = tiny_model("llama")
    collect_statistics(model, labelled)
    assert "Collecting statistics" in capsys.readouterr().err
    transformers_logging.disable_progress_bar()
    try:
        collect_statistics(model, labelled)
    finally:
        transformers_logging.enable_progress_bar()
    assert capsys.readouterr().err == ""


def test_a_model_stays_the_same_model_when_it_is_wrapped_saved_or_untied(tiny_model, tmp_path):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = model_fingerprint(plain)
    assert model_fingerprint(get_peft_model(plain, EngramConfig(target_modules=["0"])).get_base_model()) == before
    model = tiny_model("qwen3")
    before = model_fingerprint(model)
    model.save_pretrained(tmp_path)
    assert model_fingerprint(model) == before
    assert model_fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)) == before
    model.config.tie_word_embeddings = False
    assert model_fingerprint(model) == before
    model.config.hidden_size += 1
    assert model_fingerprint(model) != before
