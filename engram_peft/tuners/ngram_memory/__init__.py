"""The NGRAM_MEMORY adapter: hashed n-gram tables in front of decoder layers, as a PEFT method."""

from ..._peft import register_once
from .config import NgramMemoryConfig
from .layer import MemoryLayer
from .model import NgramMemoryModel


__all__ = ["MemoryLayer", "NgramMemoryConfig", "NgramMemoryModel"]

register_once(name="ngram_memory", config_cls=NgramMemoryConfig, model_cls=NgramMemoryModel)
