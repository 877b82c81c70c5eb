"""`M = C_t pinv(C_a)` of the groups of a layer, all at once: the algebra of `extraction` on stacks of small matrices.

Each group is a layer of its own, with its own spectrum and its own cut. With `pinv(C_a) = R R^T` and the eigenvalues `mu` of
`R^T C_t R = Q diag(mu) Q^T`, a group's edit is `M = (C_t R Q) (R Q)^T`; where directions are cut, `R` has columns of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .spectrum import FLOAT32_EPSILON, InverseOptions, kept_directions


@dataclass
class Blocks:
    """The edits of the `k` groups that the target uses, `M = spread basis^T`; the others stay as they are.

    **Attributes**:
        - **used** (`torch.Tensor`) -- Their numbers, `(k,)`.
        - **spread**, **basis** (`torch.Tensor`) -- `C_t R Q`, filtered, and `R Q`, `(k, width, m)` float64.
        - **eigenvalues** (`torch.Tensor`) -- Of the pencils `(C_t, C_a)`, those of all groups in descending order.
        - **coverage** (`float`) -- Share of the target's energy in the directions that were inverted.
        - **rank** (`int`) -- Number of those directions, in the groups that are used.
    """

    used: torch.Tensor
    spread: torch.Tensor
    basis: torch.Tensor
    eigenvalues: torch.Tensor
    coverage: float
    rank: int

    def factors(self, weight: torch.Tensor, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`(left, right)` with `left right = M`, as far as the layer's output shows it, at most of `rank`.

        Args:
            weight (`torch.Tensor`): `(groups, out, width)`.
            rank (`int`, *optional*): Rank of a group; the best directions by the error of the output `W M C_a^(1/2)`.

        Returns:
            `(k, width, r)` and `(k, r, width)`.
        """
        spread, basis = self.spread, self.basis
        visible = min(spread.shape[2], weight.shape[1], spread.shape[2] if rank is None else rank)
        if visible < spread.shape[2]:
            output = weight[self.used].to(spread.dtype) @ spread
            directions = torch.linalg.svd(output, full_matrices=False).Vh[:, :visible].mT
            spread, basis = spread @ directions, basis @ directions
        return spread, basis.mT


def solve_blocks(
    target: torch.Tensor,
    total: torch.Tensor,
    count: int,
    options: InverseOptions,
    gains: Callable[[torch.Tensor], torch.Tensor] | None = None,
    protected: torch.Tensor | None = None,
    threshold: float = 0.0,
) -> Blocks | None:
    """Solves every group that the target uses.

    Args:
        target, total (`torch.Tensor`): `C_t` and `C_a` of all groups, `(groups, width, width)` float64.
        count (`int`): Rows of the reference.
        options (`InverseOptions`): How a group's reference is inverted.
        gains (`Callable`, *optional*): From positive descending eigenvalues to what their directions are multiplied by.
        protected (`torch.Tensor`, *optional*): Covariance of inputs that `M` has to map to 0, of the same shape.
        threshold (`float`): Share of a group's largest eigenvalue of `protected` up to which a direction counts as not used.

    Returns:
        `None` if `protected` leaves nothing.
    """
    used = target.diagonal(dim1=1, dim2=2).any(1).nonzero().flatten()
    target, total = target[used], total[used]
    eigenvalues, vectors = torch.linalg.eigh(total)
    free = torch.ones_like(eigenvalues, dtype=torch.bool)
    if protected is not None:
        smallest = options.rtol(total.shape[1]) * eigenvalues[:, -1:]
        shares, basis = torch.linalg.eigh(protected[used])
        basis = basis * (shares <= threshold * shares[:, -1:])[:, None]
        eigenvalues, vectors = torch.linalg.eigh(basis.mT @ total @ basis)
        vectors = basis @ vectors
        free = eigenvalues > smallest  # elsewhere the total is silent, or nothing may change
        if len(used) and not free.any():
            return None
    eigenvalues, vectors, free = eigenvalues.flip(1), vectors.flip(2), free.flip(1)
    weights = torch.zeros_like(eigenvalues)
    for row, spectrum, chosen in zip(weights, eigenvalues, free, strict=True):
        row[chosen] = _inverse_weights(spectrum[chosen], count, options)
    kept = weights > 0
    root = vectors * weights.sqrt()[:, None]
    mu, q = torch.linalg.eigh(root.mT @ target @ root)
    mu, basis = mu.flip(1).clamp_min(0), root @ q.flip(2)
    spread = target @ basis
    if gains is not None:
        significant = mu > FLOAT32_EPSILON * mu[:, :1]
        values, order = mu[significant].sort(descending=True)
        factors = torch.zeros_like(mu)
        factors[significant] = torch.empty_like(values).scatter_(0, order, gains(values))
        spread = spread * factors[:, None]
    columns = int(kept.sum(1).max()) if len(used) else 0  # zeros come last
    energy = (vectors.mT @ target @ vectors).diagonal(dim1=1, dim2=2)
    whole = float(target.diagonal(dim1=1, dim2=2).sum())
    return Blocks(
        used=used,
        spread=spread[:, :, :columns],
        basis=basis[:, :, :columns],
        eigenvalues=mu[torch.arange(mu.shape[1], device=mu.device) < kept.sum(1, keepdim=True)]
        .sort(descending=True)
        .values,
        coverage=float(energy[kept].sum()) / max(whole, 1e-300),
        rank=int(kept.sum()),
    )


def _inverse_weights(eigenvalues: torch.Tensor, count: int, options: InverseOptions) -> torch.Tensor:
    """What each of the descending `eigenvalues` becomes in the pseudo-inverse; 0 where it is cut."""
    if not len(eigenvalues):
        return eigenvalues
    top = eigenvalues[
        : len(eigenvalues)
        if options.rank_fraction is None
        else max(1, math.ceil(options.rank_fraction * len(eigenvalues)))
    ]
    kept = torch.zeros(len(eigenvalues), dtype=torch.bool, device=eigenvalues.device)
    kept[: len(top)] = kept_directions(top, len(eigenvalues), count, options)
    damping = options.ridge_delta * eigenvalues[0] if options.cut == "ridge" else 0.0
    return torch.where(kept, 1 / (eigenvalues + damping), 0.0)
