"""A group of probes made ready for a model, and what the model is asked about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedTokenizerBase

from .generation import contains_answer, greedy_texts, sampled_texts
from .probes import Probe, ProbeScore, alternatives, encode_probes, score_encoded, truth_ratio


class ProbeGroup:
    """Probes, tokenized: whatever is wrong with them shows before a model runs. Models are expected in eval mode.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The models' tokenizer.
        probes (`Sequence[Probe]`): The probes.
        name (`str`): How errors call them.

    Raises:
        `ValueError`: See `score_probes`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probes: Sequence[Probe], name: str) -> None:
        self.probes = probes
        self.encoded = encode_probes(tokenizer, probes, name)
        self.compared = [
            encode_probes(tokenizer, alternatives(probe), f"{name}[{i}] for the truth ratio")
            for i, probe in enumerate(probes)
        ]

    def reference(self, i: int) -> str:
        """What a model should write after the probe: the whole answer, or what of it follows a cloze's prefix."""
        probe = self.probes[i]
        return probe.text if probe.prompt else probe.answer + probe.suffix

    def leaked(self, i: int, text: str) -> bool:
        """Whether a text gives the probe's answer away."""
        return contains_answer(text, self.probes[i].answer)

    def scores(self, model: nn.Module, batch_size: int) -> list[ProbeScore]:
        """How likely the model finds each answer, with the truth ratio where there are wrong answers."""
        scores = score_encoded(model, self.encoded, batch_size)
        return [
            replace(score, truth_ratio=truth_ratio(compared[0], compared[1:])) if compared else score
            for score, compared in zip(scores, self.compared_scores(model, batch_size), strict=True)
        ]

    def compared_scores(self, model: nn.Module, batch_size: int) -> list[list[ProbeScore]]:
        """For each probe what its truth ratio compares: the score of the right answer, then those of the wrong ones."""
        scores = iter(score_encoded(model, [probe for group in self.compared for probe in group], batch_size))
        return [[next(scores) for _ in group] for group in self.compared]

    def greedy(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, batch_size: int
    ) -> list[str]:
        """What the model answers by its likeliest tokens."""
        prompts = [probe.prompt_ids for probe in self.encoded]
        return greedy_texts(model, tokenizer, prompts, max_new_tokens, batch_size)

    def sampled(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        samples: int,
        temperature: float,
        seed: int,
    ) -> list[list[str]]:
        """`samples` answers to each probe; the one at `i` is drawn with `seed + i`, whatever is asked beside it."""
        return [
            sampled_texts(model, tokenizer, probe.prompt_ids, max_new_tokens, samples, temperature, seed + i)
            for i, probe in enumerate(self.encoded)
        ]
