"""Hashing while data is loaded: the workers that make batches can say which rows a batch reads, so the training step need not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .hashing import NgramHash
from .spec import NgramMemorySpec
from .stream import open_stream


class NgramRowsCollator:
    """A data collator that adds `engram_rows`, which models with n-gram memories use instead of hashing themselves.

    Hash, masks and documents are those of the model: the rows are the same.

    Args:
        collator (`Callable`): Makes a batch with `input_ids`, such as `DataCollatorForLanguageModeling`.
        spec (`NgramMemorySpec`): The memories.
        vocab_size (`int`): The model's.
        token_map (`torch.Tensor`, *optional*): The model's.
        masked_token_ids (`Sequence[int]`): The model's.

    Example:

        ```py
        >>> memory = next(module for module in model.modules() if isinstance(module, NgramMemory))
        >>> collator = NgramRowsCollator(collator, memory.spec, model.config.vocab_size, model.base_model.token_map())
        >>> trainer = Trainer(model, arguments, data_collator=collator, train_dataset=dataset)
        ```
    """

    def __init__(
        self,
        collator: Callable[[list[Any]], dict[str, Any]],
        spec: NgramMemorySpec,
        vocab_size: int,
        token_map: torch.Tensor | None = None,
        masked_token_ids: Sequence[int] = (),
    ) -> None:
        self.collator = collator
        self.spec = spec
        self.vocab_size = vocab_size
        self.token_map = None if token_map is None else token_map.detach().cpu()
        self.masked_token_ids = list(masked_token_ids)
        self.hashes = [NgramHash(spec, layer_id) for layer_id in spec.layer_ids]

    def __call__(self, features: list[Any]) -> dict[str, Any]:
        """The batch, with `engram_rows` `(batch, length, layers, tables)` int64."""
        batch = self.collator(features)
        stream = open_stream(
            self.spec,
            batch["input_ids"],
            vocab_size=self.vocab_size,
            token_map=self.token_map,
            masked_token_ids=self.masked_token_ids,
            attention_mask=batch.get("attention_mask"),
            position_ids=batch.get("position_ids"),
            segment_ids=batch.get("engram_segment_ids"),
        )
        batch["engram_rows"] = torch.stack([layer(stream.ids, stream.reach) for layer in self.hashes], dim=2)
        return batch
