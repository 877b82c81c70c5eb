"""How well a model predicts whole texts: perplexity, and telling texts it was trained on from texts it never saw."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..editing.collection import evaluating
from ..editing.encoding import Item, TokenizedItem, tokenize_item
from ..editing.likelihood import Likelihood, token_likelihoods
from .probes import check_not_nan, exp_or_inf


def perplexity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int = 512,
    batch_size: int = 8,
) -> float:
    """Perplexity of texts: `exp` of the mean negative log-likelihood of all their tokens but each text's first.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one. It is in eval mode for the time.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        texts (`Sequence[str]`): The texts; every token weighs the same, so long texts weigh more.
        max_length (`int`): Longer texts are cut on the right, in tokens.
        batch_size (`int`): Texts a batch.

    Returns:
        `float`: At least 1; infinite where it exceeds what a float holds.

    Raises:
        `ValueError`: Before work starts: there are no texts, or one has a single token. Later: the model returns NaN.
    """
    tokens = tokenize_texts(tokenizer, texts, "texts", max_length)
    with evaluating(model):
        return perplexity_of(text_likelihoods(model, tokens, batch_size))


def tokenize_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Item], where: str, max_length: int | None
) -> list[TokenizedItem]:
    """Tokenizes texts of which something can be predicted; errors call the one at `i` `where[i]`."""
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"`{where}` must be a sequence of at least one text.")
    tokens = [tokenize_item(tokenizer, text, f"`{where}[{i}]`", max_length) for i, text in enumerate(texts)]
    for i, item in enumerate(tokens):
        if len(item.input_ids) <= max(item.start, 1):
            raise ValueError(
                f"`{where}[{i}]` has a single token, so nothing of it can be predicted. Use a longer text."
            )
    return tokens


def text_likelihoods(model: nn.Module, tokens: Sequence[TokenizedItem], batch_size: int) -> list[Likelihood]:
    """Likelihoods of the tokens of plain texts, and of the answers' tokens of pairs and chats."""
    likelihoods = token_likelihoods(model, [(item.input_ids, item.start) for item in tokens], batch_size)
    check_not_nan(likelihoods)
    return likelihoods


def perplexity_of(likelihoods: Sequence[Likelihood]) -> float:
    """`exp` of the mean negative log-likelihood over all tokens."""
    total = sum(float(likelihood.log_probabilities.double().sum()) for likelihood in likelihoods)
    return exp_or_inf(-total / sum(len(likelihood.log_probabilities) for likelihood in likelihoods))


def min_k_score(likelihood: Likelihood, share: float) -> float:
    """Mean log-probability of the `share` of tokens that the model finds least likely, at least one of them.

    High for texts that the model was trained on, which hold few surprises (min-k% prob, arXiv 2310.16789, section 3).
    """
    count = max(1, int(share * len(likelihood.log_probabilities)))
    return float(likelihood.log_probabilities.topk(count, largest=False).values.double().mean())


def area_under_curve(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """The probability that a positive scores above a negative, ties counting one half: the area under the ROC curve.

    Args:
        positives (`Sequence[float]`): Scores that should be high.
        negatives (`Sequence[float]`): Scores that should be low.

    Returns:
        `float`: 1 if every positive is above every negative, 0.5 if nothing tells them apart.
    """
    ordered = sorted(negatives)
    doubled = sum(bisect_left(ordered, score) + bisect_right(ordered, score) for score in positives)
    return doubled / (2 * len(positives) * len(negatives))
