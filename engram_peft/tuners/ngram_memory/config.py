"""Configuration of the n-gram memory adapter."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..._peft import PeftType
from ...memory.spec import NgramMemorySpec
from ...memory.token_map import build_token_map, compressed_vocab_size
from ..engram.card import check_weights_file


# Variants that were published with a compressed vocabulary.
COMPRESSING_VARIANTS = ("deepseek", "deepseek_v41")


@dataclass
class NgramMemoryConfig(PeftConfig):
    """
    This is the configuration class to store the configuration of an `NgramMemoryModel`.

    What is `None` is what the variant was published with; see `engram_peft.memory.NgramMemorySpec`.

    Args:
        layers_to_transform (`Union[list[int], int]`, *optional*):
            The decoder layers with a memory, 0-indexed (the paper counts from 1: its layers 2 and 15 are `[1, 14]`). The order
            matters: table sizes are dealt out in it. `None` means the second layer and the last of the lower half, as in the
            paper.
        variant (`str`):
            `"deepseek"`, `"deepseek_v41"`, `"qwen_ple"` or `"needle"`: which published memory this one is like.
        max_ngram_size (`int`, *optional*):
            The longest n-gram.
        n_heads (`int`, *optional*):
            Tables per n-gram order.
        head_dim (`int`, *optional*):
            Width of a table's rows.
        vocab_size (`Union[int, list[int]]`):
            Slots per table; one number, or one per order.
        seed (`int`):
            Seed of the hashes. Adapters with the same seed and sizes hash alike and can be summed.
        compressed_vocab_size (`int`, *optional*):
            How many different token ids the hash tells apart. `token_map_from` sets it. For a variant that compresses the
            vocabulary, giving it without a token map means that ids are hashed as they are.
        token_map_size (`int`, *optional*):
            The length of the token map, which is stored with the weights. `token_map_from` sets it.
        pad_token_id (`int`):
            What stands before the start of a text, an id after the token map.
        eos_token_id (`int`, *optional*):
            For `"qwen_ple"`: the token that ends a document, by default the model's.
        masked_token_ids (`list[int]`):
            Tokens that n-grams never hold nor read across, such as the placeholders of images. Ids before the token map.
        kernel_size (`int`):
            Taps of the convolution.
        gate (`str`, *optional*):
            `"signed_sqrt"`, `"copysign"` or `"sigmoid"`.
        conv (`str`, *optional*):
            `"short_conv"`, `"taps"` or `"none"`.
        use_bias (`bool`, *optional*):
            Whether the projections have biases. Without them, as by default, a text that holds no trained n-gram is left alone to
            the bit.
        norm_eps (`float`, *optional*):
            Epsilon of the norms; `None` is the machine epsilon for `"deepseek"` and 1e-6 for the others.
        modules_to_save (`list[str]`, *optional*):
            Modules apart from the adapter to be trained and saved.
        init_weights (`bool`):
            `True` starts with empty tables, which say nothing, and random projections; `False` with random tables (for tests).
        touched_rows (`dict[str, int]`, *optional*):
            How many rows the weights file holds of each layer's table, if it holds the touched ones only. Written when the
            adapter is saved.

    Example:

        ```py
        >>> from engram_peft import NgramMemoryConfig
        >>> from peft import get_peft_model

        >>> config = NgramMemoryConfig(layers_to_transform=[1, 14], n_heads=8, head_dim=64, vocab_size=50_000)
        >>> model = get_peft_model(model, config.token_map_from(tokenizer))
        ```
    """

    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "The decoder layers with a memory, 0-indexed."}
    )
    variant: str = field(default="deepseek", metadata={"help": "Which published memory this one is like."})
    max_ngram_size: int | None = field(default=None, metadata={"help": "The longest n-gram."})
    n_heads: int | None = field(default=None, metadata={"help": "Tables per n-gram order."})
    head_dim: int | None = field(default=None, metadata={"help": "Width of a table's rows."})
    vocab_size: int | list[int] = field(
        default=50_000, metadata={"help": "Slots per table, one number or one per order."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the hashes."})
    compressed_vocab_size: int | None = field(
        default=None, metadata={"help": "How many different token ids the hash tells apart."}
    )
    token_map_size: int | None = field(
        default=None, metadata={"help": "Length of the token map, which is stored with the weights."}
    )
    pad_token_id: int = field(default=0, metadata={"help": "What stands before the start of a text."})
    eos_token_id: int | None = field(
        default=None, metadata={"help": "For 'qwen_ple': the token that ends a document."}
    )
    masked_token_ids: list[int] = field(
        default_factory=list, metadata={"help": "Tokens that n-grams never hold nor read across."}
    )
    kernel_size: int = field(default=4, metadata={"help": "Taps of the convolution."})
    gate: str | None = field(default=None, metadata={"help": "'signed_sqrt', 'copysign' or 'sigmoid'."})
    conv: str | None = field(default=None, metadata={"help": "'short_conv', 'taps' or 'none'."})
    use_bias: bool | None = field(default=False, metadata={"help": "Whether the projections have biases."})
    norm_eps: float | None = field(default=None, metadata={"help": "Epsilon of the norms."})
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules apart from the adapter to be trained and saved."}
    )
    init_weights: bool = field(default=True, metadata={"help": "True: empty tables. False: random ones, for tests."})
    touched_rows: dict[str, int] | None = field(
        default=None, metadata={"help": "How many rows the file holds of each layer's table, if not all."}
    )

    # Read by BaseTuner of every config; layers are all that this adapter is attached to.
    target_modules: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.NGRAM_MEMORY
        self._token_map: torch.Tensor | None = None
        layers = self.layers_to_transform
        self.layers_to_transform = [layers] if isinstance(layers, int) else layers if layers is None else list(layers)
        self._check(self.layers_to_transform)

    def _check(self, layers: list[int] | None) -> None:
        """Raises a `ValueError` for what is wrong with any model."""
        if layers is not None and (not layers or min(layers) < 0 or len(set(layers)) < len(layers)):
            raise ValueError(f"`layers_to_transform` must be different 0-indexed layers, at least one, got {layers}.")
        self._spec(
            hidden_size=256, layer_ids=[0], compressed_vocab_size=self.compressed_vocab_size or 1, eos_token_id=0
        )

    # ---------------------------------------------------------------------------------------------- tokens

    @property
    def token_map(self) -> torch.Tensor | None:
        """The class of every token id, `(token_map_size,)` int64, if `token_map_from` made it; see `build_token_map`."""
        return self._token_map

    def token_map_from(self, tokenizer: PreTrainedTokenizerBase) -> NgramMemoryConfig:
        """Takes from a tokenizer what the memory needs to know of it, and returns the config.

        For the variants that compress the vocabulary, tokens that read the same after normalisation become one. The map is stored
        with the adapter, so that loading needs no tokenizer. Variants without one only take the id of the token that ends a
        document.
        """
        if self.variant in COMPRESSING_VARIANTS:
            token_map = build_token_map(tokenizer)
            self._token_map = token_map
            self.token_map_size = len(token_map)
            self.compressed_vocab_size = compressed_vocab_size(token_map)
            if tokenizer.pad_token_id is not None:
                self.pad_token_id = int(token_map[tokenizer.pad_token_id])
        elif self.eos_token_id is None:
            self.eos_token_id = tokenizer.eos_token_id
        return self

    # ---------------------------------------------------------------------------------------------- the memory

    def fit_to(self, model_config: PreTrainedConfig) -> None:
        """Fills in what was left to the model: layers, vocabulary, end of documents.

        Raises:
            `ValueError`: There are no such layers, or the variant needs a token map.
        """
        text_config = model_config.get_text_config(decoder=True)
        count = text_config.num_hidden_layers
        layers: Any = self.layers_to_transform
        if layers is None:
            layers = sorted({min(1, count - 1), max(0, count // 2 - 1)})
        _check_layers(layers, count)
        self.layers_to_transform = layers
        if self.compressed_vocab_size is None:
            if self.variant in COMPRESSING_VARIANTS:
                raise ValueError(
                    f"Variant {self.variant!r} hashes tokens that read the same as one, so it needs to know the tokens: call "
                    "`config.token_map_from(tokenizer)`. To hash token ids as they are, set `compressed_vocab_size` to "
                    f"the model's vocabulary size ({text_config.vocab_size})."
                )
            self.compressed_vocab_size = text_config.vocab_size
        if self.eos_token_id is None and self.variant == "qwen_ple":
            eos = text_config.eos_token_id
            self.eos_token_id = eos[0] if isinstance(eos, list) else eos

    def memory_spec(self, model_config: PreTrainedConfig) -> NgramMemorySpec:
        """What defines the memories in front of the layers of a model; `fit_to` comes first."""
        text_config = model_config.get_text_config(decoder=True)
        return self._spec(
            hidden_size=text_config.hidden_size,
            layer_ids=self.layers_to_transform,
            compressed_vocab_size=self.compressed_vocab_size,
            eos_token_id=self.eos_token_id,
        )

    def _spec(self, **rest: Any) -> NgramMemorySpec:
        return NgramMemorySpec(
            vocab_size=self.vocab_size,
            variant=self.variant,
            max_ngram_size=self.max_ngram_size,  # type: ignore[arg-type]  # the spec fills in what is None
            n_heads=self.n_heads,  # type: ignore[arg-type]
            head_dim=self.head_dim,  # type: ignore[arg-type]
            seed=self.seed,
            pad_token_id=self.pad_token_id,
            kernel_size=self.kernel_size,
            gate=self.gate,  # type: ignore[arg-type]
            conv=self.conv,  # type: ignore[arg-type]
            bias=self.use_bias,  # type: ignore[arg-type]
            norm_eps=self.norm_eps,
            **rest,
        )

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Writes `adapter_config.json`."""
        super().save_pretrained(str(save_directory), **kwargs)
        self.touched_rows = None  # says what lies in that file and is not true of anything else

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> NgramMemoryConfig:
        """Reads `adapter_config.json`. A weights file beside it that is truncated is refused here, before any model is changed."""
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        check_weights_file(os.path.join(pretrained_model_name_or_path, subfolder or ""))
        return config


def _check_layers(layers: list[int], count: int) -> None:
    outside = [layer for layer in layers if layer >= count]
    if outside:
        hint = ""
        if min(layers) > 0 and max(layers) == count:
            hint = f" Counted from 1? Then they are {[layer - 1 for layer in layers]} here."
        raise ValueError(
            f"`layers_to_transform` lists {outside}, but the model has the decoder layers 0 to {count - 1}.{hint}"
        )
