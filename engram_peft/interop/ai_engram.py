"""Statistics that ai-engram saved, formats 2 to 4 (read in ai-engram 0.11.0).

They are mean covariances and counts; ours are sums. Names are the modules', and a constant 1 comes last where a bias is absorbed, as
here. Format 2 holds full matrices; format 3 upper triangles, row by row, and full matrices where they are not symmetric; format 4 also
says which layers share one.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..editing.statistics import Moment, Statistics


logger = logging.get_logger(__name__)

FORMATS = (2, 3, 4)

# float32 sums of a symmetric product differ from their transpose by less
SYMMETRY_TOLERANCE = 1e-3


def load_statistics(path: str | os.PathLike, device: str | torch.device = "cpu") -> Statistics:
    """Reads a statistics file of ai-engram. Where it comes from (model, tokenizer, mask) is not in the file.

    What is not symmetric is taken as `(C + C^T) / 2`, which is what ai-engram inverts; with a warning where that is more than
    rounding.

    Args:
        path (`str` or `os.PathLike`): The file, as `Statistics.save` of ai-engram wrote it.
        device (`str` or `torch.device`): Where to load it.

    Raises:
        `FileNotFoundError`: There is no such file.
        `ValueError`: It is not such a file (nothing is unpickled to find out), or it does not hold what it claims.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no statistics file {path}.")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a statistics file of ai-engram ({str(error).splitlines()[0]}).") from None
    version = content.get("format") if isinstance(content, dict) else None
    if version not in FORMATS:
        raise ValueError(
            f"{path} has format {version}; statistics of ai-engram in the formats {list(FORMATS)} can be read."
        )
    stored = content.get("cov" if version == 2 else "cov_packed")
    counts, alias = content.get("count"), content.get("alias", {})
    if not all(isinstance(part, dict) for part in (stored, counts, alias)):
        raise ValueError(f"{path} is damaged: it holds no covariances by name, or no counts.")
    moments: dict[str, Moment] = {}
    for name, entry in stored.items():
        moments[name] = _moment(path, name, _covariance(path, name, entry), counts.get(name))
    for name, owner in alias.items():
        if owner not in stored or name in stored or counts.get(name) != counts[owner]:
            raise ValueError(f"{path} is damaged: {name} shares the covariance of {owner}, which does not fit.")
        moments[name] = moments[owner]
    if missing := sorted(counts.keys() - moments.keys()):
        raise ValueError(f"{path} is damaged: it counts rows of {missing[:5]} and has no covariance of them.")
    return Statistics({name: moments[name] for name in counts})


def _covariance(path: str | os.PathLike, name: str, entry: Any) -> torch.Tensor:
    """A stored covariance as a square matrix."""
    matrix = entry.get("dense") if isinstance(entry, dict) else entry
    if isinstance(entry, dict) and isinstance(upper := entry.get("packed"), torch.Tensor):
        dim = int(entry.get("dim", 0))
        if dim < 1 or upper.shape != (dim * (dim + 1) // 2,):
            raise ValueError(f"{path} is damaged: {name} claims width {dim} and holds {upper.numel()} values.")
        matrix = upper.new_zeros(dim, dim)
        matrix[torch.ones(dim, dim, dtype=torch.bool, device=upper.device).triu()] = upper
        matrix = matrix + matrix.triu(1).mT
    square = isinstance(matrix, torch.Tensor) and matrix.dim() == 2 and matrix.shape[0] == matrix.shape[1] > 0
    if matrix is None or not square or not matrix.is_floating_point() or not torch.isfinite(matrix).all():
        raise ValueError(f"{path} is damaged: what it holds of {name} is not a finite square matrix.")
    matrix = matrix.double()
    if float((matrix - matrix.mT).abs().max()) > SYMMETRY_TOLERANCE * float(matrix.abs().max()):
        logger.warning(f"{path}: the covariance of {name} is not symmetric; (C + C^T) / 2 is used.")
    return (matrix + matrix.mT) / 2


def _moment(path: str | os.PathLike, name: str, covariance: torch.Tensor, count: Any) -> Moment:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"{path} is damaged: it counts {count} rows of {name}.")
    return Moment.of_sum(covariance * count, count)
