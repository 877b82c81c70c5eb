"""Probes, perplexity, membership inference and the report, each against a second way to the same number."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

from engram_peft.editing.likelihood import Likelihood
from engram_peft.evaluation import (
    Evaluation,
    GroupScores,
    Probe,
    ProbeScore,
    Suite,
    evaluate,
    perplexity,
    score_probes,
)
from engram_peft.evaluation.generation import contains_answer, greedy_texts, rouge_l_scorer, sampled_texts
from engram_peft.evaluation.probes import encode_probe
from engram_peft.evaluation.texts import area_under_curve, min_k_score

from .conftest import BOS, EOS, WORDS
from .tuners.adapters import edited


KINDS = ["llama", "qwen3", "gpt2", "opt"]
ASKED = [{"role": "user", "content": "what is the capital of france"}]
TEXTS = [
    "the old king was born in london by the river",
    "who found the new bridge",
    "red dog , blue cat and green bird",
]


class BigramModel(nn.Module):
    """A language model whose next token depends on the last one alone, by a table of probabilities that a test sets."""

    def __init__(self, tokenizer, transitions, other=1e-6):
        super().__init__()
        ids = tokenizer.get_vocab()
        table = torch.full((len(ids), len(ids)), other)
        for last, following in transitions.items():
            for word, probability in following.items():
                table[ids[last], ids[word]] = probability
            table[ids[last]] /= table[ids[last]].sum()
        self.table = nn.Parameter(table.log())
        self.generation_config = GenerationConfig(eos_token_id=ids[EOS])

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        return SimpleNamespace(logits=self.table[input_ids])

    def generate(self, input_ids, attention_mask, generation_config):
        for _ in range(generation_config.max_new_tokens):
            input_ids = torch.cat([input_ids, self.table[input_ids[:, -1:]].argmax(-1)], dim=1)
        return input_ids


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer(chat=True)


def subword_tokenizer(kind):
    """Byte-level BPE like GPT-2's, or one with visible blanks like SentencePiece's; small enough for the tiny models."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    split = {"bpe": pre_tokenizers.ByteLevel(add_prefix_space=False), "sentencepiece": pre_tokenizers.Metaspace()}
    backend.pre_tokenizer = split[kind]
    trainer = trainers.BpeTrainer(vocab_size=95, special_tokens=["<pad>", BOS, EOS, "<unk>"], show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )


def log_probabilities(model, ids):
    """Of every token but the first, by one unbatched pass: `(n - 1, vocabulary)`."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)


def some_suite(**parts):
    return Suite(
        **{
            "forget": [
                Probe(ASKED, "paris", "it is", ".", wrong=("london", "big rome"), paraphrase="paris city"),
                Probe(ASKED, "old big city", "that is an"),
            ],
            "cloze": [Probe("", "paris", "the capital of france is")],
            "retain": [Probe("the capital of england", " london", name="england")],
            "general": TEXTS,
            "members": [("who is the king of england", "the dog"), TEXTS[1]],
            "non_members": ["the moon is on fire", "nine birds found a tree"],
            **parts,
        }
    )


# ------------------------------------------------------------------------------------------------------ probes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_scored_as_by_one_unbatched_pass(tiny_model, tokenizer, kind, dtype):
    model = tiny_model(kind, dtype)
    chat = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    # the whole text, how many tokens come before the answer, and how many it has
    cases = [
        (Probe(ASKED, "paris", "it is", "."), chat + "it is paris .", -2, 1),
        (Probe(ASKED, "old big city", name="three"), chat + "old big city", -3, 3),
        (Probe("the capital of france", "is paris"), "the capital of france is paris", -2, 2),
        (Probe("", "in london", "the king was born"), "the king was born in london", -2, 2),
    ]
    cases[0] = (Probe(ASKED, "paris", "it is", " ."), *cases[0][1:])
    scores = score_probes(model, tokenizer, [case[0] for case in cases], batch_size=3)
    for (probe, text, place, count), score in zip(cases, scores, strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = [(len(ids) + place + i, ids[len(ids) + place + i]) for i in range(count)]
        logs = log_probabilities(model, ids)
        expected = [float(logs[position - 1, token]) for position, token in answer]
        ranks = [int((logs[position - 1] > logs[position - 1, token]).sum()) for position, token in answer]
        tolerance = 1e-4 if dtype == torch.float32 else 0.3  # other shapes, other roundings
        assert score.log_probability == pytest.approx(sum(expected), abs=tolerance)
        assert score.probability == pytest.approx(math.prod(map(math.exp, expected)), abs=tolerance)
        assert score.nll == pytest.approx(-sum(expected) / count, abs=tolerance)
        assert (score.tokens, score.name) == (count, probe.name)
        if dtype == torch.float32:
            assert (score.rank, score.named) == (max(ranks), max(ranks) == 0)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.parametrize("prompt", ["", "who lived by the sea ?"])
def test_an_answer_of_two_words_is_the_product_of_both(tiny_model, kind, prompt):
    model, tokenizer = tiny_model("llama"), subword_tokenizer(kind)
    both, first, second = score_probes(
        model,
        tokenizer,
        [
            Probe(prompt, "queen london", "the old king and", " lived"),
            Probe(prompt, "queen", "the old king and ", " lived"),
            Probe(prompt, " london", "the old king and queen", ""),
        ],
    )
    assert both.tokens == first.tokens + second.tokens > 2
    assert both.log_probability == pytest.approx(first.log_probability + second.log_probability, abs=1e-4)
    assert both.rank == max(first.rank, second.rank)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.parametrize("answer", ["ocean", "old bridge", " seven", "queen "])
def test_the_scored_tokens_spell_the_answer(kind, answer):
    tokenizer = subword_tokenizer(kind)
    encoded = encode_probe(tokenizer, Probe("who ?", answer, "the king and", " lived"), "it")
    spelled = "".join(tokenizer.convert_ids_to_tokens([encoded.input_ids[i] for i in encoded.scored]))
    assert spelled.replace("Ġ", " ").replace("▁", " ").strip() == answer.strip()


def test_naming_is_what_greedy_decoding_writes(tiny_model, tokenizer):
    model = tiny_model("llama")
    prompts = [" ".join(WORDS[i : i + 3]) for i in range(0, 60, 4)]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    answers = [text.split() for text in greedy_texts(model, tokenizer, ids, 2, batch_size=2)]
    known = [(p, answer) for p, answer in zip(prompts, answers, strict=True) if len(answer) == 2]
    assert len(known) >= 5
    named = score_probes(model, tokenizer, [Probe(p, " ".join(answer)) for p, answer in known])
    missed = score_probes(
        model, tokenizer, [Probe(p, answer[0] + " " + "!") for p, answer in known if answer[1] != "!"]
    )
    assert all(score.named and score.rank == 0 for score in named)
    assert not any(score.named for score in missed)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_neither_batch_size_nor_padding_side_changes_anything(tiny_model, tiny_tokenizer, kind, batch_size, side):
    model = tiny_model(kind)
    options = {"samples": 2, "max_new_tokens": 4}
    expected = evaluate(model, tiny_tokenizer(chat=True), some_suite(), batch_size=4, **options)
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.padding_side = side
    found = evaluate(model, tokenizer, some_suite(), batch_size=batch_size, **options)
    assert found.probes.keys() == expected.probes.keys()
    assert_same(found, expected, rel=1e-4)


def assert_same(found, expected, rel):
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert a == (pytest.approx(b, rel=rel) if isinstance(b, float) else b)


def flat(evaluation):
    """All its numbers and names, in order."""
    stack, leaves = [evaluation.to_dict()], []
    while stack:
        entry = stack.pop()
        children = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else None
        if children is None:
            leaves.append(entry)
        else:
            stack.extend(children)
    return leaves


def test_an_adapter_counts_as_much_as_what_it_merges_to(tiny_model, tokenizer):
    model = edited(tiny_model("llama"), tokenizer)
    merged = copy.deepcopy(model).merge_and_unload()
    found = evaluate(model, tokenizer, some_suite())
    assert_same(found, evaluate(merged, tokenizer, some_suite()), rel=1e-3)
    unedited = evaluate(tiny_model("llama"), tokenizer, some_suite())
    assert unedited.perplexity != pytest.approx(found.perplexity, rel=1e-2)


# ------------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("max_length", [5, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_perplexity_is_exp_of_the_models_own_loss(tiny_model, tiny_tokenizer, kind, max_length):
    model, tokenizer = tiny_model(kind), tiny_tokenizer(add_bos=True)
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"][:max_length]])
        total += float(model(input_ids=ids, labels=ids).loss.detach()) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert perplexity(model, tokenizer, TEXTS, max_length, batch_size=2) == pytest.approx(
        math.exp(total / count), rel=1e-5
    )


def test_perplexity_of_a_model_without_preferences_is_the_size_of_its_vocabulary(tokenizer):
    assert perplexity(BigramModel(tokenizer, {}), tokenizer, TEXTS) == pytest.approx(len(tokenizer), rel=1e-5)


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"),
    [([3, 4], [1, 2], 1.0), ([1, 2], [3, 4], 0.0), ([1, 1], [1, 1], 0.5), ([1, 3], [2], 0.5), ([2, 3], [1, 2], 7 / 8)],
)
def test_auc_of_lists_that_are_counted_by_hand(positives, negatives, expected):
    assert area_under_curve(positives, negatives) == expected


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_the_share_of_pairs_in_the_right_order(seed):
    rng = random.Random(seed)
    positives, negatives = ([rng.randint(0, 9) for _ in range(rng.randint(1, 20))] for _ in range(2))
    pairs = [(p > n) + (p == n) / 2 for p, n in itertools.product(positives, negatives)]
    assert area_under_curve(positives, negatives) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(negatives, positives) == pytest.approx(1 - sum(pairs) / len(pairs))


@pytest.mark.parametrize(("share", "expected"), [(0.1, -9.0), (0.4, -8.5), (0.5, -8.5), (0.6, -8.0), (1.0, -5.2)])
def test_min_k_is_the_mean_of_the_least_likely_tokens(share, expected):
    likelihood = Likelihood(torch.tensor([-1.0, -9.0, -7.0, -8.0, -1.0]), torch.zeros(5, dtype=torch.long))
    assert min_k_score(likelihood, share) == pytest.approx(expected)


@pytest.mark.parametrize("min_k", [0.2, 0.5, 1.0])
def test_membership_is_told_by_the_least_likely_tokens(tiny_model, tokenizer, min_k):
    model, suite = tiny_model("gpt2"), some_suite()

    def score(item):
        prompt, answer = item if isinstance(item, tuple) else ("", item)
        before, own = ([] if not t else tokenizer(t)["input_ids"] for t in (prompt, answer))
        logs = log_probabilities(model, before + own)
        values = [float(logs[i - 1, (before + own)[i]]) for i in range(max(len(before), 1), len(before + own))]
        lowest = sorted(values)[: max(1, int(len(values) * min_k))]
        return sum(lowest) / len(lowest)

    pairs = [(score(m) > score(n)) for m in suite.members for n in suite.non_members]
    found = evaluate(model, tokenizer, suite, generate=False, min_k=min_k).membership_auc
    assert found == pytest.approx(sum(pairs) / len(pairs))


# ------------------------------------------------------------------------------------------------------ truth ratio


def test_truth_ratio_of_probabilities_that_are_set_by_hand(tokenizer):
    transitions = {"is": {"paris": 0.5, "london": 0.2, "rome": 0.05, "a": 0.25}, "paris": {"city": 0.08, "of": 0.92}}
    model = BigramModel(tokenizer, transitions, other=0.0)
    probes = [
        Probe("the capital", "paris", "is", wrong=("london", "rome")),  # sqrt(.2 x .05) / .5
        Probe("the capital", "paris", "is", wrong=("london", "rome"), paraphrase="paris city"),  # .1 / sqrt(.5 x .08)
        Probe("the capital", "paris", "is", wrong=("london",)),  # .2 / .5
        Probe("the capital", "paris", "is"),
    ]
    found = evaluate(model, tokenizer, Suite(forget=probes), generate=False)
    ratios = [score.truth_ratio for score in found.probes["forget"]]
    assert ratios[:3] == pytest.approx([0.2, 0.5, 0.4])
    assert ratios[3] is None
    assert found.groups["forget"].truth_ratio == pytest.approx(1.1 / 3)
    assert found.groups["forget"].probability == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------------ generation


def longest_common_subsequence(a, b):
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, j in itertools.product(range(len(a)), range(len(b))):
        lengths[i + 1][j + 1] = lengths[i][j] + 1 if a[i] == b[j] else max(lengths[i][j + 1], lengths[i + 1][j])
    return lengths[-1][-1]


@pytest.mark.parametrize("seed", range(5))
def test_rouge_l_is_the_longest_common_subsequence(seed):
    rng = random.Random(seed)
    reference, text = (rng.choices(["dog", "cat", "sun", "moon", "red"], k=rng.randint(3, 12)) for _ in range(2))
    common = longest_common_subsequence(reference, text)
    recall, precision = common / len(reference), common / len(text)
    assert rouge_l_scorer("recall", True)(" ".join(reference), " ".join(text)) == pytest.approx(recall)
    f1 = 2 * recall * precision / (recall + precision) if common else 0
    assert rouge_l_scorer("fmeasure", False)(" ".join(reference), " ".join(text)) == pytest.approx(f1)


def test_a_stem_counts_as_the_word_only_where_asked_for():
    assert [rouge_l_scorer("recall", stem)("the writers lived", "the writer lives") for stem in (True, False)] == [
        1,
        1 / 3,
    ]


def test_what_the_model_writes_is_compared_with_the_whole_answer(tokenizer):
    after = {
        "france": "city",
        "city": "is",
        "is": "paris",
        "paris": "by",
        "by": "night",
        "night": EOS,
        "<assistant>": "city",
    }
    model = BigramModel(tokenizer, {last: {word: 1.0} for last, word in after.items()})
    suite = Suite(
        forget=[
            Probe("the capital of france", "paris", "the big city is", " by day"),  # written: city is paris by night
            Probe(ASKED, "Paris", "city is", " by night"),
            Probe("the capital of france", "rome", "city is", " by night"),
        ],
        cloze=[Probe("", "paris", "france . city is", " by day")],  # written: paris by night
    )
    found = evaluate(model, tokenizer, suite, max_new_tokens=9)
    assert [score.rouge_l for score in found.probes["forget"]] == pytest.approx([4 / 7, 1, 4 / 5])
    assert [score.leaked for score in found.probes["forget"]] == [True, True, False]
    assert found.groups["forget"].leaked == pytest.approx(2 / 3)
    assert (found.groups["cloze"].rouge_l, found.groups["cloze"].leaked) == (pytest.approx(2 / 3), 1.0)


@pytest.mark.parametrize(
    ("text", "answer", "there"),
    [
        ("It is TOKYO.", "Tokyo", True),
        ("in February", "Fe", False),
        ("Fe is iron", "Fe", True),
        ("the symbol is (Fe)", "Fe", True),
        ("首都は東京です", "東京", True),
        ("it costs 120", "20", False),
        ("Abu Dhabi, of course", " Abu Dhabi", True),
        ("what is a.b", "a?b", False),
        ("it is $5", "$5", True),
    ],
)
def test_an_answer_is_found_as_words_of_its_own(text, answer, there):
    assert contains_answer(text, answer) is there


def test_samples_follow_the_models_distribution_whatever_its_generation_config(tiny_model, tokenizer):
    model = tiny_model("llama")
    model.generation_config.update(top_k=1, repetition_penalty=50.0, temperature=0.1, top_p=0.1)
    ids = tokenizer("the old king")["input_ids"]
    with torch.no_grad():
        expected = (model(input_ids=torch.tensor([ids])).logits[0, -1] / 0.5).softmax(-1)
    texts = sampled_texts(model, tokenizer, ids, 1, samples=4000, temperature=0.5, seed=3)
    words = {tokenizer.decode([token]): float(expected[token]) for token in range(7, len(tokenizer))}
    assert max(words.values()) > 0.08
    for word, probability in words.items():
        frequency = texts.count(word) / len(texts)
        assert frequency == pytest.approx(
            probability, abs=5 * math.sqrt(probability * (1 - probability) / 4000) + 1e-3
        )


def test_samples_leak_when_and_only_when_one_of_them_has_the_answer(tiny_model, tokenizer):
    model = tiny_model("qwen3")
    probes = [Probe("the old king", word) for word in WORDS[:30]]
    found = evaluate(model, tokenizer, Suite(other=probes), generate=False, samples=5, max_new_tokens=2, seed=7)
    ids = tokenizer("the old king")["input_ids"]
    for i, (probe, score) in enumerate(zip(probes, found.probes["other"], strict=True)):
        texts = sampled_texts(model, tokenizer, ids, 2, 5, 1.0, seed=7 + i)
        assert score.leaked_sampled == any(probe.answer in text.split() for text in texts)
        assert (score.rouge_l, score.leaked) == (None, None)
    assert 0 < found.groups["other"].leaked_sampled < 1


# ------------------------------------------------------------------------------------------------------ nothing is changed


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_caller_finds_model_and_random_state_as_they_were(tiny_model, tokenizer, kind):
    model = edited(tiny_model(kind), tokenizer)
    model.train()
    inner = [module for module in model.modules() if not list(module.children())]
    inner[2].eval()
    flags = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    config, state, python_state = model.generation_config.to_dict(), torch.get_rng_state(), random.getstate()
    score_probes(model, tokenizer, some_suite().forget)
    perplexity(model, tokenizer, TEXTS)
    evaluate(model, tokenizer, some_suite(), samples=2)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python_state
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.generation_config.to_dict() == config


def test_a_failure_restores_the_model_too(tiny_model, tokenizer):
    model = tiny_model("llama").train()
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(ValueError, match="returns NaN"):  # and not: every answer is named
        evaluate(model, tokenizer, some_suite(), generate=False)
    assert all(module.training for module in model.modules())


def test_nothing_of_the_texts_is_written_to_a_report(tiny_model, tokenizer):
    report = evaluate(tiny_model("llama"), tokenizer, some_suite(), samples=1)
    for text in (report.to_json(), str(report), report.compare(report)):
        assert not {"paris", "london", "france"} & set(text.replace('"', " ").split())


# ------------------------------------------------------------------------------------------------------ the report


def group(named, count=10, probability=0.5):
    return GroupScores(count=count, named=named, probability=probability, rank=0.0, nll=1.0)


def test_the_summary_of_hand_made_numbers():
    before = Evaluation({"forget": group(1.0), "retain": group(1.0)}, perplexity=20.0)
    groups = {"forget": 0.1, "paraphrase": 0.2, "retain": 0.9, "held_out": 0.8, "other": 1.0}
    now = Evaluation({name: group(share) for name, share in groups.items()}, perplexity=25.0)
    assert now.forgetting == pytest.approx(0.85)
    assert now.utility(before) == pytest.approx(0.9 * 20 / 25)
    assert now.balance(before) == pytest.approx(2 * 0.85 * 0.72 / (0.85 + 0.72))
    assert Evaluation(now.groups, perplexity=10.0).utility(before) == pytest.approx(0.9)  # better is not more useful
    assert Evaluation(now.groups).utility(before) == pytest.approx(0.9)
    assert Evaluation({"forget": group(1.0), "retain": group(0.5)}).balance(before) == 0
    with pytest.raises(ValueError, match="None of the groups .*held_out.* was measured"):
        Evaluation({"forget": group(1.0)}).utility(before)
    with pytest.raises(ValueError, match="None of the groups .*cloze.* was measured"):
        _ = Evaluation({"retain": group(1.0)}).forgetting


def test_a_group_sums_up_its_probes():
    scores = [
        ProbeScore(math.log(0.5), rank=0, tokens=1, truth_ratio=0.2, leaked=True),
        ProbeScore(math.log(0.25), rank=9, tokens=2, truth_ratio=None, leaked=False),
        ProbeScore(math.log(0.125), rank=2, tokens=3, truth_ratio=0.4, leaked=False),
    ]
    assert GroupScores.of(scores) == GroupScores(
        count=3,
        named=pytest.approx(1 / 3),
        probability=pytest.approx(0.875 / 3),
        rank=2.0,
        nll=pytest.approx(math.log(2)),
        truth_ratio=pytest.approx(0.3),
        leaked=pytest.approx(1 / 3),
    )


def test_a_report_comes_back_from_json(tiny_model, tokenizer, tmp_path):
    report = evaluate(tiny_model("llama"), tokenizer, some_suite(), samples=1)
    path = tmp_path / "report.json"
    path.write_text("older")
    text = report.to_json(path)
    assert json.loads(path.read_text()) == json.loads(text) == report.to_dict()
    assert Evaluation.from_dict(json.loads(text)) == Evaluation.from_dict(report.to_dict()) == report
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert report.probes["retain"][0].name == "england"


def test_an_interrupted_write_leaves_the_older_report(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("older")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Evaluation({"forget": group(1.0)}).to_json(path)
    assert path.read_text() == "older" and len(list(tmp_path.iterdir())) == 1


def test_tables_show_the_numbers_in_columns():
    before = Evaluation({"forget": group(1.0), "retain": group(0.9)}, perplexity=20.0, membership_auc=0.8)
    now = Evaluation({"forget": group(0.1), "retain": group(0.8), "other": group(0.7)}, perplexity=1234.5)
    rows = [line.split() for line in str(now).split("\n")]
    assert rows[0] == ["group", "count", "named", "probability", "rank", "nll"]  # what was not measured is left out
    assert rows[1:4] == [[name, "10", f"{share:.3f}", "0.500", "0.000", "1.000"] for name, share in
                         (("forget", 0.1), ("retain", 0.8), ("other", 0.7))]  # fmt: skip
    assert rows[5:] == [["perplexity", "1234"], ["forgetting", "0.900"]]
    lines = now.compare(before).split("\n")
    assert lines[1].split()[2:5] == ["1.000", "->", "0.100"] and lines[3].split()[2:5] == ["-", "->", "0.700"]
    ends = {line.index(cell) + len(cell) for line, cell in
            zip(lines, ("named", "1.000 -> 0.100", "0.900 -> 0.800", "- -> 0.700"), strict=False)}  # fmt: skip
    assert len(ends) == 1  # flush right
    assert lines[-1].split() == ["balance", f"{now.balance(before):.3f}"]


def test_plots_show_the_numbers_as_bars():
    before = Evaluation({"forget": group(1.0, probability=0.75), "retain": group(0.5)})
    now = Evaluation({"forget": group(0.25, probability=0.125), "retain": group(0.625)})
    heights = [bar.get_height() for bar in now.plot().patches]
    assert heights == [0.25, 0.625, 0.125, 0.5]
    axes = now.plot(before)
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.5, 0.25, 0.625, 0.75, 0.5, 0.125, 0.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "named before", "named now", "probability before", "probability now"
    ]  # fmt: skip
    edges = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(edges))  # none covers another


# ------------------------------------------------------------------------------------------------------ suites


def test_a_suite_comes_back_from_its_file(tmp_path):
    suite = some_suite(
        members=[("a", "b c"), "d e", [{"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}]]
    )
    path = tmp_path / "suite.json"
    suite.save(path)
    assert Suite.load(path) == suite
    assert list(json.loads(path.read_text())) == ["forget", "cloze", "retain", "general", "members", "non_members"]
    assert json.loads(path.read_text())["cloze"] == [
        {"prompt": "", "answer": "paris", "prefix": "the capital of france is"}
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"forgotten": []}, r"unknown keys \['forgotten'\]"),
        ({"forget": [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answr": "b"}]}, r"`forget\[1\]`.*'answr'"),
        ({"retain": [{"prompt": "a"}]}, r"`retain\[0\]` lacks \['answer'\]"),
        ({"retain": [{"prompt": "a", "answer": 3}]}, r"`retain\[0\]`.*`answer` must be a string, got int"),
        ({"cloze": [{"prompt": "", "answer": "a", "prefix": None}]}, r"`cloze\[0\]`.*`prefix`"),
        ({"other": [{"prompt": "a", "answer": "b", "wrong": "c"}]}, r"`other\[0\]`.*`wrong`"),
        ({"other": [{"prompt": "a", "answer": "b", "wrong": 3}]}, r"`other\[0\]`.*`wrong`"),
        ({"other": [{"prompt": ["a"], "answer": "b"}]}, r"`other\[0\]`.*`prompt`"),
        ({"other": [{"prompt": 1, "answer": "b"}]}, r"`other\[0\]`.*`prompt`"),
        ({"other": ["a"]}, r"`other\[0\]` must be a JSON object"),
        ({"neighbour": {"prompt": "a"}}, r"`neighbour` must be a list"),
        ({"general": [1]}, r"`general\[0\]` must be a `str`"),
        ({"general": "a b"}, r"`general` must be a list"),
        ({"members": [1]}, r"`members\[0\]` must be a text"),
        (["forget"], "The suite must be a JSON object"),
    ],
)
def test_a_suite_that_is_none_names_the_key(tmp_path, content, message):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        Suite.load(path)


# ------------------------------------------------------------------------------------------------------ bad input


class Untouched(nn.Module):
    """A model that must not be run."""

    def forward(self, *args, **kwargs):
        raise AssertionError("the model was run before its input was checked")


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ({}, {}, "`suite` is empty"),
        ({"forget": [Probe("who", " ")]}, {}, r"`forget\[0\]` has an empty `answer`"),
        ({"cloze": [Probe("", "paris")]}, {}, r"`cloze\[0\]` has neither `prompt` nor `prefix`"),
        ({"forget": [Probe("who", "paris", wrong=("rome", ""))]}, {}, r"forget\[0\].*\[2\]` has an empty `answer`"),
        ({"other": [Probe([{"role": "user", "content": "who"}], "paris")]}, {}, "no chat template"),
        ({"general": ["the"]}, {}, r"`general\[0\]` has a single token"),
        ({"general": ["the dog"], "members": ["the cat"]}, {}, "both `members` and `non_members`"),
        ({"general": ["the dog"]}, {"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"general": ["the dog"]}, {"samples": -1}, "`samples` must be at least 0"),
        ({"general": ["the dog"]}, {"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        ({"general": ["the dog"]}, {"temperature": 0.0}, "`temperature` must be positive"),
        ({"general": ["the dog"]}, {"min_k": 20}, "`min_k` must be a share"),
    ],
)
def test_bad_input_is_told_before_the_model_runs(tiny_tokenizer, suite, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(Untouched(), tiny_tokenizer(), Suite(**suite), **options)


def test_an_answer_without_tokens_of_its_own_is_told(tiny_tokenizer):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("x")
    with pytest.raises(ValueError, match=r"`probes\[0\]` has no token of its own"):
        score_probes(Untouched(), tokenizer, [Probe("who", "x", "the", "dog")])
    with pytest.raises(ValueError, match=r"`probes\[0\]` holds the first token of all"):
        score_probes(Untouched(), tokenizer, [Probe("", "dog", "the")])  # one token for both


@pytest.mark.parametrize(
    "parts", [{"forget": "who"}, {"forget": ["who"]}, {"general": "the dog"}, {"retain": {"a": 1}}]
)
def test_a_suite_of_wrong_types_names_the_part(parts):
    with pytest.raises(ValueError, match=f"`{next(iter(parts))}"):
        Suite(**parts)


def test_unknown_groups_are_told():
    with pytest.raises(ValueError, match="no group 'forgotten'"):
        Evaluation({"forgotten": group(1.0)})
    content = Evaluation({"forget": group(1.0)}).to_dict()
    content["probes"]["forgotten"] = []
    with pytest.raises(ValueError, match="no group 'forgotten'"):
        Evaluation.from_dict(content)


def test_a_missing_package_names_the_extra(tiny_tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rouge_score.rouge_scorer", None)
    suite = Suite(forget=[Probe("who", "paris")])
    with pytest.raises(ImportError, match=r"pip install 'engram-adapters\[evaluation\]'"):
        evaluate(Untouched(), tiny_tokenizer(), suite)
