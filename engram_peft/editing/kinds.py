"""Kinds of layers that can be edited: how a layer's input becomes rows, and its weight a matrix.

All that an edit needs is rows `x` and a matrix `W` with `y = W x + b`. A `LayerKind` says what they are in a layer; everything else
(collecting, extracting, the adapter's forward, merging, export) asks the kind. Some layers are several such maps side by side,
their **groups**: a grouped convolution, and an embedding, whose input is a one-hot vector: a group of width 1 a token.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from .weights import is_quantized_linear


class LayerKind:
    """How to read a layer that computes `y = W x + b` of every row `x`, which may be any function of its input.

    Layers keep their weight in `weight` and their bias, if they have one, in `bias`. Subclass what differs, and hand it to
    `register_layer`.
    """

    # Whether the rows are the input itself. If so, an adapter edits the input; else it puts `W (I - M)` in the place of the weight.
    rows_are_input = False
    # Whether rows are one-hot vectors, given as indices.
    one_hot = False

    def rows(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The rows of an input: `(batch, ..., width)`, or `(batch, ..., groups, width)`; `(batch, ...)` if they are one-hot."""
        return x

    def matrix(self, layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        """The weight as `(out, width)`, or `(groups, out, width)`."""
        return weight

    def weight(self, layer: nn.Module, matrix: torch.Tensor) -> torch.Tensor:
        """The inverse of `LayerKind.matrix`."""
        return matrix

    def shape(self, layer: Any) -> tuple[int, int, int]:
        """Number of groups, width of a group's output and of its rows."""
        matrix = self.matrix(layer, layer.weight)
        return (len(matrix) if matrix.dim() == 3 else 1), matrix.shape[-2], matrix.shape[-1]

    def geometry(self, layer: Any) -> Hashable:
        """What the rows of an input depend on apart from it. Layers of equal geometry that read the same tensor share a moment."""
        return layer

    def covers(self, layer: nn.Module, registered: type[nn.Module]) -> bool:
        """Whether the kind that is registered for a class describes this instance: a subclass may compute something else."""
        return type(layer).forward is registered.forward


class LinearKind(LayerKind):
    """`nn.Linear`, and its subclasses that store the weight in another precision."""

    rows_are_input = True

    def shape(self, layer: Any) -> tuple[int, int, int]:
        return 1, layer.out_features, layer.in_features  # a quantised weight has another shape

    def geometry(self, layer: Any) -> Hashable:
        return "linear"

    def covers(self, layer: nn.Module, registered: type[nn.Module]) -> bool:
        return True


class TransposedLinearKind(LinearKind):
    """The `Conv1D` of transformers, whose weight is `(in, out)`."""

    def matrix(self, layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return weight.T

    def weight(self, layer: nn.Module, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.T

    def shape(self, layer: Any) -> tuple[int, int, int]:
        return 1, layer.nf, layer.nx


class EmbeddingKind(LayerKind):
    """`nn.Embedding`: a group of width 1 a token, so a second moment is a count, and `M` a diagonal."""

    one_hot = True

    def matrix(self, layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
        return weight[:, :, None]

    def weight(self, layer: nn.Module, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[:, :, 0]

    def geometry(self, layer: Any) -> Hashable:
        return "embedding", layer.num_embeddings

    def covers(self, layer: Any, registered: type[nn.Module]) -> bool:
        # transformers' scaled embeddings multiply by a constant, which an edit of the output passes through; `max_norm` would
        # undo an edit of the weight
        own_forward = not super().covers(layer, registered) and not hasattr(layer, "embed_scale")
        return not own_forward and layer.max_norm is None


class ConvKind(LayerKind):
    """`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`: a row is the patch that a position of the output sees, `(channels, *kernel)` flat."""

    def rows(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        kernel = layer.kernel_size
        if x.dim() == len(kernel) + 1:  # a single sample
            x = x[None]
        x = F.pad(x, _padding(layer), "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
        for axis, (size, stride, dilation) in enumerate(zip(kernel, layer.stride, layer.dilation, strict=True), 2):
            x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]  # (batch, channels, *out, *kernel)
        x = x.unflatten(1, (layer.groups, -1)).movedim((1, 2), (len(kernel) + 1, len(kernel) + 2))
        rows = x.flatten(-len(kernel) - 1)  # (batch, *out, groups, channels per group * kernel)
        return rows if layer.groups > 1 else rows.squeeze(-2)

    def matrix(self, layer: Any, weight: torch.Tensor) -> torch.Tensor:
        matrix = weight.flatten(1)
        return matrix.unflatten(0, (layer.groups, -1)) if layer.groups > 1 else matrix

    def weight(self, layer: Any, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.reshape(layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)

    def geometry(self, layer: Any) -> Hashable:
        return layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode, layer.groups


def _padding(layer: Any) -> list[int]:
    """What `F.pad` has to add, from the last dimension to the first."""
    amounts: list[int] = []
    for axis, size in reversed(list(enumerate(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[axis] * (size - 1)
            amounts += [total // 2, total - total // 2]
        else:
            amounts += [0 if layer.padding == "valid" else layer.padding[axis]] * 2
    return amounts


_KINDS: dict[type[nn.Module], LayerKind] = {
    nn.Linear: LinearKind(),
    Conv1D: TransposedLinearKind(),
    nn.Embedding: EmbeddingKind(),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ConvKind()),
}


def register_layer(layer_type: type[nn.Module], kind: LayerKind) -> None:
    """Teaches the library a kind of layer, or another way to read one it knows.

    Args:
        layer_type (`type[nn.Module]`): The layer's class. Subclasses with the same `forward` are meant, too.
        kind (`LayerKind`): How to read it.

    Raises:
        `TypeError`: `layer_type` is not a class of modules, or `kind` not a `LayerKind`.

    Example:

        ```py
        >>> class PairsKind(LayerKind):  # a layer that sees every token together with the one before it
        ...     def rows(self, layer, x):
        ...         return torch.cat([x, F.pad(x, (0, 0, 1, -1))], dim=-1)

        >>> register_layer(Pairs, PairsKind())
        >>> model = get_peft_model(model, EngramConfig(target_modules=["pairs"]))
        ```
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"`layer_type` should be a class of `torch.nn.Module`, the value passed is {layer_type!r}.")
    if not isinstance(kind, LayerKind):
        raise TypeError(f"`kind` should be an instance of `LayerKind`, the value passed is {kind!r}.")
    _KINDS[layer_type] = kind


def kind_of(layer: nn.Module) -> LayerKind | None:
    """The kind of a layer, by the nearest class that is registered; `None` if it cannot be edited."""
    for layer_type in type(layer).__mro__:
        if kind := _KINDS.get(layer_type):
            return kind if kind.covers(layer, layer_type) else None
    return _KINDS[nn.Linear] if is_quantized_linear(layer) else None


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is an `nn.Linear` or `Conv1D`: what PEFT's `"all-linear"` means."""
    return isinstance(kind_of(layer), LinearKind)


def unsupported(name: str, layer: nn.Module) -> str:
    """What to say of a layer that has no kind."""
    return (
        f"Target module {name} is not supported. It is a `{type(layer).__name__}`; only `torch.nn.Linear`, `Embedding`, `Conv1d`, "
        "`Conv2d`, `Conv3d` and `transformers.pytorch_utils.Conv1D` can be edited, and their subclasses only if they compute the "
        "same. Choose other `target_modules`, or say how to read the layer with `engram_peft.register_layer`."
    )
