"""The known answers of ai-engram 0.11.0: see `tests/fixtures/ai_engram_oracle`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Oracle:
    """`facts` are settings, counts and tolerances; `tensors` inputs and outputs."""

    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def state_dict(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names start with `prefix`, which is cut off."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    folder = Path(__file__).parents[1] / "fixtures" / "ai_engram_oracle"
    facts = json.loads((folder / "ai_engram_oracle.json").read_text())
    return Oracle(facts, load_file(folder / "ai_engram_oracle.safetensors"))
