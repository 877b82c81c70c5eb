"""Where in a text its subject stands: what a question is about, as opposed to what is asked of it.

Models recall a fact at the last token of its subject (ROME, arXiv 2202.05262, section 2), in "What is the capital of Japan?" at
"Japan". An item may name its subject. Otherwise it is the last word of the question that similar questions do not have, if
possible one that the answer repeats. A question that is like no other shows only which words the answer repeats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .encoding import Item, TokenizedItem, prompt_offsets, question_of
from .items import WORD, alignments_with, answer_ids, form_characters, given_spans, secret_characters


Span = tuple[int, int]


def subject_positions(
    tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], texts: Sequence[TokenizedItem]
) -> list[int]:
    """The position of the last token of every item's subject: in the answer if it stands there before the secret (see `items`),
    otherwise in the prompt.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        items (`Sequence`): Pairs or chats; a dictionary may name its `subject`.
        texts (`list[TokenizedItem]`): The same, tokenized.

    Returns:
        `list[int]`: An index into `input_ids` of each text.

    Raises:
        `ValueError`: An item is a plain text, its question has no word, or the `subject` that it names does not occur.
    """
    questions = [
        _question(tokenizer, item, text, f"Item {i}") for i, (item, text) in enumerate(zip(items, texts, strict=True))
    ]
    asked = {i: question.tokens.input_ids for i, question in enumerate(questions)}
    answered = {i: answer_ids(text) for i, text in enumerate(texts)}
    positions = []
    for i, (item, question, text) in enumerate(zip(items, questions, texts, strict=True)):
        row = item if isinstance(item, Mapping) else {}
        subject = row.get("subject")
        if subject is None:
            alignments = alignments_with(question.tokens, {n: ids for n, ids in asked.items() if n != i})
            subject = _subject(question, form_characters(question.tokens, list(alignments.values())), text.answer)
        if row.get("span") is not None:
            secret = given_spans(text, row["span"], str(i))
        else:
            alignments = alignments_with(text, {n: ids for n, ids in answered.items() if n != i})
            secret = secret_characters(text, list(alignments.values()))
        until = min((start for start, _ in secret), default=len(text.answer))
        position = _position(subject, question, text, until)
        if position is None:
            raise ValueError(
                f"Item {i} has the subject {subject!r}, which stands neither in its prompt nor before the secret in its answer. "
                "Correct it, or leave it out to have it found."
            )
        positions.append(position)
    return positions


@dataclass(frozen=True)
class _Question:
    """What an item asks. Characters are counted in the whole prompt, which for a chat is more than the question.

    `offsets` are those of all of the prompt's tokens, `words` the question's words; `tokens` is the question in the place of an
    answer, so that questions can be compared as answers are.
    """

    prompt: str
    offsets: list[Span]
    words: list[Span]
    tokens: TokenizedItem


def _question(tokenizer: PreTrainedTokenizerBase, item: Item, text: TokenizedItem, where: str) -> _Question:
    prompt, asked = text.prompt, question_of(item)
    if prompt is None or asked is None:
        raise ValueError(
            f"{where} is a plain text, which has no subject. Pass a `(prompt, answer)` pair or chat messages, or use "
            "`token_position='answer'` or `'predict'`."
        )
    first = max(prompt.rfind(asked.strip()), 0)
    last = first + len(asked.strip()) if asked.strip() in prompt else len(prompt)
    words = [word.span() for word in WORD.finditer(prompt, first, last)]
    if not words:
        raise ValueError(f"{where} has a prompt without words, so it has no subject. Use another `token_position`.")
    offsets = prompt_offsets(tokenizer, prompt)
    own = [i for i, (start, stop) in enumerate(offsets) if start < last and first < stop]
    tokens = TokenizedItem("", prompt, [text.input_ids[i] for i in own], 0, [offsets[i] for i in own])
    return _Question(prompt, offsets, words, tokens)


def _subject(question: _Question, form: set[int], answer: str) -> str:
    """The last word of the question that says what it is about: one that is not in the `form` of similar questions."""
    repeated = {word.casefold() for word in WORD.findall(answer)}
    words = [question.prompt[start:stop] for start, stop in question.words]
    own = [
        word
        for word, (start, stop) in zip(words, question.words, strict=True)
        if not all(position in form for position in range(start, stop))
    ]
    for candidates in ([word for word in own if word.casefold() in repeated], own):
        if candidates:
            return candidates[-1]
    return next((word for word in reversed(words) if word.casefold() in repeated), words[-1])


def _position(subject: str, question: _Question, text: TokenizedItem, until: int) -> int | None:
    """Of the subject's last token: in the answer's first `until` characters, otherwise in the prompt."""
    repeated = [span for span in _occurrences(subject, text.answer) if span[1] <= until]
    token = _last_token(text.offsets, repeated)
    if token is not None:
        return text.start + token
    return _last_token(question.offsets, _occurrences(subject, question.prompt))


def _occurrences(subject: str, text: str) -> list[Span]:
    """Where the text has the subject as words of its own; only ASCII letters continue a word, so blanks are not needed."""
    pattern = rf"(?<!\w){re.escape(subject.strip())}(?!\w)"
    return [found.span() for found in re.finditer(pattern, text, re.ASCII | re.IGNORECASE)]


def _last_token(offsets: Sequence[Span], spans: Sequence[Span]) -> int | None:
    """The token that the last of the spans ends in, if there is one and it was not cut off."""
    for _, end in reversed(spans):
        for i in reversed(range(len(offsets))):
            if offsets[i][0] < end <= offsets[i][1]:
                return i
    return None
