"""ENGRAM adapters as stock LoRA adapters, for plain PEFT and for serving engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers.pytorch_utils import Conv1D

from ..files import replace_safetensors
from ..tuners.engram.experts import ParamWrapper, nested_names


if TYPE_CHECKING:
    from ..tuners.engram import EngramModel
    from ..tuners.engram.layer import EngramLayer


@torch.no_grad()
def engram_to_lora(tuner: EngramModel, adapter_name: str = "default") -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The adapter as `lora_B lora_A = -alpha f W M`: exact up to float32 rounding.

    All layers and experts get the largest rank (smaller ones are padded with zeros) and a LoRA scaling of 1: serving engines know
    nothing else. A layer whose bias is edited needs `lora_bias`, which not every engine loads. Experts become `target_parameters`,
    where `lora_A` has the rows of one expert after the other and in `lora_B` the expert's index runs fastest.

    Args:
        tuner (`EngramModel`): The tuner, `peft_model.base_model`.
        adapter_name (`str`): Which adapter.

    Returns:
        The `LoraConfig` and the state dict in PEFT's file format, float32.

    Raises:
        `ValueError`: The adapter has `modules_to_save`, which a LoRA export would lose, or edits biases of experts or experts
            stored as matrices, for which LoRA's format has no place.
    """
    config = tuner.peft_config[adapter_name]
    if config.modules_to_save:
        raise ValueError("Cannot export an adapter with `modules_to_save` as LoRA: the saved modules would be lost.")
    layers = tuner.engram_layers(adapter_name)
    parameters = {name: layer for name, layer in layers.items() if isinstance(layer, ParamWrapper)}
    modules = {name: layer for name, layer in layers.items() if name not in parameters}
    for name, layer in parameters.items():
        _check_fits(name, layer, adapter_name)
    edits_bias = any(layer.absorbs_bias(adapter_name) for layer in layers.values())
    if parameters and edits_bias:
        raise ValueError(
            "Cannot export as LoRA: it edits no biases where it has `target_parameters`. Make the adapter with `absorb_bias=False`."
        )
    ranks = [max(layer.engram_expert_ranks[adapter_name]) for layer in parameters.values() if layer.stack.is_routed]
    ranks += [layer.factors(adapter_name)[1].shape[1] for layer in layers.values() if not _is_routed(layer)]
    rank = max(ranks)
    state_dict = {}
    for name, layer in modules.items():
        up, down = _padded(*layer.output_factors(adapter_name), rank)
        prefix = f"base_model.model.{name}"
        state_dict[f"{prefix}.lora_A.weight"] = down[:, : layer.in_features].contiguous()
        state_dict[f"{prefix}.lora_B.weight"] = up
        if edits_bias:
            bias = up.new_zeros(layer.out_features)
            if layer.absorbs_bias(adapter_name):
                bias = up @ down[:, layer.in_features]
            state_dict[f"{prefix}.lora_B.bias"] = bias
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


def _is_routed(layer: EngramLayer) -> bool:
    return isinstance(layer, ParamWrapper) and layer.stack.is_routed


def _check_fits(name: str, layer: ParamWrapper, adapter_name: str) -> None:
    """Raises a `ValueError` if LoRA cannot hold the edit of a Parameter."""
    stack = layer.stack
    if stack.is_routed and layer.base_weight().dim() != 3:
        raise ValueError(
            f"Cannot export {name} as LoRA: its experts are stored as a matrix, which PEFT's LoRA wraps in a way that "
            f"`{type(stack.module).__name__}` cannot be run with."
        )


def _padded(up: torch.Tensor, down: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, r)` and `(r, width)` in float32, with zeros up to `rank`."""
    missing = rank - len(down)
    pad = torch.nn.functional.pad
    return pad(up.float(), (0, missing)).contiguous(), pad(down.float(), (0, 0, 0, missing)).contiguous()


def _stacked(layer: ParamWrapper, adapter_name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`lora_A` `(E r, .)` and `lora_B` `(., r E)` of a Parameter."""
    stack = layer.stack
    products = []
    for expert in range(stack.num_experts):
        up, down = _padded(*layer.expert_output_factors(adapter_name, expert), rank)
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
