"""One call from texts to an edited model."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .editing.collection import collect_statistics
from .editing.encoding import Item, tokenize_item
from .editing.experts import expert_stacks
from .editing.extraction import ExtractionReport, extract_engram, resolve_filter
from .editing.item_edit import ItemOptions, ItemReport, check_reads_on, extract_items
from .editing.items import Forget, item_texts
from .editing.sampling import sample_texts
from .editing.scaling import resolve_scaling
from .editing.selection import Selection, mlp_writers, unwrap, without_wrappers
from .editing.spectrum import InverseOptions
from .editing.statistics import Statistics, merge_statistics
from .editing.tuning import tune_alpha
from .tuners.engram import EngramConfig, EngramModel


# How many texts are sampled where there is nothing to keep at hand.
SAMPLED_TEXTS = 64


def unlearn(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Forget,
    retain: Sequence[Item] | str,
    config: EngramConfig | None = None,
    *,
    alpha: float | str | None = None,
    adapter_name: str = "default",
    batch_size: int = 8,
    max_length: int = 512,
    **extraction: Any,
) -> PeftModel:
    """Makes a model forget texts: adds an ENGRAM adapter and fills it from the texts, in forward passes alone.

    By default item by item (`extract_items`): every item gets the least strength at which the model no longer says it. With
    `EngramConfig.paper()` in the closed form of the paper (`extract_engram`): one strength, `alpha`, for everything.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model. One that already has ENGRAM adapters gets another one beside those that are active; one with adapters of
            another kind (LoRA) keeps them, and its own layers are edited. Wrappers (`torch.compile`, DDP, DataParallel) are looked
            through: wrap what is returned.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        forget (`Sequence` or `Mapping`):
            What to forget: `str`, `(prompt, answer)` pairs (the answers are forgotten) or chat messages (the last one is), or a
            `datasets.Dataset` of such; or a dictionary from names to such an item or a list of several wordings of it. Pairs are
            joined as they are: to a chat model pass messages.
        retain (`Sequence` or `str`):
            What to keep, likewise. The more it resembles what is forgotten, the less of that is damaged. `"sample"` where no data is at
            hand: 64 texts that the model writes itself (`sample_texts`).
        config (`EngramConfig`, *optional*): Which layers and which method. It is copied.
        alpha (`float` or `str`, *optional*):
            Strength of the adapter in place of the config's; item by item it scales the strengths that were found. `"auto"` finds it
            afterwards, with `tune_alpha`.
        adapter_name (`str`): Name of the new adapter.
        batch_size (`int`): Texts a batch.
        max_length (`int`): Longer texts are cut on the right.
        extraction:
            The fields of `ItemOptions`; for the paper's method `token_position` (see `collect_statistics`), `retain_weight` (what a row of
            a kept answer weighs against one of a plain text), `null_space` (`True`: no change at all for the kept answers) and
            `scale`, `cut` and the other options of `extract_engram`.

    Returns:
        `PeftModel`: The model with the adapter active. What was found is in `reports[adapter_name]`, the curve of `alpha="auto"` in
        `curves[adapter_name]`.

    Raises:
        `ValueError`: Bad input, before work starts; or the extraction failed. The model is then as it was.
        `TypeError`: The method cannot edit this kind of model.
    """
    model = without_wrappers(model)
    config = copy.deepcopy(config) if config is not None else EngramConfig(task_type="CAUSAL_LM")
    _check_call(model, config, forget, retain, alpha, adapter_name, extraction)
    if isinstance(alpha, int | float):
        config.alpha = float(alpha)
    if config.method == "items" and config.target_modules is None:
        config.target_modules = _mlp_outputs(model, config)
    kept = sample_texts(model, tokenizer, SAMPLED_TEXTS) if isinstance(retain, str) else retain
    sizes = {"batch_size": batch_size, "max_length": max_length}
    if config.method == "paper":
        # before there is an adapter: nothing has to be undone if this fails
        statistics = _collect_all(model, tokenizer, forget, kept, config, extraction, sizes)

    is_first = not _has_engram(model)
    if is_first:
        with warnings.catch_warnings():
            # adapters of another kind stay, as they should
            warnings.filterwarnings("ignore", message=".*modify a model with PEFT for a second time")
            model = get_peft_model(unwrap(model), config, adapter_name=adapter_name)
    peft_model = cast(PeftModel, model)
    tuner = peft_model.base_model
    active = [] if is_first else list(peft_model.active_adapters)
    if not is_first:
        peft_model.add_adapter(adapter_name, config)
    try:
        tuner.set_adapter([*active, adapter_name])
        report: ItemReport | ExtractionReport
        if config.method == "paper":
            report = extract_engram(peft_model, *statistics, adapter_name, **extraction).release()
        else:
            report = extract_items(peft_model, tokenizer, forget, kept, adapter_name, **sizes, **extraction)
        if alpha == "auto":
            tuner.curves[adapter_name] = tune_alpha(
                peft_model, tokenizer, forget, kept, adapter_name=adapter_name, max_length=max_length
            )
    except BaseException:
        if is_first:
            tuner.take_off()
        else:
            peft_model.delete_adapter(adapter_name)
            tuner.set_adapter(active)
        raise
    tuner.reports[adapter_name] = report
    return peft_model


def _has_engram(model: nn.Module) -> bool:
    return isinstance(model, PeftModel) and isinstance(model.base_model, EngramModel)


def _check_call(
    model: PreTrainedModel | PeftModel,
    config: EngramConfig,
    forget: Forget,
    retain: Sequence[Item] | str,
    alpha: float | str | None,
    adapter_name: str,
    extraction: dict[str, Any],
) -> None:
    """Raises an error for whatever can be seen to be wrong before work starts."""
    _check_options(config, extraction)
    for name, items in (("forget", forget), ("retain", [] if isinstance(retain, str) else retain)):
        if (isinstance(items, str) or not len(items)) and not (name == "retain" and retain == "sample"):
            given = retain if name == "retain" else items
            raise ValueError(f"`{name}` must be a sequence of at least one text, got {given!r}.")
    if isinstance(alpha, str) and alpha != "auto":
        raise ValueError(f"`alpha` must be a number or 'auto', got {alpha!r}.")
    if isinstance(alpha, int | float) and not math.isfinite(alpha):
        raise ValueError(f"`alpha` should be a finite number, the value passed is {alpha}.")
    if config.method == "items":
        check_reads_on(model)
    if not isinstance(model, PeftModel):
        return
    if _has_engram(model) and adapter_name in model.peft_config:
        raise ValueError(f"Adapter with name '{adapter_name}' already exists. Choose another `adapter_name`.")
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"The model has a learned prompt ({model.peft_type.value}), which an edit of its layers would be made without. Pass the "
            "model inside: `model.get_base_model()`."
        )


def _check_options(config: EngramConfig, extraction: dict[str, Any]) -> None:
    """Raises an error for an option that the method does not have or that is out of its range."""
    if config.method == "items":
        known = {field.name for field in fields(ItemOptions)}
    else:
        parameters = inspect.signature(extract_engram).parameters.values()
        known = {"token_position", "retain_weight", *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
    if unknown := sorted(extraction.keys() - known):
        other = "`EngramConfig.paper(...)`" if config.method == "items" else "`EngramConfig(...)`"
        raise TypeError(
            f"{unknown} are no options of the method {config.method!r}, which has {sorted(known)}. The other method is that of {other}."
        )
    if config.method == "items":
        ItemOptions(**extraction)
        return
    resolve_scaling(extraction.get("scale", "count_ratio"))
    resolve_filter(extraction.get("spectral_filter", "identity"))
    InverseOptions(**{k: v for k, v in extraction.items() if k in {field.name for field in fields(InverseOptions)}})


def _mlp_outputs(model: PreTrainedModel | PeftModel, config: EngramConfig) -> set[str]:
    """What the MLPs write with, in the layers that the config lists or in the upper half."""
    writers = mlp_writers(model)
    listed = config.layers_to_transform
    if listed is None:
        chosen = [number for number in writers if number >= len(writers) // 2]
    else:
        chosen = [listed] if isinstance(listed, int) else list(listed)
        if missing := sorted(set(chosen) - writers.keys()):
            raise ValueError(f"`layers_to_transform` lists {missing}, but the model has layers 0 to {max(writers)}.")
        config.layers_to_transform = config.layers_pattern = None  # said by the names
    for name in expert_stacks(unwrap(model)):
        mlp = name.rsplit(".", 2)[0]
        layer = next((number for number in chosen if writers[number].startswith(_layer_of(mlp))), None)
        if layer is not None and not writers[layer].startswith(f"{mlp}."):
            raise ValueError(
                f"The MLPs of the model are experts with stacked weights ({name}), which cannot be edited item by item. Use "
                "`EngramConfig.paper()`, or name the `target_modules` to edit."
            )
    return {writers[number] for number in chosen}


def _layer_of(name: str) -> str:
    """The decoder layer's part of a name, up to and with the dot after its index."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: index + 1]) + "."


def _collect_all(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Forget,
    retain: Sequence[Item],
    config: EngramConfig,
    extraction: dict[str, Any],
    sizes: dict[str, int],
) -> tuple[Statistics, Statistics]:
    """Statistics of what is forgotten and of everything: `S_t` and `S_t + w S_retain + S_general`.

    `extraction` loses the options that concern the data, and its `null_space` becomes the statistics of the kept answers.
    """
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "token_position": extraction.pop("token_position", "answer"),
        **sizes,
        **{name: value for name, value in vars(Selection.of(config)).items() if name in _COLLECTION_SELECTS_BY},
        "target_experts": config.target_experts,
    }
    weight, null_space = extraction.pop("retain_weight", 1.0), extraction.pop("null_space", False)
    target = collect_statistics(model, item_texts(forget), **options)
    if options["token_position"] == "subject":
        options["token_position"] = "predict"  # a plain text is about nothing in particular
    if weight == 1 and not null_space:
        return target, merge_statistics(target, collect_statistics(model, retain, **options))
    answers, texts = (
        [item for item, tokens in zip(retain, tokenized, strict=True) if (tokens.prompt is None) == is_plain]
        for tokenized in [[tokenize_item(tokenizer, item, max_length=sizes["max_length"]) for item in retain]]
        for is_plain in (False, True)
    )
    if not answers:
        raise ValueError(
            "`retain` holds no answers, only plain texts: `retain_weight` and `null_space` are about answers."
        )
    kept = collect_statistics(model, answers, **options)
    if null_space:
        extraction["null_space"] = kept
    parts = [target, kept.weighted(weight), *([collect_statistics(model, texts, **options)] if texts else [])]
    return target, merge_statistics(*parts)


_COLLECTION_SELECTS_BY = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "target_parameters",
)
