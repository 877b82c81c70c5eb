"""Which Parameters: names in the unwrapped model, chosen by PEFT's `target_parameters` convention.

What is not a layer of its own can be named by its Parameter: the experts of a mixture, which are stacks, and matrices of modules
that are no `nn.Linear`, such as a router.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from torch.distributed.tensor import DTensor

from .experts import OWN_CLASSES, ParameterStack, expert_stacks, stack_of
from .kinds import TransposedLinearKind, kind_of
from .selection import Selection, base_layer_of, language_model, outer_modules
from .weights import is_quantized


def parameters_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The unwrapped model's Parameters by name, each as its module and its name there."""
    return {
        f"{name}.{parameter}" if name else parameter: (base_layer_of(module), parameter)
        for name, module in outer_modules(model)
        for parameter, _ in base_layer_of(module).named_parameters(recurse=False)
    }


def select_parameters(model: nn.Module, selection: Selection) -> dict[str, ParameterStack]:
    """The Parameters of the unwrapped `model` that `selection.target_parameters` means, in the model's order.

    `layers_to_transform` and `exclude_modules` hold for them as they do for modules.

    Raises:
        `ValueError`: An entry matches nothing.
        `TypeError`: A matching Parameter cannot be edited.
    """
    targets = list(selection.target_parameters or [])
    known = parameters_of(model)
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in known):
            near = difflib.get_close_matches(target, sorted({_short(name) for name in known}), n=3, cutoff=0.5)
            hint = f" The nearest names are {near}." if near else ""
            raise ValueError(f"`target_parameters` lists {target!r}, which no parameter of the model is called.{hint}")
    chosen = replace(selection, target_modules=set(targets), target_parameters=None)
    return {
        name: parameter_stack(name, module, parameter)
        for name, (module, parameter) in known.items()
        if targets and check_target_module_exists(chosen, name) and not _is_excluded(chosen, name)
    }


def expert_parameters(model: nn.Module, selection: Selection) -> list[str]:
    """The names of all experts' weights, but for those that `exclude_modules` and `layers_to_transform` leave out.

    Without `target_modules` they are those of the language model, as layers are.
    """
    stacks = expert_stacks(model)
    if selection.target_modules is None:
        reached = set(language_model(model).modules())
        stacks = {name: stack for name, stack in stacks.items() if stack.module in reached}
    # by the last parts of the names: exact ones would bypass `layers_to_transform`
    ends = {_short(name) for name in stacks}
    chosen = replace(selection, target_modules=ends, target_parameters=None)
    return [name for name in stacks if check_target_module_exists(chosen, name) and not _is_excluded(chosen, name)]


def _is_excluded(selection: Selection, name: str) -> bool:
    """Whether the module that holds the Parameter is excluded."""
    if not selection.exclude_modules:
        return False
    module = replace(selection, target_modules=".*", layers_to_transform=None, layers_pattern=None)
    return not check_target_module_exists(module, name.rpartition(".")[0])


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def parameter_stack(name: str, module: nn.Module, parameter: str) -> ParameterStack:
    """The Parameter called `parameter` in `module`, and `name` in the model.

    Raises:
        `TypeError`: It cannot be edited.
    """
    stack = stack_of(module, parameter)
    if stack is not None:
        return stack
    weight = getattr(module, parameter)
    if weight.dim() != 2:
        raise TypeError(
            f"Target parameter {name} is not supported. It has {weight.dim()} dimensions and belongs to a "
            f"`{type(module).__name__}`. Matrices can be edited, and the experts of classes that use transformers' experts "
            f"implementations or are one of {sorted(OWN_CLASSES)}."
        )
    if isinstance(weight, DTensor):
        raise TypeError(f"Target parameter {name} is sharded over devices, which is not supported.")
    kind = kind_of(module)
    if kind is not None and (not kind.rows_are_input or is_quantized(module)):
        raise TypeError(
            f"Target parameter {name} is not supported: it is no matrix that a `{type(module).__name__}` multiplies its input with. Name "
            "the layer in `target_modules`."
        )
    return _matrix(module, parameter)


def _matrix(module: nn.Module, parameter: str) -> ParameterStack:
    """A single weight. It is `(out, in)`, unless the module says that its input is as wide as the weight has rows."""
    rows, columns = getattr(module, parameter).shape
    is_transposed = getattr(module, "is_transposed", isinstance(kind_of(module), TransposedLinearKind))
    if not isinstance(module, nn.Linear) and getattr(module, "in_features", columns) != columns:
        is_transposed = module.in_features == rows
    bias = getattr(module, "bias", None) if parameter == "weight" else None
    return ParameterStack(
        module=module,
        parameter=parameter,
        num_experts=1,
        in_features=rows if is_transposed else columns,
        out_features=columns if is_transposed else rows,
        is_transposed=is_transposed,
        bias="bias" if isinstance(bias, nn.Parameter) else None,
        input_of=parameter,
        is_routed=False,
    )
