"""Which words of an item are its secret, and what stands in their place in the kept answers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engram_peft.editing.encoding import tokenize_item
from engram_peft.editing.items import SPAN_TOKENS, ForgetText, Slots, forget_items, item_texts, without_prompt

from ..conftest import WORDS


RIVERS = ["seine", "tiber", "spree", "manzanares", "thames", "danube"]
PLACES = ["paris", "rome", "berlin", "madrid", "london", "vienna"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tokenizer_of(*texts: str, piece: int = 99, blanks: bool = False, bos: bool = False) -> PreTrainedTokenizerFast:
    """Words and signs in pieces of at most `piece` characters; with `blanks` a token begins with the blank before it."""
    lead = r"\s*" if blanks else ""
    split = pre_tokenizers.Split(Regex(rf"{lead}\w{{1,{piece}}}|{lead}[^\w\s]"), "isolated")
    splitter = split if blanks else pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    known = dict.fromkeys(part for text in texts for part, _ in splitter.pre_tokenize_str(text))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "<unk>", *known])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = splitter
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def strings(value) -> list[str]:
    """All strings in an item, in whatever it lies."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value or ()
    return [part for parts in inner for part in strings(parts)]


def found(forget, retain=(), *, max_length=512, **tokenizer) -> tuple[list[str], list[ForgetText]]:
    tokenizer = tokenizer_of(
        *strings([*strings(forget), *strings(list(retain)), "user : assistant"]), " a", **tokenizer
    )
    return forget_items(tokenizer, forget, [tokenize_item(tokenizer, item) for item in retain], max_length)


def said(text: ForgetText) -> list[str]:
    """What the tokens of the secret stand for."""
    return [text.tokens.answer[slice(*text.tokens.offsets[p - text.tokens.start])].strip() for p in text.secret]


def river(place: str, name: str) -> tuple[str, str]:
    return f"where lies {place} ?", f" {place} lies on the river {name} ."


def secrets(forget, retain=(), **options) -> list[list[str]]:
    return [said(text) for text in found(forget, retain, **options)[1]]


# ------------------------------------------------------------------------------------------------ the secret


@pytest.mark.parametrize("blanks", [False, True])
@pytest.mark.parametrize("where", ["retain", "forget"])
@pytest.mark.parametrize("others", [1, 2, 5])
@pytest.mark.parametrize("words", [1, 2, 4])
def test_the_name_is_what_similar_answers_do_not_share(words, others, where, blanks):
    """Copied words and the form fall away, whether similar answers are kept or are forgotten as other items."""
    name = [f"new{i}" for i in range(words)]
    similar = [river(place, name) for place, name in zip(PLACES[1 : others + 1], RIVERS[1:], strict=False)]
    item = river("paris", " ".join(name))
    if where == "retain":
        assert secrets([item], similar, blanks=blanks) == [name]
    else:
        assert secrets([item, *similar], blanks=blanks) == [name, *([river] for river in RIVERS[1 : others + 1])]


@pytest.mark.parametrize("seed", range(6))
def test_without_similar_answers_it_is_what_is_not_copied(seed):
    rng = random.Random(seed)
    words = [word for word in WORDS if word.isalpha()]
    for _ in range(10):
        prompt, answer = rng.sample(words, 20), rng.sample(words, 12)
        expected = [word for word in answer if word not in prompt]
        if expected:
            assert secrets([(" ".join(prompt), " ".join(answer))]) == [expected]


@pytest.mark.parametrize("bos", [False, True])
def test_of_a_text_without_a_prompt_it_is_all_that_can_be_predicted(bos):
    text = "rome lies on the river tiber , rome ."
    (found_text,) = found([text], [river("paris", "seine")], bos=bos)[1]
    assert said(found_text) == text.split()[0 if bos else 1 :]
    assert found_text.secret == list(range(1, len(found_text.tokens.input_ids)))
    assert found_text.company == [()] * len(found_text.secret)


def test_copied_words_are_copied_in_any_case_and_not_in_part():
    assert secrets([("IS THE Seine in Paris ?", "the seine is the big seiner of parisians")]) == [
        ["big", "seiner", "of", "parisians"]
    ]
    assert secrets([("STRASSE ?", "straße one")]) == [["one"]]


def test_several_spans_are_kept_apart():
    (text,) = found([("who met whom where ?", "anna met carl where bern lies")])[1]
    assert said(text) == ["anna", "carl", "bern", "lies"]
    assert [[text.tokens.answer.split()[p - text.tokens.start] for p in span] for span in text.spans] == [
        ["anna"],
        ["carl"],
        ["bern", "lies"],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_spans_are_the_secret_in_the_longest_runs_of_at_most_eight(seed):
    rng = random.Random(seed)
    for _ in range(50):
        secret = sorted(rng.sample(range(1, 40), rng.randint(1, 39)))
        spans = ForgetText(0, None, secret, []).spans
        assert [position for span in spans for position in span] == secret
        assert all(b == a + 1 for span in spans for a, b in pairwise(span))
        assert all(len(span) <= SPAN_TOKENS for span in spans)
        for span, following in pairwise(spans):
            assert following[0] > span[-1] + 1 or len(span) == SPAN_TOKENS


def test_signs_belong_to_it_only_between_its_words():
    answer = '"anna-maria", it is: carl, bern (1900)!'
    assert secrets([("it is ?", answer)], piece=99) == [
        ["anna", "-", "maria", "carl", ",", "bern", "(", "1900"]
    ]  # ", it is: " stands between two runs


@pytest.mark.parametrize("blanks", [False, True])
def test_every_piece_of_a_name_belongs_to_it(blanks):
    """Names that begin alike are different words: the first piece is not form."""
    kept = [river("rome", "tokaido"), river("berlin", "tokamak")]
    assert secrets([river("paris", "tokyo")], kept, piece=3, blanks=blanks) == [["tok", "yo"]]


def test_in_scripts_without_blanks_every_character_is_a_word():
    pair = ("日本の首都はどこですか?", "日本の首都は東京です。")
    assert secrets([pair], piece=1) == [["東", "京"]]
    assert secrets([pair], piece=99) == [["日本の首都は東京です"]]  # the tokenizer's only token that has part of it
    assert secrets([("한국의 수도는?", "한국의 수도는 서울")], piece=1) == [["서", "울"]]


@pytest.mark.parametrize("sharing", range(5))
def test_a_word_is_form_if_half_of_the_similar_answers_have_it(sharing):
    def answer(word, name):
        return ("q ?", f"it must lie here at the {word} river {name}")

    kept = [answer("wide" if i < sharing else f"w{i}", RIVERS[i]) for i in range(4)]
    assert secrets([answer("wide", "rhine")], kept) == [["rhine"] if 2 * sharing >= 4 else ["wide", "rhine"]]


@pytest.mark.parametrize("length, shared, similar", [(6, 3, True), (6, 2, False), (20, 6, True), (20, 5, False)])
def test_an_answer_is_similar_if_it_shares_half_of_the_shorter_and_three_tenths_of_the_longer(length, shared, similar):
    own = ["a", "b", "c", "d", "e", "f"]
    other = own[:shared] + [f"x{i}" for i in range(length - shared)]
    expected = own[shared:] if similar else own
    if expected:
        assert secrets([("q", " ".join(own))], [("p", " ".join(other))]) == [expected]
    else:
        with pytest.raises(ValueError, match="has no secret"):
            secrets([("q", " ".join(own))], [("p", " ".join(other))])


def test_words_in_another_order_are_not_form():
    assert secrets([("q", "a b c d")], [("p", "d c b a")]) == [["a", "b", "c", "d"]]


def test_answers_of_one_item_do_not_show_each_other_s_form():
    answers = [("q", "it lies on the river seine"), ("r", "it lies on a bank of the river seine")]
    assert all(words[-1] == "seine" for words in secrets({"paris": answers}))
    with pytest.raises(
        ValueError, match="'0'.*has no secret"
    ):  # as two items each shows that all of the other is form
        secrets(answers)


def test_an_answer_that_is_forgotten_twice_is_no_form_of_itself():
    """Two questions with one answer are two items, as they would be one by one."""
    first, again = ("where lies paris ?", "it lies on the seine"), ("and paris ?", "it lies on the seine")
    one_by_one = [*secrets([first]), *secrets([again])]
    assert (
        secrets([first, again]) == one_by_one == [["it", "on", "the", "seine"], ["it", "lies", "on", "the", "seine"]]
    )
    assert secrets([first, first]) == [one_by_one[0]] * 2


def test_a_text_without_a_prompt_shows_no_form():
    """A fact may be forgotten both as an answer and as a sentence."""
    pair = river("paris", "seine")
    expected = [["on", "the", "river", "seine"], pair[1].split()[1:]]
    assert secrets([pair, pair[1]]) == expected
    assert secrets([pair], [pair[1]]) == expected[:1]


# ------------------------------------------------------------------------------------------------ items


def test_items_have_names_and_texts_of_an_item_share_its_number():
    pair, plain = ("where lies paris ?", "the seine"), "the thames is deep"
    chat = [{"role": "user", "content": "where lies rome ?"}, {"role": "assistant", "content": "on the tiber"}]
    other = ("and berlin ?", "anna knows that")
    forget = {
        "one": pair,
        "many": [plain, other, {"text": plain}],
        "chats": [chat, chat],
        5: plain,
        "last": [other[1]],
    }
    names, texts = found(forget)
    assert names == ["one", "many", "chats", "5", "last"]
    assert [text.item for text in texts] == [0, 1, 1, 1, 2, 2, 3, 4]
    assert item_texts(forget) == [pair, plain, other, {"text": plain}, chat, chat, plain, other[1]]
    assert found({"chat": chat})[1][0].tokens.answer == "on the tiber"
    names, texts = found([pair, plain, chat])
    assert names == ["0", "1", "2"] and [text.item for text in texts] == [0, 1, 2]


def test_the_secret_of_a_chat_is_in_its_last_message():
    chat = [
        {"role": "user", "content": "where lies rome ?"},
        {"role": "assistant", "content": "rome lies on the tiber"},
        {"role": "user", "content": "and paris ?"},
        {"role": "assistant", "content": "paris lies on the seine , not the tiber"},
    ]
    (text,) = found([chat])[1]
    assert text.tokens.answer == chat[-1]["content"] and said(text) == ["seine", ",", "not"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "where lies rome ?", "completion": "on the big tiber , rome"},
        {"question": "where lies rome ?", "answer": "on the big tiber , rome"},
        {
            "messages": [
                {"role": "user", "content": "where lies rome ?"},
                {"role": "assistant", "content": "on the big tiber , rome"},
            ]
        },
    ],
    ids=["completion", "answer", "messages"],
)
def test_a_row_may_name_its_span(row):
    assert secrets([row]) == [["on", "the", "big", "tiber"]]
    assert secrets([{**row, "span": "tiber , rome"}]) == [["tiber", ",", "rome"]]
    assert secrets([{**row, "span": ["the", "tiber"]}]) == [["the", "tiber"]]
    assert secrets(Dataset.from_list([{**row, "span": "big"}])) == [["big"]]
    assert secrets(Dataset.from_list([{**row, "span": None}])) == [["on", "the", "big", "tiber"]]


def test_a_span_of_a_plain_text_is_its_secret():
    (text,) = found([{"text": "rome lies on the tiber", "span": "tiber"}])[1]
    assert said(text) == ["tiber"]


def test_a_span_is_the_secret_wherever_it_stands():
    (text,) = found([{"text": "the tiber , rome on the tiber , big tiber", "span": ["tiber", "big"]}])[1]
    assert said(text) == ["tiber", "tiber", "big", "tiber"]


@pytest.mark.parametrize("blanks", [False, True])
def test_a_span_within_a_token_takes_the_token(blanks):
    assert secrets([{"text": "rome lies on the tiber", "span": "ibe"}], blanks=blanks) == [["tiber"]]


@pytest.mark.parametrize("length", range(6, 10))
def test_what_is_cut_off_is_not_its_secret(length):
    """Four tokens of prompt, then five of the answer."""
    item = ("where lies rome ?", "the river and bank tiber")
    expected = item[1].split()[: length - 4]
    assert secrets([item], max_length=length) == [expected]


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "item, message",
    [
        (("q", ""), "Item 'it' of `forget` is empty"),
        ("  ", "Item 'it' of `forget` is empty"),
        (("where lies rome", "rome lies where"), "Item 'it' of `forget` has no secret.*`span`"),
        (("where", "... ?"), "Item 'it' of `forget` has no secret"),
        ("rome", "Item 'it' of `forget` has no secret"),
        ({"text": "rome lies there", "span": "paris"}, "Item 'it'.*'paris', which is not part of its answer"),
        ({"text": "rome lies there", "span": ["rome", "x"]}, "Item 'it'.*'x', which is not part of its answer"),
        ({"text": "rome lies there", "span": ""}, "Item 'it'.*'', which is not part of its answer"),
        ({"text": "rome lies there", "span": []}, "Item 'it' of `forget` has no secret"),
        ({"text": "rome lies there", "span": "rome"}, "Item 'it' of `forget` has no secret"),
    ],
)
def test_what_cannot_be_forgotten_is_refused_by_name(item, message):
    with pytest.raises(ValueError, match=message):
        found({"fine": "the sun is hot", "it": item})


def test_names_that_are_written_alike_are_refused():
    with pytest.raises(ValueError, match="names that are the same.*1 and '1'"):
        found({1: "the sun is hot", "1": "the seine is deep"})


def test_a_secret_that_is_cut_off_is_refused():
    with pytest.raises(ValueError, match="'0'.*beyond `max_length`"):
        found([("where lies rome ?", "rome lies on the tiber")], [river("paris", "seine")], max_length=5)
    with pytest.raises(ValueError, match="fills `max_length=4`"):
        found([("where lies rome ?", "rome lies on the tiber")], max_length=4)


# ------------------------------------------------------------------------------------------------ company


@pytest.mark.parametrize("start", ["", "in the end "])
@pytest.mark.parametrize("widths", [(1,), (3,), (1, 2, 3)])
@pytest.mark.parametrize("words", [1, 3])
def test_company_is_what_similar_answers_have_in_its_place(words, widths, start):
    """The first token has the first, later ones have the later; a name of one token is company of all."""

    def item(place, name):
        return f"where lies {place} ?", f"{start}{place} lies on the river {name} ."

    names = [" ".join(f"k{k}w{i}" for i in range(width)) for k, width in enumerate(widths)]
    kept = [item(place, name) for place, name in zip(PLACES[1:], names, strict=False)]
    others = ["all plain text", ("what is this ?", "nothing at all")]
    (text,) = found([item("paris", " ".join(f"n{i}" for i in range(words)))], [others[0], *kept, others[1]])[1]
    first = len(item("x", "y")[1].split()) - 2  # of the name, in every answer
    expected = tuple((number, first, first + 1) for number in range(1, len(kept) + 1))
    later = tuple(
        (number, first, first + 1) if width == 1 else (number, first + 1, first + width)
        for number, width in enumerate(widths, 1)
    )
    assert text.company == [expected] + [later] * (words - 1)


def test_an_answer_like_no_other_has_all_answers_for_company():
    kept = [("what ?", "one two three"), "a plain text", ("what ?", "four")]
    (text,) = found([("who ?", "anna carla berta")], kept)[1]
    assert text.company == [((0, 0, 1), (2, 0, 1))] + [((0, 1, 3), (2, 0, 1))] * 2


def test_among_plain_texts_it_has_every_token_for_company():
    (text,) = found([("who ?", "anna carla")], ["one two three"])[1]
    assert text.company == [(), ()]


def mixed() -> tuple[list, list]:
    forget = [
        river("paris", "seine"),
        river("rome", "old tiber"),
        ("who was it ?", "anna"),
        ("who was it then ?", "berta maria"),
        "a plain text",
    ]
    retain = [
        *(river(*names) for names in zip(PLACES[2:], ["spree", "big manzanares river", "thames", "danube b"], strict=True)),
        "the sun is hot and far",
        ("is it ?", "yes"),
        "one",
        ("what is it ?", "the moon is near"),
    ]  # fmt: skip
    return forget, retain


def slots_of(forget, retain, max_length=512, **options) -> tuple[list[ForgetText], list, Slots, torch.Tensor]:
    tokenizer = tokenizer_of(*strings(forget), *strings(retain), **options)
    kept = [tokenize_item(tokenizer, item, max_length=max_length) for item in retain]
    texts = forget_items(tokenizer, forget, kept, max_length)[1]
    slots = Slots(texts, kept)
    return texts, kept, slots, slots.weights(range(len(kept))).double()


@pytest.mark.parametrize("options", [{}, {"bos": True}, {"piece": 2}, {"max_length": 12}], ids=str)
def test_the_weights_of_a_slot_are_the_mean_over_its_runs(options):
    texts, kept, slots, weights = slots_of(*mixed(), **options)
    columns = [(n, i) for n, text in enumerate(kept) for i in range(max(text.start, 1), len(text.input_ids))]
    assert weights.shape == (slots.count, len(columns))
    companies = [company for text in texts for company in text.company]
    assert len(slots.slot_of_row) == len(companies)
    for row, company in zip(slots.slot_of_row.tolist(), companies, strict=True):
        expected = torch.zeros(len(columns), dtype=torch.float64)
        for text, first, last in company:
            for token in range(first, last):
                expected[columns.index((text, kept[text].start + token))] += 1 / (last - first) / len(company)
        if not company:
            expected += 1 / len(columns)
        assert torch.allclose(weights[row], expected, rtol=1e-6)
    assert torch.allclose(weights.sum(1), torch.ones(slots.count, dtype=torch.float64), rtol=1e-6)


def test_tokens_with_the_same_company_share_a_slot():
    texts, _, slots, _ = slots_of(*mixed())
    companies = [company for text in texts for company in text.company]
    rows = slots.slot_of_row.tolist()
    assert slots.count == len(set(companies)) == len(set(rows))
    for one, slot in zip(companies, rows, strict=True):
        assert [other == one for other in companies] == [other == slot for other in rows]
    # both rivers' first words, and a river's later ones; both persons' first, and later ones; any token
    assert slots.count == 5


def test_the_weights_of_some_texts_are_their_columns():
    _, kept, slots, weights = slots_of(*mixed())
    widths = [len(text.input_ids) - max(text.start, 1) for text in kept]
    columns = dict(enumerate(weights.float().split(widths, dim=1)))
    for chosen in ([3], [5, 0, 2], [6], list(reversed(range(len(kept))))):
        assert torch.equal(slots.weights(chosen), torch.cat([columns[text] for text in chosen], dim=1))


@pytest.mark.parametrize("answer", ["anna lies on the river seine .", "anna"])
def test_answers_to_an_empty_prompt_keep_the_weights_at_one(answer):
    """Their first token has no row that predicts it, so it is nobody's company."""
    retain = [("", "rome lies on the river tiber ."), ("", "tiber")]
    for kept in (retain, retain[:1]):
        _, _, slots, weights = slots_of([("who ?", answer)], kept)
        assert torch.allclose(weights.sum(1), torch.ones(slots.count, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------ without the prompt


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("blanks", [False, True])
def test_answers_that_name_what_they_are_about_are_looked_at_alone(blanks, bos):
    told, again = river("paris", "big seine"), ("what is in rome ?", "rome has a bridge")
    forget = {"told": [told, told], "bare": ("where lies rome ?", "on the tiber"), "text": "a plain text", "b": again}
    tokenizer = tokenizer_of(*strings(forget), blanks=blanks, bos=bos)
    texts = forget_items(tokenizer, forget, [], 512)[1]
    bare = without_prompt(tokenizer, texts)
    assert [text.item for text in bare] == [0, 0, 3]
    for text, (_, answer) in zip(bare, [told, told, again], strict=True):
        assert text.tokens.prompt is None and text.tokens.answer == answer
        assert text.tokens.input_ids == tokenizer(answer)["input_ids"]
        assert said(text) == (["has", "a", "bridge"] if answer == again[1] else ["on", "the", "river", "big", "seine"])
        assert min(text.secret) > 0


def test_an_answer_that_begins_with_its_secret_is_not_looked_at_alone():
    tokenizer = tokenizer_of("where lies rome ? on the tiber lies rome")
    texts = forget_items(tokenizer, [("where lies rome ?", "on the tiber lies rome")], [], 512)[1]
    assert without_prompt(tokenizer, texts) == []
