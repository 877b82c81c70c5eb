"""Memory of Hugging Face language models: find it, take it out, carry it as an adapter.

Importing the package makes the ENGRAM method known to PEFT.
"""

from .editing.collection import collect_statistics
from .editing.extraction import ExtractionReport, LayerDiagnostics, extract_engram
from .editing.scaling import compose, count_ratio, effective_rank, uniform, weight_norm
from .editing.statistics import Moment, Provenance, Statistics, merge_statistics
from .recipes import unlearn
from .tuners.engram import EngramConfig, EngramModel


__version__ = "0.1.0"

__all__ = [
    "EngramConfig",
    "EngramModel",
    "ExtractionReport",
    "LayerDiagnostics",
    "Moment",
    "Provenance",
    "Statistics",
    "collect_statistics",
    "compose",
    "count_ratio",
    "effective_rank",
    "extract_engram",
    "merge_statistics",
    "uniform",
    "unlearn",
    "weight_norm",
]
