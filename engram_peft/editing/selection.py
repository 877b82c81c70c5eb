"""Which layers: names in the unwrapped model, chosen by PEFT's `target_modules` convention."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers import PreTrainedModel

from .kinds import is_linear, kind_of, unsupported


@dataclass
class Selection:
    """The part of a PEFT config that says which modules are meant, with PEFT's meaning of every field."""

    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None

    @classmethod
    def of(cls, config: Any) -> Selection:
        """The selection that a PEFT config makes."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside PEFT, `torch.compile`, DDP and DataParallel wrappers; its module names are the ones that count."""
    while True:
        model = without_wrappers(model)
        if not isinstance(model, PeftModel):
            return model
        model = model.get_base_model()


def without_wrappers(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`, DDP and DataParallel wrappers, which may be a `PeftModel`."""
    while True:
        if isinstance(compiled := model._modules.get("_orig_mod"), nn.Module):
            model = compiled
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def base_layer_of(module: nn.Module) -> nn.Module:
    """The layer inside PEFT's wrappers."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def outer_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules` without what lies inside PEFT's wrappers."""
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside + "."):
            continue
        if base_layer_of(module) is not module:
            inside = name
        yield name, module


def editable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer of the unwrapped model that has a kind, by name; a wrapped one is represented by its wrapper."""
    return {name: module for name, module in outer_modules(model) if kind_of(base_layer_of(module)) is not None}


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those of them that are an `nn.Linear`, a `Conv1D` or its quantised kin."""
    return {name: module for name, module in outer_modules(model) if is_linear(base_layer_of(module))}


def select_layers(model: nn.Module, selection: Selection) -> dict[str, nn.Module]:
    """The layers of the unwrapped `model` that `selection` means, in the model's order.

    `target_modules=None` and `"all-linear"` mean every linear layer but the output head, as in PEFT; of a model that also sees or
    hears `None` means those of its language model only, the ones that text reaches; with `target_parameters` and no
    `target_modules` there are none. Layers of other kinds are meant by their names only.

    Raises:
        `ValueError`: Nothing matches, or `layers_to_transform` lists a layer that the model does not have.
        `TypeError`: A matching module cannot be edited.
    """
    if selection.target_parameters and not selection.target_modules:
        return {}
    layers = editable_layers(model)
    if selection.target_modules is None or selection.target_modules == "all-linear":
        layers, head = linear_layers(model), output_head(model)
        everything = {name for name, module in layers.items() if base_layer_of(module) is not head}
        if selection.target_modules is None:
            reached = set(language_model(model).modules())
            everything = {name for name in everything if layers[name] in reached}
        selection = Selection(**{**vars(selection), "target_modules": everything})
        # exact names would bypass `layers_to_transform`: match by the last part of the name, within `everything`
        if selection.layers_to_transform not in (None, []):
            everything = {name for name in everything if "." in name}
            selection.target_modules = {name.rpartition(".")[2] for name in everything}
        layers = {name: module for name, module in layers.items() if name in everything}
    check_layers_exist(model, selection)
    check_supported(model, selection)
    selected = {name: module for name, module in layers.items() if check_target_module_exists(selection, name)}
    if not selected:
        raise ValueError(no_match_message(model, selection.target_modules))
    return selected


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that makes the logits, inside its PEFT wrapper if it has one."""
    return _own_layer(model, "get_output_embeddings")


def input_embedding(model: nn.Module) -> nn.Module | None:
    """The layer that the token ids go into, inside its PEFT wrapper if it has one."""
    return _own_layer(model, "get_input_embeddings")


def _own_layer(model: nn.Module, getter: str) -> nn.Module | None:
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        layer = getattr(model, getter)()
    except NotImplementedError:  # some vision models have neither
        return None
    return None if layer is None else base_layer_of(layer)


def language_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads text: of a vision-language model its language model, else all of it."""
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return model
    is_composite = model.config.get_text_config() is not model.config
    return model.get_decoder() if is_composite else model


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The model's stack of layers: the longest `ModuleList` of its language model that is not part of another one.

    Raises:
        `ValueError`: The model has none.
    """
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in language_model(model).named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            stacks[name] = module
    if not stacks:
        raise ValueError(
            f"{type(unwrap(model)).__name__} has no stack of layers (a `ModuleList`): name `target_modules`."
        )
    return max(stacks.values(), key=len)


def residual_writers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose output is added to the hidden state, by name: the last of every attention and of every MLP.

    Every decoder layer consists of blocks, which hold the layers that can be edited; the last one defined in a block is what the
    block writes with (`o_proj`, `down_proj`, `c_proj`, `fc2`, ...), if it is as wide as the hidden state.
    """
    model = unwrap(model)
    stack = decoder_layers(model)
    config = getattr(model, "config", None)
    hidden_size = None if config is None else getattr(config.get_text_config(), "hidden_size", None)
    of_block: dict[tuple[int, str], str] = {}
    layers = linear_layers(model)
    inside = {module: number for number, layer in enumerate(stack) for module in layer.modules()}
    for name, module in layers.items():
        if module in inside:
            of_block[inside[module], name.rpartition(".")[0]] = name
    return {name: layers[name] for name in of_block.values() if hidden_size in (None, output_width(layers[name]))}


def output_width(layer: nn.Module) -> int:
    """How wide the output of a linear layer is, inside PEFT's wrappers or not."""
    return _shape(layer)[1]


def mlp_writers(model: nn.Module) -> dict[int, str]:
    """The layer that the MLP of every decoder layer writes with: its name, by the index of the decoder layer.

    Of the writers of a decoder layer it is the one with the widest input, and among those of equal width the last.
    """
    stack = decoder_layers(model)
    inside = {module: number for number, layer in enumerate(stack) for module in layer.modules()}
    writers = residual_writers(model)
    found: dict[int, str] = {}
    for name, module in writers.items():
        earlier = found.get(inside[module])
        if earlier is None or input_width(module) >= input_width(writers[earlier]):
            found[inside[module]] = name
    return found


def input_width(layer: nn.Module) -> int:
    """How wide the input of a linear layer is, inside PEFT's wrappers or not."""
    return _shape(layer)[2]


def _shape(layer: nn.Module) -> tuple[int, int, int]:
    base = base_layer_of(layer)
    kind = kind_of(base)
    assert kind is not None
    return kind.shape(base)


def check_supported(model: nn.Module, selection: Any) -> None:
    """Raises a `TypeError` if `selection` matches a module that cannot be edited."""
    for name, module in outer_modules(model):
        base = base_layer_of(module)
        if name and check_target_module_exists(selection, name) and kind_of(base) is None:
            raise TypeError(unsupported(name, base))


def check_layers_exist(model: nn.Module, selection: Any) -> None:
    """Raises a `ValueError` if `layers_to_transform` lists a layer that the model does not have."""
    listed = selection.layers_to_transform
    if listed is None:
        return
    listed = {listed} if isinstance(listed, int) else set(listed)
    patterns = selection.layers_pattern or r"[^.]*"
    patterns = [patterns] if isinstance(patterns, str) else patterns
    existing = set()
    for name, _ in model.named_modules():
        for pattern in patterns:
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
                existing.add(int(match.group(1)))
                break
    if missing := sorted(listed - existing):
        held = f"layers {min(existing)} to {max(existing)}" if existing else "no numbered layers"
        raise ValueError(f"`layers_to_transform` lists {missing}, but the model has {held}.")


def no_match_message(model: nn.Module, target_modules: Iterable[str] | str | None) -> str:
    """What to say when no module matches: the names that come nearest."""
    wanted = [target_modules] if isinstance(target_modules, str) else sorted(target_modules or [])
    known = sorted({part for name in editable_layers(model) for part in (name, name.rpartition(".")[2])})
    near = [name for target in wanted for name in difflib.get_close_matches(target, known, n=3, cutoff=0.5)]
    hint = f"The nearest names are {near}." if near else f"Layers that can be edited end in {_endings(known)}."
    return f"Target modules {target_modules} not found in the base model. Please check the target modules and try again. {hint}"


def _endings(names: list[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})[:10]
