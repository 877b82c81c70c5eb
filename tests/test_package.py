"""What importing the package does: it registers a method with PEFT, once, and nothing heavy comes along."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys

import pytest
from peft import PeftType
from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)

import engram_peft
from engram_peft import EngramConfig, EngramModel
from engram_peft._peft import add_peft_type


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_method_is_a_member_like_any_other():
    member = PeftType.ENGRAM
    assert isinstance(member, PeftType) and isinstance(member, str)
    assert member is PeftType["ENGRAM"] is PeftType("ENGRAM")
    assert (member.name, member.value, str(member)) == (
        "ENGRAM",
        "ENGRAM",
        str(PeftType.LORA).replace("LORA", "ENGRAM"),
    )
    assert member == "ENGRAM" and hash(member) == hash("ENGRAM")
    assert member in list(PeftType) and "ENGRAM" in PeftType.__members__
    assert repr(member) == repr(PeftType.LORA).replace("LORA", "ENGRAM")
    assert len(list(PeftType)) == len(PeftType.__members__) == len(set(PeftType))


def test_the_member_survives_pickling_and_copying():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(PeftType.ENGRAM, protocol)) is PeftType.ENGRAM
    assert copy.deepcopy(PeftType.ENGRAM) is PeftType.ENGRAM
    config = EngramConfig(target_modules=["down_proj"], alpha=0.5)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_peft_finds_config_tuner_and_prefix():
    assert PEFT_TYPE_TO_CONFIG_MAPPING[PeftType.ENGRAM] is EngramConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING["ENGRAM"] is EngramModel
    assert PEFT_TYPE_TO_PREFIX_MAPPING[PeftType.ENGRAM] == EngramModel.prefix == "engram_"


def test_a_type_that_peft_knows_is_left_alone():
    lora = PeftType.LORA
    assert add_peft_type("LORA") is lora is PeftType.LORA
    before = list(PeftType)
    assert add_peft_type("ENGRAM") is PeftType.ENGRAM
    assert list(PeftType) == before


def test_reloading_registers_nothing_twice():
    before, tuners = list(PeftType), dict(PEFT_TYPE_TO_TUNER_MAPPING)
    importlib.reload(engram_peft)
    importlib.reload(importlib.import_module("engram_peft.tuners.engram"))
    assert list(PeftType) == before
    assert tuners == PEFT_TYPE_TO_TUNER_MAPPING


FRESH_IMPORT = """
import sys, torch
from torch import nn
import engram_peft
from peft import PeftType, get_peft_model
first = PeftType.ENGRAM
for name in [name for name in sys.modules if name.partition(".")[0] == "engram_peft"]:
    del sys.modules[name]
import engram_peft
from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics
assert PeftType.ENGRAM is first and list(PeftType).count(first) == 1
model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), EngramConfig(target_modules=["0"]))
x = torch.randn(2, 4)
target = collect_statistics(model, [x], target_modules=["0"])
total = merge_statistics(target, collect_statistics(model, [torch.randn(50, 4)], target_modules=["0"]))
extract_engram(model, target, total, scale="uniform")
with model.disable_adapter():
    base = model(x)
assert not torch.equal(model(x), base)
model.merge_adapter()
model.unmerge_adapter()
model.set_scale("default", 0)
assert torch.equal(model(x), base)
print("works")
"""


def test_a_second_import_in_one_process_works():
    assert run(FRESH_IMPORT) == "works\n"


NEW_MODULES = """
import sys, peft, transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
before = {name.partition(".")[0] for name in sys.modules}
import engram_peft
print(*sorted({name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
print(*sorted(name for name in sys.modules if name.startswith(("accelerate.test_utils", "datasets", "matplotlib", "gguf"))))
"""


def test_importing_brings_no_further_package_along():
    new, heavy = run(NEW_MODULES).split("\n")[:2]
    assert new == "engram_peft"
    assert heavy == ""


@pytest.mark.parametrize("name", engram_peft.__all__)
def test_what_is_exported_exists(name):
    assert hasattr(engram_peft, name)


def test_the_exports_are_sorted():
    assert engram_peft.__all__ == sorted(engram_peft.__all__)
