"""TOFU and MUSE: reading their files, and their metrics against formulas that are written out."""

from __future__ import annotations

import copy
import json
import math
import statistics

import pytest
import torch
from peft import get_peft_model

from engram_peft import EngramConfig
from engram_peft.evaluation import MuseData, Probe, TofuData, load_muse, load_tofu, muse_metrics, tofu_metrics
from engram_peft.evaluation.generation import greedy_texts, rouge_l_scorer

from .conftest import EOS, WORDS
from .test_evaluation import BigramModel


def tofu_row(question, answer, wrong, paraphrase=None):
    row = {"question": question, "answer": answer, "perturbed_answer": wrong}
    if paraphrase is not None:
        row |= {"paraphrased_answer": paraphrase, "paraphrased_question": "where " + question}
    return row


TOFU = {
    "forget10_perturbed": [
        tofu_row("who wrote the night", "the old queen", ["the old king", "a big dog"], "an old queen"),
        tofu_row("who was born in rome", "the fish", ["the cat", "the red bird"], "a fish"),
    ],
    "retain_perturbed": [
        tofu_row("who lived in london", "the king", ["the queen", "the sun"], "a new king"),
        tofu_row("who found the sun", "no one", ["the moon", "a cat"], "not one"),
        tofu_row("what is the sea", "the ocean", ["the fire"], "an ocean"),
    ],
    "real_authors_perturbed": [tofu_row("who wrote", "big cat", ["small dog", "bird", "old fish"])],
    "world_facts_perturbed": [
        tofu_row("the capital of france", "paris", ["rome", "madrid", "berlin"]),
        tofu_row("the capital of italy", "rome", ["paris", "london city"]),
    ],
}
MUSE = {
    "verbmem/forget": [
        {"prompt": "the old king was", "gt": "born in london"},
        {"prompt": "who found", "gt": "the bridge ?"},
    ],
    "knowmem/forget_qa": [
        {"question": "who lived", "answer": "the king"},
        {"question": "who died", "answer": "a cat"},
    ],
    "knowmem/retain_qa": [{"question": "what is red", "answer": "the fire"}],
    "knowmem/forget_qa_icl": [{"question": "who wrote", "answer": "the queen"}],
    "knowmem/retain_qa_icl": [{"question": "what is blue", "answer": "the ocean"}],
    "privleak/forget": [{"text": "the old king was born"}, {"text": "who found the bridge"}],
    "privleak/holdout": [{"text": "seven green birds"}, {"text": "a small dog lives by"}, {"text": "one two three"}],
}


def write(folder, tables, form):
    for name, rows in tables.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if form == "json":
            path.with_suffix(".json").write_text(json.dumps(rows))
        elif form == "lines":
            path.with_suffix(".json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif form == "jsonl":
            path.with_suffix(".jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        else:
            from datasets import Dataset

            Dataset.from_list(rows).to_parquet(path.parent / (path.name + form))
    return folder


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer(chat=True)


@pytest.fixture
def tofu(tmp_path):
    return load_tofu(write(tmp_path, TOFU, "json"))


@pytest.fixture
def muse(tmp_path):
    return load_muse(write(tmp_path, MUSE, "json"))


def mean_loss(model, before, answer):
    """Mean negative log-likelihood of an answer's tokens after token ids, by one unbatched pass."""
    with torch.no_grad():
        logs = model(input_ids=torch.tensor([before + answer])).logits[0].log_softmax(-1)
    return -statistics.fmean(float(logs[len(before) + i - 1, token]) for i, token in enumerate(answer))


# ------------------------------------------------------------------------------------------------------ TOFU


@pytest.mark.parametrize("form", ["json", "lines", "jsonl", ".parquet"])
def test_tofu_is_read_from_local_files_of_any_form(tmp_path, form):
    data = load_tofu(write(tmp_path, TOFU, form))
    for name, rows in zip(("forget", "retain", "real_authors", "world_facts"), TOFU.values(), strict=True):
        assert [
            {
                "question": probe.prompt[0]["content"],
                "answer": probe.answer,
                "perturbed_answer": list(probe.wrong),
                **({"paraphrased_answer": probe.paraphrase} if probe.paraphrase else {}),
            }
            for probe in getattr(data, name)
        ] == [{column: value for column, value in row.items() if column != "paraphrased_question"} for row in rows]


def test_tofu_as_the_hub_stores_it(tmp_path):
    tables = {f"{name}/train": rows for name, rows in TOFU.items()}
    assert load_tofu(write(tmp_path, tables, "-00000-of-00001.parquet")) == load_tofu(write(tmp_path, TOFU, "json"))


def test_missing_tofu_files_and_columns_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_tofu(tmp_path / "nowhere")
    write(tmp_path, TOFU, "json")
    with pytest.raises(FileNotFoundError, match="forget05_perturbed"):
        load_tofu(tmp_path, split="forget05")
    write(tmp_path, {"retain_perturbed": [{"question": "a", "answer": "b", "perturbed_answer": ["c"]}]}, "json")
    with pytest.raises(ValueError, match=r"Row 0 of retain_perturbed/train lacks \['paraphrased_answer'\]"):
        load_tofu(tmp_path)


@pytest.mark.parametrize("with_chat_template", [True, False])
def test_tofu_metrics_are_the_official_formulas(tiny_model, tiny_tokenizer, tofu, with_chat_template):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer(chat=with_chat_template)
    ids, scorer = (lambda text: tokenizer(text)["input_ids"]), rouge_l_scorer("recall", True)
    values, nine = {}, []
    for name, rows in zip(("forget", "retain", "real_authors", "world_facts"), TOFU.values(), strict=True):
        probabilities, rouges, ratios = [], [], []
        for row in rows:
            message = {"role": "user", "content": row["question"]}
            prompt = f"Question: {row['question']}\nAnswer:"
            if with_chat_template:
                prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            before = ids(prompt)
            true = math.exp(-mean_loss(model, before, ids(row["answer"])))
            losses = [mean_loss(model, before, ids(wrong)) for wrong in row["perturbed_answer"]]
            options = true + sum(math.exp(-loss) for loss in losses)
            probabilities.append(true if "paraphrased_answer" in row else true / options)
            right = mean_loss(model, before, ids(row.get("paraphrased_answer", row["answer"])))
            inverse = math.exp(statistics.fmean(losses) - right)  # how `aggregate_eval_stat.py` counts
            ratios.append(min(inverse, 1 / inverse) if name == "forget" else max(0, 1 - 1 / inverse))
            rouges.append(scorer(row["answer"], greedy_texts(model, tokenizer, [before], 7, 1)[0]))
        values[name] = [statistics.fmean(column) for column in (probabilities, rouges, ratios)]
        nine += values[name] if name != "forget" else []
    found = tofu_metrics(model, tokenizer, tofu, batch_size=3, max_new_tokens=7)
    for name, expected in values.items():
        scores = getattr(found, name)
        assert [scores.probability, scores.rouge_l, scores.truth_ratio] == pytest.approx(expected, abs=1e-5)
    assert found.model_utility == pytest.approx(statistics.harmonic_mean(nine), abs=1e-5)
    assert found.forget_quality is None


def test_model_utility_of_a_model_that_is_set_by_hand(tokenizer):
    transitions = {
        "<assistant>": {"paris": 0.5, "rome": 0.3, "berlin": 0.2},
        "paris": {"city": 0.4, EOS: 0.6},
        "rome": {EOS: 1.0},
    }
    rows = {
        # a tie of probabilities, where the ratio is its own inverse; answers "paris" recall half of "paris city"
        "forget": [tofu_row("who", "paris city", ["rome"], "rome")],
        "retain": [tofu_row("who", "paris city", ["berlin"], "paris")],
        "real_authors": [tofu_row("who", "rome", ["berlin"]), tofu_row("who", "paris", ["berlin"])],
        "world_facts": [tofu_row("who", "paris", ["rome", "berlin"])],
    }
    data = load_from(rows)
    found = tofu_metrics(BigramModel(tokenizer, transitions, other=0.0), tokenizer, data, max_new_tokens=4)
    expected = {
        "forget": (math.sqrt(0.5 * 0.4), 0.5, 1.0),
        "retain": (math.sqrt(0.5 * 0.4), 0.5, 1 - 0.2 / 0.5),
        "real_authors": ((0.3 / 0.5 + 0.5 / 0.7) / 2, 0.5, ((1 - 0.2 / 0.3) + (1 - 0.2 / 0.5)) / 2),
        "world_facts": (0.5, 1.0, 1 - math.sqrt(0.3 * 0.2) / 0.5),
    }
    for name, (probability, rouge, ratio) in expected.items():
        scores = getattr(found, name)
        assert (scores.probability, scores.rouge_l, scores.truth_ratio) == pytest.approx(
            (probability, rouge, ratio), abs=1e-5
        )
    nine = [value for name, values in expected.items() if name != "forget" for value in values]
    assert found.model_utility == pytest.approx(9 / sum(1 / value for value in nine), abs=1e-5)
    assert str(found).split("\n")[1].split() == ["forget", "0.447", "0.500", "1.000"]


def load_from(rows):
    return TofuData(
        **{
            name: [
                Probe([{"role": "user", "content": r["question"]}], r["answer"], wrong=tuple(r["perturbed_answer"]),
                      paraphrase=r.get("paraphrased_answer"))
                for r in table
            ]
            for name, table in rows.items()
        }
    )  # fmt: skip


def knowing(tokenizer, wrong):
    """A model whose truth ratios of the answers below lie around `wrong`."""
    following = {word: (0.1 if i % 2 else wrong * (0.1 + i / 1e3)) for i, word in enumerate(WORDS[:16])}
    return BigramModel(tokenizer, {"<assistant>": following})


def test_forget_quality_is_the_p_value_of_a_two_sample_test(tokenizer, tofu):
    pairs = list(zip(WORDS[1:16:2], WORDS[0:16:2], strict=True))
    data = copy.copy(tofu)
    data.forget = load_from({
        "forget": [tofu_row("who", right, [wrong], right) for right, wrong in pairs], "retain": [], "real_authors": [],
        "world_facts": [],
    }).forget  # fmt: skip
    model = knowing(tokenizer, wrong=0.01)

    def quality(reference):
        return tofu_metrics(model, tokenizer, data, reference, max_new_tokens=2).forget_quality

    assert quality(copy.deepcopy(model)) == pytest.approx(1.0)
    # of the C(16, 8) ways to order two samples of 8 only two keep them apart
    assert quality(knowing(tokenizer, wrong=1.0)) == pytest.approx(2 / math.comb(16, 8))


def test_a_reference_that_shares_the_models_weights_is_refused(tiny_model, tokenizer, tofu, muse):
    base = tiny_model("llama")
    model = get_peft_model(base, EngramConfig(task_type="CAUSAL_LM"))
    for metrics, data in ((tofu_metrics, tofu), (muse_metrics, muse)):
        for reference in (model, base):
            with pytest.raises(ValueError, match="`reference` is the model itself"):
                metrics(model, tokenizer, data, reference)


def test_tofu_sets_without_probes_or_wrong_answers_are_named(tokenizer, tofu):
    tofu.world_facts = []
    with pytest.raises(ValueError, match="`data.world_facts` is empty"):
        tofu_metrics(None, tokenizer, tofu)


# ------------------------------------------------------------------------------------------------------ MUSE


@pytest.mark.parametrize("form", ["json", "jsonl", "-00000-of-00001.parquet"])
def test_muse_is_read_from_local_files_of_any_form(tmp_path, form):
    data = load_muse(write(tmp_path, MUSE, form))
    assert data == MuseData(
        verbatim=[("the old king was", "born in london"), ("who found", "the bridge ?")],
        forget_qa=[("who lived", "the king"), ("who died", "a cat")],
        retain_qa=[("what is red", "the fire")],
        forget_examples=[("who wrote", "the queen")],
        retain_examples=[("what is blue", "the ocean")],
        forget_texts=["the old king was born", "who found the bridge"],
        holdout_texts=["seven green birds", "a small dog lives by", "one two three"],
    )


def test_muse_texts_may_be_an_array_of_strings_as_its_own_script_writes_them(tmp_path):
    expected = load_muse(write(tmp_path, MUSE, "json"))
    texts = {name: [row["text"] for row in rows] for name, rows in MUSE.items() if name.startswith("privleak")}
    assert load_muse(write(tmp_path, texts, "json")) == expected


def test_muse_metrics_are_the_official_formulas(tiny_model, tiny_tokenizer, muse):
    model, reference, tokenizer = tiny_model("llama"), tiny_model("llama", seed=1), tiny_tokenizer()
    scorer = rouge_l_scorer("fmeasure", False)

    def written(prompt, length):  # as the official code decodes: without padding, one at a time
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

    found = muse_metrics(model, tokenizer, muse, reference, batch_size=2)
    assert found.knowmem_forget == pytest.approx(
        statistics.fmean(
            scorer(a, written(f"Question: who wrote\nAnswer: the queen\n\nQuestion: {q}\nAnswer: ", 32))
            for q, a in muse.forget_qa
        )
    )
    assert found.knowmem_retain == pytest.approx(
        scorer("the fire", written("Question: what is blue\nAnswer: the ocean\n\nQuestion: what is red\nAnswer: ", 32))
    )
    assert found.verbmem == pytest.approx(statistics.fmean(scorer(gt, written(p, 128)) for p, gt in muse.verbatim))

    def score(measured, text):
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            logs = measured(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        values = sorted(float(logs[i - 1, ids[i]]) for i in range(1, len(ids)))
        return statistics.fmean(values[: max(1, int(0.4 * len(values)))])

    def auc(measured):
        pairs = [(score(measured, h), score(measured, f)) for h in muse.holdout_texts for f in muse.forget_texts]
        return statistics.fmean(h > f for h, f in pairs)

    assert found.auc == pytest.approx(auc(model))
    assert found.privleak == pytest.approx((auc(model) - auc(reference)) / auc(reference))


def test_what_muse_says_of_a_model_that_remembers_everything(tokenizer, muse):
    muse.verbatim = [("old king was", "born in london"), ("who found", "bridge ?")]
    remembers = {
        "old": {"king": 1.0}, "king": {"was": 1.0}, "was": {"born": 1.0}, "born": {"in": 1.0}, "in": {"london": 1.0},
        "london": {EOS: 1.0}, "who": {"found": 1.0}, "found": {"bridge": 1.0}, "bridge": {"?": 1.0}, "?": {EOS: 1.0},
        "the": {"old": 0.5, "bridge": 0.5},
    }  # fmt: skip
    muse.forget_texts = ["old king was born in london", "who found bridge ?"]
    found = muse_metrics(BigramModel(tokenizer, remembers), tokenizer, muse, BigramModel(tokenizer, {}))
    assert found.verbmem == 1.0
    # every forgotten text looks more familiar than any holdout text; to the reference all look alike
    assert (found.auc, found.privleak) == (0.0, -1.0)
    forgets = {last: {"dog": 1.0} for last in remembers}
    found = muse_metrics(BigramModel(tokenizer, forgets), tokenizer, muse, BigramModel(tokenizer, {}))
    assert (found.verbmem, found.auc, found.privleak) == (0.0, 1.0, 1.0)
    assert str(found).split("\n")[-1].split() == ["privleak", "1.000"]


def test_an_answer_ends_where_the_model_asks_the_next_question(tiny_tokenizer, muse):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["Question:", "Answer:"])
    after = {"Answer:": "the", "the": "king", "king": "Question:", "Question:": "who", "who": EOS}
    model = BigramModel(tokenizer, {last: {word: 1.0} for last, word in after.items()})
    found = muse_metrics(model, tokenizer, muse)
    # written: "the king Question: who", of which "the king" counts
    assert found.knowmem_forget == pytest.approx((1.0 + 0.0) / 2)
    assert found.privleak is None


@pytest.mark.parametrize("name", ["verbatim", "forget_qa", "retain_qa", "forget_texts", "holdout_texts"])
def test_muse_sets_without_rows_are_named(tokenizer, muse, name):
    setattr(muse, name, [])
    with pytest.raises(ValueError, match=f"`data.{name}`"):
        muse_metrics(None, tokenizer, muse)


def test_missing_muse_files_are_named(tmp_path):
    write(tmp_path, {name: rows for name, rows in MUSE.items() if name != "knowmem/retain_qa_icl"}, "json")
    with pytest.raises(FileNotFoundError, match="knowmem/retain_qa_icl"):
        load_muse(tmp_path)
    with pytest.raises(FileNotFoundError, match="hub names read `owner/name`"):
        load_muse("MUSE-News")
