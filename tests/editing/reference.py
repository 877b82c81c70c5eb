"""What tests compare with: covariances from plain hooks, products and inverses in dense float64."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def rotation(dim: int, seed: int = 0) -> torch.Tensor:
    """A random orthogonal matrix, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q


def with_spectrum(eigenvalues: torch.Tensor | list[float], seed: int = 0) -> torch.Tensor:
    """A symmetric matrix with these eigenvalues, float64."""
    eigenvalues = torch.as_tensor(eigenvalues, dtype=torch.float64)
    u = rotation(len(eigenvalues), seed)
    matrix = u * eigenvalues @ u.mT
    return (matrix + matrix.mT) / 2


def pinv(covariance: torch.Tensor) -> torch.Tensor:
    """The pseudo-inverse with the default cut, in dense float64."""
    rtol = len(covariance) * 2.0**-23
    return torch.linalg.pinv(covariance.double(), rtol=rtol, hermitian=True)


def square_root(covariance: torch.Tensor) -> torch.Tensor:
    """The symmetric square root."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    return vectors * eigenvalues.clamp_min(0).sqrt() @ vectors.mT


@torch.no_grad()
def plain_rows(
    model: nn.Module, batches: Iterable[tuple[Any, torch.Tensor | None]], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The masked inputs of layers, float64, collected by hooks over pairs of model inputs and a mask.

    A column of ones follows where the layer has a bias.
    """
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    current: list[torch.Tensor | None] = [None]

    def listen(name: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].detach().double().flatten(0, -2)
            if current[0] is not None:
                x = x[current[0].flatten()]
            if module.bias is not None:
                x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
            rows[name].append(x)

        return module.register_forward_pre_hook(hook)

    with ExitStack() as stack:
        for name in rows:
            handle = listen(name, model.get_submodule(name))
            stack.callback(handle.remove)
        for inputs, mask in batches:
            current[0] = mask
            if isinstance(inputs, dict):
                model(**{k: v for k, v in inputs.items() if k != "labels"})
            else:
                model(inputs)
    return {name: torch.cat(parts) for name, parts in rows.items()}


def covariance_of(rows: torch.Tensor) -> torch.Tensor:
    """`x^T x / n` in float64."""
    rows = rows.double()
    return rows.mT @ rows / len(rows)
