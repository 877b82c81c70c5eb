"""The source files that travel with a saved model, so that it loads with `trust_remote_code` where engram_peft is missing.

transformers would copy a class's file and those it imports from the same folder. The model is built on `engram_peft.memory`,
so this module lays all files that it needs side by side and rewrites their imports. From there on, transformers can copy them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME


_RELATIVE_IMPORT = re.compile(r"^(\s*from\s+)(\.+)([\w.]+)(?=\s+import\b)", re.MULTILINE)


def is_remote_code() -> bool:
    """Whether this is such a copy."""
    return __name__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")


def source_files(entry: Path) -> dict[str, str]:
    """File names and texts of the module at `entry` and of all that it imports relatively.

    Modules beside `entry` keep their names; `..memory.layer` becomes `memory_layer.py`.
    """
    entry = entry.resolve()
    folder = entry.parent
    texts: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        name = f"{_flat_name(path, folder)}.py"
        if name in texts:
            continue

        def flatten(match: re.Match[str], importer: Path = path) -> str:
            start, dots, module = match.groups()
            imported = importer.parents[len(dots) - 1].joinpath(*module.split("."))
            imported = imported / "__init__.py" if imported.is_dir() else imported.with_suffix(".py")
            waiting.append(imported)
            return f"{start}.{_flat_name(imported, folder)}"

        texts[name] = _RELATIVE_IMPORT.sub(flatten, path.read_text(encoding="utf-8"))
    return texts


def write_source_files(entry: Path, directory: str | os.PathLike) -> None:
    """Writes `source_files(entry)` into `directory`."""
    for name, text in source_files(entry).items():
        path = Path(directory, name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _flat_name(path: Path, folder: Path) -> str:
    if path.parent == folder:
        return path.stem
    package = folder.parents[1]  # engram_peft/models/engram -> engram_peft
    parts = path.relative_to(package).with_suffix("").parts
    return "_".join(part for part in parts if part != "__init__")
