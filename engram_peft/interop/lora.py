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


if TYPE_CHECKING:
    from ..tuners.engram import EngramModel


@torch.no_grad()
def engram_to_lora(tuner: EngramModel, adapter_name: str = "default") -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The adapter as `lora_B lora_A = -alpha f W M`: exact up to float32 rounding.

    All layers get the largest rank (smaller ones are padded with zeros) and a LoRA scaling of 1: serving engines know nothing
    else. A layer whose bias is edited needs `lora_bias`, which not every engine loads.

    Args:
        tuner (`EngramModel`): The tuner, `peft_model.base_model`.
        adapter_name (`str`): Which adapter.

    Returns:
        The `LoraConfig` and the state dict in PEFT's file format, float32.

    Raises:
        `ValueError`: The adapter has `modules_to_save`, which a LoRA export would lose.
    """
    config = tuner.peft_config[adapter_name]
    if config.modules_to_save:
        raise ValueError("Cannot export an adapter with `modules_to_save` as LoRA: the saved modules would be lost.")
    layers = tuner.engram_layers(adapter_name)
    rank = max(layer.factors(adapter_name)[1].shape[1] for layer in layers.values())
    edits_bias = any(layer.absorbs_bias(adapter_name) for layer in layers.values())
    state_dict = {}
    for name, layer in layers.items():
        up, down = (factor.float() for factor in layer.output_factors(adapter_name))
        padding = rank - len(down)
        prefix = f"base_model.model.{name}"
        weight_down = down[:, : layer.in_features]
        state_dict[f"{prefix}.lora_A.weight"] = torch.nn.functional.pad(weight_down, (0, 0, 0, padding)).contiguous()
        state_dict[f"{prefix}.lora_B.weight"] = torch.nn.functional.pad(up, (0, padding)).contiguous()
        if edits_bias:
            bias = up.new_zeros(layer.out_features)
            if layer.absorbs_bias(adapter_name):
                bias = up @ down[:, layer.in_features]
            state_dict[f"{prefix}.lora_B.bias"] = bias
    lora_config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_bias=edits_bias,
        target_modules=sorted(layers),
        fan_in_fan_out=any(isinstance(layer.get_base_layer(), Conv1D) for layer in layers.values()),
        task_type=config.task_type,
        base_model_name_or_path=config.base_model_name_or_path,
        inference_mode=True,
    )
    return lora_config, state_dict


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
