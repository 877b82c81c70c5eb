"""The edit item by item: its factors against dense least squares, its strengths against the model, and what failure leaves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from peft import PeftModel, get_peft_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from engram_peft import EngramConfig, ItemOptions, ItemReport, Moment, extract_items
from engram_peft.editing import item_edit
from engram_peft.editing.encoding import tokenize_item
from engram_peft.editing.item_edit import ItemFactors, choose_layers, item_factors
from engram_peft.editing.item_rows import ItemRows
from engram_peft.editing.items import forget_items, item_texts
from engram_peft.editing.readout import Directions, readout_directions
from engram_peft.editing.tuning import SETTLED, ItemScores, item_scores

from ..tuners.adapters import (
    KINDS,
    WITH_BIAS,
    augmented_weight_of,
    close,
    layers_of,
    logits,
    same_tensors,
    tensors,
    unchanged,
)
from .reference import relative_error


FORGET = {
    "france": [("what is the capital of france ?", "the capital is paris .")],
    "italy": [("what is the capital of italy ?", "the capital is big old rome .")],
    "cat": ["the cat found one red bird"],
}
RETAIN = [
    ("what is the capital of spain ?", "the capital is madrid ."),
    ("what is the capital of germany ?", "the capital is new berlin ."),
    ("what is the capital of england ?", "the capital is london ."),
    "the dog said yes and no to the fish by the long river and the deep ocean",
    "a king and a queen lived and died in one house on the high mountain near the road",
    "where the moon and the sun , where the night and the day ?",
]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def memory():
    """Models that know `FORGET` and `RETAIN` by heart, one a kind; a copy each time."""
    known: dict[str, nn.Module] = {}

    def make(kind, tiny_model, tokenizer):
        if kind not in known:
            known[kind] = learn(tiny_model(kind), tokenizer, [*RETAIN, *item_texts(FORGET)])
        return copy.deepcopy(known[kind])

    return make


def learn(model, tokenizer, texts, steps=60):
    """Trains `model` until it knows `texts` by heart."""
    encoded = [tokenize_item(tokenizer, text) for text in texts]
    width = max(len(text.input_ids) for text in encoded)
    ids = torch.tensor([text.input_ids + [0] * (width - len(text.input_ids)) for text in encoded])
    mask = torch.tensor([[i < len(text.input_ids) for i in range(width)] for text in encoded])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        output = model(input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100))
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    assert output.loss < 0.5
    return model.eval()


def adapted(model, **config):
    return get_peft_model(model, EngramConfig(**{"task_type": "CAUSAL_LM", **config})).eval()


def texts_of(tokenizer, forget=FORGET, retain=RETAIN):
    kept = [tokenize_item(tokenizer, item) for item in retain]
    names, texts = forget_items(tokenizer, forget, kept, 512)
    return names, texts, kept


# ------------------------------------------------------------------------------------------------ factors


class Layers(nn.Module):
    """Layers of every shape: wide, square and tall, stored either way, with a bias or without."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.square, self.tall = nn.Linear(12, 8), nn.Linear(8, 8, bias=False), nn.Linear(6, 8, bias=False)
        self.conv, self.plain = Conv1D(8, 12), nn.Linear(12, 8, bias=False)


SHAPES = ["wide", "square", "tall", "conv", "plain"]


class Problem:
    """One layer, random rows, and the sums of what is kept; everything in float64 beside the objects of the package."""

    def __init__(self, name, absorb_bias=True, answers=30, plain=40, n=5, seed=0, replacing=False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = get_peft_model(Layers(), EngramConfig(target_modules=[name], absorb_bias=absorb_bias))
            self.layer = layers_of(self.model)[name]
            for parameter in self.layer.get_base_layer().parameters():
                parameter.data.normal_()
            self.name, self.absorbs = name, self.layer.absorbs_bias("default")
            self.width = self.layer.in_features + self.absorbs
            # what is collected has a constant wherever there is a bias, absorbed or not
            constant = getattr(self.layer.get_base_layer(), "bias", None) is not None

            def rows(count):
                x = torch.randn(count, self.layer.in_features)
                return torch.cat([x, torch.ones(count, 1)], 1) if constant else x

            self.x, self.company = rows(n), rows(n)
            self.answers, self.plain = rows(answers), rows(plain)
            self.u = torch.randn(n, 8, dtype=torch.float64)
            self.replacement = torch.randn(n, 8, dtype=torch.float64) if replacing else None
            if replacing:
                self.replacement[n // 2 :] = 0
        moments = [Moment(self.x.shape[1]), Moment(self.x.shape[1])]
        for moment, part in zip(moments, (self.answers, self.plain), strict=True):
            moment.add(part)
        self.rows = ItemRows(self.x, self.company, *moments)
        cut = [part[:, : self.width].double() for part in (self.x, self.company, self.answers, self.plain)]
        self.x, self.company, self.answers, self.plain = cut

    def factors(self, writes=True, directions=True, **options):
        given = Directions(self.u, self.replacement) if directions else None
        writers = [self.name] if writes else []
        rows = {self.name: self.rows}
        return item_factors({self.name: self.layer}, "default", rows, given, writers, ItemOptions(**options))[
            self.name
        ]

    @property
    def weight(self):
        return augmented_weight_of(self.layer, self.absorbs)

    def answering(self, weight):
        """`A` as the least squares that it solves: 1 at its own row, 0 at all else."""
        n = len(self.x)
        rows = torch.cat([self.x, weight**0.5 * self.answers, self.plain])
        wanted = torch.zeros(len(rows), n, dtype=torch.float64)
        wanted[:n] = torch.eye(n)
        return torch.linalg.lstsq(rows, wanted).solution.T

    def answering_in_null_space(self):
        """The same without the kept answers, among what is 0 there."""
        n = len(self.x)
        _, values, vectors = torch.linalg.svd(self.answers)
        free = vectors[int((values > 1e-6 * values[0]).sum()) :].T
        rows = torch.cat([self.x, self.plain])
        wanted = torch.zeros(len(rows), n, dtype=torch.float64)
        wanted[:n] = torch.eye(n)
        return (free @ torch.linalg.lstsq(rows @ free, wanted).solution).T

    def written(self, rest):
        """`V`, `(out, n)`, column by column as the definition says it."""
        columns = []
        for i, apart in enumerate(self.x - self.company):
            v, u = self.weight @ apart, self.u[i] / self.u[i].norm()
            other = 0 if self.replacement is None else self.replacement[i] / self.u[i].norm()
            columns.append((u - other) * (u @ v) + rest * (v - u * (u @ v)))
        return torch.stack(columns, dim=1)


REACHED = [name for name in SHAPES if name != "tall"]  # whose weights can write everything


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("absorb_bias", [True, False])
@pytest.mark.parametrize("rest", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("name", REACHED)
def test_the_edit_is_the_dense_formula(name, rest, absorb_bias, replacing):
    """`W - W B diag(a) A = W - V diag(a) A`, for any strengths."""
    problem = Problem(name, absorb_bias, replacing=replacing)
    factors = problem.factors(rest=rest, retain_weight=7.0)
    strengths = torch.tensor([2.0, 0.0, -1.0, 0.5, 30.0], dtype=torch.float64)
    problem.layer.fill("default", factors.right, factors.left, strengths)
    expected = problem.written(rest) @ torch.diag(strengths) @ problem.answering(7.0)
    weight, edited = problem.weight, augmented_weight_of(problem.layer, problem.absorbs)
    assert torch.equal(weight, edited)
    problem.layer.merge()
    assert relative_error(weight - augmented_weight_of(problem.layer, problem.absorbs), expected) < 1e-4


@pytest.mark.parametrize("name", REACHED)
@pytest.mark.parametrize("rest", [0.0, 0.3])
def test_the_weight_times_b_is_what_is_taken_out(name, rest):
    """`W B = P(V)` to rounding, with columns of `B` and rows of `A` of equal norm."""
    for replacing in (False, True):
        problem = Problem(name, replacing=replacing)
        factors = problem.factors(rest=rest)
        left, right = factors.left.double(), factors.right.double()
        assert factors.left.dtype == factors.right.dtype == torch.float32
        assert torch.allclose(left.norm(dim=0), right.norm(dim=1), rtol=1e-5)
        sizes = right.norm(dim=1) / problem.answering(30.0).norm(dim=1)
        assert relative_error(problem.weight @ left * sizes, problem.written(rest)) < 1e-4


@pytest.mark.parametrize("directions", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_all_of_it_is_taken_out_at_rest_one_and_where_nothing_is_said_to_the_readout(name, directions):
    """`V = W (X_t - X_c)^T`; in layers that do not write to the hidden state, and in models without a readout."""
    problem = Problem(name)
    expected = problem.weight @ (problem.x - problem.company).T @ problem.answering(30.0)
    for writes in (True, False):
        if writes and directions and name == "tall":
            continue
        factors = problem.factors(writes=writes, directions=directions, rest=1.0 if writes and directions else 0.0)
        assert relative_error(problem.weight @ factors.left.double() @ factors.right.double(), expected) < 1e-4
        assert bool(factors.drop.any()) == (writes and directions)


def test_of_a_weight_that_cannot_write_everything_it_is_the_nearest():
    problem = Problem("tall")
    factors = problem.factors(rest=0.0)
    weight = problem.weight
    nearest = weight @ torch.linalg.lstsq(weight, problem.written(0.0)).solution
    expected = nearest @ problem.answering(30.0)
    assert relative_error(weight @ factors.left.double() @ factors.right.double(), expected) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("weight", [0.01, 1.0, 1e4])
def test_a_answers_to_its_own_row_as_least_squares_allow(name, weight):
    problem = Problem(name)
    factors = problem.factors(writes=False, retain_weight=weight)
    left, right = factors.left.double(), factors.right.double()
    assert relative_error(left @ right, (problem.x - problem.company).T @ problem.answering(weight)) < 1e-4


def test_the_drop_is_what_the_edit_takes_off_the_token_s_logit():
    """At the secret's own row, at strength 1, by the readout as it was given, not by its unit vector."""
    problem = Problem("wide", n=4)
    factors = problem.factors(rest=0.3)
    right = problem.answering(30.0)
    expected = torch.stack(
        [
            problem.u[i] @ (problem.written(0.3)[:, i] * (right[i] @ problem.x[i]))
            for i in range(4)
        ]
    )  # fmt: skip
    assert relative_error(factors.drop, expected) < 1e-5


@pytest.mark.parametrize("options", [{}, {"null_space": True}, {"retain_weight": 3.0, "rest": 1.0}], ids=str)
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("name", REACHED)
def test_the_damage_is_the_change_of_what_kept_rows_give(name, writes, options):
    """Squared and summed; rows of kept answers count `retain_weight` times."""
    problem = Problem(name, answers=5)
    factors = problem.factors(writes=writes, **options)
    change = problem.weight @ factors.left.double() @ factors.right.double()
    each = [(change @ part.T).square().sum() for part in (problem.answers, problem.plain)]
    expected = options.get("retain_weight", 30.0) * each[0] + each[1]
    assert factors.damage == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_chosen_layers_are_the_first_that_reach_nine_tenths_of_the_effect(seed):
    generator = torch.Generator().manual_seed(seed)
    firsts = torch.tensor([True, False, True, False])
    nothing = torch.zeros(0)
    factors = {
        str(i): ItemFactors(nothing, nothing, torch.randn(4, generator=generator).double() + 0.5, 0.1 + float(damage))
        for i, damage in enumerate(torch.rand(9, generator=generator))
    }
    effects = {name: float((found.drop[0] + found.drop[2]) / 2) for name, found in factors.items()}
    useful = {name: effect for name, effect in effects.items() if effect > 0}
    ranked = sorted(useful, key=lambda name: -(useful[name] ** 2) / factors[name].damage)
    chosen = choose_layers(factors, firsts)
    assert chosen == set(ranked[: len(chosen)])
    reached = [sum(useful[name] for name in ranked[:count]) for count in range(len(ranked) + 1)]
    assert reached[len(chosen)] >= 0.9 * reached[-1] > reached[len(chosen) - 1]


def test_where_no_layer_has_an_effect_all_are_chosen():
    nothing = torch.zeros(0)
    factors = {name: ItemFactors(nothing, nothing, -torch.ones(2).double(), 1.0) for name in "ab"}
    assert choose_layers(factors, torch.tensor([True, True])) == {"a", "b"}


@pytest.mark.parametrize("name", ["wide", "conv", "plain", "square"])
def test_in_the_null_space_kept_answers_are_not_changed_at_all(name):
    problem = Problem(name, answers=5)
    factors = problem.factors(null_space=True, rest=0.2)
    left, right = factors.left.double(), factors.right.double()
    reached = right @ problem.answers.T
    assert float(reached.norm()) < 1e-5 * float(right.norm() * problem.answers.norm())
    expected = problem.written(0.2) @ problem.answering_in_null_space()
    assert relative_error(problem.weight @ left @ right, expected) < 1e-4
    plain = problem.factors(rest=0.2).right.double() @ problem.answers.T
    assert float(plain.norm()) > 1e-3 * float(problem.answers.norm())  # where it is not asked for


@pytest.mark.parametrize("name", ["wide", "square"])
def test_without_a_null_space_there_is_no_edit(name):
    problem = Problem(name, answers=40)
    factors = problem.factors(null_space=True)
    change = problem.weight @ factors.left.double() @ factors.right.double()
    assert float(change.norm()) <= 1e-6 * float(problem.weight.norm())


def test_with_no_kept_answers_the_null_space_is_everything():
    problem = Problem("wide", answers=0)
    found, expected = (problem.factors(null_space=null) for null in (True, False))
    assert relative_error(found.left @ found.right, expected.left @ expected.right) < 1e-4


def test_a_replacement_gets_what_the_secret_loses():
    """The component along `u` moves to `u'`; tokens without a replacement only lose it."""
    problem = Problem("wide", replacing=True)
    factors = problem.factors(rest=0.0)
    taken = problem.weight @ factors.left.double()
    for i in range(5):
        u, other = problem.u[i] / problem.u[i].norm(), problem.replacement[i] / problem.u[i].norm()
        v = problem.weight @ (problem.x - problem.company)[i]
        direction = (u - other) * (u @ v)
        column = taken[:, i]
        assert close(column / column.norm(), direction / direction.norm(), 1e-5)
        assert bool(other.any()) == (i < 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["weight", "rows", "company", "u"])
def test_what_is_not_finite_is_refused_by_the_name_of_the_layer(part, value):
    problem = Problem("wide")
    tensor = {
        "weight": problem.layer.get_base_layer().weight.data,
        "rows": problem.rows.forgotten,
        "company": problem.rows.company,
        "u": problem.u,
    }[part]
    tensor[1, 2] = value
    with pytest.raises(ValueError, match="NaN or infinity" if part in ("weight", "rows") else "edit of wide.*NaN"):
        problem.factors()


def test_layers_with_one_input_share_a(tiny_model, tokenizer):
    model = adapted(tiny_model("llama"), target_modules=["gate_proj", "up_proj"], layers_to_transform=[1])
    layers = layers_of(model)
    _, texts, kept = texts_of(tokenizer)
    inside = {name: model.get_base_model().get_submodule(name) for name in layers}
    rows = item_edit.collect_item_rows(model, inside, texts, kept, batch_size=4, pad_token_id=0)
    gate, up = item_factors(layers, "default", rows, None, [], ItemOptions()).values()
    assert torch.equal(gate.right, up.right) and torch.equal(gate.left, up.left)


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "option",
    [
        {"forget_probability": 0.0}, {"forget_probability": 1.0}, {"forget_probability": math.nan},
        {"retain_weight": 0.0}, {"retain_weight": math.inf}, {"retain_weight": math.nan},
        {"rest": -0.1}, {"rest": 1.1}, {"rest": math.nan},
        {"replacement": ""}, {"replacement": " \n"},
        {"layers": "all"}, {"layers": "auto", "sequential": 2}, {"sequential": 0}, {"sequential": 1.0}, {"sequential": True}, {"rounds": 0}, {"rounds": -3}, {"rounds": "10"},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_refused_before_work_starts(tiny_model, tokenizer, option):
    model, calls = adapted(tiny_model("llama"), target_modules=["down_proj"]), []
    model.register_forward_hook(lambda *args: calls.append(1))
    with unchanged(model), pytest.raises(ValueError, match=f"`{next(iter(option))}"):
        extract_items(model, tokenizer, FORGET, RETAIN, **option)
    assert calls == []


def test_the_ends_of_ranges_are_allowed():
    ItemOptions(rest=0), ItemOptions(rest=1), ItemOptions(sequential=1, rounds=1, forget_probability=0.999)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"adapter_name": "nobody"}, "no ENGRAM adapter 'nobody'"),
        ({"forget": []}, "`forget`"),
        ({"forget": {}}, "`forget`"),
        ({"retain": []}, "`retain`"),
        ({"retain": [*RETAIN, ""]}, "Item 6 of `retain` is empty"),
        ({"forget": {"x": ("a", "")}}, "Item 'x' of `forget` is empty"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(tiny_model, tokenizer, change, message):
    model = adapted(tiny_model("llama"), target_modules=["down_proj"])
    with unchanged(model), pytest.raises(ValueError, match=message):
        extract_items(**{"model": model, "tokenizer": tokenizer, "forget": FORGET, "retain": RETAIN, **change})


def test_adapters_that_are_merged_or_inactive_or_limited_are_refused(tiny_model, tokenizer):
    model = adapted(tiny_model("llama"), target_modules=["down_proj"])
    model.merge_adapter()
    with unchanged(model), pytest.raises(ValueError, match="merged"):
        extract_items(model, tokenizer, FORGET, RETAIN)
    model.unmerge_adapter()
    model.add_adapter("second", EngramConfig(target_modules=["down_proj"]))
    with unchanged(model), pytest.raises(ValueError, match="'second' is not active"):
        extract_items(model, tokenizer, FORGET, RETAIN, "second")
    model = adapted(tiny_model("llama"), target_modules=["down_proj"], r=3)
    with unchanged(model), pytest.raises(ValueError, match="`r` limits the rank"):
        extract_items(model, tokenizer, FORGET, RETAIN)


# ------------------------------------------------------------------------------------------------ the whole


def extracted(model, tokenizer, targets, forget=FORGET, retain=RETAIN, alpha=1.0, **options):
    model = adapted(model, target_modules=targets, alpha=alpha)
    return model, extract_items(model, tokenizer, forget, retain, **options)


TARGETS = {"llama": ["down_proj"], "qwen3": ["down_proj", "o_proj"], "gpt2": ["mlp.c_proj"], "opt": ["fc2", "fc1"]}


def log_probability(model, tokenizer, prompt, answer, words):
    """Of one run of words of the answer, each given all before it, in one plain pass."""
    ids = tokenizer(prompt + " " + answer)["input_ids"] if prompt else tokenizer(answer)["input_ids"]
    scores = logits(model, torch.tensor([ids]))[0].double().log_softmax(-1)
    places = [i for i, token in enumerate(ids) if token in tokenizer.convert_tokens_to_ids(words.split())]
    places = places[-len(words.split()) :]
    named = all(int(scores[p - 1].argmax()) == ids[p] for p in places)
    return sum(float(scores[p - 1, ids[p]]) for p in places), named


def told(model, tokenizer):
    """How likely each item of `FORGET` is, asked as it is given."""
    (asked, france), (asked_too, italy), text = FORGET["france"][0], FORGET["italy"][0], FORGET["cat"][0]
    return [
        log_probability(model, tokenizer, asked, france, "paris"),
        log_probability(model, tokenizer, asked_too, italy, "big old rome"),
        log_probability(model, tokenizer, "", text, " ".join(text.split()[1:])),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_items_are_forgotten_at_the_least_strength_and_the_rest_stays(memory, tiny_model, tokenizer, kind):
    model = memory(kind, tiny_model, tokenizer)
    before = told(model, tokenizer)
    assert all(math.exp(log) > 0.3 for log, _ in before[:2])
    model, report = extracted(model, tokenizer, TARGETS[kind])
    assert isinstance(report, ItemReport) and report.resisting == [] and 1 <= report.rounds <= 10
    with model.disable_adapter():
        for item, (log, _) in zip(report.items, before, strict=True):
            assert item.before == pytest.approx(math.exp(log), rel=1e-3)
    for item, (log, named) in zip(report.items, told(model, tokenizer), strict=True):
        assert item.after == pytest.approx(math.exp(log), rel=1e-3) and item.named == named
        assert item.goal == pytest.approx(min(0.05, item.before / 2)) and item.after <= item.goal and not named
        assert item.strength > 0
    strengths = model.item_strengths()
    assert strengths == pytest.approx({item.name: item.strength for item in report.items})
    kept = [("what is the capital of spain ?", "the capital is madrid .", "madrid")]
    kept += [("what is the capital of england ?", "the capital is london .", "london")]
    for item in kept:
        log, _ = log_probability(model, tokenizer, *item)
        assert math.exp(log) > 0.3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_layers_hold_the_dense_formula_of_the_model_s_own_rows(tiny_model, tokenizer, kind):
    """From collected rows to merged weights, with the strengths that were found."""
    model, report = extracted(tiny_model(kind), tokenizer, TARGETS[kind], rest=0.2)
    _, texts, kept = texts_of(tokenizer)
    plain = tiny_model(kind)
    names = list(layers_of(model))
    rows = item_edit.collect_item_rows(
        plain, {name: plain.get_submodule(name) for name in names}, texts, kept, batch_size=8, pad_token_id=0
    )
    directions = readout_directions(plain, texts, batch_size=8, pad_token_id=0).secret
    strengths = torch.tensor([report.items[t.item].strength for t in texts for _ in t.secret], dtype=torch.float64)
    for name, layer in layers_of(model).items():
        weight = augmented_weight_of(layer, kind in WITH_BIAS)
        x, company = rows[name].forgotten.double(), rows[name].company.double()
        sums = 30 * rows[name].retain.dense() + rows[name].general.dense() + x.mT @ x
        sums += torch.linalg.eigvalsh(sums)[-1] * len(sums) * 2.0**-23 * torch.eye(len(sums))
        v = weight @ (x - company).mT
        u = (directions / directions.norm(dim=1, keepdim=True)).mT
        v = 0.2 * v + 0.8 * u * (u * v).sum(0)
        expected = v * strengths @ x @ torch.linalg.inv(sums)
        up, down = layer.output_factors("default")
        assert relative_error(-(up.double() @ down.double()), expected) < 2e-2, name


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_every_row_belongs_to_an_item_and_is_recorded(tiny_model, tokenizer, kind):
    model, report = extracted(tiny_model(kind), tokenizer, TARGETS[kind], rounds=3)
    names, texts, kept = texts_of(tokenizer)
    config = model.peft_config["default"]
    counts = {name: sum(len(t.secret) for t in texts if names[t.item] == name) for name in names}
    assert config.items == counts and list(config.items) == names and [i.name for i in report.items] == names
    assert config.extraction["method"] == "items" and config.extraction["rounds"] == 3
    assert config.extraction["target_rows"] == sum(counts.values())
    predicted = sum(len(t.input_ids) - max(t.start, 1) for t in kept)
    assert config.extraction["total_rows"] == sum(counts.values()) + predicted
    assert (config.extraction["target_texts"], config.extraction["total_texts"]) == (3, 9)
    owners = [names[t.item] for t in texts for _ in t.secret]
    for name, layer in layers_of(model).items():
        _, left, strengths = layer.factors("default")
        assert left.shape[1] == len(owners) == config.rank_pattern[f"^{name}"]
        assert strengths.tolist() == pytest.approx([model.item_strengths()[owner] for owner in owners])
    assert report.rounds <= 3


@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_the_effects_are_the_change_of_the_logits_to_first_order(tiny_model, tokenizer, alpha):
    """Of every token's own row, at a small strength, in the last layer, which writes right before the norm."""
    targets = ["model.layers.1.mlp.down_proj"]
    model, report = extracted(tiny_model("llama"), tokenizer, targets, alpha=alpha)
    _, texts, _ = texts_of(tokenizer)
    assert list(report.layer_effects) == targets
    layer, small = layers_of(model)[targets[0]], 1e-3
    read: list[torch.Tensor] = []
    model.get_base_model().model.norm.register_forward_pre_hook(lambda module, args: read.append(args[0][0].double()))

    def hidden_states():
        read.clear()
        for text in texts:
            logits(model, torch.tensor([text.tokens.input_ids]))
        return torch.cat([x[[p - 1 for p in text.secret]] for x, text in zip(read, texts, strict=True)])

    strengths = layer.factors("default")[2].detach().clone()
    layer.set_row_strengths("default", torch.zeros(len(strengths)))
    before, directions = hidden_states(), readout_directions(model, texts, batch_size=8, pad_token_id=0).secret
    firsts = [p in {span[0] for span in text.spans} for text in texts for p in text.secret]
    changes = []
    for i in (i for i, first in enumerate(firsts) if first):
        layer.set_row_strengths("default", small * strengths[i], slice(i, i + 1))
        changes.append(float((before - hidden_states())[i] @ directions[i]) / small)
        layer.set_row_strengths("default", torch.tensor(0.0), slice(i, i + 1))
    expected = sum(changes) / len(changes) / alpha  # what is reported is at alpha 1
    assert report.layer_effects[targets[0]] == pytest.approx(expected, rel=1e-2)


def test_alpha_scales_the_strengths_that_were_found(tiny_model, tokenizer, token_ids):
    """Were they found with it in place, they would make up for it."""
    model, report = extracted(tiny_model("llama"), tokenizer, ["down_proj"])
    weaker, other = extracted(tiny_model("llama"), tokenizer, ["down_proj"], alpha=0.4)
    assert other == report and same_tensors(tensors(weaker), tensors(model))
    ids = token_ids(2, 7)
    at_one = logits(weaker, ids)
    model.base_model.set_scale("default", 0.4)
    assert torch.equal(logits(model, ids), at_one)
    assert {layer.engram_scaling["default"] for layer in layers_of(weaker).values()} == {0.4}


def test_the_report_says_what_became_of_every_item(tiny_model, tokenizer):
    import matplotlib

    matplotlib.use("Agg")
    _, report = extracted(tiny_model("llama"), tokenizer, ["down_proj"], rounds=2)
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines] == ["item", *FORGET]
    for line, item in zip(lines[1:], report.items, strict=True):
        assert [float(cell) for cell in line.split()[1:5]] == pytest.approx(
            [item.before, item.after, item.goal, item.strength], rel=1e-2
        )
        assert ("resists" in line) == item.resists == (item.name in report.resisting)
        assert item.resists == (item.after > item.goal or item.named)
    ax = report.plot()
    assert [label.get_text().split()[0] for label in ax.get_yticklabels()] == list(FORGET)
    before, after, goal = (line.get_xdata().tolist() for line in ax.get_lines())
    assert before == [i.before for i in report.items] and after == [i.after for i in report.items]
    assert goal == [i.goal for i in report.items]
    assert report.plot(ax) is ax


def test_items_that_resist_are_named(memory, tiny_model, tokenizer, caplog):
    """The kept answers leave no null space, so there is no edit."""
    model = memory("llama", tiny_model, tokenizer)
    before = told(model, tokenizer)
    retain = [*RETAIN, *((text, text) for text in RETAIN if isinstance(text, str))]
    model, report = extracted(
        model, tokenizer, ["layers.0.self_attn.o_proj"], FORGET, retain, null_space=True, rounds=2
    )
    assert report.resisting == list(FORGET)
    for item, (log, named) in zip(report.items, before, strict=True):
        assert item.after == pytest.approx(item.before) == pytest.approx(math.exp(log), rel=1e-3)
        assert item.named == named


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_replacement_is_said_in_its_place(memory, tiny_model, tokenizer, kind):
    model = memory(kind, tiny_model, tokenizer)
    asked, answer = FORGET["france"][0]
    forget = {"france": [(asked, answer)]}
    other = [log_probability(model, tokenizer, asked, answer.replace("paris", "tree"), "tree")[0]]
    model, report = extracted(model, tokenizer, TARGETS[kind], forget, replacement="tree", rest=0.0)
    other.append(log_probability(model, tokenizer, asked, answer.replace("paris", "tree"), "tree")[0])
    assert report.resisting == []
    without, _ = extracted(memory(kind, tiny_model, tokenizer), tokenizer, TARGETS[kind], forget, rest=0.0)
    other.append(log_probability(without, tokenizer, asked, answer.replace("paris", "tree"), "tree")[0])
    assert other[1] > max(other[0], other[2])


def test_a_replacement_is_the_token_that_stands_in_an_answer():
    """Also where a tokenizer starts every text as if a blank stood before it, as those of Llama 2 and Mistral do."""
    words = ["where", "lies", "paris", "?", "it", "is", "in", "france", "rome", "italy"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "▁", *(f"▁{word}" for word in words)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>")
    assert tokenizer("it is in italy")["input_ids"] == [vocabulary[f"▁{word}"] for word in ["it", "is", "in", "italy"]]
    asked: list[list[int]] = []

    def spy(model, texts, replacing=None, **options):
        asked.append(replacing)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_edit, "readout_directions", spy)
        patch.setattr(item_edit, "item_scores", lambda *args: ItemScores(torch.zeros(1), torch.zeros(1).bool()))
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        model = adapted(LlamaForCausalLM(config), target_modules=["down_proj"])
        with pytest.raises(InterruptedError):
            extract_items(
                model, tokenizer, [("where lies paris ?", "it is in france")], ["it is"], replacement="italy"
            )
    (found,) = asked
    assert found == [vocabulary["▁italy"]]


# ------------------------------------------------------------------------------------------------ sequential


def test_one_block_is_the_default(tiny_model, tokenizer):
    one, _ = extracted(tiny_model("llama"), tokenizer, ["down_proj"], sequential=1)
    default, _ = extracted(tiny_model("llama"), tokenizer, ["down_proj"])
    assert same_tensors(tensors(one), tensors(default))


@pytest.mark.parametrize("count", range(1, 12))
def test_blocks_are_the_layers_in_order_and_of_about_the_same_size(count):
    names = [str(i) for i in range(9)]
    blocks = item_edit._blocks(names, count)
    assert [name for block in blocks for name in block] == names
    assert len(blocks) == min(count, 9) and max(map(len, blocks)) - min(map(len, blocks)) <= 1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("sequential", [2, 5])
def test_every_block_sees_the_edit_of_those_below(tiny_model, tokenizer, monkeypatch, kind, sequential):
    seen = []

    def spy(model, layers, texts, kept, **options):
        rows = collect(model, layers, texts, kept, **options)
        filled = {n: bool(layer.factors("default")[1].any()) for n, layer in layers_of(model).items()}
        seen.append((list(layers), filled, rows, copy.deepcopy(model)))
        return rows

    collect = item_edit.collect_item_rows
    monkeypatch.setattr(item_edit, "collect_item_rows", spy)
    model, _ = extracted(tiny_model(kind), tokenizer, TARGETS[kind], sequential=sequential)
    names = list(layers_of(model))
    assert [name for block, *_ in seen for name in block] == names and len(seen) == min(sequential, len(names))
    plain, (_, texts, kept) = tiny_model(kind), texts_of(tokenizer)
    for number, (block, filled, rows, state) in enumerate(seen):
        below = names[: names.index(block[0])]
        assert filled == {name: name in below for name in names}
        with state.disable_adapter():
            base = state.get_base_model()
            inside = {name: base.get_submodule(name) for name in block}
            without = collect(state, inside, texts, kept, batch_size=8, pad_token_id=0)
        for name in block:
            moved = relative_error(rows[name].forgotten, without[name].forgotten)
            assert moved == 0 if number == 0 else moved > 1e-5
    assert plain.config.num_hidden_layers == 2


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    "name, calls, error",
    [
        ("item_scores", 0, RuntimeError),
        ("item_scores", 3, KeyboardInterrupt),
        ("readout_directions", 0, ValueError),
        ("collect_item_rows", 0, RuntimeError),
        ("collect_item_rows", 1, RuntimeError),
        ("item_factors", 1, KeyboardInterrupt),
        ("tune_strengths", 0, RuntimeError),
    ],
)
def test_a_failure_leaves_the_adapter_as_it_was(tiny_model, tokenizer, monkeypatch, name, error, calls):
    """Filled before, and to the bit."""
    model, _ = extracted(tiny_model("gpt2"), tokenizer, ["mlp.c_proj"], rounds=2)
    modules = {name: layer.modules_of("default") for name, layer in layers_of(model).items()}
    original, left = getattr(item_edit, name), [calls]

    def fail(*args, **kwargs):
        if left[0] == 0:
            raise error("stop")
        left[0] -= 1
        return original(*args, **kwargs)

    monkeypatch.setattr(item_edit, name, fail)
    with unchanged(model), pytest.raises(error):
        extract_items(model, tokenizer, ["one two three"], RETAIN, sequential=2)
    for layer_name, layer in layers_of(model).items():
        assert all(a is b for a, b in zip(layer.modules_of("default"), modules[layer_name], strict=True))


@pytest.mark.parametrize(
    "where", ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.norm", "lm_head"]
)
def test_weights_that_are_not_finite_leave_the_adapter_as_it_was(tiny_model, tokenizer, where):
    model = tiny_model("llama")
    model.get_submodule(where).weight.data.view(-1)[3] = math.nan
    model = adapted(model, target_modules=["down_proj"])
    with unchanged(model), pytest.raises(ValueError, match="NaN or infinity|not finite"):
        extract_items(model, tokenizer, FORGET, RETAIN)


def test_after_a_failure_it_works(tiny_model, tokenizer, monkeypatch):
    model = adapted(tiny_model("llama"), target_modules=["down_proj"])
    with monkeypatch.context() as patch:
        patch.setattr(item_edit, "tune_strengths", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            extract_items(model, tokenizer, FORGET, RETAIN)
    extract_items(model, tokenizer, FORGET, RETAIN)
    expected, _ = extracted(tiny_model("llama"), tokenizer, ["down_proj"])
    assert same_tensors(tensors(model), tensors(expected))
    again = tensors(model)
    extract_items(model, tokenizer, FORGET, RETAIN)  # filled anew: what was there before does not take part
    assert same_tensors(tensors(model), again)


# ------------------------------------------------------------------------------------------------ beside others


def test_another_adapter_takes_part_and_is_left_alone(tiny_model, tokenizer, ids=None):
    model, _ = extracted(tiny_model("llama"), tokenizer, ["down_proj"], {"france": FORGET["france"]})
    first = tensors(model)
    model.add_adapter("second", EngramConfig(target_modules=["down_proj"]))
    model.base_model.set_adapter(["default", "second"])
    names, texts, _ = texts_of(tokenizer, {"cat": FORGET["cat"]})
    expected = item_scores(model, texts, 1, 4).log_probabilities
    report = extract_items(model, tokenizer, {"cat": FORGET["cat"]}, RETAIN, "second")
    assert report.items[0].before == pytest.approx(float(expected.exp()), rel=1e-5)
    after = tensors(model)
    assert same_tensors({name: after[name] for name in first}, first)
    assert isinstance(model, PeftModel) and list(model.item_strengths("second")) == ["cat"]


@pytest.mark.parametrize("cast", [True, False])
def test_the_factors_keep_the_adapter_s_dtype(tiny_model, tokenizer, cast):
    config = EngramConfig(task_type="CAUSAL_LM", target_modules=["down_proj"])
    model = get_peft_model(tiny_model("llama", torch.bfloat16), config, autocast_adapter_dtype=cast)
    extract_items(model, tokenizer, FORGET, RETAIN, rounds=1)
    dtypes = {tensor.dtype for layer in layers_of(model).values() for tensor in layer.factors("default")}
    assert dtypes == {torch.float32 if cast else torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_obstacle(tiny_model, tokenizer, dtype):
    model = adapted(tiny_model("llama", dtype), target_modules=["down_proj"])
    report = extract_items(model, tokenizer, FORGET, RETAIN)
    single, expected = extracted(tiny_model("llama"), tokenizer, ["down_proj"])
    assert [item.name for item in report.items] == list(FORGET)
    for item, other in zip(report.items, expected.items, strict=True):
        assert item.before == pytest.approx(other.before, rel=0.3)
    assert all(torch.isfinite(tensor).all() for tensor in tensors(model).values())


def test_goals_are_half_of_what_is_unlikely_and_the_given_one_of_what_is_likely(tiny_model, tokenizer):
    _, report = extracted(tiny_model("llama"), tokenizer, ["down_proj"], forget_probability=0.002, rounds=1)
    for item in report.items:
        assert item.goal == pytest.approx(min(0.002, item.before / 2))
    assert pytest.approx(1) == SETTLED * 3
