"""Registration with PEFT, and the one place that touches its internals (read in PEFT 0.21.2)."""

from __future__ import annotations

from typing import Any

from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import register_peft_method


def add_peft_type(name: str) -> PeftType:
    """`PeftType.<name>`, made if PEFT does not know it.

    PEFT looks methods up in a closed enum and reads `peft_type.value`, so a plain string will not do. A later PEFT that ships
    the name is left alone.
    """
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)  # since Python 3.12 attribute access does not consult the member map
    return member


def register_once(name: str, config_cls: Any, model_cls: Any) -> None:
    """`register_peft_method`, which refuses a name that it knows; if the package is imported anew, its new classes count."""
    peft_type = PeftType[name.upper()]
    known = PEFT_TYPE_TO_TUNER_MAPPING.get(peft_type)
    if known is None:
        register_peft_method(name=name, config_cls=config_cls, model_cls=model_cls)
    elif known.__module__ == model_cls.__module__:
        PEFT_TYPE_TO_TUNER_MAPPING[peft_type] = model_cls
        PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] = config_cls


add_peft_type("ENGRAM")
add_peft_type("NGRAM_MEMORY")
