"""The ENGRAM adapter: a closed-form edit of layers, as a PEFT method."""

from ..._peft import register_once
from .config import EngramConfig
from .experts import ParamWrapper
from .layer import EditedLayer, EngramLayer
from .model import EngramModel


__all__ = ["EditedLayer", "EngramConfig", "EngramLayer", "EngramModel", "ParamWrapper"]

register_once(name="engram", config_cls=EngramConfig, model_cls=EngramModel)
