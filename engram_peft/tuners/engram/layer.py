"""The ENGRAM adapter of one linear layer.

The closed-form edit `W <- W - alpha f W M` is an edit of the layer's input, `y = W (x - alpha f M x)`. The adapter holds `M` as
thin factors and never needs the weight, so the base layer may be of any precision and a tied weight stays tied.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.other import transpose
from torch import nn
from transformers.pytorch_utils import Conv1D

from .config import EngramConfig


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

    **Attributes**:
        - **engram_A** (`nn.ModuleDict`) -- `A`: `nn.Linear(in_features, r)`; its bias is the column of the constant.
        - **engram_B** (`nn.ModuleDict`) -- `B`: `nn.Linear(r, in_features)`, with one more output for the constant. Where `r` is
          0, `A` is the identity and `B` is `M` as a whole, which is smaller than two factors of more than half its width.
        - **engram_strength** (`nn.ModuleDict`) -- `RowStrength`: the layer's factor `f`, or a strength a row.
        - **engram_scaling** (`dict[str, float]`) -- Strength of the whole adapter, `alpha * scale`.
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
        # the base layer's own Parameters while it is merged: putting them back is exact and restores ties, too
        self._unmerged: tuple[nn.Parameter, nn.Parameter | None] | None = None
        self.kwargs = kwargs
        self._read_shape()

    def _read_shape(self) -> None:
        """Finds out how wide the base layer's input and output are, and how its weight is stored."""
        base = self.get_base_layer()
        if isinstance(base, Conv1D):
            self.in_features, self.out_features = base.weight.shape
        elif isinstance(base, nn.Linear):
            self.in_features, self.out_features = base.in_features, base.out_features
        else:
            raise TypeError(
                f"Target module {base} is not supported. Currently, only `torch.nn.Linear` and "
                "`transformers.pytorch_utils.Conv1D` are supported."
            )
        self.fan_in_fan_out = isinstance(base, Conv1D)

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
        self._make_factors(adapter_name, UNFILLED_RANK if r is None else r)
        if config.init_weights:
            # one factor is zero, the other is not: an identity that still has gradients
            a, b, _ = self.modules_of(adapter_name)
            if isinstance(a, nn.Linear):
                nn.init.normal_(a.weight, std=self._initial_spread)
            nn.init.zeros_(b.weight)
        super()._move_adapter_to_device_of_base_layer(adapter_name)  # and to its dtype, until PEFT casts to float32
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @property
    def _initial_spread(self) -> float:
        """Standard deviation of the factor that does not start at zero."""
        return self.in_features**-0.5

    def _make_factors(self, adapter_name: str, r: int) -> None:
        extra = int(self.engram_absorbs_bias[adapter_name])
        whole = r == 0
        r = self.in_features if whole else r
        self.engram_A[adapter_name] = nn.Identity() if whole else nn.Linear(self.in_features, r, bias=bool(extra))
        self.engram_B[adapter_name] = nn.Linear(r, self.in_features + extra, bias=False)
        self.engram_strength[adapter_name] = RowStrength(r)

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
        device = self.base_weight().device if device is None else device
        for module in self.modules_of(adapter_name):
            if not any(parameter.is_meta for parameter in module.parameters()):
                module.to(device)

    def fill(
        self, adapter_name: str, right: torch.Tensor | None, left: torch.Tensor, strength: float | torch.Tensor
    ) -> None:
        """Replaces the factors of an adapter by tensors of any rank and dtype, which may be kept; gradient flags stay.

        Args:
            adapter_name (`str`): Which adapter.
            right (`torch.Tensor`, *optional*):
                `A`, `(r, width)`, where `width` counts the constant of an absorbed bias; `None` for the identity.
            left (`torch.Tensor`): `B`, `(width, r)`.
            strength (`float` or `torch.Tensor`): For all rows, or `(r,)`.
        """
        old = self.modules_of(adapter_name)[1].weight

        def parameter(tensor: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(tensor.detach().to(old.device).contiguous(), requires_grad=old.requires_grad)

        with torch.device("meta"):  # the values come from the arguments: no need to draw random ones
            self._make_factors(adapter_name, 0 if right is None else len(right))
        a, b, rows = self.modules_of(adapter_name)
        if isinstance(a, nn.Linear):
            assert right is not None
            a.weight = parameter(right[:, : self.in_features])
            if a.bias is not None:
                a.bias = parameter(right[:, self.in_features])
        b.weight = parameter(left)
        rows.weight = parameter(torch.as_tensor(strength, dtype=left.dtype).expand(left.shape[1]))

    def public_name(self, name: str) -> str:
        """What the layer is called in the unwrapped model, where the wrapper is called `name`."""
        return name

    def parts(self, name: str) -> dict[str, Any]:
        """What is filled on its own, by name: the layer itself, which is called `name`."""
        return {name: self}

    def fill_parts(self, adapter_name: str, filled: Mapping[str, tuple[Any, ...]]) -> None:
        """`EngramLayer.fill` with the factors of the parts; where there are none the layer is as without the adapter."""
        if not filled:
            width, dtype = self.in_features + self.absorbs_bias(adapter_name), self.dtype_of(adapter_name)
            filled = {"": (torch.zeros(1, width, dtype=dtype), torch.zeros(width, 1, dtype=dtype), 0.0)}
        for factors in filled.values():
            self.fill(adapter_name, *factors)

    def factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`A` `(r, width)`, `B` `(width, r)` and the strengths `(r,)`, as `EngramLayer.fill` takes them."""
        a, b, rows = self.modules_of(adapter_name)
        if isinstance(a, nn.Identity):
            right = torch.eye(self.in_features, dtype=b.weight.dtype, device=b.weight.device)
        else:
            right = a.weight if a.bias is None else torch.cat([a.weight, a.bias[:, None]], dim=1)
        return right, b.weight, rows.weight

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
        self.modules_of(adapter_name)[2].weight[rows] = strengths.to(self.modules_of(adapter_name)[2].weight)

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
        """`W`, or `[W | b]` if the adapter absorbs the bias, unmerged: `(out_features, width)`, at least float32."""
        return self._original_matrix()[:, : self.in_features + self.absorbs_bias(adapter_name)]

    def _original_parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return self._unmerged or (self.base_weight(), self.base_bias())

    def _original_matrix(self) -> torch.Tensor:
        """`[W | b]`, or `W` where there is no bias, unmerged, at least float32."""
        weight, bias = self._original_parameters()
        matrix = transpose(weight.detach(), self.fan_in_fan_out).to(wide(weight.dtype))
        return matrix if bias is None else torch.cat([matrix, bias.detach()[:, None].to(matrix.dtype)], dim=1)

    def output_factors(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The edit as a product in the weight's own space: `[dW | db] = up down`, `(out, r)` and `(r, width)`.

        The scaling and the strengths are in `up`.
        """
        weight, left, right = self._chain(adapter_name)
        return weight @ left, right

    def _chain(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Matrices whose product is `[dW | db]`: the weight, `-scaling B diag(strength)` and `A`, in one dtype."""
        right, left, strength = (tensor.detach() for tensor in self.factors(adapter_name))
        weight = self.weight_matrix(adapter_name)
        left = -self.engram_scaling[adapter_name] * (left.to(weight.dtype) * strength.to(weight.dtype))
        return weight, left, right.to(weight.dtype)

    def _delta(self, adapter_name: str) -> torch.Tensor:
        """`[dW | db]`, `(out, width)`; the order of the products is the cheapest."""
        return torch.linalg.multi_dot(self._chain(adapter_name))

    def get_delta_weight(self, adapter_name: str) -> torch.Tensor:
        """`dW` in the storage order of the base weight, at least float32; the change of the bias is not part of it."""
        return transpose(self._delta(adapter_name)[:, : self.in_features], self.fan_in_fan_out)

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
        merged = self.merged_adapters + adapter_names
        weight, bias = self._original_parameters()
        total = self._original_matrix().clone()
        for name in merged:
            delta = self._delta(name)
            total[:, : delta.shape[1]] += delta
            if safe_merge and not torch.isfinite(total.to(weight.dtype)).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
        # new Parameters and not new values: another layer may hold the same Parameter
        base = self.get_base_layer()
        new_weight = transpose(total[:, : self.in_features], self.fan_in_fan_out).to(weight.dtype).contiguous()
        base.weight = nn.Parameter(new_weight, requires_grad=weight.requires_grad)
        if bias is not None and any(self.absorbs_bias(name) for name in merged):
            new_bias = total[:, self.in_features].to(bias.dtype).contiguous()
            base.bias = nn.Parameter(new_bias, requires_grad=bias.requires_grad)
        self._unmerged = (weight, bias)
        self.merged_adapters = merged

    def unmerge(self) -> None:
        """Puts the base layer's own weight and bias back, to the bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        assert self._unmerged is not None
        base = self.get_base_layer()
        for name, original in zip(self._base_names, self._unmerged, strict=True):
            if original is not None and name is not None:
                # the model may have been moved or cast in the meantime
                original.data = original.data.to(getattr(base, name))
                setattr(base, name, original)
        self._unmerged = None
        self.merged_adapters = []

    # ---------------------------------------------------------------------------------------------- forward

    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.engram_A]

    def _taken_out(self, x: torch.Tensor, adapter_name: str) -> torch.Tensor:
        """`scaling * B diag(strength) A x~`, `(..., in_features) -> (..., width)`."""
        a, b, rows = self.modules_of(adapter_name)
        narrow = rows(a(self._cast_input_dtype(x, b.weight.dtype)))
        return self.engram_scaling[adapter_name] * b(narrow)

    def _edited_forward(
        self, x: torch.Tensor, adapter_names: Sequence[str], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # a strength of 0 is the base model to the bit, whatever the factors hold
        adapter_names = [name for name in adapter_names if self.engram_scaling[name] != 0]
        if not adapter_names:
            return self.base_layer(x, *args, **kwargs)
        edited: torch.Tensor = x
        constant: torch.Tensor | None = None
        for name in adapter_names:
            taken = self._taken_out(x, name)
            edited = edited - taken[..., : self.in_features]
            if self.absorbs_bias(name):
                share = taken[..., self.in_features :]
                constant = share if constant is None else constant + share
        result = self.base_layer(edited.to(x.dtype), *args, **kwargs)
        if constant is not None:
            # what was taken out of the constant 1 goes missing from the bias
            bias = cast(torch.Tensor, self.base_bias())
            result = (result - constant * bias).to(result.dtype)
        return result

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
        """PEFT's conversion knows weights only; with an absorbed bias use `EngramModel.save_as_lora`."""
        return not self.engram_absorbs_bias.get(adapter_name, False)


class Linear(nn.Module, EngramLayer):
    """ENGRAM implemented in a dense layer: `torch.nn.Linear` or `transformers.pytorch_utils.Conv1D`."""

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

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter_names = kwargs.pop("adapter_names", None)
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
