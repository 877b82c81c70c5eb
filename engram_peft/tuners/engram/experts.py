"""The ENGRAM adapter of a Parameter: the weights of all experts of a mixture, or a matrix of a module that is no linear layer.

Every expert has a closed form of its own, with as many rows as the data asks for there. The factors of all experts lie one after the
other in two matrices, so that an expert without rows takes no room. Forward passes edit the experts' inputs (`editing.experts`);
nothing as large as an expert is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear

from ...editing.experts import ParameterStack, Routes, tapped
from ...editing.weights import onloaded
from ...sharded import gathered
from .config import EngramConfig
from .layer import EngramLayer, RowStrength, wide


# Rank of every weight of an adapter whose ranks are left to the data, until it is filled.
UNFILLED_EXPERT_RANK = 1

# Rows of the input and rows of the factors that belong together.
Pieces = list[tuple[slice, slice]]


class ExpertsA(nn.Linear):
    """`A` of all experts, one after the other: `(R, in)`. The bias is the column of the constant."""

    def forward(self, x: torch.Tensor, pieces: Pieces) -> list[torch.Tensor]:  # type: ignore[override]
        """Every piece of `x` `(S, in)` in the basis of its expert, `(n, r)`."""
        return [
            linear(x[rows], self.weight[own], None if self.bias is None else self.bias[own]) for rows, own in pieces
        ]


class ExpertsB(nn.Linear):
    """`B` of all experts side by side: `(width, R)`."""

    def forward(self, narrow: list[torch.Tensor], pieces: Pieces) -> list[torch.Tensor]:  # type: ignore[override]
        """What is taken out of every piece, `(n, r) -> (n, width)`."""
        return [linear(x, self.weight[:, own]) for x, (_, own) in zip(narrow, pieces, strict=True)]


class ExpertsStrength(RowStrength):
    """One strength a row of the factors of all experts, `(R,)`."""

    def forward(self, narrow: list[torch.Tensor], pieces: Pieces) -> list[torch.Tensor]:  # type: ignore[override]
        return [x * self.weight[own] for x, (_, own) in zip(narrow, pieces, strict=True)]


class ParamWrapper(nn.Module, EngramLayer):
    """ENGRAM implemented in a Parameter. PEFT knows by the class's name that wrappers of several Parameters of a module are nested.

    Args:
        base_layer (`nn.Module`): The module that holds the Parameter, or the wrapper of another one.
        adapter_name (`str`): Name of the adapter.
        stack (`ParameterStack`): The Parameter.
        kwargs: See `ParamWrapper.update_layer`.

    **Attributes**:
        - **engram_A**, **engram_B**, **engram_strength** (`nn.ModuleDict`) -- The factors, as in `EngramLayer`, of all experts.
        - **engram_expert_ranks** (`dict[str, list[int]]`) -- How many of their rows every expert has, in the experts' order.
    """

    other_param_names = (*EngramLayer.other_param_names, "engram_expert_ranks")

    def __init__(self, base_layer: nn.Module, adapter_name: str, stack: ParameterStack, **kwargs: Any) -> None:
        super().__init__()
        self.parameter_name = stack.parameter
        self._stack = stack
        self.engram_expert_ranks: dict[str, list[int]] = {}
        EngramLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, **kwargs)

    def _read_shape(self) -> None:
        self.kind, self.quantization_backend = self._stack.kind, None
        self.in_features, self.out_features = self._stack.in_features, self._stack.out_features
        self.groups, self.num_experts = 1, self._stack.num_experts

    @property
    def stack(self) -> ParameterStack:
        """What is wrapped; copies and replicas of the model have their own."""
        return replace(self._stack, module=self.get_base_layer())

    def public_name(self, name: str) -> str:
        """The Parameter's name in the unwrapped model, where the wrapper is called `name`."""
        while name.endswith(".base_layer"):
            name = name.removesuffix(".base_layer")
        return f"{name}.{self.parameter_name}"

    def __getattr__(self, name: str) -> Any:
        """Whoever reads the module's Parameters, as the caller of DBRX's experts does, finds them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(self.base_layer, name)

    # ---------------------------------------------------------------------------------------------- adapters

    def update_layer(
        self,
        adapter_name: str,
        r: int | None,
        requested_rank: int | None,
        alpha: float,
        config: EngramConfig,
        expert_ranks: Sequence[int] | None = None,
    ) -> None:
        """Adds an adapter: see `EngramLayer.update_layer`.

        Args:
            adapter_name (`str`): Name of the adapter.
            r (`int`, *optional*): Rank of every expert; `None` if the data will decide.
            requested_rank (`int`, *optional*): Rank that extraction may use at most, for every expert.
            alpha (`float`): Strength of this layer.
            config (`EngramConfig`): Configuration of the adapter.
            expert_ranks (`Sequence[int]`, *optional*): Rank of each expert, in place of `r`.

        Raises:
            `ValueError`: There are not as many `expert_ranks` as experts.
        """
        r = UNFILLED_EXPERT_RANK if r is None else r
        if self._stack.is_routed:
            ranks = [r] * self.num_experts
            ranks = ranks if expert_ranks is None else list(expert_ranks)
            if len(ranks) != self.num_experts:
                raise ValueError(
                    f"`expert_ranks` has {len(ranks)} entries for {self.parameter_name}, which has {self.num_experts} experts."
                )
            self.engram_expert_ranks[adapter_name], r = ranks, sum(ranks)
        super().update_layer(adapter_name, r, requested_rank, alpha, config)

    @property
    def _initial_spread(self) -> float:
        return 0.02  # what transformers starts weights with: the Parameter may be of any size

    def _make_factors(self, adapter_name: str, r: int) -> None:
        if not self._stack.is_routed:
            super()._make_factors(adapter_name, r)
            return
        extra = int(self.engram_absorbs_bias[adapter_name])
        self.engram_A[adapter_name] = ExpertsA(self.in_features, r, bias=bool(extra))
        self.engram_B[adapter_name] = ExpertsB(r, self.in_features + extra, bias=False)
        self.engram_strength[adapter_name] = ExpertsStrength(r)

    def parts(self, name: str) -> dict[str, Any]:
        """What is filled on its own: every expert, under the name that its statistics have."""
        if not self._stack.is_routed:
            return {name: self}
        return {f"{name}.{expert}": ExpertPart(self, expert) for expert in range(self.num_experts)}

    def fill_parts(self, adapter_name: str, filled: Mapping[str, tuple[Any, ...]]) -> None:
        """Replaces the factors of all experts; those that are not named are left as they are without the adapter.

        Args:
            adapter_name (`str`): Which adapter.
            filled (`Mapping[str, tuple]`): For an expert's name `A`, `B` and the strengths, as `EngramLayer.fill` takes them.
        """
        if not self._stack.is_routed:
            super().fill_parts(adapter_name, filled)
            return
        width = self.in_features + self.absorbs_bias(adapter_name)
        factors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        ranks = [0] * self.num_experts
        for name, (right, left, strength) in sorted(filled.items(), key=lambda item: _index(item[0])):
            right = torch.eye(width).to(left) if right is None else right
            strengths = torch.as_tensor(strength, dtype=left.dtype, device=left.device).expand(len(right))
            factors.append((right, left, strengths))
            ranks[_index(name)] = len(right)
        if not sum(ranks):  # an adapter has at least rank 1
            ranks[0], like = 1, self.modules_of(adapter_name)[1].weight
            factors = [(like.new_zeros(1, width), like.new_zeros(width, 1), like.new_zeros(1))]
        self.engram_expert_ranks[adapter_name] = ranks
        rights, lefts, strengths_of_all = zip(*factors, strict=True)
        self.fill(adapter_name, torch.cat(rights), torch.cat(lefts, dim=1), torch.cat(strengths_of_all))

    def _rows_of(self, adapter_name: str) -> list[slice]:
        """Which rows of the factors every expert has."""
        ranks = self.engram_expert_ranks[adapter_name]
        return [slice(end - rank, end) for rank, end in zip(ranks, accumulate(ranks), strict=True)]

    def expert_factors(self, adapter_name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`A` `(r, width)`, `B` `(width, r)` and the strengths `(r,)` of an expert."""
        right, left, strength = self.factors(adapter_name)
        if not self._stack.is_routed:
            return right, left, strength
        own = self._rows_of(adapter_name)[expert]
        return right[own], left[:, own], strength[own]

    # ---------------------------------------------------------------------------------------------- merging

    @property
    def _base_names(self) -> tuple[str, str | None]:
        return self.parameter_name, self._stack.bias

    def _original_matrix(self) -> torch.Tensor:
        return self.expert_matrix(0)

    @contextmanager
    def _original_stacks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """The Parameter as it is unmerged, in the shape of the stack, and the biases `(E, out)`."""
        with self._original_in_place(), onloaded(self.get_base_layer()):
            weight, bias = gathered(self.base_weight().detach()), self.base_bias()
            yield (
                weight.reshape(self._stack.stored_shape),
                None if bias is None else gathered(bias.detach()).reshape(self.num_experts, -1),
            )

    def expert_matrix(self, expert: int) -> torch.Tensor:
        """`[W | b]` of an expert, or `W` where there is no bias, unmerged, at least float32: `(out, width)`."""
        with self._original_stacks() as (weights, biases):
            matrix = weights[expert].to(wide(weights.dtype))
            matrix = matrix.mT if self._stack.is_transposed else matrix
            if biases is None:
                return matrix
            return torch.cat([matrix, biases[expert, :, None].to(matrix)], dim=1)

    def expert_output_factors(self, adapter_name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The edit of an expert as a product: `[dW | db] = up down`, `(out, r)` and `(r, width)`; see `output_factors`."""
        right, left, strength = (tensor.detach() for tensor in self.expert_factors(adapter_name, expert))
        matrix = self.expert_matrix(expert)[:, : self.in_features + self.absorbs_bias(adapter_name)]
        left = -self.engram_scaling[adapter_name] * (left.to(matrix.dtype) * strength.to(matrix.dtype))
        return matrix @ left, right.to(matrix.dtype)

    def _edits(self, adapter_name: str, expert: int) -> bool:
        return not self._stack.is_routed or self.engram_expert_ranks[adapter_name][expert] > 0

    @torch.no_grad()
    def get_delta_weight(self, adapter_name: str) -> torch.Tensor:
        """`dW` of all experts in the shape of the Parameter, at least float32; the change of the biases is not part of it."""
        with self._original_stacks() as (weights, _):
            delta = torch.zeros_like(weights, dtype=wide(weights.dtype), memory_format=torch.contiguous_format)
            for expert in range(self.num_experts):
                if self._edits(adapter_name, expert):
                    up, down = self.expert_output_factors(adapter_name, expert)
                    change = up @ down[:, : self.in_features]
                    delta[expert] = change.mT if self._stack.is_transposed else change
        return delta.reshape(self.base_weight().shape)

    def _store_merged(self, adapter_names: Sequence[str], safe_merge: bool) -> None:
        with self._original_stacks() as (weights, biases):
            weights = weights.clone(memory_format=torch.contiguous_format)
            biases = None if biases is None else biases.clone()
            for expert in range(self.num_experts):  # one after the other: sums are twice as wide as the weights
                edits = [name for name in adapter_names if self._edits(name, expert)]
                if not edits:
                    continue
                total = self._edited_expert(expert, edits, weights.dtype if safe_merge else None)
                matrix = total[:, : self.in_features]
                weights[expert] = (matrix.mT if self._stack.is_transposed else matrix).to(weights.dtype)
                if biases is not None and any(self.absorbs_bias(name) for name in edits):
                    biases[expert] = total[:, self.in_features].to(biases.dtype)
        with onloaded(self.get_base_layer(), write=True):
            self._put(self._base_names[0], weights)
            if biases is not None and any(self.absorbs_bias(name) for name in adapter_names):
                self._put(self._base_names[1], biases)

    def _edited_expert(
        self, expert: int, adapter_names: Sequence[str], checked_in: torch.dtype | None = None
    ) -> torch.Tensor:
        """`[W | b]` of an expert with adapters in it; every change is taken from the original."""
        total = self.expert_matrix(expert).clone()
        for name in adapter_names:
            up, down = self.expert_output_factors(name, expert)
            total[:, : down.shape[1]] += up @ down
            if checked_in is not None and not torch.isfinite(total.to(checked_in)).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        return total

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """PEFT's conversion knows layers only: use `EngramModel.save_as_lora`."""
        return False

    # ---------------------------------------------------------------------------------------------- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapter_names = kwargs.pop("adapter_names", None)
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(*args, **kwargs)
        if adapter_names is not None:
            raise ValueError(
                f"Mixed batches are not supported where Parameters are edited ({self.parameter_name}): experts do not know the rows "
                "of the batch."
            )
        active = [name for name in self._active() if self.engram_scaling[name] != 0]
        if self.merged or not active:
            return self.base_layer(*args, **kwargs)
        if self._stack.is_routed:
            with tapped(self.get_base_layer(), self._edit_inputs):
                return self.base_layer(*args, **kwargs)
        path, inner = self.parameter_name, cast(Any, self.base_layer)
        while inner is not self.get_base_layer():
            path, inner = f"base_layer.{path}", inner.base_layer
        prefix = path.removesuffix(self.parameter_name)
        changed = {prefix + name: tensor for name, tensor in self._changed_matrix(active).items()}
        return torch.func.functional_call(self.base_layer, changed, args, kwargs)

    def _edit_inputs(
        self, parameter: str, rows: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tap: takes out of every expert's rows `(S, in)` what its factors say."""
        if parameter != self.parameter_name:
            return rows, None
        edited, constant = rows, None
        for name in self._active():
            own = self._rows_of(name)
            pieces = [(chosen, own[expert]) for expert, chosen in routes.slices() if self._edits(name, expert)]
            if not pieces or self.engram_scaling[name] == 0:
                continue
            a, b, strength = self.modules_of(name)
            narrow = strength(a(self._cast_input_dtype(rows, b.weight.dtype), pieces), pieces)
            taken = rows.new_zeros(len(rows), b.weight.shape[0], dtype=torch.promote_types(rows.dtype, b.weight.dtype))
            index = torch.cat([torch.arange(chosen.start, chosen.stop, device=rows.device) for chosen, _ in pieces])
            taken = taken.index_copy(0, index, torch.cat(b(narrow, pieces)).to(taken.dtype))
            taken = self.engram_scaling[name] * taken
            edited = edited - taken[:, : self.in_features]
            if self.absorbs_bias(name):
                share = taken[:, self.in_features :]
                constant = share if constant is None else constant + share
        return edited.to(rows.dtype), constant

    def _changed_matrix(self, adapter_names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The weight, and the bias if it is absorbed, as the adapters leave it. What the module does with it, it knows best."""
        weight, bias = self.base_weight(), self.base_bias()
        if weight.is_meta:
            raise ValueError(
                f"{self.parameter_name} of a `{type(self.get_base_layer()).__name__}` is edited in the Parameter, which is offloaded. Keep "
                "the module on a device, or merge the adapter."
            )
        matrix = self._original_matrix()
        total = matrix
        for name in adapter_names:
            right, left, strength = (tensor.to(matrix.dtype) for tensor in self.factors(name))
            width = self.in_features + self.absorbs_bias(name)
            delta = matrix[:, :width] @ (left * strength) @ right
            padding = (0, matrix.shape[1] - width)
            total = total - self.engram_scaling[name] * nn.functional.pad(delta, padding)
        new = total[:, : self.in_features]
        changed = {self.parameter_name: (new.mT if self._stack.is_transposed else new).to(weight.dtype)}
        if bias is not None and any(self.absorbs_bias(name) for name in adapter_names):
            assert self._stack.bias is not None
            changed[self._stack.bias] = total[:, self.in_features].to(bias.dtype)
        return changed

    def __repr__(self) -> str:
        head, _, rest = super().__repr__().partition("(")
        return f"engram.{head}(\n  parameter_name={self.parameter_name!r},{rest}"


class ExpertPart:
    """One expert of a `ParamWrapper`, with as much of a layer as extraction and combining ask for."""

    is_routed = True

    def __init__(self, wrapper: ParamWrapper, expert: int) -> None:
        self.wrapper, self.expert = wrapper, expert
        self.in_features, self.out_features = wrapper.in_features, wrapper.out_features
        self.groups, self.device = wrapper.groups, wrapper.device
        self.requested_rank, self.absorbs_bias = wrapper.requested_rank, wrapper.absorbs_bias
        self.base_bias, self.dtype_of = wrapper.base_bias, wrapper.dtype_of
        self.engram_scaling = wrapper.engram_scaling

    def weight_matrix(self, adapter_name: str) -> torch.Tensor:
        """See `EngramLayer.weight_matrix`."""
        return self.wrapper.expert_matrix(self.expert)[:, : self.in_features + self.absorbs_bias(adapter_name)]

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `EngramLayer.factors`."""
        return self.wrapper.expert_factors(adapter_name, self.expert)


def nested_names(wrappers: Mapping[str, ParamWrapper]) -> dict[str, str]:
    """What PEFT calls the wrappers of these Parameters, by the Parameters' names, if no other Parameter is wrapped.

    The first Parameter of a module is wrapped first, so the wrapper of the last one is outermost.
    """
    of_module: dict[str, list[str]] = {}
    for name in wrappers:
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, str] = {}
    for module, names in of_module.items():
        order = [name for name, _ in wrappers[names[0]].get_base_layer().named_parameters(recurse=False)]
        names.sort(key=lambda name: order.index(name.rpartition(".")[2]), reverse=True)
        found |= {name: module + ".base_layer" * depth for depth, name in enumerate(names)}
    return found


def _index(name: str) -> int:
    return int(name.rpartition(".")[2])
