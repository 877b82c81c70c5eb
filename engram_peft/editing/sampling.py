"""Texts that a model writes of its own accord: what it knows, where there is no data to say what is to be kept.

A model without a chat template starts from nothing but its first token. A chat model is given the template up to the place of
the user's message and writes the question itself, and then the answer to it (Magpie, arXiv 2406.08464, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from .collection import evaluating
from .encoding import Item, Message, tokenize_prompt
from .selection import unwrap
from .weights import input_device


logger = logging.get_logger(__name__)

Prompt = str | list[Message]

# How many texts are sampled at most for each one that is asked for: some are empty, or there already.
ATTEMPTS = 4
# Stands for the user's message, to find its place in a chat template: nothing that a template would strip or escape.
_MESSAGE = "EngramUserMessage"


def sample_texts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    prompts: Sequence[Prompt] | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int = 8,
    seed: int = 0,
) -> list[Item]:
    """Samples distinct texts from a model, in the form in which `collect_statistics` and `unlearn` take data.

    The model, the tokenizer and the caller's random state are left as they were. Adapters that are active take part: for what
    the base model says, sample with adapters disabled.

    Args:
        model (`nn.Module`): A causal language model of transformers, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer. If it has a chat template, the model writes chats.
        count (`int`): How many texts.
        prompts (`Sequence`, *optional*):
            What the model answers, in place of questions of its own: `str`, which it goes on from as it is, or lists of chat
            messages, which go through the tokenizer's template. They are repeated until there are `count` different texts.
        max_new_tokens (`int`): How long a text, or each question and answer, is at most.
        temperature (`float`): 1 is the model's own distribution, less makes likely tokens likelier.
        top_p (`float`): Tokens are sampled from the likeliest ones that together have this probability.
        batch_size (`int`): Texts a batch.
        seed (`int`): The same seed gives the same texts.

    Returns:
        `list[Item]`: Plain texts, or chats of a question and an answer if the tokenizer has a chat template. For `prompts`
        `(prompt, answer)` pairs, or the chats with the answers. Fewer than `count`, with a warning, if the model repeats itself.

    Raises:
        `ValueError`: An argument is out of its range, the tokenizer gives the model nothing to start from, or the model writes
            nothing.
        `TypeError`: The model cannot generate.
    """
    _check_ranges(count, prompts, max_new_tokens, temperature, top_p, batch_size)
    base = unwrap(model)
    if not hasattr(base, "generate"):
        raise TypeError(
            f"{type(base).__name__} cannot generate. `model` must be a causal language model of transformers."
        )
    writer = _Writer(base, tokenizer, max_new_tokens, temperature, top_p)
    sample = _sampler(writer, tokenizer, prompts)
    found: dict[str, Item] = {}
    tried = 0
    progress = logging.tqdm(total=count, desc="Sampling texts")
    with torch.no_grad(), evaluating(base), _seeded(base, seed), progress:
        while len(found) < count and tried < ATTEMPTS * count:
            size = min(batch_size, count - len(found), ATTEMPTS * count - tried)
            tried += size
            before = len(found)
            for item in sample(size):
                found.setdefault(str(item), item)
            progress.update(len(found) - before)
    if not found:
        raise ValueError(
            f"The model wrote nothing in {tried} attempts. Pass `prompts`, or texts of your own in place of sampled ones."
        )
    if len(found) < count:
        logger.warning(
            f"The model wrote {len(found)} different texts in {tried} attempts, not {count}. Raise `temperature` or pass more "
            "`prompts`."
        )
    return list(found.values())


def _check_ranges(
    count: int,
    prompts: Sequence[Prompt] | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    batch_size: int,
) -> None:
    for name, number in (("count", count), ("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}.")
    if not temperature > 0:
        raise ValueError(f"`temperature` must be above 0, got {temperature}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be in (0, 1], got {top_p}.")
    if prompts is not None and (isinstance(prompts, str) or not len(prompts)):
        raise ValueError(f"`prompts` must be a sequence of at least one prompt, got {prompts!r}.")


class _Writer:
    """How the model goes on from prompts, up to the first special token."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        eos = model.generation_config.eos_token_id
        self.stops = {*tokenizer.all_special_ids, *(eos if isinstance(eos, list) else [] if eos is None else [eos])}
        self.pad = next((i for i in (tokenizer.pad_token_id, *sorted(self.stops)) if i is not None), 0)
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=True, temperature=float(temperature), top_p=float(top_p),
            eos_token_id=sorted(self.stops) or None, pad_token_id=self.pad,
            # what is not set comes from the model's own configuration
            top_k=0, num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0,
        )  # fmt: skip

    def __call__(self, prompts: Sequence[list[int]]) -> list[str]:
        """One text for each prompt of token ids, without special tokens."""
        if not prompts:
            return []
        length = max(len(prompt) for prompt in prompts)
        # padded on the left, so that what is written follows the prompt
        padding = torch.tensor([length - len(prompt) for prompt in prompts])
        input_ids = torch.tensor([[self.pad] * (length - len(prompt)) + prompt for prompt in prompts])
        attention_mask = (torch.arange(length) >= padding[:, None]).long()
        device = input_device(self.model)
        written = self.model.generate(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=self.config
        )
        texts = []
        for ids in written[:, length:].tolist():
            end = next((i for i, token in enumerate(ids) if token in self.stops), len(ids))
            texts.append(self.tokenizer.decode(ids[:end]))
        return texts


def _sampler(
    write: _Writer, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt] | None
) -> Callable[[int], list[Item]]:
    """A function that samples a number of items, without those that are empty."""
    if prompts is not None:
        repeated = cycle(prompts)
        return lambda size: _answered(write, tokenizer, list(islice(repeated, size)))
    if getattr(tokenizer, "chat_template", None):
        before, after = _around_message(tokenizer)
        return lambda size: _chats(write, tokenizer, before, after, size)
    first = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
    if first is None:
        raise ValueError(
            "The tokenizer has neither a first nor a last token for the model to start from. Pass `prompts`."
        )
    return lambda size: _plain_texts(write, tokenizer, first, size)


def _plain_texts(write: _Writer, tokenizer: PreTrainedTokenizerBase, first: int, size: int) -> list[Item]:
    texts = [text.strip() for text in write([[first]] * size)]
    # no row of a single token predicts another one
    return [text for text in texts if len(tokenizer(text, add_special_tokens=False)["input_ids"]) > 1]


def _answered(write: _Writer, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[Item]:
    """The prompts with the answers to them."""
    rendered = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    items: list[Item] = []
    for prompt, answer in zip(prompts, write([tokenize_prompt(tokenizer, text) for text in rendered]), strict=True):
        if not answer.strip():
            continue
        if isinstance(prompt, str):
            items.append((prompt, answer))
        else:
            items.append([*prompt, {"role": "assistant", "content": answer.strip()}])
    return items


def _chats(write: _Writer, tokenizer: PreTrainedTokenizerBase, before: str, after: str, size: int) -> list[Item]:
    written = write([tokenize_prompt(tokenizer, before)] * size)
    # in some templates the end of the message is written out, not a special token
    questions = [(text.partition(after)[0] if after else text).strip() for text in written]
    return _answered(write, tokenizer, [[{"role": "user", "content": question}] for question in questions if question])


def _around_message(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts before a user's first message, and the first word that follows it."""
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MESSAGE}], tokenize=False)
    before, found, after = rendered.partition(_MESSAGE)
    if not found:
        raise ValueError("The tokenizer's chat template does not show the user's message. Pass `prompts`.")
    # a blank before a word is part of the word's token
    return before.rstrip(" "), next(iter(after.split()), "")


@contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Random numbers from `seed` on where the model is, for the time being, and nothing changed elsewhere."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        # `torch.manual_seed` would also reach devices that are not restored
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
