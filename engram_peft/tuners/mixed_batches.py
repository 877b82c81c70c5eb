"""`adapter_names=` of `forward` and `generate`: another adapter for every text of a batch, in both tuners."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn


def check_adapter_names(model: nn.Module, adapters: Collection[str], adapter_names: Sequence[str]) -> None:
    """Raises a `ValueError` in training mode, or if a name is neither one of the `adapters` nor `"__base__"`."""
    if model.training:
        raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
    if unknown := sorted(set(adapter_names) - {*adapters, "__base__"}):
        raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")


@contextmanager
def handed_adapter_names(modules: Iterable[nn.Module], adapter_names: Sequence[str]) -> Iterator[None]:
    """For the time being `modules` get `adapter_names` as an argument, by pre-hooks, as in LoRA."""
    hook = partial(_with_adapter_names, adapter_names=adapter_names)
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_adapter_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], adapter_names: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs["adapter_names"] = adapter_names
    return args, kwargs
