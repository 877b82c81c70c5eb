"""Mixtures whose experts are modules of their own: which token every row that reaches an expert came from.

A mask selects tokens, but an expert sees only the rows that were sent to it, in an order of the mixture's own. Rows cannot be told
apart by their values, since two tokens may have the same. So the index of the token travels along: while a mixture runs, every
operation that moves rows of its input is applied to the rows' indices as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary


# Operations that put elements of a tensor elsewhere: applied to the indices, they say where these went.
MOVES = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "view_as",
        "reshape_as",
        "squeeze",
        "unsqueeze",
        "permute",
        "transpose",
        "movedim",
        "expand",
        "expand_as",
        "repeat",
        "repeat_interleave",
        "__getitem__",
        "index_select",
        "gather",
        "take_along_dim",
        "masked_select",
        "narrow",
        "select",
        "chunk",
        "split",
        "tensor_split",
        "unbind",
        "cat",
        "concat",
        "stack",
        "contiguous",
        "clone",
        "detach",
    ]
)
# Operations that change values, but leave every row where it is.
KEEPS = frozenset(
    [
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "bfloat16",
        "double",
        "cpu",
        "cuda",
        "mul",
        "__mul__",
        "__rmul__",
        "__imul__",
        "mul_",
        "multiply",
        "div",
        "__truediv__",
        "dropout",
        "add",
        "__add__",
        "__radd__",
        "sub",
        "__sub__",
    ]
)
NO_TOKEN = -1

_EXPERT = re.compile(r"^((?:.*\.)?\w*experts)\.(\w*\d+)(?=\.|$)")


def expert_module(name: str) -> str | None:
    """The name of the expert that a layer belongs to, `...experts.3` or `...experts.expert_3`; `None` if to none."""
    match = _EXPERT.match(name)
    return None if match is None else match.group(0)


def expert_family(name: str) -> str:
    """What the layers of the same kind in all experts of a mixture have in common: the name without the expert's index."""
    return _EXPERT.sub(r"\1.*", name)


class _TokenTrace(TorchFunctionMode):
    """Follows the rows of `x`, `(..., width)`: `tokens[tensor]` holds, for every element, the row of `x` that it came from."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.tokens: Any = WeakTensorKeyDictionary()
        rows = torch.arange(x.numel() // x.shape[-1], device=x.device)
        self.tokens[x] = rows.reshape(*x.shape[:-1], 1).expand(x.shape)

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        followed = [tensor for tensor in _tensors(args) if tensor in self.tokens]
        if name == "__setitem__":
            self._write(*args)
        elif not followed:
            return result
        elif name in MOVES:
            moved = func(*self._in_place_of(args), **{k: self._in_place_of(v) for k, v in kwargs.items()})
            for tensor, tokens in zip(_tensors(result), _tensors(moved), strict=True):
                self.tokens[tensor] = tokens
        elif name in KEEPS and isinstance(result, torch.Tensor):
            like = next((tensor for tensor in followed if tensor.shape == result.shape), None)
            if like is not None:
                self.tokens[result] = self.tokens[like]
        return result

    def _in_place_of(self, value: Any) -> Any:
        """The indices in the place of the tensors that are followed."""
        if isinstance(value, torch.Tensor):
            return self.tokens.get(value, value)
        if isinstance(value, tuple | list):
            return type(value)(self._in_place_of(part) for part in value)
        return value

    def _write(self, target: torch.Tensor, index: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or (value not in self.tokens and target not in self.tokens):
            return
        if target not in self.tokens:
            self.tokens[target] = torch.full_like(target, NO_TOKEN, dtype=torch.int64)
        self.tokens[target] = self.tokens[target].clone()
        self.tokens[target][index] = self.tokens.get(value, NO_TOKEN)


class RowTokens:
    """Hooks that follow rows from the input of every mixture to its experts.

    Args:
        model (`nn.Module`): The unwrapped model.
        layers (`dict[str, nn.Module]`): The layers that are listened to; those of experts, by their names, matter here.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        self.expert_of = {name: expert for name in layers if (expert := expert_module(name)) is not None}
        self.num_tokens: set[int] = (
            set()
        )  # of the batch, an encoder's and a decoder's; none: nothing has to be followed
        self._model = model
        self._tokens: dict[str, torch.Tensor | None] = {}  # what the expert that runs was handed
        self._traces: list[_TokenTrace | None] = []
        self._handles: list[Any] = []

    def __enter__(self) -> RowTokens:
        mixtures = dict.fromkeys(expert.rpartition(".")[0].rpartition(".")[0] for expert in self.expert_of.values())
        for name in mixtures:
            mixture = self._model.get_submodule(name)
            self._handles.append(mixture.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(mixture.register_forward_hook(self._end, always_call=True))
        for name in dict.fromkeys(self.expert_of.values()):
            expert = self._model.get_submodule(name)
            self._handles.append(expert.register_forward_pre_hook(_Arrival(self, name), with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, mixture: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((t for t in _tensors((*args, *kwargs.values())) if t.is_floating_point() and t.dim() > 1), None)
        trace = None
        if x is not None and x.numel() // x.shape[-1] in self.num_tokens:
            trace = _TokenTrace(x)
            trace.__enter__()
        self._traces.append(trace)

    def _end(self, mixture: nn.Module, args: Any, output: Any) -> None:
        trace = self._traces.pop()
        if trace is not None:
            trace.__exit__(None, None, None)

    def arrive(self, expert: str, x: torch.Tensor) -> None:
        """Keeps the tokens of the rows of `x`, which `expert` is handed."""
        trace = self._traces[-1] if self._traces else None
        tokens = None if trace is None else trace.tokens.get(x)
        self._tokens[expert] = None if tokens is None else tokens.reshape(-1, x.shape[-1])[:, 0]

    def of(self, name: str) -> torch.Tensor | None:
        """The token of every row that the layer is handed now, `(n,)`, -1 for none; `None` if that is not known.

        Only for layers of experts.
        """
        return self._tokens.get(self.expert_of[name])


class _Arrival:
    """The hook on an expert. An object and no closure: copies of a model copy it."""

    def __init__(self, rows: RowTokens, expert: str) -> None:
        self.rows, self.expert = rows, expert

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(_tensors((*args, *kwargs.values())), None)
        if x is not None:
            self.rows.arrive(self.expert, x)


def _tensors(value: Any) -> Any:
    """The tensors among arguments, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
