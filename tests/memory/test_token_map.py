"""Which tokens are one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engram_peft.memory import (
    build_token_map,
    check_token_map,
    compress_ids,
    compressed_vocab_size,
    grow_token_map,
)

from .oracles import demo, demo_tokenizer


Tokenizers = Callable[..., PreTrainedTokenizerFast]


def test_added_tokens_count() -> None:
    """Neither `vocab_size`, which leaves them out, nor the rows of an embedding, which may be padded."""
    tokenizer = demo_tokenizer()
    token_map = build_token_map(tokenizer)
    assert len(token_map) == len(tokenizer) == tokenizer.vocab_size + 4
    assert token_map[-1] >= 0


def test_tokens_that_read_the_same_are_one() -> None:
    """Case, accents, blanks around them and compatibility forms are ignored; a lone blank is kept."""
    tokenizer = demo_tokenizer()
    groups: dict[int, set[str]] = {}
    for token_id, compressed in enumerate(build_token_map(tokenizer).tolist()):
        text = tokenizer.decode([token_id])
        if "\ufffd" not in text:
            groups.setdefault(compressed, set()).add(text.strip().casefold())
    assert max(len(texts) for texts in groups.values()) <= 4  # accents
    assert any(len(texts) == 1 for texts in groups.values())
    assert compressed_vocab_size(build_token_map(tokenizer)) < len(tokenizer)


def test_ids_are_numbered_as_they_appear(tiny_tokenizer: Tokenizers) -> None:
    token_map = build_token_map(tiny_tokenizer())
    seen = -1
    for compressed in token_map.tolist():
        assert compressed <= seen + 1
        seen = max(seen, compressed)


def test_negative_ids_pass_through() -> None:
    _, tensors = demo()
    ids = tensors["ids.negative"]
    compressed = compress_ids(ids, tensors["lookup"])
    assert torch.equal(compressed[ids < 0], ids[ids < 0])
    assert torch.equal(compressed[ids >= 0], tensors["lookup"][ids[ids >= 0]])


def test_a_grown_map_keeps_old_ids(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer()
    token_map = build_token_map(tokenizer)
    size = compressed_vocab_size(token_map)
    grown = grow_token_map(token_map, len(token_map) + 3)
    assert torch.equal(grown[:-3], token_map)
    assert grown[-3:].tolist() == [size, size + 1, size + 2]
    assert torch.equal(grow_token_map(grown, len(token_map)), token_map)
    tokenizer.add_tokens(["PARIS", "<new>"])  # the first reads like a token that was there
    check_token_map(grown, tokenizer, built_for=size)
    with pytest.raises(ValueError, match="'PARIS'"):
        check_token_map(grown, tokenizer)


def test_the_first_difference_is_named(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer()
    token_map = build_token_map(tokenizer)
    check_token_map(token_map, tokenizer)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"]
    vocabulary["Capital"] = vocabulary.pop("river")  # reads like `capital`, which comes first
    other = PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(backend)))
    expected = token_map[tokenizer.convert_tokens_to_ids("capital")]
    with pytest.raises(
        ValueError, match=rf"token {vocabulary['Capital']} \('Capital'\).*but {expected} by the tokenizer"
    ):
        check_token_map(token_map, other)


def test_a_map_that_is_too_short(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer()
    token_map = build_token_map(tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="'<new>'.*not in the map.*resize_token_embeddings"):
        check_token_map(token_map, tokenizer)
