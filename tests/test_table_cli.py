"""`engram-peft table`: what it writes is what the library writes, and what it cannot use it says in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from engram_peft.cli import app
from engram_peft.memory.tables import export_table, open_table


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def weight():
    """A checkpoint with a table in two shards, one with scales, and something else."""
    rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    Path("model").mkdir()
    save_file(
        {
            "t.shard_0.weight": rows[:40].contiguous(),
            "t.shard_1.weight": rows[40:].contiguous(),
            "small": rows.clamp(-1, 1).mul(100).to(torch.int8),
            "small_scale": torch.ones(100, 2),
            "else": torch.ones(3),
        },
        "model/model.safetensors",
    )
    return rows


SHARDS = ["model", "--tensor", "t.shard_0.weight", "--tensor", "t.shard_1.weight"]


def run(*args):
    return CliRunner().invoke(app, ["table", *[str(arg) for arg in args]], prog_name="engram-peft")


def succeed(*args):
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def error(*args, code: int = 2) -> str:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (code, ""), (result.output, result.exception)
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr[len("Error: ") : -1]


def test_export_writes_what_the_library_writes(weight):
    out = succeed(
        "export", *SHARDS, "--head-sizes", "30,70", "--output", "new/table.safetensors", "--chunk-bytes", 512
    )
    export_table(weight, [30, 70], "library.safetensors", chunk_bytes=512)
    assert Path("new/table.safetensors").read_bytes() == Path("library.safetensors").read_bytes()
    assert "100 x 8 float32, 32 bytes each" in out and "2: 30, 70" in out


def test_scales_go_along(weight):
    found = json.loads(
        succeed("export", "model", "--tensor", "small", "--scales", "small_scale", "-o", "t.safetensors", "--json")
    )
    assert (found["dtype"], found["scale_dtype"], found["scale_block"], found["row_bytes"]) == (
        "int8",
        "float32",
        4,
        16,
    )
    assert "int8, a float32 a 4, 16 bytes each" in succeed("info", "t.safetensors")


def test_info_reads_either(weight):
    succeed("export", *SHARDS, "--output", "t.safetensors")
    mine = json.loads(succeed("info", "t.safetensors", "--json"))
    theirs = json.loads(succeed("info", *SHARDS, "--json"))
    assert (mine["rows"], mine["digests"]) == (100, True)
    assert (theirs["rows"], theirs["digests"]) == (100, False)
    assert mine["resident"] is None or 0 <= mine["resident"] <= 1
    assert "digests   no" in succeed("info", *SHARDS)
    export_table(weight, None, "h.safetensors", hash={"seed": 7})
    assert "hash      {'seed': 7}" in succeed("info", "h.safetensors")


def test_verify_finds_a_flipped_bit(weight):
    export_table(weight, None, "t.safetensors")
    assert json.loads(succeed("verify", "t.safetensors", "--json"))["bytes"] == 3200
    assert "t.safetensors is as it was written: 3.2 kB" in succeed("verify", "t.safetensors")
    content = bytearray(Path("t.safetensors").read_bytes())
    content[5000] ^= 1
    Path("t.safetensors").write_bytes(content)
    assert "t.safetensors is damaged: rows 0 to 99 have the digest" in error("verify", "t.safetensors")


@pytest.mark.parametrize("draw", ["uniform", "zipf"])
def test_bench_gathers(weight, draw):
    found = json.loads(
        succeed("bench", *SHARDS, "--head-sizes", "30,70", "--rows", 20, "--gathers", 5, "--draw", draw, "--json")
    )
    assert (found["rows"], found["gathers"], found["placement"]) == (20, 5, "mmap")
    assert 0 < found["milliseconds"]["p50"] <= found["milliseconds"]["max"]
    export_table(weight, None, "t.safetensors")
    assert "3 gathers, 60 rows" in succeed(
        "bench", "t.safetensors", "--rows", 20, "--gathers", 3, "--placement", "ram"
    )


def test_what_cannot_be_used_is_said(weight):
    export_table(weight, None, "t.safetensors")
    assert error("export", "model", "-o", "x.safetensors") == "Name the checkpoint's table: --tensor."
    assert "exists already" in error("export", *SHARDS, "-o", "t.safetensors")
    assert "--tensor: model holds no 'nothing'" in error(
        "export", "model", "--tensor", "nothing", "-o", "x.safetensors"
    )
    assert "--head-sizes adds up to 101 rows" in error("info", *SHARDS, "--head-sizes", "100,1")
    assert "such as 500,700; got '1,x'" in error("info", *SHARDS, "--head-sizes", "1,x")
    assert "was not written by export_table" in error("info", "model/model.safetensors")
    assert "does not exist" in error("verify", "nothing.safetensors")
    with open_table("t.safetensors") as table:
        assert torch.equal(table.gather(torch.arange(100)), weight)
