"""The ENGRAM tuner: which layers get an adapter, and what is done to all of them at once."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import get_quantization_kwargs
from peft.utils.error import NoMatchingPeftModuleError
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from ...editing.experts import ParameterStack
from ...editing.extraction import ExtractionReport
from ...editing.item_edit import ItemReport
from ...editing.parameters import expert_parameters, parameter_stack, select_parameters
from ...editing.selection import (
    Selection,
    base_layer_of,
    check_layers_exist,
    check_supported,
    input_embedding,
    no_match_message,
    outer_modules,
    output_head,
    select_layers,
    unwrap,
)
from ...editing.tuning import AlphaCurve
from ...sharded import gathered
from ..arguments import check_adapter_exists, check_adapter_name, check_weighted_sum
from ..loading import check_adapter_tensors, remove_unloaded, shard_adapter_tensors
from ..mixed_batches import check_adapter_names, handed_adapter_names
from .config import EngramConfig, exact_pattern
from .experts import ParamWrapper, nested_names
from .layer import EditedLayer, EngramLayer
from .stored import check_can_be_replaced, keep_packed_weights


class EngramModel(BaseTuner):
    """
    Creates a model whose layers can be edited in closed form (ENGRAM) from a pretrained model.

    Args:
        model (`torch.nn.Module`): The model to which the adapter tuner layers will be attached.
        peft_config (`EngramConfig`): The configuration of the ENGRAM adapter.
        adapter_name (`str`): The name of the adapter, defaults to `"default"`.
        low_cpu_mem_usage (`bool`, `optional`, defaults to `False`):
            Create empty adapter weights on meta device. Useful to speed up the loading process.
        state_dict (`dict[str, torch.Tensor]`, *optional*):
            If given, its keys say which layers get an adapter.

    Example:

        ```py
        >>> from peft import get_peft_model
        >>> from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics

        >>> model = get_peft_model(model, EngramConfig(target_modules=["down_proj"]))
        >>> target = collect_statistics(model, forget_loader)
        >>> retain = collect_statistics(model, retain_loader)
        >>> extract_engram(model, target, merge_statistics(target, retain))
        ```

    **Attributes**:
        - **model** (`~torch.nn.Module`) -- The model to be adapted.
        - **peft_config** (`EngramConfig`): The configuration of the ENGRAM adapter.
        - **curves** (`dict[str, AlphaCurve]`): What `unlearn(alpha="auto")` saw, by adapter.
        - **reports** (`dict[str, ItemReport | ExtractionReport]`): What `unlearn` found, by adapter.
    """

    prefix: str = "engram_"
    tuner_layer_cls = EngramLayer
    target_module_mapping: dict[str, list[str]] = {}  # a default for every model: see `_prepare_adapter_config`

    def __init__(
        self,
        model: nn.Module,
        peft_config: EngramConfig | dict[str, EngramConfig],
        adapter_name: str,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        # the layers of the model itself are edited, beside whatever adapters of other kinds it has
        if not isinstance(model, PeftModel) or not isinstance(model.base_model, EngramModel):
            model = unwrap(model)
        required_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        others = vars(model).get("peft_config") or {}
        is_beside = any(not isinstance(config, EngramConfig) for config in others.values())
        if is_beside:
            del model.peft_config  # PEFT would put ours among them, in the place of one with the same name
        try:
            super().__init__(
                model, peft_config, adapter_name, low_cpu_mem_usage=low_cpu_mem_usage, state_dict=state_dict
            )
        finally:
            if is_beside:
                vars(model)["peft_config"] = {**vars(model).get("peft_config", {}), **others}
        keep_packed_weights(self)
        self._required_grad = required_grad
        self.reports: dict[str, ExtractionReport | ItemReport] = {}
        self.curves: dict[str, AlphaCurve] = {}

    # ---------------------------------------------------------------------------------------------- injection

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Adds the adapter layers, after every check that can be made before the model is touched."""
        config = self.peft_config[adapter_name]
        _check_adapter_name(model, adapter_name)
        try:
            with warnings.catch_warnings():
                # PEFT looks among modules only
                warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
                super().inject_adapter(model, adapter_name, *args, **kwargs)
        except NoMatchingPeftModuleError as error:
            if "not found in the base model" not in str(error):
                raise
            raise NoMatchingPeftModuleError(no_match_message(model, config.target_modules)) from None
        _warn_of_unmatched_patterns(config, self.engram_layers(adapter_name))

    def _prepare_adapter_config(self, peft_config: EngramConfig, model_config: dict[str, Any]) -> EngramConfig:
        everything = peft_config.target_modules in (None, "all-linear") and peft_config.target_parameters is None
        if everything and peft_config.target_experts:
            peft_config.target_parameters = expert_parameters(self.model, Selection.of(peft_config)) or None
        if peft_config.target_modules is None and everything:
            if model_config.get("model_type", "custom") == "custom":
                raise ValueError("Please specify `target_modules` in `peft_config`")
            selection = replace(Selection.of(peft_config), target_parameters=None)
            peft_config.target_modules = set(select_layers(self.model, selection))
        elif peft_config.target_modules is None:
            peft_config.target_modules = set()
        return peft_config

    def _prepare_model(self, peft_config: EngramConfig, model: nn.Module) -> None:
        if peft_config.target_modules != "all-linear":
            check_layers_exist(model, peft_config)
            check_supported(model, Selection.of(peft_config))
        _check_unwrapped(model, select_parameters(model, Selection.of(peft_config)))

    def _inject_parameters(
        self, peft_config: EngramConfig, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool
    ) -> list[str]:
        # PEFT matches suffixes alone: `layers_to_transform` and `exclude_modules` hold for Parameters, too
        stacks = select_parameters(model, Selection.of(peft_config))
        chosen = replace(peft_config, target_parameters=list(stacks))
        return super()._inject_parameters(chosen, model, adapter_name, low_cpu_mem_usage) if stacks else []

    def _create_and_replace(
        self,
        engram_config: EngramConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
        **optional_kwargs: Any,
    ) -> None:
        if current_key is None:
            raise ValueError("Current Key shouldn't be `None`")

        def pattern_value(pattern: dict[str, Any], default: Any) -> Any:
            return pattern.get(get_pattern_key(pattern.keys(), current_key), default)

        kwargs = {
            "config": engram_config,
            "r": pattern_value(engram_config.rank_pattern, engram_config.r),
            "requested_rank": pattern_value(engram_config.requested_rank_pattern(), engram_config.r),
            "alpha": pattern_value(engram_config.alpha_pattern, engram_config.alpha),
        }
        new_module: nn.Module
        if parameter_name is not None:
            kwargs["expert_ranks"] = engram_config.expert_ranks.get(current_key)
            if isinstance(target, ParamWrapper) and target.parameter_name == parameter_name:
                target.update_layer(adapter_name, **kwargs)
                return
            stack = parameter_stack(current_key, base_layer_of(target), parameter_name)
            new_module = ParamWrapper(target, adapter_name, stack, **kwargs)
        else:
            enclosing: tuple[BaseTunerLayer, ...] = ()
            while isinstance(target, BaseTunerLayer) and not isinstance(target, EngramLayer):
                # beside an adapter of another kind: what is edited is the layer inside
                parent, target_name, target, enclosing = target, "base_layer", target.base_layer, (*enclosing, target)
            if isinstance(target, EngramLayer):
                target.update_layer(adapter_name, **kwargs)
                return
            new_module = EditedLayer(
                target, adapter_name, enclosing=enclosing, **kwargs, **get_quantization_kwargs(self.model)
            )
        if adapter_name not in self.active_adapters:
            # adding an additional adapter: it is not automatically trainable
            new_module.requires_grad_(False)
        self._replace_module(parent, target_name, new_module, target)

    def _replace_module(self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module) -> None:
        # the layer is on its device already: PEFT would move it to where an offloaded weight is, the meta device
        setattr(parent, child_name, new_module)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        # a file must not depend on what other adapters wrap; and those of another kind may have the same name
        found = super()._get_adapter_state_dict(model, config, adapter_name, *args, **kwargs)
        found = {key: gathered(tensor) for key, tensor in found.items() if f".{cls.prefix}" in key}
        return _renamed(found, {name: alone for alone, name in _wrapper_names(model, adapter_name).items()})

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        names = _wrapper_names(model, adapter_name)
        prefix = "base_model.model."  # which files have, and models without a `PeftModel` around them do not
        state_dict = _renamed(state_dict, names | {prefix + alone: prefix + name for alone, name in names.items()})
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        own = _adapter_tensors(model, adapter_name)
        try:
            check_adapter_tensors(own, remapped, cls.prefix)
        except ValueError:
            remove_unloaded(model, adapter_name, EngramModel)
            raise
        return shard_adapter_tensors(own, remapped)

    def engram_layers(self, adapter_name: str | None = None) -> dict[str, EngramLayer]:
        """The ENGRAM layers, or those that have the adapter, by name."""
        return {
            module.public_name(_layer_name(name)): module
            for name, module in self.model.named_modules()
            if isinstance(module, EngramLayer) and (adapter_name is None or adapter_name in module.engram_A)
        }

    # ---------------------------------------------------------------------------------------------- strength

    def set_scale(self, adapter_name: str, scale: float) -> None:
        """Sets the strength of an adapter to `scale` times its `alpha`, as LoRA's `set_scale`. Nothing is recomputed.

        The value is kept in the config and saved with the adapter.

        Raises:
            `ValueError`: There is no such adapter, it is merged, or `scale` is not finite.
        """
        check_adapter_exists(self.peft_config, adapter_name)
        layers = self.engram_layers(adapter_name).values()
        for layer in layers:
            layer.check_scale(scale)  # of all before the first is changed
        for layer in layers:
            layer.set_scale(adapter_name, scale)
        self.peft_config[adapter_name].scale = float(scale)

    def item_strengths(self, adapter_name: str = "default") -> dict[str, float]:
        """The strength of every item of an adapter, by name: how much of it is taken out. 0 is nothing.

        Raises:
            `ValueError`: There is no such adapter, or it was not made item by item.
        """
        rows = self._rows_of_items(adapter_name)
        layer = next(iter(self.engram_layers(adapter_name).values()))
        strengths = layer.factors(adapter_name)[2].detach()
        return {name: float(strengths[chosen.start]) for name, chosen in rows.items()}

    def set_item_strength(self, item: str | int, value: float, adapter_name: str = "default") -> None:
        """Sets the strength of one item. Nothing is recomputed; the value is saved with the adapter.

        Args:
            item (`str` or `int`): Its name, or its place among the items.
            value (`float`): The strength: 0 gives the item back, more than now takes out more of it.
            adapter_name (`str`): Which adapter.

        Raises:
            `ValueError`: There is no such adapter or item, the adapter is merged, or the value is not finite.
        """
        rows = self._rows_of_items(adapter_name)
        if isinstance(item, int) and not isinstance(item, bool) and -len(rows) <= item < len(rows):
            item = list(rows)[item]
        if item not in rows:
            near = difflib.get_close_matches(str(item), rows, n=3, cutoff=0.4)
            raise ValueError(
                f"The adapter {adapter_name!r} has no item {item!r}. It has {len(rows)}"
                + (f"; the nearest are {near}." if near else f", for example {list(rows)[:3]}.")
            )
        layers = self.engram_layers(adapter_name).values()
        for layer in layers:
            layer.check_scale(value)  # of all before the first is changed
        for layer in layers:
            layer.set_row_strengths(adapter_name, torch.tensor(float(value)), rows[item])

    def restore_item(self, item: str | int, adapter_name: str = "default") -> None:
        """Gives one item back: sets its strength to 0."""
        self.set_item_strength(item, 0.0, adapter_name)

    def _rows_of_items(self, adapter_name: str) -> dict[str, slice]:
        """Which rows of the factors every item has."""
        check_adapter_exists(self.peft_config, adapter_name)
        items = self.peft_config[adapter_name].items
        if not items:
            raise ValueError(
                f"The adapter {adapter_name!r} was not made item by item, so it has one strength: use `set_scale`."
            )
        ends = list(accumulate(items.values()))
        return {name: slice(end - count, end) for (name, count), end in zip(items.items(), ends, strict=True)}

    # ---------------------------------------------------------------------------------------------- combining

    def add_weighted_adapter(self, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
        """
        Adds a new adapter that is exactly the weighted sum of others: their factors side by side. Weights may be negative.

        Args:
            adapters (`list[str]`): Names of the adapters to be combined.
            weights (`list[float]`): One weight an adapter.
            adapter_name (`str`): Name of the new adapter.
        """
        check_weighted_sum(self.peft_config, adapters, weights, adapter_name)
        if len({self.peft_config[name].absorb_bias for name in adapters}) > 1:
            raise ValueError("Adapters with different `absorb_bias` cannot be combined.")

        combined: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        for key, layer in self.engram_layers().items():
            weighted = [(name, w) for name, w in zip(adapters, weights, strict=True) if name in layer.engram_A]
            if weighted:
                combined[key] = {part: _side_by_side(own, weighted) for part, own in layer.parts(key).items()}
        parameters = {key for key, layer in self.engram_layers().items() if isinstance(layer, ParamWrapper)}
        self.peft_config[adapter_name] = replace(
            self.peft_config[adapters[0]],
            r=None, alpha=1.0, scale=1.0, alpha_pattern={}, extraction=None, items=self._items_of_sum(adapters), init_weights=True, description=None,
            target_modules=combined.keys() - parameters, exclude_modules=None, layers_to_transform=None, layers_pattern=None,
            target_parameters=[key for key in combined if key in parameters] or None,
            rank_pattern=exact_pattern({key: parts[key][0].shape[-2] for key, parts in combined.items() if key in parts}),
            expert_ranks={key: [len(part[0]) for part in parts.values()] for key, parts in combined.items() if key not in parts},
        )  # fmt: skip
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        layers = self.engram_layers(adapter_name)
        for key, parts in combined.items():
            layers[key].fill_parts(adapter_name, parts)

    def _items_of_sum(self, adapters: Sequence[str]) -> dict[str, int] | None:
        """The items of adapters whose factors lie side by side; `None` where their rows do not lie alike in every layer."""
        parts = [self.peft_config[name].items for name in adapters]
        layers = [self.engram_layers(name).keys() for name in adapters]
        if not all(parts) or any(other != layers[0] for other in layers) or len(set(adapters)) < len(adapters):
            return None
        names = [name for items in parts for name in items or ()]
        unique = len(set(names)) == len(names)
        return {
            name if unique else f"{adapter}/{name}": count
            for adapter, items in zip(adapters, parts, strict=True)
            for name, count in (items or {}).items()
        }

    # ---------------------------------------------------------------------------------------------- merging

    def merge_adapter(
        self, adapter_names: list[str] | None = None, safe_merge: bool = False, untie: bool = False
    ) -> None:
        """
        This method merges the adapter layers into the base model; `EngramModel.unmerge_adapter` restores it to the bit.

        A quantised weight is quantised again, which rounds the change: see `EngramModel.requantization_errors`. Layers that
        cannot be requantised, and sharded ones, refuse with a `TypeError`.

        Args:
            adapter_names (`list[str]`, *optional*):
                The list of adapter names that should be merged. If `None`, all active adapters will be merged.
            safe_merge (`bool`, *optional*):
                If `True`, all results are checked for NaN and infinity before any layer is touched.
            untie (`bool`, *optional*):
                Whether a layer that shares its weight with another one (a head tied to the embedding) may get a weight of its
                own. If `False`, merging such a layer is refused.
        """
        self._check_can_merge(adapter_names, untie)
        merged_before = {layer: layer.merged_adapters for layer in self.engram_layers().values()}
        try:
            for layer in self.engram_layers().values():
                layer.merge(adapter_names=adapter_names, safe_merge=safe_merge)
        except Exception:
            for layer, names in merged_before.items():
                if layer.merged_adapters != names:
                    layer.unmerge()
                    if names:
                        layer.merge(adapter_names=names)
            raise
        if untie:
            self._set_tied(False)
        self._warn_of_requantizing()
        merged = {name for layer in self.engram_layers().values() for name in layer.merged_adapters}
        idle = [name for name in self.active_adapters if name not in merged]
        if merged and idle:
            warnings.warn(
                f"The adapters {idle} are active but not merged: they have no effect until `unmerge_adapter()` is called.",
                stacklevel=2,
            )

    def unmerge_adapter(self) -> None:
        """Puts the weights of the base model back, to the bit, and ties what was tied."""
        self._reshard()
        for layer in self.engram_layers().values():
            layer.unmerge()
        self._set_tied(True)

    def merge_and_unload(
        self,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        untie: bool = False,
    ) -> nn.Module:
        """
        This method merges the adapter layers into the base model and returns it without any adapter.

        Args:
            progressbar (`bool`): Whether to show a progressbar.
            safe_merge (`bool`): See `EngramModel.merge_adapter`.
            adapter_names (`list[str]`, *optional*): See `EngramModel.merge_adapter`.
            untie (`bool`): See `EngramModel.merge_adapter`.
        """
        if safe_merge or untie:
            # all or nothing: a layer that cannot be merged must not leave half a model behind
            self.merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge, untie=untie)
            return self._unload_and_optionally_merge(merge=False, progressbar=progressbar)
        self._check_can_merge(adapter_names, untie)
        return super().merge_and_unload(progressbar=progressbar, adapter_names=adapter_names)

    def requantization_errors(self) -> dict[str, float]:
        """How far merged layers with quantised weights are from what they should be, by name.

        The error is a share of the change that was merged, `||stored - (W + dW)|| / ||dW||`: at 1 rounding is as large as the
        edit. Unmerged there is none.
        """
        errors = {name: layer.requantization_error for name, layer in self.engram_layers().items()}
        return {name: error for name, error in errors.items() if error is not None}

    def _warn_of_requantizing(self) -> None:
        errors = self.requantization_errors()
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            warnings.warn(
                f"Merging quantised {len(errors)} weights again. The rounding is {sum(errors.values()) / len(errors):.2g} times as large "
                f"as the edit on average, at most {errors[worst]:.2g} times ({worst}). The unmerged adapter has no such error.",
                stacklevel=3,
            )

    def unload(self) -> nn.Module:
        """Returns the base model, as it was, by removing all the PEFT modules; merged adapters are unmerged first."""
        self._unmerge_if_merged()
        return super().unload()

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        # only this tuner's layers; PEFT's own way of loading offloaded weights knows neither every kind of them nor ours
        for layer in logging.tqdm(self.engram_layers().values(), disable=not progressbar, desc="Unloading"):
            if merge:
                layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        if merge:
            self._warn_of_requantizing()
        for module in list(self.model.modules()):
            for name, child in module.named_children():
                if isinstance(child, EngramLayer):
                    setattr(module, name, _without_wrappers_of_ours(child))
        if any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
            # other adapters stay
            configs = getattr(self.model, "peft_config", {})
            for name in [name for name, config in configs.items() if config is self.peft_config.get(name)]:
                del configs[name]
            return self.model
        return super()._unload_and_optionally_merge(merge=merge)

    def take_off(self) -> nn.Module:
        """`unload`, with the base model's `requires_grad` flags as they were before any adapter: for edits that failed."""
        model = self.unload()
        for parameter, required_grad in self._required_grad:
            parameter.requires_grad_(required_grad)
        return model

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        for module in self.model.modules():
            if isinstance(module, EngramLayer | AuxiliaryTrainingWrapper):
                module.enable_adapters(enabled)

    def disable_adapter_layers(self) -> None:
        """Disables all adapters: the model is the base model, to the bit. Merged adapters are unmerged first."""
        self._unmerge_if_merged()
        super().disable_adapter_layers()

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Sets the active adapter(s), several at once if a list is given. PEFT unmerges what is merged, with a warning."""
        super().set_adapter(adapter_name, inference_mode=inference_mode)
        self._set_tied(True)

    def _unmerge_if_merged(self) -> None:
        if any(layer.merged for layer in self.engram_layers().values()):
            self.unmerge_adapter()

    def _check_merge_allowed(self) -> None:
        """Ties are handled exactly: see `EngramModel._check_untied`."""

    def _check_tied_modules(self, model: nn.Module, peft_config: EngramConfig) -> None:
        # PEFT warns of an adapter on one side of a tie; this one edits its input, and the tie is none of its business
        if peft_config.modules_to_save:
            super()._check_tied_modules(model, peft_config)

    def _check_can_merge(self, adapter_names: list[str] | None, untie: bool) -> None:
        """Raises an error, before the first layer is touched, if one cannot be merged into."""
        self._reshard()
        for layer in self.engram_layers().values():
            if any(name in layer.engram_A for name in (adapter_names or self.active_adapters)):
                check_can_be_replaced(layer.get_base_layer(), layer.quantization_backend, layer._base_names[0])
        self._check_untied(adapter_names, untie)

    def _reshard(self) -> None:
        """Frees what FSDP2 still holds of gathered weights since the last forward pass: merging writes the shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _check_untied(self, adapter_names: list[str] | None, untie: bool) -> None:
        """Raises a `ValueError` if a weight that is to change belongs to another layer as well."""
        names = self.active_adapters if adapter_names is None else adapter_names
        owners: dict[int, list[str]] = {}
        for key, module in self.model.named_modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(key)
        for key, layer in self.engram_layers().items():
            weight = getattr(layer.get_base_layer(), layer._base_names[0], None)
            shared = owners.get(id(weight), [])
            if len(shared) > 1 and isinstance(weight, DTensor) and any(name in layer.engram_A for name in names):
                raise ValueError(
                    f"{key} shares its weight with other layers, and it is sharded: it cannot be given one of its own. Keep the adapter "
                    "unmerged, where the tie does not matter, or merge it into an unsharded model."
                )
            if not untie and len(shared) > 1 and any(name in layer.engram_A for name in names):
                others = [owner for owner in shared if self.model.get_submodule(owner) is not layer.get_base_layer()]
                raise ValueError(
                    f"{key} shares its weight with {others}: merging would give it a weight of its own. Pass `untie=True` if "
                    "that is what you want, or keep the adapter unmerged, where the tie does not matter."
                )

    def _set_tied(self, tied: bool) -> None:
        """Keeps `config.tie_word_embeddings` true to the weights of a model whose head was tied."""
        head, embedding = output_head(self.model), input_embedding(self.model)
        if head is None or embedding is None:
            return
        config = self.model.config
        is_tied = head.weight is embedding.weight
        if not tied and config.tie_word_embeddings and not is_tied:
            config.tie_word_embeddings = False
            self._untied = True
        elif tied and is_tied and getattr(self, "_untied", False):
            config.tie_word_embeddings = True
            self._untied = False

    # ---------------------------------------------------------------------------------------------- mixed batches

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # `adapter_names` of `forward` and `generate` reaches the layers by pre-hooks, as in LoRA
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        check_adapter_names(self, self.peft_config, adapter_names)
        beams = kwargs.get("num_beams") or getattr(kwargs.get("generation_config"), "num_beams", None) or 1
        if isinstance(beams, int) and beams > 1:
            adapter_names = [name for name in adapter_names for _ in range(beams)]
        readers = [module for module in self.modules() if isinstance(module, EngramLayer | AuxiliaryTrainingWrapper)]
        with handed_adapter_names(readers, adapter_names):
            yield

    # ---------------------------------------------------------------------------------------------- export

    def save_as_lora(self, save_directory: str | os.PathLike, adapter_name: str = "default") -> None:
        """Saves an adapter as a stock LoRA adapter: see `interop.lora.save_as_lora`."""
        from ...interop.lora import save_as_lora

        check_adapter_exists(self.peft_config, adapter_name)
        save_as_lora(save_directory, self, adapter_name)


def _layer_name(name: str) -> str:
    """A layer's name without the wrappers that it lies in."""
    return re.sub(r"(\.base_layer)+$", "", name)


def _side_by_side(
    layer: Any, weighted: Sequence[tuple[str, float]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The factors of the weighted sum of a layer's adapters: `A`, `B` and the strengths."""
    factors = [tuple(tensor.detach().float() for tensor in layer.factors(name)) for name, _ in weighted]
    strengths = [
        weight * layer.engram_scaling[name] * own[2] for (name, weight), own in zip(weighted, factors, strict=True)
    ]
    right, left = torch.cat([own[0] for own in factors], dim=-2), torch.cat([own[1] for own in factors], dim=-1)
    dtype = layer.dtype_of(weighted[0][0])
    return right.to(dtype), left.to(dtype), torch.cat(strengths)


def _without_wrappers_of_ours(layer: nn.Module) -> nn.Module:
    """What lies inside: wrappers of several Parameters of a module are nested."""
    while isinstance(layer, EngramLayer):
        layer = cast(nn.Module, layer.base_layer)
    return layer


def _warn_of_unmatched_patterns(config: EngramConfig, names: Iterable[str]) -> None:
    """Warns of ranks and strengths that are given for nothing."""
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field)
        unmatched = [key for key in patterns if not any(re.match(rf"(.*\.)?({key})$", name) for name in names)]
        if unmatched:
            warnings.warn(
                f"The following {field} keys did not match any targeted module or parameter and were ignored: {sorted(unmatched)}.",
                RuntimeWarning,
                stacklevel=3,
            )


def _check_adapter_name(model: nn.Module, adapter_name: str) -> None:
    reserved = {*EngramLayer.adapter_layer_names, *EngramLayer.other_param_names, "base_layer", "weight", "bias"}
    check_adapter_name(adapter_name, reserved, [key for key, _ in outer_modules(model)])


def _adapter_tensors(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """Every factor of an adapter, by its name in `model`."""
    return {
        f"{key}.{part}": tensor
        for key, module in model.named_modules()
        if isinstance(module, EngramLayer) and adapter_name in module.engram_A
        for part, tensor in module.state_dict().items()
        if part.startswith(tuple(f"{name}.{adapter_name}." for name in module.adapter_layer_names))
    }


def _wrapper_names(model: nn.Module, adapter_name: str) -> dict[str, str]:
    """What the layers that have the adapter are called in the model, by what they would be called without other adapters.

    Only those that are called otherwise.
    """
    wrappers, names, own = {}, {}, {}
    for name, module in model.named_modules():
        if not isinstance(module, EngramLayer) or adapter_name not in module.engram_A:
            continue
        public = module.public_name(_layer_name(name))
        names[public] = name
        if isinstance(module, ParamWrapper):
            wrappers[public] = module
        else:
            own[public] = public
    own |= nested_names(wrappers)
    return {alone: names[public] for public, alone in own.items() if alone != names[public]}


def _check_unwrapped(model: nn.Module, stacks: dict[str, ParameterStack]) -> None:
    """Raises a `TypeError` for Parameters that an adapter of another kind changes: an edit of the input would edit that, too."""
    modules = {stack.module: name for name, stack in stacks.items()}
    for _, module in outer_modules(model):
        name = modules.get(base_layer_of(module))
        while name is not None and isinstance(module, BaseTunerLayer):
            if not isinstance(module, EngramLayer):
                raise TypeError(
                    f"Target parameter {name} is wrapped by another adapter ({type(module).__module__.split('.')[-2]}). Merge that first, or "
                    "leave the module out (`target_experts=False`, `exclude_modules`)."
                )
            module = cast(nn.Module, module.base_layer)


def _renamed(state_dict: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """The state dict with wrappers called otherwise."""

    def renamed(key: str) -> str:
        for old, new in names.items():
            if key.startswith(f"{old}.{EngramModel.prefix}"):
                return new + key.removeprefix(old)
        return key

    return {renamed(key): tensor for key, tensor in state_dict.items()}
