"""Models, adapters and suites that the commands name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .application import BadInput
from .options import Dtype
from .rows import Row, columns_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation import Suite


def load_model(name: str, dtype: Dtype, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, on the device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if _is_path(name) and not Path(name).is_dir():
        raise BadInput(f"There is no folder {name}. --model takes the folder of a model or its name on the Hub.")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"Cannot use --device {device}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.value)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"Cannot load the model {name}: {error}") from error
    return model.to(device).eval(), tokenizer


def load(
    model: str | None, adapter: str | None, dtype: Dtype, device: str | None, engram: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model, with its adapter if there is one, and its tokenizer."""
    from peft import PeftModel

    if adapter is None:
        if model is None:
            raise BadInput("Nothing to load: pass --model, --adapter, or both.")
        return load_model(model, dtype, device)
    config = config_of(adapter)
    kind = getattr(config.peft_type, "value", config.peft_type)
    if engram and kind != "ENGRAM":
        raise BadInput(f"{adapter} is a {kind} adapter. This command is for ENGRAM adapters.")
    name = model or config.base_model_name_or_path
    if not name:
        raise BadInput(f"{adapter} does not say which model it was made for. Pass --model.")
    base, tokenizer = load_model(name, dtype, device)
    try:
        return PeftModel.from_pretrained(base, adapter).eval(), tokenizer
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"Cannot load the adapter {adapter}: {error}") from error


def config_of(adapter: str) -> Any:
    """The config of an adapter, of whatever kind."""
    from peft import PeftConfig

    folder = Path(adapter)
    # a Hub name has one slash: anything else that is not there would be looked for in vain
    if _is_path(adapter) or adapter.count("/") != 1 or folder.exists():
        check_is_adapter(folder)
    try:
        return PeftConfig.from_pretrained(adapter)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"Cannot read the adapter {adapter}: {error}") from error


def check_is_adapter(folder: Path) -> None:
    if not folder.is_dir():
        raise BadInput(f"There is no folder {folder}. Pass the folder that an adapter was saved to.")
    if not (folder / "adapter_config.json").is_file():
        raise BadInput(f"{folder} is no adapter: it has no adapter_config.json.")


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: the Hub's names have one slash at most."""
    return (
        name.startswith((".", "~", "/", "\\")) or name.endswith("/") or name.count("/") > 1 or Path(name).is_absolute()
    )


def check_chat(tokenizer: PreTrainedTokenizerBase, chat: bool, rows: Sequence[Row], quiet: bool) -> None:
    """Raises an error for `--chat` without a chat template; says so if it might have been wanted."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise BadInput("--chat needs a tokenizer with a chat template, which this model lacks. Leave --chat out.")
    if has_template and not quiet and any(len(columns_of(row)) > 1 for row in rows):
        typer.echo(
            "Note: prompts and answers are joined as they are. This is a chat model: --chat asks it as in a chat.",
            err=True,
        )


def load_suite(path: Path | None, generate: bool) -> Suite | None:
    if path is None:
        return None
    from importlib.util import find_spec

    from ..evaluation import Suite

    if generate and find_spec("rouge_score") is None:
        raise BadInput(
            "Free answers are judged with rouge-score: pip install 'engram-adapters[evaluation]', or pass --no-generate."
        )
    try:
        return Suite.load(path)
    except ValueError as error:
        raise BadInput(f"{path} is no suite: {error}") from error
