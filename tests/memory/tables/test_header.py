"""The parser of headers believes nothing: whatever the bytes, it answers with a header that holds or with an error of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cache

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from engram_peft.memory.tables import TableError, export_table, format, open_table
from engram_peft.memory.tables.checkpoint import file_header

from .rows import wild


SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

DTYPES = st.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "I8", "U8", "F8_E8M0", "I64", "X9", ""])
SIZES = st.one_of(
    st.integers(0, 8), st.integers(-3, 2**66), st.sampled_from([2**31, 2**63, 2**64 - 1, True, 1.0, None, "2"])
)
CLAIMS = st.fixed_dictionaries(
    {"dtype": DTYPES, "shape": st.lists(SIZES, max_size=3), "data_offsets": st.lists(SIZES, min_size=1, max_size=3)},
    optional={"more": st.none()},
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
HEADERS = st.dictionaries(
    st.sampled_from(["table", "chunk_sha256", "a", "b", "__metadata__"]), st.one_of(CLAIMS, JSON)
)


@st.composite
def neighbours(draw: Callable) -> dict:
    """Tensors that lie one after another, as they should, but perhaps for one of them."""
    header, end = {}, 0
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True)):
        length = draw(st.integers(0, 20))
        start = end + draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
        end = start + length
        header[name] = {
            "dtype": draw(st.sampled_from(["U8", "I8", "F16"])),
            "shape": [length],
            "data_offsets": [start, end],
        }
    return header


def framed(text: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@cache
def exported_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table.safetensors")
        export_table(wild(torch.float16, 5, 4), [2, 3], path)
        with open(path, "rb") as file:
            return file.read()


def check(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        try:
            header = file_header(file.name)
        except TableError:
            pass
        else:
            used = bytearray(len(content))
            for entry in header.tensors.values():
                assert header.data_start <= entry.start <= entry.end <= len(content)
                assert not any(used[entry.start : entry.end])  # no two tensors share a byte
                used[entry.start : entry.end] = b"\1" * (entry.end - entry.start)
            try:
                with safe_open(file.name, framework="pt") as other:  # what the reference reads too, it reads alike
                    assert set(other.keys()) == set(header.tensors)
                    for name, entry in header.tensors.items():
                        assert tuple(other.get_slice(name).get_shape()) == entry.shape
            except SafetensorError:
                pass
        for options in ({}, {"verify": "lazy"}, {"tensor": "a"}, {"tensor": "table", "head_sizes": [1]}):
            try:
                with open_table(file.name, **options) as table:
                    table.gather(torch.zeros(len(table.head_sizes), dtype=torch.int64))
            except ValueError:
                pass


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes(content):
    check(content)


@SETTINGS
@given(st.binary(max_size=100), st.binary(max_size=50), st.none() | st.integers(0, 2**64 - 1))
def test_any_header_text(text, data, length):
    check(framed(text, data, length))


@SETTINGS
@given(st.one_of(HEADERS, neighbours(), JSON), st.integers(0, 100), st.none() | st.integers(0, 2**64 - 1))
def test_any_header_in_json(header, size, length):
    check(framed(json.dumps(header).encode(), bytes(size), length))


@SETTINGS
@given(neighbours())
def test_tensors_side_by_side(header):
    ends = [claim["data_offsets"][1] for claim in header.values()]
    check(framed(json.dumps(header).encode(), bytes(max([0, *ends]))))


@SETTINGS
@given(st.data())
def test_changed_claims_of_a_table(data):
    """A header that is right but for one claim, and vouches for that claim too."""
    content = exported_file()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    where = data.draw(st.sampled_from([*header["__metadata__"], "table", "chunk_sha256"]))
    if where in header:
        header[where] = data.draw(CLAIMS)
    else:
        number = st.sampled_from(
            ["0", "-1", "5", "99999999999999999999", "1e3", "x", "[5]", "[2, 4]", "[-1, 6]", "F32", ""]
        )
        header["__metadata__"][where] = data.draw(number)
    metadata = header["__metadata__"]
    try:
        claims = {
            n: (c["dtype"], c["shape"], *c["data_offsets"][:2]) for n, c in header.items() if n != "__metadata__"
        }
        if where != "header_sha256":
            metadata["header_sha256"] = format._header_digest(metadata, claims)
    except (TypeError, ValueError):
        pass
    text = json.dumps(header).encode()
    check(framed(text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8), content[8 + length :]))


def test_a_header_too_deep_or_too_long_is_refused():
    for text in (
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
    ):
        check(framed(text, b""))
    check(framed(b"{}", b"", 2**63))
    check(framed(b"{}", b""))
