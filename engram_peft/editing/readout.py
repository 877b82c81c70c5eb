"""What in the hidden state says a token: the direction in which its logit grows.

The logit lens (nostalgebraist, 2020; Geva et al., arXiv 2203.14680) reads what a decoder layer adds to the hidden state through
the final norm and the head. With the norm's scale held fixed that reading is linear: `u_t = g * (E_t - mean of E)` for the norm's
gain `g` and the head's rows `E`. No gradient is needed, and no knowledge of the norm: its gain is found by trying it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .collection import evaluating
from .encoding import EncodedItem, batches
from .items import ForgetText
from .selection import base_layer_of, decoder_layers, output_head, unwrap
from .weights import float_weight, input_device


@dataclass
class Directions:
    """Directions of the readout at the rows of the secret, float64, scaled so that a product with a change of the hidden
    state is the change of the logit against the mean of all logits.

    **Attributes**:
        - **secret** (`torch.Tensor`) -- Of the secret's tokens, `(n, hidden_size)`.
        - **replacement** (`torch.Tensor`, *optional*) --
            Of the token that takes the place of a span's first, `(n, hidden_size)`; 0 for later tokens.
    """

    secret: torch.Tensor
    replacement: torch.Tensor | None = None

    def to(self, device: torch.device) -> Directions:
        """The same on `device`."""
        return Directions(self.secret.to(device), None if self.replacement is None else self.replacement.to(device))


@torch.no_grad()
def readout_directions(
    model: nn.Module,
    texts: Sequence[ForgetText],
    replacing: Sequence[int] | None = None,
    *,
    batch_size: int,
    pad_token_id: int | None,
) -> Directions | None:
    """The direction of every secret token, and of the token that shall take its place.

    Args:
        model (`nn.Module`): A causal language model, or a `PeftModel` around one.
        texts (`list[ForgetText]`): The texts.
        replacing (`list[int]`, *optional*): For each text the id of the token that takes the place of a span's first.
        batch_size (`int`): Texts a batch.
        pad_token_id (`int`, *optional*): What to fill batches up with.

    Returns:
        `Directions`, or `None` where the head does not read the hidden state, at its full width, through one norm.
    """
    base = unwrap(model)
    head = output_head(base)
    if head is None:
        return None
    norm = _final_norm(base, head)
    if norm is None:
        return None
    embedding = float_weight(head)
    mean = embedding.double().mean(0)
    gain, centres = _gain(norm, embedding)
    hidden = _hidden_states(base, norm, texts, batch_size, pad_token_id)
    if centres:
        hidden = hidden - hidden.mean(1, keepdim=True)
    scale = hidden.square().mean(1, keepdim=True).sqrt()

    def direction(tokens: list[int]) -> torch.Tensor:
        rows = embedding[torch.tensor(tokens, device=embedding.device)].double()
        along = (gain * (rows - mean)).cpu()
        return (along - along.mean(1, keepdim=True) if centres else along) / scale

    secret = direction([text.tokens.input_ids[p] for text in texts for p in text.secret])
    if replacing is None:
        return Directions(secret)
    is_first = [p == span[0] for text in texts for span in text.spans for p in span]
    instead = [token for token, text in zip(replacing, texts, strict=True) for _ in text.secret]
    return Directions(secret, direction(instead) * torch.tensor(is_first)[:, None])


def _final_norm(model: nn.Module, head: nn.Module) -> nn.Module | None:
    """The module that hands its output to the head, seen in a pass over two tokens; `None` if it is not a norm of the head's width."""
    within = set(decoder_layers(model).modules())
    outputs: list[tuple[nn.Module, torch.Tensor]] = []
    inputs: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs.append((module, output))

    leaves = (module for module in model.modules() if module not in within and not any(module.children()))
    handles = [module.register_forward_hook(note) for module in leaves if base_layer_of(module) is not head]
    readers = [module for module in model.modules() if base_layer_of(module) is head]
    handles.append(readers[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0])))
    try:
        with torch.inference_mode(False), evaluating(model):
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=input_device(model)))
    finally:
        for handle in handles:
            handle.remove()
    for module, output in reversed(outputs):
        if getattr(module, "weight", torch.empty(0, 0)).dim() == 1 and inputs:
            last = output[..., -inputs[0].shape[-2] :, :]  # the head may be handed a part of the positions only
            if torch.equal(last, inputs[0]):
                return module
    return None


def _gain(norm: nn.Module, like: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """`g` of a norm `g * (x - mean) / scale + b`, `(hidden_size,)` float64, and whether it takes off the mean at all.

    Whatever the gain is called and made of: it is half of what the norm makes of signs `s` less what it makes of `-s`.
    """
    signs = torch.ones(like.shape[1], dtype=like.dtype, device=like.device)
    signs[1::2] = -1  # zero mean, unit scale
    gain = signs * (norm(signs) - norm(-signs)) / 2
    centres = torch.allclose(norm(signs + 1), norm(signs), atol=1e-2 * float(gain.abs().max()))
    return gain.double(), centres


def _hidden_states(
    model: nn.Module, norm: nn.Module, texts: Sequence[ForgetText], batch_size: int, pad_token_id: int | None
) -> torch.Tensor:
    """What the final norm reads at the rows of the secret: `(n, hidden_size)` float64."""
    read: list[torch.Tensor] = []
    found: list[torch.Tensor] = [torch.zeros(0)] * len(texts)
    encoded = [EncodedItem(text.tokens.input_ids, [False] * len(text.tokens.input_ids)) for text in texts]
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    device = input_device(model)
    handle = norm.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    try:
        with torch.inference_mode(False), evaluating(model):
            for batch in batches(encoded, batch_size, pad_token_id):
                inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
                model(**{name: value.to(device) for name, value in inputs.items()}, **no_cache)
                hidden = read.pop()
                for row, i in enumerate(batch.items):
                    found[i] = hidden[row, [position - 1 for position in texts[i].secret]].double().cpu()
    finally:
        handle.remove()
    return torch.cat(found)
