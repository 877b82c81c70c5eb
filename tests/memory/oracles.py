"""Known answers of the reference implementations: see `tests/fixtures/ngram_memory`."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engram_peft.memory import NgramMemorySpec, token_reach


FIXTURES = Path(__file__).parent.parent / "fixtures" / "ngram_memory"
DEMO_CASES = {"a": [1, 3], "b": [5, 0, 2], "demo_default": [1, 15]}
DEMO_LAYERS = [(case, layer) for case in ("a", "b") for layer in DEMO_CASES[case]]
DEMO_IDS = ("main", "text", "negative", "one_token")


@lru_cache
def demo() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    facts = json.loads((FIXTURES / "demo_oracle.json").read_text())
    return facts, load_file(FIXTURES / "demo_oracle.safetensors")


@lru_cache
def needle(file: str = "needle_oracle") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    path = FIXTURES / f"{file}.safetensors"
    with safe_open(path, "pt") as handle:
        facts = json.loads(handle.metadata()["meta"])
    return facts, load_file(path)


def demo_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(demo()[0]["tokenizer_json"]))


def demo_spec(case: str) -> NgramMemorySpec:
    facts = demo()[0]["cases"][case]
    engram, backbone = facts["engram"], facts["backbone"]
    return NgramMemorySpec(
        hidden_size=backbone["hidden_size"],
        layer_ids=engram["layer_ids"],
        vocab_size=engram["engram_vocab_size"],
        compressed_vocab_size=facts["compressed_vocab_size"],
        max_ngram_size=engram["max_ngram_size"],
        n_heads=engram["n_head_per_ngram"],
        head_dim=engram["n_embed_per_ngram"] // engram["n_head_per_ngram"],
        seed=engram["seed"],
        pad_token_id=facts["compressed_pad_id"],
        hc_mult=backbone["hc_mult"],
        kernel_size=engram["kernel_size"],
    )


def with_past(ids: torch.Tensor, spec: NgramMemorySpec, past: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer takes at the start of a text: ids behind a past that must not be read, and their reach."""
    return F.pad(ids, (spec.ids_lookback, 0), value=past), token_reach(ids, limit=spec.lookback)
