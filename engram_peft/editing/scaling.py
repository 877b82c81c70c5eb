"""How strongly each layer is edited: one factor a layer, on top of the adapter's `alpha`.

A scaling is a function from every layer's facts to a factor a layer, so it may compare layers. Its names are those of
ai-engram; the paper's rule is `count_ratio`, its adaptive rule `compose(count_ratio(1), weight_norm(1))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol


class LayerFacts(Protocol):
    """What a scaling may know about a layer."""

    @property
    def target_count(self) -> int | float:
        """Rows of the target, `n`, each as often as it counts."""
        ...

    @property
    def total_count(self) -> int | float:
        """Rows of the reference, `N`, likewise."""
        ...

    @property
    def weight_norm(self) -> float:
        """Frobenius norm of the weight."""
        ...

    @property
    def projection_norm(self) -> float:
        """Frobenius norm of `W C_t pinv(C_a)`."""
        ...

    @property
    def target_effective_rank(self) -> float:
        """Effective rank of `C_t`."""
        ...

    @property
    def total_effective_rank(self) -> float:
        """Effective rank of `C_a`."""
        ...


Scaling = Callable[[Mapping[str, LayerFacts]], dict[str, float]]


def count_ratio(p: float = 1.0) -> Scaling:
    """`(n / N)^p`; 0 for a layer without rows. With `p = 1` the edit is `W S_t pinv(S_a)` in sums, as in the paper."""

    def factors(layers: Mapping[str, LayerFacts]) -> dict[str, float]:
        return {
            name: (facts.target_count / facts.total_count) ** p if facts.target_count and facts.total_count else 0.0
            for name, facts in layers.items()
        }

    return factors


def weight_norm(p: float = 1.0) -> Scaling:
    """`(r / max r)^p` with `r = ||W C_t pinv(C_a)|| / ||W||`: layers are edited by how much of them the target fills."""

    def factors(layers: Mapping[str, LayerFacts]) -> dict[str, float]:
        ratios = {name: facts.projection_norm / (facts.weight_norm + 1e-8) for name, facts in layers.items()}
        top = max(ratios.values(), default=0.0)
        return {name: (ratio / top) ** p if top > 0 else 0.0 for name, ratio in ratios.items()}

    return factors


def effective_rank(p: float = 1.0) -> Scaling:
    """`(er(C_t) / er(C_a))^p` with the effective rank `er`; 0 for an empty reference."""

    def factors(layers: Mapping[str, LayerFacts]) -> dict[str, float]:
        return {
            name: (facts.target_effective_rank / facts.total_effective_rank) ** p
            if facts.total_effective_rank
            else 0.0
            for name, facts in layers.items()
        }

    return factors


def uniform() -> Scaling:
    """1 for every layer."""

    def factors(layers: Mapping[str, LayerFacts]) -> dict[str, float]:
        return dict.fromkeys(layers, 1.0)

    return factors


def compose(*scalings: Scaling) -> Scaling:
    """The product of several scalings."""

    def factors(layers: Mapping[str, LayerFacts]) -> dict[str, float]:
        parts = [scaling(layers) for scaling in scalings]
        return {name: math.prod(part[name] for part in parts) for name in layers}

    return factors


SCALINGS: dict[str, Callable[[], Scaling]] = {
    "count_ratio": count_ratio,
    "weight_norm": weight_norm,
    "effective_rank": effective_rank,
    "uniform": uniform,
    "adaptive": lambda: compose(count_ratio(1.0), weight_norm(1.0)),
}


def resolve_scaling(scale: str | Scaling) -> tuple[str, Scaling]:
    """The scaling and the name it is recorded under."""
    if callable(scale):
        return getattr(scale, "__qualname__", type(scale).__name__).partition(".")[0], scale
    if scale not in SCALINGS:
        raise ValueError(
            f"`scale` must be one of {sorted(SCALINGS)} or a function of every layer's facts, got {scale!r}."
        )
    return scale, SCALINGS[scale]()
