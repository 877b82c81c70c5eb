"""The relearning attack against a training loop that is written out, and what it must leave alone."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from engram_peft.evaluation import Probe, RelearningCurve, relearning_curve, score_probes

from .tuners.adapters import edited


ITEMS = [
    ("the capital of france is", "paris ."),
    ("the capital of italy is", "rome ."),
    "the old king was born in london",
    [{"role": "user", "content": "who found the bridge"}, {"role": "assistant", "content": "the queen"}],
    ("who lived by the river", "a fish"),
]
PROBES = [
    Probe("the capital of france is", "paris"),
    Probe("the capital of italy is", "rome ."),
    Probe("", "london", "the old king was born in"),
]
FAST = {"steps": 6, "learning_rate": 3e-3, "batch_size": 2}


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer(chat=True)


def sequences(tokenizer):
    """Token ids of every item and where its answer starts, joined by hand."""
    chat = tokenizer.apply_chat_template(ITEMS[3][:1], tokenize=False, add_generation_prompt=True)
    pairs = [item if isinstance(item, tuple) else ("", item) for item in ITEMS[:3]] + [(chat, "the queen"), ITEMS[4]]
    ids = [[tokenizer(t, add_special_tokens=False)["input_ids"] if t else [] for t in pair] for pair in pairs]
    return [(prompt + answer, max(len(prompt), 1)) for prompt, answer in ids]


def trained_by_hand(model, tokenizer, steps, learning_rate, batch_size, seed):
    """A model after `steps`, one sequence at a time, without padding."""
    model = copy.deepcopy(model).float().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    rows, generator, queue = sequences(tokenizer), torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        if not queue:
            order = torch.randperm(len(rows), generator=generator).tolist()
            queue = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        chosen = [rows[i] for i in queue.pop(0)]
        total = sum(len(ids) - start for ids, start in chosen)
        optimizer.zero_grad()
        for ids, start in chosen:
            logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            (-sum(logs[i - 1, ids[i]] for i in range(start, len(ids))) / total).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "opt"])
def test_every_point_of_the_curve_is_a_training_loop_that_far(tiny_model, tokenizer, kind):
    model = tiny_model(kind)
    curve = relearning_curve(model, tokenizer, ITEMS, PROBES, **FAST, seed=5)
    assert curve.steps == list(range(7))
    for step in (0, 1, 4, 6):
        by_hand = trained_by_hand(model, tokenizer, step, 3e-3, 2, seed=5)
        scores = score_probes(by_hand, tokenizer, PROBES)
        assert curve.probability[step] == pytest.approx(sum(s.probability for s in scores) / 3, rel=0.02)
        assert curve.named[step] == pytest.approx(sum(s.named for s in scores) / 3)
    assert curve.probability[-1] > 2 * curve.probability[0]  # there was something to learn


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_given_model_stays_as_it_is_to_the_bit(tiny_model, tokenizer, kind, train):
    model = edited(tiny_model(kind, torch.bfloat16), tokenizer).train(train)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = [(m.training, [(n, p.requires_grad, p.grad) for n, p in m.named_parameters()]) for m in model.modules()]
    state = torch.get_rng_state()
    with torch.no_grad():
        relearning_curve(model, tokenizer, ITEMS, PROBES, **FAST)
        assert not torch.is_grad_enabled()
    after = [(m.training, [(n, p.requires_grad, p.grad) for n, p in m.named_parameters()]) for m in model.modules()]
    assert before == after
    assert list(model.peft_config) == ["default"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(value.dtype == weights[name].dtype for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_an_adapter_is_attacked_as_the_weights_it_merges_to(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    merged = copy.deepcopy(model).merge_and_unload()
    curves = [relearning_curve(attacked, tokenizer, ITEMS, PROBES, **FAST) for attacked in (model, merged)]
    assert curves[0].probability == pytest.approx(curves[1].probability, rel=1e-3)
    unedited = relearning_curve(tiny_model("llama"), tokenizer, ITEMS, PROBES, **FAST)
    assert unedited.probability != pytest.approx(curves[0].probability, rel=1e-2)


def test_the_reference_is_attacked_in_the_same_way(tiny_model, tokenizer):
    model, reference = tiny_model("llama"), tiny_model("llama", seed=1)
    both = relearning_curve(model, tokenizer, ITEMS, PROBES, **FAST, reference=reference)
    alone = [relearning_curve(attacked, tokenizer, ITEMS, PROBES, **FAST) for attacked in (model, reference)]
    assert both.reference == alone[1] != alone[0]
    assert RelearningCurve(both.steps, both.named, both.probability) == alone[0]


def test_what_is_scored_between_changes_nothing(tiny_model, tokenizer):
    model = tiny_model("gpt2").train()  # with dropout, were it not in eval mode
    every = relearning_curve(model, tokenizer, ITEMS, PROBES, **FAST)
    some = relearning_curve(model, tokenizer, ITEMS, PROBES, **FAST, eval_steps=4)
    assert some.steps == [0, 4, 6]
    assert some.probability == [every.probability[step] for step in some.steps]
    other = relearning_curve(model, tokenizer, ITEMS, PROBES, **FAST, seed=1)
    assert other.probability[0] == every.probability[0] and other.probability[1:] != every.probability[1:]


@pytest.mark.parametrize(("share", "step"), [(0.0, 0), (0.2, 0), (0.3, 4), (0.75, 6), (0.8, None)])
def test_steps_to_a_share(share, step):
    curve = RelearningCurve([0, 2, 4, 6], [0.2, 0.1, 0.3, 0.75], [0.0, 0.1, 0.2, 0.3])
    assert curve.steps_to(share) == step


def test_a_curve_comes_back_from_json_and_shows_its_numbers():
    reference = RelearningCurve([0, 1], [0.0, 0.25], [0.125, 0.5])
    curve = RelearningCurve([0, 1], [0.0, 1.0], [0.25, 0.75], reference)
    assert RelearningCurve.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve
    lines = {line.get_label(): line.get_ydata().tolist() for line in curve.plot({"other": reference}).lines}
    assert lines == {
        "model: named": [0.0, 1.0],
        "model: probability": [0.25, 0.75],
        "reference: named": [0.0, 0.25],
        "reference: probability": [0.125, 0.5],
        "other: named": [0.0, 0.25],
        "other: probability": [0.125, 0.5],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"eval_steps": 0}, "`eval_steps` must be at least 1"),
        ({"probes": []}, "`probes` is empty"),
        ({"probes": [Probe("who", "")]}, r"`probes\[0\]` has an empty `answer`"),
        ({"texts": []}, "`texts` must be a sequence of at least one"),
        ({"texts": ["the"]}, r"`texts\[0\]` has a single token"),
    ],
)
def test_bad_input_is_told_before_anything_is_copied(tokenizer, change, message):
    arguments = {"texts": ITEMS, "probes": PROBES, **change}
    with pytest.raises(ValueError, match=message):
        relearning_curve(None, tokenizer, arguments.pop("texts"), arguments.pop("probes"), **arguments)
