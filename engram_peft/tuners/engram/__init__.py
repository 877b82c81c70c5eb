"""The ENGRAM adapter: a closed-form edit of linear layers, as a PEFT method."""

from ..._peft import register_once
from .config import EngramConfig
from .experts import ParamWrapper
from .layer import EngramLayer, Linear
from .model import EngramModel


__all__ = ["EngramConfig", "EngramLayer", "EngramModel", "Linear", "ParamWrapper"]

register_once(name="engram", config_cls=EngramConfig, model_cls=EngramModel)
