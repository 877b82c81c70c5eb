"""Tokenizer compression: tokens that read the same after normalisation hash as the same token.

`"Apple"`, `" apple"` and `"APPLE"` are one n-gram element, not three. Paper: Engram (arXiv 2601.07372), section 2.2; bit for
bit the map of its demo and of DeepSeek-V4.1. `qwen_ple` and `needle` hash token ids as they are and have no map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, normalizers


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLANK = "\ue000"  # stands for a lone space while the others are stripped


def build_token_map(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The compressed id of every token, numbered in the order in which they first appear.

    A token that is not valid text on its own (part of a character) stays itself. Added tokens count.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Any tokenizer.

    Returns:
        `torch.Tensor`: `(len(tokenizer),)` int64, values `0..compressed_vocab_size - 1`. 130,000 tokens take about a second.
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in _token_keys(tokenizer)], dtype=torch.int64)


def compressed_vocab_size(token_map: torch.Tensor) -> int:
    """How many different ids the map has, `V'`."""
    return int(token_map.max()) + 1


def compress_ids(ids: torch.Tensor, token_map: torch.Tensor) -> torch.Tensor:
    """Token ids through the map. Negative ids, which stand for no token, stay what they are.

    Args:
        ids (`torch.Tensor`): Any shape, int64, below `len(token_map)`.
        token_map (`torch.Tensor`): On the same device.
    """
    return torch.where(ids >= 0, token_map[ids.clamp_min(0)], ids)


def grow_token_map(token_map: torch.Tensor, length: int) -> torch.Tensor:
    """The map for a vocabulary that got larger: each new token is an id of its own, and old ones keep theirs.

    Args:
        token_map (`torch.Tensor`): The map so far.
        length (`int`): Its new length. A smaller one cuts it.
    """
    more = max(0, length - len(token_map))
    first = compressed_vocab_size(token_map)
    return torch.cat([token_map[:length], torch.arange(first, first + more, device=token_map.device)])


def check_token_map(token_map: torch.Tensor, tokenizer: PreTrainedTokenizerBase, built_for: int | None = None) -> None:
    """Compares a stored map with a tokenizer, so that a memory is not read with ids that mean something else.

    Args:
        token_map (`torch.Tensor`): The map.
        tokenizer (`PreTrainedTokenizerBase`): What the ids are going to come from.
        built_for (`int`, *optional*): The number of ids of the map before it grew; later ones are not compared.

    Raises:
        `ValueError`: They disagree. The message names the first token that does.
    """
    expected = build_token_map(tokenizer)
    length = min(len(token_map), len(expected))
    stored = token_map[:length].cpu()
    differs = stored != expected[:length]
    if built_for is not None:
        differs &= stored < built_for
    if differs.any():
        first = int(differs.nonzero()[0])
        raise ValueError(
            f"The token map does not fit the tokenizer: token {first} ({tokenizer.convert_ids_to_tokens(first)!r}) has the "
            f"compressed id {int(stored[first])} in the map, but {int(expected[first])} by the tokenizer. Use the tokenizer "
            "that the memory was trained with."
        )
    if length < len(expected):
        raise ValueError(
            f"The token map does not fit the tokenizer: token {length} ({tokenizer.convert_ids_to_tokens(length)!r}) is not in "
            f"the map, which has {length} entries for {len(expected)} tokens. Call `resize_token_embeddings` on the model."
        )


def _token_keys(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token reads like; tokens with the same key are one."""
    normalizer = _normalizer()
    texts = tokenizer.batch_decode([[token_id] for token_id in range(len(tokenizer))], skip_special_tokens=False)
    keys = [normalizer.normalize_str(text) or text for text in texts]
    for token_id, text in enumerate(texts):
        if "\ufffd" in text:
            keys[token_id] = tokenizer.convert_ids_to_tokens(token_id)
    return keys


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
