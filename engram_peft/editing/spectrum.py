"""Pseudo-inverse of the reference covariance: which directions are inverted, and how.

`pinv(C) = R R^T`. Everything downstream needs products with `R` only, so an inverse is an object that multiplies by `R` and
by its transpose. Two kinds: `CholeskyInverse` where no direction has to be cut, `SpectralInverse` where one is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch


CUTS = ("rtol", "energy", "ridge", "mp_n", "mp")
SOLVERS = ("auto", "eigh", "randomized")

FLOAT32_EPSILON = 2.0**-23


@dataclass(frozen=True)
class InverseOptions:
    """How the reference covariance is inverted.

    With eigenvalues `l_1 >= l_2 >= ...` of `C`, of width `D`:

    | `cut` | directions that are kept |
    |---|---|
    | `"rtol"` | `l > rtol l_1` with `rtol = D 2^-23`, or `1 / condition_cap` |
    | `"energy"` | the first ones that together carry `energy_fraction` of the trace |
    | `"ridge"` | all with `l > 0`, inverted as `1 / (l + ridge_delta l_1)` |
    | `"mp_n"` | above the Marchenko-Pastur edge of noise with aspect ratio `D / N` |
    | `"mp"` | above that edge with an aspect ratio fitted to the spectrum |

    Args:
        cut (`str`): See the table.
        rank_fraction (`float`, *optional*): First keep only the largest `max(1, ceil(rank_fraction D))` eigenvalues.
        condition_cap (`float`, *optional*): One condition number for every layer, in place of `rtol`.
        energy_fraction (`float`): For `cut="energy"`.
        ridge_delta (`float`): For `cut="ridge"`.
        solver (`str`):
            `"auto"` uses a Cholesky factorisation where `cut="rtol"` cuts nothing (the result is the same) and the
            eigendecomposition elsewhere; `"eigh"` always the latter; `"randomized"` finds the top `rank_fraction` only.
        seed (`int`): For the randomized solver.

    Raises:
        `ValueError`: An option is unknown or out of its range.
    """

    cut: str = "rtol"
    rank_fraction: float | None = None
    condition_cap: float | None = None
    energy_fraction: float = 0.99
    ridge_delta: float = 1e-6
    solver: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cut not in CUTS:
            raise ValueError(f"`cut` must be one of {list(CUTS)}, got {self.cut!r}.")
        if self.solver not in SOLVERS:
            raise ValueError(f"`solver` must be one of {list(SOLVERS)}, got {self.solver!r}.")
        if self.rank_fraction is not None and not 0 < self.rank_fraction <= 1:
            raise ValueError(f"`rank_fraction` must be in (0, 1], got {self.rank_fraction}.")
        if self.solver == "randomized" and self.rank_fraction is None:
            raise ValueError("`solver='randomized'` needs `rank_fraction`: it finds the largest eigenvalues only.")
        if self.condition_cap is not None and not self.condition_cap > 1:
            raise ValueError(f"`condition_cap` must be above 1, got {self.condition_cap}.")
        if not 0 < self.energy_fraction <= 1:
            raise ValueError(f"`energy_fraction` must be in (0, 1], got {self.energy_fraction}.")
        if not self.ridge_delta > 0:
            raise ValueError(f"`ridge_delta` must be positive, got {self.ridge_delta}.")

    def rtol(self, dim: int) -> float:
        """Relative cut of `"rtol"`; by the width and not by the dtype, so that float64 solves the same problem."""
        return dim * FLOAT32_EPSILON if self.condition_cap is None else 1 / self.condition_cap


class Inverse(Protocol):
    """`pinv(C) = R R^T` with `R` of shape `(dim, rank)`."""

    @property
    def rank(self) -> int:
        """Number of directions that are inverted."""
        ...

    def whiten(self, x: torch.Tensor) -> torch.Tensor:
        """`R^T x`, `(dim, m) -> (rank, m)`."""
        ...

    def unwhiten(self, v: torch.Tensor) -> torch.Tensor:
        """`R v`, `(rank, m) -> (dim, m)`."""
        ...

    def float(self) -> Inverse:
        """The same in float32; products are formed in the dtype of the inverse."""
        ...


@dataclass
class CholeskyInverse:
    """The inverse of `C = U^T U` for an upper triangular `U`, with `R = U^-1`."""

    upper: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.upper)

    def whiten(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(self.upper.mT, x, upper=False)

    def unwhiten(self, v: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(self.upper, v, upper=True)

    def float(self) -> CholeskyInverse:
        return CholeskyInverse(self.upper.float())


@dataclass
class SpectralInverse:
    """The truncated or damped inverse, with `R = U sqrt(weights)` for the kept eigenvectors `U`."""

    root: torch.Tensor

    @property
    def rank(self) -> int:
        return self.root.shape[1]

    def whiten(self, x: torch.Tensor) -> torch.Tensor:
        return self.root.mT @ x

    def unwhiten(self, v: torch.Tensor) -> torch.Tensor:
        return self.root @ v

    def float(self) -> SpectralInverse:
        return SpectralInverse(self.root.float())


def invert(covariance: torch.Tensor, count: int, options: InverseOptions) -> Inverse:
    """The pseudo-inverse of a covariance.

    Args:
        covariance (`torch.Tensor`): Symmetric, `(D, D)` float64.
        count (`int`): Number of rows it was estimated from (`cut="mp_n"`).
        options (`InverseOptions`): What to keep.
    """
    if options.solver == "auto" and options.cut == "rtol" and options.rank_fraction is None:
        upper = _cholesky_if_nothing_is_cut(covariance, options.rtol(len(covariance)))
        if upper is not None:
            return CholeskyInverse(upper)
    if options.solver == "randomized":
        assert options.rank_fraction is not None
        eigenvalues, vectors = _largest_eigenpairs(covariance, _top(covariance, options.rank_fraction), options.seed)
    else:
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)
        if options.rank_fraction is not None:
            top = _top(covariance, options.rank_fraction)
            eigenvalues, vectors = eigenvalues[:top], vectors[:, :top]
    kept = kept_directions(eigenvalues, len(covariance), count, options)
    damping = options.ridge_delta * eigenvalues[0] if options.cut == "ridge" else 0.0
    return SpectralInverse(vectors[:, kept] * (eigenvalues[kept] + damping).rsqrt())


def ridge_inverse(matrix: torch.Tensor, rtol: float) -> CholeskyInverse:
    """The inverse of `matrix + rtol lambda_1 I` for a symmetric positive semidefinite `matrix`.

    Raises:
        `ValueError`: The matrix holds NaN or infinity.
    """
    if not torch.isfinite(matrix.sum()):
        raise ValueError("The matrix to invert holds NaN or infinity.")
    top = largest_eigenvalue(matrix) if matrix.any() else 1.0
    for _ in range(3):
        upper = matrix.clone()
        upper.diagonal().add_(rtol * top)
        if _factorise(upper):
            return CholeskyInverse(upper.triu_())
        rtol *= 10  # the matrix is semidefinite only up to the rounding of its sums
    raise ValueError("The matrix to invert is not positive semidefinite.")


def kept_directions(eigenvalues: torch.Tensor, dim: int, count: int, options: InverseOptions) -> torch.Tensor:
    """Which of the descending `eigenvalues` are inverted: a boolean tensor of the same shape."""
    positive = eigenvalues > 0
    if options.cut == "rtol":
        return positive & (eigenvalues > options.rtol(dim) * eigenvalues[0])
    if options.cut == "ridge":
        return positive
    if options.cut == "energy":
        energy = eigenvalues.clamp_min(0)
        share = energy.cumsum(0) / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)
        leading = int((share < options.energy_fraction).sum()) + 1
    elif options.cut == "mp_n":
        leading = max(1, marchenko_pastur_rank(eigenvalues, count))
    else:
        leading = max(1, fitted_marchenko_pastur_rank(eigenvalues))
    return positive & (torch.arange(len(eigenvalues), device=eigenvalues.device) < leading)


def marchenko_pastur_rank(eigenvalues: torch.Tensor, count: int) -> int:
    """How many descending `eigenvalues` lie above the noise edge `mean (1 + sqrt(d / count))^2` of the rest.

    Fixed point from rank 0, at most 20 rounds (Marchenko and Pastur, 1967; Baik, Ben Arous and Peche, 2005).
    """
    spectrum = eigenvalues.double().clamp_min(0)
    stretch = (1 + math.sqrt(len(spectrum) / count)) ** 2
    rank = 0
    for _ in range(20):
        if rank == len(spectrum):
            break
        edge = float(spectrum[rank:].mean()) * stretch
        previous, rank = rank, int((spectrum > edge).sum())
        if rank == previous:
            break
    return rank


def fitted_marchenko_pastur_rank(eigenvalues: torch.Tensor) -> int:
    """`marchenko_pastur_rank` with the aspect ratio `var / mean^2` fitted to the noise, for rows that are not independent.

    From the middle of the spectrum, at most 30 rounds; stops when fewer than 8 eigenvalues are left for the fit.
    """
    spectrum = eigenvalues.double().clamp_min(0)
    rank = len(spectrum) // 2
    for _ in range(30):
        noise = spectrum[rank:]
        mean = float(noise.mean()) if len(noise) else 0.0
        if len(noise) < 8 or mean <= 0:
            break
        aspect = min(max(float(noise.var()) / mean**2, 1e-8), 4.0)
        edge = mean * (1 + math.sqrt(aspect)) ** 2
        previous, rank = rank, int((spectrum > edge).sum())
        if rank == previous:
            break
    return rank


def effective_rank(covariance: torch.Tensor) -> float:
    """`exp(-sum p ln p)` with `p` the eigenvalues over their sum (Roy and Vetterli, 2007); 0 for a zero matrix."""
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp_min(0)
    if not eigenvalues.any():
        return 0.0
    p = eigenvalues / eigenvalues.sum()
    return math.exp(-float(torch.special.xlogy(p, p).sum()))


def largest_eigenvalue(matrix: torch.Tensor) -> float:
    """Of a symmetric positive semidefinite matrix, to about three digits from below (Lanczos, 16 steps)."""
    steps = min(16, len(matrix))
    generator = torch.Generator(device=matrix.device).manual_seed(0)
    vector = torch.randn(len(matrix), dtype=matrix.dtype, device=matrix.device, generator=generator)
    basis = [vector / vector.norm()]
    for _ in range(steps):
        vector = matrix @ basis[-1]
        stacked = torch.stack(basis)
        for _ in range(2):  # once is not enough to stay orthogonal
            vector = vector - stacked.mT @ (stacked @ vector)
        norm = vector.norm()
        if norm <= 1e-6 * matrix.diagonal().sum():
            break
        basis.append(vector / norm)
    stacked = torch.stack(basis)
    return float(torch.linalg.eigvalsh(stacked @ matrix @ stacked.mT)[-1])


def _cholesky_if_nothing_is_cut(covariance: torch.Tensor, rtol: float) -> torch.Tensor | None:
    """The upper Cholesky factor if every eigenvalue is above `rtol` times the largest, else `None`."""
    # C - shift I is positive definite exactly if no eigenvalue is at or below the shift. Most cases are settled at half the
    # price, in float32, which errs by far less than the shift, and with an upper bound of the largest eigenvalue.
    single = covariance.float()
    if not _exceeds(single, 2 * rtol * float(single.norm())):
        top = largest_eigenvalue(single)
        if not top > 0 or not (_exceeds(single, 2 * rtol * top) or _exceeds(covariance, 1.001 * rtol * top)):
            return None
    del single  # it is as large as all that follows
    upper = covariance.clone()
    return upper.triu_() if _factorise(upper) else None


def _exceeds(matrix: torch.Tensor, shift: float) -> bool:
    """Whether all eigenvalues of a symmetric matrix are above `shift`."""
    shifted = matrix.clone()
    shifted.diagonal().sub_(shift)
    return _factorise(shifted)


def _factorise(matrix: torch.Tensor) -> bool:
    """Puts the Cholesky factor of a symmetric matrix on and above its diagonal; `False` if it is not positive definite.

    In halves down to 512 rows: two thirds of the time that LAPACK takes for the whole, since products do most of the work.
    """
    if len(matrix) <= 512:
        upper, info = torch.linalg.cholesky_ex(matrix, upper=True)
        matrix.copy_(upper)
        return int(info) == 0
    h = len(matrix) // 2
    if not _factorise(matrix[:h, :h]):
        return False
    right = torch.linalg.solve_triangular(matrix[:h, :h].mT, matrix[:h, h:], upper=False)
    matrix[:h, h:] = right
    matrix[h:, h:].addmm_(right.mT, right, alpha=-1)
    return _factorise(matrix[h:, h:])


def _top(covariance: torch.Tensor, rank_fraction: float) -> int:
    return max(1, math.ceil(rank_fraction * len(covariance)))


def _largest_eigenpairs(matrix: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues, descending, and their vectors, by subspace iteration from `count + 16` directions."""
    width = min(len(matrix), count + 16)
    generator = torch.Generator(device=matrix.device).manual_seed(seed)
    basis = torch.randn(len(matrix), width, dtype=matrix.dtype, device=matrix.device, generator=generator)
    for _ in range(6):
        basis = torch.linalg.qr(matrix @ basis).Q
    eigenvalues, vectors = torch.linalg.eigh(basis.mT @ matrix @ basis)
    return eigenvalues.flip(0)[:count], basis @ vectors.flip(1)[:, :count]
