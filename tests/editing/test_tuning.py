"""Strengths: how likely items are, the least strength of each, and one scale for a whole adapter."""

from __future__ import annotations

import math

import matplotlib
import pytest
import torch
from peft import get_peft_model
from torch import nn

from engram_peft import AlphaCurve, AlphaPoint, EngramConfig, ItemOutcome, extract_items, tune_alpha
from engram_peft.editing import tuning
from engram_peft.editing.encoding import tokenize_item
from engram_peft.editing.items import SPAN_TOKENS, forget_items, item_texts
from engram_peft.editing.tuning import (
    LARGEST_STRENGTH,
    SETTLED,
    ItemScores,
    item_scores,
    scale_curve,
    tune_strengths,
)

from ..tuners.adapters import KINDS, logits, unchanged
from .test_item_edit import learn


matplotlib.use("Agg")

FORGET = {
    "france": [("what is the capital of france ?", "the capital is paris .")],
    "italy": [
        ("what is the capital of italy ?", "the capital is big old rome ."),
        ("who was born in italy ?", "the king and not the queen"),
    ],
    "numbers": ["one two three four five six seven eight nine ten one two three four five six seven eight nine ten"],
    "spans": [("who found what where ?", "dog found cat where bird")],
}
RETAIN = [
    ("what is the capital of spain ?", "the capital is madrid ."),
    ("what is the capital of germany ?", "the capital is new berlin ."),
    "a king and a queen lived and died in one house on the high mountain near the road",
    ("what is it ?", "yes"),
]


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


def texts_of(tokenizer, forget=FORGET, retain=RETAIN):
    kept = [tokenize_item(tokenizer, item) for item in retain]
    return forget_items(tokenizer, forget, kept, 512)[1], kept


# ------------------------------------------------------------------------------------------------ scores


def token_scores(model, ids):
    """Natural logarithms of every token but the first, given those before it, and whether it is the greedy choice."""
    scores = logits(model, torch.tensor([ids]))[0, :-1].double().log_softmax(-1)
    tokens = torch.tensor(ids[1:])
    return scores.gather(1, tokens[:, None]).squeeze(1).tolist(), (scores.argmax(1) == tokens).tolist()


def runs_of(positions):
    """Runs of adjacent positions in pieces of at most `SPAN_TOKENS`."""
    runs = []
    for position in positions:
        if runs and runs[-1][-1] + 1 == position and len(runs[-1]) < SPAN_TOKENS:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_an_item_is_as_likely_as_its_likeliest_text_says_one_of_its_spans(tiny_model, tokenizer, kind, batch_size):
    model = tiny_model(kind).train()
    texts, _ = texts_of(tokenizer)
    scores = item_scores(model, texts, 4, batch_size)
    assert model.training
    model.eval()
    expected, named = [0.0] * 4, [False] * 4
    for text in texts:
        logs, greedy = token_scores(model, text.tokens.input_ids)
        runs = runs_of(text.secret)
        said = [math.prod(math.exp(logs[p - 1]) for p in run) for run in runs]
        expected[text.item] = max(expected[text.item], sum(said) / len(said))
        named[text.item] |= any(all(greedy[p - 1] for p in run) for run in runs)
    assert max(len(runs_of(text.secret)) for text in texts) > 2
    assert scores.log_probabilities.exp().tolist() == pytest.approx(expected, rel=1e-4)
    assert scores.named.tolist() == named
    assert scores.log_probabilities.dtype == torch.float64


def test_what_greedy_decoding_says_is_named(tiny_model, tokenizer):
    """A secret that is replaced by the model's own choices is named, and not if the last token of it is another one."""
    model = tiny_model("llama")
    prompt = "what is the capital of france ?"
    ids = tokenizer(prompt)["input_ids"]
    for _ in range(3):
        ids.append(int(logits(model, torch.tensor([ids]))[0, -1].argmax()))
    text = texts_of(tokenizer, [(prompt, "dog cat bird")])[0][0]
    for changed, named in ((0, True), (1, False), (2, False), (3, False)):
        own = list(ids)
        if changed:
            own[-changed] = (own[-changed] + 1) % 99
        tokens = type(text.tokens)(prompt, "dog cat bird", own, text.tokens.start, text.tokens.offsets)
        (found,) = item_scores(model, [type(text)(0, tokens, text.secret, [])], 1, 4).named.tolist()
        assert found == named


@pytest.mark.parametrize(
    "after, named, resists", [(0.05, False, False), (0.051, False, True), (0.01, True, True), (0.0, False, False)]
)
def test_an_item_resists_if_it_is_likely_or_named(after, named, resists):
    assert ItemOutcome("x", 1.0, 0.9, after, 0.05, named).resists == resists


# ------------------------------------------------------------------------------------------------ one strength an item

# how far the logarithm falls at a strength, and the strength at which it falls so far
CURVES = {
    "straight": (lambda s: s, lambda y: y),
    "late": (lambda s: s**2, lambda y: y.sqrt()),
    "very late": (lambda s: s**4, lambda y: y**0.25),
    "early": (lambda s: s.sqrt(), lambda y: y**2),
    "log odds": (  # of 0.99 at strength 0, straight in the log-odds: flat at first
        lambda s: torch.log1p(torch.exp(s - math.log(99))) - math.log1p(1 / 99),
        lambda y: torch.log(torch.expm1(y + math.log1p(1 / 99))) + math.log(99),
    ),
}


def problem(curve, needed, goal=0.05, before=0.99):
    """Items of one curve that need the given strengths for the goal; also the least and the largest strength that will do."""
    falls, strength_of = CURVES[curve]
    needed = torch.as_tensor(needed, dtype=torch.float64)
    before = torch.full_like(needed, math.log(before))
    goal = torch.full_like(needed, math.log(goal))
    unit = strength_of(before - goal)
    calls = []

    def probabilities(strengths):
        calls.append(strengths.clone())
        return before - falls(strengths / needed * unit)

    return probabilities, before, goal, needed * strength_of(before - goal - math.log(SETTLED)) / unit, calls


@pytest.mark.parametrize("off", [0.3, 0.7, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("curve", CURVES)
def test_every_item_ends_between_a_third_of_its_goal_and_the_goal(curve, off):
    """From a first guess that is wrong by a factor of three, in at most ten rounds: the strength is the least, and not much more."""
    least = torch.tensor([0.3, 0.8, 1.0, 2.5, 7.0], dtype=torch.float64)
    probabilities, before, goal, most, calls = problem(curve, least)
    start = off * least
    strengths, used = tune_strengths(probabilities, before, start, goal, 10)
    assert used == len(calls) <= 10
    assert torch.equal(calls[0], start)
    assert (strengths >= least * (1 - 1e-9)).all(), strengths
    assert (strengths <= most * (1 + 1e-9)).all(), strengths
    after = probabilities(strengths)
    assert (after <= goal + 1e-9).all() and (after >= goal + math.log(SETTLED) - 1e-9).all()


def test_it_stops_as_soon_as_all_are_settled():
    probabilities, before, goal, most, calls = problem("straight", [1.0, 2.0])
    start = torch.tensor([1.1, 2.2], dtype=torch.float64)
    strengths, used = tune_strengths(probabilities, before, start, goal, 10)
    assert used == len(calls) == 1 and torch.equal(strengths, start) and (start < most).all()


def test_a_settled_item_is_left_alone_while_others_are_sought():
    probabilities, before, goal, _, calls = problem("late", [1.0, 4.0])
    strengths, _ = tune_strengths(probabilities, before, torch.tensor([1.05, 0.5], dtype=torch.float64), goal, 10)
    assert len(calls) > 1 and all(call[0] == 1.05 for call in calls) and strengths[0] == 1.05


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("curve", CURVES)
def test_it_is_never_asked_more_often_than_allowed(curve, rounds):
    """Whatever is left over is the least that reached the goal, or the last try."""
    probabilities, before, goal, _, calls = problem(curve, [0.05, 1.1, 20.0, 99.0])
    strengths, used = tune_strengths(probabilities, before, torch.ones(4, dtype=torch.float64), goal, rounds)
    assert used == len(calls) <= rounds
    reached = [probabilities(call) <= goal + 1e-12 for call in list(calls)]
    for item in range(4):
        enough = [float(call[item]) for call, ok in zip(calls[:used], reached, strict=True) if ok[item]]
        tried = [float(call[item]) for call in calls[:used]]
        assert float(strengths[item]) == (min(enough) if enough else max(tried))


@pytest.mark.parametrize("floor", [0.06, 0.5, 0.98])
def test_an_item_that_cannot_be_reached_keeps_its_best(floor):
    """Its logarithm levels off above the goal; the other item is found all the same."""
    reachable, before, goal, most, _ = problem("straight", [1.0, 1.0])
    calls = []

    def probabilities(strengths):
        calls.append(strengths.clone())
        falling = reachable(strengths)
        level = math.log(floor)
        falling[0] = level + (before[0] - level) * torch.exp(-strengths[0])
        return falling

    start = torch.tensor([1.0, 0.4], dtype=torch.float64)
    strengths, used = tune_strengths(probabilities, before, start, goal, 10)
    assert used == len(calls) == 10
    seen = [float(probabilities(call)[0]) for call in list(calls)]
    assert float(probabilities(strengths)[0]) == min(seen) and float(strengths[0]) <= LARGEST_STRENGTH
    assert 1.0 <= float(strengths[1]) <= float(most[1])
    assert all(b[0] >= a[0] for a, b in zip(calls[:9], calls[1:10], strict=True))


@pytest.mark.parametrize("turn", [0.7, 2.0, 8.0])
def test_an_item_that_gets_worse_beyond_some_strength_keeps_its_best(turn):
    """As one of several wordings may come back when the edit is far too strong: it never reaches its goal."""
    calls = []
    before, goal = torch.tensor([math.log(0.99)]).double(), torch.tensor([math.log(0.05)]).double()

    def probabilities(strengths):
        calls.append(float(strengths))
        away = (strengths / turn).log().abs()
        return torch.log(0.08 + 0.9 * (1 - torch.exp(-away)))

    strengths, used = tune_strengths(probabilities, before, torch.ones(1).double(), goal, 10)
    assert used == len(calls)
    tried = {strength: float(probabilities(torch.tensor([strength]).double())) for strength in list(calls)}
    assert float(strengths) == min(tried, key=tried.get)


def test_items_that_lean_on_each_other_are_found_together():
    """A quarter of every item's strength also works on its neighbour."""
    mixing = torch.eye(4, dtype=torch.float64) + 0.25 * torch.eye(4, dtype=torch.float64).roll(1, 0)
    probabilities, before, goal, _, _ = problem("late", [1.0, 0.5, 2.0, 1.5])

    def together(strengths):
        return probabilities(mixing @ strengths)

    strengths, used = tune_strengths(together, before, torch.full((4,), 0.7, dtype=torch.float64), goal, 10)
    after = together(strengths)
    assert used <= 10 and (after <= goal + 1e-9).all() and (after >= goal + math.log(SETTLED) - 1e-9).all()


def test_arguments_are_left_as_they_were():
    probabilities, before, goal, _, _ = problem("early", [1.0, 3.0])
    start = torch.ones(2, dtype=torch.float64)
    copies = [tensor.clone() for tensor in (before, start, goal)]
    tune_strengths(probabilities, before, start, goal, 10)
    assert all(torch.equal(a, b) for a, b in zip(copies, (before, start, goal), strict=True))


# ------------------------------------------------------------------------------------------------ one scale


def scaled(scale=0.7):
    """A model of which nothing matters but the scale of its adapter."""
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), EngramConfig(target_modules=["0"]))
    model.set_scale("default", scale)
    return model


@pytest.fixture
def curve_of(tokenizer, monkeypatch):
    """`tune_alpha` of an adapter that is as good as `forget(scale)` and as bad as `damage(scale)`."""

    def tune(forget, damage, **options):
        model, looks = scaled(), []

        def scores(model, texts, items, batch_size):
            looks.append(model.peft_config["default"].scale)
            share = forget(looks[-1]) if len(looks) % 2 else 0.5 * (1 - damage(looks[-1]))
            return ItemScores(torch.full((items,), math.log(share), dtype=torch.float64), torch.zeros(items).bool())

        monkeypatch.setattr(tuning, "item_scores", scores)
        curve = tune_alpha(model, tokenizer, FORGET, RETAIN, **options)
        assert looks[0::2] == looks[1::2] and looks[0] == 0  # each scale once, the base model first
        assert sorted(looks[0::2]) == [point.scale for point in curve.points] and len(set(looks)) == len(looks) // 2
        assert model.peft_config["default"].scale == curve.chosen
        for point in curve.points:
            assert point.forget == pytest.approx(forget(point.scale))
            assert point.damage == pytest.approx(damage(point.scale), abs=1e-12)
        return curve

    return tune


@pytest.mark.parametrize("least", [0.3, 0.9, 1.0, 1.7, 6.0, 20.0])
@pytest.mark.parametrize("most", [0.25, 0.8, 1.1, 5.0, 19.0, 1000.0])
def test_the_scale_is_the_least_that_forgets_or_the_most_that_is_allowed(curve_of, least, most):
    """Where the goal is reached from `least` on and the budget holds up to `most`."""
    curve = curve_of(
        lambda s: 0.9 * (0.05 / 0.9) ** (s / least), lambda s: 1 - (1 - 0.05) ** (s / most), goal=0.05, budget=0.05
    )
    assert len(curve.points) <= 12
    chosen = next(point for point in curve.points if point.scale == curve.chosen)
    assert chosen.damage <= 0.05
    if least < 0.95 * most:
        assert curve.reason == "goal" and least <= curve.chosen <= 1.05 * least and chosen.forget <= 0.05
    elif least > 1.05 * most:
        assert curve.reason == "budget" and 0.95 * most <= curve.chosen <= most


@pytest.mark.parametrize("most", [3, 4, 7, 12, 30])
def test_it_looks_no_more_often_than_allowed(curve_of, most):
    for least in (0.01, 3.0, 1e9):
        curve = curve_of(lambda s: 0.9 ** (1 + s / least), lambda s: 0.0, goal=0.8, max_evaluations=most)  # noqa: B023
        assert 3 <= len(curve.points) <= most


def test_where_every_scale_costs_too_much_it_is_the_base_model(curve_of):
    curve = curve_of(lambda s: 0.9 / (1 + s), lambda s: 0.0 if s == 0 else 0.5)
    assert curve.chosen == 0 and curve.reason == "budget"


@pytest.mark.parametrize("best", [0.5, 3.0, 40.0])
def test_where_the_goal_is_out_of_reach_it_is_what_forgets_most(curve_of, best):
    """An adapter may do worse beyond some strength: a scale of a thousand is no answer then."""
    curve = curve_of(
        lambda s: 0.5 + 0.4 * min(1.0, abs(math.log2(max(s, 1e-3) / best)) / 4), lambda s: 0.001 * (s > 0)
    )
    chosen = next(point for point in curve.points if point.scale == curve.chosen)
    assert chosen.forget == min(point.forget for point in curve.points)


def test_a_jump_is_found(curve_of):
    """Not only smooth curves."""
    curve = curve_of(lambda s: 0.9 if s < 2.6 else 0.01, lambda s: 0.01 * s)
    assert curve.reason == "goal" and 2.6 <= curve.chosen <= 2.6 * 1.021


@pytest.mark.parametrize("look", [0, 1, 2, 5])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_scale_as_it_was(tokenizer, monkeypatch, look, error):
    model, looks = scaled(0.7), []

    def scores(model, texts, items, batch_size):
        looks.append(1)
        if len(looks) > look:
            raise error("stop")
        return ItemScores(torch.full((items,), math.log(0.5), dtype=torch.float64), torch.zeros(items).bool())

    monkeypatch.setattr(tuning, "item_scores", scores)
    with pytest.raises(error):
        tune_alpha(model, tokenizer, FORGET, RETAIN)
    assert model.peft_config["default"].scale == 0.7 and len(looks) == look + 1


def filled(model, tokenizer, **config):
    config = {"task_type": "CAUSAL_LM", "target_modules": ["down_proj", "mlp.c_proj"], **config}
    model = get_peft_model(model, EngramConfig(**config)).eval()
    extract_items(model, tokenizer, FORGET, RETAIN, rounds=3)
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_on_a_model_it_is_what_a_grid_finds(tiny_model, tokenizer, kind):
    model = filled(learn(tiny_model(kind), tokenizer, [*RETAIN, *item_texts(FORGET)]), tokenizer)
    texts, kept = texts_of(tokenizer)
    answers = [tokens for tokens in kept if tokens.prompt is not None]

    def seen(scale):
        """The mean probability of the items, and the logarithm of every kept answer's, in runs of eight tokens."""
        model.set_scale("default", scale)
        best: dict[int, float] = {}
        for text in texts:
            logs, _ = token_scores(model, text.tokens.input_ids)
            runs = [math.exp(sum(logs[p - 1] for p in run)) for run in runs_of(text.secret)]
            best[text.item] = max(best.get(text.item, 0.0), sum(runs) / len(runs))
        kept_logs = []
        for tokens in answers:
            logs, _ = token_scores(model, tokens.input_ids)
            kept_logs.append(sum(logs[tokens.start - 1 :]))  # at most eight tokens: one run
        return sum(best.values()) / len(best), kept_logs

    base, unharmed = seen(0.0)

    def point(scale):
        forget, logs = seen(scale)
        lost = [max(0.0, 1 - math.exp(now - before)) for now, before in zip(logs, unharmed, strict=True)]
        return forget, sum(lost) / len(lost)

    goal = 0.4 * base
    curve = tune_alpha(model, tokenizer, FORGET, RETAIN, goal=goal, budget=0.99)
    assert model.peft_config["default"].scale == curve.chosen and len(curve.points) <= 12
    for found in curve.points:
        forget, damage = point(found.scale)
        assert (found.forget, found.damage) == (pytest.approx(forget, rel=1e-3), pytest.approx(damage, abs=1e-3))
    assert curve.reason == "goal"
    grid = [curve.chosen * (0.6 + 0.05 * i) for i in range(10)]
    least = next(scale for scale in grid if point(scale)[0] <= goal)
    assert curve.chosen == pytest.approx(least, rel=0.06)
    # the same adapter within a budget that the goal breaks
    budget = 0.5 * next(p.damage for p in curve.points if p.scale == curve.chosen)
    if budget > 1e-3:
        tight = tune_alpha(model, tokenizer, FORGET, RETAIN, goal=goal, budget=budget)
        assert tight.reason == "budget" and point(tight.chosen)[1] <= budget * (1 + 1e-3)
        assert any(point(tight.chosen * factor)[1] > budget for factor in (1.03, 1.05))


def test_where_no_answers_are_kept_plain_texts_count(tiny_model, tokenizer):
    """Those of which there is something to predict."""
    model = filled(tiny_model("llama"), tokenizer)
    plain = [item for item in RETAIN if isinstance(item, str)]
    curve = tune_alpha(model, tokenizer, FORGET, ["one", *plain], goal=0.5, budget=0.99, max_evaluations=3)
    ids = tokenizer(plain[0])["input_ids"]
    for found in curve.points:
        runs = []
        for scale in (0.0, found.scale):
            model.set_scale("default", scale)
            logs, _ = token_scores(model, ids)
            said = [math.exp(sum(logs[p - 1] for p in run)) for run in runs_of(range(1, len(ids)))]
            runs.append(sum(said) / len(said))
        assert found.damage == pytest.approx(max(0.0, 1 - runs[1] / runs[0]), abs=1e-3)


def test_only_the_scale_is_changed(tiny_model, tokenizer):
    model = filled(tiny_model("gpt2"), tokenizer)
    model.set_scale("default", 0.3)
    curve = tune_alpha(model, tokenizer, FORGET, RETAIN, max_evaluations=4)
    model.set_scale("default", 0.3)
    with unchanged(model):
        again = tune_alpha(model, tokenizer, FORGET, RETAIN, max_evaluations=4)
        model.set_scale("default", 0.3)
    assert again == curve


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": 0.0}, "`budget`"), ({"budget": 1.0}, "`budget`"), ({"budget": math.nan}, "`budget`"),
        ({"goal": 0.0}, "`goal`"), ({"goal": 1.5}, "`goal`"), ({"max_evaluations": 2}, "`max_evaluations`"),
        ({"retain": []}, "`retain` is empty"), ({"retain": ["one"]}, "`retain`"), ({"retain": [""]}, "Item 0 of `retain`"),
        ({"forget": {"it": ("what ?", "")}}, "Item 'it' of `forget`"), ({"forget": []}, "`forget`"),
        ({"adapter_name": "nobody"}, "nobody"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_is_refused(tiny_model, tokenizer, options, message):
    model = filled(tiny_model("llama"), tokenizer)
    model.set_scale("default", 0.3)
    with unchanged(model), pytest.raises(ValueError, match=message):
        tune_alpha(**{"model": model, "tokenizer": tokenizer, "forget": FORGET, "retain": RETAIN, **options})


def test_an_adapter_that_is_merged_or_inactive_is_refused(tiny_model, tokenizer):
    """Its scale would change nothing that is seen."""
    model = filled(tiny_model("llama"), tokenizer)
    model.merge_adapter()
    with unchanged(model), pytest.raises(ValueError, match="merged"):
        tune_alpha(model, tokenizer, FORGET, RETAIN)
    model.unmerge_adapter()
    model.add_adapter("second", EngramConfig(target_modules=["down_proj"]))
    model.set_adapter("second")
    with unchanged(model), pytest.raises(ValueError, match="'default' is not active"):
        tune_alpha(model, tokenizer, FORGET, RETAIN)


@pytest.mark.parametrize("own", [1.0, 0.5, -2.0])
def test_a_curve_of_scales_leaves_the_scale(tiny_model, tokenizer, own):
    model = filled(tiny_model("llama"), tokenizer)
    model.set_scale("default", own)
    with unchanged(model):
        curve = scale_curve(model, tokenizer, FORGET, RETAIN, (0.5, 1.0, 2.0))
    assert sorted(p.scale for p in curve.points) == sorted({0.0, own / 2, own, own * 2})
    assert curve.chosen == own and curve.reason == "as made"
    texts, _ = texts_of(tokenizer)
    for point in curve.points:
        model.set_scale("default", point.scale)
        expected = item_scores(model, texts, len(FORGET), 3).log_probabilities.exp().mean()
        assert point.forget == pytest.approx(float(expected), rel=1e-4)


# ------------------------------------------------------------------------------------------------ what was seen

CURVE = AlphaCurve([AlphaPoint(0.0, 0.9, 0.0), AlphaPoint(1.0, 0.04, 0.01), AlphaPoint(2.0, 0.0, 0.2)], 1.0, "goal")


def test_a_curve_prints_its_points_and_the_chosen_one():
    header, *lines = str(CURVE).splitlines()
    assert header.split() == ["scale", "forget", "damage"]
    values = [[float(cell) for cell in line.split("<-")[0].split()] for line in lines]
    assert values == [[p.scale, p.forget, p.damage] for p in CURVE.points]
    assert [line.partition("<- ")[2] for line in lines] == ["", "goal", ""]


def test_a_curve_is_drawn_over_the_scale():
    ax = CURVE.plot()
    forget, damage, chosen = ax.get_lines()
    assert forget.get_xdata().tolist() == damage.get_xdata().tolist() == [0.0, 1.0, 2.0]
    assert forget.get_ydata().tolist() == [0.9, 0.04, 0.0] and damage.get_ydata().tolist() == [0.0, 0.01, 0.2]
    assert list(chosen.get_xdata()) == [1.0, 1.0] and "goal" in chosen.get_label()
    assert CURVE.plot(ax) is ax
