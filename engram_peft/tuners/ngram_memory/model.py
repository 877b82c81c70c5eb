"""The NGRAM_MEMORY tuner: which decoder layers get memories, and what is done to all of them at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from ...memory.layer import NgramMemory
from ...memory.packed import PackedTable, packed, row_problem, unpack_table, unpacked
from ...memory.stream import decoder_layers
from ...memory.token_map import check_token_map, grow_token_map
from ...sharded import gathered
from ..arguments import check_adapter_exists, check_adapter_name, check_weighted_sum
from ..loading import check_adapter_tensors, remove_unloaded, shard_adapter_tensors
from ..mixed_batches import check_adapter_names, handed_adapter_names
from .config import NgramMemoryConfig
from .layer import CHILD_NAME, MemoryLayer, TokenFeed, TokenMap


class NgramMemoryModel(BaseTuner):
    """
    Creates a model with hashed n-gram memories in front of some of its decoder layers from a pretrained model.

    Args:
        model (`torch.nn.Module`): The model to which the memories will be attached, one of transformers.
        peft_config (`NgramMemoryConfig`): The configuration of the memories.
        adapter_name (`str`): The name of the adapter, defaults to `"default"`.
        low_cpu_mem_usage (`bool`, `optional`, defaults to `False`):
            Create empty adapter weights on meta device. Useful to speed up the loading process.
        state_dict (`dict[str, torch.Tensor]`, *optional*): Not used: the config says which layers get a memory.

    Example:

        ```py
        >>> from peft import get_peft_model
        >>> from engram_peft import NgramMemoryConfig

        >>> config = NgramMemoryConfig(layers_to_transform=[1, 14], vocab_size=50_000)
        >>> model = get_peft_model(model, config.token_map_from(tokenizer))
        ```

    **Attributes**:
        - **model** (`~torch.nn.Module`) -- The model to be adapted.
        - **peft_config** (`NgramMemoryConfig`): The configuration of the memories.
    """

    prefix: str = "ngram_memory_"
    tuner_layer_cls = MemoryLayer
    target_module_mapping: dict[str, list[str]] = {}  # decoder layers are found in every model

    def __init__(
        self,
        model: nn.Module,
        peft_config: NgramMemoryConfig | dict[str, NgramMemoryConfig],
        adapter_name: str,
        low_cpu_mem_usage: bool = False,
        state_dict: dict[str, torch.Tensor] | None = None,
    ) -> None:
        if adapter_name in (getattr(model, "peft_config", None) or {}):
            raise ValueError(
                f"Adapter with name '{adapter_name}' already exists. Adapters of different kinds on one model share their names; "
                "pass another `adapter_name`."
            )
        required_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        # Stacked on LoRA or ENGRAM, it holds the model that they hold, not their `PeftModel`: files then name its modules alike.
        super().__init__(
            base_model_of(model), peft_config, adapter_name, low_cpu_mem_usage=low_cpu_mem_usage, state_dict=state_dict
        )
        self._required_grad = required_grad

    # ---------------------------------------------------------------------------------------------- injection

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Adds the memories, after every check that can be made before the model is touched."""
        kwargs.pop("state_dict", None)
        config = self.peft_config[adapter_name]
        _check_adapter_name(model, adapter_name)
        config.fit_to(model.config)
        spec = config.memory_spec(model.config)
        layers = decoder_layers(model)
        names = {id(module): name for name, module in model.named_modules()}
        self._layer_ids = {names[id(layers[index])]: index for index in spec.layer_ids}
        _check_free(layers[index] for index in spec.layer_ids)
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        config.touched_rows = None  # describes the file that the weights come from, not this model

    def _prepare_adapter_config(
        self, peft_config: NgramMemoryConfig, model_config: dict[str, Any]
    ) -> NgramMemoryConfig:
        return peft_config

    def _check_target_module_exists(self, peft_config: NgramMemoryConfig, key: str) -> bool:
        return key in self._layer_ids

    def _check_tied_modules(self, model: nn.Module, peft_config: NgramMemoryConfig) -> None:
        if peft_config.modules_to_save:
            super()._check_tied_modules(model, peft_config)

    def _create_and_replace(
        self,
        config: NgramMemoryConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **optional_kwargs: Any,
    ) -> None:
        spec = config.memory_spec(self.model.config)
        layer_id = self._layer_ids[current_key]
        layer: Any = getattr(target, CHILD_NAME, None)
        if layer is None:
            layer = MemoryLayer(target, self._feed())
            layer.set_adapter(self.active_adapters)
        layer.update_layer(
            adapter_name,
            spec,
            layer_id,
            token_map=_stored_map(config, self.model) if layer_id == spec.layer_ids[0] else None,
            masked_token_ids=config.masked_token_ids,
            init_weights=config.init_weights,
            touched_rows=(config.touched_rows or {}).get(str(layer_id)) if config.inference_mode else None,
            inference_mode=config.inference_mode,
        )
        if adapter_name not in self.active_adapters:
            # adding an additional adapter: it is not automatically trainable
            layer.set_requires_grad(adapter_name, False)

    def _feed(self) -> TokenFeed:
        """What all memories of the model are fed by; made with the first one."""
        for layer in self.memory_layers().values():
            return layer.feed
        layers = decoder_layers(self.model)
        feed = TokenFeed(len(layers))
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel) and any(child is layers for child in module.modules()):
                feed.listen_to(module)
        return feed

    def memory_layers(self, adapter_name: str | None = None) -> dict[int, MemoryLayer]:
        """The layers with memories, or those that have the adapter, by the number of the decoder layer."""
        return {
            index: memory
            for index, layer in enumerate(decoder_layers(self.model))
            if isinstance(memory := getattr(layer, CHILD_NAME, None), MemoryLayer)
            and (adapter_name is None or adapter_name in memory.ngram_memory_layer)
        }

    def memories(self, adapter_name: str = "default") -> dict[int, NgramMemory]:
        """The memories of an adapter, by the number of the decoder layer.

        Raises:
            `ValueError`: There is no such adapter.
        """
        check_adapter_exists(self.peft_config, adapter_name)
        return {index: layer.memory_of(adapter_name) for index, layer in self.memory_layers(adapter_name).items()}

    def token_map(self, adapter_name: str = "default") -> torch.Tensor | None:
        """The class of every token id, `(vocab_size,)` int64; `None` if ids are hashed as they are."""
        check_adapter_exists(self.peft_config, adapter_name)
        for layer in self.memory_layers().values():
            if adapter_name in layer.ngram_memory_token_map:
                return cast(TokenMap, layer.ngram_memory_token_map[adapter_name]).ids
        return None

    def check_tokenizer(self, tokenizer: Any, adapter_name: str = "default") -> None:
        """Makes sure that a tokenizer is the one that an adapter's token map was made from; without a map, any will do.

        Raises:
            `ValueError`: It is not; the message names the first token that differs.
        """
        if (token_map := self.token_map(adapter_name)) is not None:
            check_token_map(token_map, tokenizer)

    def delete_adapter(self, adapter_name: str) -> None:
        """Deletes an adapter. If it was the only active one, another becomes active."""
        super().delete_adapter(adapter_name)
        others = [name for name, config in self.peft_config.items() if isinstance(config, NgramMemoryConfig)]
        if others and not any(name in others for name in self.active_adapters):
            self.set_adapter(others[0])  # PEFT asks the first layer only, which may have none of the others

    # ---------------------------------------------------------------------------------------------- saving

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: NgramMemoryConfig,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        """The adapter's entries, with touched rows instead of tables where they are smaller."""
        selected = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        selected = {key: gathered(tensor) for key, tensor in selected.items()}
        touched: dict[str, int] = {}
        for key, layer in _memory_layers(model, adapter_name).items():
            name = f"{key}.ngram_memory_layer.{adapter_name}.table"
            if f"{name}.rows" not in selected:
                if (parts := packed(selected[f"{name}.weight"])) is None:
                    continue
                selected[f"{name}.rows"], selected[f"{name}.weight"] = parts
            touched[str(layer.memory_of(adapter_name).layer_id)] = len(selected[f"{name}.rows"])
        config.touched_rows = touched or None
        return selected

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # Below another tuner, the model has PEFT's prefix twice; files name modules as in the plain model.
        key = re.sub(r"^(base_model\.model\.)+", "base_model.model.", key)
        return re.sub(rf"(\.ngram_memory_\w+)\.{re.escape(adapter_name)}\.", r"\1.", key)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        try:
            rest, tables = _fit_tables(cls, model, config, adapter_name, state_dict)
            loaded = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, rest) | tables
            own = _adapter_tensors(model, adapter_name)
            check_adapter_tensors(own, loaded, cls.prefix)
        except ValueError:
            remove_unloaded(model, adapter_name, NgramMemoryModel)
            raise
        return shard_adapter_tensors(own, loaded)

    # ---------------------------------------------------------------------------------------------- combining

    def add_weighted_adapter(self, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
        """
        Adds a new adapter whose rows are the weighted sum of others' rows. They must hash alike: the same sizes, seed and token map.

        What all of them share with their rows (projections, norms, convolutions) is averaged with the weights; where it is the
        same, it stays what it is, and the values that the rows stand for are summed exactly.

        Args:
            adapters (`list[str]`): Names of the adapters to be combined.
            weights (`list[float]`): One weight an adapter.
            adapter_name (`str`): Name of the new adapter.

        Raises:
            `ValueError`: They do not hash alike, or an argument is not what it should be.
        """
        check_weighted_sum(self.peft_config, adapters, weights, adapter_name)
        self._check_hash_alike(adapters)
        first = self.peft_config[adapters[0]]
        combined = {
            index: _weighted_sum([layer.memory_of(name) for name in adapters], weights)
            for index, layer in self.memory_layers(adapters[0]).items()
        }
        config = replace(first, init_weights=True, touched_rows=None)
        config._token_map = self.token_map(adapters[0])
        self.peft_config[adapter_name] = config
        try:
            self.inject_adapter(self.model, adapter_name)
        except Exception:
            del self.peft_config[adapter_name]
            raise
        for index, memory in self.memories(adapter_name).items():
            memory.load_state_dict(combined[index])

    def _check_hash_alike(self, adapters: Sequence[str]) -> None:
        first = adapters[0]
        expected = {index: memory.spec for index, memory in self.memories(first).items()}
        token_map = self.token_map(first)
        for name in adapters[1:]:
            for index in sorted(expected.keys() | (specs := self.memories(name)).keys()):
                mine, other = expected.get(index), specs[index].spec if index in specs else None
                if mine != other:
                    raise ValueError(
                        f"The adapters {first!r} and {name!r} do not hash alike, so their rows mean different things: in front of "
                        f"layer {index} they have {mine} and {other}."
                    )
            other_map = self.token_map(name)
            if not _equal_maps(token_map, other_map):
                raise ValueError(f"The adapters {first!r} and {name!r} have different token maps.")

    # ---------------------------------------------------------------------------------------------- merging

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Always raises a `ValueError`: a memory depends on the tokens."""
        raise ValueError(
            "An n-gram memory depends on the tokens, so it cannot be merged into weights. `merge_and_unload()` makes an "
            "`EngramForCausalLM` of the model and its memory, `unload()` gives the base model back."
        )

    def unmerge_adapter(self) -> None:
        """Does nothing: see `merge_adapter`."""

    def unload(self) -> nn.Module:
        """Returns the base model as it was; other adapters on it stay."""
        return self._unload_and_optionally_merge(merge=False)

    def take_off(self) -> nn.Module:
        """`unload`, with the base model's `requires_grad` flags as they were before any adapter: for loads that failed."""
        model = self.unload()
        for parameter, required_grad in self._required_grad:
            parameter.requires_grad_(required_grad)
        return model

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        """
        Returns an `EngramForCausalLM` that says the same: the base model with the memory as part of it. Nothing is copied.

        Args:
            progressbar (`bool`): Not used, as there is nothing to wait for.
            safe_merge (`bool`): Whether to check the memory for NaN and infinity first.
            adapter_names (`list[str]`, *optional*): The one adapter to keep, by default the active one.

        Raises:
            `ValueError`: Several adapters are active, or other adapters are on the model.
        """
        from ...models.engram import EngramForCausalLM
        from .export import lm_config

        names = self.active_adapters if adapter_names is None else adapter_names
        if len(names) != 1:
            raise ValueError(
                f"An `EngramForCausalLM` has one memory, but {len(names)} adapters are to be merged: {list(names)}. Combine them "
                "with `add_weighted_adapter` if they hash alike, or choose one."
            )
        name = names[0]
        check_adapter_exists(self.peft_config, name)
        base = self.model
        if others := [
            key for key, m in base.named_modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, MemoryLayer)
        ]:
            raise ValueError(f"Merge or unload the other adapters of the model first: {others[0]} belongs to one.")
        memories = self.memories(name)
        for memory in memories.values():
            unpack_table(memory)
        if safe_merge and not all(
            torch.isfinite(p).all() for memory in memories.values() for p in memory.parameters()
        ):
            raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        token_map = self.token_map(name)
        config = lm_config(self.peft_config[name], base.config, token_map)
        base = self._unload_and_optionally_merge(merge=True, adapter_names=[name])
        model = EngramForCausalLM.from_backbone(base, config)
        for index, memory in memories.items():
            model.memories[str(index)] = memory
        return model

    def _unload_and_optionally_merge(
        self,
        merge: bool = True,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        for key, module in list(self.model.named_modules()):
            if isinstance(module, AuxiliaryTrainingWrapper):
                parent, _, child = key.rpartition(".")
                plain = module.unload_and_optionally_merge_module(
                    merge=merge, safe_merge=safe_merge, adapter_names=adapter_names
                )
                setattr(self.model.get_submodule(parent), child, plain)
        layers = list(self.memory_layers().values())
        if layers:
            layers[0].feed.stop()
        for layer in layers:
            layer.take_off()
        for name in [n for n, config in self.peft_config.items() if isinstance(config, NgramMemoryConfig)]:
            del self.peft_config[name]
        if not self.peft_config and hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model

    # ---------------------------------------------------------------------------------------------- mixed batches

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        # `adapter_names` of `forward` and `generate`: one for each text of the batch
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is None:
            yield
            return
        check_adapter_names(self, self.peft_config, adapter_names)
        readers = [module for module in self.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
        feeds = {layer.feed for layer in self.memory_layers().values()}
        for feed in feeds:
            feed.adapter_names = list(adapter_names)
        try:
            with handed_adapter_names(readers, adapter_names):
                yield
        finally:
            for feed in feeds:
                feed.adapter_names = None


def base_model_of(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside PEFT's.

    Raises:
        `TypeError`: There is none.
    """
    while isinstance(model, PeftModel):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"N-gram memories need a `PreTrainedModel`, whose decoder layers and token ids they can find, got {type(model).__name__}."
        )
    return model


def _stored_map(config: NgramMemoryConfig, base: PreTrainedModel) -> torch.Tensor | None:
    """The token map that the adapter starts with: one entry for each row of the embeddings, or what a file will fill in."""
    if config.token_map is not None:
        vocab_size = base.config.get_text_config(decoder=True).vocab_size
        token_map = grow_token_map(config.token_map, max(vocab_size, len(config.token_map)))
        config.token_map_size = len(token_map)
        return token_map.clone()
    if config.token_map_size is not None:
        return torch.full((config.token_map_size,), -1)
    return None


def _equal_maps(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other.to(one.device))


def _weighted_sum(memories: list[NgramMemory], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """The state of a memory: rows are summed, what is shared is averaged."""
    states = [_whole_state(memory) for memory in memories]
    total = math.fsum(weights)
    combined = {}
    for key, first in states[0].items():
        tensors = [state[key].to(first.device) for state in states]
        if key == "table.weight":
            combined[key] = _weighted(tensors, weights)
        elif all(torch.equal(first, tensor) for tensor in tensors[1:]):
            combined[key] = first
        elif total == 0:
            raise ValueError(
                f"The adapters have different {key}, which can only be averaged: `weights` must not add up to 0, got {list(weights)}."
            )
        else:
            combined[key] = _weighted(tensors, [weight / total for weight in weights])
    return combined


def _weighted(tensors: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total += weight * tensor
    return total


def _whole_state(memory: NgramMemory) -> dict[str, torch.Tensor]:
    state = {key: gathered(tensor) for key, tensor in memory.state_dict().items()}
    if (rows := state.pop("table.rows", None)) is not None:
        state["table.weight"] = unpacked(rows, state["table.weight"], sum(memory.spec.head_sizes(memory.layer_id)))
    return state


# ------------------------------------------------------------------------------------------------- checks


def _check_free(layers: Any) -> None:
    for layer in layers:
        taken = getattr(layer, CHILD_NAME, None)
        if taken is not None and not isinstance(taken, MemoryLayer):
            raise ValueError(
                f"A {type(layer).__name__} already has an attribute {CHILD_NAME!r}, where its memories would go."
            )


def _check_adapter_name(model: nn.Module, adapter_name: str) -> None:
    own = tuple(
        f".{name}.{adapter_name}" for name in (*MemoryLayer.adapter_layer_names, *MemoryLayer.other_param_names)
    )
    modules = [
        key
        for key, module in model.named_modules()
        if not isinstance(module, MemoryLayer) and not any(name in f".{key}" for name in own)
    ]
    reserved = {*MemoryLayer.adapter_layer_names, *MemoryLayer.other_param_names, CHILD_NAME, *_PARTS}
    check_adapter_name(adapter_name, reserved, modules)


# The names of what a memory consists of.
_PARTS = {
    "table",
    "hash",
    "gate",
    "conv",
    "kv_proj",
    "conv_norm",
    "key_norm",
    "query_norm",
    "ids",
    "rows",
    "weight",
    "bias",
}


def _memory_layers(model: nn.Module, adapter_name: str) -> dict[str, MemoryLayer]:
    """The layers that have the adapter, by their names in `model`."""
    return {
        key: module
        for key, module in model.named_modules()
        if isinstance(module, MemoryLayer) and adapter_name in module.ngram_memory_layer
    }


def _fit_tables(
    tuner: type[NgramMemoryModel],
    model: nn.Module,
    config: PeftConfig,
    adapter_name: str,
    state_dict: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The file's tensors but those of tables, and those of tables under the model's names.

    Tables are held as they lie in the file, or as wholes if they are to be trained.

    Raises:
        `ValueError`: Rows that the file claims cannot be.
    """
    layers = _memory_layers(model, adapter_name)
    files: dict[str, str] = {}  # key in the file -> key in the model, for the tables' two tensors
    for key in layers:
        for part in ("weight", "rows"):
            name = f"{key}.ngram_memory_layer.{adapter_name}.table.{part}"
            stored = tuner._remove_adapter_name_from_key(name, adapter_name)
            files |= {stored: name, f"base_model.model.{stored}": name}
    tables = {files[key]: tensor for key, tensor in state_dict.items() if key in files}
    for key, layer in layers.items():
        name = f"{key}.ngram_memory_layer.{adapter_name}.table"
        memory = layer.memory_of(adapter_name)
        rows, values = tables.get(f"{name}.rows"), tables.get(f"{name}.weight")
        if rows is None or values is None:
            if values is not None:
                unpack_table(memory)
            continue
        count = sum(memory.spec.head_sizes(memory.layer_id))
        if (problem := row_problem(rows, values, count)) is not None:
            raise ValueError(f"The adapter file is damaged or belongs to another config: {name} has {problem}.")
        if config.inference_mode and isinstance(memory.table, PackedTable):
            _resize(memory.table, len(rows))
        else:
            unpack_table(memory)
            tables[f"{name}.weight"] = unpacked(rows, values, count)
            del tables[f"{name}.rows"]
    return {key: tensor for key, tensor in state_dict.items() if key not in files}, tables


def _resize(table: PackedTable, count: int) -> None:
    if len(table.rows) != count:
        table.weight = nn.Parameter(
            table.weight.new_zeros(count, table.weight.shape[1]), requires_grad=table.weight.requires_grad
        )
        table.rows = torch.arange(count, device=table.rows.device)


def _adapter_tensors(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """Every tensor of an adapter, by its name in `model`."""
    return {
        f"{key}.{part}": tensor
        for key, layer in _memory_layers(model, adapter_name).items()
        for part, tensor in layer.state_dict().items()
        if part.startswith(
            tuple(f"{name}.{adapter_name}." for name in ("ngram_memory_layer", "ngram_memory_token_map"))
        )
    }
