"""How a base layer's weight is replaced when adapters are merged, and put back to the bit."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.utils import resolve_quantization_backend
from torch import nn
from torch.distributed.tensor import DTensor

from ...editing.weights import float_weight, is_packed, is_quantized, offload_hook


# What bitsandbytes keeps on the layer beside the Parameter.
_BESIDE = ("state", "quant_state")
RESHARD = "Call `reshard()` of the model that `fully_shard` returned first: after a forward pass it keeps its own weights gathered."


@dataclass
class StoredWeight:
    """Everything about a base layer that merging replaces.

    The Parameters themselves are kept and not their values: putting them back is exact and restores ties, too. Of an offloaded
    layer it is the map that accelerate loads them from. Sharded Parameters keep their place, as FSDP2 knows them by it: of those
    it is this process's shard.
    """

    base: nn.Module
    weight: str
    parameters: dict[str, nn.Parameter | None]
    attributes: dict[str, Any]
    beside: dict[str, Any]
    weights_map: Any
    shards: dict[str, torch.Tensor]

    @classmethod
    def of(cls, base: nn.Module, names: tuple[str, str | None] = ("weight", "bias")) -> StoredWeight:
        """What `base` holds now. `names` are those of its weight and its bias."""
        parameters = {name: parameter for name, parameter in base._parameters.items() if name in names}
        weight = parameters.get(names[0])
        attributes = {} if weight is None or isinstance(weight, DTensor) else dict(vars(weight))
        # a shallow copy: the libraries empty these objects and do not write into their tensors
        beside = {name: copy.copy(vars(base)[name]) for name in _BESIDE if name in vars(base)}
        weights_map = getattr(offload_hook(base), "weights_map", None)
        sharded: dict[str, Any] = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
        shards = {name: parameter.to_local().detach().clone() for name, parameter in sharded.items()}
        return cls(base, names[0], parameters, attributes, beside, weights_map, shards)

    def put_back(self, layer: Any) -> None:
        """Puts everything back as it was into the base layer of `layer`, wherever the model is by now."""
        now = layer.get_base_layer()
        if now is not self.base:  # quantised, it was replaced as a whole
            layer.base_layer = self.base
        if self.weights_map is not None:
            cast(Any, offload_hook(self.base)).weights_map = self._weights_to_load()
            return
        for name, parameter in self.parameters.items():
            current = getattr(now, name, None)
            if parameter is None or current is None:
                continue
            if isinstance(parameter, DTensor):
                self._put_shard_back(name, parameter, current)
                continue
            if type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor:
                # the model may have been moved or cast in the meantime
                parameter.data = parameter.data.to(current)
            elif parameter.device != current.device:
                parameter = cast(nn.Parameter, parameter.to(current.device))
            setattr(self.base, name, parameter)
        vars(self.base).update(self.beside)
        if self.attributes:
            vars(getattr(self.base, self.weight)).update(self.attributes)

    @torch.no_grad()
    def _put_shard_back(self, name: str, parameter: DTensor, current: torch.Tensor) -> None:
        if current is not parameter:
            raise RuntimeError(f"Cannot put the {name} of {self.base} back while FSDP holds it gathered. {RESHARD}")
        parameter.to_local().copy_(self.shards[name])

    def _weights_to_load(self) -> Any:
        """The map for accelerate: as it was, but for Parameters that are not ours."""
        names = self.base._parameters.keys()
        if names <= self.parameters.keys():
            return self.weights_map
        now = cast(Any, offload_hook(self.base)).weights_map
        return {name: (self.weights_map if name in self.parameters else now)[name] for name in names}


def keep_packed_weights(model: nn.Module) -> None:
    """Lets `model.state_dict()`, and so saving, leave 4-bit weights of bitsandbytes as they are.

    On a CPU they are packed in the first forward pass; reading their state unpacks them for good, without the order of their
    scales (bitsandbytes 0.50.2).
    """
    model.register_state_dict_pre_hook(_remember_packed)
    model.register_state_dict_post_hook(_pack_again)


def _remember_packed(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    packed = [(module.weight, module.weight.data) for module in model.modules() if is_packed(module)]
    vars(model)["_packed"] = [(weight, data, dict(vars(cast(Any, weight).quant_state))) for weight, data in packed]


def _pack_again(model: nn.Module, *args: Any) -> None:
    for weight, data, state in vars(model).pop("_packed", ()):
        weight.data = data
        vars(weight.quant_state).clear()
        vars(weight.quant_state).update(state)


def quantization_backend(base: nn.Module, get_apply_tensor_subclass: Any | None) -> Any | None:
    """PEFT's backend for a quantised base layer, `None` for one in floating point.

    Args:
        base (`nn.Module`): The base layer.
        get_apply_tensor_subclass (`Callable`, *optional*):
            For torchao: the function of the model's quantisation config that says how weights are quantised. Without it weights can
            be read but not be requantised.
    """
    if not is_quantized(base):
        return None
    backend = resolve_quantization_backend(base, get_apply_tensor_subclass=get_apply_tensor_subclass or (lambda: None))
    if backend is not None and backend.backend_name == "torchao" and get_apply_tensor_subclass is None:
        backend.supports_merge = False
    return backend


def check_can_be_replaced(base: nn.Module, backend: Any | None, name: str = "weight") -> None:
    """Raises a `TypeError` if no merged weight can be stored in the layer, a `RuntimeError` if none can be now."""
    remedy = "Keep the adapter unmerged, which needs no float weights and loses nothing"
    weight = getattr(base, name, None)
    if getattr(base, "_is_fsdp_managed_module", False) and not isinstance(weight, DTensor):
        raise RuntimeError(f"Cannot change the {name} of {base} while FSDP holds it gathered. {RESHARD}")
    if backend is None:
        return
    if isinstance(weight, DTensor):
        raise TypeError(
            f"Cannot merge into a weight that is both quantised and sharded ({weight.placements}). {remedy}, or merge into an "
            "unsharded model."
        )
    if offload_hook(base) is not None:
        raise TypeError(f"Cannot merge into a weight that is both quantised and offloaded. {remedy}.")
    if backend.supports_merge:
        return
    if backend.backend_name == "torchao":
        raise TypeError(
            "Cannot merge into a torchao weight: the model does not say how it was quantised, since it was not loaded with a "
            f"`TorchAoConfig`. {remedy}."
        )
    raise TypeError(
        f"Cannot merge into a {backend.backend_name} layer, which cannot be requantised. {remedy}, or merge into the model before it "
        "is quantised."
    )


def replace_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Stores a new weight, `(out_features, in_features)`, in the quantised base layer of `layer`, and returns what came of it.

    Raises:
        `TypeError`: The layer did not come out quantised as it was.
    """
    base = layer.get_base_layer()
    before = type(getattr(base, "weight", None))
    with torch.no_grad():
        layer.quantization_backend.set_base_weight(layer, weight.contiguous())
    base = layer.get_base_layer()
    if type(getattr(base, "weight", None)) is not before and before is not type(None):
        raise TypeError(
            f"Requantising gave a {type(base.weight).__name__} in the place of a {before.__name__}: the way the model was quantised does "
            "not apply to a single layer. Keep the adapter unmerged."
        )
    return float_weight(base)
