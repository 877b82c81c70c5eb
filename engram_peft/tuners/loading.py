"""What both tuners do with a file's tensors before they are loaded, and after that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from ..sharded import sharded_like


def check_adapter_tensors(
    own: Mapping[str, torch.Tensor], state_dict: Mapping[str, torch.Tensor], prefix: str
) -> None:
    """Raises a `ValueError` unless a state dict holds every tensor of an adapter, in its shape, and no others.

    Args:
        own (`Mapping[str, torch.Tensor]`): The adapter's tensors by name.
        state_dict (`Mapping[str, torch.Tensor]`): What is to be loaded.
        prefix (`str`): The tuner's: what its modules are called by.
    """
    if missing := sorted(own.keys() - state_dict.keys()):
        raise ValueError(f"The adapter file lacks {len(missing)} of {len(own)} tensors, for example {missing[0]}.")
    for key, tensor in own.items():
        if state_dict[key].shape != tensor.shape:
            raise ValueError(
                f"The adapter file belongs to another model or config: {key} has shape {list(state_dict[key].shape)}, "
                f"expected {list(tensor.shape)}."
            )
    if unknown := sorted(key for key in state_dict if f".{prefix}" in key and key not in own):
        raise ValueError(f"The adapter file holds tensors that the model has no place for, for example {unknown[0]}.")


def shard_adapter_tensors(
    own: Mapping[str, torch.Tensor], state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A state dict of whole tensors, of which those are sharded that the adapter's are: torch copies no others into them."""
    return {key: sharded_like(tensor, own[key]) if key in own else tensor for key, tensor in state_dict.items()}


def remove_unloaded(model: nn.Module, adapter_name: str, tuner: type[Any]) -> None:
    """Removes an adapter that could not be loaded; with it the tuner, if it was the only one."""
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, tuner):
        return
    if len(model.peft_config) > 1:
        model.delete_adapter(adapter_name)
    else:
        model.base_model.take_off()
