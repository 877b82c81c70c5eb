"""What a model writes of its own accord, and how much of an answer is in it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..editing.selection import unwrap
from ..editing.weights import input_device


@torch.inference_mode()
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
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    config = _generation_config(model, tokenizer, max_new_tokens, do_sample=False)
    for chosen in (order[i : i + batch_size] for i in range(0, len(order), batch_size)):
        written = _generate(model, tokenizer, [prompts[i] for i in chosen], config)
        for i, text in zip(chosen, written, strict=True):
            texts[i] = text
    return texts


@torch.inference_mode()
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
    with _seeded(model, seed):
        return _generate(model, tokenizer, [prompt], config)


def _generation_config(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, **options: float
) -> GenerationConfig:
    """Plain decoding: what is not set here would come from the model's own configuration, penalties included."""
    base: Any = unwrap(model)
    eos = base.generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    neutral = {"num_beams": 1, "top_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    if not options["do_sample"]:
        neutral |= {"temperature": 1.0, "top_k": 50}  # transformers' own defaults, unused: others would be warned of
    return GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=pad, **neutral, **options)


def _generate(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], config: GenerationConfig
) -> list[str]:
    device = input_device(model)
    length = max(len(prompt) for prompt in prompts)
    padding = [length - len(prompt) for prompt in prompts]  # on the left: what is written follows the prompt directly
    input_ids = torch.tensor([[config.pad_token_id] * n + ids for n, ids in zip(padding, prompts, strict=True)])
    attention_mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
    writer: Any = model if hasattr(model, "generate") else unwrap(model)
    written = writer.generate(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=config
    )
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    texts = []
    for row in written[:, length:].tolist():
        end = next((i for i, token in enumerate(row) if token in stops), len(row))
        texts.append(tokenizer.decode(row[:end], skip_special_tokens=True))
    return texts


@contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Random numbers from `seed` on the model's devices for the time being, and nothing changed elsewhere."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # not `torch.manual_seed`, which would reach devices that are not restored
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


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
