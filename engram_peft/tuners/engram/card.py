"""What lies beside the weights of a saved adapter: the section of the model card, and a first look at the weights file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open


if TYPE_CHECKING:
    from .config import EngramConfig


_BEGIN, _END = "<!-- engram -->", "<!-- /engram -->"


def describe_in_card(directory: str | os.PathLike, config: EngramConfig) -> None:
    """Puts a section into the `README.md` of `directory` that says what was taken out, from which counts, and how to load it.

    A section of an earlier save is replaced; the rest of the card is left alone.
    """
    path = Path(directory) / "README.md"
    if path.exists():
        card = ModelCard.load(path)
    elif (Path(directory) / SAFETENSORS_WEIGHTS_NAME).exists():
        # PEFT writes a card into the root folder only, and this is the folder of one of several adapters
        card = ModelCard("---\nlibrary_name: peft\n---\n")
        if config.base_model_name_or_path:
            card.data["base_model"] = config.base_model_name_or_path
    else:
        return
    card.data["tags"] = sorted({*(card.data.get("tags") or []), "engram", "unlearning"})
    before, begin, rest = card.text.partition(_BEGIN)
    if begin:
        after = rest.partition(_END)[2]
    else:
        before, after = "", "\n\n" + _without_blank_form(card.text)
    card.text = f"{before}{_BEGIN}\n{_section(config)}\n{_END}{after}"
    card.save(path)


def _without_blank_form(text: str) -> str:
    """The card without the hub's questionnaire if nobody has answered it: only PEFT's versions are left."""
    if "# Model Card for Model ID" not in text:
        return text
    versions = text.find("### Framework versions")
    return text[versions:] if versions >= 0 else ""


def _section(config: EngramConfig) -> str:
    lines = ["# ENGRAM adapter", "", config.description or "Takes a part of the model's memory out, in closed form."]
    if (record := config.extraction) is not None:
        share = record["target_rows"] / max(record["total_rows"], 1)
        lines += [
            "",
            "| | |",
            "|---|---|",
            f"| forgotten | {record['target_texts']} texts, {record['target_rows']} tokens |",
            f"| reference | {record['total_texts']} texts, {record['total_rows']} tokens ({share:.1%} of them forgotten) |",
            f"| rows | {record['mask']} |",
            f"| strength | alpha {config.alpha * config.scale:g}, {_how(config)} |",
        ]
    else:
        lines += ["", "The adapter was not filled from statistics."]
    name = config.base_model_name_or_path or "the base model"
    lines += [
        "",
        "Load it with `pip install engram-adapters`; the import makes the method known to PEFT:",
        "",
        "```python",
        "import engram_peft",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        'model = PeftModel.from_pretrained(model, "path of this adapter")',
        "```",
    ]
    return "\n".join(lines)


def _how(config: EngramConfig) -> str:
    record = config.extraction or {}
    if config.items:
        return f"one on top for each of {len(config.items)} items"
    return f"scale {record['scale']}, cut {record['cut']}"


def check_weights_file(directory: str) -> None:
    """Raises a `ValueError` if the weights file in a local `directory` is truncated or not a safetensors file."""
    path = os.path.join(directory, SAFETENSORS_WEIGHTS_NAME)
    if not os.path.exists(path):
        return
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}).") from None
