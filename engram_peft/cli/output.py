"""What commands print and write: nothing is replaced unasked, and files get their names when they are complete."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from .application import BadInput


def show(content: Mapping[str, Any], text: str, as_json: bool, quiet: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))
    elif not quiet:
        typer.echo(text)


def _finite(value: Any) -> Any:
    """The same with `None` for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_folder_is_free(folder: Path, overwrite: bool, sources: Sequence[str | None]) -> None:
    """Raises an error if a folder cannot be written, or holds something that must not be lost."""
    if any(
        source is not None and Path(source).exists() and folder.resolve() == Path(source).resolve()
        for source in sources
    ):
        raise BadInput(f"{folder} is what is read from. Choose another --output.")
    if folder.exists():
        if not overwrite:
            raise BadInput(f"{folder} exists already. Choose another --output, or pass --overwrite.")
        ours = any((folder / name).is_file() for name in ("adapter_config.json", "config.json"))
        # replacing a folder deletes what is in it
        if not folder.is_dir() or not (ours or not any(folder.iterdir())):
            raise BadInput(
                f"{folder} holds neither an adapter nor a model, so it is not replaced. Choose another --output."
            )
    _check_parent(folder)


def check_file_is_free(file: Path | None, overwrite: bool) -> None:
    """Raises an error if a file cannot be written, or is there already."""
    if file is None:
        return
    if file.is_dir():
        raise BadInput(f"{file} is a folder. Name a file.")
    if file.exists() and not overwrite:
        raise BadInput(f"{file} exists already. Choose another name, or pass --overwrite.")
    _check_parent(file)


def _check_parent(path: Path) -> None:
    """Raises an error if nothing can be made at `path`: better now than after the work."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise BadInput(f"Cannot write to {parent}. Choose another place for {path.name}.")


def make_parent(path: Path) -> None:
    path.absolute().parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` when it is complete."""
    make_parent(folder)
    place = folder.absolute().parent
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=place, ignore_cleanup_errors=True) as beside:
        new, old = Path(beside) / "new", Path(beside) / "old"
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def write_text(path: Path, text: str) -> None:
    from ..files import replace_text

    make_parent(path)
    replace_text(path, text)


def size_of(path: Path) -> str:
    """How large a file is, or all files in a folder, for people."""
    return shown_size(bytes_of(path))


def bytes_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def shown_size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def fact_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {value}" for name, value in rows]
