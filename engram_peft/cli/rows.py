"""Files of texts, prompts and answers, as rows that the library takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .application import BadInput


Row = dict[str, Any]


def read_rows(path: Path, chat: bool = False) -> list[Row]:
    """The items in a file, as rows that the library takes.

    Args:
        path (`Path`):
            `.jsonl`: a JSON object or a string a line. `.json`: a list of such, or an object from names to one or several. `.txt`: a
            text a line.
        chat (`bool`): Whether a prompt and an answer become chat messages.

    Raises:
        `BadInput`: The file cannot be used; the message names the line.
    """
    entries = _entries_of(path)
    if not entries:
        raise BadInput(f"{path} holds no texts.")
    rows = [_row_of(entry, where) for where, entry in entries]
    return [_as_chat(row) for row in rows] if chat else rows


def _entries_of(path: Path) -> list[tuple[str, Any]]:
    """What a file holds, each with a name for it in errors."""
    text = _read_text(path)
    kind = path.suffix.lower()
    if kind == ".json":
        content = _parsed(text, str(path))
        if isinstance(content, dict):
            named = [
                (name, part)
                for name, value in content.items()
                for part in (value if isinstance(value, list) else [value])
            ]
            return [(f"{path}, item {name!r}", _named(part, name)) for name, part in named]
        if not isinstance(content, list):
            raise BadInput(f"{path} must hold a list of items, or an object from names to items.")
        return [(f"{path}, entry {i}", entry) for i, entry in enumerate(content, 1)]
    if kind not in (".jsonl", ".ndjson", ".txt"):
        raise BadInput(f"{path} has an unknown ending. Use .jsonl, .json or .txt.")
    # not `splitlines`, which also splits at characters that JSON strings may hold
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [(where, line.strip() if kind == ".txt" else _parsed(line, where)) for where, line in lines]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}). Convert it to UTF-8.") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInput(f"{where} is not JSON: {error}") from None


def _named(entry: Any, name: str) -> Any:
    return (
        {**({"text": entry} if isinstance(entry, str) else entry), "name": name}
        if isinstance(entry, str | dict)
        else entry
    )


def _row_of(entry: Any, where: str) -> Row:
    """An entry as a row with a text, a prompt and an answer, or messages, none of them empty."""
    row = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(row, dict):
        raise BadInput(f'{where} is no JSON object. Write {{"text": ...}} or {{"prompt": ..., "answer": ...}}.')
    columns = columns_of(row)
    if not columns:
        raise BadInput(
            f"{where} has the columns {sorted(row)}. Expected `text`, `prompt` and `answer`, `question` and `answer`, or `messages`."
        )
    for column in columns:
        kind = list if column == "messages" else str
        if not isinstance(row[column], kind):
            raise BadInput(f"{where}: {column!r} must be a {'list of messages' if kind is list else 'text'}.")
        if not (row[column].strip() if isinstance(row[column], str) else row[column]):
            raise BadInput(f"{where}: {column!r} is empty.")
    if not isinstance(row.get("name", ""), str):
        raise BadInput(f"{where}: 'name' must be a text.")
    return row


def columns_of(row: Row) -> tuple[str, ...]:
    """The columns that hold the item."""
    pairs = (("prompt", "answer"), ("prompt", "completion"), ("question", "answer"), ("question", "completion"))
    return next((columns for columns in (("messages",), *pairs, ("text",)) if set(columns) <= row.keys()), ())


def _as_chat(row: Row) -> Row:
    columns = columns_of(row)
    if len(columns) < 2:
        return row
    prompt, answer = (row[column] for column in columns)
    rest = {name: value for name, value in row.items() if name not in columns}
    return {**rest, "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def items_of(rows: Sequence[Row], path: Path) -> list[Row] | dict[str, list[Row]]:
    """Rows as `unlearn` takes them: lines that have the same name are one item.

    Raises:
        `BadInput`: Some rows have a name and others do not.
    """
    named = [row for row in rows if "name" in row]
    if not named:
        return list(rows)
    if len(named) < len(rows):
        raise BadInput(
            f"{len(named)} of {len(rows)} items in {path} have a 'name'. Give it to all of them or to none."
        )
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row["name"], []).append(row)
    return items


def texts_by_item(forgotten: list[Row] | dict[str, list[Row]]) -> dict[str, list[str]]:
    named = forgotten if isinstance(forgotten, dict) else {str(i): [row] for i, row in enumerate(forgotten)}
    return {name: [_text_of(row) for row in rows] for name, rows in named.items()}


def _text_of(row: Row) -> str:
    parts = (
        [message["content"] for message in row["messages"]] if "messages" in row else [row[c] for c in columns_of(row)]
    )
    return " → ".join(parts)
