"""Questions whose answers are looked for in a model, and how likely it finds those answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..editing.collection import evaluating
from ..editing.encoding import Item, Message, tokenize_item
from ..editing.likelihood import Likelihood, token_likelihoods


@dataclass(frozen=True)
class Probe:
    """One question whose answer is looked for.

    The whole answer reads `prefix answer suffix`; only `answer` is scored by probability. It is tokenized together with what
    surrounds it, as a model would write it.

    **Attributes**:
        - **prompt** (`str` or `list[dict[str, str]]`) -- A text, chat messages that end with the user's (rendered with the
          tokenizer's chat template), or `""`: then the whole answer is plain text, and `prefix` is where it starts (a cloze).
        - **answer** (`str`) -- What is scored, such as `"Tokyo"`.
        - **prefix** (`str`) -- The answer's beginning, which is given: `"The capital of Japan is"`. A blank is put between it
          and `answer` if neither side has one.
        - **suffix** (`str`) -- The answer's end, such as `"."`.
        - **wrong** (`tuple[str, ...]`) -- Wrong answers of the same form, each in the place of `answer`, for the truth ratio.
        - **paraphrase** (`str`, *optional*) -- The right answer in other words, in the place of `answer`, for the truth
          ratio; `answer` itself by default.
        - **name** (`str`, *optional*) -- What reports call it.
    """

    prompt: str | list[Message]
    answer: str
    prefix: str = ""
    suffix: str = ""
    wrong: tuple[str, ...] = ()
    paraphrase: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for field in ("answer", "prefix", "suffix"):
            _check_text(getattr(self, field), field)
        for field in ("paraphrase", "name"):
            if getattr(self, field) is not None:
                _check_text(getattr(self, field), field)
        if not isinstance(self.wrong, tuple | list) or not all(isinstance(answer, str) for answer in self.wrong):
            raise ValueError(f"`wrong` must be a tuple of strings, got a {type(self.wrong).__name__}.")
        object.__setattr__(self, "wrong", tuple(self.wrong))
        if isinstance(self.prompt, list):
            if not all(isinstance(part, dict) and {"role", "content"} <= set(part) for part in self.prompt):
                raise ValueError("`prompt` must be a string or chat messages: dictionaries with `role` and `content`.")
        else:
            _check_text(self.prompt, "prompt")

    @property
    def text(self) -> str:
        """The whole answer."""
        return self.given + self.answer + self.suffix

    @property
    def given(self) -> str:
        """What of the whole answer comes before `answer`."""
        apart = not self.prefix or self.prefix[-1].isspace() or self.answer[:1].isspace()
        return self.prefix if apart else self.prefix + " "


def _check_text(value: object, field: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"`{field}` must be a string, got {type(value).__name__}.")


@dataclass(frozen=True)
class ProbeScore:
    """What a model makes of one probe. Texts, the model's own included, are not kept.

    **Attributes**:
        - **log_probability** (`float`) -- Natural logarithm of the probability of the whole `answer`.
        - **rank** (`int`) -- The largest rank of its tokens: 0 means that every one of them is the greedy choice.
        - **tokens** (`int`) -- How many tokens `answer` has.
        - **name** (`str`, *optional*) -- The probe's.
        - **truth_ratio** (`float`, *optional*) -- See `truth_ratio`. `evaluate` sets this and what follows.
        - **rouge_l** (`float`, *optional*) -- ROUGE-L recall of the greedy generation against the whole answer.
        - **leaked** (`bool`, *optional*) -- Whether the greedy generation contains `answer`.
        - **leaked_sampled** (`bool`, *optional*) -- Whether any of the sampled generations does.
    """

    log_probability: float
    rank: int
    tokens: int
    name: str | None = None
    truth_ratio: float | None = None
    rouge_l: float | None = None
    leaked: bool | None = None
    leaked_sampled: bool | None = None

    @property
    def probability(self) -> float:
        """Probability of the whole `answer`: the product over its tokens."""
        return math.exp(self.log_probability)

    @property
    def nll(self) -> float:
        """Negative log-likelihood, the mean over the tokens of `answer`, in nats."""
        return -self.log_probability / self.tokens

    @property
    def named(self) -> bool:
        """Whether greedy decoding, given the prompt and `prefix`, writes `answer`."""
        return self.rank == 0


def score_probes(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, probes: Sequence[Probe], batch_size: int = 16
) -> list[ProbeScore]:
    """How likely a model finds the answers of probes, teacher-forced: given the prompt and the answer's `prefix`.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one. It is in eval mode for the time.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        probes (`Sequence[Probe]`): What to look for.
        batch_size (`int`): Sequences a batch.

    Returns:
        `list[ProbeScore]`: In the order of `probes`.

    Raises:
        `ValueError`: Before work starts: a probe is empty, its answer has no tokens of its own, or its chat cannot be
            rendered. Later: the model returns NaN.
    """
    encoded = encode_probes(tokenizer, probes, "probes")
    with evaluating(model):
        return score_encoded(model, encoded, batch_size)


@dataclass(frozen=True)
class EncodedProbe:
    """A probe as token ids: those at `scored` are the answer's; `prompt_ids` are what a model goes on from freely."""

    input_ids: list[int]
    scored: list[int]
    prompt_ids: list[int]
    name: str | None


def encode_probes(tokenizer: PreTrainedTokenizerBase, probes: Sequence[Probe], where: str) -> list[EncodedProbe]:
    """Encodes every probe; errors call the one at `i` `where[i]`."""
    return [encode_probe(tokenizer, probe, f"{where}[{i}]") for i, probe in enumerate(probes)]


def encode_probe(tokenizer: PreTrainedTokenizerBase, probe: Probe, where: str) -> EncodedProbe:
    """Tokenizes a probe and finds the tokens that overlap the characters of its answer.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        probe (`Probe`): The probe.
        where (`str`): How errors call it.

    Raises:
        `ValueError`: The answer is empty, has no token of its own, or nothing is before its first token.
    """
    if not probe.answer.strip():
        raise ValueError(f"`{where}` has an empty `answer`. Set it to what the model is to be asked for.")
    if not probe.prompt and not probe.prefix.strip():
        raise ValueError(
            f"`{where}` has neither `prompt` nor `prefix`, so nothing asks for its answer. Set one of them."
        )
    tokens = tokenize_item(tokenizer, _item_of(probe), f"`{where}`")
    # blanks around the answer belong to no side: some tokenizers make tokens of their own of them
    begin = len(probe.given) + len(probe.answer) - len(probe.answer.lstrip())
    end = begin + len(probe.answer.strip())
    scored = [tokens.start + i for i, (first, last) in enumerate(tokens.offsets) if first < end and last > begin]
    if not scored:
        raise ValueError(f"The `answer` of `{where}` has no token of its own: the tokenizer drops it. Reword it.")
    if scored[0] == 0:
        raise ValueError(
            f"The `answer` of `{where}` holds the first token of all, which no model can predict. Give it a longer `prefix`."
        )
    prompt_ids = tokens.input_ids[: tokens.start] if probe.prompt else tokenize_item(tokenizer, probe.prefix).input_ids
    return EncodedProbe(tokens.input_ids, scored, prompt_ids, probe.name)


def _item_of(probe: Probe) -> Item:
    if not probe.prompt:
        return probe.text
    if isinstance(probe.prompt, str):
        return probe.prompt, probe.text
    return [*probe.prompt, {"role": "assistant", "content": probe.text}]


def score_encoded(model: nn.Module, encoded: Sequence[EncodedProbe], batch_size: int) -> list[ProbeScore]:
    """`score_probes` of probes that are encoded, by a model that is in eval mode."""
    likelihoods = token_likelihoods(model, [(probe.input_ids, probe.scored[0]) for probe in encoded], batch_size)
    check_not_nan(likelihoods)
    scores = []
    for probe, likelihood in zip(encoded, likelihoods, strict=True):
        own = [position - probe.scored[0] for position in probe.scored]
        log_probability = float(likelihood.log_probabilities[own].double().sum())
        scores.append(ProbeScore(log_probability, int(likelihood.ranks[own].max()), len(own), probe.name))
    return scores


def check_not_nan(likelihoods: Sequence[Likelihood]) -> None:
    """Raises a `ValueError` if a model returned NaN: no token ranks before NaN, so every answer would count as named."""
    if any(bool(likelihood.log_probabilities.isnan().any()) for likelihood in likelihoods):
        raise ValueError(
            "The model returns NaN, so there is nothing to measure. Check its weights, weaken the edit, or use a wider dtype."
        )


def alternatives(probe: Probe) -> list[Probe]:
    """The probes that a truth ratio compares: first the right answer, then the wrong ones; none without wrong ones."""
    if not probe.wrong:
        return []
    right = probe.answer if probe.paraphrase is None else probe.paraphrase
    return [replace(probe, answer=answer) for answer in (right, *probe.wrong)]


def truth_ratio(right: ProbeScore, wrong: Sequence[ProbeScore]) -> float:
    """How much likelier a model finds wrong answers than the right one: 0 if it knows, about 1 if it has no idea.

    `p(wrong)^(1/|wrong|)`, averaged over the wrong answers, divided by `p(right)^(1/|right|)`, where `|.|` counts tokens (TOFU,
    arXiv 2401.06121, section 2.2). The average is the geometric one, as in the official code, which all published
    numbers come from; the paper prints the arithmetic one.
    """
    return exp_or_inf(right.nll - sum(score.nll for score in wrong) / len(wrong))


def exp_or_inf(exponent: float) -> float:
    """`exp`, infinite where a float cannot hold it."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
