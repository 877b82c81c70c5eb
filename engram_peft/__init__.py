"""Memory of Hugging Face language models: find it, take it out, carry it as an adapter.

Importing the package makes the ENGRAM and NGRAM_MEMORY methods known to PEFT and the Engram model to transformers.
"""

from .checkpoints import edit_checkpoint
from .editing.collection import collect_statistics
from .editing.extraction import ExtractionReport, LayerDiagnostics, extract_engram
from .editing.item_edit import ItemOptions, ItemReport, extract_items
from .editing.kinds import LayerKind, register_layer
from .editing.sampling import sample_texts
from .editing.scaling import compose, count_ratio, effective_rank, uniform, weight_norm
from .editing.statistics import Moment, Provenance, Statistics, merge_statistics
from .editing.tuning import AlphaCurve, AlphaPoint, ItemOutcome, tune_alpha
from .memory.insight import memory_report
from .memory.tables import export_table, load_with_tables, offload_tables, open_table
from .memory.writing import MemoryEdit, active_edits, erase_ngrams, write_facts
from .models.engram import EngramForCausalLM, EngramLMConfig
from .recipes import unlearn
from .training import create_optimizer
from .tuners.engram import EngramConfig, EngramModel
from .tuners.ngram_memory import NgramMemoryConfig, NgramMemoryModel


__version__ = "0.1.0"

__all__ = [
    "AlphaCurve",
    "AlphaPoint",
    "EngramConfig",
    "EngramForCausalLM",
    "EngramLMConfig",
    "EngramModel",
    "ExtractionReport",
    "ItemOptions",
    "ItemOutcome",
    "ItemReport",
    "LayerDiagnostics",
    "LayerKind",
    "MemoryEdit",
    "Moment",
    "NgramMemoryConfig",
    "NgramMemoryModel",
    "Provenance",
    "Statistics",
    "active_edits",
    "collect_statistics",
    "compose",
    "count_ratio",
    "create_optimizer",
    "edit_checkpoint",
    "effective_rank",
    "erase_ngrams",
    "export_table",
    "extract_engram",
    "extract_items",
    "load_with_tables",
    "memory_report",
    "merge_statistics",
    "offload_tables",
    "open_table",
    "register_layer",
    "sample_texts",
    "tune_alpha",
    "uniform",
    "unlearn",
    "weight_norm",
    "write_facts",
]
