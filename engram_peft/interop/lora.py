"""ENGRAM adapters as stock LoRA adapters, for plain PEFT and for serving engines."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from ..editing.kinds import ConvKind, EmbeddingKind, LinearKind, TransposedLinearKind
from ..files import replace_safetensors
from ..tuners.engram.experts import ParamWrapper, nested_names


if TYPE_CHECKING:
    from ..tuners.engram import EngramLayer, EngramModel

KINDS = (LinearKind, TransposedLinearKind, EmbeddingKind, ConvKind)
CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


@torch.no_grad()
def engram_to_lora(tuner: EngramModel, adapter_name: str = "default") -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The adapter as `lora_B lora_A = -alpha f W M`: exact up to float32 rounding.

    All layers and experts get the largest rank (smaller ones are padded with zeros) and a LoRA scaling of 1: serving engines know
    nothing else. A layer whose bias is edited needs `lora_bias`, which not every engine loads. A convolution of `g` groups needs `g`
    times its rank, an embedding a rank a token that is edited, at most its width. Experts become `target_parameters`, where `lora_A`
    has the rows of one expert after the other and in `lora_B` the expert's index runs fastest.

    Args:
        tuner (`EngramModel`): The tuner, `peft_model.base_model`.
        adapter_name (`str`): Which adapter.

    Returns:
        The `LoraConfig` and the state dict in PEFT's file format, float32.

    Raises:
        `ValueError`: The adapter has `modules_to_save`, which a LoRA export would lose; or PEFT's LoRA has no form for a layer: one
            of your own, a convolution with dilation or without zero padding, an embedding beside layers whose bias is edited,
            experts whose biases are edited or that are stored as matrices.
    """
    config = tuner.peft_config[adapter_name]
    if config.modules_to_save:
        raise ValueError("Cannot export an adapter with `modules_to_save` as LoRA: the saved modules would be lost.")
    layers = tuner.engram_layers(adapter_name)
    parameters = {name: layer for name, layer in layers.items() if isinstance(layer, ParamWrapper)}
    modules = {name: layer for name, layer in layers.items() if name not in parameters}
    edits_bias = any(layer.absorbs_bias(adapter_name) for layer in layers.values())
    if parameters and edits_bias:
        raise ValueError(
            "Cannot export as LoRA: it edits no biases where it has `target_parameters`. Make the adapter with `absorb_bias=False`."
        )
    for name, layer in parameters.items():
        _check_fits(name, layer)
    for name, layer in modules.items():
        if reason := _reason_against(layer, edits_bias):
            raise ValueError(f"Cannot export {name} as LoRA: {reason}.")
    factors = {name: _grouped_factors(layer, adapter_name) for name, layer in modules.items()}
    ranks = [len(up) * up.shape[2] for up, _ in factors.values()]
    ranks += [_rank_of_parameter(layer, adapter_name) for layer in parameters.values()]
    # every layer's rank is a multiple of its groups
    step = math.lcm(*(len(up) for up, _ in factors.values()))
    rank = step * -(-max(ranks) // step)
    state_dict = {}
    for name, layer in modules.items():
        parts = _lora_tensors(layer.get_base_layer(), *factors[name], layer.in_features, rank)
        if edits_bias:
            up, down = factors[name]
            bias = up.new_zeros(up.shape[0] * up.shape[1])
            if layer.absorbs_bias(adapter_name):
                bias = (up @ down[:, :, layer.in_features :]).flatten()
            parts["lora_B.bias"] = bias
        state_dict.update({f"base_model.model.{name}.{part}": tensor.contiguous() for part, tensor in parts.items()})
    for name, prefix in nested_names(parameters).items():
        a, b = _stacked(parameters[name], adapter_name, rank)
        state_dict[f"base_model.model.{prefix}.lora_A.weight"] = a
        state_dict[f"base_model.model.{prefix}.lora_B.weight"] = b
    lora_config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_bias=edits_bias,
        target_modules=sorted(modules),
        target_parameters=sorted(parameters) or None,
        fan_in_fan_out=any(isinstance(layer.get_base_layer(), Conv1D) for layer in modules.values()),
        task_type=config.task_type,
        base_model_name_or_path=config.base_model_name_or_path,
        inference_mode=True,
    )
    return lora_config, state_dict


def _reason_against(layer: EngramLayer, edits_bias: bool) -> str | None:
    """Why PEFT's LoRA cannot hold the edit of a layer, if so."""
    base: Any = layer.get_base_layer()
    if type(layer.kind) not in KINDS or not isinstance(base, nn.Linear | Conv1D | nn.Embedding | CONVOLUTIONS):
        return f"PEFT has no LoRA for a `{type(base).__name__}`"
    if isinstance(base, CONVOLUTIONS):
        if set(base.dilation) != {1} or base.padding_mode != "zeros":
            return "the LoRA of a convolution has neither dilation nor another padding than zeros"
    elif isinstance(base, nn.Embedding) and edits_bias:
        return "the LoRA of an embedding cannot stand beside layers whose bias is edited (`absorb_bias=False` leaves it alone)"
    return None


def _grouped_factors(layer: EngramLayer, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`up` `(groups, out, r)` and `down` `(groups, r, width)` with `up down = [dW | db]`, float32; an embedding is one group."""
    base = layer.get_base_layer()
    if isinstance(base, nn.Embedding):
        change = layer.get_delta_weight(adapter_name).float().T  # (out, tokens)
        tokens = change.any(0).nonzero().flatten()
        if len(tokens) < len(change):
            return change[None, :, tokens], nn.functional.one_hot(tokens, change.shape[1])[None].to(change)
        return torch.eye(len(change), device=change.device)[None], change[None]
    up, down = (factor.float() for factor in layer.output_factors(adapter_name))
    return (up, down) if layer.groups > 1 else (up[None], down[None])


def _lora_tensors(base: Any, up: torch.Tensor, down: torch.Tensor, width: int, rank: int) -> dict[str, torch.Tensor]:
    """The factors as PEFT's file holds them, without the bias: `rank` columns and rows, those that are missing zero."""
    missing = rank // len(up) - up.shape[2]
    up, down = pad(up, (0, missing)), pad(down, (0, 0, 0, missing))
    if isinstance(base, nn.Embedding):
        return {"lora_embedding_A": down[0], "lora_embedding_B": up[0]}
    if not isinstance(base, CONVOLUTIONS):
        return {"lora_A.weight": down[0, :, :width], "lora_B.weight": up[0]}
    # lora_A sees all channels, lora_B is grouped as the layer is
    channels = base.in_channels // base.groups
    kernels = down[:, :, :width].reshape(rank, channels, *base.kernel_size)
    a = kernels.new_zeros(rank, base.in_channels, *base.kernel_size)
    for number, of_group in enumerate(kernels.split(rank // base.groups)):
        block = slice(number * (rank // base.groups), (number + 1) * (rank // base.groups))
        a[block, number * channels : (number + 1) * channels] = of_group
    b = up.reshape(base.out_channels, -1, *[1] * len(base.kernel_size))
    return {"lora_A.weight": a, "lora_B.weight": b}


def _check_fits(name: str, layer: ParamWrapper) -> None:
    """Raises a `ValueError` if LoRA cannot hold the edit of a Parameter."""
    stack = layer.stack
    if stack.is_routed and layer.base_weight().dim() != 3:
        raise ValueError(
            f"Cannot export {name} as LoRA: its experts are stored as a matrix, which PEFT's LoRA wraps in a way that "
            f"`{type(stack.module).__name__}` cannot be run with."
        )


def _rank_of_parameter(layer: ParamWrapper, adapter_name: str) -> int:
    """The rank of a Parameter's edit: of the expert with the most rows."""
    if layer.stack.is_routed:
        return max(layer.engram_expert_ranks[adapter_name])
    return layer.factors(adapter_name)[1].shape[1]


def _stacked(layer: ParamWrapper, adapter_name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`lora_A` `(E r, .)` and `lora_B` `(., r E)` of a Parameter."""
    stack = layer.stack
    products = []
    for expert in range(stack.num_experts):
        up, down = (factor.float() for factor in layer.expert_output_factors(adapter_name, expert))
        missing = rank - len(down)
        up, down = pad(up, (0, missing)), pad(down, (0, 0, 0, missing))
        # for LoRA a stack is (E, out, in) unless the module has the attribute, a matrix always (out, in)
        if stack.is_transposed and not (stack.is_routed and getattr(stack.module, "is_transposed", False)):
            up, down = down.mT, up.mT
        products.append((up, down))
    a = torch.cat([down for _, down in products])
    b = torch.stack([up for up, _ in products], dim=-1)  # (., r, E)
    return a.contiguous(), b.flatten(1).contiguous()


def save_as_lora(save_directory: str | os.PathLike, tuner: EngramModel, adapter_name: str = "default") -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` of a stock LoRA adapter: see `engram_to_lora`.

    Args:
        save_directory (`str` or `os.PathLike`): Folder to write to.
        tuner (`EngramModel`): The tuner, `peft_model.base_model`.
        adapter_name (`str`): Which adapter.
    """
    config, state_dict = engram_to_lora(tuner, adapter_name)
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    replace_safetensors(folder / SAFETENSORS_WEIGHTS_NAME, state_dict, {"format": "pt"})
    config.save_pretrained(str(folder))
