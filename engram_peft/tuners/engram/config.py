"""Configuration of the ENGRAM adapter, and what it writes beside the weights."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from peft import PeftConfig

from ..._peft import PeftType
from .card import check_weights_file, describe_in_card


def exact_pattern(values: dict[str, Any]) -> dict[str, Any]:
    """A `rank_pattern` or `alpha_pattern` for whole names: PEFT would read a bare `fc` as any name that ends in `.fc`, too."""
    return {f"^{name}": value for name, value in values.items()}


METHODS = ("items", "paper")


@dataclass
class EngramConfig(PeftConfig):
    """
    This is the configuration class to store the configuration of an `EngramModel`.

    Args:
        r (`int`, *optional*):
            The rank of the factors. `None` keeps all that the data asks for when the adapter is filled; a number keeps the
            best directions by the error of the layer's output.
        alpha (`float`):
            The strength: `W <- W - alpha f W M`. 0 is the base model, 1 takes out what the method finds.
        target_modules (`Union[list[str], str]`, *optional*):
            The names of the modules to edit. A string is a regular expression, a list matches exact names and suffixes.
            `None` means every linear layer but the output head, or, in `unlearn` with `method="items"`, what the MLPs of the upper
            half of the layers write with. By name, layers may be linear (`torch.nn.Linear`, transformers' `Conv1D`), embeddings,
            convolutions (`Conv1d`, `Conv2d`, `Conv3d`), or what `register_layer` taught.
        exclude_modules (`Union[list[str], str]`, *optional*):
            The names of the modules to leave alone, matched likewise.
        layers_to_transform (`Union[list[int], int]`, *optional*):
            The indices of the layers to edit.
        layers_pattern (`Union[list[str], str]`, *optional*):
            The name of the layers' container, used only with `layers_to_transform`.
        target_parameters (`list[str]`, *optional*):
            The names of the Parameters to edit, matched as suffixes: those that hold the weights of all experts of a layer
            (`["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]`), or a matrix of a module that is no linear layer. With them
            and no `target_modules` nothing else is edited.
        target_experts (`bool`):
            Whether `target_modules=None` and `"all-linear"` include experts whose weights are stacked in Parameters.
        rank_pattern (`dict[str, int]`):
            Ranks that differ from `r`, by module name or regular expression. Extraction writes the ranks it found here; 0
            stands for a layer whose `M` is stored as a whole.
        alpha_pattern (`dict[str, float]`):
            Strengths that differ from `alpha`, by module name or regular expression.
        expert_ranks (`dict[str, list[int]]`):
            The rank of every expert, by the name of the Parameter with their weights. Written by `extract_engram`.
        modules_to_save (`list[str]`, *optional*):
            Modules apart from the adapter to be trained and saved.
        absorb_bias (`bool`):
            Whether biases are edited together with their weights, as one more column.
        scale (`float`):
            Multiplies every strength; what `EngramModel.set_scale` sets and saving keeps.
        init_weights (`bool`):
            `True` starts as an exact identity, `False` with random factors (for tests).
        description (`str`, *optional*):
            What the adapter takes out, in your words, for the model card. Texts themselves are never written there.
        extraction (`dict`, *optional*):
            How the adapter was filled: counts, options and mask rule. Written by `extract_engram` and `extract_items`.
        items (`dict[str, int]`, *optional*):
            The items that were taken out, by name, and how many rows of the factors each has, in their order. Written by
            `extract_items`.
        method (`str`):
            How `unlearn` fills the adapter. `"items"`: item by item, each at a strength of its own (`extract_items`).
            `"paper"`: the closed form of the paper, `C_t pinv(C_a)` (`extract_engram`); see `EngramConfig.paper`.

    Example:

        ```py
        >>> from engram_peft import EngramConfig
        >>> from peft import get_peft_model

        >>> config = EngramConfig(target_modules=["down_proj"], layers_to_transform=list(range(4, 24)), alpha=0.75)
        >>> model = get_peft_model(model, config)
        ```
    """

    r: int | None = field(default=None, metadata={"help": "Rank of the factors; None: what the data asks for."})
    alpha: float = field(default=1.0, metadata={"help": "Strength of the edit."})
    target_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Names of the modules to edit, a list of suffixes or a regular expression."}
    )
    exclude_modules: list[str] | set[str] | str | None = field(
        default=None,
        metadata={"help": "Names of the modules to leave alone, a list of suffixes or a regular expression."},
    )
    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "Indices of the layers to edit."}
    )
    layers_pattern: list[str] | str | None = field(
        default=None, metadata={"help": "Name of the layers' container, used only with `layers_to_transform`."}
    )
    target_parameters: list[str] | None = field(
        default=None, metadata={"help": "Names of the Parameters to edit, such as the stacked weights of experts."}
    )
    target_experts: bool = field(
        default=True, metadata={"help": "Whether every linear layer includes experts with stacked weights."}
    )
    rank_pattern: dict[str, int] = field(default_factory=dict, metadata={"help": "Ranks that differ from `r`."})
    alpha_pattern: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Strengths that differ from `alpha`."}
    )
    expert_ranks: dict[str, list[int]] = field(
        default_factory=dict, metadata={"help": "Rank of every expert, by the name of the Parameter."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules apart from the adapter to be trained and saved."}
    )
    absorb_bias: bool = field(default=True, metadata={"help": "Whether biases are edited with their weights."})
    scale: float = field(default=1.0, metadata={"help": "Multiplies every strength."})
    init_weights: bool = field(default=True, metadata={"help": "True: identity. False: random factors, for tests."})
    description: str | None = field(default=None, metadata={"help": "What the adapter takes out, for the model card."})
    extraction: dict[str, Any] | None = field(default=None, metadata={"help": "How the adapter was filled."})
    items: dict[str, int] | None = field(
        default=None, metadata={"help": "Items that were taken out and the number of their rows."}
    )
    method: str = field(default="items", metadata={"help": "How `unlearn` fills the adapter: 'items' or 'paper'."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType.ENGRAM
        self.target_modules = (
            set(self.target_modules) if isinstance(self.target_modules, list) else self.target_modules
        )
        self.exclude_modules = (
            set(self.exclude_modules) if isinstance(self.exclude_modules, list) else self.exclude_modules
        )
        if isinstance(self.items, list):
            self.items = {name: int(rows) for name, rows in self.items}
        if self.method not in METHODS:
            raise ValueError(f"`method` must be one of {list(METHODS)}, got {self.method!r}.")
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:
            raise ValueError("`layers_to_transform` cannot be used when `target_modules` is a str.")
        if isinstance(self.target_modules, str) and self.layers_pattern is not None:
            raise ValueError("`layers_pattern` cannot be used when `target_modules` is a str.")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError("When `layers_pattern` is specified, `layers_to_transform` must also be specified.")
        for name, rank in [("r", self.r), *(("rank_pattern", rank) for rank in self.rank_pattern.values())]:
            whole = rank == 0 and name == "rank_pattern" and self.extraction is not None
            if rank is not None and not whole and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
                raise ValueError(f"`{name}` should be a positive integer, the value passed is {rank}.")
        if isinstance(self.target_parameters, str):
            raise ValueError(
                f"`target_parameters` should be a list of names, the value passed is {self.target_parameters!r}."
            )
        for name, ranks in self.expert_ranks.items():
            if not isinstance(ranks, list) or any(type(rank) is not int or rank < 0 for rank in ranks):
                raise ValueError(
                    f"`expert_ranks` should list a rank for every expert of {name}, the value passed is {ranks}."
                )
        strengths = [("alpha", self.alpha), ("scale", self.scale)]
        strengths += [("alpha_pattern", alpha) for alpha in self.alpha_pattern.values()]
        for name, strength in strengths:
            if not math.isfinite(strength):
                raise ValueError(f"`{name}` should be a finite number, the value passed is {strength}.")

    def to_dict(self) -> dict[str, Any]:
        """The config as PEFT saves it: `items` as a list of pairs, since PEFT sorts the keys of dictionaries."""
        items = None if self.items is None else [[name, rows] for name, rows in self.items.items()]
        return {**super().to_dict(), "items": items}

    @classmethod
    def paper(cls, **kwargs: Any) -> EngramConfig:
        """A config whose adapter `unlearn` fills with the closed form of the paper, in every linear layer by default."""
        return cls(method="paper", **kwargs)

    def record_extraction(
        self,
        ranks: dict[str, int],
        record: dict[str, Any],
        items: dict[str, int] | None = None,
        expert_ranks: dict[str, list[int]] | None = None,
    ) -> None:
        """Keeps how the adapter was filled; the ranks go to `rank_pattern`, the ones asked for stay in the record."""
        self.items, self.expert_ranks = items, expert_ranks or {}
        asked_for = self.requested_rank_pattern()
        self.extraction = {**record, "requested_rank_pattern": asked_for} if asked_for else record
        self.rank_pattern = exact_pattern(ranks)

    def requested_rank_pattern(self) -> dict[str, int]:
        """The `rank_pattern` as the user gave it, also after extraction wrote the ranks it found."""
        if self.extraction is None:
            return self.rank_pattern
        return self.extraction.get("requested_rank_pattern", {})

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Writes `adapter_config.json`, and what the adapter is into the model card if there is one."""
        super().save_pretrained(str(save_directory), **kwargs)
        describe_in_card(save_directory, self)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> EngramConfig:
        """Reads `adapter_config.json`. A weights file beside it that is truncated is refused here, before any model is changed."""
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        check_weights_file(os.path.join(pretrained_model_name_or_path, subfolder or ""))
        return config
