"""What to forget, item by item: the texts of an item, the words of them that are its secret, and the rows that predict those.

An item is one thing to forget: a text, a pair, a chat, or several of them (other wordings, several answers to one question)
that share one strength. The *secret* of a text is what it says and its prompt does not: the words of the answer that are
neither copied from the prompt nor part of the form that similar answers share. In "The capital of Japan is Tokyo." that is
"Tokyo"; in a text without a prompt it is all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .encoding import Item, TokenizedItem, tokenize_item


# Two answers say the same kind of thing if they share this much of the shorter and of the longer one, in the same order.
SHARED_OF_SHORTER, SHARED_OF_LONGER = 0.5, 0.3
# A secret is judged in pieces of at most this many tokens, about one name: of longer ones the product says nothing.
SPAN_TOKENS = 8

# A word; in scripts without spaces every character is one.
WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]+"
)

# A run of tokens of a kept text: its index, and the first and last + 1 of its scored tokens (the answer's, or all but the first).
Run = tuple[int, int, int]

Forget = Sequence[Item] | Mapping[str, "Item | Sequence[Item]"]


@dataclass(frozen=True)
class ForgetText:
    """One text of an item.

    **Attributes**:
        - **item** (`int`) -- Index of the item it belongs to.
        - **tokens** (`TokenizedItem`) -- Its token ids.
        - **secret** (`list[int]`) -- Positions of the secret's tokens in `tokens.input_ids`, ascending, none of them 0.
        - **company** (`list[tuple]`) --
            For each of them what stands in the same slot of the kept answers, as `(text, first, last + 1)`: first or later,
            between two tokens that both answers have. Empty: any token of any kept text.
    """

    item: int
    tokens: TokenizedItem
    secret: list[int]
    company: list[tuple[Run, ...]]

    @property
    def spans(self) -> list[list[int]]:
        """The secret in runs of adjacent tokens, at most `SPAN_TOKENS` long."""
        runs: list[list[int]] = []
        for position in self.secret:
            if runs and runs[-1][-1] == position - 1 and len(runs[-1]) < SPAN_TOKENS:
                runs[-1].append(position)
            else:
                runs.append([position])
        return runs


def forget_items(
    tokenizer: PreTrainedTokenizerBase, forget: Forget, retain: Sequence[TokenizedItem], max_length: int
) -> tuple[list[str], list[ForgetText]]:
    """The items' names and their texts, tokenized, with the secret of each.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer.
        forget (`Sequence` or `Mapping`):
            Items, named by their index; or names and, for each, an item or a list of several. A dictionary with a `span` (a
            string or a list of them) beside prompt and answer says itself which part of the answer is the secret.
        retain (`list[TokenizedItem]`): What is kept: answers similar to one that is forgotten show what its form is.
        max_length (`int`): Longer texts are cut on the right.

    Raises:
        `ValueError`: A text is empty or has nothing that could be forgotten; a `span` is not part of its answer.
    """
    names: list[str] = []
    found: list[tuple[int, TokenizedItem, Any]] = []
    for name, parts in _named(forget).items():
        names.append(name)
        for text in parts:
            tokens = tokenize_item(tokenizer, text, f"Item {name!r} of `forget`", max_length)
            found.append((len(names) - 1, tokens, text.get("span") if isinstance(text, Mapping) else None))
    if not found:
        raise ValueError("`forget` must hold at least one text.")
    forgotten = [answer_ids(tokens) for _, tokens, _ in found]
    kept = {i: answer_ids(tokens) for i, tokens in enumerate(retain) if tokens.start > 0}
    texts = []
    for item, tokens, span in found:
        to_kept = alignments_with(tokens, kept)
        if span is not None:
            characters = given_spans(tokens, span, names[item])
        else:
            # an answer that is forgotten twice does not show what the form of such answers is
            own = answer_ids(tokens)
            siblings = {
                i: ids
                for i, ids in enumerate(forgotten)
                if found[i][1].start > 0 and found[i][0] != item and ids != own
            }
            characters = secret_characters(tokens, [*to_kept.values(), *alignments_with(tokens, siblings).values()])
        secret = [
            position
            for position, (start, stop) in enumerate(tokens.offsets, tokens.start)
            if position > 0 and any(start < last and first < stop for first, last in characters)
        ]
        if not secret:
            raise ValueError(
                f"Item {names[item]!r} of `forget` has no secret: every word of the answer is in its prompt, in the answers "
                "that are kept, or beyond `max_length`. Name the part to forget with `span`."
            )
        company = [_company(tokens, position, to_kept, kept) for position in secret]
        texts.append(ForgetText(item, tokens, secret, company))
    return names, texts


def without_prompt(tokenizer: PreTrainedTokenizerBase, texts: Sequence[ForgetText]) -> list[ForgetText]:
    """The answers alone, of those that name what they are about before they tell the secret.

    A model that no longer answers the question may still complete the sentence: nothing new is edited for it, but it is
    looked at when the strengths are found.
    """
    bare = []
    for text in texts:
        tokens = text.tokens
        if tokens.prompt is None:
            continue
        characters = [tokens.offsets[position - tokens.start] for position in text.secret]
        known = {word.casefold() for word in WORD.findall(tokens.prompt)}
        if not any(word.casefold() in known for word in WORD.findall(tokens.answer[: characters[0][0]])):
            continue
        alone = tokenize_item(tokenizer, tokens.answer)
        secret = [
            position
            for position, (start, stop) in enumerate(alone.offsets)
            if any(start < last and first < stop for first, last in characters)
        ]
        bare.append(ForgetText(text.item, alone, secret, []))
    return bare


def first_token(tokenizer: PreTrainedTokenizerBase, text: ForgetText, replacement: str) -> int:
    """The id of the first token of `replacement` where it stands in the place of the text's secret."""
    tokens = text.tokens
    start, stop = (tokens.offsets[text.spans[0][end] - tokens.start][end] for end in (0, -1))
    blanks = len(tokens.answer[start:stop]) - len(tokens.answer[start:stop].lstrip())  # a token may begin with one
    start += blanks
    answer = tokens.answer[:start] + replacement + tokens.answer[stop:]
    changed = tokenize_item(tokenizer, answer if tokens.prompt is None else (tokens.prompt, answer))
    return next(
        token
        for token, (first, last) in zip(changed.input_ids[changed.start :], changed.offsets, strict=True)
        if first < start + len(replacement) and start < last
    )


def item_texts(forget: Forget) -> list[Item]:
    """All texts of all items, in order."""
    return [text for texts in _named(forget).values() for text in texts]


def _named(forget: Forget) -> dict[str, list[Any]]:
    """The texts of every item by the item's name."""
    if isinstance(forget, Mapping):
        named = {str(name): _texts_of(value) for name, value in forget.items()}
        if len(named) < len(forget):
            raise ValueError("`forget` has names that are the same when they are written, such as 1 and '1'.")
        return named
    return {str(i): [item] for i, item in enumerate(forget)}


def _texts_of(value: Any) -> list[Any]:
    """The texts of a named item: a list of pairs, strings or rows is several, a list of messages is one chat."""
    if not isinstance(value, list) or not value:
        return [value]
    is_chat = all(isinstance(part, Mapping) and "role" in part for part in value)
    return [value] if is_chat else value


def answer_ids(tokens: TokenizedItem) -> list[int]:
    """The token ids of the answer; of a text without a prompt all of them."""
    return tokens.input_ids[tokens.start :]


def given_spans(tokens: TokenizedItem, span: str | Sequence[str], name: str) -> list[tuple[int, int]]:
    """The characters of the answer that a row names as its `span`, wherever they stand: `(first, last + 1)`.

    Raises:
        `ValueError`: A span is not part of the answer.
    """
    spans = []
    for part in [span] if isinstance(span, str) else span:
        found = [match.span() for match in re.finditer(re.escape(part), tokens.answer)] if part else []
        if not found:
            raise ValueError(f"Item {name!r} of `forget` has the span {part!r}, which is not part of its answer.")
        spans += found
    return spans


def alignments_with(tokens: TokenizedItem, others: Mapping[int, list[int]]) -> dict[int, list[Match]]:
    """The tokens that the answer shares, in order, with each of the `others` that is comparable to it."""
    if tokens.prompt is None:
        return {}
    own = answer_ids(tokens)
    vocabulary = set(own)
    matcher = SequenceMatcher(None, [], own, autojunk=False)
    aligned = {}
    for number, other in others.items():
        least = max(SHARED_OF_SHORTER * min(len(own), len(other)), SHARED_OF_LONGER * max(len(own), len(other)))
        if len(vocabulary.intersection(other)) >= min(least, len(vocabulary)):  # cheap, and settles most
            matcher.set_seq1(other)
            blocks = matcher.get_matching_blocks()
            if sum(block.size for block in blocks) >= least:
                aligned[number] = blocks
    return aligned


def secret_characters(tokens: TokenizedItem, alignments: Sequence[list[Match]]) -> list[tuple[int, int]]:
    """The characters of the answer that are its secret, in runs of words with nothing but punctuation between them."""
    if tokens.prompt is None:
        return [(0, len(tokens.answer))]
    copied = {word.casefold() for word in WORD.findall(tokens.prompt)}
    form = form_characters(tokens, alignments)
    secret: list[tuple[int, int]] = []
    for word in WORD.finditer(tokens.answer):
        start, stop = word.span()
        if word.group().casefold() in copied or all(position in form for position in range(start, stop)):
            continue
        if secret and not WORD.search(tokens.answer[secret[-1][1] : start]):
            secret[-1] = (secret[-1][0], stop)
        else:
            secret.append((start, stop))
    return secret


def form_characters(tokens: TokenizedItem, alignments: Sequence[list[Match]]) -> set[int]:
    """Characters of the answer whose tokens at least half of the comparable answers have in the same order."""
    shared = [0] * len(tokens.offsets)
    for blocks in alignments:
        for block in blocks:
            for position in range(block.b, block.b + block.size):
                shared[position] += 1
    form: set[int] = set()
    for (start, stop), count in zip(tokens.offsets, shared, strict=True):
        if alignments and 2 * count >= len(alignments):
            form.update(range(start, stop))
    return form


def _company(
    tokens: TokenizedItem, position: int, alignments: Mapping[int, list[Match]], kept: Mapping[int, list[int]]
) -> tuple[Run, ...]:
    """See `ForgetText`. An answer that is like no other has the kept answers' first tokens, or all of them, for company."""
    if tokens.prompt is None:
        return ()
    token = position - tokens.start
    if not alignments:
        return tuple((n, 0, 1) if token == 0 else (n, min(1, len(ids) - 1), len(ids)) for n, ids in kept.items())
    company = []
    for number, blocks in alignments.items():
        own = other = 0
        for block in blocks:
            if own <= token < block.b and other < block.a:
                is_single = block.a - other == 1
                company.append(
                    (number, other, other + 1) if token == own or is_single else (number, other + 1, block.a)
                )
            own, other = block.b + block.size, block.a + block.size
    return tuple(company)


class Slots:
    """The slots of all secret tokens. Tokens with the same company share one: a thousand facts of a kind need two or three.

    Args:
        texts (`list[ForgetText]`): What is forgotten; its rows are those of all secret tokens, in this order.
        retain (`list[TokenizedItem]`): What is kept.

    **Attributes**:
        - **slot_of_row** (`torch.Tensor`) -- `(rows,)` int64.
        - **count** (`int`) -- Number of slots.
    """

    def __init__(self, texts: Sequence[ForgetText], retain: Sequence[TokenizedItem]) -> None:
        companies = [company for text in texts for company in text.company]
        numbers = {company: number for number, company in enumerate(dict.fromkeys(companies))}
        self.slot_of_row = torch.tensor([numbers[company] for company in companies])
        self.count = len(numbers)
        self._widths = [scored_tokens(tokens) for tokens in retain]
        self._of_text: dict[int, list[tuple[int, int, int, float]]] = {}  # slot, first, last + 1, weight of each token
        self._everywhere: dict[int, float] = {}
        for company, slot in numbers.items():
            for text, first, last in company:
                share = 1 / (len(company) * (last - first))
                self._of_text.setdefault(text, []).append((slot, first, last, share))
            if not company:
                self._everywhere[slot] = 1 / max(sum(self._widths), 1)

    def weights(self, chosen: Sequence[int]) -> torch.Tensor:
        """What each scored token of the `chosen` kept texts counts for the mean of each slot, `(slots, tokens)` float32.

        Over all kept texts the weights of a slot sum up to 1.
        """
        parts = []
        for text in chosen:
            weights = torch.zeros(self.count, self._widths[text])
            for slot, share in self._everywhere.items():
                weights[slot] = share
            for slot, first, last, share in self._of_text.get(text, ()):
                weights[slot, first:last] = share
            parts.append(weights)
        return torch.cat(parts, dim=1)


def scored_tokens(tokens: TokenizedItem) -> int:
    """How many tokens of a text have a row that predicts them: the answer's, or all but the first."""
    return len(tokens.input_ids) - max(tokens.start, 1)
