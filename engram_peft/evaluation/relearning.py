"""An attack: how quickly does a model learn again what it was made to forget?

A model that only hides an answer gives it back after a few training steps; one that never knew needs more. The comparison with
such a model is what counts (relearning attacks: arXiv 2406.13356). The sharpest test trains on some of the forgotten texts and
asks for the others, which nothing in the training gives away (arXiv 2410.08827).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..editing.encoding import Batch, EncodedItem, Item, batches
from ..editing.selection import unwrap
from ..editing.weights import input_device
from .probes import EncodedProbe, Probe, encode_probes, score_encoded
from .texts import tokenize_texts


if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class RelearningCurve:
    """How well a model answers probes while it is trained on what it had forgotten.

    **Attributes**:
        - **steps** (`list[int]`) -- After how many training steps it was asked; the first is 0.
        - **named** (`list[float]`) -- The share of probes whose answer was the greedy choice then.
        - **probability** (`list[float]`) -- The mean probability of the answers then.
        - **reference** (`RelearningCurve`, *optional*) -- The same of the model that never knew.
    """

    steps: list[int]
    named: list[float]
    probability: list[float]
    reference: RelearningCurve | None = None

    def steps_to(self, share: float) -> int | None:
        """The first step at which at least `share` of the answers were named; `None` if there is none."""
        return next((step for step, named in zip(self.steps, self.named, strict=True) if named >= share), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RelearningCurve:
        """What `to_dict` was made of."""
        reference = content["reference"]
        return cls(**{**content, "reference": None if reference is None else cls.from_dict(reference)})

    def plot(self, others: Mapping[str, RelearningCurve] | None = None, ax: Axes | None = None) -> Axes:
        """Named share (solid) and mean probability (dashed) over the steps. Needs matplotlib.

        Args:
            others (`Mapping[str, RelearningCurve]`, *optional*): Curves of other models, by name.
            ax (`matplotlib.axes.Axes`, *optional*): Where to draw.
        """
        from matplotlib import pyplot

        if ax is None:
            _, ax = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        curves = {"model": self, "reference": self.reference, **(others or {})}
        for i, (name, curve) in enumerate((name, curve) for name, curve in curves.items() if curve is not None):
            ax.plot(curve.steps, curve.named, "-", color=f"C{i}", label=f"{name}: named")
            ax.plot(curve.steps, curve.probability, "--", color=f"C{i}", label=f"{name}: probability")
        ax.set_ylim(-0.03, 1.03)
        ax.set_xlabel("training steps")
        ax.set_ylabel("share")
        ax.legend()
        return ax


def relearning_curve(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Item],
    probes: Sequence[Probe],
    *,
    steps: int = 20,
    learning_rate: float = 1e-5,
    batch_size: int = 8,
    eval_steps: int = 1,
    seed: int = 0,
    reference: nn.Module | None = None,
) -> RelearningCurve:
    """Fine-tunes a copy of a model on what it had forgotten, and watches the answers come back.

    All weights are trained, in float32 and without dropout, with torch's AdamW on the mean loss of the answers' tokens. An
    adapter is merged into the copy first, so that the attacker trains plain weights. The given model stays as it is, to the
    bit. The copy, its gradients and the optimizer's state are four models in float32.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        texts (`Sequence[Item]`):
            What the attacker trains on: of pairs and chats the answers are learnt, of plain texts everything. Longer ones
            than 512 tokens are cut.
        probes (`Sequence[Probe]`): What the attacker is after.
        steps (`int`): Training steps.
        learning_rate (`float`): Of AdamW, constant.
        batch_size (`int`): Texts a training step; also probes a batch.
        eval_steps (`int`): The probes are scored before training, every so many steps, and at the end.
        seed (`int`): Of the order of the texts, which is the same for both models.
        reference (`nn.Module`, *optional*): A model that never knew the texts, to be attacked in the same way.

    Returns:
        `RelearningCurve`: Of the model; that of `reference` is in it.

    Raises:
        `ValueError`: Before work starts: bad input. Later: training made the model return NaN.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size), ("eval_steps", eval_steps)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if not len(probes):
        raise ValueError("`probes` is empty. Give the questions whose answers the attacker is after.")
    encoded = encode_probes(tokenizer, probes, "probes")
    items = [
        EncodedItem(item.input_ids, [i >= item.start for i in range(len(item.input_ids))])
        for item in tokenize_texts(tokenizer, texts, "texts", max_length=512)
    ]
    curves = [
        _attack(
            _trainable_copy(attacked),
            encoded,
            _training_batches(items, batch_size, tokenizer.pad_token_id, seed),
            steps,
            learning_rate,
            batch_size,
            eval_steps,
        )
        for attacked in (model, reference)
        if attacked is not None
    ]
    if reference is not None:
        curves[0].reference = curves[1]
    return curves[0]


def _trainable_copy(model: nn.Module) -> nn.Module:
    """The model's plain weights in float32, adapters merged, in eval mode: dropout would blur the comparison."""
    with torch.inference_mode(False):
        copied = copy.deepcopy(model).float()
        if isinstance(copied, PeftModel):
            copied = copied.merge_and_unload()
        return unwrap(copied).eval().requires_grad_(True)


def _training_batches(
    items: Sequence[EncodedItem], batch_size: int, pad_token_id: int | None, seed: int
) -> Iterator[Batch]:
    """Batches without end: every epoch goes through all items in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(items), generator=generator).split(batch_size):
            yield from batches([items[i] for i in chosen.tolist()], len(chosen), pad_token_id)


def _attack(
    model: nn.Module,
    probes: Sequence[EncodedProbe],
    training: Iterator[Batch],
    steps: int,
    learning_rate: float,
    batch_size: int,
    eval_steps: int,
) -> RelearningCurve:
    """Trains `model` itself."""
    device = input_device(model)
    curve = RelearningCurve([], [], [])

    def score(step: int) -> None:
        scores = score_encoded(model, probes, batch_size)
        curve.steps.append(step)
        curve.named.append(statistics.fmean(score.named for score in scores))
        curve.probability.append(statistics.fmean(score.probability for score in scores))

    score(0)
    with torch.inference_mode(False), torch.enable_grad():
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        for step in logging.tqdm(range(1, steps + 1), desc="Relearning"):
            batch = next(training)
            loss = model(
                input_ids=batch.input_ids.to(device),
                attention_mask=batch.attention_mask.to(device),
                labels=batch.input_ids.masked_fill(~batch.mask, -100).to(device),
                use_cache=False,
            ).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % eval_steps == 0 or step == steps:
                score(step)
    return curve
