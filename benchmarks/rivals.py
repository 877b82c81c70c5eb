"""The methods that `forgetting.py` compares: other people's, each from its library or written here from its paper.

A method is a generator `sweep(model, tokenizer, forget, retain, general, settings, seed)` that yields `(setting, model)` for
every setting, in its own order; the model that it yields is good until the next one is asked for, and the model that it was
given is as before when it ends. `forget` and `retain` are `(prompt, answer)` pairs, `general` is plain text. What a setting
is depends on the method: a strength or a number of steps.

All that trains uses AdamW without weight decay on the whole batch of forgotten pairs, and ten kept pairs a step where the
method has a term for them. None of them is tuned further than its settings go: learning rates are the usual ones.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, softplus
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_peft.editing.encoding import tokenize_item


Pair = tuple[str, str]
Sweep = Callable[..., Iterator[tuple[float, nn.Module]]]

RETAIN_BATCH = 10
LEARNING_RATE = 1e-5  # full fine-tuning
REFUSAL = "I don't know."
IGNORANCE = " unknown."


@dataclass(frozen=True)
class Method:
    """A method under the name that tables and plots give it, and the settings that are tried, weakest first."""

    label: str
    setting: str
    sweep: Sweep
    settings: Sequence[float]


# ------------------------------------------------------------------------------------------------------ helpers


@contextmanager
def untouched(
    model: nn.Module, parameters: Sequence[nn.Parameter] | None = None
) -> Iterator[list[tuple[nn.Parameter, torch.Tensor]]]:
    """Whatever happens to the weights inside (those of `parameters`, if given), afterwards they are as before.

    Yields the parameters, each with its value from before.
    """
    required_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = [(p, p.detach().clone()) for p in (model.parameters() if parameters is None else parameters)]
    try:
        yield before
    finally:
        for parameter, value in before:
            parameter.data.copy_(value)
        for parameter, required in required_grad:
            parameter.grad = None
            parameter.requires_grad_(required)


class Answers:
    """Pairs as one padded batch, whose answers can be scored."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> None:
        items = [tokenize_item(tokenizer, pair) for pair in pairs]
        lengths = torch.tensor([len(item.input_ids) for item in items])
        self.starts = torch.tensor([item.start for item in items])
        self.input_ids = torch.zeros(len(items), int(lengths.max()), dtype=torch.long)
        for row, item in enumerate(items):
            self.input_ids[row, : lengths[row]] = torch.tensor(item.input_ids)
        positions = torch.arange(self.input_ids.shape[1])
        self.attention_mask = (positions < lengths[:, None]).long()
        self.counts = (positions >= self.starts[:, None]) & self.attention_mask.bool()

    def __len__(self) -> int:
        return len(self.input_ids)

    def some(self, rows: Sequence[int]) -> Answers:
        chosen = copy.copy(self)
        for name, value in vars(self).items():
            setattr(chosen, name, value[rows])
        return chosen

    def log_probabilities(self, model: nn.Module) -> torch.Tensor:
        """Of every answer as a whole: the sum over its tokens, `(pairs,)`."""
        logits, tokens, counts = self._scored(model)
        losses = cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
        return -(losses * counts).sum(1)

    def log_distributions(self, model: nn.Module) -> torch.Tensor:
        """What the model expects for every token of the answers, `(tokens, vocabulary)`."""
        logits, _, counts = self._scored(model)
        return logits[counts].log_softmax(-1)

    def _scored(self, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, the tokens that they predict, and whether those count, from the first that does."""
        first = int(self.starts.min())  # the head is a fifth of the work, and prompts are not scored
        kept = torch.arange(first - 1, self.input_ids.shape[1] - 1)
        output = model(
            input_ids=self.input_ids, attention_mask=self.attention_mask, logits_to_keep=kept, use_cache=False
        )
        return output.logits, self.input_ids[:, first:], self.counts[:, first:]

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Mean over the tokens of all answers."""
        return -self.log_probabilities(model).sum() / self.counts.sum()


def random_batches(answers: Answers, seed: int) -> Iterator[Answers]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield answers.some(torch.randperm(len(answers), generator=generator)[:RETAIN_BATCH].tolist())


def trained(
    parameters: Sequence[nn.Parameter],
    loss: Callable[[], torch.Tensor],
    settings: Sequence[float],
    learning_rate: float = LEARNING_RATE,
) -> Iterator[float]:
    """Takes steps against `loss`, and stops for every number of steps in `settings`."""
    optimiser = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0, fused=True)
    done = 0
    for setting in sorted(settings):
        for _ in range(done, int(setting)):
            optimiser.zero_grad()
            loss().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
        done = int(setting)
        yield setting


def fine_tuned(
    model: PreTrainedModel, loss: Callable[[], torch.Tensor], settings: Sequence[float]
) -> Iterator[tuple[float, nn.Module]]:
    """`trained`, for every weight of the model, and without lasting effect."""
    with untouched(model):
        model.requires_grad_(True)
        for setting in trained(list(model.parameters()), loss, settings):
            yield setting, model


# ------------------------------------------------------------------------------------------------------ ai-engram


def ai_engram_plain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """ai-engram as it is without options, on what the MLPs write: the layers where that does best."""
    from engram import count_ratio

    yield from _ai_engram(model, tokenizer, forget, [*retain, *general], settings, ["down_proj"], count_ratio())


def ai_engram_adaptive(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """ai-engram as its README recommends: every layer, in proportion to how much of it the engram takes."""
    from engram import compose, count_ratio, weight_norm

    scale = compose(count_ratio(), weight_norm())
    yield from _ai_engram(model, tokenizer, forget, [*retain, *general], settings, None, scale)


def _ai_engram(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    keep: Sequence[Pair | str],
    settings: Sequence[float],
    target_modules: list[str] | None,
    scale: Callable[..., dict[str, float]],
) -> Iterator[tuple[float, nn.Module]]:
    from engram import apply_engram, get_engram

    # It takes every pad token for padding, and the model's own pad token ends each turn of a chat.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = "<|endoftext|>"
    engram = get_engram(model, tokenizer, forget=forget, total=[*forget, *keep], target_modules=target_modules)
    for setting in settings:
        yield setting, apply_engram(model, engram, alpha=setting, scale=scale)


# ------------------------------------------------------------------------------------------------------ training


def gradient_ascent(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """Makes the forgotten answers less likely, and nothing else."""
    forgotten = Answers(tokenizer, forget)
    yield from fine_tuned(model, lambda: -forgotten.loss(model), settings)


def gradient_difference(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """Ascent on the forgotten answers and descent on the kept ones (GradDiff)."""
    forgotten, kept = Answers(tokenizer, forget), random_batches(Answers(tokenizer, retain), seed)
    yield from fine_tuned(model, lambda: next(kept).loss(model) - forgotten.loss(model), settings)


def negative_preference(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
    beta: float = 0.1,
) -> Iterator[tuple[float, nn.Module]]:
    """NPO (arXiv 2404.05868) with a retain term: ascent that slows down as an answer gets less likely than it was."""
    forgotten, kept = Answers(tokenizer, forget), random_batches(Answers(tokenizer, retain), seed)
    with torch.no_grad():
        before = forgotten.log_probabilities(model)

    def loss() -> torch.Tensor:
        preference = 2 / beta * softplus(beta * (forgotten.log_probabilities(model) - before)).mean()
        return preference + next(kept).loss(model)

    yield from fine_tuned(model, loss, settings)


def task_vector(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
    steps: int = 10,
) -> Iterator[tuple[float, nn.Module]]:
    """Task-vector negation (arXiv 2212.04089): learns the forgotten facts better, then goes the other way."""
    forgotten = Answers(tokenizer, forget)
    with untouched(model) as before:
        for _ in fine_tuned(model, lambda: forgotten.loss(model), [steps]):
            learnt = [parameter.detach() - value for parameter, value in before]
        for setting in settings:
            for (parameter, value), direction in zip(before, learnt, strict=True):
                parameter.data.copy_(value - setting * direction)
            yield setting, model


def refusal_lora(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """A LoRA that learns to say that it does not know, and to go on answering what is kept."""
    from peft import LoraConfig, get_peft_model

    refused = Answers(tokenizer, [(prompt, REFUSAL) for prompt, _ in forget])
    kept = random_batches(Answers(tokenizer, retain), seed)
    torch.manual_seed(seed)  # LoRA's first factor is random
    with untouched(model, []):
        lora = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        try:
            parameters = [parameter for parameter in lora.parameters() if parameter.requires_grad]
            loss = lambda: refused.loss(lora) + next(kept).loss(lora)  # noqa: E731
            for setting in trained(parameters, loss, settings, learning_rate=2e-4):
                yield setting, lora.eval()
        finally:
            lora.unload()


# ------------------------------------------------------------------------------------------------------ MEMIT

MEMIT_LAYERS = range(4, 9)  # early ones, about where the paper edits GPT-J; the last one's output is aimed at
MEMIT_STEPS = 20


def memit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """MEMIT (arXiv 2210.07229): writes ignorance over the facts, where the MLPs look up their subjects.

    A setting is the weight of what is kept against the new associations (the paper's lambda).
    """
    requests, essences = ignorance(tokenizer, forget)
    layers = [model.model.layers[i] for i in MEMIT_LAYERS]
    modules = [layer.mlp.down_proj for layer in layers]
    with untouched(model, [module.weight for module in modules]) as before:
        model.requires_grad_(False)
        moments = input_moments(model, tokenizer, modules, [*(prompt + answer for prompt, answer in retain), *general])
        aims = requests.outputs(model, layers[-1]) + ignorant_shift(model, layers[-1], requests, essences)
        for setting in settings:
            for i, module in enumerate(modules):
                missing = (aims - requests.outputs(model, layers[-1])) / (len(modules) - i)
                keys = requests.inputs(model, module)
                spread = torch.linalg.solve(setting * moments[i] + keys.T @ keys, keys.T)
                module.weight.data += (spread @ missing).T
            yield setting, model
            for parameter, value in before:
                parameter.data.copy_(value)


class Requests(Answers):
    """Texts that name a subject, each with what is to follow it; and where in them the subjects end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], subjects: Sequence[str]) -> None:
        super().__init__(tokenizer, pairs)
        self.ends = torch.tensor([_last_token(tokenizer, p, s) for (p, _), s in zip(pairs, subjects, strict=True)])

    @torch.no_grad()
    def outputs(self, model: PreTrainedModel, module: nn.Module) -> torch.Tensor:
        """What a module says at the subjects' last tokens, `(requests, width)`."""
        seen = []
        with module.register_forward_hook(lambda _, inputs, output: seen.append(self._at_ends(output))):
            model.base_model(input_ids=self.input_ids, attention_mask=self.attention_mask, use_cache=False)
        return seen[0]

    @torch.no_grad()
    def inputs(self, model: PreTrainedModel, module: nn.Module) -> torch.Tensor:
        """What a module is told at the subjects' last tokens, `(requests, width)`."""
        seen = []
        with module.register_forward_pre_hook(lambda _, inputs: seen.append(self._at_ends(inputs[0]))):
            model.base_model(input_ids=self.input_ids, attention_mask=self.attention_mask, use_cache=False)
        return seen[0]

    def _at_ends(self, states: torch.Tensor) -> torch.Tensor:
        return states[torch.arange(len(self)), self.ends]

    def shifted(self, module: nn.Module, shift: torch.Tensor) -> RemovableHandle:
        """Adds `shift`, `(requests, width)`, to what a module says at the subjects' last tokens, until the context ends."""
        here = torch.zeros(*self.input_ids.shape, 1)
        here[torch.arange(len(self)), self.ends] = 1.0
        return module.register_forward_hook(lambda _, inputs, output: output + here * shift[:, None])


def _last_token(tokenizer: PreTrainedTokenizerBase, text: str, subject: str) -> int:
    """Index of the token that a text's last mention of a subject ends with."""
    end = text.rindex(subject) + len(subject)
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return next(i for i, (first, last) in enumerate(offsets) if first < end <= last)


def ignorance(tokenizer: PreTrainedTokenizerBase, forget: Sequence[Pair]) -> tuple[Requests, Requests]:
    """What MEMIT is asked to write, and texts whose continuation is not to change, one for every request.

    A fact is requested twice: the question is to be answered by a refusal, and the statement is to end in ignorance.
    """
    prompts, answers = (list(texts) for texts in zip(*forget, strict=True))
    subjects = varying_parts(prompts)
    objects = varying_parts([answer.replace(s, "") for answer, s in zip(answers, subjects, strict=True)])
    statements = [answer[: answer.rindex(o)].rstrip() for answer, o in zip(answers, objects, strict=True)]
    pairs = [(prompt, REFUSAL) for prompt in prompts] + [(statement, IGNORANCE) for statement in statements]
    essences = [(f"{subject} is", " a") for subject in subjects]
    return Requests(tokenizer, pairs, subjects * 2), Requests(tokenizer, essences * 2, subjects * 2)


def varying_parts(texts: Sequence[str]) -> list[str]:
    """What is left of every text without the words that all of them begin and end with."""
    words = [re.findall(r"\w+|\W", text) for text in texts]

    def shared(columns: Iterable[tuple[str, ...]]) -> int:
        return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns)))

    first = shared(zip(*words, strict=False))
    last = shared(zip(*(reversed(text) for text in words), strict=False))
    return ["".join(text[first : len(text) - last]) for text in words]


def input_moments(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, modules: Sequence[nn.Linear], texts: Sequence[str]
) -> list[torch.Tensor]:
    """For every module, the mean of `x x^T` over the tokens of texts, `(in, in)`."""
    moments = [torch.zeros(module.in_features, module.in_features) for module in modules]
    tokens = 0

    def add(moment: torch.Tensor, states: torch.Tensor) -> None:
        rows = states.flatten(0, -2)
        moment += rows.T @ rows

    with ExitStack() as hooks, torch.no_grad():
        for module, moment in zip(modules, moments, strict=True):
            see = lambda _, inputs, moment=moment: add(moment, inputs[0])  # noqa: E731
            hooks.enter_context(module.register_forward_pre_hook(see))
        for text in texts:
            input_ids = tokenizer(text, return_tensors="pt")["input_ids"]
            model.base_model(input_ids=input_ids, use_cache=False)
            tokens += input_ids.numel()
    return [moment / tokens for moment in moments]


def ignorant_shift(model: PreTrainedModel, layer: nn.Module, requests: Requests, essences: Requests) -> torch.Tensor:
    """What must be added to a layer's output at the subjects for the requests to come true, `(requests, width)`.

    Constants are the paper's for GPT-J.
    """
    norms = requests.outputs(model, layer).norm(dim=1)
    with torch.no_grad():
        before = essences.log_distributions(model)
    shift = torch.zeros(len(requests), model.config.hidden_size, requires_grad=True)
    optimiser = torch.optim.Adam([shift], lr=0.5)
    for _ in range(MEMIT_STEPS):
        optimiser.zero_grad()
        with requests.shifted(layer, shift):
            unlikeliness = -requests.log_probabilities(model) / requests.counts.sum(1)
        with essences.shifted(layer, shift):
            drift = kl_div(before, essences.log_distributions(model), log_target=True, reduction="none").sum(1)
        (unlikeliness + 0.0625 * drift + 0.5 * shift.norm(dim=1) / norms**2).sum().backward()
        optimiser.step()
        with torch.no_grad():
            shift *= (0.75 * norms / shift.norm(dim=1)).clamp(max=1.0)[:, None]
    return shift.detach()


RIVALS = {
    "ai_engram": Method("ai-engram 0.11.0, plain", "alpha", ai_engram_plain, (0.5, 0.65, 0.75, 0.85)),
    "ai_engram_adaptive": Method("ai-engram 0.11.0, adaptive", "alpha", ai_engram_adaptive, (0.4, 0.5, 0.6, 0.75)),
    "ga": Method("gradient ascent", "steps", gradient_ascent, (2, 3, 4, 6)),
    "graddiff": Method("GradDiff", "steps", gradient_difference, (6, 8, 10, 12)),
    "npo": Method("NPO", "steps", negative_preference, (3, 4, 5, 6)),
    "task_vector": Method("task-vector negation", "multiple", task_vector, (0.25, 0.5, 0.75, 1.0)),
    "memit": Method("MEMIT", "lambda", memit, (60000, 30000, 15000, 5000)),
    "refusal_lora": Method("refusal LoRA", "steps", refusal_lora, (8, 16, 32)),
}
