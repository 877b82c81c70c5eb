"""MUSE, the forgetting of news and books: its data and three of its metrics (arXiv 2407.06460, section 3).

Definitions follow the official code (github.com/swj0419/muse_bench, `eval.py` and `metrics/`), which is what published numbers
come from; there everything is multiplied by 100.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..editing.collection import evaluating
from ..editing.encoding import TokenizedItem
from .benchmarks import benchmark_rows, check_reference
from .generation import greedy_texts, rouge_l_scorer
from .report import aligned
from .texts import area_under_curve, min_k_score, text_likelihoods, tokenize_texts


Pair = tuple[str, str]

_MIN_K = 0.4
_VERBATIM_TOKENS = 128
_ANSWER_TOKENS = 32
_ANSWER_ENDS = ("\n\n", "\nQuestion", "Question:")


@dataclass
class MuseData:
    """MUSE's evaluation sets.

    **Attributes**:
        - **verbatim** (`Sequence[tuple[str, str]]`) -- Beginnings of forgotten texts and how they go on.
        - **forget_qa** (`Sequence[tuple[str, str]]`) -- Questions about the forgotten texts, and answers.
        - **retain_qa** (`Sequence[tuple[str, str]]`) -- The same about texts to be kept.
        - **forget_examples**, **retain_examples** (`Sequence[tuple[str, str]]`) --
          Questions and answers that are shown before each of those.
        - **forget_texts** (`Sequence[str]`) -- Forgotten texts, for membership inference.
        - **holdout_texts** (`Sequence[str]`) -- Like them, but never seen by any model.
    """

    verbatim: Sequence[Pair]
    forget_qa: Sequence[Pair]
    retain_qa: Sequence[Pair]
    forget_examples: Sequence[Pair]
    retain_examples: Sequence[Pair]
    forget_texts: Sequence[str]
    holdout_texts: Sequence[str]


@dataclass
class MuseMetrics:
    """MUSE's metrics of a model, as shares; published ones are percentages. `print` shows them as a table.

    **Attributes**:
        - **verbmem** (`float`) -- VerbMem: ROUGE-L F1 of how the model goes on with forgotten texts.
        - **knowmem_forget** (`float`) -- KnowMem on the forget set: ROUGE-L F1 of its answers.
        - **knowmem_retain** (`float`) -- The same on the retain set: what should stay.
        - **auc** (`float`) --
          The probability that a holdout text looks more familiar than a forgotten one, by min-40% prob: near 0 if the model
          remembers, about 0.5 if it never knew. This is MUSE's orientation; `Evaluation.membership_auc` is 1 - this.
        - **privleak** (`float`, *optional*) --
          PrivLeak, `(auc - auc of the reference) / auc of the reference`: 0 is best, negative is forgotten too little,
          positive is forgotten too conspicuously.
    """

    verbmem: float
    knowmem_forget: float
    knowmem_retain: float
    auc: float
    privleak: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as a dictionary of numbers."""
        return asdict(self)

    def __str__(self) -> str:
        known = [(name, value) for name, value in self.to_dict().items() if value is not None]
        return "\n".join(aligned([(name.replace("_", " "), f"{value:.3f}") for name, value in known]))


def load_muse(path_or_hub_name: str | os.PathLike[str]) -> MuseData:
    """Reads MUSE's evaluation sets.

    Args:
        path_or_hub_name (`str`):
            `"muse-bench/MUSE-News"` or `"muse-bench/MUSE-Books"`, which needs `datasets` and a network, or a folder as the
            official `load_data.py` writes it: `verbmem/forget.json`, `knowmem/forget_qa.json`, `retain_qa.json`,
            `forget_qa_icl.json` and `retain_qa_icl.json`, `privleak/forget.json` and `holdout.json`. `.jsonl` and `.parquet`
            will do as well.

    Returns:
        `MuseData`: The sets.

    Raises:
        `FileNotFoundError`: The folder, or a set in it, is missing.
        `ValueError`: A row lacks a column: `prompt` and `gt`, `question` and `answer`, or `text`.
    """

    def pairs(config: str, split: str, first: str, second: str) -> list[Pair]:
        rows = benchmark_rows(path_or_hub_name, config, split, [first, second])
        return [(row[first], row[second]) for row in rows]

    def texts(split: str) -> list[str]:
        return [row["text"] for row in benchmark_rows(path_or_hub_name, "privleak", split, ["text"])]

    return MuseData(
        verbatim=pairs("verbmem", "forget", "prompt", "gt"),
        forget_qa=pairs("knowmem", "forget_qa", "question", "answer"),
        retain_qa=pairs("knowmem", "retain_qa", "question", "answer"),
        forget_examples=pairs("knowmem", "forget_qa_icl", "question", "answer"),
        retain_examples=pairs("knowmem", "retain_qa_icl", "question", "answer"),
        forget_texts=texts("forget"),
        holdout_texts=texts("holdout"),
    )


def muse_metrics(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: MuseData,
    reference: nn.Module | None = None,
    *,
    batch_size: int = 8,
) -> MuseMetrics:
    """MUSE's metrics of a model: 128 tokens of a text's continuation, 32 of an answer, whole texts for membership inference.

    Args:
        model (`nn.Module`): The model that was made to forget, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer. No chat template is used.
        data (`MuseData`): From `load_muse`.
        reference (`nn.Module`, *optional*): A model that never saw what was forgotten, for PrivLeak.
        batch_size (`int`): Sequences a batch.

    Returns:
        `MuseMetrics`: See there.

    Raises:
        `ValueError`: `reference` is the model itself or the one under its adapter, or a set is empty.
        `ImportError`: `rouge-score` is missing.
    """
    if reference is not None:
        check_reference(model, reference)
    for name in ("verbatim", "forget_qa", "retain_qa"):
        if not getattr(data, name):
            raise ValueError(f"`data.{name}` is empty. Load it with `load_muse`.")
    members = tokenize_texts(tokenizer, data.forget_texts, "data.forget_texts", max_length=None)
    non_members = tokenize_texts(tokenizer, data.holdout_texts, "data.holdout_texts", max_length=None)
    f1 = rouge_l_scorer("fmeasure", use_stemmer=False)

    def written(prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        return greedy_texts(
            model, tokenizer, [tokenizer(text)["input_ids"] for text in prompts], max_new_tokens, batch_size
        )

    def knowmem(pairs: Sequence[Pair], examples: Sequence[Pair]) -> float:
        shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
        answers = written([f"{shown}Question: {question}\nAnswer: " for question, _ in pairs], _ANSWER_TOKENS)
        return statistics.fmean(f1(right, _up_to_end(text)) for (_, right), text in zip(pairs, answers, strict=True))

    progress = logging.tqdm(total=4 if reference is None else 5, desc="MUSE")
    with progress, evaluating(model):
        continued = written([prompt for prompt, _ in data.verbatim], _VERBATIM_TOKENS)
        verbmem = statistics.fmean(
            f1(_first_tokens(tokenizer, right), text)
            for (_, right), text in zip(data.verbatim, continued, strict=True)
        )
        progress.update()
        knowmem_forget = knowmem(data.forget_qa, data.forget_examples)
        progress.update()
        knowmem_retain = knowmem(data.retain_qa, data.retain_examples)
        progress.update()
        auc = _holdout_auc(model, members, non_members, batch_size)
        progress.update()
        privleak = None
        if reference is not None:
            with evaluating(reference):
                unaware = _holdout_auc(reference, members, non_members, batch_size)
            privleak = (auc - unaware) / unaware
            progress.update()
    return MuseMetrics(verbmem, knowmem_forget, knowmem_retain, auc, privleak)


def _holdout_auc(
    model: nn.Module, members: Sequence[TokenizedItem], non_members: Sequence[TokenizedItem], batch_size: int
) -> float:
    forgotten, unseen = (
        [min_k_score(likelihood, _MIN_K) for likelihood in text_likelihoods(model, tokens, batch_size)]
        for tokens in (members, non_members)
    )
    return area_under_curve(unseen, forgotten)


def _first_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """As much of a text as the model is given room to write."""
    return tokenizer.decode(tokenizer(text)["input_ids"][:_VERBATIM_TOKENS], skip_special_tokens=True)


def _up_to_end(text: str) -> str:
    """An answer without the next question, which models shown examples go on to write."""
    for end in _ANSWER_ENDS:
        text = text.split(end)[0]
    return text
