"""From statistics to an adapter: `M = C_t pinv(C_a)` of every layer as two thin factors.

With `pinv(C_a) = R R^T` every product below stays thin. The target's covariance is `F F^T` for few rows, and then
`R^T F = Q diag(s) Z^T` gives `M = (F Z diag(s)) (R Q)^T`, where `s^2` are the eigenvalues of the pencil `(C_t, C_a)`. For many
rows `M = (C_t R) R^T`, and the output `W M` says which part of it the layer can show at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from .collection import model_fingerprint
from .scaling import Scaling, resolve_scaling
from .selection import unwrap
from .spectrum import (
    FLOAT32_EPSILON,
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

# A share of a direction above 1 + this means that the reference does not contain the target. Rounding in float32 sums,
# stretched by the largest condition number that the cut lets pass, stays well below.
SHARE_TOLERANCE = 0.01


@dataclass
class LayerDiagnostics:
    """What was found in a layer. A scaling function is handed these, too: see `scaling.LayerFacts`.

    **Attributes**:
        - **name** (`str`) -- Name of the layer.
        - **target_count**, **total_count** (`int`) -- Rows of the target and of the reference, `n` and `N`.
        - **kept** (`int`) -- Directions of the reference that were inverted, out of **width**.
        - **rank** (`int`) -- Rank of the adapter's factors.
        - **factor** (`float`) -- What the scaling made of the layer.
    """

    name: str
    target_count: int
    total_count: int
    width: int
    kept: int
    rank: int
    factor: float
    _edit: _Edit = field(repr=False)
    _group: _Group = field(repr=False)

    @property
    def eigenvalues(self) -> torch.Tensor:
        """Eigenvalues of `(S_t, S_a)`, descending float64: the share of a direction that is the target's, between 0 and 1.

        1 means that only the target uses the direction, `n / N` that everything does.
        """
        return self._group.eigenvalues

    @property
    def coverage(self) -> float:
        """Share of the target's energy in the directions that were inverted; 1 where nothing was cut."""
        return self._group.coverage

    @cached_property
    def weight_norm(self) -> float:
        """Frobenius norm of the weight, without the bias."""
        return float(self._edit.weight()[:, : self._edit.in_features].norm())

    @cached_property
    def projection_norm(self) -> float:
        """Frobenius norm of `W C_t pinv(C_a)`, without the bias."""
        left = self._edit.weight() @ self._edit.left  # (out, r)
        if self._edit.right is None:
            return float(left.norm())
        right = self._edit.right[:, : self._edit.in_features]
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
                (d.name, f"{d.target_count}/{d.total_count}", str(d.rank), f"{d.kept}/{d.width}", f"{d.coverage:.3f}", share,
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

    Returns:
        `ExtractionReport`: What was found in every layer.

    Raises:
        `ValueError`: The statistics lack a layer, belong to another model, tokenizer or mask rule, or `total` does not contain
            `target`; the adapter does not exist or is merged; an option is out of its range; `scale` returns something that
            is not a finite number for every layer. The adapter is then as it was.
    """
    options = InverseOptions(cut, rank_fraction, condition_cap, energy_fraction, ridge_delta, solver, seed)
    scale_name, scaling = resolve_scaling(scale)
    base = unwrap(model)
    config = getattr(model, "peft_config", {}).get(adapter_name)
    layers = {n: m for n, m in base.named_modules() if adapter_name in getattr(m, "engram_A", ())}
    if config is None or not layers:
        raise ValueError(
            f"The model has no ENGRAM adapter {adapter_name!r}. Add one with `get_peft_model(model, EngramConfig(...))` or "
            "`model.add_adapter(adapter_name, EngramConfig(...))`."
        )
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(
            f"Cannot extract while adapters are merged into {merged[:3]}. Call `unmerge_adapter()` first."
        )
    _check_statistics(base, layers, target, total)

    edits: dict[str, _Edit] = {}
    diagnostics: dict[str, LayerDiagnostics] = {}
    groups = list(_groups(layers, target, total, adapter_name, options))
    for group in logging.tqdm(groups, desc="Extracting"):
        product = group.solve()
        for name in group.names:
            layer = layers[name]
            edit = _edit_of_layer(layer, adapter_name, product)
            edits[name] = edit
            diagnostics[name] = LayerDiagnostics(
                name, group.target.count, group.total.count, group.width, product.inverse.rank, edit.rank, 1.0, edit, group
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
    for name, edit in edits.items():
        dtype = layers[name].dtype_of(adapter_name)
        right = None if edit.right is None else edit.right.to(dtype)
        layers[name].fill(adapter_name, right, edit.left.to(dtype), diagnostics[name].factor)
    config.record_extraction(
        ranks={name: 0 if edit.right is None else len(edit.right) for name, edit in edits.items()},
        record={
            "scale": scale_name,
            **{k: v for k, v in asdict(options).items() if v != getattr(InverseOptions, k) or k == "cut"},
            "target_rows": max(d.target_count for d in diagnostics.values()),
            "total_rows": max(d.total_count for d in diagnostics.values()),
            "target_texts": target.provenance.texts,
            "total_texts": total.provenance.texts,
            "mask": target.provenance.mask,
            "library_version": target.provenance.library_version,
        },
    )
    return ExtractionReport(diagnostics)


def _check_statistics(base: nn.Module, layers: dict[str, Any], target: Statistics, total: Statistics) -> None:
    target.provenance.check_agrees(total.provenance)
    own = Provenance(
        model=getattr(getattr(base, "config", None), "_name_or_path", ""), model_fingerprint=model_fingerprint(base)
    )
    for role, statistics in (("target", target), ("total", total)):
        missing = [name for name in layers if name not in statistics]
        if missing:
            raise ValueError(f"`{role}` holds no statistics of {missing[:5]}. Collect them on the adapter's layers.")
        for name, layer in layers.items():
            moment = statistics.moments[name]
            expected = layer.in_features + (layer.base_bias() is not None)
            if moment.dim != expected:
                raise ValueError(
                    f"`{role}` belongs to another model: {name} has rows of width {moment.dim}, expected {expected}."
                )
            if moment.count == 0:
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
        return _balanced(spread, self.inverse.unwhiten(basis).mT)


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
        return _balanced(self.covariance @ right.mT, right)

    def whole(self, directions: torch.Tensor | None) -> torch.Tensor:
        """`M` itself, `(width, width)`, restricted likewise."""
        if directions is None:
            return self.inverse.unwhiten(self.inverse.whiten(self.covariance)).mT.contiguous()
        left, right = self.factors(directions)
        return left @ right


def _balanced(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product with columns and rows of equal norm, so that half precision holds both equally well; float32."""
    balance = (left.norm(dim=0) / right.norm(dim=1).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
    return (left / balance).float().contiguous(), (right * balance[:, None]).float().contiguous()


@dataclass
class _Edit:
    """Factors of one layer, float32: `M = left right`, `(width, r)` and `(r, width)`; `right` is `None` for `M` as a whole."""

    layer: Any
    adapter_name: str
    left: torch.Tensor
    right: torch.Tensor | None
    in_features: int
    rank: int

    def weight(self) -> torch.Tensor:
        return self.layer.weight_matrix(self.adapter_name)

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
    ) -> None:
        self.names, self.target, self.total, self.width = names, target, total, width
        self.device, self.options = device, options

    def covariance(self, moment: Moment, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """`C = S / count` without the constant's row and column if the bias is left alone: `(width, width)`."""
        return moment.dense(self.device, dtype)[: self.width, : self.width].div_(moment.count)

    def _inverse(self) -> Inverse:
        covariance = self.covariance(self.total)
        self._check_finite(covariance, "total")
        return invert(covariance, self.total.count, self.options)

    def _check_finite(self, sums: torch.Tensor, role: str) -> None:
        if not torch.isfinite(sums.sum()):
            raise ValueError(
                f"`{role}` holds NaN or infinity in the statistics of {self.names[0]}. Collect them again."
            )

    def _target_factor(self) -> torch.Tensor | None:
        factor = self.target.factor(self.device)
        return None if factor is None else factor[: self.width] / self.target.count**0.5

    def solve(self) -> _FewRows | _ManyRows:
        """`M` of the group, with the inverse of the reference."""
        inverse = self._inverse()
        share = self.target.count / self.total.count
        factor = self._target_factor()
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
        return _FewRows(inverse, (factor @ z) * s, (whitened @ z) / s.clamp_min(1e-30))

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
        if not isinstance(inverse, SpectralInverse):
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
        self.target = self.total = None  # type: ignore[assignment]


def _coverage(inverse: Inverse, factor: torch.Tensor) -> float:
    if not isinstance(inverse, SpectralInverse):
        return 1.0
    kept = inverse.root / inverse.root.norm(dim=0)
    return float((kept.mT @ factor).square().sum() / factor.square().sum().clamp_min(1e-300))


def _groups(
    layers: dict[str, Any], target: Statistics, total: Statistics, adapter_name: str, options: InverseOptions
) -> Iterator[_Group]:
    names: dict[tuple[int, int, int, torch.device], list[str]] = {}
    for name, layer in layers.items():
        width = layer.in_features + layer.absorbs_bias(adapter_name)
        key = (id(target.moments[name]), id(total.moments[name]), width, layer.get_base_layer().weight.device)
        names.setdefault(key, []).append(name)
    for (_, _, width, device), group in names.items():
        yield _Group(group, target.moments[group[0]], total.moments[group[0]], width, device, options)


def _edit_of_layer(layer: Any, adapter_name: str, product: _FewRows | _ManyRows) -> _Edit:
    """The factors of a layer: all of `M` that its output can show, or the best directions of that."""
    rank, columns = layer.requested_rank(adapter_name), product.columns
    weight = layer.weight_matrix(adapter_name)
    directions = None
    if rank is not None and rank < min(columns, layer.out_features):
        directions = _leading_directions(weight, product, rank)
    elif layer.out_features < columns:
        directions = torch.linalg.qr(product.output(weight).mT).Q
    found = columns if directions is None else directions.shape[1]
    if isinstance(product, _ManyRows) and 2 * found > weight.shape[1] == layer.in_features:
        return _Edit(layer, adapter_name, product.whole(directions), None, layer.in_features, found)
    left, right = product.factors(directions)
    if found == 0:  # a layer that is always silent; an adapter has at least rank 1
        left, right = left.new_zeros(len(left), 1), right.new_zeros(1, right.shape[1])
    return _Edit(layer, adapter_name, left, right, layer.in_features, len(right))


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
