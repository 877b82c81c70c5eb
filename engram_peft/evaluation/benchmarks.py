"""What public benchmarks share: rows of data, local or from the Hugging Face hub, and a reference that never saw them."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from ..editing.selection import unwrap


Row = dict[str, Any]

_SUFFIXES = (".json", ".jsonl", ".parquet")


def benchmark_rows(source: str | os.PathLike[str], config: str, split: str, columns: list[str]) -> list[Row]:
    """The rows of one part of a benchmark.

    Args:
        source (`str`): A local folder, laid out as below, or the name of a data set on the hub.
        config (`str`): The part. In a folder it is a file, `<config>.json`, or a folder, `<config>/<split>.json`; `.jsonl` and
            `.parquet` will do as well, and `.json` may hold an array or a row a line.
        split (`str`): Which of its splits; a file holds the split `"train"`.
        columns (`list[str]`): Columns that every row must have.

    Raises:
        `FileNotFoundError`: The folder has no such part.
        `ValueError`: A row lacks a column.
        `ImportError`: `datasets`, which reads parquet files and the hub, is missing.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        rows = _rows_of_file(_file_of(folder, config, split))
    elif len(folder.parts) == 2 and folder.parts[0] not in (".", "..", "~"):
        rows = [dict(row) for row in _datasets_module("datasets").load_dataset(str(source), config, split=split)]
    else:
        raise FileNotFoundError(f"There is no folder {str(source)!r}, and hub names read `owner/name`.")
    for i, row in enumerate(rows):
        if missing := [column for column in columns if not row.get(column)]:
            raise ValueError(f"Row {i} of {config}/{split} lacks {missing}. It has {sorted(row)}.")
    if not rows:
        raise ValueError(f"{config}/{split} of {str(source)!r} has no rows.")
    return rows


def _file_of(folder: Path, config: str, split: str) -> Path:
    inside = sorted((folder / config).glob(f"{split}*")) if (folder / config).is_dir() else []
    # the hub's own parquet files are called `<split>-00000-of-00001.parquet`
    found = [path for path in inside if path.suffix in _SUFFIXES and path.name.split(".")[0].split("-")[0] == split]
    if split == "train":
        found += [path for suffix in _SUFFIXES if (path := folder / (config + suffix)).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder} holds neither {config}/{split} nor {config} as one of {list(_SUFFIXES)}.")
    return found[0]


def _rows_of_file(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        return _datasets_module("pyarrow.parquet").read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return [_as_row(entry) for entry in json.loads(text)]
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _as_row(entry: Any) -> Row:
    """MUSE's own files of plain texts are arrays of strings."""
    return {"text": entry} if isinstance(entry, str) else entry


def _datasets_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "Reading parquet files and the hub needs `datasets`: pip install 'engram-adapters[datasets]'."
        ) from error


def check_reference(model: nn.Module, reference: nn.Module) -> None:
    """Raises a `ValueError` if the reference is the model itself or the one that its adapter edits."""
    if unwrap(reference) is unwrap(model):
        raise ValueError(
            "`reference` is the model itself, or shares its weights. Pass a model that never saw what was forgotten, such as "
            "one that was trained on the retain set only; without one leave `reference` out."
        )
