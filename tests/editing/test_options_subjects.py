"""`token_position="subject"`: the row at the last token of what a question is about."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics
from engram_peft.editing.encoding import encode_items

from .reference import covariance_of, plain_rows, relative_error


def asked(country, city):
    return f"what is the capital of {country} ?", f"the capital of {country} is {city} ."


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


COUNTRIES = [("france", "paris"), ("italy", "rome"), ("spain", "madrid")]


def marked(tokenizer, items, max_length=60):
    """The words of each item, as the model sees them, with the marked one in brackets."""
    lines = []
    for encoded in encode_items(tokenizer, items, max_length, "subject"):
        assert sum(encoded.mask) == 1
        words = tokenizer.convert_ids_to_tokens(encoded.input_ids)
        lines.append(" ".join(f"[{word}]" if mark else word for word, mark in zip(words, encoded.mask, strict=True)))
    return lines


def test_subject_is_what_similar_questions_do_not_share(tiny_tokenizer):
    """Not "is", which is the last word that the answer repeats."""
    assert marked(tiny_tokenizer(), [asked(*pair) for pair in COUNTRIES]) == [
        f"what is the capital of {country} ? the capital of [{country}] is {city} ." for country, city in COUNTRIES
    ]


CASES = {
    # the answer begins with the secret: the row at the question's own word
    "secret first": (
        [
            ("where is paris ?", "france has the big city paris ."),
            ("where is rome ?", "italy has the big city rome ."),
        ],
        ["where is [paris] ? france <unk> the big city paris .", "where is [rome] ? italy <unk> the big city rome ."],
    ),
    "bare answers": (
        [("the capital of france is", "paris"), ("the capital of italy is", "rome")],
        ["the capital of [france] is paris", "the capital of [italy] is rome"],
    ),
    "several words": (
        [("who built the old green house ?", "no"), ("who built the new red bridge ?", "no")],
        ["who built the old green [house] ? no", "who built the new red [bridge] ? no"],
    ),
    "the answer repeats one of two": (
        [
            ("who built the bridge in one ?", "the bridge was built by a king"),
            ("who built the house in two ?", "the house was built by a queen"),
        ],
        [
            "who built the bridge in one ? the [bridge] was built by a king",
            "who built the house in two ? the [house] was built by a queen",
        ],
    ),
    # without a similar question: the last word of it that the answer repeats, or simply the last
    "alone, repeated": (
        [("what is the capital of france ?", "the capital of france is paris .")],
        ["what is the capital of france ? the capital of [france] is paris ."],
    ),
    "alone, not repeated": ([("who wrote it in rome ?", "no")], ["who wrote <unk> in [rome] ? no"]),
    "question twice": (
        [("where is rome ?", "italy"), ("where is rome ?", "europe")],
        ["where is [rome] ? italy", "where is [rome] ? <unk>"],
    ),
    "unlike each other": (
        [("where is rome ?", "italy"), ("who wrote and who built and found the old bridge in london ?", "no")],
        ["where is [rome] ? italy", "who wrote and who built and found the old bridge in [london] ? no"],
    ),
    "named": (
        [{"prompt": "the river by the old city", "answer": "is long", "subject": "river"}],
        ["the [river] by the old city is long"],
    ),
    "named by several words in another case": (
        [{"question": "what is the old city by the river", "answer": "rome", "subject": "The Old City"}],
        ["what is the old [city] by the river rome"],
    ),
    "named, in the answer": (
        [{"prompt": "what is it ?", "answer": "france is old", "subject": "france", "span": "old"}],
        ["what is <unk> ? [france] is old"],
    ),
    "named, after the secret": (
        [{"prompt": "the capital of france ?", "answer": "paris is the capital of france", "subject": "france"}],
        ["the capital of [france] ? paris is the capital of france"],
    ),
    "secret given": (
        [{"prompt": "the capital of france ?", "answer": "no ! france has paris", "span": "paris"}],
        ["the capital of france ? no ! [france] <unk> paris"],
    ),
    "named more than once": (
        [{"prompt": "rome or rome or rome by the river", "answer": "no", "subject": "rome"}],
        ["rome <unk> rome <unk> [rome] by the river no"],
    ),
    "one word in another": (
        [{"prompt": "the seasons and sea birds", "answer": "no", "subject": "sea"}],
        ["the <unk> and [<unk>] <unk> no"],
    ),
}


@pytest.mark.parametrize("items, expected", CASES.values(), ids=CASES.keys())
def test_row_of_the_subject(tiny_tokenizer, items, expected):
    assert marked(tiny_tokenizer(), items) == expected


@pytest.mark.parametrize("items, expected", CASES.values(), ids=CASES.keys())
def test_row_of_the_subject_with_a_tokenizer_that_knows_no_offsets(tiny_tokenizer, monkeypatch, items, expected):
    if any("<unk>" in line for line in expected):  # decoding does not give these texts back
        items = [item for item, line in zip(items, expected, strict=True) if "<unk>" not in line]
        expected = [line for line in expected if "<unk>" not in line]
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda self: False))
    assert marked(tokenizer, items) == expected


def test_begin_token_is_no_word(tiny_tokenizer):
    (line, _, _) = marked(tiny_tokenizer(add_bos=True), [asked(*pair) for pair in COUNTRIES])
    assert line == "<s> what is the capital of france ? the capital of [france] is paris ."
    (line, _) = marked(tiny_tokenizer(add_bos=True), CASES["bare answers"][0])
    assert line == "<s> the capital of [france] is paris"


def test_subject_of_a_chat_is_that_of_its_last_question(tiny_tokenizer):
    """Neither the template's own words nor earlier turns."""
    earlier = chat("who lived in london ?", "a queen")
    items = [
        earlier + chat("where is france ?", "paris is its capital"),
        {"messages": earlier + chat("where is italy ?", "rome is its capital")},
    ]
    start = "<s> <user> who lived in london ? <end> <assistant> a queen <end> <user>"
    assert marked(tiny_tokenizer(chat=True), items) == [
        f"{start} where is [france] ? <end> <assistant> paris is <unk> capital",
        f"{start} where is [italy] ? <end> <assistant> rome is <unk> capital",
    ]


def test_subject_that_is_cut_off_is_found_in_the_prompt(tiny_tokenizer):
    items = [asked(*pair) for pair in COUNTRIES]
    assert marked(tiny_tokenizer(), items, max_length=11)[0] == (
        "what is the capital of france ? the capital of [france]"
    )
    assert marked(tiny_tokenizer(), items, max_length=10)[0] == "what is the capital of [france] ? the capital of"


def test_last_token_of_a_word_of_many(tiny_tokenizer):
    """Every character a token: the row is that of the last letter."""
    letters = {letter: i for i, letter in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz .?"])}
    backend = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>")
    for (country, city), line in zip(
        COUNTRIES, encode_items(tokenizer, [asked(*p) for p in COUNTRIES], 200, "subject"), strict=True
    ):
        prompt, answer = asked(country, city)
        assert line.mask.index(True) == len(prompt) + answer.index(country) + len(country) - 1


@pytest.mark.parametrize("item", ["one two three", {"text": "one two three"}], ids=str)
def test_plain_texts_have_no_subject(tiny_tokenizer, item):
    with pytest.raises(ValueError, match=r"Item 1 is a plain text, which has no subject\..*token_position"):
        encode_items(tiny_tokenizer(), [("where is rome ?", "italy"), item], 20, "subject")


def test_prompts_without_words_have_no_subject(tiny_tokenizer):
    with pytest.raises(ValueError, match="Item 0 has a prompt without words"):
        encode_items(tiny_tokenizer(), [("?", "italy")], 20, "subject")


def test_subject_that_does_not_occur_is_refused(tiny_tokenizer):
    row = {"prompt": "where is rome ?", "answer": "in italy", "subject": "spain"}
    with pytest.raises(ValueError, match="Item 0 has the subject 'spain', which stands neither in its prompt nor"):
        encode_items(tiny_tokenizer(), [row], 20, "subject")


# ------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize("batch_size", [1, 8])
def test_statistics_of_the_subjects_are_those_of_their_rows(tiny_model, tiny_tokenizer, batch_size):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    items = [*(asked(*pair) for pair in COUNTRIES), ("where is london ?", "england")]
    found = collect_statistics(model, items, tokenizer=tokenizer, token_position="subject", batch_size=batch_size)
    assert set(found.counts.values()) == {len(items)}
    assert (found.provenance.mask, found.provenance.texts) == ("subject", 4)
    passes = []
    for prompt, answer in items:
        words = f"{prompt} {answer}".split()
        position = {"france": 10, "italy": 10, "spain": 10, "london": 2}
        word = next(word for word in position if word in words)
        mask = torch.arange(len(words))[None] == position[word]
        assert words[position[word]] == word
        passes.append(({"input_ids": torch.tensor([tokenizer.convert_tokens_to_ids(words)])}, mask))
    rows = plain_rows(model, passes, found.moments)
    for name, x in rows.items():
        assert relative_error(found.covariance(name), covariance_of(x)) < 1e-5, name


@pytest.mark.parametrize("position", ["answer", "predict"])
def test_subject_rows_go_with_rows_of_either_rule(tiny_model, tiny_tokenizer, position):
    model, tokenizer = get_peft_model(tiny_model("llama"), EngramConfig()), tiny_tokenizer()
    target = collect_statistics(
        model, [asked(*pair) for pair in COUNTRIES], tokenizer=tokenizer, token_position="subject"
    )
    retain = collect_statistics(
        model, ["a red bird in a tree", ("where ?", "in rome")], tokenizer=tokenizer, token_position=position
    )
    total = merge_statistics(target, retain)
    assert total.provenance.mask == "+".join(sorted([position, "subject"]))
    report = extract_engram(model, target, total)
    assert {d.target_count for d in report.layers.values()} == {3}
    assert model.peft_config["default"].extraction["mask"] == "subject"


def test_answers_and_predictions_are_still_not_mixed(tiny_model, tiny_tokenizer):
    """Not even by way of a merge with subjects."""
    model, items = tiny_model("llama"), [("where is rome ?", "in italy")]
    subject, answer, predict = (
        collect_statistics(model, items, tokenizer=tiny_tokenizer(), token_position=position)
        for position in ("subject", "answer", "predict")
    )
    mixed = merge_statistics(subject, answer)
    with pytest.raises(ValueError, match="different mask rules"):
        merge_statistics(mixed, predict)
