"""From statistics to an adapter: `M = C_t pinv(C_a)` of every layer as two thin factors.

With `pinv(C_a) = R R^T` every product below stays thin. The target's covariance is `F F^T` for few rows, and then
`R^T F = Q diag(s) Z^T` gives `M = (F Z diag(s)) (R Q)^T`, where `s^2` are the eigenvalues of the pencil `(C_t, C_a)`. For many
rows `M = (C_t R) R^T`, and the output `W M` says which part of it the layer can show at all.

Two options change `M`. A spectral filter `g` puts `g(lambda)` in the place of the eigenvalues `lambda` of the pencil of sums. A null
space restricts `M` to inputs that it does not use: with `P = V V^T` for an orthonormal basis `V` of what it leaves, the inverse
is `P (P C_a P)^+ P = V (V^T C_a V)^+ V^T`, and so `R = V R'` with the inverse `R' R'^T` of a smaller covariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from .blocks import Blocks, solve_blocks
from .collection import model_fingerprint
from .routing import expert_module
from .scaling import Scaling, resolve_scaling
from .selection import unwrap, without_wrappers
from .spectrum import (
    FLOAT32_EPSILON,
    CholeskyInverse,
    Inverse,
    InverseOptions,
    SpectralInverse,
    effective_rank,
    invert,
    largest_eigenvalue,
)
from .statistics import Moment, Provenance, Statistics


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from peft import PeftModel


logger = logging.get_logger(__name__)

SpectralFilter = Callable[[torch.Tensor], torch.Tensor]

# A share of a direction above 1 + this means that the reference does not contain the target. Rounding in float32 sums,
# stretched by the largest condition number that the cut lets pass, stays well below.
SHARE_TOLERANCE = 0.01


@dataclass
class LayerDiagnostics:
    """What was found in a layer. A scaling function is handed these, too: see `scaling.LayerFacts`.

    **Attributes**:
        - **name** (`str`) -- Name of the layer.
        - **target_count**, **total_count** (`int` or `float`) --
            Rows of the target and of the reference, `n` and `N`, each as often as it counts.
        - **kept** (`int`) -- Directions of the reference that were inverted, out of **width**.
        - **rank** (`int`) -- Rank of the adapter's factors.
        - **factor** (`float`) -- What the scaling made of the layer.
    """

    name: str
    target_count: int | float
    total_count: int | float
    width: int
    kept: int
    rank: int
    factor: float
    _edit: _Edit = field(repr=False)
    _group: _Group = field(repr=False)

    @property
    def eigenvalues(self) -> torch.Tensor:
        """Eigenvalues of `(S_t, S_a)`, descending float64: the share of a direction that is the target's, between 0 and 1.

        1 means that only the target uses the direction, `n / N` that everything does. They are those before a spectral filter,
        and of the directions that a null space leaves.
        """
        return self._group.eigenvalues

    @property
    def coverage(self) -> float:
        """Share of the target's energy in the directions that were inverted; 1 where nothing was cut."""
        return self._group.coverage

    @cached_property
    def weight_norm(self) -> float:
        """Frobenius norm of the weight, without the bias."""
        return float(self._edit.weight()[..., : self._edit.in_features].norm())

    @cached_property
    def projection_norm(self) -> float:
        """Frobenius norm of `W C_t pinv(C_a)`, without the bias."""
        left = self._edit.weight() @ self._edit.left  # (..., out, r)
        if self._edit.right is None:
            return float(left.norm())
        right = self._edit.right[..., : self._edit.in_features]
        return float((left.mT @ left).mul(right @ right.mT).sum().clamp_min(0).sqrt())

    @property
    def relative_strength(self) -> float:
        """`factor ||W C_t pinv(C_a)|| / ||W||`: by how much the weight changes at `alpha = 1`."""
        return self.factor * self.projection_norm / (self.weight_norm + 1e-8)

    @property
    def target_effective_rank(self) -> float:
        """Effective rank of `C_t`."""
        return self._group.target_effective_rank

    @property
    def total_effective_rank(self) -> float:
        """Effective rank of `C_a`."""
        return self._group.total_effective_rank


@dataclass
class ExtractionReport:
    """The outcome of `extract_engram`: one `LayerDiagnostics` a layer.

    Quantities that were not needed for the edit are computed when they are first read, from the statistics.
    """

    layers: dict[str, LayerDiagnostics]

    def __str__(self) -> str:
        rows = [("layer", "rows", "rank", "kept", "coverage", "top share", "strength")]
        for d in self.layers.values():
            share = f"{float(d.eigenvalues[0]):.3f}" if len(d.eigenvalues) else "-"
            rows.append(
                (d.name, f"{_shown(d.target_count)}/{_shown(d.total_count)}", str(d.rank), f"{d.kept}/{d.width}", f"{d.coverage:.3f}", share,
                 f"{d.relative_strength:.4f}")
            )  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def release(self) -> ExtractionReport:
        """Computes what `print` and `plot` show and lets go of the statistics and the layers. Returns itself.

        Effective ranks, which are dear and seldom looked at, are kept only if they were read before.
        """
        for diagnostics in self.layers.values():
            _ = diagnostics.eigenvalues, diagnostics.coverage, diagnostics.weight_norm, diagnostics.projection_norm
        for diagnostics in self.layers.values():
            diagnostics._group.release()
            diagnostics._edit.release()
        return self

    def plot(self, quantity: str = "relative_strength", ax: Axes | None = None) -> Axes:
        """Heat map of a quantity, layers by modules. Needs matplotlib.

        Args:
            quantity (`str`): `"relative_strength"`, `"coverage"`, `"rank"`, `"kept"`, `"factor"` or `"share"`, the largest
                eigenvalue.
            ax (`matplotlib.axes.Axes`, *optional*): Where to draw.
        """
        from matplotlib import pyplot

        quantities = ("relative_strength", "coverage", "rank", "kept", "factor", "share")
        if quantity not in quantities:
            raise ValueError(f"`quantity` must be one of {list(quantities)}, got {quantity!r}.")
        cells = {}
        for name, d in self.layers.items():
            value = float(d.eigenvalues[0]) if quantity == "share" else float(getattr(d, quantity))
            cells[_layer_index(name), name.rpartition(".")[2]] = value
        indices = sorted({index for index, _ in cells})
        modules = list(dict.fromkeys(module for _, module in cells))
        grid = [[cells.get((index, module), float("nan")) for index in indices] for module in modules]
        if ax is None:
            _, ax = pyplot.subplots(
                figsize=(max(4.0, 0.3 * len(indices) + 2), 0.4 * len(modules) + 1.6), layout="constrained"
            )
        image = ax.imshow(grid, aspect="auto", cmap="viridis")
        ax.set_xticks(range(len(indices)), ["-" if index < 0 else str(index) for index in indices])
        ax.set_yticks(range(len(modules)), modules)
        ax.set_xlabel("layer")
        ax.figure.colorbar(image, ax=ax, label=quantity.replace("_", " "))
        return ax


def _shown(count: int | float) -> str:
    return str(count) if isinstance(count, int) else f"{count:.1f}"


def _layer_index(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


@torch.no_grad()
def extract_engram(
    model: PeftModel,
    target: Statistics,
    total: Statistics,
    adapter_name: str = "default",
    *,
    scale: str | Scaling = "count_ratio",
    cut: str = "rtol",
    rank_fraction: float | None = None,
    condition_cap: float | None = None,
    energy_fraction: float = 0.99,
    ridge_delta: float = 1e-6,
    solver: str = "auto",
    seed: int = 0,
    spectral_filter: str | SpectralFilter = "identity",
    null_space: Statistics | None = None,
    null_space_threshold: float = 1e-3,
) -> ExtractionReport:
    """Fills an ENGRAM adapter with `M = C_t pinv(C_a)` of every layer that it has.

    The rank is the config's `r` (or `rank_pattern`): `None` keeps everything above float32 rounding, `k` the best `k` by the
    error of the output `W M C_a^(1/2)`. The strength, `alpha`, stays as it is. Either every layer is filled or none.

    Args:
        model (`PeftModel`): A model with an ENGRAM adapter.
        target (`Statistics`): Of the data to take out.
        total (`Statistics`): Of all data, the target among it: `merge_statistics(target, retain)`.
        adapter_name (`str`): Which adapter.
        scale (`str` or `Callable`):
            Factor of every layer: `"count_ratio"`, `"weight_norm"`, `"effective_rank"`, `"uniform"`, `"adaptive"`, a function
            of `scaling`, or your own from `{name: LayerFacts}` to `{name: float}`.
        cut (`str`): Which directions of `C_a` are inverted: see `InverseOptions`, also for what follows.
        rank_fraction (`float`, *optional*): Share of the directions that is looked at.
        condition_cap (`float`, *optional*): For `cut="rtol"`.
        energy_fraction (`float`): For `cut="energy"`.
        ridge_delta (`float`): For `cut="ridge"`.
        solver (`str`): `"auto"`, `"eigh"` or `"randomized"`.
        seed (`int`): For the randomized solver.
        spectral_filter (`str` or `Callable`):
            What becomes of the eigenvalues `lambda` of `(S_t, S_a)`, the share of a direction that is the target's, between 0 and
            1: `"identity"` takes out as much of a direction as its share, `"power:p"` takes out `lambda^p` and so with `p` above
            1 less of what is shared, `"threshold:t"` leaves directions with a share under `t` alone. Your own function maps the
            float64 tensor of a layer's eigenvalues, descending, to a tensor of the same shape.
        null_space (`Statistics`, *optional*):
            Of data whose layer outputs must not change. `M` then maps every direction that these inputs use to 0, and is the
            best such `M` for target and total: `M = C_t P (P C_a P)^+ P`, with the projector `P` to the directions that they
            do not use (AlphaEdit, arXiv 2410.02355, section 3).
        null_space_threshold (`float`):
            Directions that carry at most this share of what the largest carries count as not used, between 0 and 1. AlphaEdit
            compares eigenvalues with a fixed number, which would mean something else in every model and layer.

    Returns:
        `ExtractionReport`: What was found in every layer.

    Raises:
        `ValueError`: The statistics lack a layer, belong to another model, tokenizer or mask rule, or `total` does not contain
            `target`; the adapter does not exist or is merged; an option is out of its range; `null_space` leaves no direction of a
            layer; `scale` or `spectral_filter` returns something that is not finite or of another shape. The adapter is then
            as it was.
    """
    options = InverseOptions(cut, rank_fraction, condition_cap, energy_fraction, ridge_delta, solver, seed)
    scale_name, scaling = resolve_scaling(scale)
    filter_name, share_filter = resolve_filter(spectral_filter)
    if not 0 < null_space_threshold < 1:
        raise ValueError(f"`null_space_threshold` must be between 0 and 1, got {null_space_threshold}.")
    config, owners = adapter_layers(model, adapter_name)
    parts = {name: layer.parts(name) for name, layer in owners.items()}
    layers = {name: part for own in parts.values() for name, part in own.items()}
    base = unwrap(model)
    _check_statistics(base, layers, target, total, null_space)
    # an expert that the target never reaches has nothing to be taken out
    layers = {
        name: layer for name, layer in layers.items() if target.moments[name].count or not may_be_idle(name, layer)
    }
    if not layers:
        raise ValueError("`target` holds no rows of any of the adapter's layers: there is nothing to take out.")
    constraint = None if null_space is None else _NullSpace(null_space, null_space_threshold)

    edits: dict[str, _Edit] = {}
    diagnostics: dict[str, LayerDiagnostics] = {}
    groups = list(_groups(layers, target, total, adapter_name, options, share_filter, constraint))
    for group in logging.tqdm(groups, desc="Extracting"):
        kept, edit_of = group.solver(adapter_name)
        for name in group.names:
            layer = layers[name]
            edits[name] = edit = edit_of(layer)
            diagnostics[name] = LayerDiagnostics(
                name, group.target.count, group.total.count, group.width * layer.groups, kept, edit.rank, 1.0, edit, group
            )  # fmt: skip

    factors = scaling(diagnostics)
    for name, edit in edits.items():
        factor = factors.get(name)
        if factor is None or not torch.isfinite(torch.tensor(float(factor))):
            raise ValueError(
                f"The scaling {scale_name} returned {factor} for {name}; a finite number a layer is needed."
            )
        if not torch.isfinite(edit.left.sum() + (0 if edit.right is None else edit.right.sum())):
            raise ValueError(
                f"The edit of {name} is not finite: its statistics are too ill-conditioned. Use `cut='ridge'`."
            )
        diagnostics[name].factor = float(factor)

    # nothing can fail from here on
    for name, layer in owners.items():
        dtype = layer.dtype_of(adapter_name)
        layer.fill_parts(
            adapter_name,
            {part: edits[part].tensors(dtype, diagnostics[part].factor) for part in parts[name] if part in edits},
        )
    config.record_extraction(
        ranks={name: edits[name].stored_rank if name in edits else 1 for name in owners if name in parts[name]},
        expert_ranks={
            name: layer.engram_expert_ranks[adapter_name] for name, layer in owners.items() if name not in parts[name]
        },
        record={
            "scale": scale_name,
            **{k: v for k, v in asdict(options).items() if v != getattr(InverseOptions, k) or k == "cut"},
            **({} if share_filter is None else {"spectral_filter": filter_name}),
            **({} if constraint is None else constraint.record()),
            "target_rows": round(max((d.target_count for d in diagnostics.values()), default=0), 3),
            "total_rows": round(max((d.total_count for d in diagnostics.values()), default=0), 3),
            "target_texts": target.provenance.texts,
            "total_texts": total.provenance.texts,
            "mask": target.provenance.mask,
            "library_version": target.provenance.library_version,
        },
    )
    return ExtractionReport(diagnostics)


def adapter_layers(model: PeftModel, adapter_name: str) -> tuple[Any, dict[str, Any]]:
    """The config of an ENGRAM adapter and the layers that have it, by name.

    Raises:
        `ValueError`: There is no such adapter, or adapters are merged.
    """
    tuner: Any = getattr(without_wrappers(model), "base_model", None)
    layers = tuner.engram_layers(adapter_name) if hasattr(tuner, "engram_layers") else {}
    config = tuner.peft_config.get(adapter_name) if layers else None
    if config is None or not layers:
        raise ValueError(
            f"The model has no ENGRAM adapter {adapter_name!r}. Add one with `get_peft_model(model, EngramConfig(...))` or "
            "`model.add_adapter(adapter_name, EngramConfig(...))`."
        )
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(
            f"Cannot extract while adapters are merged into {merged[:3]}. Call `unmerge_adapter()` first."
        )
    return config, layers


def resolve_filter(spectral_filter: str | SpectralFilter) -> tuple[str, SpectralFilter | None]:
    """The filter and the name it is recorded under; `None` for the identity. See `extract_engram`.

    Raises:
        `ValueError`: It is neither a function nor a known filter with a number in its range.
    """
    if callable(spectral_filter):
        name = getattr(spectral_filter, "__qualname__", type(spectral_filter).__name__).partition(".")[0]
        return name, spectral_filter
    if spectral_filter == "identity":
        return spectral_filter, None
    kind, _, number = str(spectral_filter).partition(":")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind == "power" and 0 < value < math.inf:
        return spectral_filter, lambda shares: shares**value
    if kind == "threshold" and 0 < value < 1:
        return spectral_filter, lambda shares: shares * (shares >= value)
    raise ValueError(
        "`spectral_filter` must be 'identity', 'power:p' with p above 0, 'threshold:t' with t between 0 and 1, or a function of "
        f"the eigenvalues, got {spectral_filter!r}."
    )


def may_be_idle(name: str, layer: Any) -> bool:
    """Whether it is in order that a layer gets no row: it is an expert, which a router may never choose."""
    return getattr(layer, "is_routed", False) or expert_module(name) is not None


def _check_statistics(
    base: nn.Module, layers: dict[str, Any], target: Statistics, total: Statistics, null_space: Statistics | None
) -> None:
    target.provenance.check_agrees(total.provenance)
    given = {"target": target, "total": total}
    if null_space is not None:
        # any rows may be protected, whichever are taken out
        replace(null_space.provenance, mask="").check_agrees(target.provenance)
        given["null_space"] = null_space
    own = Provenance(
        model=getattr(getattr(base, "config", None), "_name_or_path", ""), model_fingerprint=model_fingerprint(base)
    )
    for role, statistics in given.items():
        missing = [name for name in layers if name not in statistics]
        if missing:
            raise ValueError(f"`{role}` holds no statistics of {missing[:5]}. Collect them on the adapter's layers.")
        for name, layer in layers.items():
            moment = statistics.moments[name]
            expected = Moment(layer.in_features + (layer.base_bias() is not None), layer.groups)
            if (moment.groups, moment.dim) != (expected.groups, expected.dim):
                raise ValueError(
                    f"`{role}` belongs to another model: {name} has rows of width {moment.width}, expected {expected.width}."
                )
            if moment.count == 0 and not may_be_idle(name, layer):
                raise ValueError(f"`{role}` holds no rows of {name}: the layer was never fed.")
        statistics.provenance.check_agrees(own, what="statistics and this model")
        if statistics.provenance.model and own.model and statistics.provenance.model != own.model:
            logger.warning(
                f"`{role}` was collected on {statistics.provenance.model}, this is {own.model}; their configurations agree."
            )
    for name in layers:
        if target.moments[name].count > total.moments[name].count:
            raise ValueError(f"{_NOT_CONTAINED} {name} has fewer rows in `total` than in `target`.")


_NOT_CONTAINED = "`total` does not contain `target`: pass merge_statistics(target, retain) as the total."


@dataclass
class _NullSpace:
    """What must not change, and which share of the largest eigenvalue a direction may carry and still be edited."""

    statistics: Statistics
    threshold: float

    def record(self) -> dict[str, Any]:
        """What `EngramConfig.extraction` says of it."""
        return {
            "null_space_threshold": self.threshold,
            "null_space_rows": round(max(self.statistics.counts.values()), 3),
            "null_space_texts": self.statistics.provenance.texts,
        }


@dataclass
class _RestrictedInverse:
    """`P (P C P)^+ P = V R' R'^T V^T` for `P = V V^T`, `V` an orthonormal `basis` `(dim, k)`, `R'` the inverse of `V^T C V`."""

    basis: torch.Tensor
    inner: Inverse

    @property
    def rank(self) -> int:
        return self.inner.rank

    def whiten(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.whiten(self.basis.mT @ x)

    def unwhiten(self, v: torch.Tensor) -> torch.Tensor:
        return self.basis @ self.inner.unwhiten(v)

    def float(self) -> _RestrictedInverse:
        return _RestrictedInverse(self.basis.float(), self.inner.float())


@dataclass
class _FewRows:
    """`M = F F^T R R^T` for a target of few rows, by `R^T F = Q diag(s) Z^T`: `M = spread (R basis)^T`, both thin, float64.

    `spread = F Z diag(s)` is `(width, m)`, `basis = Q` is `(rank, m)` and orthonormal.
    """

    inverse: Inverse
    spread: torch.Tensor
    basis: torch.Tensor

    @property
    def columns(self) -> int:
        return self.basis.shape[1]

    def output(self, weight: torch.Tensor) -> torch.Tensor:
        """`W M C_a^(1/2)` in the basis, `(out, width) -> (out, m)`."""
        return weight.to(self.spread.dtype) @ self.spread

    def factors(self, directions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`(left, right)` with `left right = M`, restricted to orthonormal `directions` `(m, r)` of the basis."""
        spread, basis = self.spread, self.basis
        if directions is not None:
            spread, basis = spread @ directions.to(spread.dtype), basis @ directions.to(basis.dtype)
        return balanced_factors(spread, self.inverse.unwhiten(basis).mT)


class _FilteredRows(_FewRows):
    """The same for a target of many rows, as far as a spectral filter leaves it; up to full rank.

    `R^T C_t R = Q diag(mu) Q^T` gives `M = C_t R Q diag(g(lambda) / lambda) Q^T R^T`; `basis = Q`, `spread` is what stands before it.
    """

    def whole(self, directions: torch.Tensor | None) -> torch.Tensor:
        """`M` itself, `(width, width)`, restricted to orthonormal `directions` `(m, r)` of the basis."""
        left, right = self.factors(directions)
        return left @ right


@dataclass
class _ManyRows:
    """`M = C_t R R^T` for a target of many rows, where `M` has about full rank; float32.

    What that loses is the rounding times the condition of `R`. The float32 sums have lost the rounding times its square.
    """

    inverse: Inverse
    covariance: torch.Tensor

    @property
    def columns(self) -> int:
        return self.inverse.rank

    def output(self, weight: torch.Tensor) -> torch.Tensor:
        """`W M C_a^(1/2)` in the whitened basis, `(out, width) -> (out, m)`."""
        return self.inverse.whiten((weight.to(self.covariance.dtype) @ self.covariance).mT).mT

    def factors(self, directions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`(left, right)` with `left right = M`, restricted to orthonormal `directions` `(m, r)` of the basis."""
        if directions is None:
            directions = torch.eye(self.columns, dtype=self.covariance.dtype, device=self.covariance.device)
        right = self.inverse.unwhiten(directions.to(self.covariance.dtype)).mT
        return balanced_factors(self.covariance @ right.mT, right)

    def whole(self, directions: torch.Tensor | None) -> torch.Tensor:
        """`M` itself, `(width, width)`, restricted likewise."""
        if directions is None:
            return self.inverse.unwhiten(self.inverse.whiten(self.covariance)).mT.contiguous()
        left, right = self.factors(directions)
        return left @ right


def balanced_factors(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product with columns and rows of equal norm, so that half precision holds both equally well; float32."""
    balance = (left.norm(dim=-2) / right.norm(dim=-1).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
    return (left / balance[..., None, :]).float().contiguous(), (right * balance[..., None]).float().contiguous()


@dataclass
class _Edit:
    """Factors of one layer, float32: `M = left right`, `(width, r)` and `(r, width)`; `right` is `None` for `M` as a whole.

    Both have one more dimension in front where the layer has several groups.
    """

    layer: Any
    adapter_name: str
    left: torch.Tensor
    right: torch.Tensor | None
    in_features: int
    rank: int

    def weight(self) -> torch.Tensor:
        return self.layer.weight_matrix(self.adapter_name)

    def tensors(self, dtype: torch.dtype, factor: float) -> tuple[torch.Tensor | None, torch.Tensor, float]:
        """`A`, `B` and the strength, as the adapter takes them."""
        return None if self.right is None else self.right.to(dtype), self.left.to(dtype), factor

    @property
    def stored_rank(self) -> int:
        """The rank as the config has it: 0 for `M` as a whole."""
        return 0 if self.right is None else self.right.shape[-2]

    def release(self) -> None:
        self.layer = self.left = self.right = None  # type: ignore[assignment]


class _Group:
    """Layers that share the moments of target and reference: what they have in common is solved once."""

    def __init__(
        self,
        names: list[str],
        target: Moment,
        total: Moment,
        width: int,
        device: torch.device,
        options: InverseOptions,
        share_filter: SpectralFilter | None,
        constraint: _NullSpace | None,
    ) -> None:
        self.names, self.target, self.total, self.width = names, target, total, width
        self.device, self.options, self.share_filter, self.constraint = device, options, share_filter, constraint

    def covariance(self, moment: Moment, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """`C = S / count` without the constant's row and column if the bias is left alone: `(width, width)`."""
        return moment.dense(self.device, dtype)[..., : self.width, : self.width].div_(moment.count)

    def _inverse(self) -> Inverse:
        covariance = self.covariance(self.total)
        self._check_finite(covariance, "total")
        if self.constraint is None:
            return invert(covariance, self.total.size, self.options)
        free = self._free_directions(self.constraint, covariance)
        return _RestrictedInverse(free, invert(free.mT @ covariance @ free, self.total.size, self.options))

    def _free_directions(self, constraint: _NullSpace, total: torch.Tensor) -> torch.Tensor:
        """Orthonormal basis of what the total uses and the null space's data do not, `(width, k)`."""
        protected = self.covariance(constraint.statistics.moments[self.names[0]])
        self._check_finite(protected, "null_space")
        eigenvalues, vectors = torch.linalg.eigh(protected)
        basis = vectors[:, eigenvalues <= constraint.threshold * eigenvalues[-1]]
        # where the total is silent as well there is only rounding, which the inverse would blow up
        eigenvalues, vectors = torch.linalg.eigh(basis.mT @ total @ basis)
        basis = basis @ vectors[:, eigenvalues > self.options.rtol(len(total)) * largest_eigenvalue(total)]
        if basis.shape[1] == 0:
            raise self._nothing_free()
        return basis

    def _nothing_free(self) -> ValueError:
        assert self.constraint is not None
        return ValueError(
            f"`null_space` uses every direction of {self.names[0]} that `total` does, so nothing could be edited. Raise "
            f"`null_space_threshold`, which is {self.constraint.threshold}, or collect `null_space` on less data."
        )

    def _check_finite(self, sums: torch.Tensor, role: str) -> None:
        if not torch.isfinite(sums.sum()):
            raise ValueError(
                f"`{role}` holds NaN or infinity in the statistics of {self.names[0]}. Collect them again."
            )

    def _target_factor(self) -> torch.Tensor | None:
        factor = self.target.factor(self.device)
        return None if factor is None else factor[: self.width] / self.target.count**0.5

    def solver(self, adapter_name: str) -> tuple[int, Callable[[Any], _Edit]]:
        """Solves what the layers have in common: the number of directions that were inverted, and what gives a layer's edit."""
        product = self.solve()
        return product.inverse.rank, lambda layer: _edit_of_layer(layer, adapter_name, product)

    def solve(self) -> _FewRows | _ManyRows:
        """`M` of the group, with the inverse of the reference."""
        inverse = self._inverse()
        share = self.target.count / self.total.count
        factor = self._target_factor()
        if factor is None and self.share_filter is not None:
            return self._solve_filtered(inverse, share, self.share_filter)
        if factor is None:
            inverse = inverse.float()
            covariance = self.covariance(self.target, torch.float32)
            self._check_finite(covariance, "target")
            if not self._contained_by_construction():
                whitened = inverse.whiten(inverse.whiten(covariance).mT)
                self._check_contains(largest_eigenvalue(whitened) * share)
            return _ManyRows(inverse, covariance)
        self._check_finite(factor, "target")
        whitened = inverse.whiten(factor)
        eigenvalues, z = torch.linalg.eigh(whitened.mT @ whitened)
        eigenvalues, z = eigenvalues.flip(0).clamp_min(0), z.flip(1)
        kept = eigenvalues > FLOAT32_EPSILON * eigenvalues[0]
        kept[0] = True  # an adapter has at least rank 1
        eigenvalues, z = eigenvalues[kept], z[:, kept]
        self.__dict__["eigenvalues"] = share * eigenvalues
        self.__dict__["coverage"] = _coverage(inverse, factor)
        self._check_contains(float(eigenvalues[0]) * share)
        s = eigenvalues.sqrt()
        spread, basis = (factor @ z) * s, (whitened @ z) / s.clamp_min(1e-30)
        if self.share_filter is not None:
            gains = _gains(self.share_filter, share * eigenvalues)
            spread, basis = (spread * gains)[:, gains != 0], basis[:, gains != 0]
        return _FewRows(inverse, spread, basis)

    def _solve_filtered(self, inverse: Inverse, share: float, share_filter: SpectralFilter) -> _FilteredRows:
        covariance = self.covariance(self.target)
        self._check_finite(covariance, "target")
        eigenvalues, vectors = torch.linalg.eigh(inverse.whiten(inverse.whiten(covariance).mT))
        eigenvalues, vectors = share * eigenvalues.flip(0).clamp_min(0), vectors.flip(1)
        self.__dict__["eigenvalues"] = eigenvalues
        if not self._contained_by_construction():
            self._check_contains(float(eigenvalues[0]))
        kept = eigenvalues > FLOAT32_EPSILON * eigenvalues[0]
        gains = _gains(share_filter, eigenvalues[kept])
        vectors = vectors[:, kept][:, gains != 0]
        spread = covariance @ inverse.unwhiten(vectors) * gains[gains != 0]
        return _FilteredRows(inverse, spread, vectors)

    def _contained_by_construction(self) -> bool:
        parts = {id(tensor) for tensor in self.total.tensors()}
        return all(id(tensor) in parts for tensor in self.target.tensors())

    def _check_contains(self, share: float) -> None:
        if share > 1 + SHARE_TOLERANCE:
            raise ValueError(
                f"{_NOT_CONTAINED} In {self.names[0]} a direction is used {share:.3g} times as much by the target as by the total."
            )

    @cached_property
    def eigenvalues(self) -> torch.Tensor:
        """See `LayerDiagnostics.eigenvalues`."""
        inverse = self._inverse()
        whitened = inverse.whiten(inverse.whiten(self.covariance(self.target)).mT)
        return torch.linalg.eigvalsh(whitened).flip(0).clamp_min(0) * (self.target.count / self.total.count)

    @cached_property
    def coverage(self) -> float:
        """See `LayerDiagnostics.coverage`."""
        inverse = self._inverse()
        if isinstance(inverse, CholeskyInverse):
            return 1.0
        eigenvalues, vectors = torch.linalg.eigh(self.covariance(self.target))
        return _coverage(inverse, vectors * eigenvalues.clamp_min(0).sqrt())

    @cached_property
    def target_effective_rank(self) -> float:
        """See `LayerDiagnostics.target_effective_rank`."""
        return effective_rank(self.covariance(self._held().target))

    @cached_property
    def total_effective_rank(self) -> float:
        """See `LayerDiagnostics.total_effective_rank`."""
        return effective_rank(self.covariance(self._held().total))

    def _held(self) -> _Group:
        if self.target is None:
            raise ValueError("The report was released before this was read. Run `extract_engram` to see it.")
        return self

    def release(self) -> None:
        self.target = self.total = self.constraint = None  # type: ignore[assignment]


class _GroupOfBlocks(_Group):
    """The same for layers that have several groups."""

    def solver(self, adapter_name: str) -> tuple[int, Callable[[Any], _Edit]]:
        share = self.target.count / self.total.count
        protected, threshold, gains = None, 0.0, None
        if self.constraint is not None:
            threshold = self.constraint.threshold
            protected = self.covariance(self.constraint.statistics.moments[self.names[0]])
            self._check_finite(protected, "null_space")
        if (share_filter := self.share_filter) is not None:

            def gains(eigenvalues: torch.Tensor) -> torch.Tensor:
                return _gains(share_filter, share * eigenvalues)

        target, total = self.covariance(self.target), self.covariance(self.total)
        self._check_finite(total, "total")
        self._check_finite(target, "target")
        blocks = solve_blocks(target, total, self.total.size, self.options, gains, protected, threshold)
        if blocks is None:
            raise self._nothing_free()
        self.__dict__["eigenvalues"] = share * blocks.eigenvalues
        self.__dict__["coverage"] = blocks.coverage
        if len(blocks.eigenvalues):
            self._check_contains(float(share * blocks.eigenvalues[0]))
        return blocks.rank, lambda layer: _edit_of_groups(layer, adapter_name, blocks)


def _gains(share_filter: SpectralFilter, shares: torch.Tensor) -> torch.Tensor:
    """`g(lambda) / lambda` of positive descending eigenvalues, float64 of the same shape."""
    shares = shares.clamp_max(1)  # above only by rounding
    filtered = share_filter(shares.clone())
    if not isinstance(filtered, torch.Tensor) or filtered.shape != shares.shape or not torch.isfinite(filtered).all():
        raise ValueError(
            f"`spectral_filter` must return a finite number for each of the {len(shares)} eigenvalues, as one tensor; it "
            f"returned {filtered}."
        )
    return filtered.to(shares) / shares.clamp_min(1e-300)


def _coverage(inverse: Inverse, factor: torch.Tensor) -> float:
    if isinstance(inverse, _RestrictedInverse):
        free = inverse.basis.mT @ factor
        return _coverage(inverse.inner, free) * float(free.square().sum() / factor.square().sum().clamp_min(1e-300))
    if not isinstance(inverse, SpectralInverse):
        return 1.0
    kept = inverse.root / inverse.root.norm(dim=0)
    return float((kept.mT @ factor).square().sum() / factor.square().sum().clamp_min(1e-300))


def _groups(
    layers: dict[str, Any],
    target: Statistics,
    total: Statistics,
    adapter_name: str,
    options: InverseOptions,
    share_filter: SpectralFilter | None,
    constraint: _NullSpace | None,
) -> Iterator[_Group]:
    names: dict[tuple[int, int, int | None, int, torch.device], list[str]] = {}
    for name, layer in layers.items():
        width = layer.in_features + layer.absorbs_bias(adapter_name)
        protected = None if constraint is None else id(constraint.statistics.moments[name])
        device = layer.device
        key = (id(target.moments[name]), id(total.moments[name]), protected, width, device)
        names.setdefault(key, []).append(name)
    for (*_, width, device), group in names.items():
        kind = _Group if total.moments[group[0]].groups == 1 else _GroupOfBlocks
        yield kind(
            group, target.moments[group[0]], total.moments[group[0]], width, device, options, share_filter, constraint
        )


def _edit_of_layer(layer: Any, adapter_name: str, product: _FewRows | _ManyRows) -> _Edit:
    """The factors of a layer: all of `M` that its output can show, or the best directions of that."""
    rank, weight = layer.requested_rank(adapter_name), layer.weight_matrix(adapter_name)
    directions = _visible_directions(weight, product, rank)
    found = product.columns if directions is None else directions.shape[1]
    if isinstance(product, _ManyRows | _FilteredRows) and 2 * found > weight.shape[1] == layer.in_features:
        return _Edit(layer, adapter_name, product.whole(directions), None, layer.in_features, found)
    left, right = product.factors(directions)
    if found == 0:  # a layer that is always silent; an adapter has at least rank 1
        left, right = left.new_zeros(len(left), 1), right.new_zeros(1, right.shape[1])
    return _Edit(layer, adapter_name, left, right, layer.in_features, len(right))


def _edit_of_groups(layer: Any, adapter_name: str, blocks: Blocks) -> _Edit:
    """The factors of a layer of several groups, which all have the rank that the richest of them needs; or `M` as a whole."""
    weight = layer.weight_matrix(adapter_name)
    left, right = balanced_factors(*blocks.factors(weight, layer.requested_rank(adapter_name)))
    groups, _, width = weight.shape
    found = left.shape[2]
    if 2 * found > width == layer.in_features:
        whole = left.new_zeros(groups, width, width).index_copy_(0, blocks.used, left @ right)
        return _Edit(layer, adapter_name, whole, None, layer.in_features, found)
    rank = max(found, 1)  # an adapter has at least rank 1
    all_left = left.new_zeros(groups, width, rank)
    all_right = left.new_zeros(groups, rank, width)
    all_left[blocks.used, :, :found], all_right[blocks.used, :found] = left, right
    return _Edit(layer, adapter_name, all_left, all_right, layer.in_features, rank)


def _visible_directions(weight: torch.Tensor, product: _FewRows | _ManyRows, rank: int | None) -> torch.Tensor | None:
    """Orthonormal directions of a product that the output shows, at most `rank`, `(m, r)`; `None`: all of them."""
    if rank is not None and rank < min(product.columns, len(weight)):
        return _leading_directions(weight, product, rank)
    if len(weight) < product.columns:
        return torch.linalg.qr(product.output(weight).mT).Q
    return None


def _leading_directions(weight: torch.Tensor, product: _FewRows | _ManyRows, rank: int) -> torch.Tensor:
    """The first right singular vectors of the output, `(m, rank)`, from the smaller of its Gram matrices."""
    if len(weight) < product.columns:
        output = product.output(weight).double()
        vectors = torch.linalg.eigh(output @ output.mT)[1][:, -rank:]
        return torch.linalg.qr(output.mT @ vectors).Q
    gram = torch.zeros(product.columns, product.columns, dtype=torch.float64, device=weight.device)
    for rows in weight.split(8192):  # a head has one row a word
        output = product.output(rows)
        gram += output.mT @ output
    return torch.linalg.eigh(gram)[1][:, -rank:]
