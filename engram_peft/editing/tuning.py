"""How strong: one strength an item, or one number for an adapter, found by looking at the edited model a few times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .collection import evaluating
from .encoding import Item, TokenizedItem, tokenize_item
from .items import Forget, ForgetText, forget_items
from .likelihood import token_likelihoods


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from peft import PeftModel


# An item is settled when its probability lies between the goal and this share of it: less would be damage for nothing.
SETTLED = 1 / 3
# Beyond this an item is not held back by its strength.
LARGEST_STRENGTH = 100.0


@dataclass
class ItemScores:
    """How well the model still knows each item.

    **Attributes**:
        - **log_probabilities** (`torch.Tensor`) --
            Of a text, the mean over the spans of its secret (runs of at most eight tokens) of the product of their tokens'
            probabilities; of an item's texts the likeliest counts. Natural logarithms, `(items,)` float64.
        - **named** (`torch.Tensor`) -- Whether a span of a text is what greedy decoding says, `(items,)` bool.
    """

    log_probabilities: torch.Tensor
    named: torch.Tensor


def item_scores(model: nn.Module, texts: Sequence[ForgetText], items: int, batch_size: int) -> ItemScores:
    """Scores all texts in teacher-forced passes."""
    sequences = [(text.tokens.input_ids, text.secret[0]) for text in texts]
    scores = ItemScores(torch.full((items,), -math.inf, dtype=torch.float64), torch.zeros(items, dtype=torch.bool))
    with evaluating(model):
        likelihoods = token_likelihoods(model, sequences, batch_size)
    for text, likelihood in zip(texts, likelihoods, strict=True):
        spans = [[position - text.secret[0] for position in span] for span in text.spans]
        said = torch.stack([likelihood.log_probabilities[span].double().sum() for span in spans])
        mean = said.logsumexp(0) - math.log(len(spans))
        scores.log_probabilities[text.item] = torch.maximum(scores.log_probabilities[text.item], mean)
        scores.named[text.item] |= any(not likelihood.ranks[span].any() for span in spans)
    return scores


@dataclass
class ItemOutcome:
    """What became of an item.

    **Attributes**:
        - **name** (`str`) -- Its name.
        - **strength** (`float`) -- Its strength.
        - **before**, **after** (`float`) -- How likely the model said it, and says it now: see `ItemScores`.
        - **goal** (`float`) -- How likely it should be at most.
        - **named** (`bool`) -- Whether greedy decoding still says it.
    """

    name: str
    strength: float
    before: float
    after: float
    goal: float
    named: bool

    @property
    def resists(self) -> bool:
        """Whether the item is more likely than it should be, or still what greedy decoding says."""
        return self.after > self.goal or self.named


def tune_strengths(
    probabilities: Callable[[torch.Tensor], torch.Tensor],
    before: torch.Tensor,
    start: torch.Tensor,
    goal: torch.Tensor,
    rounds: int,
) -> tuple[torch.Tensor, int]:
    """The least strengths at which every item is as unlikely as it should be.

    Each item's logarithm falls with its own strength and hardly depends on the others', so all are sought at once: by
    regula falsi in a bracket once there is one, by the same line beyond it, within a factor of 1.25 to 3, until then.

    Args:
        probabilities (`Callable`): From strengths to logarithms of the items' probabilities, `(items,)` float64 each.
        before (`torch.Tensor`): The logarithms at strength 0.
        start (`torch.Tensor`): Where to begin.
        goal (`torch.Tensor`): The logarithms to reach, all below `before`.
        rounds (`int`): How often `probabilities` may be called.

    Returns:
        The strengths, `(items,)`, and the rounds it took. An item that never reached its goal has the one that came nearest.
    """
    middle = goal + math.log(SETTLED) / 2
    strengths = start.clone()
    low, at_low = torch.zeros_like(start), before.clone()
    high, at_high = torch.full_like(start, math.inf), torch.full_like(start, math.nan)
    best, at_best = torch.zeros_like(start), before.clone()
    used = 0
    while used < rounds:
        used += 1
        now = probabilities(strengths)
        best, at_best = torch.where(now < at_best, strengths, best), torch.fmin(now, at_best)
        above, below = now > goal, now < goal + math.log(SETTLED)
        if not (above | below).any():
            break
        slope = (at_low - now).clamp_min(1e-9) / (strengths - low).clamp_min(1e-9)
        beyond = (strengths + (now - middle) / slope).clamp(1.25 * strengths, 3 * strengths)
        low, at_low = torch.where(above, strengths, low), torch.where(above, now, at_low)
        high, at_high = torch.where(above, high, strengths), torch.where(above, at_high, now)
        # the other items have moved, too: a bracket may have closed on nothing
        high = torch.where(above & (high <= low), math.inf, high)
        low = torch.where(~above & (low >= high), 0.0, low)
        share = ((at_low - middle) / (at_low - at_high)).clamp(0.15, 0.85)
        inside = low + share * (high - low)
        following = torch.where(high.isinf(), beyond.clamp_max(LARGEST_STRENGTH), inside)
        strengths = torch.where(above | below, following, strengths)
    else:
        strengths = torch.where(high.isinf(), best, high)
    return strengths, used


@dataclass(frozen=True)
class AlphaPoint:
    """What an adapter does at one strength.

    **Attributes**:
        - **scale** (`float`) -- What its `alpha` is multiplied by.
        - **forget** (`float`) -- How likely the model still says what is to be forgotten, on average over the items.
        - **damage** (`float`) -- The share of their probability that the kept answers lost, on average; gains do not count.
    """

    scale: float
    forget: float
    damage: float


@dataclass
class AlphaCurve:
    """The outcome of `tune_alpha`.

    **Attributes**:
        - **points** (`list[AlphaPoint]`) -- Everything that was looked at, by ascending scale; scale 0 is the base model.
        - **chosen** (`float`) -- The scale that was set.
        - **reason** (`str`) -- `"goal"`: it is about the least that forgets; `"budget"`: it is what forgets most within the budget.
    """

    points: list[AlphaPoint]
    chosen: float
    reason: str

    def __str__(self) -> str:
        lines = ["scale    forget   damage"]
        for point in self.points:
            mark = f"  <- {self.reason}" if point.scale == self.chosen else ""
            lines.append(f"{point.scale:<8.3g} {point.forget:<8.3f} {point.damage:<6.3f}{mark}")
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Both quantities over the scale. Needs matplotlib.

        Args:
            ax (`matplotlib.axes.Axes`, *optional*): Where to draw.
        """
        from matplotlib import pyplot

        if ax is None:
            _, ax = pyplot.subplots(figsize=(6, 4), layout="constrained")
        scales = [point.scale for point in self.points]
        ax.plot(scales, [point.forget for point in self.points], "o-", color="tab:red", label="forget: probability")
        ax.plot(scales, [point.damage for point in self.points], "o-", color="tab:green", label="retain: damage")
        ax.axvline(self.chosen, color="grey", linestyle=":", label=f"chosen ({self.reason})")
        ax.set(xlabel="scale", ylabel="share")
        ax.legend()
        return ax


def tune_alpha(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Forget,
    retain: Sequence[Item],
    *,
    budget: float = 0.05,
    goal: float = 0.05,
    max_evaluations: int = 12,
    adapter_name: str = "default",
    batch_size: int = 16,
    max_length: int = 512,
) -> AlphaCurve:
    """Sets an adapter's scale to the least that forgets, within a budget of damage. Nothing is recomputed.

    The scale is doubled until the goal is reached or the budget is spent, and then found by bisection.

    Args:
        model (`PeftModel`): A model with a filled ENGRAM adapter.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        forget (`Sequence` or `Mapping`): What should be forgotten, as for `unlearn`.
        retain (`Sequence`): What should be kept. Only answers count; where there are none, plain texts do. At most 200, evenly
            spaced, are looked at.
        budget (`float`): The damage that is allowed: see `AlphaPoint`.
        goal (`float`): The mean probability at which the items count as forgotten.
        max_evaluations (`int`): How often the model may be looked at, the base model included.
        adapter_name (`str`): Which adapter.
        batch_size (`int`): Texts a batch.
        max_length (`int`): Longer texts are cut on the right.

    Returns:
        `AlphaCurve`: What was seen, and why the scale was chosen.

    Raises:
        `ValueError`: Bad input; the adapter is merged. The scale is then as it was.
    """
    for name, value in (("budget", budget), ("goal", goal)):
        if not 0 < value < 1:
            raise ValueError(f"`{name}` must be in (0, 1), got {value}.")
    if max_evaluations < 3:
        raise ValueError(f"`max_evaluations` must be at least 3, got {max_evaluations}.")
    trial = _Trial(model, tokenizer, forget, retain, adapter_name, batch_size, max_length)
    own = model.base_model.peft_config[adapter_name].scale
    try:
        with logging.tqdm(total=max_evaluations, desc="Tuning alpha") as progress:
            low, high, scale = 0.0, math.inf, 1.0
            trial.at(low)
            while len(trial.points) < max_evaluations and (math.isinf(high) or high - low > 0.02 * high):
                point = trial.at(scale)
                progress.update()
                if point.forget > goal and point.damage <= budget:
                    low = scale
                else:
                    high = scale
                scale = 2 * low if math.isinf(high) else (low + high) / 2
    except BaseException:
        model.base_model.set_scale(adapter_name, own)
        raise
    within = [point for point in trial.points.values() if point.damage <= budget]
    reached = [point.scale for point in within if point.forget <= goal]
    chosen = min(reached) if reached else min(within, key=lambda point: (point.forget, point.scale)).scale
    model.base_model.set_scale(adapter_name, chosen)
    return trial.curve(chosen, "goal" if reached else "budget")


def scale_curve(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Forget,
    retain: Sequence[Item],
    scales: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
    *,
    adapter_name: str = "default",
    batch_size: int = 16,
    max_length: int = 512,
) -> AlphaCurve:
    """What an adapter forgets and damages at multiples of the scale that it has, which it keeps. Nothing is recomputed.

    Args:
        model (`PeftModel`): A model with a filled ENGRAM adapter.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        forget (`Sequence` or `Mapping`): What was to be forgotten, as for `unlearn`.
        retain (`Sequence`): What was to be kept, as for `tune_alpha`.
        scales (`Sequence[float]`): The multiples. 0, the base model, and 1 are always among them.
        adapter_name (`str`): Which adapter.
        batch_size (`int`): Texts a batch.
        max_length (`int`): Longer texts are cut on the right.

    Returns:
        `AlphaCurve`: The points; `chosen` is the adapter's own scale, `reason` is `"as made"`.

    Raises:
        `ValueError`: Bad input, or the adapter is merged.
    """
    trial = _Trial(model, tokenizer, forget, retain, adapter_name, batch_size, max_length)
    own = model.base_model.peft_config[adapter_name].scale
    try:
        for scale in logging.tqdm(sorted({0.0, own, *(own * scale for scale in scales)}, key=abs), desc="Scaling"):
            trial.at(scale)
    finally:
        model.base_model.set_scale(adapter_name, own)
    return trial.curve(own, "as made")


class _Trial:
    """What an adapter forgets and damages, scale by scale; the first one is the measure of damage and should be 0."""

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        forget: Forget,
        retain: Sequence[Item],
        adapter_name: str,
        batch_size: int,
        max_length: int,
    ) -> None:
        kept = [tokenize_item(tokenizer, item, f"Item {i} of `retain`", max_length) for i, item in enumerate(retain)]
        self.names, self.forgotten = forget_items(tokenizer, forget, kept, max_length)
        self.kept = _whole_answers(kept)
        if not self.kept:
            raise ValueError("`retain` is empty: without it no damage can be seen.")
        if adapter_name not in model.base_model.peft_config:
            raise ValueError(
                f"Adapter {adapter_name} not found. The model has {sorted(model.base_model.peft_config)}."
            )
        if adapter_name not in model.base_model.active_adapters:
            raise ValueError(
                f"The adapter {adapter_name!r} is not active: call `model.set_adapter({adapter_name!r})` first."
            )
        self.model, self.adapter_name, self.batch_size = model, adapter_name, batch_size
        self.points: dict[float, AlphaPoint] = {}
        self.unharmed = torch.empty(0)

    def at(self, scale: float) -> AlphaPoint:
        """Sets the scale and looks at the model, if it was not looked at there before."""
        if scale not in self.points:
            self.model.base_model.set_scale(self.adapter_name, scale)
            said = item_scores(self.model, self.forgotten, len(self.names), self.batch_size).log_probabilities.exp()
            now = item_scores(self.model, self.kept, len(self.kept), self.batch_size).log_probabilities
            if not self.points:
                self.unharmed = now
            damage = 1 - (now - self.unharmed).clamp_max(0).exp().mean()
            self.points[scale] = AlphaPoint(scale, float(said.mean()), float(damage))
        return self.points[scale]

    def curve(self, chosen: float, reason: str) -> AlphaCurve:
        return AlphaCurve(sorted(self.points.values(), key=lambda point: point.scale), chosen, reason)


# Every look is a pass over the kept texts: so many tell the damage well enough.
LOOKED_AT = 200


def _whole_answers(kept: Sequence[TokenizedItem]) -> list[ForgetText]:
    """Every answer as an item of its own that is secret as a whole; the plain texts, where there is no answer. At most `LOOKED_AT`."""
    answers = [tokens for tokens in kept if tokens.prompt is not None] or list(kept)
    answers = answers[:: -(-len(answers) // LOOKED_AT) or 1]
    scored = [tokens for tokens in answers if len(tokens.input_ids) > max(tokens.start, 1)]
    return [
        ForgetText(i, tokens, list(range(max(tokens.start, 1), len(tokens.input_ids))), [])
        for i, tokens in enumerate(scored)
    ]
