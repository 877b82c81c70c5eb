"""Layers of every kind, and what an edit of them has to be, computed by loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from engram_peft import (
    EngramConfig,
    LayerKind,
    Statistics,
    collect_statistics,
    extract_engram,
    merge_statistics,
    register_layer,
)


BATCH = 6


class Pairs(nn.Linear):
    """A layer of a user: it sees every token together with the one before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.cat([x, F.pad(x, (0, 0, 1, -1))], dim=-1), self.weight, self.bias)


class PairsKind(LayerKind):
    def rows(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, F.pad(x, (0, 0, 1, -1))], dim=-1)


register_layer(Pairs, PairsKind())


def floats(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(BATCH, *shape, generator=generator)


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 11, (BATCH, 5), generator=generator)


@dataclass
class Case:
    """A layer, its inputs, and why PEFT's LoRA cannot hold its edit (a part of the message), if so."""

    layer: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], torch.Tensor]
    no_lora: str | None = None


CASES = {
    "Linear": Case(lambda: nn.Linear(6, 5), floats(4, 6)),
    "Conv1D": Case(lambda: Conv1D(5, 6), floats(4, 6)),
    "Embedding": Case(lambda: nn.Embedding(11, 5, padding_idx=3), tokens),
    "conv1d": Case(lambda: nn.Conv1d(4, 5, 3, stride=2, padding=1), floats(4, 9)),
    "conv2d": Case(lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), bias=False), floats(3, 6, 5)),
    "conv2d_patches": Case(lambda: nn.Conv2d(3, 5, 2, stride=2), floats(3, 6, 4)),
    "conv2d_1x1": Case(lambda: nn.Conv2d(3, 5, 1), floats(3, 3, 3)),
    "conv2d_dilated": Case(lambda: nn.Conv2d(3, 5, 3, padding="same", dilation=2), floats(3, 6, 5), "dilation"),
    "conv2d_reflect": Case(
        lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"), floats(3, 5, 4), "padding than zeros"
    ),
    "conv2d_grouped": Case(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), floats(4, 5, 4)),
    "conv2d_depthwise": Case(lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), floats(4, 5, 4)),
    "conv3d": Case(lambda: nn.Conv3d(2, 5, (2, 2, 1), stride=2), floats(2, 4, 4, 3)),
    "register_layer": Case(lambda: Pairs(6, 5), floats(4, 3)),
}


class Model(nn.Module):
    """A model that is the one layer."""

    def __init__(self, case: str, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layer = CASES[case].layer()
            if getattr(self.layer, "bias", None) is not None:
                nn.init.normal_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def inputs(case: str, seed: int) -> torch.Tensor:
    """`BATCH` inputs of the layer."""
    return CASES[case].inputs(torch.Generator().manual_seed(seed))


def of_even_samples(x: torch.Tensor) -> torch.Tensor:
    """A mask with an entry a sample, `(BATCH,)`; of tokens an entry a token."""
    mask = torch.arange(len(x)) % 2 == 0
    return mask if x.is_floating_point() else mask[:, None].expand_as(x)


def statistics(model: nn.Module, case: str, seed: int = 1) -> tuple[Statistics, Statistics]:
    """Target and total: of one batch the even samples, and of two more batches all."""
    chosen = {"target_modules": ["layer"]}
    data = [{"x": inputs(case, seed)}]
    target = collect_statistics(model, data, mask_fn=lambda batch: of_even_samples(batch["x"]), **chosen)
    others = collect_statistics(model, [{"x": inputs(case, seed + 10)}, {"x": inputs(case, seed + 20)}], **chosen)
    return target, merge_statistics(target, others)


def edited(case: str, adapter_name: str = "default", seed: int = 1, **config: object) -> PeftModel:
    """`Model(case)` with a filled adapter of strength 0.7."""
    config = EngramConfig(**{"target_modules": ["layer"], "alpha": 0.7, **config})
    model = get_peft_model(Model(case), config, adapter_name).eval()
    extract_engram(model, *statistics(model, case, seed), adapter_name, scale="uniform")
    return model


# ---------------------------------------------------------------------------------------------------- by loops


def rows_by_loops(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the layer's weight is multiplied by, float64: `(samples, positions, groups, width)`."""
    if isinstance(layer, nn.Embedding):
        one_hot = torch.zeros(*x.shape, layer.num_embeddings, dtype=torch.float64)
        for place in itertools.product(*map(range, x.shape)):
            one_hot[(*place, int(x[place]))] = 1
        return one_hot[..., None]
    x = x.double()
    if isinstance(layer, Pairs):
        before = torch.stack([torch.stack([*([torch.zeros_like(s[0])]), *s[:-1]]) for s in x])
        return torch.cat([x, before], dim=-1)[:, :, None]
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return x[:, :, None]
    spread = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sides = [s // 2 for s in spread] if layer.padding == "same" else layer.padding
    amounts = [amount for side in reversed(sides) for amount in (side, side)]
    x = F.pad(x, amounts, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    starts = [range(0, size - s, step) for size, s, step in zip(x.shape[2:], spread, layer.stride, strict=True)]
    patches = []
    for corner in itertools.product(*starts):
        window = tuple(slice(c, c + s + 1, d) for c, s, d in zip(corner, spread, layer.dilation, strict=True))
        patches.append(x[(slice(None), slice(None), *window)].reshape(len(x), layer.groups, -1))
    return torch.stack(patches, dim=1)


def matrices(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """The weight in float64, `(groups, out, width)`."""
    weight = weight.detach().double()
    if isinstance(layer, nn.Embedding):
        return weight[:, :, None]
    if isinstance(layer, Conv1D):
        return weight.T[None]
    return weight.reshape(getattr(layer, "groups", 1), -1, weight[0].numel())


def output_of(layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """`W x + b` of rows `(samples, positions, groups, width)`, float64, `(samples, positions, out)`."""
    outputs = torch.einsum("spgi,goi->spgo", rows, matrices(layer, layer.weight))
    outputs = outputs.sum(2) if isinstance(layer, nn.Embedding) else outputs.flatten(2)
    return outputs if getattr(layer, "bias", None) is None else outputs + layer.bias.detach().double()


def by_position(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """The layer's own output as `(samples, positions, out)`."""
    return y.flatten(2).mT if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) else y


def homogeneous(layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Rows with a constant 1 where the layer has a bias."""
    if getattr(layer, "bias", None) is None:
        return rows
    return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)


def sums_by_loops(layer: nn.Module, case: str, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """`S_t` and `S_a` of `statistics`, `(groups, width, width)`, and the numbers of rows."""

    def of(x: torch.Tensor) -> torch.Tensor:
        return homogeneous(layer, rows_by_loops(layer, x)).flatten(0, 1)

    x = inputs(case, seed)
    target = of(x[::2])
    total = torch.cat([target, of(inputs(case, seed + 10)), of(inputs(case, seed + 20))])
    s_t, s_a = (torch.einsum("ngi,ngj->gij", rows, rows) for rows in (target, total))
    return s_t, s_a, len(target), len(total)


def edit_by_loops(layer: nn.Module, case: str, seed: int = 1) -> torch.Tensor:
    """`C_t pinv(C_a)` a group, float64 `(groups, width, width)`."""
    s_t, s_a, n, total = sums_by_loops(layer, case, seed)
    return (s_t / n) @ torch.linalg.pinv(s_a / total, rtol=1e-5, hermitian=True)
