"""The options that several commands have, and what is written in them."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .application import BadInput


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Method(str, Enum):
    items = "items"
    paper = "paper"


class TokenPosition(str, Enum):
    answer = "answer"
    predict = "predict"
    subject = "subject"


FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "readable": True, "show_default": False}
HOW: dict[str, Any] = {"rich_help_panel": "What and how"}
RUN: dict[str, Any] = {"rich_help_panel": "Running the model"}
OUT: dict[str, Any] = {"rich_help_panel": "Output"}

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Folder or Hub name of the model.", show_default=False)
]
BaseOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or Hub name of the model; by default the one the adapter names."),
]
AdapterOption = Annotated[
    str, typer.Option("--adapter", "-a", help="Folder or Hub name of the adapter.", show_default=False)
]
FolderOption = Annotated[
    Path, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.", show_default=False)
]
StatisticsOption = Annotated[
    Path, typer.Option("--output", "-o", help="File to write; it must not exist yet.", show_default=False)
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target-modules", help="Which modules, by the ends of their names: down_proj,o_proj", **HOW),
]
LayersOption = Annotated[str | None, typer.Option("--layers", help="Which layers: 10-20 or 4,8,12-15", **HOW)]
ChatOption = Annotated[
    bool,
    typer.Option("--chat", help="Pass prompts and answers through the chat template, as user and assistant.", **RUN),
]
GenerateOption = Annotated[
    bool, typer.Option(help="Let the model answer the suite freely, which takes most of the time.", **RUN)
]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the weights; auto: that of the checkpoint.", **RUN)]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default a GPU if there is one.", **RUN)
]
BatchOption = Annotated[int, typer.Option(min=1, help="Texts a batch.", **RUN)]
LengthOption = Annotated[int, typer.Option(min=2, help="Longer texts are cut on the right, in tokens.", **RUN)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.", **OUT)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.", **OUT)]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no summary.", **OUT)]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", **OUT)]


def modules_of(text: str | None) -> list[str] | str | None:
    """`a,b` as PEFT's `target_modules`."""
    if text is None or text == "all-linear":
        return text
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadInput("--target-modules names no module. Write, for example, down_proj,o_proj.")
    return names


def layers_of(text: str | None) -> list[int] | None:
    """`4,8,12-15` as numbers."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise BadInput(f"--layers {text} is no list of layers. Write, for example, 10-20 or 4,8,12-15.")
        numbers.update(range(first, last + 1))
    return sorted(numbers)
