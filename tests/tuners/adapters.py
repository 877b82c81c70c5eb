"""Adapters filled from texts, and what tests compare models by."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from engram_peft import EngramConfig, Statistics, collect_statistics, extract_engram, merge_statistics
from engram_peft.tuners.engram import EngramLayer

from ..conftest import WORDS


KINDS = ["llama", "qwen3", "gpt2", "opt"]
WITH_BIAS = ["gpt2", "opt"]
TIED = ["qwen3", "gpt2"]
DTYPES = [torch.float32, torch.bfloat16]


def sentences(count: int, length: int, seed: int) -> list[str]:
    """Random texts of `length` words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=length)) for _ in range(count)]


FORGET = ["the capital of france is paris .", "the capital of italy is rome ."]
FORGET_OTHER = ["the queen of england lived in london", "who found the old bridge"]
RETAIN = sentences(30, 8, seed=1)


def statistics(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, forget: list[str] = FORGET
) -> tuple[Statistics, Statistics]:
    """Target and total of `forget` among `RETAIN`, on the adapter's layers."""
    target = collect_statistics(model, forget, tokenizer=tokenizer)
    return target, merge_statistics(target, collect_statistics(model, RETAIN, tokenizer=tokenizer))


def fill(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter_name: str = "default",
    forget: list[str] = FORGET,
    **extraction: Any,
) -> PeftModel:
    """Fills an adapter with what `forget` leaves in the layers; strongly, so that it shows in the outputs."""
    with model.disable_adapter():
        target, total = statistics(model, tokenizer, forget)
    extract_engram(model, target, total, adapter_name, **{"scale": "uniform", **extraction})
    return model


def edited(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter_name: str = "default",
    forget: list[str] = FORGET,
    scale: str = "uniform",
    **config: Any,
) -> PeftModel:
    """`model` with a filled adapter."""
    config = EngramConfig(**{"task_type": "CAUSAL_LM", "alpha": 0.25, **config})
    return fill(get_peft_model(model, config, adapter_name).eval(), tokenizer, adapter_name, forget, scale=scale)


def twice_edited(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **config: Any) -> PeftModel:
    """`model` with the filled adapters `first`, which is active, and `second`."""
    model = edited(model, tokenizer, "first", **config)
    config = {"task_type": "CAUSAL_LM", "alpha": 0.25, **config}
    model.add_adapter("second", EngramConfig(**config))
    return fill(model, tokenizer, "second", FORGET_OTHER)


def logits(model: nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Whether they agree up to `tolerance` times the largest value."""
    return float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


def layers_of(model: nn.Module) -> dict[str, EngramLayer]:
    """The ENGRAM layers by their name in the plain model."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return {name: module for name, module in base.named_modules() if isinstance(module, EngramLayer)}


def weight_of(layer: EngramLayer | nn.Module) -> torch.Tensor:
    """The weight that the base layer multiplies by, `(out, in)`."""
    base = layer.get_base_layer() if isinstance(layer, EngramLayer) else layer
    return base.weight.detach().T if isinstance(base, Conv1D) else base.weight.detach()


def augmented_weight_of(layer: EngramLayer, bias: bool) -> torch.Tensor:
    """`W`, or `[W | b]`, in float64."""
    weight = weight_of(layer).double()
    return torch.cat([weight, layer.get_base_layer().bias.detach().double()[:, None]], dim=1) if bias else weight


def projection(layer: EngramLayer, adapter_name: str = "default") -> torch.Tensor:
    """`f M` as the adapter's own tensors hold it, in float64."""
    if isinstance(layer.engram_A[adapter_name], nn.Identity):
        a = torch.eye(layer.in_features, dtype=torch.float64)
    else:
        a = layer.engram_A[adapter_name].weight.detach().double()
        if (column := layer.engram_A[adapter_name].bias) is not None:
            a = torch.cat([a, column.detach().double()[:, None]], dim=1)
    strength = layer.engram_strength[adapter_name].weight.detach().double()
    return layer.engram_B[adapter_name].weight.detach().double() @ (strength[:, None] * a)


def linear_names(model: PreTrainedModel) -> set[str]:
    """Every linear layer but the output head."""
    head = model.get_output_embeddings()
    return {
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether names, shapes, dtypes and all bits agree; NaN counts as equal to NaN."""
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype
        and actual[name].shape == tensor.shape
        and torch.equal(actual[name].nan_to_num(nan=12345.0), tensor.nan_to_num(nan=12345.0))
        for name, tensor in expected.items()
    )


def _described(model: nn.Module) -> dict[str, Any]:
    configs = getattr(model, "peft_config", None) or {}
    return {
        "modules": {name: type(module) for name, module in model.named_modules()},
        "parameters": {name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)},
        "training": {name: module.training for name, module in model.named_modules()},
        "configs": {name: copy.deepcopy(config.to_dict()) for name, config in configs.items()},
        "active": list(model.active_adapters) if isinstance(model, PeftModel) else None,
        "scaling": {name: dict(layer.engram_scaling) for name, layer in layers_of(model).items()},
        "merged": {name: list(layer.merged_adapters) for name, layer in layers_of(model).items()},
        "hooks": {name: len(module._forward_pre_hooks) for name, module in model.named_modules()},
        "tied": getattr(getattr(model, "config", None), "tie_word_embeddings", None),
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fails unless the model is the same afterwards: tensors, modules, Parameters, gradient flags, adapters."""
    before, described = tensors(model), _described(model)
    yield
    after = _described(model)
    for what, expected in described.items():
        assert after[what] == expected, f"{what} changed"
    assert same_tensors(tensors(model), before)
