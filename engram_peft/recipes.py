"""One call from texts to an edited model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .editing.collection import collect_statistics
from .editing.encoding import Item
from .editing.extraction import extract_engram
from .editing.scaling import resolve_scaling
from .editing.selection import Selection
from .editing.spectrum import InverseOptions
from .editing.statistics import merge_statistics
from .tuners.engram import EngramConfig


def unlearn(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Item],
    retain: Sequence[Item],
    config: EngramConfig | None = None,
    *,
    adapter_name: str = "default",
    token_position: str = "answer",
    batch_size: int = 8,
    max_length: int = 512,
    **extraction: Any,
) -> PeftModel:
    """Makes a model forget texts: collects statistics of both sets, adds an ENGRAM adapter and fills it.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model. One that already has ENGRAM adapters gets another one beside those that are active.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        forget (`Sequence`):
            What to forget: `str`, `(prompt, answer)` pairs (the answers are forgotten) or chat messages (the last one is), or a
            `datasets.Dataset` of such. Pairs are joined as they are: to a chat model pass messages.
        retain (`Sequence`): What to keep, likewise. The more it resembles what is forgotten, the less of that is damaged.
        config (`EngramConfig`, *optional*): Which layers and how strongly; by default every linear layer but the head.
            It is copied.
        adapter_name (`str`): Name of the new adapter.
        token_position (`str`): `"answer"` or `"predict"`: see `collect_statistics`.
        batch_size (`int`): Texts a batch.
        max_length (`int`): Longer texts are cut on the right.
        extraction: `scale`, `cut` and the other options of `extract_engram`.

    Returns:
        `PeftModel`: The model with the adapter active. What was found in the layers is in `reports[adapter_name]`.

    Raises:
        `ValueError`: Bad input, before work starts; or the extraction failed. The model is then as it was.
    """
    config = copy.deepcopy(config) if config is not None else EngramConfig(task_type="CAUSAL_LM")
    resolve_scaling(extraction.get("scale", "count_ratio"))
    InverseOptions(**{name: value for name, value in extraction.items() if name != "scale"})
    for name, items in (("forget", forget), ("retain", retain)):
        if isinstance(items, str) or not len(items):
            raise ValueError(f"`{name}` must be a sequence of at least one text, got {items!r}.")
    if isinstance(model, PeftModel):
        if adapter_name in model.peft_config:
            raise ValueError(f"Adapter with name '{adapter_name}' already exists. Choose another `adapter_name`.")
        if model.peft_type != config.peft_type:
            raise ValueError(
                f"Cannot combine adapters with different peft types. Found {model.peft_type} and {config.peft_type}."
            )

    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "token_position": token_position,
        "batch_size": batch_size,
        "max_length": max_length,
        **{name: value for name, value in vars(Selection.of(config)).items() if name in _COLLECTION_SELECTS_BY},
    }
    target = collect_statistics(model, forget, **options)
    total = merge_statistics(target, collect_statistics(model, retain, **options))

    if isinstance(model, PeftModel):
        peft_model, active = model, list(model.active_adapters)
        peft_model.add_adapter(adapter_name, config)
    else:
        peft_model, active = get_peft_model(model, config, adapter_name=adapter_name), []
    try:
        report = extract_engram(peft_model, target, total, adapter_name, **extraction)
    except Exception:
        if isinstance(model, PeftModel):
            peft_model.delete_adapter(adapter_name)
        else:
            peft_model.base_model.take_off()
        raise
    peft_model.base_model.set_adapter([*active, adapter_name] if active else adapter_name)
    peft_model.base_model.reports[adapter_name] = report.release()
    return peft_model


_COLLECTION_SELECTS_BY = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
