"""TOFU, the forgetting of fictitious authors: its data and its metrics (arXiv 2401.06121).

Definitions follow the official code (github.com/locuslab/tofu, `aggregate_eval_stat.py` and `evaluate_util.py`), which is what
published numbers come from. Two things differ: questions go through the tokenizer's chat template, and the token that ends an
answer is not scored.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..editing.collection import evaluating
from .benchmarks import benchmark_rows, check_reference
from .generation import rouge_l_scorer
from .groups import ProbeGroup
from .probes import Probe, ProbeScore, exp_or_inf, score_encoded, truth_ratio
from .report import aligned, harmonic_mean


@dataclass
class TofuData:
    """TOFU's evaluation sets. `wrong` of every probe are its perturbed answers, `prompt` is a chat with one question.

    **Attributes**:
        - **forget** (`Sequence[Probe]`) -- About the authors to be forgotten.
        - **retain** (`Sequence[Probe]`) -- About the other fictitious authors.
        - **real_authors** (`Sequence[Probe]`) -- About real authors.
        - **world_facts** (`Sequence[Probe]`) -- About the world.
    """

    forget: Sequence[Probe]
    retain: Sequence[Probe]
    real_authors: Sequence[Probe]
    world_facts: Sequence[Probe]


@dataclass
class TofuScores:
    """A model on one of TOFU's sets; all three are between 0 and 1.

    **Attributes**:
        - **probability** (`float`) --
          Mean of `p(answer)^(1/|answer|)`; for real authors and world facts as a share of the sum over all options.
        - **rouge_l** (`float`) -- Mean ROUGE-L recall of the greedy answer.
        - **truth_ratio** (`float`) --
          With `R` of `truth_ratio`: the mean of `max(0, 1 - R)`; on the forget set, where the best is `R = 1`, that of
          `min(R, 1 / R)`.
    """

    probability: float
    rouge_l: float
    truth_ratio: float


@dataclass
class TofuMetrics:
    """TOFU's metrics of a model. `print` shows them as a table.

    **Attributes**:
        - **forget**, **retain**, **real_authors**, **world_facts** (`TofuScores`) -- By set.
        - **model_utility** (`float`) -- Harmonic mean of the nine scores of the last three sets.
        - **forget_quality** (`float`, *optional*) --
          p-value of the two-sample Kolmogorov-Smirnov test between the truth ratios of this model and of the reference on the
          forget set: 1 if they are distributed alike, below 0.05 if the model still (or too clearly no longer) knows.
    """

    forget: TofuScores
    retain: TofuScores
    real_authors: TofuScores
    world_facts: TofuScores
    model_utility: float
    forget_quality: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [["set", "probability", "rouge l", "truth ratio"]]
        for name in _SETS:
            scores: TofuScores = getattr(self, name)
            numbers = (scores.probability, scores.rouge_l, scores.truth_ratio)
            rows.append([name, *(f"{value:.3f}" for value in numbers)])
        quality = "-" if self.forget_quality is None else f"{self.forget_quality:.3g}"
        summary = [["model utility", f"{self.model_utility:.3f}"], ["forget quality", quality]]
        return "\n".join([*aligned(rows), "", *aligned(summary)])


_SETS = ("forget", "retain", "real_authors", "world_facts")
_WITH_OPTIONS = ("real_authors", "world_facts")


def load_tofu(path_or_hub_name: str | os.PathLike[str], split: str = "forget10") -> TofuData:
    """Reads TOFU's evaluation sets.

    Args:
        path_or_hub_name (`str`):
            `"locuslab/TOFU"`, which needs `datasets` and a network, or a folder with the files `<split>_perturbed`,
            `retain_perturbed`, `real_authors_perturbed` and `world_facts_perturbed` as `.json`, `.jsonl` or `.parquet`.
        split (`str`): What was forgotten: `"forget01"`, `"forget05"` or `"forget10"`.

    Returns:
        `TofuData`: The four sets.

    Raises:
        `FileNotFoundError`: The folder, or a set in it, is missing.
        `ValueError`: A row lacks `question`, `answer`, `perturbed_answer` or, of fictitious authors, `paraphrased_answer`.
    """
    sets = {}
    for name in _SETS:
        columns = ["question", "answer", "perturbed_answer"]
        if name not in _WITH_OPTIONS:
            columns.append("paraphrased_answer")
        rows = benchmark_rows(path_or_hub_name, f"{split if name == 'forget' else name}_perturbed", "train", columns)
        sets[name] = [
            Probe(
                prompt=[{"role": "user", "content": row["question"]}],
                answer=row["answer"],
                wrong=tuple(row["perturbed_answer"]),
                # real authors and world facts are compared with the answer itself
                paraphrase=None if name in _WITH_OPTIONS else row["paraphrased_answer"],
            )
            for row in rows
        ]
    return TofuData(**sets)


def tofu_metrics(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: TofuData,
    reference: nn.Module | None = None,
    *,
    batch_size: int = 16,
    max_new_tokens: int = 200,
) -> TofuMetrics:
    """TOFU's metrics of a model.

    Args:
        model (`nn.Module`): The model that was made to forget, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer. Without a chat template questions are asked as `Question: ...\\nAnswer: ...`.
        data (`TofuData`): From `load_tofu`.
        reference (`nn.Module`, *optional*):
            A model that never saw what was forgotten (trained on the retain set only), for the forget quality.
        batch_size (`int`): Sequences a batch.
        max_new_tokens (`int`): Length of a greedy answer.

    Returns:
        `TofuMetrics`: See there.

    Raises:
        `ValueError`: `reference` is the model itself or the one under its adapter, or a set is empty.
        `ImportError`: `rouge-score` is missing, or `scipy`, which the forget quality needs.
    """
    if reference is not None:
        check_reference(model, reference)
    ks_2samp = _ks_2samp() if reference is not None else None
    rouge_l = rouge_l_scorer("recall", use_stemmer=True)
    groups = {}
    for name in _SETS:
        probes = getattr(data, name)
        if not probes or not all(probe.wrong for probe in probes):
            raise ValueError(
                f"`data.{name}` is empty or has probes without `wrong` answers. Load it with `load_tofu`."
            )
        groups[name] = ProbeGroup(tokenizer, [_askable(probe, tokenizer) for probe in probes], f"data.{name}")

    scores, ratios = {}, {}
    with evaluating(model):
        for name, group in logging.tqdm(groups.items(), desc="TOFU"):
            compared = group.compared_scores(model, batch_size)
            ratios[name] = [truth_ratio(right, wrong) for right, *wrong in compared]
            if name in _WITH_OPTIONS:
                probabilities = [_share(right, wrong) for right, *wrong in compared]
            else:
                probabilities = [math.exp(-score.nll) for score in score_encoded(model, group.encoded, batch_size)]
            written = group.greedy(model, tokenizer, max_new_tokens, batch_size)
            scores[name] = TofuScores(
                probability=statistics.fmean(probabilities),
                rouge_l=statistics.fmean(rouge_l(group.reference(i), text) for i, text in enumerate(written)),
                truth_ratio=statistics.fmean(
                    _closeness_to_one(ratio) if name == "forget" else max(0.0, 1 - ratio) for ratio in ratios[name]
                ),
            )
    quality = None
    if reference is not None and ks_2samp is not None:
        with evaluating(reference):
            compared = groups["forget"].compared_scores(reference, batch_size)
        unaware = [truth_ratio(right, wrong) for right, *wrong in compared]
        quality = float(ks_2samp(ratios["forget"], unaware).pvalue)
    nine = [value for name in _SETS[1:] for value in asdict(scores[name]).values()]
    return TofuMetrics(**scores, model_utility=harmonic_mean(nine), forget_quality=quality)


def _askable(probe: Probe, tokenizer: PreTrainedTokenizerBase) -> Probe:
    """The probe as it is, or, for a tokenizer without a chat template, as a text that goes on with the answer."""
    if getattr(tokenizer, "chat_template", None):
        return probe
    question = probe.prompt[-1]["content"] if isinstance(probe.prompt, list) else probe.prompt
    return replace(probe, prompt="", prefix=f"Question: {question}\nAnswer:")


def _share(right: ProbeScore, wrong: Sequence[ProbeScore]) -> float:
    """`p(right)^(1/|right|)` as a share of the sum over all options."""
    return 1 / (1 + sum(exp_or_inf(right.nll - score.nll) for score in wrong))


def _closeness_to_one(ratio: float) -> float:
    return min(ratio, 1 / ratio) if ratio > 0 else 0.0


def _ks_2samp() -> Any:
    try:
        return importlib.import_module("scipy.stats").ks_2samp
    except ImportError as error:
        raise ImportError(
            "The forget quality needs `scipy`: pip install 'engram-adapters[evaluation]'. Without `reference` it is left out."
        ) from error
