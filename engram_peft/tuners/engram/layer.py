"""The ENGRAM adapter of one layer.

The closed-form edit `W <- W - alpha f W M` is an edit of the layer's input, `y = W (x - alpha f M x)`. The adapter holds `M` as
thin factors and, where rows are the input itself, never needs the weight: the base layer may be of any precision, quantised,
offloaded or sharded, and a tied weight stays tied. How the layer's input and weight are to be read is the business of its
`LayerKind`; what is different if they are sharded, that of `sharded.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ...editing.kinds import kind_of, unsupported
from ...editing.weights import execution_device, float_weight, onloaded
from ...sharded import gathered, overwrite, share_first
from .config import EngramConfig
from .sharded import mesh_of_input, shard_factors, taken_from_bias, taken_out_of_slice
from .stored import StoredWeight, check_can_be_replaced, quantization_backend, replace_weight


# Rank of an adapter whose rank is left to the data, until it is filled.
UNFILLED_RANK = 8


class RowStrength(nn.Module):
    """One strength a row of the factors, `(r,)`. A module, so that offloading finds it under `<name>.<adapter>.weight`."""

    def __init__(self, r: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(r))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class EngramLayer(BaseTunerLayer):
    """State of the adapters of one layer, keyed by adapter name.

    With the base layer's input `x` as a column, extended by a constant 1 where the bias is absorbed (`x~ = [x; 1]`):

        y = W~ (x~ - scaling * B diag(strength) A x~)        W~ = [W | b]

    A layer of several groups has factors a group, all of the same rank; the modules hold them one below the other.

    **Attributes**:
        - **in_features**, **out_features**, **groups** (`int`) -- Widths of a row and of its output, and how many lie side by side.
        - **engram_A** (`nn.ModuleDict`) -- `A`: `nn.Linear(in_features, r)`; its bias is the column of the constant.
        - **engram_B** (`nn.ModuleDict`) -- `B`: `nn.Linear(r, in_features)`, with one more output for the constant. Where `r` is
          0, `A` is the identity and `B` is `M` as a whole, which is smaller than two factors of more than half its width.
        - **engram_strength** (`nn.ModuleDict`) -- `RowStrength`: the layer's factor `f`, or a strength a row.
        - **engram_scaling** (`dict[str, float]`) -- Strength of the whole adapter, `alpha * scale`.
        - **quantization_backend** (`QuantizationBackend`, *optional*) -- PEFT's, if the base layer is quantised.
        - **requantization_error** (`float`, *optional*) --
            While merged into a quantised weight: how far the weight is from what it should be, as a share of the change.
    """

    adapter_layer_names = ("engram_A", "engram_B", "engram_strength")
    other_param_names: tuple[str, ...] = (
        "engram_alpha",
        "engram_scale",
        "engram_scaling",
        "engram_requested_rank",
        "engram_absorbs_bias",
    )

    def __init__(self, base_layer: nn.Module, **kwargs: Any) -> None:
        self.base_layer = base_layer
        self.engram_A = nn.ModuleDict({})
        self.engram_B = nn.ModuleDict({})
        self.engram_strength = nn.ModuleDict({})
        self.engram_alpha: dict[str, float] = {}
        self.engram_scale: dict[str, float] = {}
        self.engram_scaling: dict[str, float] = {}
        self.engram_requested_rank: dict[str, int | None] = {}
        self.engram_absorbs_bias: dict[str, bool] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._unmerged: StoredWeight | None = None  # what the base layer held before it was merged into
        self.requantization_error: float | None = None
        # the layers of other adapters that this one lies in, innermost last; no submodules
        self.enclosing: tuple[BaseTunerLayer, ...] = kwargs.pop("enclosing", ())
        self.kwargs = kwargs
        self._read_shape()

    def _read_shape(self) -> None:
        """Finds out how wide the base layer's input and output are, and how its weight is stored."""
        base = self.get_base_layer()
        kind = kind_of(base)
        if kind is None:
            raise TypeError(unsupported("", base))
        self.kind = kind
        self.quantization_backend = quantization_backend(base, self.kwargs.get("get_apply_tensor_subclass"))
        mesh_of_input(base, kind)  # raises where it is sharded in a way that its factors cannot be
        self.groups, self.out_features, self.in_features = kind.shape(base)

    # ---------------------------------------------------------------------------------------------- adapters

    def update_layer(
        self, adapter_name: str, r: int | None, requested_rank: int | None, alpha: float, config: EngramConfig
    ) -> None:
        """Adds an adapter: an identity, or random factors if `config.init_weights` is `False`.

        Args:
            adapter_name (`str`): Name of the adapter.
            r (`int`, *optional*): Rank of the factors; `None` if the data will decide.
            requested_rank (`int`, *optional*): Rank that extraction may use at most.
            alpha (`float`): Strength of this layer.
            config (`EngramConfig`): Configuration of the adapter.
        """
        self.engram_alpha[adapter_name] = alpha
        self.engram_scale[adapter_name] = config.scale
        self.engram_scaling[adapter_name] = alpha * config.scale
        self.engram_requested_rank[adapter_name] = requested_rank
        self.engram_absorbs_bias[adapter_name] = config.absorb_bias and self.base_bias() is not None
        if r is None:
            r = (
                0 if self.kind.one_hot else min(UNFILLED_RANK, self.in_features)
            )  # two factors of a diagonal bring nothing
        self._make_factors(adapter_name, r)
        if config.init_weights:
            # one factor is zero, the other is not: an identity that still has gradients
            a, b, _ = self.modules_of(adapter_name)
            if isinstance(a, nn.Linear):
                nn.init.normal_(a.weight, std=self._initial_spread)
            nn.init.zeros_(b.weight)
        self._shard_factors(adapter_name, drawn=True)
        # and to its dtype, until PEFT casts to float32
        super()._move_adapter_to_device_of_base_layer(adapter_name, self.device)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @property
    def _initial_spread(self) -> float:
        """Standard deviation of the factor that does not start at zero."""
        return self.in_features**-0.5

    def _make_factors(self, adapter_name: str, r: int) -> None:
        extra = int(self.engram_absorbs_bias[adapter_name])
        whole = r == 0
        r = self.in_features if whole else r
        # (groups * r, width) and (groups * width, r)
        self.engram_A[adapter_name] = (
            nn.Identity() if whole else nn.Linear(self.in_features, self.groups * r, bias=bool(extra))
        )
        self.engram_B[adapter_name] = nn.Linear(r, self.groups * (self.in_features + extra), bias=False)
        self.engram_strength[adapter_name] = RowStrength(r)

    @property
    def _row_parallel_mesh(self) -> DeviceMesh | None:
        """The processes over which the layer's input is sharded, if it is."""
        return mesh_of_input(self.get_base_layer(), self.kind)

    def _shard_factors(self, adapter_name: str, drawn: bool = False) -> None:
        """Shards new factors as the base layer's input is; those drawn at random are made the same everywhere first."""
        modules = self.modules_of(adapter_name)
        if drawn:
            base = self.get_base_layer().parameters(recurse=False)
            share_first([tensor for module in modules for tensor in module.parameters()], base)
        if (mesh := self._row_parallel_mesh) is not None:
            shard_factors(*modules, self.in_features, mesh)

    def modules_of(self, adapter_name: str) -> tuple[nn.Linear | nn.Identity, nn.Linear, RowStrength]:
        """`A`, `B` and the strengths of an adapter."""
        a, b, strength = self.engram_A[adapter_name], self.engram_B[adapter_name], self.engram_strength[adapter_name]
        return cast(nn.Linear | nn.Identity, a), cast(nn.Linear, b), cast(RowStrength, strength)

    def put_modules(self, adapter_name: str, modules: tuple[nn.Linear | nn.Identity, nn.Linear, RowStrength]) -> None:
        """Puts back what `EngramLayer.modules_of` returned."""
        self.engram_A[adapter_name], self.engram_B[adapter_name], self.engram_strength[adapter_name] = modules

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT calls this after loading, and its own version casts to the dtype of the base layer: what was saved in
        # float32 stays as it is
        device = self.device if device is None else device
        for module in self.modules_of(adapter_name):
            if device is not None and not any(parameter.is_meta for parameter in module.parameters()):
                module.to(device)

    @property
    def device(self) -> torch.device | None:
        """Where the base layer computes; `None` if its weights are nowhere, on the meta device."""
        return execution_device(self.get_base_layer())

    def fill(
        self, adapter_name: str, right: torch.Tensor | None, left: torch.Tensor, strength: float | torch.Tensor
    ) -> None:
        """Replaces the factors of an adapter by tensors of any rank and dtype, which may be kept; gradient flags stay.

        Args:
            adapter_name (`str`): Which adapter.
            right (`torch.Tensor`, *optional*):
                `A`, `(r, width)`, where `width` counts the constant of an absorbed bias; `None` for the identity.
                `(groups, r, width)` for several groups.
            left (`torch.Tensor`): `B`, `(width, r)` or `(groups, width, r)`.
            strength (`float` or `torch.Tensor`): For all rows, or `(r,)`.
        """
        old = self.modules_of(adapter_name)[1].weight

        def parameter(tensor: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(tensor.detach().to(old.device).contiguous(), requires_grad=old.requires_grad)

        with torch.device("meta"):  # the values come from the arguments: no need to draw random ones
            self._make_factors(adapter_name, 0 if right is None else right.shape[-2])
        a, b, rows = self.modules_of(adapter_name)
        if isinstance(a, nn.Linear):
            assert right is not None
            right = right.reshape(-1, right.shape[-1])
            a.weight = parameter(right[:, : self.in_features])
            if a.bias is not None:
                a.bias = parameter(right[:, self.in_features])
        b.weight = parameter(left.reshape(-1, left.shape[-1]))
        rows.weight = parameter(torch.as_tensor(strength, dtype=left.dtype).expand(left.shape[-1]))
        self._shard_factors(adapter_name)

    def public_name(self, name: str) -> str:
        """What the layer is called in the unwrapped model, where the wrapper is called `name`."""
        return name

    def parts(self, name: str) -> dict[str, Any]:
        """What is filled on its own, by name: the layer itself, which is called `name`."""
        return {name: self}

    def fill_parts(self, adapter_name: str, filled: Mapping[str, tuple[Any, ...]]) -> None:
        """`EngramLayer.fill` with the factors of the parts; where there are none the layer is as without the adapter."""
        if not filled:
            width = self.in_features + self.absorbs_bias(adapter_name)
            nothing = torch.zeros(self.groups, 1, width, dtype=self.dtype_of(adapter_name))
            filled = {"": (nothing, nothing.mT, 0.0)}
        for factors in filled.values():
            self.fill(adapter_name, *factors)

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`A` `(r, width)`, `B` `(width, r)` and the strengths `(r,)`, as `EngramLayer.fill` takes them.

        Sharded factors are gathered, so all processes have to ask for them.
        """
        a, b, rows = self.modules_of(adapter_name)
        left, strength = gathered(b.weight), gathered(rows.weight)
        if isinstance(a, nn.Identity):
            right = torch.eye(self.in_features, dtype=left.dtype, device=left.device).repeat(self.groups, 1)
        else:
            right = gathered(a.weight)
            right = right if a.bias is None else torch.cat([right, gathered(a.bias)[:, None]], dim=1)
        if self.groups > 1:
            right, left = right.unflatten(0, (self.groups, -1)), left.unflatten(0, (self.groups, -1))
        return right, left, strength

    def dtype_of(self, adapter_name: str) -> torch.dtype:
        """The dtype of an adapter's factors."""
        return self.modules_of(adapter_name)[1].weight.dtype

    def requested_rank(self, adapter_name: str) -> int | None:
        """Rank that extraction may use at most; `None`: whatever the data asks for."""
        return self.engram_requested_rank[adapter_name]

    def absorbs_bias(self, adapter_name: str) -> bool:
        """Whether the adapter edits the bias together with the weight."""
        return self.engram_absorbs_bias[adapter_name]

    # ---------------------------------------------------------------------------------------------- strength

    def set_scale(self, adapter: str, scale: float) -> None:
        """Sets the strength of an adapter to `scale` times its `alpha`."""
        if adapter not in self.engram_alpha:
            return
        self.check_scale(scale)
        self.engram_scale[adapter] = scale
        self.engram_scaling[adapter] = scale * self.engram_alpha[adapter]

    def scale_layer(self, scale: float) -> None:
        """Multiplies the strength of the active adapters by `scale`."""
        self.check_scale(scale)
        for adapter in self._active():
            self.engram_scaling[adapter] *= scale

    def unscale_layer(self, scale: float | None = None) -> None:
        """Divides the strength of the active adapters by `scale`; without it, back to what `EngramLayer.set_scale` set."""
        if scale == 0:
            raise ValueError("`scale` must not be 0: what was multiplied by 0 comes back with `unscale_layer()`.")
        self.check_scale(1.0 if scale is None else scale)
        for adapter in self._active():
            if scale is None:
                self.engram_scaling[adapter] = self.engram_scale[adapter] * self.engram_alpha[adapter]
            else:
                self.engram_scaling[adapter] /= scale

    @torch.no_grad()
    def set_row_strengths(self, adapter_name: str, strengths: torch.Tensor, rows: slice = slice(None)) -> None:
        """Sets the strengths of some rows of an adapter's factors, `(number of rows,)`."""
        held = self.modules_of(adapter_name)[2].weight
        new = gathered(held).clone()
        new[rows] = strengths.to(new)
        overwrite(held, new)

    def check_scale(self, scale: float) -> None:
        """Raises a `ValueError` if the strength cannot be changed by `scale`: it is not finite, or the layer is merged."""
        if not math.isfinite(scale):
            raise ValueError(f"`scale` should be a finite number, the value passed is {scale}.")
        if self.merged:
            raise ValueError("Cannot change the strength of a merged adapter. Call `unmerge_adapter()` first.")

    # ---------------------------------------------------------------------------------------------- merging

    @property
    def _base_names(self) -> tuple[str, str | None]:
        """What the base layer calls its weight and its bias."""
        return "weight", "bias"

    def base_weight(self) -> nn.Parameter:
        """The weight of the base layer, as it is now."""
        return cast(nn.Parameter, getattr(self.get_base_layer(), self._base_names[0]))

    def base_bias(self) -> nn.Parameter | None:
        """The bias of the base layer, if it has one."""
        name = self._base_names[1]
        return None if name is None else cast(nn.Parameter | None, getattr(self.get_base_layer(), name, None))

    def weight_matrix(self, adapter_name: str) -> torch.Tensor:
        """`W`, or `[W | b]` if the adapter absorbs the bias, unmerged, at least float32: `(out_features, width)`.

        `(groups, out_features, width)` for several groups.
        """
        return self._original_matrix().detach()[..., : self.in_features + self.absorbs_bias(adapter_name)]

    def _original_matrix(self) -> torch.Tensor:
        """`[W | b]`, or `W` where there is no bias, unmerged, at least float32."""
        base = self.get_base_layer()
        with self._original_in_place(), onloaded(base):
            # through a weight that is edited in the forward pass gradients pass
            weight = float_weight(base) if self.kind.rows_are_input else gathered(cast(torch.Tensor, base.weight))
            matrix, bias = self.kind.matrix(base, weight).to(wide(weight.dtype)), self.base_bias()
            if bias is None:
                return matrix
            column = gathered(bias).to(matrix).reshape(*matrix.shape[:-1], 1)
            return torch.cat([matrix, column], dim=-1)

    @contextmanager
    def _original_in_place(self) -> Iterator[None]:
        """The base layer as it was before it was merged into."""
        if self._unmerged is None:
            yield
            return
        merged = StoredWeight.of(self.get_base_layer(), self._base_names)
        self._unmerged.put_back(self)
        try:
            yield
        finally:
            merged.put_back(self)

    @torch.no_grad()
    def output_factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The edit as a product in the weight's own space: `[dW | db] = up down`, `(out, r)` and `(r, width)`.

        The scaling and the strengths are in `up`.
        """
        weight, left, right = self._chain(adapter_name, self._original_matrix())
        return weight @ left, right

    def _chain(self, adapter_name: str, original: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Matrices whose product is `[dW | db]`: the weight, `-scaling B diag(strength)` and `A`, in one dtype."""
        right, left, strength = self.factors(adapter_name)
        weight = original[..., : self.in_features + self.absorbs_bias(adapter_name)]
        left = -self.engram_scaling[adapter_name] * (left.to(weight.dtype) * strength.to(weight.dtype))
        return weight, left, right.to(weight.dtype)

    def _delta(self, adapter_name: str, original: torch.Tensor) -> torch.Tensor:
        """`[dW | db]`, `(out, width)` or `(groups, out, width)`, in the cheaper order of products."""
        weight, left, right = self._chain(adapter_name, original)
        if self.groups == 1:
            return torch.linalg.multi_dot((weight, left, right))
        return weight @ (left @ right) if 2 * left.shape[-1] > weight.shape[-1] else (weight @ left) @ right

    @torch.no_grad()
    def get_delta_weight(self, adapter_name: str) -> torch.Tensor:
        """`dW` in the storage order of the base weight, at least float32; the change of the bias is not part of it."""
        delta = self._delta(adapter_name, self._original_matrix())
        return self.kind.weight(self.get_base_layer(), delta[..., : self.in_features])

    def _edited_matrix(self, original: torch.Tensor, adapter_names: Sequence[str], safe: bool = False) -> torch.Tensor:
        """`[W | b]` with adapters in it; every change is taken from the original, so their order does not matter."""
        dtype = original.dtype if self.quantization_backend else cast(torch.Tensor, self.get_base_layer().weight).dtype
        total = original.clone()
        for name in adapter_names:
            delta = self._delta(name, original)
            total[..., : delta.shape[-1]] += delta
            if safe and not torch.isfinite(total.to(dtype)).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        return total

    def _stored_bias(self, total: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The last column of `[W | b]` as the layer stores it."""
        return total[..., self.in_features].flatten().to(bias.dtype).contiguous()

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """
        Merge the active adapter weights into the base weights. Every change is taken from the original weight, so the order
        does not matter, and the sum is rounded once.

        Args:
            safe_merge (`bool`, *optional*):
                If `True`, the result is checked for NaN and infinity before the layer is touched.
            adapter_names (`list[str]`, *optional*):
                The list of adapter names that should be merged. If `None`, all active adapters will be merged.
        """
        adapter_names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.engram_A]
        if not adapter_names:
            return
        if outer := self._merged_around():
            # PEFT's merging of the other adapter comes by here as well: unmerged the edit holds for the sum
            warnings.warn(
                f"The adapters {adapter_names} stay unmerged: unmerge the {outer} around them first.", stacklevel=2
            )
            return
        base = self.get_base_layer()
        check_can_be_replaced(base, self.quantization_backend, self._base_names[0])
        merged = self.merged_adapters + adapter_names
        before = StoredWeight.of(base, self._base_names)
        try:
            self._store_merged(merged, safe_merge)
        except BaseException:
            before.put_back(self)
            raise
        self._unmerged = self._unmerged or before
        self.merged_adapters = merged

    def _merged_around(self) -> str:
        """What is merged into the same weight by an adapter of another kind; empty if nothing is."""
        return next(
            (
                f"{type(layer).__module__.split('.')[-2]}.{type(layer).__name__}"
                for layer in self.enclosing
                if layer.merged
            ),
            "",
        )

    def _store_merged(self, adapter_names: Sequence[str], safe_merge: bool) -> None:
        """Puts the weight with adapters in it in the place of the base layer's own."""
        original = self._original_matrix()
        total = self._edited_matrix(original, adapter_names, safe_merge)
        with onloaded(self.get_base_layer(), write=True):
            self._write(total, original, any(self.absorbs_bias(name) for name in adapter_names))

    def _write(self, total: torch.Tensor, original: torch.Tensor, with_bias: bool) -> None:
        """Gives the base layer new Parameters, and not new values: another layer may hold the same ones.

        Sharded ones get new values, of which every process writes its own.
        """
        base, bias = self.get_base_layer(), self.base_bias()
        matrix = total[..., : self.in_features]
        if self.quantization_backend is None:
            old = cast(nn.Parameter, base.weight)
            new = self.kind.weight(base, matrix).to(old.dtype).contiguous()
            self._put("weight", new)
        else:
            stored = replace_weight(self, matrix)
            change = (matrix - original[..., : self.in_features]).norm()
            self.requantization_error = float((stored.to(matrix) - matrix).norm() / change.clamp_min(1e-30))
        if bias is not None and with_bias:
            # a quantised base layer may be another one by now
            self._put("bias", self._stored_bias(total, bias))

    def _put(self, name: str | None, tensor: torch.Tensor) -> None:
        """Gives the base layer a new Parameter of the old one's shape, or new values to a sharded one."""
        assert name is not None
        base = self.get_base_layer()
        old = base.get_parameter(name)
        if isinstance(old, DTensor):
            overwrite(old, tensor.view(old.shape))
        else:
            setattr(base, name, nn.Parameter(tensor.view(old.shape), requires_grad=old.requires_grad))

    def unmerge(self) -> None:
        """Puts the base layer's own weight and bias back, to the bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        if outer := self._merged_around():
            raise ValueError(f"Cannot unmerge: {outer} is merged into the weight as well, later. Unmerge that first.")
        assert self._unmerged is not None
        self._unmerged.put_back(self)
        self._unmerged = self.requantization_error = None
        self.merged_adapters = []

    # ---------------------------------------------------------------------------------------------- forward

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.engram_A]

    def _taken_out(self, x: torch.Tensor, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`scaling * B diag(strength) A x~`: what is taken out of `x`, in its shape, and out of its constant, `(..., 1)`."""
        a, b, rows = self.modules_of(adapter_name)
        scaling, x = self.engram_scaling[adapter_name], self._cast_input_dtype(x, b.weight.dtype)
        if (mesh := self._row_parallel_mesh) is not None:
            taken, share = taken_out_of_slice(x, a, b, rows.weight, self.in_features, mesh)
            return scaling * taken, None if share is None else scaling * share
        taken = scaling * b(rows(a(x)))
        share = taken[..., self.in_features :] if self.absorbs_bias(adapter_name) else None
        return taken[..., : self.in_features], share

    def _edited_forward(
        self, x: torch.Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # a strength of 0 is the base model to the bit, whatever the factors hold
        adapter_names = [name for name in adapter_names if self.engram_scaling[name] != 0]
        if not adapter_names:
            return self.base_layer(x, *args, **kwargs)
        if self.kind.one_hot:
            return self._edited_rows_of_table(x, adapter_names, *args, **kwargs)
        if not self.kind.rows_are_input:
            return self._forward_with_edited_weight(x, adapter_names, *args, **kwargs)
        edited: torch.Tensor = x
        constant: torch.Tensor | None = None
        for name in adapter_names:
            taken, share = self._taken_out(x, name)
            edited = edited - taken
            if share is not None:
                constant = share if constant is None else constant + share
        result = self.base_layer(edited.to(x.dtype), *args, **kwargs)
        if constant is not None:
            # what was taken out of the constant 1 goes missing from the bias
            bias = cast(torch.Tensor, self.base_bias())
            result = (result - taken_from_bias(constant, bias, result)).to(result.dtype)
        return result

    def _forward_with_edited_weight(
        self, x: torch.Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # a row is not an input that could be changed (patches overlap), and there are many more rows than outputs: the weight is
        # the cheaper place
        if self.get_base_layer().weight.is_meta:
            raise ValueError(
                f"A `{type(self.get_base_layer()).__name__}` is edited in its weight, which is offloaded. Keep the layer on a device, "
                "or merge the adapter."
            )
        base, bias = self.get_base_layer(), self.base_bias()
        total = self._edited_matrix(self._original_matrix(), adapter_names)
        edited = {"weight": self.kind.weight(base, total[..., : self.in_features]).to(base.weight.dtype)}
        if bias is not None and any(self.absorbs_bias(name) for name in adapter_names):
            edited["bias"] = self._stored_bias(total, bias)
        # inside other wrappers, if there are any
        prefix = next(f"{name}." if name else "" for name, module in self.base_layer.named_modules() if module is base)
        return functional_call(
            self.base_layer, {f"{prefix}{name}": value for name, value in edited.items()}, (x, *args), kwargs
        )

    def _edited_rows_of_table(
        self, x: torch.Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """`M` is diagonal: the output of index `x` keeps the share `1 - scaling M[x, x]`."""
        result = self.base_layer(x, *args, **kwargs)
        kept: torch.Tensor | float = 1.0
        for name in adapter_names:
            right, left, strength = self.factors(name)  # (groups, r, 1), (groups, 1, r), (r,)
            kept = kept - self.engram_scaling[name] * (left[x, 0] * strength * right[x, :, 0]).sum(-1, keepdim=True)
        return (result * kept).to(result.dtype)

    def _mixed_batch_forward(
        self, x: torch.Tensor, *args: Any, adapter_names: list[str], **kwargs: Any
    ) -> torch.Tensor:
        """Every row of the batch with the adapter that `adapter_names` names for it."""
        if len(x) != len(adapter_names):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(x)} respectively."
            )
        result = self.base_layer(x, *args, **kwargs)
        for name in sorted(set(adapter_names)):
            if name in self.engram_A:
                rows = [i for i, other in enumerate(adapter_names) if other == name]
                result[rows] = self._edited_forward(x[rows], [name], *args, **kwargs)
        return result

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """PEFT's conversion knows the weights of linear layers only; for others, and biases, use `EngramModel.save_as_lora`."""
        return self.kind.rows_are_input and not self.engram_absorbs_bias.get(adapter_name, False)


class EditedLayer(nn.Module, EngramLayer):
    """ENGRAM implemented in a layer of any kind."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: EngramConfig,
        r: int | None,
        requested_rank: int | None,
        alpha: float,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        EngramLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r=r, requested_rank=requested_rank, alpha=alpha, config=config)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter_names = kwargs.pop("adapter_names", None)
        # what the layer calls its input: `input` in `nn.Linear`, `x` elsewhere
        x, args = (args[0], args[1:]) if args else (kwargs.pop("input" if "input" in kwargs else "x"), ())
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        if adapter_names is not None:
            if self.merged:
                raise ValueError(
                    "Cannot pass `adapter_names` when there are merged adapters, please call `unmerge_adapter` first."
                )
            return self._mixed_batch_forward(x, *args, adapter_names=adapter_names, **kwargs)
        if self.merged:
            return self.base_layer(x, *args, **kwargs)
        return self._edited_forward(x, self._active(), *args, **kwargs)

    def __repr__(self) -> str:
        return "engram." + super().__repr__()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are formed in."""
    return torch.promote_types(dtype, torch.float32)
