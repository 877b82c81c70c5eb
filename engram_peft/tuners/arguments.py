"""What both tuners check of the names and weights they are given, before the model is touched."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn


def check_adapter_name(adapter_name: str, reserved: Collection[str], modules: Iterable[str]) -> None:
    """Raises a `ValueError` for a name that PEFT could not tell from a part of a path: it would lose tensors when it saves.

    Args:
        adapter_name (`str`): The name.
        reserved (`Collection[str]`): What every adapter layer has parts of that name for.
        modules (`Iterable[str]`): Names of the model's modules.
    """
    if not adapter_name or "." in adapter_name:
        raise ValueError(f"The adapter name {adapter_name!r} must not be empty or contain a dot.")
    if adapter_name in reserved or hasattr(nn.ModuleDict(), adapter_name):
        raise ValueError(
            f"The adapter name {adapter_name!r} is taken by a part of every adapter layer. Choose another name."
        )
    for key in modules:
        if adapter_name in key.split("."):
            raise ValueError(
                f"The adapter name {adapter_name!r} is also the name of a module of the model ({key}), which saving could not "
                "tell apart. Choose another name."
            )


def check_adapter_exists(configs: Mapping[str, Any], adapter_name: str) -> None:
    """Raises a `ValueError` if there is no such adapter among a tuner's `peft_config`."""
    if adapter_name not in configs:
        raise ValueError(f"Adapter {adapter_name} not found. The model has {sorted(configs)}.")


def check_weighted_sum(
    configs: Mapping[str, Any], adapters: Sequence[str], weights: Sequence[float], adapter_name: str
) -> None:
    """Raises a `ValueError` if the arguments of `add_weighted_adapter` make no sum, whatever the tuner."""
    if len(adapters) != len(weights) or not adapters:
        raise ValueError(
            f"`adapters` and `weights` need one entry each an adapter, got {len(adapters)} and {len(weights)}."
        )
    for name in adapters:
        check_adapter_exists(configs, name)
    if adapter_name in configs:
        raise ValueError(f"Adapter with name '{adapter_name}' already exists.")
    if any(not math.isfinite(weight) for weight in weights):
        raise ValueError(f"`weights` should be finite numbers, the values passed are {list(weights)}.")
    if any(configs[name].modules_to_save for name in adapters):
        raise ValueError("Cannot add weighted adapters if they have `modules_to_save`.")
