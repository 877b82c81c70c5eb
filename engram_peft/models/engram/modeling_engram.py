"""Any causal language model of transformers with n-gram memories in front of some of its decoder layers.

The model is a composition: the backbone keeps its class, its code and the names of its weights; a memory is a module of this
model, and a hook on a decoder layer adds what it says to the layer's input. Decoding state lies in the cache
(`engram_peft.memory.state`).
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.distributed import gather_full_state_dict
from transformers.utils import is_accelerate_available
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import ModelOutput

from ...memory.hashing import NgramHash
from ...memory.layer import BranchRMSNorm, DilatedConv, NgramMemory, NgramTable
from ...memory.state import decoding_state
from ...memory.stream import OneAtATime, TokenStream, decoder_layers, open_stream, token_ids_of
from ...memory.tables.checkpoint import LOADING_OPTIONS, files_of_model, model_files
from ...memory.tables.modules import MappedMultiHeadEmbedding
from ...memory.tables.placement import check_placement
from ...memory.tables.saving import save_with_tables
from ...memory.token_map import check_token_map, grow_token_map
from ...sharded import share_first
from .configuration_engram import EngramLMConfig
from .placing import as_parameter, check_same_rows, frozen, serve, table_key, tables_in
from .remote_code import is_remote_code
from .tensor_parallel import TABLE_BY_ROW


if is_accelerate_available():  # without it there is no device map
    from accelerate.hooks import remove_hook_from_module


class MemoryHook:
    """Adds a memory to the input of its decoder layer.

    An object that refers to the model, not a closure: copying and pickling the model copy this reference along.
    """

    def __init__(self, model: EngramForCausalLM, layer_id: int) -> None:
        self.model = model
        self.layer_id = layer_id

    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        stream = self.model._stream
        if stream is None:  # somebody runs the backbone on its own
            return None
        hidden_states = args[0] if args else kwargs["hidden_states"]
        memory: Any = self.model.memories[str(self.layer_id)]
        delta = stream.recall(memory, hidden_states)
        hidden_states = hidden_states + delta.to(hidden_states.device)
        if args:
            return (hidden_states, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden_states}


class HeadlessModel:
    """`model.base_model`: the backbone below its head, with the memories.

    Losses that are computed outside of the model run this and apply the head themselves. Otherwise it is the backbone.
    """

    def __init__(self, model: EngramForCausalLM) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model._run(self._model.backbone.base_model, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.backbone, name)


class EngramPreTrainedModel(PreTrainedModel):
    config: EngramLMConfig
    config_class = EngramLMConfig  # annotations are strings here
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NgramMemory"]  # the backbone's are added when the model is made
    _tp_plan = {"memories.*.table": TABLE_BY_ROW}  # and the plan of the backbone
    _no_placement_params = ["table.weight"]  # a table that fits on no accelerator stays in host memory
    # What attention and experts can do is up to the backbone, which checks again.
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _grouped_mm_can_dispatch(self) -> bool:
        return True

    def _init_weights(self, module: nn.Module) -> None:
        # Of the backbone's modules, the backbone takes care.
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, (NgramHash, NgramTable)):
            module.reset_buffers()
        if isinstance(module, NgramTable):
            init.zeros_(module.weight)
        elif isinstance(module, (BranchRMSNorm, DilatedConv)):
            module.reset_parameters()


class EngramForCausalLM(EngramPreTrainedModel, GenerationMixin):
    """A causal language model with n-gram memories.

    Memories start with empty tables: the outputs are those of the backbone until they are trained.

    Args:
        config ([`EngramLMConfig`]): The backbone and its memories.
        backbone (`PreTrainedModel`, *optional*):
            The backbone itself, by default a new one. To add memories to a trained model, use [`~EngramForCausalLM.from_backbone`].
        table_files (`Sequence[Path]`, *optional*):
            Safetensors files to serve the tables from, which then are no parameters. To load a model that way, use the argument
            `table_placement` of [`~EngramForCausalLM.from_pretrained`].

    Example:

        ```py
        >>> from engram_peft import EngramForCausalLM, EngramLMConfig
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer

        >>> backbone = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        >>> tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-135M")
        >>> config = EngramLMConfig.from_backbone(backbone.config, tokenizer=tokenizer, engram_layer_ids=[1, 14])
        >>> model = EngramForCausalLM.from_backbone(backbone, config)
        ```

    **Attributes**:
        - **backbone** (`PreTrainedModel`) -- The language model.
        - **memories** (`torch.nn.ModuleDict`) -- The [`~engram_peft.memory.NgramMemory`] of each layer, by the layer's number.
        - **token_map** (`torch.Tensor`, *optional*) -- The class of every token id, `(vocab_size,)` int64.
    """

    token_map: torch.Tensor | None

    def __init__(
        self,
        config: EngramLMConfig,
        backbone: PreTrainedModel | None = None,
        table_files: Sequence[str | os.PathLike] | None = None,
    ) -> None:
        super().__init__(config)
        self.backbone = _new_backbone(config.text_config) if backbone is None else backbone
        self._is_stateful = self.backbone._is_stateful
        self._can_compile_fullgraph = self.backbone._can_compile_fullgraph
        self.spec = config.memory_spec()
        memories = {str(i): NgramMemory(self.spec, i) for i in self.spec.layer_ids}
        self.memories = nn.ModuleDict(memories)
        layers = decoder_layers(self.backbone)
        for layer_id in self.spec.layer_ids:
            layers[layer_id].register_forward_pre_hook(MemoryHook(self, layer_id), with_kwargs=True)
        self.register_buffer("token_map", self._new_token_map())
        self._stream: TokenStream | None = None  # set during `forward` only
        self._turns = OneAtATime()
        if table_files is not None:
            serve(memories, tables_in(table_files, memories))
        self.post_init()
        # a checkpoint holds rows also for a model that reads them from elsewhere
        self._keys_to_ignore_on_load_unexpected |= {
            rf"^{re.escape(table_key(layer))}$" for layer in self._mapped_tables()
        }

    @property
    def base_model(self) -> Any:
        """What yields hidden states instead of logits."""
        return HeadlessModel(self)

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel, config: EngramLMConfig) -> EngramForCausalLM:
        """Adds memories to a loaded model. The outputs stay the same to the bit until the memories are trained.

        The backbone becomes part of the new model and may be quantised or spread over devices; each memory is made on the
        device of its layer, in the dtype of the backbone.

        Args:
            backbone (`PreTrainedModel`): A causal language model.
            config ([`EngramLMConfig`]): Its memories, as from [`EngramLMConfig.from_backbone`]. It is copied.

        Raises:
            `TypeError`: `backbone` is no model of transformers, or a PEFT model.
            `ValueError`: `config` was made for another backbone.
        """
        if not isinstance(backbone, PreTrainedModel):
            raise TypeError(
                f"`backbone` must be a `PreTrainedModel`, got {type(backbone).__name__}. Merge or unload adapters first; after "
                "adding memories, the new model can be adapted like any other."
            )
        _check_backbone(config, backbone)
        config = copy.deepcopy(config)
        config.text_config = backbone.config
        config.dtype = backbone.dtype
        for module in backbone.modules():  # trained, so never to be initialised again
            module._is_hf_initialized = True
        devices = {i: _device_of(decoder_layers(backbone)[i]) for i in config.engram_layer_ids}
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(backbone.dtype)
        try:
            with torch.device(next(iter(devices.values()))):
                model = cls(config, backbone)
        finally:
            torch.set_default_dtype(default_dtype)
        for layer_id, device in devices.items():
            memory: Any = model.memories[str(layer_id)].to(device)
            share_first([memory.kv_proj.weight], backbone.parameters())
        model.train(backbone.training)
        model.generation_config = backbone.generation_config
        model._adopt_placement(devices)
        return model

    def _adopt_placement(self, devices: dict[int, torch.device]) -> None:
        """Takes over what loading noted on the backbone: its device map and its quantiser."""
        if (device_map := getattr(self.backbone, "hf_device_map", None)) is not None:
            self.hf_device_map = {f"backbone.{name}".removesuffix("."): device for name, device in device_map.items()}
            self.hf_device_map |= {f"memories.{layer_id}": device for layer_id, device in devices.items()}
        quantizer = getattr(self.backbone, "hf_quantizer", None)
        if quantizer is not None and not _has_unpacked(quantizer):
            # Not `is_quantized`: for the Trainer that is a model with nothing to train.
            self.hf_quantizer = quantizer
            self.quantization_method = self.backbone.quantization_method
            self.config.quantization_config = _without_memories(quantizer)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        table_placement: str | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but a checkpoint of this class that lacks weights of its memories is refused.

        A plain causal language model gets new memories, which say nothing before they are trained; arguments that start with
        `engram_` describe them. Without a token map: for one, see [`~EngramForCausalLM.from_backbone`].

        Args:
            table_placement (`str`, *optional*):
                Where the tables live: `"mmap"` serves them from the checkpoint's own safetensors files, where they lie; `"ram"`,
                `"pinned"`, `"cuda"` and `"auto"` as for `open_table`. They are read-only then, and no parameters. By default they
                are parameters like the rest. [`~EngramForCausalLM.table_to`] changes it later.

        Raises:
            `ValueError`:
                Weights of memories or the token map are missing, and not asked for with `output_loading_info=True`; or tables are
                that `table_placement` is about.
            `TableError`, `FileNotFoundError`: With `table_placement`, a file is missing, truncated or damaged.
        """
        if table_placement is not None:
            check_placement(table_placement)
            options = {name: kwargs[name] for name in LOADING_OPTIONS if name in kwargs}
            kwargs["table_files"] = model_files(pretrained_model_name_or_path, **options)
            kwargs.pop("force_download", None)  # has happened, and once more would replace the files
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(name for name in info["missing_keys"] if name.startswith(("memories.", "token_map")))
        if missing and not model.config._new_memories and not output_loading_info:
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path} lacks {len(missing)} weights of the n-gram memories, among them "
                f"{missing[0]!r}. To add new memories to a plain model, load it with `AutoModelForCausalLM` and pass it to "
                "`EngramForCausalLM.from_backbone`."
            )
        if hasattr(model, "hf_device_map"):
            model._place_memories()
        if table_placement not in (None, "mmap"):
            model.table_to(table_placement)
        return (model, info) if output_loading_info else model

    def _place_memories(self) -> None:
        """Puts each memory beside its layer, wherever a device map had it; the table stays, or goes to host memory.

        accelerate would bring an offloaded table to the accelerator as a whole, in every pass, for a few rows of it.
        """
        layers = decoder_layers(self.backbone)
        for layer_id in self.spec.layer_ids:
            memory: Any = self.memories[str(layer_id)]
            offloaded = [
                (module, name, hook.weights_map[name])
                for module in memory.modules()
                for hook in _hooks_of(module)
                if getattr(hook, "offload", False)
                for name, _ in module.named_parameters(recurse=False)
            ]
            remove_hook_from_module(memory, recurse=True)
            for module, name, value in offloaded:
                trainable = getattr(module, name).requires_grad
                setattr(module, name, nn.Parameter(value.cpu(), requires_grad=trainable))
            for child in memory.children():
                child.to(child.weight.device if isinstance(child, NgramTable) else _device_of(layers[layer_id]))

    # ------------------------------------------------------------------------------------------------- tables

    def table_to(
        self,
        placement: str,
        *,
        device: str | torch.device | None = None,
        checkpoint: str | os.PathLike | None = None,
    ) -> EngramForCausalLM:
        """Moves the tables of the memories. The outputs stay the same to the bit.

        Args:
            placement (`str`):
                `"mmap"`, `"ram"`, `"pinned"`, `"cuda"` or `"auto"`, as for `open_table`: the tables are read-only, and neither
                parameters nor in the state dict. `"parameter"`: they are parameters, beside the other weights of their memory.
            device (`str` or `torch.device`, *optional*):
                The GPU of `"cuda"` and `"pinned"`; by default that of the memory, if it is on one.
            checkpoint (`str` or `os.PathLike`, *optional*):
                The folder that holds tables which are parameters now; by default the one that the model was loaded from.

        Raises:
            `ValueError`: The checkpoint holds other rows than the model does.
            `RuntimeError`: The model is being trained, and the rows with it.
            `TableError`, `FileNotFoundError`: A file is missing, damaged, or not what it was when its table was opened.
        """
        memories: dict[str, Any] = dict(self.memories.items())
        mapped = self._mapped_tables()
        if placement == "parameter":
            for layer, table in {layer: as_parameter(memories[layer]) for layer in mapped}.items():
                memories[layer].table = table
            return self
        check_placement(placement)
        tables = {layer: module.table for layer, module in mapped.items()}
        resident = {layer: memory for layer, memory in memories.items() if layer not in mapped}
        if resident:
            if self.training and any(memory.table.weight.requires_grad for memory in resident.values()):
                raise RuntimeError(
                    "The tables are being trained, and would be read-only. Call `eval()` or freeze them first."
                )
            tables |= tables_in(files_of_model(self) if checkpoint is None else model_files(checkpoint), resident)
            check_same_rows(resident, tables)
        for layer, memory in memories.items():
            near = memory.kv_proj.weight.device
            wanted = device or (near if near.type == "cuda" or placement == "auto" else None)
            if tables[layer].placement != placement or device is not None:
                tables[layer] = tables[layer].to(placement, wanted)
        serve(memories, tables)
        return self

    def train(self, mode: bool = True) -> EngramForCausalLM:
        """As in torch. Rows that are no parameters cannot be trained.

        Raises:
            `RuntimeError`: Weights of the memories are to be trained, and rows with them that are in a read-only table.
        """
        tables = list(self._mapped_tables().values())
        if mode and not any(parameter.requires_grad for parameter in self.memories.parameters()):
            with frozen(tables):  # nobody trains the memories: an adapter is for the backbone, say
                return super().train()
        for table in tables if mode else ():
            table.check_frozen()  # before anything has changed
        return super().train(mode)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As in transformers. Tables that are no parameters are saved as if they were, from where they lie.

        Of a model that lies on several processes, all of them have to call it: the first one writes.

        Raises:
            `TableChangedError`: The file of a table is not what it was when it was opened.
        """
        sharded_by_others = getattr(self.config, "distributed_config", None) is None
        if state_dict is None and sharded_by_others and any(isinstance(p, DTensor) for p in self.parameters()):
            state_dict = gather_full_state_dict(self)
        save_with_tables(self, super().save_pretrained, save_directory, is_main_process, state_dict, *args, **kwargs)

    def _mapped_tables(self) -> dict[str, MappedMultiHeadEmbedding]:
        """Tables that are no parameters, by their layers."""
        tables = {layer: memory.table for layer, memory in self.memories.items()}
        return {layer: table for layer, table in tables.items() if isinstance(table, MappedMultiHeadEmbedding)}

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModelForCausalLM") -> None:
        """Nothing to do for the installed class: `save_pretrained` always writes the code along."""
        if is_remote_code():
            super().register_for_auto_class(auto_class)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.backbone.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in transformers. Added tokens become classes of their own; what known tokens hash to does not change."""
        embeddings = self.backbone.resize_token_embeddings(*args, **kwargs)
        if self.token_map is not None:
            self.token_map = self._fit_token_map(self.token_map)
        return embeddings

    @property
    def vocab_size(self) -> int:
        """Rows of the embeddings."""
        return self.config.get_text_config(decoder=True).vocab_size

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Makes sure that a tokenizer is the one that the token map was made from; without a map, any will do.

        Raises:
            `ValueError`: It is not; the message names the first token that differs.
        """
        if self.token_map is not None:
            check_token_map(self.token_map, tokenizer)

    def _new_token_map(self) -> torch.Tensor | None:
        if not self.config.engram_token_map:
            return None
        token_map = self.config.token_map
        if token_map is None:  # it comes with the weights
            return torch.full((self.vocab_size,), -1)
        return self._fit_token_map(token_map)

    def _fit_token_map(self, token_map: torch.Tensor) -> torch.Tensor:
        """One entry for each row of the embeddings. Rows without a token in the tokenizer are classes of their own."""
        return grow_token_map(token_map, self.vocab_size)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        engram_input_ids: torch.LongTensor | None = None,
        engram_attention_mask: torch.Tensor | None = None,
        engram_segment_ids: torch.LongTensor | None = None,
        engram_rows: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput | tuple:
        """The backbone's forward pass with the memories in between; its arguments and its output.

        Args:
            engram_input_ids (`torch.LongTensor`, *optional*):
                `(batch, length)`: the token ids that the memories read. Needed with `inputs_embeds` that are not rows of the
                embeddings.
            engram_attention_mask (`torch.Tensor`, *optional*):
                `(batch, keys)`: which tokens are none, where `attention_mask` is in a form that does not tell.
            engram_segment_ids (`torch.LongTensor`, *optional*):
                `(batch, length)`: the document that a token belongs to. N-grams end where it changes; so they do where
                `position_ids` restart.
            engram_rows (`torch.LongTensor`, *optional*):
                `(batch, length, layers, tables)`: what a [`~engram_peft.memory.collator.NgramRowsCollator`] has hashed already.

        Raises:
            `ValueError`: Token ids are missing or outside the vocabulary, or another model filled the cache.
        """
        return self._run(
            self.backbone,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            engram_input_ids=engram_input_ids,
            engram_attention_mask=engram_attention_mask,
            engram_segment_ids=engram_segment_ids,
            engram_rows=engram_rows,
            labels=labels,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def _run(
        self,
        module: nn.Module,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        engram_input_ids: torch.Tensor | None = None,
        engram_attention_mask: torch.Tensor | None = None,
        engram_segment_ids: torch.Tensor | None = None,
        engram_rows: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the backbone, or the part of it below the head, with the memories listening."""
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("You must specify exactly one of `input_ids` or `inputs_embeds`.")
        text_config = self.config.get_text_config(decoder=True)
        if use_cache is None:
            use_cache = getattr(text_config, "use_cache", True)
        if self.training and self.is_activation_checkpointing and torch.is_grad_enabled():
            use_cache = False
        if use_cache and cache is None:
            cache = DynamicCache(config=text_config)
        token_ids: Any = engram_input_ids
        if token_ids is None:
            token_ids = self._token_ids_of(inputs) if input_ids is None else input_ids
        if token_ids.shape != inputs.shape[:2]:
            raise ValueError(
                f"`engram_input_ids` must be {tuple(inputs.shape[:2])}, one a token, got {tuple(token_ids.shape)}."
            )
        stream = open_stream(
            self.spec,
            token_ids,
            vocab_size=self.vocab_size,
            token_map=self.token_map,
            masked_token_ids=self.config.engram_masked_token_ids,
            attention_mask=attention_mask if engram_attention_mask is None else engram_attention_mask,
            position_ids=position_ids,
            segment_ids=engram_segment_ids,
            rows=engram_rows,
            cache=cache,
            backbone_layers=text_config.num_hidden_layers,
        )
        memories: Any = self.memories
        stream.prefetch(memories[str(layer_id)] for layer_id in sorted(self.spec.layer_ids))
        self._turns.acquire()
        self._stream = stream
        try:
            outputs = module(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        finally:
            self._stream = None
            self._turns.release()
        stream.remember()
        return outputs

    def _token_ids_of(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return token_ids_of(inputs_embeds, self.get_input_embeddings())

    # ------------------------------------------------------------------------------------------------- generation

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        engram_input_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The backbone's inputs. A padding mask goes along where the backbone's became something else."""
        inputs = self.backbone.prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        if inputs.get("attention_mask") is not attention_mask:
            tokens = inputs["input_ids"] if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"]
            batch, length = tokens.shape[:2]
            if attention_mask is None:
                attention_mask = torch.ones(batch, length, dtype=torch.long)
            # As long as the tokens, so that the shape stays the same while decoding, for compiled steps.
            inputs["engram_attention_mask"] = attention_mask[:, -length:].to(tokens.device)
        if engram_input_ids is not None and inputs.get("inputs_embeds") is not None:
            inputs["engram_input_ids"] = engram_input_ids
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if (cache := model_kwargs.get("cache")) is not None:
            # Now and not in `forward`, so that all layers record what they may have to take back.
            decoding_state(cache, self.spec, self.config.get_text_config(decoder=True).num_hidden_layers)
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        own = {name for name in model_kwargs if name.startswith("engram_")}
        self.backbone._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k not in own})

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.backbone._expand_inputs_for_generation(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.backbone._prepare_position_ids_for_generation(*args, **kwargs)


def _new_backbone(config: Any) -> PreTrainedModel:
    known = type(config) in AutoModelForCausalLM._model_mapping
    auto_class = AutoModelForCausalLM if known else AutoModelForImageTextToText
    return auto_class.from_config(config, dtype=torch.get_default_dtype())


def _check_backbone(config: EngramLMConfig, backbone: PreTrainedModel) -> None:
    """Raises unless `config` describes memories for `backbone`."""
    expected, actual = (c.get_text_config(decoder=True) for c in (config, backbone.config))
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        if getattr(expected, name) != getattr(actual, name):
            raise ValueError(
                f"`config` was made for another backbone: `{name}` is {getattr(expected, name)} there and "
                f"{getattr(actual, name)} in the {type(backbone).__name__} that was given."
            )


def _device_of(layer: nn.Module) -> torch.device:
    """Where a decoder layer computes, also if its weights are offloaded."""
    device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    return next(layer.parameters()).device if device is None else torch.device(device)


def _hooks_of(module: nn.Module) -> list[Any]:
    """What accelerate does around a module's forward."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _has_unpacked(quantizer: Any) -> bool:
    """Whether loading turned quantised weights into plain ones, as it mostly does with GGUF files."""
    return getattr(quantizer.quantization_config, "dequantize", False) or not getattr(
        quantizer, "packed_modules", True
    )


def _without_memories(quantizer: Any) -> Any:
    """The quantisation of a backbone, with the memories exempt as well."""
    quantization_config = copy.deepcopy(quantizer.quantization_config)
    for name in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if hasattr(quantization_config, name):
            setattr(quantization_config, name, [*(quantizer.modules_to_not_convert or []), "memories"])
    return quantization_config
