"""Two other ways to choose the layers of an edit by evidence, beside the effect for the damage that `layers="auto"` goes by.

For `recipe_search.py`: which of the upper half of SmolLM2's layers should forget?
"""

from __future__ import annotations

from typing import Any

import torch
from forgetting_data import Task

from engram_peft import EngramConfig, unlearn
from engram_peft.editing.encoding import tokenize_item
from engram_peft.editing.items import forget_items
from engram_peft.editing.likelihood import token_likelihoods


UPPER_HALF = range(15, 30)
COUNT = 5
# Three times the embeddings' standard deviation, as in ROME (arXiv 2202.05262, section 2.1).
NOISE = 3.0


def layers_by_eigenvalues(model: Any, tokenizer: Any, task: Task) -> list[int]:
    """The layers whose inputs at the predicting rows are the target's own: the largest sums of generalised eigenvalues."""
    config = EngramConfig.paper(
        task_type="CAUSAL_LM", target_modules=["down_proj"], layers_to_transform=list(UPPER_HALF)
    )
    edited = unlearn(model, tokenizer, task.forget, [*task.retain, *task.general], config, token_position="predict")
    shares = {
        int(name.split(".")[-3]): float(found.eigenvalues.sum())
        for name, found in edited.base_model.reports["default"].layers.items()
    }
    edited.unload()
    return best(shares)


@torch.no_grad()
def layers_by_causal_trace(model: Any, tokenizer: Any, task: Task) -> list[int]:
    """The layers whose MLP, put back as it was at every token, brings most of the answer back after the question was blurred."""
    kept = [tokenize_item(tokenizer, pair) for pair in task.retain]
    _, texts = forget_items(tokenizer, task.forget, kept, 512)
    embedding = model.get_input_embeddings()
    noise = NOISE * float(embedding.weight.std())
    effects = dict.fromkeys(UPPER_HALF, 0.0)
    for number, text in enumerate(texts):
        sequence = [(text.tokens.input_ids, text.secret[0])]
        written: dict[int, torch.Tensor] = {}
        handles = [
            model.model.layers[i].mlp.register_forward_hook(
                lambda module, args, output, i=i, written=written: written.__setitem__(i, output.clone())
            )
            for i in UPPER_HALF
        ]
        token_likelihoods(model, sequence)
        for handle in handles:
            handle.remove()

        def blur(
            module: Any, args: Any, output: torch.Tensor, seed: int = number, end: int = text.tokens.start
        ) -> Any:
            blurred = output.clone()
            generator = torch.Generator().manual_seed(seed)
            blurred[:, :end] += noise * torch.randn(blurred[:, :end].shape, generator=generator)
            return blurred

        handle = embedding.register_forward_hook(blur)
        blurred = token_likelihoods(model, sequence)[0].log_probabilities[0].exp()
        for i in UPPER_HALF:
            restore = model.model.layers[i].mlp.register_forward_hook(
                lambda module, args, output, i=i, written=written: written[i]
            )
            effects[i] += float(token_likelihoods(model, sequence)[0].log_probabilities[0].exp() - blurred)
            restore.remove()
        handle.remove()
    return best(effects)


def best(scores: dict[int, float]) -> list[int]:
    return sorted(sorted(scores, key=scores.__getitem__, reverse=True)[:COUNT])
