"""A suite of probes and texts, and measuring a model with it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..editing.collection import evaluating
from ..editing.encoding import Item
from ..files import replace_text
from .generation import rouge_l_scorer
from .groups import ProbeGroup
from .probes import Probe, ProbeScore
from .report import GROUPS, Evaluation, GroupScores
from .texts import area_under_curve, min_k_score, perplexity_of, text_likelihoods, tokenize_texts


@dataclass
class Suite:
    """What to measure a model with. Every part may be left out; what needs it is then not measured.

    **Attributes**:
        - **forget** (`Sequence[Probe]`) -- What was to be forgotten, asked as it was trained on.
        - **paraphrase** (`Sequence[Probe]`) -- The same, in other words.
        - **cloze** (`Sequence[Probe]`) -- The same, in another form: a sentence to go on with.
        - **retain** (`Sequence[Probe]`) -- What was given to be kept.
        - **held_out** (`Sequence[Probe]`) -- More of the same family, never given.
        - **neighbour** (`Sequence[Probe]`) -- Other facts about what the forgotten ones are about.
        - **other** (`Sequence[Probe]`) -- Facts of other kinds.
        - **general** (`Sequence[str]`) -- Texts for the perplexity.
        - **members** (`Sequence[Item]`) -- Forgotten texts, for membership inference.
        - **non_members** (`Sequence[Item]`) -- Like them, but never seen by the model.
    """

    forget: Sequence[Probe] = ()
    paraphrase: Sequence[Probe] = ()
    cloze: Sequence[Probe] = ()
    retain: Sequence[Probe] = ()
    held_out: Sequence[Probe] = ()
    neighbour: Sequence[Probe] = ()
    other: Sequence[Probe] = ()
    general: Sequence[str] = ()
    members: Sequence[Item] = ()
    non_members: Sequence[Item] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, str | dict):
                raise ValueError(f"`{field.name}` must be a sequence, got a {type(given).__name__}.")
            setattr(self, field.name, tuple(given))
        for name, kind in [*((name, Probe) for name in GROUPS), ("general", str)]:
            for i, entry in enumerate(getattr(self, name)):
                if not isinstance(entry, kind):
                    raise ValueError(f"`{name}[{i}]` must be a `{kind.__name__}`, got a {type(entry).__name__}.")

    @property
    def groups(self) -> dict[str, Sequence[Probe]]:
        """The groups that have probes."""
        return {name: getattr(self, name) for name in GROUPS if getattr(self, name)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the suite as a JSON file, which replaces an older one at once or not at all."""
        content = {
            field.name: [_as_json(entry) for entry in getattr(self, field.name)]
            for field in fields(self)
            if getattr(self, field.name)
        }
        replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Suite:
        """Reads a JSON file: an object whose keys are the suite's attributes and whose probes are objects likewise.

        Raises:
            `ValueError`: It is no such file; the message names the key that is unknown or of the wrong type.
        """
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        _check_keys(content, cls, "The suite")
        for name, entries in content.items():
            if not isinstance(entries, list):
                raise ValueError(f"`{name}` must be a list, got a {type(entries).__name__}.")
            if name in GROUPS:
                content[name] = [_probe_of(entry, f"{name}[{i}]") for i, entry in enumerate(entries)]
            elif name != "general":
                content[name] = [_item_of(entry, f"{name}[{i}]") for i, entry in enumerate(entries)]
        return cls(**content)


def _as_json(entry: Any) -> Any:
    """A probe without the fields that are as by default; anything else as it is."""
    if not isinstance(entry, Probe):
        return entry
    defaults = {field.name: field.default for field in fields(Probe) if field.default is not MISSING}
    return {name: value for name, value in asdict(entry).items() if name not in defaults or value != defaults[name]}


def _check_keys(content: Any, kind: type, where: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object, got a {type(content).__name__}.")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if unknown := sorted(set(content) - set(known)):
        raise ValueError(f"{where} has the unknown keys {unknown}. Known are {list(known)}.")
    if missing := [name for name, required in known.items() if required and name not in content]:
        raise ValueError(f"{where} lacks {missing}.")


def _probe_of(entry: Any, where: str) -> Probe:
    _check_keys(entry, Probe, f"`{where}`")
    try:
        return Probe(**entry)
    except (TypeError, ValueError) as error:
        raise ValueError(f"In `{where}`: {error}") from error


def _item_of(entry: Any, where: str) -> Item:
    """An item as it was before JSON made a list of the pair."""
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
        return entry[0], entry[1]
    if not isinstance(entry, str | dict) and not (isinstance(entry, list) and all(isinstance(m, dict) for m in entry)):
        raise ValueError(f"`{where}` must be a text, a pair of texts or chat messages, got a {type(entry).__name__}.")
    return entry


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    suite: Suite,
    *,
    batch_size: int = 16,
    generate: bool = True,
    max_new_tokens: int = 32,
    samples: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    min_k: float = 0.2,
) -> Evaluation:
    """Measures a model: does it still answer, does it predict text as before, does it give away what it was trained on?

    The model is in eval mode for the time and then as it was, and so is the state of the random number generators.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer; its padding side does not matter.
        suite (`Suite`): What to measure it with.
        batch_size (`int`): Sequences a batch.
        generate (`bool`):
            Whether to let the model answer freely, which costs most of the time: `rouge_l` and `leaked` need it.
        max_new_tokens (`int`): Length of an answer.
        samples (`int`): Answers sampled for each probe, for `leaked_sampled`; all of one probe make a batch.
        temperature (`float`): Of the samples; 1 samples from the model's own distribution.
        seed (`int`): Of the samples; the probe at `i` of a group has `seed + i`.
        min_k (`float`): The share of tokens that membership inference looks at: see `min_k_score`.

    Returns:
        `Evaluation`: Scores by group and by probe.

    Raises:
        `ValueError`: Before work starts: bad input. Later: the model returns NaN.
        `ImportError`: `generate` needs the package `rouge-score`, which is missing.
    """
    _check_options(batch_size, max_new_tokens, samples, temperature, min_k)
    parts = {name: getattr(suite, name) for name in ("general", "members", "non_members")}
    if not suite.groups and not any(parts.values()):
        raise ValueError("`suite` is empty. Give it probes, texts in `general`, or `members` and `non_members`.")
    if bool(len(suite.members)) != bool(len(suite.non_members)):
        raise ValueError(
            "Membership inference needs both `members` and `non_members`. Give the suite both or neither."
        )
    groups = {name: ProbeGroup(tokenizer, probes, name) for name, probes in suite.groups.items()}
    general, members, non_members = (
        tokenize_texts(tokenizer, texts, name, max_length=512) if texts else [] for name, texts in parts.items()
    )
    rouge_l = rouge_l_scorer("recall", use_stemmer=True) if generate and groups else None

    scores: dict[str, list[ProbeScore]] = {}
    with evaluating(model):
        for name, group in logging.tqdm(groups.items(), desc="Scoring probes", disable=not groups):
            scores[name] = group.scores(model, batch_size)
            if rouge_l is not None:
                written = group.greedy(model, tokenizer, max_new_tokens, batch_size)
                scores[name] = [
                    replace(score, rouge_l=rouge_l(group.reference(i), text), leaked=group.leaked(i, text))
                    for i, (score, text) in enumerate(zip(scores[name], written, strict=True))
                ]
            if samples:
                drawn = group.sampled(model, tokenizer, max_new_tokens, samples, temperature, seed)
                scores[name] = [
                    replace(score, leaked_sampled=any(group.leaked(i, text) for text in texts))
                    for i, (score, texts) in enumerate(zip(scores[name], drawn, strict=True))
                ]
        member_scores, non_member_scores = (
            [min_k_score(likelihood, min_k) for likelihood in text_likelihoods(model, part, batch_size)]
            for part in (members, non_members)
        )
        return Evaluation(
            groups={name: GroupScores.of(group) for name, group in scores.items()},
            perplexity=perplexity_of(text_likelihoods(model, general, batch_size)) if general else None,
            membership_auc=area_under_curve(member_scores, non_member_scores) if members else None,
            probes=scores,
        )


def _check_options(batch_size: int, max_new_tokens: int, samples: int, temperature: float, min_k: float) -> None:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("max_new_tokens", max_new_tokens, 1),
        ("samples", samples, 0),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")
    if temperature <= 0:
        raise ValueError(
            f"`temperature` must be positive, got {temperature}. Greedy answers come with `generate=True`."
        )
    if not 0 < min_k <= 1:
        raise ValueError(f"`min_k` must be a share of the tokens, above 0 and at most 1, got {min_k}.")
