"""Configuration of a causal language model with n-gram memories."""

import copy
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.configuration_utils import SubConfigSpec

from ...memory.spec import NgramMemorySpec
from ...memory.token_map import build_token_map, compressed_vocab_size
from .remote_code import is_remote_code, write_source_files


# Variants that were published with a compressed vocabulary.
_COMPRESSING_VARIANTS = ("deepseek", "deepseek_v41")


@strict
class EngramLMConfig(PreTrainedConfig):
    r"""
    This is the configuration class to store the configuration of an [`EngramForCausalLM`]: a causal language model, described
    by `text_config`, with hashed n-gram memories in front of some of its decoder layers.

    Names follow the released checkpoints. What is `None` is what the variant was published with; see
    [`~engram_peft.memory.NgramMemorySpec`].

    Args:
        text_config (`Union[PreTrainedConfig, dict]`, *optional*):
            The backbone: the configuration of any causal language model, also of a multimodal one. Defaults to `LlamaConfig`.
        engram_layer_ids (`list[int]`, *optional*, defaults to `[1]`):
            The decoder layers with a memory, 0-indexed (the paper counts from 1: its layers 2 and 15 are `[1, 14]`). The order
            matters: table sizes are dealt out in it.
        engram_variant (`str`, *optional*, defaults to `"deepseek"`):
            `"deepseek"`, `"deepseek_v41"`, `"qwen_ple"` or `"needle"`: which published memory this one is like.
        engram_max_ngram_size (`int`, *optional*):
            The longest n-gram.
        engram_n_heads (`int`, *optional*):
            Tables per n-gram order.
        engram_head_dim (`int`, *optional*):
            Width of a table's rows.
        engram_vocab_size (`Union[int, list[int]]`, *optional*, defaults to 100000):
            Slots per table; one number, or one per order.
        engram_compressed_vocab_size (`int`, *optional*):
            How many different token ids the hash tells apart. With a token map, the number of its classes; without one, the
            vocabulary size of the backbone. It never changes afterwards, since every hash depends on it.
        engram_token_map (`bool`, *optional*, defaults to `False`):
            Whether the model maps token ids to classes of equal normalised text first. The map is a buffer of the model and
            lies in its checkpoint. `from_backbone` sets this when it is given a tokenizer.
        engram_pad_token_id (`int`, *optional*, defaults to 0):
            What stands before the start of a text, an id after the token map.
        engram_eos_token_id (`int`, *optional*):
            The token that ends a document, an id after the token map: n-grams do not read across it. Needed by `"qwen_ple"`.
        engram_masked_token_ids (`list[int]`, *optional*):
            Tokens that n-grams never hold nor read across, such as the placeholders of images. Ids before the token map.
        engram_seed (`int`, *optional*, defaults to 0):
            Seed of the hashes.
        engram_hc_mult (`int`, *optional*):
            Branches of the residual stream; each gets a gate of its own. Defaults to those of the backbone.
        engram_kernel_size (`int`, *optional*, defaults to 4):
            Taps of the convolution.
        engram_gate (`str`, *optional*):
            `"signed_sqrt"`, `"copysign"` or `"sigmoid"`.
        engram_conv (`str`, *optional*):
            `"short_conv"`, `"taps"` or `"none"`.
        engram_bias (`bool`, *optional*):
            Whether the projections have biases.
        engram_norm_eps (`float`, *optional*):
            Epsilon of the norms.

    Raises:
        `StrictDataclassClassValidationError`: The values do not describe a memory of this backbone; the message says which.

    Example:

        ```py
        >>> from engram_peft import EngramForCausalLM, EngramLMConfig
        >>> from transformers import LlamaConfig

        >>> backbone = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
        >>> config = EngramLMConfig.from_backbone(backbone, engram_layer_ids=[1], engram_n_heads=2, engram_head_dim=16)
        >>> model = EngramForCausalLM(config)
        ```
    """

    model_type = "engram"
    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=AutoConfig, model_type="llama")}

    text_config: dict | PreTrainedConfig | None = None
    engram_layer_ids: list[int] | tuple[int, ...] = (1,)
    engram_variant: str = "deepseek"
    engram_max_ngram_size: int | None = None
    engram_n_heads: int | None = None
    engram_head_dim: int | None = None
    engram_vocab_size: int | list[int] | tuple[int, ...] = 100_000
    engram_compressed_vocab_size: int | None = None
    engram_token_map: bool = False
    engram_pad_token_id: int = 0
    engram_eos_token_id: int | None = None
    engram_masked_token_ids: list[int] | tuple[int, ...] = ()
    engram_seed: int = 0
    engram_hc_mult: int | None = None
    engram_kernel_size: int = 4
    engram_gate: str | None = None
    engram_conv: str | None = None
    engram_bias: bool | None = None
    engram_norm_eps: float | None = None
    tie_word_embeddings: bool = False  # the backbone ties its own

    def __post_init__(self, **kwargs: Any) -> None:
        token_map = kwargs.pop("token_map", None)
        if isinstance(self.text_config, PreTrainedConfig):
            # A copy, since what follows sets implementations of attention and experts in it: to what they were.
            text_config: Any = copy.deepcopy(self.text_config)
            kwargs.setdefault("attn_implementation", text_config._attn_implementation)
            kwargs.setdefault("experts_implementation", text_config._experts_implementation)
            self.text_config = text_config
        super().__post_init__(**kwargs)
        # Bytes, since configs are compared and copied all the time; the model makes a buffer of them.
        self._token_map = None if token_map is None else token_map.numpy().tobytes()
        self._new_memories = False  # whether a checkpoint without memories is what was asked for
        text_config = self.get_text_config(decoder=True)
        if self.engram_compressed_vocab_size is None:
            self.engram_compressed_vocab_size = text_config.vocab_size
        if self.engram_hc_mult is None:
            self.engram_hc_mult = _residual_branches(text_config)

    @classmethod
    def from_backbone(
        cls, backbone_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any
    ) -> "EngramLMConfig":
        """The configuration of `backbone_config`'s model with memories.

        Args:
            backbone_config (`PreTrainedConfig`):
                The backbone's configuration.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Its tokenizer, from which variants that compress the vocabulary make their token map. Without one, every token
                is its own class.
            kwargs (`dict[str, Any]`, *optional*):
                The arguments of [`EngramLMConfig`].

        Raises:
            `StrictDataclassClassValidationError`: The values do not describe a memory of this backbone.
        """
        text_config = backbone_config.get_text_config(decoder=True)
        eos_token_id, pad_token_id = (
            value[0] if isinstance(value, list) else value
            for value in (getattr(text_config, name, None) for name in ("eos_token_id", "pad_token_id"))
        )
        if tokenizer is not None:
            eos_token_id = eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
            pad_token_id = pad_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        variant = kwargs.get("engram_variant", cls.engram_variant)
        if variant == "qwen_ple":
            kwargs.setdefault("engram_eos_token_id", eos_token_id)
        if tokenizer is not None and variant in _COMPRESSING_VARIANTS:
            token_map = build_token_map(tokenizer)
            kwargs = {"engram_token_map": True, "token_map": token_map} | kwargs
            kwargs.setdefault("engram_compressed_vocab_size", compressed_vocab_size(token_map))
            pad_token_id = None if pad_token_id is None else int(token_map[pad_token_id])
        kwargs.setdefault("engram_pad_token_id", pad_token_id if pad_token_id is not None else 0)
        kwargs.setdefault("engram_masked_token_ids", _placeholders(backbone_config))
        return cls(text_config=backbone_config, **kwargs)

    @property
    def token_map(self) -> torch.Tensor | None:
        """The class of every token id of the tokenizer, `(len(tokenizer),)` int64, before a model was made of it."""
        return None if self._token_map is None else torch.frombuffer(bytearray(self._token_map), dtype=torch.int64)

    def memory_spec(self) -> NgramMemorySpec:
        """What defines the memories, without the backbone.

        Raises:
            `ValueError`: There is no such memory; the message names the argument.
        """
        names = [field.name for field in fields(NgramMemorySpec)]
        values = {name: getattr(self, f"engram_{name}") for name in names if hasattr(self, f"engram_{name}")}
        hidden_size = self.get_text_config(decoder=True).hidden_size
        try:
            return NgramMemorySpec(hidden_size=hidden_size, **values)
        except ValueError as error:
            raise ValueError(re.sub(rf"`({'|'.join(names)})`", r"`engram_\1`", str(error))) from None

    def validate_architecture(self) -> None:
        """Part of `@strict`-powered validation: the memories exist, and their layers do."""
        layers = self.get_text_config(decoder=True).num_hidden_layers
        outside = [i for i in self.engram_layer_ids if not 0 <= i < layers]
        if outside:
            hint = ""
            if min(self.engram_layer_ids) > 0 and max(self.engram_layer_ids) == layers:
                hint = f" Counted from 1? Then they are {[i - 1 for i in self.engram_layer_ids]} here."
            raise ValueError(
                f"`engram_layer_ids` {outside} are not among the backbone's {layers} decoder layers, 0 to {layers - 1}.{hint}"
            )
        self.memory_spec()

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The text model's configuration, which of a multimodal backbone is a part."""
        backbone: Any = self.text_config
        return backbone.get_text_config(decoder=decoder, encoder=encoder)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "EngramLMConfig":
        """As in transformers. A plain causal language model's configuration becomes the backbone of new memories."""
        options = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("engram_")}
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type == cls.model_type:
            return super().from_dict(config_dict | options, **kwargs)
        backbone_config = AutoConfig.for_model(**config_dict)
        loaded = super().from_dict(cls.from_backbone(backbone_config, **options).to_dict(), **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config._new_memories = True
        return loaded

    def to_dict(self) -> dict[str, Any]:
        """Everything but the token map, which belongs to the weights."""
        output = super().to_dict()
        del output["_token_map"], output["_new_memories"]
        return output

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes `config.json`, and beside it the code that the model needs where engram_peft is not installed."""
        if not is_remote_code():  # a copy is copied by transformers
            self.auto_map = {
                "AutoConfig": "configuration_engram.EngramLMConfig",
                "AutoModelForCausalLM": "modeling_engram.EngramForCausalLM",
            }
            os.makedirs(save_directory, exist_ok=True)
            write_source_files(Path(__file__).with_name("modeling_engram.py"), save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Nothing to do for the installed class: `save_pretrained` always writes the code along."""
        if is_remote_code():
            super().register_for_auto_class(auto_class)


def _residual_branches(text_config: PreTrainedConfig) -> int:
    """How many streams the residual of a backbone has: hyper-connections name them `hc_mult`, Qwen `hc_count`."""
    return getattr(text_config, "hc_mult", None) or getattr(text_config, "hc_count", None) or 1


def _placeholders(config: PreTrainedConfig) -> list[int]:
    """Token ids that stand for images, videos or sounds in the texts of a multimodal model."""
    names = [f"{modality}_token_{suffix}" for modality in ("image", "video", "audio") for suffix in ("id", "index")]
    ids = (getattr(config, name, None) for name in names)
    return sorted({token_id for token_id in ids if isinstance(token_id, int)})
