"""The memories in front of one decoder layer, and what brings them the tokens.

A decoder layer keeps its class, its name and the names of its weights: the memories are a submodule of it, added to its input by a
forward pre-hook. Hooks are bound methods, never closures: copying and pickling a model copies what they refer to.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...memory.layer import NgramMemory, NgramTable
from ...memory.packed import PackedTable
from ...memory.spec import NgramMemorySpec
from ...memory.stream import OneAtATime, TokenStream, open_stream, token_ids_of
from ...sharded import share_first


# The attribute of a decoder layer that holds its memories.
CHILD_NAME = "memory"


class TokenMap(nn.Module):
    """The class of every token id, `(size,)` int64. A module, so that it is found under `<name>.<adapter>.ids`."""

    ids: torch.Tensor

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids)


class MemoryLayer(nn.Module, BaseTunerLayer):
    """The memories of all adapters in front of one decoder layer, keyed by adapter name.

    What they say adds up: `h <- h + sum_a Y_a(h)`.

    **Attributes**:
        - **ngram_memory_layer** (`nn.ModuleDict`) -- The `NgramMemory` of each adapter.
        - **ngram_memory_token_map** (`nn.ModuleDict`) -- The `TokenMap` of each adapter that has one and whose first layer this is.
        - **ngram_memory_masked_ids** (`dict[str, list[int]]`) -- Tokens that each adapter must not read.
    """

    adapter_layer_names = ("ngram_memory_layer",)
    other_param_names = ("ngram_memory_token_map", "ngram_memory_masked_ids")

    def __init__(self, decoder_layer: nn.Module, feed: TokenFeed) -> None:
        super().__init__()
        self.ngram_memory_layer = nn.ModuleDict({})
        self.ngram_memory_token_map = nn.ModuleDict({})
        self.ngram_memory_masked_ids: dict[str, list[int]] = {}
        self.feed = feed
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter: list[str] = []
        self._decoder_layer = (decoder_layer,)  # not a child: this module is one of it
        self._hook = decoder_layer.register_forward_pre_hook(self.add_memories, with_kwargs=True)
        setattr(decoder_layer, CHILD_NAME, self)
        feed.layers.append(self)

    def get_base_layer(self) -> nn.Module:
        """The decoder layer."""
        return self._decoder_layer[0]

    def take_off(self) -> None:
        """Leaves the decoder layer as it was before."""
        self._hook.remove()
        delattr(self.get_base_layer(), CHILD_NAME)
        self.feed.layers.remove(self)

    # ---------------------------------------------------------------------------------------------- adapters

    def update_layer(
        self,
        adapter_name: str,
        spec: NgramMemorySpec,
        layer_id: int,
        token_map: torch.Tensor | None = None,
        masked_token_ids: Sequence[int] = (),
        init_weights: bool = True,
        touched_rows: int | None = None,
        inference_mode: bool = False,
    ) -> None:
        """Adds an adapter: a memory that says nothing, or random tables if `init_weights` is `False`.

        Args:
            adapter_name (`str`): Name of the adapter.
            spec (`NgramMemorySpec`): The memory.
            layer_id (`int`): Which of `spec.layer_ids` this is.
            token_map (`torch.Tensor`, *optional*): For the adapter's first layer.
            masked_token_ids (`Sequence[int]`): Tokens that n-grams never hold nor read across.
            init_weights (`bool`): Whether the tables start empty.
            touched_rows (`int`, *optional*): Make a `PackedTable` of that many rows, to be filled from a file.
            inference_mode (`bool`): Whether it stays frozen when it is active.
        """
        memory = NgramMemory(spec, layer_id)
        if touched_rows is not None:
            memory.table = PackedTable(spec.head_sizes(layer_id), spec.head_dim, touched_rows)
        elif not init_weights:
            nn.init.normal_(cast(NgramTable, memory.table).weight)
        share_first(
            [memory.kv_proj.weight, *([] if init_weights else memory.table.parameters())],
            self.get_base_layer().parameters(),
        )
        self.ngram_memory_layer[adapter_name] = memory
        if token_map is not None:
            self.ngram_memory_token_map[adapter_name] = TokenMap(token_map)
        self.ngram_memory_masked_ids[adapter_name] = list(masked_token_ids)
        dtype, device = self._dtype_and_device()
        if not any(parameter.is_meta for parameter in memory.parameters()):
            memory.to(device, dtype)  # until PEFT casts to float32
        self._move_adapter_to_device_of_base_layer(adapter_name, device)
        BaseTunerLayer.set_adapter(self, self.active_adapters, inference_mode=inference_mode)

    def memory_of(self, adapter_name: str) -> NgramMemory:
        """The memory of an adapter."""
        return cast(NgramMemory, self.ngram_memory_layer[adapter_name])

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT calls this after loading, too: what was saved in float32 stays as it is
        if device is None:
            device = self._dtype_and_device()[1]
        for modules in (self.ngram_memory_layer, self.ngram_memory_token_map):
            if adapter_name in modules and not any(p.is_meta for p in modules[adapter_name].parameters()):
                modules[adapter_name].to(device)

    def _dtype_and_device(self) -> tuple[torch.dtype | None, torch.device | None]:
        """Those of the decoder layer. It has no `weight` that PEFT could look at, and may be quantised: its norms are not."""
        own = {id(parameter) for parameter in self.parameters()}
        for parameter in self.get_base_layer().parameters():
            if parameter.is_floating_point() and not parameter.is_meta and id(parameter) not in own:
                return parameter.dtype, parameter.device
        return None, None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Does nothing: what depends on the tokens cannot become part of a weight. Other tuners call this when they merge."""

    def unmerge(self) -> None:
        """Does nothing, as `merge`."""

    # ---------------------------------------------------------------------------------------------- forward

    def add_memories(
        self, decoder_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook: adds what the memories say to the hidden states that enter the decoder layer."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        edited = hidden_states
        for name, stream in self.feed.streams():
            if name in self.ngram_memory_layer:
                edited = edited + self._recalled(name, stream, hidden_states)
        if edited is hidden_states:
            return None
        if args:
            return (edited, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": edited}

    def _recalled(self, name: str, stream: TokenStream, hidden_states: torch.Tensor) -> torch.Tensor:
        memory = self.memory_of(name)
        states = hidden_states.to(memory.kv_proj.weight.device, memory.kv_proj.weight.dtype)
        delta = stream.recall(memory, states).to(hidden_states.device, hidden_states.dtype)
        rows = self.feed.rows_of(name)
        if rows is not None:
            delta = delta * rows.to(delta.device, delta.dtype).view(-1, *[1] * (delta.dim() - 1))
        return delta


class TokenFeed:
    """Brings the token ids of a forward pass to the memories, and what they remember back into the cache.

    Decoder layers see no token ids. Hooks on the models that contain them do: on the one that is called from outside, be it the
    causal language model, a model around it or the decoder alone. Between two calls a feed holds nothing of them.

    Args:
        layer_count (`int`): How many decoder layers the model has, with and without memories.
    """

    def __init__(self, layer_count: int) -> None:
        self.layers: list[MemoryLayer] = []
        self.adapter_names: list[str] | None = None  # one a row of the batch, while PEFT's `adapter_names` says so
        self._layer_count = layer_count
        self._caller: nn.Module | None = None
        self._turns = OneAtATime()
        self._streams: dict[str, TokenStream] = {}
        self._rows: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def listen_to(self, model: PreTrainedModel) -> None:
        """Hooks `model`, whose `forward` takes token ids."""
        self._hooks += [
            model.register_forward_pre_hook(self.begin, with_kwargs=True),
            model.register_forward_hook(self.end, always_call=True),
        ]

    def stop(self) -> None:
        """Removes all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---------------------------------------------------------------------------------------------- one call

    def begin(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook before a model's forward pass."""
        self._turns.acquire()
        try:
            if self._caller is not None:  # a model inside the one that was called, since it is this thread's turn
                return None
            own = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("engram_")}
            adapters = self._wanted()
            if adapters:
                if args:
                    args, kwargs = (
                        (),
                        dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs,
                    )
                cache = self._cache(model, kwargs)
                if kwargs.get("cache", kwargs.get("past_key_values")) is not cache:
                    kwargs["cache"] = cache
                self._open(model, adapters, kwargs, cache, own)
                self._turns.acquire()  # until the pass ends
                self._caller = model
            return args, kwargs
        finally:
            self._turns.release()

    def end(self, model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
        """The hook after it. A pass that failed leaves no trace."""
        if model is not self._caller:
            return
        try:
            if output is not None:
                for stream in self._streams.values():
                    stream.remember()
        finally:
            self._caller = None
            self._streams, self._rows = {}, {}
            self._turns.release()

    def streams(self) -> Iterator[tuple[str, TokenStream]]:
        """What the adapters of this call read, by their names."""
        if self._caller is None and self._wanted():
            raise RuntimeError(
                "A decoder layer with n-gram memories was called on its own. Memories read token ids: call the model, or "
                "turn them off with `disable_adapter()`."
            )
        yield from self._streams.items()

    def rows_of(self, adapter_name: str) -> torch.Tensor | None:
        """`(batch,)` booleans: the texts that an adapter is for. `None`: all."""
        return self._rows.get(adapter_name)

    def _wanted(self) -> dict[str, NgramMemorySpec]:
        """The memories that take part, by adapter."""
        wanted: dict[str, NgramMemorySpec] = {}
        for layer in self.layers:
            if not layer.disable_adapters:
                active = cast(list[str], layer.active_adapters) if self.adapter_names is None else self.adapter_names
                wanted |= {name: layer.memory_of(name).spec for name in active if name in layer.ngram_memory_layer}
        return wanted

    def _open(
        self,
        model: PreTrainedModel,
        adapters: dict[str, NgramMemorySpec],
        given: dict[str, Any],
        cache: Any,
        own: dict[str, Any],
    ) -> None:
        token_ids = own.get("engram_input_ids", given.get("input_ids"))
        if token_ids is None and given.get("inputs_embeds") is not None:
            token_ids = token_ids_of(given["inputs_embeds"], model.get_input_embeddings())
        if token_ids is None:
            raise ValueError("You must specify exactly one of `input_ids` or `inputs_embeds`.")
        streams = {
            name: open_stream(
                spec,
                token_ids,
                token_map=self._token_map(name),
                attention_mask=own.get("engram_attention_mask", given.get("attention_mask")),
                position_ids=given.get("position_ids"),
                segment_ids=own.get("engram_segment_ids"),
                rows=_rows_of(name, own.get("engram_rows"), len(adapters)),
                masked_token_ids=self._masked_token_ids(name),
                cache=cache,
                backbone_layers=self._layer_count,
                vocab_size=model.config.get_text_config(decoder=True).vocab_size,
                owner=name,
            )
            for name, spec in adapters.items()
        }
        if self.adapter_names is not None:
            self._rows = {name: _rows_for(name, self.adapter_names, token_ids) for name in adapters}
        for name, stream in streams.items():
            stream.prefetch(layer.memory_of(name) for layer in self.layers if name in layer.ngram_memory_layer)
        self._streams = streams

    def _token_map(self, adapter_name: str) -> torch.Tensor | None:
        for layer in self.layers:
            if adapter_name in layer.ngram_memory_token_map:
                return cast(TokenMap, layer.ngram_memory_token_map[adapter_name]).ids
        return None

    def _masked_token_ids(self, adapter_name: str) -> list[int]:
        return next(
            masked[adapter_name] for layer in self.layers if adapter_name in (masked := layer.ngram_memory_masked_ids)
        )

    def _cache(self, model: PreTrainedModel, given: dict[str, Any]) -> Any:
        """The cache of this call, made here if the model would make one."""
        cache = given.get("cache", given.get("past_key_values"))
        if cache is not None:
            return cache
        config = model.config.get_text_config(decoder=True)
        use_cache = given.get("use_cache")
        if use_cache is None:
            use_cache = getattr(config, "use_cache", False)
        checkpointing = model.training and model.is_activation_checkpointing and torch.is_grad_enabled()
        return DynamicCache(config=config) if use_cache and not checkpointing else None


def _rows_of(name: str, rows: Any, adapters: int) -> torch.Tensor | None:
    """What a collator computed for an adapter: one tensor if one is active, else one by name."""
    if isinstance(rows, torch.Tensor) and adapters > 1:
        raise ValueError(f"`engram_rows` must be a dictionary by adapter, since {adapters} of them are active.")
    return rows.get(name) if isinstance(rows, dict) else rows


def _rows_for(name: str, adapter_names: list[str], token_ids: torch.Tensor) -> torch.Tensor:
    """`(batch,)` booleans from one adapter name a text, also where each text became several (beams)."""
    chosen = torch.tensor([each == name for each in adapter_names], device=token_ids.device)
    repeats, rest = divmod(len(token_ids), len(chosen))
    if rest:
        raise ValueError(f"`adapter_names` has {len(chosen)} names for a batch of {len(token_ids)} texts.")
    return chosen.repeat_interleave(repeats)
