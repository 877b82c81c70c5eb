"""How likely a model finds given tokens: one teacher-forced pass, scored where it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .encoding import by_length
from .selection import unwrap
from .weights import input_device


@dataclass(frozen=True)
class Likelihood:
    """Scores of the tokens of one sequence from its `start` on.

    **Attributes**:
        - **log_probabilities** (`torch.Tensor`) -- Natural logarithms, `(n,)` float32.
        - **ranks** (`torch.Tensor`) -- How many tokens the model finds more likely, `(n,)` int64: 0 is the greedy choice.
    """

    log_probabilities: torch.Tensor
    ranks: torch.Tensor


@torch.no_grad()  # not inference mode, whose tensors FSDP2 would keep
def token_likelihoods(
    model: nn.Module, sequences: Sequence[tuple[Sequence[int], int]], batch_size: int = 16
) -> list[Likelihood]:
    """Scores every sequence's tokens from its start on, given all that is before them. The model should be in eval mode.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one.
        sequences (`Sequence`): `(token ids, start)`; the first token of all cannot be scored, so `start` 0 counts as 1.
        batch_size (`int`): Sequences a batch; those of similar length go together.

    Returns:
        `list[Likelihood]`: In the order of `sequences`, on the CPU.
    """
    device = input_device(model)
    keeps_logits = "logits_to_keep" in inspect.signature(unwrap(model).forward).parameters
    results: list[Likelihood | None] = [None] * len(sequences)
    for chosen in by_length([ids for ids, _ in sequences], batch_size):
        starts = [max(sequences[i][1], 1) for i in chosen]
        lengths = torch.tensor([len(sequences[i][0]) for i in chosen])
        input_ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)
        for row, i in enumerate(chosen):
            input_ids[row, : lengths[row]] = torch.tensor(sequences[i][0])
        attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        # logits of no position before the first that predicts a scored token
        first = min(starts) - 1 if keeps_logits else 0
        kept = {"logits_to_keep": torch.arange(first, input_ids.shape[1], device=device)} if keeps_logits else {}
        logits = model(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False, **kept
        ).logits
        for row, (i, start) in enumerate(zip(chosen, starts, strict=True)):
            length = int(lengths[row])
            scores = logits[row, start - 1 - first : length - 1 - first].float()  # (n, vocabulary)
            tokens = input_ids[row, start:length].to(scores.device)[:, None]
            own = scores.gather(1, tokens)
            results[i] = Likelihood((own.squeeze(1) - scores.logsumexp(-1)).cpu(), (scores > own).sum(1).cpu())
    return [result for result in results if result is not None]
