"""Where a layer's weight lies and what it is, whichever way the model was loaded: offloaded, quantised or sharded.

accelerate's hooks (read in accelerate 1.15) and the formats of quantisation libraries are known here and in
`tuners/engram/stored.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, cast

import torch
from peft.utils import resolve_quantization_backend
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..sharded import gathered


# ---------------------------------------------------------------------------------------------- where


def execution_device(module: nn.Module) -> torch.device | None:
    """Where a module computes: where its weights are, or where accelerate brings them; `None` if they are nowhere (meta)."""
    for part in module.modules():
        hook = offload_hook(part)
        if hook is not None and hook.execution_device is not None:
            return torch.device(hook.execution_device)
        for tensor in chain(part.parameters(recurse=False), part.buffers(recurse=False)):
            if not tensor.is_meta:
                return tensor.device
    return None


def input_device(model: nn.Module) -> torch.device:
    """Where a model wants its inputs: where its embedding computes.

    Raises:
        `ValueError`: The weights are on the meta device, and nothing would load them.
    """
    embedding: nn.Module | None = None
    with suppress(AttributeError, NotImplementedError):  # not every model has one
        embedding = cast(Any, model).get_input_embeddings()
    found = None if embedding is None else execution_device(embedding)
    found = found or execution_device(model)
    if found is None or any(parameter.is_meta and not is_offloaded for parameter, is_offloaded in _weights(model)):
        raise ValueError(
            "The model's weights are on the meta device: there is nothing to compute with. Load them first, for example with "
            "`from_pretrained`; accelerate's offloading keeps them where they can be found."
        )
    return found


def _weights(module: nn.Module, is_offloaded: bool = False) -> Iterator[tuple[nn.Parameter, bool]]:
    """Every Parameter, and whether accelerate would load it, by its own module or by one around it."""
    hook = offload_hook(module)
    for parameter in module.parameters(recurse=False):
        yield parameter, is_offloaded or hook is not None
    for child in module.children():
        yield from _weights(child, is_offloaded or getattr(hook, "place_submodules", False))


def offload_hook(module: nn.Module) -> Any | None:
    """accelerate's hook that loads the module's weights for every forward pass, if it has one."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "offload", False):
            return part
    return None


@contextmanager
def onloaded(module: nn.Module, write: bool = False) -> Iterator[None]:
    """The module with its weights in place, which are taken off again afterwards if they were.

    Args:
        module (`nn.Module`): The module that holds the weights itself.
        write (`bool`):
            Whether the weights found afterwards are those to load from now on. They are kept in memory, as PEFT does.
    """
    hook = offload_hook(module)
    if hook is None or not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        yield
        return
    hook.pre_forward(module)
    try:
        yield
        if write:
            hook.weights_map = {
                name: parameter.to("cpu") for name, parameter in module.named_parameters(recurse=False)
            }
    finally:
        hook.post_forward(module, torch.empty(0))


# ---------------------------------------------------------------------------------------------- what


def is_quantized_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that a quantisation library (GPTQ, AWQ, HQQ, ...) has in place of `nn.Linear`."""
    if isinstance(module, nn.Linear) or not hasattr(module, "in_features") or not hasattr(module, "out_features"):
        return False
    return _backend(module) is not None


def is_quantized(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is stored as codes."""
    return _backend(module) is not None


def _backend(module: nn.Module) -> Any | None:
    if type(module) in (nn.Linear, Conv1D) and type(module.weight) is nn.Parameter:
        return None  # without importing a library to ask
    # what it asks for is only needed to requantise
    return resolve_quantization_backend(module, get_apply_tensor_subclass=lambda: None)


@torch.no_grad()
def float_weight(layer: nn.Module) -> torch.Tensor:
    """The weight of an `nn.Linear` or `Conv1D` in floating point, as the layer stores it; of a quantised linear layer
    `(out_features, in_features)`.

    Offloaded weights are loaded, sharded ones gathered and quantised ones dequantised. Where a library cannot dequantise,
    the weight is what the layer makes of the unit vectors.

    Raises:
        `ValueError`: The weight is on the meta device, and the layer does not load it by itself.
    """
    with onloaded(layer):
        if getattr(getattr(layer, "weight", None), "is_meta", False):
            raise ValueError(
                f"The weight of {layer} is on the meta device, and is loaded with a module around the layer if at all. Offload without "
                "`preload_module_classes`."
            )
        backend = _backend(layer)
        if backend is not None:
            if not backend.supports_merge or is_packed(layer):
                return _weight_from_outputs(layer)
            return cast(torch.Tensor, backend.get_base_weight(layer)).detach()
        return gathered(cast(torch.Tensor, layer.weight).detach())


def is_packed(layer: nn.Module) -> bool:
    """Whether bitsandbytes reordered a 4-bit weight for the CPU, which it does in the first forward pass: dequantising
    then reads it in the wrong order (bitsandbytes 0.50)."""
    return bool(getattr(getattr(getattr(layer, "weight", None), "quant_state", None), "packing_format_for_cpu", False))


# How many unit vectors a layer is given at once.
_UNIT_VECTORS = 1024


def _weight_from_outputs(layer: Any) -> torch.Tensor:
    tensors = [t for t in chain(layer.parameters(), layer.buffers()) if not t.is_meta]
    device = tensors[0].device
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    columns = []
    training = layer.training
    layer.eval()
    try:
        at_zero = layer(torch.zeros(1, layer.in_features, dtype=dtype, device=device)).float()
        for start in range(0, layer.in_features, _UNIT_VECTORS):
            stop = min(start + _UNIT_VECTORS, layer.in_features)
            vectors = torch.zeros(stop - start, layer.in_features, dtype=dtype, device=device)
            vectors[torch.arange(stop - start), torch.arange(start, stop)] = 1
            columns.append((layer(vectors).float() - at_zero).T)
    finally:
        layer.train(training)
    return torch.cat(columns, dim=1)
