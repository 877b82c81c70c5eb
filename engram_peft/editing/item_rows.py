"""What an edit item by item has to know of the model: the rows of every secret token, their company, and all that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import logging

from .collection import BodyRunner, Collector, evaluating
from .encoding import EncodedItem, TokenizedItem, batches
from .items import ForgetText, Slots, scored_tokens
from .selection import unwrap
from .statistics import Moment


@dataclass
class ItemRows:
    """The inputs of the layers that are handed the same tensor; a constant 1 stands last where they have a bias.

    **Attributes**:
        - **forgotten** (`torch.Tensor`) -- `X_t`: the row that predicts each secret token, `(n, dim)` float32.
        - **company** (`torch.Tensor`) -- For each of them the mean of the kept rows in the same slot, `(n, dim)` float32.
        - **retain**, **general** (`Moment`) -- `S_retain` of the kept answers and `S_general` of the plain texts.
    """

    forgotten: torch.Tensor
    company: torch.Tensor
    retain: Moment
    general: Moment


class _Rows:
    """A sink that keeps the rows themselves."""

    def __init__(self, dim: int) -> None:
        self.count = 0
        self.parts: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        self.count += len(rows)
        self.parts.append(rows.clone())

    def copy(self) -> _Rows:
        other = _Rows(0)
        other.count, other.parts = self.count, list(self.parts)
        return other


class _Kept:
    """A sink for what is kept: its moments, and the mean of every slot. `batch` says what the next rows are."""

    def __init__(self, dim: int, slots: int, batch: _KeptBatch) -> None:
        self.count = 0
        self.retain, self.general = Moment(dim), Moment(dim)
        self.means = torch.zeros(slots, dim)
        self.batch = batch

    def add(self, rows: torch.Tensor) -> None:
        self.count += len(rows)
        of_answers = self.batch.of_answers.to(rows.device)
        for moment, part in ((self.retain, rows[of_answers]), (self.general, rows[~of_answers])):
            if len(part):
                moment.add(part)
        self.means = self.means.to(rows.device)
        self.means += self.batch.slot_weights.to(rows.device) @ rows

    def copy(self) -> _Kept:
        other = _Kept(self.retain.dim, 0, self.batch)
        other.count, other.means = self.count, self.means.clone()
        other.retain, other.general = self.retain.copy(), self.general.copy()
        return other


@dataclass
class _KeptBatch:
    """Which rows of a batch belong to answers, `(rows,)`, and how much they count for the mean of each slot, `(slots, rows)`."""

    of_answers: torch.Tensor
    slot_weights: torch.Tensor


def collect_item_rows(
    model: nn.Module,
    layers: dict[str, nn.Module],
    texts: Sequence[ForgetText],
    retain: Sequence[TokenizedItem],
    *,
    batch_size: int,
    pad_token_id: int | None,
) -> dict[str, ItemRows]:
    """Runs every text once, forgotten and kept, and gathers the rows of `layers`; layers with the same input share one object.

    Args:
        model (`nn.Module`): The model; adapters that are active take part.
        layers (`dict[str, nn.Module]`): Layers by name.
        texts (`list[ForgetText]`): What is forgotten.
        retain (`list[TokenizedItem]`): What is kept. The rows are those that predict a token of an answer or of a plain text.
        batch_size (`int`): Texts a batch.
        pad_token_id (`int`, *optional*): What to fill batches up with.
    """
    slots = Slots(texts, retain)
    starts = torch.tensor([0, *(len(text.secret) for text in texts)]).cumsum(0).tolist()
    state = _KeptBatch(torch.zeros(0, dtype=torch.bool), torch.zeros(slots.count, 0))
    forgotten = Collector(layers, None, _Rows)
    kept = Collector(layers, None, lambda dim: _Kept(dim, slots.count, state))
    order: list[int] = []
    encoded = [EncodedItem(t.tokens.input_ids, _marked(t.tokens, [p - 1 for p in t.secret])) for t in texts]
    predicting = [
        EncodedItem(t.input_ids, _marked(t, range(max(t.start - 1, 0), len(t.input_ids) - 1))) for t in retain
    ]
    groups = (list(batches(encoded, batch_size, pad_token_id)), list(batches(predicting, batch_size, pad_token_id)))
    progress = logging.tqdm(total=sum(len(group) for group in groups), desc="Collecting rows")
    with torch.inference_mode(False), torch.no_grad(), evaluating(unwrap(model)), progress:
        with forgotten:
            run = BodyRunner(unwrap(model), layers, forgotten)
            for batch in groups[0]:
                order += [row for item in batch.items for row in range(starts[item], starts[item + 1])]
                run.batch(batch)
                progress.update()
        with kept:
            run = BodyRunner(unwrap(model), layers, kept)
            for batch in groups[1]:
                of_answers = [[retain[i].prompt is not None] * scored_tokens(retain[i]) for i in batch.items]
                state.of_answers = torch.tensor([flag for flags in of_answers for flag in flags], dtype=torch.bool)
                state.slot_weights = slots.weights(batch.items)
                run.batch(batch)
                progress.update()
    back = torch.tensor(order).argsort()
    rows: dict[tuple[int, int], ItemRows] = {}
    named = {}
    forgotten_sinks, kept_sinks = forgotten.sinks(), kept.sinks()
    for name in layers:
        mine, others = forgotten_sinks[name], kept_sinks[name]
        key = (id(mine), id(others))
        if key not in rows:
            x = torch.cat(mine.parts)
            rows[key] = ItemRows(
                x[back.to(x.device)],
                others.means[slots.slot_of_row.to(others.means.device)].to(x.device),
                others.retain,
                others.general,
            )
        named[name] = rows[key]
    return named


def _marked(tokens: TokenizedItem, positions: Sequence[int]) -> list[bool]:
    mask = [False] * len(tokens.input_ids)
    for position in positions:
        mask[position] = True
    return mask
