"""Texts that a model writes: against greedy decoding by hand, a nucleus by hand, and scripted generation."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from peft import get_peft_model
from torch import nn

from engram_peft import EngramConfig, collect_statistics
from engram_peft.editing.sampling import sample_texts


@pytest.fixture
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer()


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


def likeliest(model, tokenizer, words, length):
    """The words that follow, always the likeliest, up to a special token."""
    ids = tokenizer.convert_tokens_to_ids(words.split())
    written = []
    with torch.no_grad():
        while len(written) < length:
            token = int(model(torch.tensor([ids + written])).logits[0, -1].argmax())
            if token in tokenizer.all_special_ids:
                break
            written.append(token)
    return tokenizer.decode(written)


class Scripted:
    """Stands in for `generate`: writes given words, one line a prompt, and keeps what it was asked."""

    def __init__(self, tokenizer, lines):
        self.tokenizer, self.lines, self.prompts, self.configs = tokenizer, iter(lines), [], []

    def __call__(self, input_ids, attention_mask, generation_config):
        rows = []
        for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            kept = [token for token, seen in zip(ids, mask, strict=True) if seen]
            assert mask == sorted(mask)  # padded on the left
            self.prompts.append(" ".join(self.tokenizer.convert_ids_to_tokens(kept)))
            rows.append(self.tokenizer.convert_tokens_to_ids(next(self.lines).split()))
        self.configs.append(generation_config)
        length = max(len(row) for row in rows)
        padded = [row + [generation_config.pad_token_id] * (length - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(padded, dtype=torch.long)], dim=1)


@pytest.fixture
def scripted(model, monkeypatch):
    """`scripted(tokenizer, lines)`: the model then writes these lines."""

    def make(tokenizer, lines):
        script = Scripted(tokenizer, lines)
        monkeypatch.setattr(model, "generate", script)
        return script

    return make


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("sharp", [{"temperature": 1e-4}, {"top_p": 1e-6}], ids=str)
def test_sharpest_samples_are_the_likeliest_words(model, tokenizer, sharp):
    """Prompts of unequal length in one batch, so padding must not show."""
    prompts = ["the capital of france is", "rome", "a big red bird and a"]
    found = sample_texts(model, tokenizer, 3, prompts=prompts, max_new_tokens=6, **sharp)
    expected = [(prompt, likeliest(model, tokenizer, prompt, 6)) for prompt in prompts]
    assert all(answer for _, answer in expected)
    assert found == expected


def test_samples_lie_in_the_nucleus_and_fill_it(model, tokenizer):
    """The likeliest words that together have the probability `top_p`; each of them shows up."""
    prompt = "the capital of france is"
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.convert_tokens_to_ids(prompt.split())])).logits[0, -1]
    probabilities, order = (logits / 3).softmax(-1).sort(descending=True)
    nucleus = order[(probabilities.cumsum(0) - probabilities) < 0.4].tolist()
    words = {tokenizer.decode([token]) for token in nucleus if token not in tokenizer.all_special_ids} - {""}
    assert 5 < len(words) < 60
    found = sample_texts(
        model, tokenizer, 20 * len(words), prompts=[prompt], max_new_tokens=1, temperature=3, top_p=0.4, batch_size=64
    )
    assert {answer for _, answer in found} == words


def test_same_seed_gives_the_same_distinct_texts(model, tokenizer):
    found = sample_texts(model, tokenizer, 6, max_new_tokens=8, seed=3)
    assert found == sample_texts(model, tokenizer, 6, max_new_tokens=8, seed=3)
    assert len(set(found)) == 6
    assert not set(found) & set(sample_texts(model, tokenizer, 6, max_new_tokens=8, seed=4))
    special = set(tokenizer.all_special_tokens)
    assert all(2 <= len(text.split()) <= 8 and not special & set(text.split()) for text in found)


def test_plain_texts_start_from_the_first_token(tokenizer, scripted, model):
    script = scripted(tokenizer, ["one two", "a red bird"])
    assert sample_texts(model, tokenizer, 2) == ["one two", "a red bird"]
    assert script.prompts == ["<s>", "<s>"]


def test_texts_start_from_the_last_token_where_there_is_no_first(tokenizer, scripted, model):
    tokenizer.bos_token = None
    script = scripted(tokenizer, ["one two"])
    assert sample_texts(model, tokenizer, 1) == ["one two"]
    assert script.prompts == ["</s>"]


def test_texts_end_at_the_first_special_token(tokenizer, scripted, model):
    scripted(tokenizer, ["one two </s> three four", "five six <user> seven", "eight nine ten"])
    assert sample_texts(model, tokenizer, 3) == ["one two", "five six", "eight nine ten"]


def test_empty_short_and_repeated_texts_are_replaced(tokenizer, scripted, model):
    """A text of one token has no row that predicts another."""
    script = scripted(tokenizer, ["one two", "</s>", "one two", "one", "five six", "seven eight"])
    assert sample_texts(model, tokenizer, 3, batch_size=2) == ["one two", "five six", "seven eight"]
    assert len(script.prompts) == 6


def test_pairs_keep_the_prompt_as_it_is_and_prompts_are_repeated(tokenizer, scripted, model):
    script = scripted(tokenizer, ["paris", "rome", "</s>", "madrid", "paris", "berlin"])
    found = sample_texts(model, tokenizer, 4, prompts=["france", "italy"], batch_size=2)
    assert found == [("france", "paris"), ("italy", "rome"), ("italy", "madrid"), ("italy", "berlin")]
    assert script.prompts == ["france", "italy"] * 3


def test_begin_token_is_added_to_prompts_once(tiny_tokenizer, scripted, model):
    tokenizer = tiny_tokenizer(add_bos=True)
    script = scripted(tokenizer, ["paris", "rome"])
    sample_texts(model, tokenizer, 2, prompts=["france", "<s> italy"])
    assert script.prompts == ["<s> france", "<s> italy"]


# ------------------------------------------------------------------------------------------------ chats


def test_chat_models_write_question_and_answer(tiny_tokenizer, scripted, model):
    """First what follows the template up to the user's message, then what follows the whole question."""
    tokenizer = tiny_tokenizer(chat=True, add_bos=True)
    script = scripted(tokenizer, ["where is rome ? <end> no", "<end>", "in italy <end>", "who ?", "the king", "a"])
    found = sample_texts(model, tokenizer, 2, batch_size=2)
    assert found == [
        [{"role": "user", "content": "where is rome ?"}, {"role": "assistant", "content": "in italy"}],
        [{"role": "user", "content": "who ?"}, {"role": "assistant", "content": "the king"}],
    ]
    assert script.prompts == [
        "<s> <user>",
        "<s> <user>",
        "<s> <user> where is rome ? <end> <assistant>",
        "<s> <user>",
        "<s> <user> who ? <end> <assistant>",
    ]


def test_question_ends_where_the_template_goes_on_in_plain_words(tiny_tokenizer, scripted, model):
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ bos_token }} one {% for m in messages %}{{ m['content'] }} two three {% endfor %}"
    script = scripted(tokenizer, ["where is rome ? two three no", "in italy"])
    found = sample_texts(model, tokenizer, 1)
    assert found == [[{"role": "user", "content": "where is rome ?"}, {"role": "assistant", "content": "in italy"}]]
    assert script.prompts == ["<s> one", "<s> one where is rome ? two three"]


def test_chat_prompts_are_answered_through_the_template(tiny_tokenizer, scripted, model):
    tokenizer = tiny_tokenizer(chat=True)
    script = scripted(tokenizer, ["in italy", "yes"])
    question = [{"role": "user", "content": "where is rome ?"}]
    found = sample_texts(model, tokenizer, 2, prompts=[question, "as it is"])
    assert found == [[*question, {"role": "assistant", "content": "in italy"}], ("as it is", "yes")]
    assert script.prompts[0] == "<s> <user> where is rome ? <end> <assistant>"
    assert question == [{"role": "user", "content": "where is rome ?"}]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("token_position", ["answer", "predict"])
def test_samples_are_data_for_statistics(model, tiny_tokenizer, chat, token_position):
    tokenizer = tiny_tokenizer(chat=chat)
    items = sample_texts(model, tokenizer, 4, max_new_tokens=6)
    statistics = collect_statistics(model, items, tokenizer=tokenizer, token_position=token_position)
    texts = [item[-1]["content"] if chat else item for item in items]
    words = sum(len(text.split()) for text in texts)
    expected = words if chat or token_position == "answer" else words - len(items)
    assert set(statistics.counts.values()) == {expected}


# ------------------------------------------------------------------------------------------------ nothing else changes


def state_of(model, tokenizer):
    return (
        torch.get_rng_state().tolist(),
        {name: module.training for name, module in model.named_modules()},
        model.generation_config.to_dict(),
        id(model.generation_config),
        copy.deepcopy(model.config.to_dict()),
        (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.pad_token, tokenizer.chat_template),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("chat", [False, True])
def test_model_tokenizer_and_random_state_are_as_they_were(model, tiny_tokenizer, chat):
    tokenizer = tiny_tokenizer(chat=chat)
    model.train()
    model.model.layers[0].eval()
    model.generation_config.repetition_penalty = 1.7
    before = state_of(model, tokenizer)
    sample_texts(model, tokenizer, 3, max_new_tokens=4)
    assert state_of(model, tokenizer) == before


def test_state_is_restored_if_the_model_fails(model, tokenizer, monkeypatch):
    def fail(**inputs):
        assert not model.training
        torch.rand(5)
        raise RuntimeError("out of memory")

    model.train()
    monkeypatch.setattr(model, "generate", fail)
    before = state_of(model, tokenizer)
    with pytest.raises(RuntimeError, match="out of memory"):
        sample_texts(model, tokenizer, 3)
    assert state_of(model, tokenizer) == before


@pytest.mark.parametrize(
    "own",
    [{"repetition_penalty": 0.01}, {"no_repeat_ngram_size": 1}, {"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.01}],
    ids=str,
)
def test_samples_do_not_depend_on_the_models_own_generation_config(model, tokenizer, own):
    expected = sample_texts(model, tokenizer, 3, max_new_tokens=20)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert sample_texts(model, tokenizer, 3, max_new_tokens=20) == expected
    # it would show: without a configuration of ours, the model's own decides
    start = torch.full((8, 1), tokenizer.bos_token_id)
    written = []
    for config in (own, {}):
        torch.manual_seed(0)
        options = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        written.append(model.generate(start, do_sample=True, max_new_tokens=20, **{**options, **config}))
    assert written[0].shape != written[1].shape or not torch.equal(*written)


def test_samples_do_not_depend_on_the_mode(tiny_model, tokenizer):
    """GPT-2's dropout would show."""
    model = tiny_model("gpt2")
    expected = sample_texts(model, tokenizer, 3, max_new_tokens=6)
    assert sample_texts(model.train(), tokenizer, 3, max_new_tokens=6) == expected


def test_adapters_take_part_as_long_as_they_are_active(tiny_model, tokenizer):
    plain = sample_texts(tiny_model("llama"), tokenizer, 3, max_new_tokens=6)
    model = get_peft_model(tiny_model("llama"), EngramConfig(init_weights=False))
    assert sample_texts(model, tokenizer, 3, max_new_tokens=6) != plain
    with model.disable_adapter():
        assert sample_texts(model, tokenizer, 3, max_new_tokens=6) == plain


# ------------------------------------------------------------------------------------------------ refusals


def test_fewer_texts_than_asked_for_are_returned_with_a_warning(tokenizer, scripted, model, caplog):
    scripted(tokenizer, ["one two"] * 12)
    with caplog.at_level(logging.WARNING):
        assert sample_texts(model, tokenizer, 3) == ["one two"]
    assert "1 different texts in 12 attempts, not 3" in caplog.text


@pytest.mark.parametrize("chat", [False, True])
def test_model_that_writes_nothing_is_refused(tiny_tokenizer, scripted, model, chat):
    tokenizer = tiny_tokenizer(chat=chat)
    scripted(tokenizer, ["</s>"] * 100)
    with pytest.raises(ValueError, match="wrote nothing in 8 attempts.*prompts"):
        sample_texts(model, tokenizer, 2)


def test_tokenizer_without_a_first_token_is_refused(model, tokenizer):
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a first nor a last token.*prompts"):
        sample_texts(model, tokenizer, 2)


def test_template_that_hides_the_message_is_refused(model, tiny_tokenizer):
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="does not show the user's message"):
        sample_texts(model, tokenizer, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"count": 0},
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"temperature": 0},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"prompts": []},
        {"prompts": "the capital"},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_by_name(model, tokenizer, options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        sample_texts(model, tokenizer, **{"count": 2, **options})


def test_module_that_cannot_generate_is_refused(tokenizer):
    with pytest.raises(TypeError, match="Linear cannot generate"):
        sample_texts(nn.Linear(2, 2), tokenizer, 2)
