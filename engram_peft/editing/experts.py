"""Mixtures of experts whose weights are stacks: where they lie, and what every expert is fed.

transformers keeps the experts of a layer in one module with 3-D Parameters, so no hook sees what a single expert is handed. An
experts implementation can: `tapped` makes a module run through one that hands the input of every weight, sorted by expert, to
*taps*, which read it (collection) or change it (the adapter). It multiplies as `eager`, `grouped_mm` or `batched_mm`, whichever
the model is set to, with the class's own gate and layout flags. Classes with a forward pass of their own are listed in
`OWN_CLASSES`. Internals of transformers read in version 5.24.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _batched_linear, _grouped_linear

from .kinds import LayerKind, LinearKind
from .selection import base_layer_of, outer_modules
from .statistics import Moment, full_precision


IMPLEMENTATION = "engram"


# ---------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class ParameterStack:
    """A Parameter that holds one weight of every expert, or a single weight.

    Args:
        module (`nn.Module`): The module that holds it.
        parameter (`str`): The Parameter's name there.
        num_experts (`int`): Number of weights, `E`; 1 where the Parameter is a matrix.
        in_features (`int`): Width of the input.
        out_features (`int`): Width of the output.
        is_transposed (`bool`): Whether it is stored as `(E, in, out)` and not as `(E, out, in)`.
        bias (`str`, *optional*): Name of the Parameter `(E, out)` or `(out,)` with the biases.
        input_of (`str`): Name of the first weight that reads the same input: itself, or what it shares its moments with.
        is_routed (`bool`): Whether rows are sent to one of the weights by a router.
    """

    module: nn.Module
    parameter: str
    num_experts: int
    in_features: int
    out_features: int
    is_transposed: bool
    bias: str | None
    input_of: str
    is_routed: bool = True

    @property
    def stored_shape(self) -> tuple[int, int, int]:
        """The shape in storage order as three dimensions, of which the Parameter may be a view with fewer."""
        inner = (self.in_features, self.out_features) if self.is_transposed else (self.out_features, self.in_features)
        return (self.num_experts, *inner)

    @property
    def kind(self) -> LayerKind:
        """How to read it as a layer, if it is a single weight."""
        return _ParameterKind(self)


class _ParameterKind(LinearKind):
    """A weight that a module holds under any name: its rows are the module's input."""

    def __init__(self, stack: ParameterStack) -> None:
        self.stack = stack

    def shape(self, layer: Any) -> tuple[int, int, int]:
        return 1, self.stack.out_features, self.stack.in_features


@dataclass(frozen=True)
class _Layout:
    """How a class stores its experts, by the names of its Parameters; `reads` names those that share an input."""

    parameters: tuple[str, ...]
    transposed: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    reads: dict[str, str] = field(default_factory=dict)


def _layout_of(module: nn.Module) -> _Layout | None:
    """The layout of a module that can be edited."""
    if (own := OWN_CLASSES.get(type(module).__name__)) is not None:
        return own.layout
    if not all(hasattr(module, flag) for flag in ("has_gate", "has_bias", "is_transposed", "_apply_gate")):
        return None
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return _Layout(names, names if module.is_transposed else (), names if module.has_bias else ())


def stack_of(module: nn.Module, parameter: str) -> ParameterStack | None:
    """The experts' weight that `parameter` of `module` is; `None` if it is not one, or the class is not known.

    Raises:
        `TypeError`: It is one, but cannot be edited; the message says why.
    """
    layout = _layout_of(module)
    weight = getattr(module, parameter, None)
    if layout is None or parameter not in layout.parameters or weight is None:
        return None
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise TypeError(
            f"The experts of {type(module).__name__} are quantised ({weight.dtype}), and no experts implementation multiplies "
            "edited inputs with such weights. Load the model in bfloat16, or leave the experts out with `target_experts=False`."
        )
    if getattr(module, "_is_expert_parallel", False) or isinstance(weight, DTensor):
        raise TypeError(f"The experts of {type(module).__name__} are sharded over devices, which is not supported.")
    experts = weight.shape[0]
    if weight.dim() == 2:
        experts = next(getattr(module, name) for name in ("num_experts", "moe_num_experts") if hasattr(module, name))
    rows, columns = weight.numel() // experts // weight.shape[-1], weight.shape[-1]
    is_transposed = parameter in layout.transposed
    return ParameterStack(
        module=module,
        parameter=parameter,
        num_experts=experts,
        in_features=rows if is_transposed else columns,
        out_features=columns if is_transposed else rows,
        is_transposed=is_transposed,
        bias=f"{parameter}_bias" if parameter in layout.biases else None,
        input_of=layout.reads.get(parameter, parameter),
    )


def expert_stacks(model: nn.Module) -> dict[str, ParameterStack]:
    """The weights of all experts of the unwrapped model that can be edited, by the Parameter's name."""
    found = {}
    for name, module in outer_modules(model):
        base = base_layer_of(module)
        layout = _layout_of(base)
        for parameter in () if layout is None else layout.parameters:
            if (stack := stack_of(base, parameter)) is not None:
                found[f"{name}.{parameter}"] = stack
    return found


# ---------------------------------------------------------------------------------------------- taps


class Routes:
    """Which expert and which token every row of an experts' input belongs to. Rows are sorted by expert.

    Args:
        experts (`torch.Tensor`): Index of the expert, `(S,)`, ascending. An index of `num_experts` or more means none.
        tokens (`torch.Tensor`, *optional*): Index of the token, `(S,)`; `None` where only the caller of the experts knows it.
        num_experts (`int`): Number of experts.
        num_tokens (`int`, *optional*): Number of tokens.
        is_dense (`bool`):
            Whether every expert is handed every token, those that are not its own as rows of zeros.
    """

    def __init__(
        self,
        experts: torch.Tensor,
        tokens: torch.Tensor | None,
        num_experts: int,
        num_tokens: int | None = None,
        is_dense: bool = False,
    ) -> None:
        self.experts, self.tokens, self.num_experts = experts, tokens, num_experts
        self.num_tokens, self.is_dense = num_tokens, is_dense

    @cached_property
    def counts(self) -> list[int]:
        """Rows of every expert."""
        return torch.bincount(self.experts, minlength=self.num_experts)[: self.num_experts].tolist()

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Where the rows of every expert end, `(E,)` int32."""
        ends = torch.tensor(self.counts, device=self.experts.device).cumsum(0)
        return ends.to(torch.int32)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """The experts that have rows, and which."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count


class Tap(Protocol):
    """Sees, and may change, the input of a weight of a module's experts."""

    def __call__(self, parameter: str, rows: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows to go on with, `(S, in)`, and what was taken out of the constant 1 that carries the bias, `(S, 1)`, if anything."""
        ...


@contextmanager
def tapped(module: nn.Module, tap: Tap) -> Iterator[None]:
    """Runs `module`, which holds experts, so that `tap` sees the inputs of its weights. Taps see them in the order they came."""
    taps = module.__dict__.get("_engram_taps")
    # a new list: replicas of DataParallel share what their attributes refer to
    module._engram_taps = [*(taps or ()), tap]  # type: ignore[assignment]
    undo = _run_through_taps(module) if taps is None else None
    try:
        yield
    finally:
        if undo is None:
            module._engram_taps = taps  # type: ignore[assignment]
        else:
            undo()
            del module._engram_taps


class _TappedConfig:
    """The config of an experts module, but for the implementation that it names."""

    _experts_implementation = IMPLEMENTATION

    def __init__(self, original: Any) -> None:
        self.original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)


def _run_through_taps(module: nn.Module) -> Callable[[], None]:
    """Has `module` run through our implementation; returns what undoes it."""
    own = OWN_CLASSES.get(type(module).__name__)
    if own is None:
        config: Any = module.config
        module.config = _TappedConfig(config)  # type: ignore[assignment]
        return lambda: setattr(module, "config", config)
    # where accelerate has put its own `forward`, it calls this one
    slot = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    before = module.__dict__.get(slot)
    setattr(module, slot, types.MethodType(own.forward, module))
    return lambda: delattr(module, slot) if before is None else setattr(module, slot, before)


def _tap(module: Any, parameter: str, rows: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, Any]:
    taken = None
    for tap in module._engram_taps:
        rows, share = tap(parameter, rows, routes)
        taken = share if taken is None else taken if share is None else taken + share
    return rows, taken


# ---------------------------------------------------------------------------------------------- forward passes


def routed_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Forward pass of experts, which taps may look into.

    Args:
        hidden_states (`torch.Tensor`): Tokens, `(T, hidden)`.
        top_k_index (`torch.Tensor`): The experts of every token, `(T, k)`.
        top_k_weights (`torch.Tensor`): Their weights, `(T, k)`.

    Returns:
        `torch.Tensor`: `(T, hidden)`.
    """
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    num_experts = self.num_routed_experts if hasattr(self, "num_routed_experts") else self.num_experts
    tokens = order // top_k_index.shape[-1]
    routes = Routes(experts, tokens, num_experts, len(hidden_states))
    real, rows = sum(routes.counts), hidden_states[tokens]
    if real < len(rows):
        routes = Routes(experts[:real], tokens[:real], routes.num_experts, len(hidden_states))
    has_gate = getattr(self, "has_gate", True)
    hidden = _product(self, "gate_up_proj" if has_gate else "up_proj", rows[:real], routes)
    hidden = _gated(self, hidden) if has_gate else self.act_fn(hidden)
    output = _product(self, "down_proj", hidden, routes)
    if getattr(self, "has_post_expert_norm", False):
        output = self.post_expert_norm(output)
    if real < len(rows):  # experts without weights, which hand on what they get, or no expert at all
        idle = rows[real:] if hasattr(self, "identity_expert") else torch.zeros_like(rows[real:])
        output = torch.cat([output, idle.to(output.dtype)])
    output = output * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return output[back].view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


def _gated(module: Any, gate_up: torch.Tensor) -> torch.Tensor:
    if hasattr(module, "_apply_gate"):
        return module._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def _product(module: Any, parameter: str, rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """The rows, as the taps leave them, times the weight of their expert: `(S, in) -> (S, out)`."""
    rows, taken = _tap(module, parameter, rows, routes)
    layout = _layout_of(module)
    assert layout is not None
    config = getattr(module, "config", None)
    original = config.original if isinstance(config, _TappedConfig) else None
    implementation = getattr(original, "_experts_implementation", "eager")
    weight, is_transposed = getattr(module, parameter), parameter in layout.transposed
    if implementation == "grouped_mm":
        output = _grouped_linear(rows, weight, routes.offsets, is_transposed=is_transposed)
    elif implementation == "batched_mm":
        output = _batched_linear(rows, weight[routes.experts], is_transposed=is_transposed)
    else:
        output = _one_by_one(rows, weight if is_transposed else weight.mT, routes)
    if parameter in layout.biases:
        bias = getattr(module, f"{parameter}_bias")[routes.experts]
        output = output + (bias if taken is None else bias * (1 - taken).to(bias.dtype))
    return output


def _one_by_one(rows: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
    """`(S, in)` times `(E, in, out)`."""
    outputs = [rows[chosen] @ weight[expert] for expert, chosen in routes.slices()]
    return torch.cat(outputs) if outputs else rows.new_zeros(0, weight.shape[-1])


def _llama4_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Every expert is handed every token, times its score: zeros where the token is not its own. `(E T, H) -> (E T, H)`."""
    experts, rows = self.num_experts, hidden_states.reshape(-1, self.hidden_size)
    tokens, device = len(rows) // experts, rows.device
    routes = Routes(
        torch.arange(experts, device=device).repeat_interleave(tokens),
        torch.arange(tokens, device=device).repeat(experts),
        experts,
        tokens,
        is_dense=True,
    )
    hidden = _product(self, "gate_up_proj", rows, routes)
    gate, up = hidden.chunk(2, dim=-1)
    return _product(self, "down_proj", up * self.act_fn(gate), routes)


def _inkling_shared_forward(self: Any, hidden_states: torch.Tensor, gammas: torch.Tensor) -> torch.Tensor:
    """Experts that every token runs through: `(..., H)`, and the weight of each, `(..., E)`."""
    experts, x = self.n_shared_experts, hidden_states.reshape(-1, hidden_states.shape[-1])
    tokens, device = len(x), x.device
    routes = Routes(
        torch.arange(experts, device=device).repeat_interleave(tokens),
        torch.arange(tokens, device=device).repeat(experts),
        experts,
        tokens,
    )
    rows, weights = x.repeat(experts, 1), gammas.reshape(-1, experts).mT.reshape(-1, 1)
    gate, up = _product(self, "gate_proj", rows, routes), _product(self, "up_proj", rows, routes)
    output = _product(self, "down_proj", self.act_fn(gate) * up * weights, routes)
    return output.float().view(experts, tokens, -1).sum(dim=0).to(hidden_states.dtype).view(hidden_states.shape)


def _jetmoe_forward(self: Any, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
    """`inputs`, `(S, in)`, are sorted by expert; `expert_size` says how many rows each has."""
    sizes = torch.tensor(expert_size, device=inputs.device)
    experts = torch.arange(len(expert_size), device=inputs.device).repeat_interleave(sizes)
    tokens, num_tokens = getattr(self, "_engram_route", (None, None))
    return _product(self, "weight", inputs, Routes(experts, tokens, len(expert_size), num_tokens))


def _dbrx_forward(
    self: Any, x: torch.Tensor, expert_w1: torch.Tensor, expert_v1: torch.Tensor, expert_w2: torch.Tensor
) -> torch.Tensor:
    """One expert: `x` `(S, in)`, the weights are its slices of the stacks, which say by where they start whose they are."""
    expert = (expert_w1.storage_offset() - self.w1.storage_offset()) // expert_w1.numel()
    chosen: torch.Tensor | None = getattr(self, "_engram_route", None)  # the experts of every token, (T, k)
    tokens, num_tokens = (None, None) if chosen is None else (torch.where((chosen == expert).T)[1], len(chosen))
    experts = torch.full((len(x),), expert, device=x.device)
    routes = Routes(experts, tokens, self.moe_num_experts, num_tokens)
    gate = _tap(self, "w1", x, routes)[0].matmul(expert_w1.T)
    up = _tap(self, "v1", x, routes)[0].matmul(expert_v1.T)
    hidden = self.activation_fn(gate) * up
    return _tap(self, "w2", hidden, routes)[0].matmul(expert_w2)


# Who knows the tokens, where the experts do not: hooks on other modules, for the time of a collection.


def _jetmoe_tokens(parent: Any, module: Any) -> Any:
    """The router says which token every row is of."""

    def keep(router: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
        module._engram_route = output[1], len(output[4])

    return parent.router.register_forward_hook(keep)


def _dbrx_tokens(parent: Any, module: Any) -> Any:
    """The experts that every token was sent to reach the caller of the weights."""

    def keep(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module._engram_route = args[1] if len(args) > 1 else kwargs["top_k_index"]

    return parent.register_forward_pre_hook(keep, with_kwargs=True)


@dataclass(frozen=True)
class _OwnClass:
    """Experts without the decorator of transformers: their layout, their forward pass with taps, and who knows their tokens."""

    layout: _Layout
    forward: Callable[..., torch.Tensor]
    tokens: Callable[[nn.Module, nn.Module], Any] | None = None


_GATED = ("gate_up_proj", "down_proj")
OWN_CLASSES: dict[str, _OwnClass] = {
    "DbrxExpertGLU": _OwnClass(
        _Layout(("w1", "v1", "w2"), transposed=("w2",), reads={"v1": "w1"}), _dbrx_forward, _dbrx_tokens
    ),
    "InklingSharedExperts": _OwnClass(
        _Layout(("gate_proj", "up_proj", "down_proj"), reads={"up_proj": "gate_proj"}), _inkling_shared_forward
    ),
    "JetMoeParallelExperts": _OwnClass(_Layout(("weight",)), _jetmoe_forward, _jetmoe_tokens),
    "Llama4TextExperts": _OwnClass(_Layout(_GATED, transposed=_GATED), _llama4_forward),
    "LongcatFlashExperts": _OwnClass(_Layout(_GATED), routed_forward),
    "Step3p7Experts": _OwnClass(_Layout(_GATED), routed_forward),
}


def _registered_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return routed_forward(self, *args, **_renamed(kwargs))


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Some classes call the routing by other names."""
    names = {"router_indices": "top_k_index", "routing_weights": "top_k_weights"}
    return {names.get(name, name): value for name, value in kwargs.items()}


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _registered_forward)


# ---------------------------------------------------------------------------------------------- collection


class ExpertCollector:
    """Taps on experts, and a moment for every expert's input, which allocates nothing before a row of it comes.

    Args:
        model (`nn.Module`): The unwrapped model.
        stacks (`dict[str, ParameterStack]`): The weights to collect for, by name.
        device (`str` or `torch.device`, *optional*): Where the sums are kept; by default beside the weights.
    """

    def __init__(
        self, model: nn.Module, stacks: dict[str, ParameterStack], device: str | torch.device | None = None
    ) -> None:
        self.model, self.stacks, self.device = model, stacks, device
        self.mask: torch.Tensor | None = None  # of the batch; `None`: every token
        self.listening = True
        self._moments: dict[tuple[nn.Module, str], list[_Gathered]] = {}
        self._reads: dict[nn.Module, dict[str, str]] = {}  # by module: whose rows are taken, and what errors call them
        for name, stack in stacks.items():
            if (stack.module, stack.input_of) not in self._moments:
                width = stack.in_features + (stack.bias is not None)
                moments = [_Gathered(width) for _ in range(stack.num_experts)]
                self._moments[stack.module, stack.input_of] = moments
                self._reads.setdefault(stack.module, {})[stack.parameter] = name
        self._opened = ExitStack()

    def __enter__(self) -> ExpertCollector:
        parents = {child: parent for parent in self.model.modules() for child in parent.children()}
        for module in self._reads:
            self._opened.enter_context(tapped(module, _Reader(self, module)))
            own = OWN_CLASSES.get(type(module).__name__)
            if own is not None and own.tokens is not None:
                parent = parents[module]
                while base_layer_of(parent) is module:  # an adapter's wrapper
                    parent = parents[parent]
                self._opened.callback(own.tokens(parent, module).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        for moments in self._moments.values():
            for moment in moments:
                moment.flush()
        for module in self._reads:
            module.__dict__.pop("_engram_route", None)

    def read(self, module: nn.Module, parameter: str, rows: torch.Tensor, routes: Routes) -> None:
        """Adds the selected rows of `(S, in)` to the moments of their experts."""
        name = self._reads[module].get(parameter)
        if name is None or not self.listening:
            return
        stack = self.stacks[name]
        experts, chosen = routes.experts, self._selected(name, rows, routes)
        if chosen is not None:
            rows, experts = rows[chosen], experts[chosen]
        rows = rows.detach().to(torch.float32)
        if not torch.isfinite(rows.sum()):
            raise ValueError(f"The input of {name} holds NaN or infinity. Check the model's weights and dtype.")
        if stack.bias is not None:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        if self.device is not None:
            rows, experts = rows.to(self.device), experts.to(self.device)
        moments = self._moments[module, stack.input_of]
        for expert, its_rows in Routes(experts, None, stack.num_experts).slices():
            moments[expert].add(rows[its_rows])

    def _selected(self, name: str, rows: torch.Tensor, routes: Routes) -> torch.Tensor | None:
        """Which rows count, `(S,)` bool; `None` for all."""
        chosen = None
        if self.mask is not None:
            if routes.tokens is None or routes.num_tokens != self.mask.numel():
                raise ValueError(
                    f"The experts of {name} are handed {routes.num_tokens} tokens, the mask has {self.mask.numel()} entries. Leave "
                    "them out with `exclude_modules`."
                )
            chosen = self.mask.to(rows.device).flatten()[routes.tokens]
        if routes.is_dense:
            own = rows.detach().any(dim=-1)
            chosen = own if chosen is None else chosen & own
        return chosen

    def check_fed(self) -> None:
        """Raises a `ValueError` if not a single expert of a module got a row."""
        fed = {key for key, moments in self._moments.items() if any(gathered.moment.count for gathered in moments)}
        unfed = [name for name, stack in self.stacks.items() if (stack.module, stack.input_of) not in fed]
        if unfed:
            raise ValueError(f"The forward pass never fed {unfed[:5]}. Leave them out with `exclude_modules`.")

    def sinks(self) -> dict[str, Moment]:
        """The moments of every expert: `<name of the Parameter>.<index of the expert>`."""
        return {
            f"{name}.{expert}": gathered.moment
            for name, stack in self.stacks.items()
            for expert, gathered in enumerate(self._moments[stack.module, stack.input_of])
        }


class _Gathered:
    """A moment that takes rows in lots: to add one to a sum costs as much as to add as many as it is wide, and a batch brings few."""

    def __init__(self, width: int) -> None:
        self.moment = Moment(width)
        self._rows: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor) -> None:
        """Takes float32 `rows`, `(n, width)`, which are copied."""
        self._rows.append(rows.clone())
        if sum(map(len, self._rows)) > self.moment.dim // 2:
            self.flush()

    def flush(self) -> None:
        """Adds what is held back."""
        if self._rows:
            with full_precision(self._rows[0].device):
                self.moment.add(torch.cat(self._rows))
            self._rows = []


class _Reader:
    """The tap of a collection."""

    def __init__(self, collector: ExpertCollector, module: nn.Module) -> None:
        self.collector, self.module = collector, module

    def __call__(self, parameter: str, rows: torch.Tensor, routes: Routes) -> tuple[torch.Tensor, None]:
        self.collector.read(self.module, parameter, rows, routes)
        return rows, None
