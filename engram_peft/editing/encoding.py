"""From texts to token ids and to the rows that count.

An item is a `str` (every token counts), a `(prompt, answer)` pair (the answer's tokens count), or a list of chat messages
that ends with the assistant's (that message counts; the rest goes through the tokenizer's chat template). Rows of a
`datasets.Dataset` are dictionaries with `text`, with `prompt` or `question` and `answer` or `completion`, or with `messages`.
A dictionary may name its `subject`, for `token_position="subject"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger(__name__)

Message = dict[str, str]
Item = str | tuple[str, str] | list[Message] | dict[str, Any]

TOKEN_POSITIONS = ("answer", "predict", "subject")


@dataclass(frozen=True)
class EncodedItem:
    """Token ids of one text and, for every position, whether its hidden state is a row of the statistics."""

    input_ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded on the right.

    `input_ids` and `attention_mask` are `(batch, length)` int64, `mask` is `(batch, length)` bool; `items` says which of the
    encoded items they are.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor
    items: list[int]


def encode_items(
    tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], max_length: int, token_position: str
) -> list[EncodedItem]:
    """Encodes every item; see the module's docstring for what an item is.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its chat template is used for chat messages only.
        items (`Sequence`): The texts.
        max_length (`int`): Longer texts are cut on the right.
        token_position (`str`):
            `"answer"` takes the rows at the tokens that count, `"predict"` the rows one earlier, which predict them,
            `"subject"` the single row at the last token of what is asked about: see `subjects.subject_positions`.

    Raises:
        `ValueError`: An item is empty, or its prompt leaves no room for the answer within `max_length`; or it has no subject.
        `TypeError`: An item is of another kind.
    """
    if token_position not in TOKEN_POSITIONS:
        raise ValueError(f"`token_position` must be one of {list(TOKEN_POSITIONS)}, got {token_position!r}.")
    texts = [tokenize_item(tokenizer, item, f"Item {i}", max_length) for i, item in enumerate(items)]
    if token_position == "subject":
        from .subjects import subject_positions  # it needs this module

        positions = subject_positions(tokenizer, items, texts)
        return [
            EncodedItem(tokens.input_ids, [i == position for i in range(len(tokens.input_ids))])
            for tokens, position in zip(texts, positions, strict=True)
        ]
    return [_encode(tokens, f"Item {i}", token_position) for i, tokens in enumerate(texts)]


@dataclass(frozen=True)
class EncodedPair:
    """A text for an encoder-decoder model: what the encoder reads, and the labels that the decoder learns to write.

    Every row of the encoder counts; `decoder.mask` says which of the decoder's do.
    """

    encoder: EncodedItem
    decoder: EncodedItem


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], max_length: int, token_position: str
) -> list[EncodedPair]:
    """Encodes every item for an encoder-decoder model: it reads the prompt and writes the answer; a plain text is both.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its special tokens are added on both sides.
        items (`Sequence`): The texts.
        max_length (`int`): Longer prompts and answers are cut on the right.
        token_position (`str`):
            `"answer"` takes the decoder's rows that are handed a token of the answer, `"predict"` all, each of which predicts one.

    Raises:
        `ValueError`: An item is empty, or `token_position` is another.
        `TypeError`: An item is of another kind.
    """
    if token_position not in ("answer", "predict"):
        raise ValueError(
            f"`token_position` must be 'answer' or 'predict' for an encoder-decoder model, got {token_position!r}."
        )
    pairs = []
    for i, item in enumerate(items):
        prompt, answer = _prompt_and_answer(tokenizer, item, f"Item {i}")
        if not answer.strip():
            raise ValueError(f"Item {i} is empty: it has no {'text' if prompt is None else 'answer'}.")
        read = tokenizer(answer if prompt is None else prompt)["input_ids"][:max_length]
        written = tokenizer(text_target=answer)["input_ids"][:max_length]
        counts = [token_position == "predict" or position > 0 for position in range(len(written))]
        if not any(counts):
            raise ValueError(
                f"Item {i} has an answer of a single token, which the decoder is never handed. Use 'predict'."
            )
        pairs.append(EncodedPair(EncodedItem(read, [True] * len(read)), EncodedItem(written, counts)))
    return pairs


def _encode(tokens: TokenizedItem, where: str, token_position: str) -> EncodedItem:
    counts = [i >= tokens.start for i in range(len(tokens.input_ids))]
    if token_position == "predict":
        counts = counts[1:] + [False]
    if not any(counts):
        raise ValueError(f"{where} has a single token, so no row of it predicts another one. Use a longer text.")
    return EncodedItem(tokens.input_ids, counts)


@dataclass(frozen=True)
class TokenizedItem:
    """An item as one sequence of token ids, of which those from `start` on are the answer; a plain text is all answer.

    `offsets[i]` says which characters of `answer` the token `start + i` stands for; special tokens stand for none.
    """

    prompt: str | None
    answer: str
    input_ids: list[int]
    start: int
    offsets: list[tuple[int, int]]


def tokenize_item(
    tokenizer: PreTrainedTokenizerBase, item: Item, where: str = "The item", max_length: int | None = None
) -> TokenizedItem:
    """Tokenizes prompt and answer apart and joins them; see the module's docstring for what an item is.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its chat template is used for chat messages only.
        item (`str`, `tuple`, `list` or `dict`): The item.
        where (`str`): How errors call it.
        max_length (`int`, *optional*): Longer items are cut on the right.

    Raises:
        `ValueError`: The item is empty, or its prompt leaves no room for the answer within `max_length`.
        `TypeError`: It is of another kind.
    """
    prompt, answer = _prompt_and_answer(tokenizer, item, where)
    if not answer.strip():
        raise ValueError(f"{where} is empty: it has no {'text' if prompt is None else 'answer'}.")
    prompt_ids: list[int] = []
    if prompt is not None:
        prompt_ids = tokenize_prompt(tokenizer, prompt)
    if max_length is not None and len(prompt_ids) >= max_length:
        raise ValueError(
            f"{where} has a prompt of {len(prompt_ids)} tokens, which fills `max_length={max_length}`: no token of "
            "the answer is left. Shorten the prompt or raise `max_length`."
        )
    special = prompt is None and not _has_bos(tokenizer, answer)
    encoded = tokenizer(answer, add_special_tokens=special, return_offsets_mapping=tokenizer.is_fast)
    answer_ids = encoded["input_ids"]
    offsets = encoded["offset_mapping"] if tokenizer.is_fast else _decoded_offsets(tokenizer, answer_ids)
    stop = None if max_length is None else max_length - len(prompt_ids)
    return TokenizedItem(prompt, answer, prompt_ids + answer_ids[:stop], len(prompt_ids), offsets[:stop])


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a prompt, which starts as the tokenizer starts a text, but not twice: rendered chats often do already."""
    return tokenizer(prompt, add_special_tokens=not _has_bos(tokenizer, prompt))["input_ids"]


def prompt_offsets(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[tuple[int, int]]:
    """Which characters of the prompt each of the tokens of `tokenize_prompt` stands for; special tokens stand for none."""
    if tokenizer.is_fast:
        special = not _has_bos(tokenizer, prompt)
        return tokenizer(prompt, add_special_tokens=special, return_offsets_mapping=True)["offset_mapping"]
    return _decoded_offsets(tokenizer, tokenize_prompt(tokenizer, prompt))


def question_of(item: Item) -> str | None:
    """What an item was asked last: the prompt of a pair, the last message before the answer in a chat; `None` in a text."""
    if isinstance(item, Mapping):
        return question_of(_item_of_row(item, "The item"))
    if isinstance(item, str):
        return None
    if isinstance(item[0], str):
        return item[0]
    return next((str(message["content"]) for message in reversed(item[:-1])), "")


def _decoded_offsets(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[tuple[int, int]]:
    """Offsets for a tokenizer that does not know them: the lengths of what longer and longer prefixes decode to."""
    ends = [len(tokenizer.decode(ids[:stop], skip_special_tokens=True)) for stop in range(len(ids) + 1)]
    return list(zip(ends[:-1], ends[1:], strict=True))


def _has_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Whether the text already starts as the tokenizer would start it, as rendered chat templates do."""
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def _prompt_and_answer(tokenizer: PreTrainedTokenizerBase, item: Item, where: str) -> tuple[str | None, str]:
    """The item as `(prompt, answer)`; the prompt of a plain text is `None`."""
    if isinstance(item, str):
        return None, item
    if isinstance(item, Mapping):
        return _prompt_and_answer(tokenizer, _item_of_row(item, where), where)
    if isinstance(item, Sequence) and item:
        messages = [part for part in item if isinstance(part, Mapping)]
        if len(messages) == len(item):
            return _render_chat(tokenizer, messages, where)
        strings = [part for part in item if isinstance(part, str)]
        if len(strings) == len(item) == 2:
            return strings[0], strings[1]
    raise TypeError(
        f"{where} is a {type(item).__name__}. Pass a `str`, a `(prompt, answer)` pair of strings or a list of chat messages "
        "(dictionaries with `role` and `content`)."
    )


def _item_of_row(row: Mapping[str, Any], where: str) -> Item:
    """The text, the pair or the chat in a row of a data set."""
    if row.get("messages"):
        return row["messages"]
    prompt = row.get("prompt") or row.get("question")
    answer = row.get("completion") or row.get("answer")
    if prompt and answer:
        return [*prompt, *answer] if isinstance(prompt, list) else (prompt, answer)
    if isinstance(row.get("text"), str):
        return row["text"]
    raise ValueError(
        f"{where} has the columns {sorted(row)}. Expected `text`, `prompt` and `completion`, `question` and `answer`, or "
        "`messages`."
    )


def _render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], where: str
) -> tuple[str, str]:
    if messages[-1].get("role") != "assistant":
        raise ValueError(
            f"{where} is a chat that ends with role {messages[-1].get('role')!r}; it must end with 'assistant'."
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where} is a chat, but the tokenizer has no chat template. Pass `(prompt, answer)` pairs instead."
        )
    prompt = tokenizer.apply_chat_template(list(messages[:-1]), tokenize=False, add_generation_prompt=True)
    return prompt, messages[-1]["content"]


def by_length(sequences: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Indices of `sequences` in batches of similar length, the shortest first."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def batches(encoded: Sequence[EncodedItem], batch_size: int, pad_token_id: int | None) -> Iterator[Batch]:
    """Batches of similar length. Padding is hidden by the attention mask, so any id will do for it."""
    pad_token_id = _pad_token(pad_token_id)
    for chosen in by_length([item.input_ids for item in encoded], batch_size):
        yield _batch([encoded[i] for i in chosen], pad_token_id, chosen)


def pair_batches(
    encoded: Sequence[EncodedPair], batch_size: int, pad_token_id: int | None
) -> Iterator[tuple[Batch, Batch]]:
    """Batches for an encoder-decoder model, of similar length: what the encoder reads, and the labels with -100 for padding."""
    pad_token_id = _pad_token(pad_token_id)
    for chosen in by_length([pair.encoder.input_ids for pair in encoded], batch_size):
        read = _batch([encoded[i].encoder for i in chosen], pad_token_id, chosen)
        yield read, _batch([encoded[i].decoder for i in chosen], -100, chosen)


def _pad_token(pad_token_id: int | None) -> int:
    if pad_token_id is None:
        logger.warning_once(
            "The tokenizer has no pad token; texts are padded with token 0, hidden by the attention mask."
        )
    return pad_token_id or 0


def _batch(items: Sequence[EncodedItem], pad_token_id: int, chosen: list[int]) -> Batch:
    lengths = torch.tensor([len(item.input_ids) for item in items])
    shape = (len(items), int(lengths.max()))
    input_ids = torch.full(shape, pad_token_id)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, item in enumerate(items):
        input_ids[row, : len(item.input_ids)] = torch.tensor(item.input_ids)
        mask[row, : len(item.mask)] = torch.tensor(item.mask)
    # from the lengths, never from `input_ids != pad`: the pad token is often one that texts contain
    attention_mask = (torch.arange(shape[1]) < lengths[:, None]).long()
    return Batch(input_ids, attention_mask, mask, chosen)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for tokenizers that agree on their size and on a probe text."""
    probe = "Engram 0123, déjà-vu: 記憶 and_under_scores\n\tend."
    return f"{len(tokenizer)}:" + "-".join(str(i) for i in tokenizer(probe, add_special_tokens=True)["input_ids"])
