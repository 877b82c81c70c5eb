"""What a model writes of its own accord, and how much of an answer is in it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..editing.decoding import PLAIN, eos_token_ids, seeded, written_texts
from ..editing.encoding import by_length


@torch.no_grad()  # not inference mode, whose tensors FSDP2 would keep
def greedy_texts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """How a model in eval mode goes on after prompts, always by its likeliest token.

    Args:
        model (`nn.Module`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer; its padding side does not matter.
        prompts (`Sequence[list[int]]`): Token ids.
        max_new_tokens (`int`): Where to stop if the model does not.
        batch_size (`int`): Prompts a batch; those of similar length go together.

    Returns:
        `list[str]`: In the order of `prompts`, without special tokens.
    """
    texts = [""] * len(prompts)
    config = _generation_config(model, tokenizer, max_new_tokens, do_sample=False)
    for chosen in by_length(prompts, batch_size):
        written = written_texts(model, tokenizer, [prompts[i] for i in chosen], config, config.eos_token_id or ())
        for i, text in zip(chosen, written, strict=True):
            texts[i] = text
    return texts


@torch.no_grad()  # not inference mode, whose tensors FSDP2 would keep
def sampled_texts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    max_new_tokens: int,
    samples: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """`samples` ways in which a model in eval mode goes on after one prompt. The caller's random state stays as it is."""
    config = _generation_config(
        model,
        tokenizer,
        max_new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        num_return_sequences=samples,
    )
    with seeded(model, seed):
        return written_texts(model, tokenizer, [prompt], config, config.eos_token_id or ())


def _generation_config(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, **options: float
) -> GenerationConfig:
    eos = eos_token_ids(model) or [i for i in [tokenizer.eos_token_id] if i is not None]
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    if not options["do_sample"]:
        options |= {"temperature": 1.0, "top_k": 50}  # transformers' own defaults, unused: others would be warned of
    return GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=eos or None, pad_token_id=pad, top_p=1.0, **PLAIN, **options
    )


def contains_answer(text: str, answer: str) -> bool:
    """Whether a text has the answer as words of their own, whatever their case: "Fe" is not in "February".

    Only ASCII letters and digits continue a word, so that answers are found in scripts without blanks.
    """
    return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, re.ASCII | re.IGNORECASE) is not None


def rouge_l_scorer(measure: str, use_stemmer: bool) -> Callable[[str, str], float]:
    """A function of a reference and a text: how long their longest common subsequence of words is (ROUGE-L).

    Args:
        measure (`str`): `"recall"`, as a share of the reference, or `"fmeasure"`.
        use_stemmer (`bool`): Whether words of one stem are the same, as in TOFU, or not, as in MUSE.

    Raises:
        `ImportError`: The package `rouge_score` is missing.
    """
    try:
        rouge_scorer = importlib.import_module("rouge_score.rouge_scorer")  # an `import` would gain no types
    except ImportError as error:
        raise ImportError(
            "ROUGE needs the package `rouge-score`: pip install 'engram-adapters[evaluation]'. "
            "`evaluate(..., generate=False)` goes without."
        ) from error
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=use_stemmer)
    return lambda reference, text: float(getattr(scorer.score(reference, text)["rougeL"], measure))
