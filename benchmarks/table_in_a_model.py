"""A model with a large table on disk: how much memory generating takes, and how fast it is, beside the same model with it in memory.

    python benchmarks/table_in_a_model.py                     # 4 GB of table, some minutes; needs 5 GB of disk and of memory
    python benchmarks/table_in_a_model.py --megabytes 256     # a quick look

A small Qwen4Exp with random weights (transformers' own class) is written to a checkpoint, its table in shards. Three processes load it and write
the same text: with the table in memory, with the table served from the checkpoint, and without reading any row (the backbone, whose
table is one of few rows). Memory is the high-water mark of the process. Warm is the quickest of three more texts, when the rows are
in the page cache, in tokens per second of CPU time.
The table that is printed is also written to `benchmarks/results/table_in_a_model.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.utils import logging

from engram_peft.memory.tables import load_with_tables


DIM, HEADS = 128, 16
NEW_TOKENS = 64


def config_of(rows_a_head: int) -> Qwen4ExpTextConfig:
    """2 orders x 8 heads, rows of 128 bfloat16 numbers, 4 layers of width 512."""
    return Qwen4ExpTextConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"], moe_intermediate_size=256,
        shared_expert_intermediate_size=256, num_experts=8, num_experts_per_tok=2, linear_num_value_heads=8,
        linear_num_key_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, indexer_n_heads=4, indexer_kv_heads=1,
        indexer_head_dim=64, indexer_budget=256, indexer_compress_ratio=4, hc_lowrank=64, ple_layer_ids=[1],
        ple_embed_dim=DIM * HEADS, ngram_size=3, heads_per_ngram=HEADS // 2, ngram_vocab_size_base=rows_a_head,
        split_ngram_parts=16, make_ngram_vocab_size_divisible_by=64, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def make(folder: Path, megabytes: int) -> None:
    torch.manual_seed(0)
    for name, size in (("model", megabytes), ("backbone", 1)):
        with torch.device("cpu"):
            model = Qwen4ExpForCausalLM._from_config(
                config_of(size * 2**20 // (2 * DIM * HEADS)), dtype=torch.bfloat16
            )
        model.save_pretrained(folder / name)


def run(folder: Path, side: str) -> dict[str, float | list[int]]:
    torch.set_num_threads(1)
    path = folder / ("backbone" if side == "backbone" else "model")
    if side == "on disk":
        model = load_with_tables(Qwen4ExpForCausalLM, path, dtype=torch.bfloat16)
    else:
        model = Qwen4ExpForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = torch.randint(10, 8000, (1, 32), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    started = time.perf_counter()
    text = model.generate(ids, **options)
    first = time.perf_counter() - started
    seconds = []
    for _ in range(3):
        started = time.process_time()
        model.generate(ids, **options)
        seconds.append(time.process_time() - started)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return {"peak": peak, "first": NEW_TOKENS / first, "warm": NEW_TOKENS / min(seconds), "text": text[0].tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=4096, help="size of the table")
    parser.add_argument("--folder", type=Path, help="where files are made, on the disk that is measured")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if arguments.side == "make":
        return make(arguments.folder, arguments.megabytes)
    if arguments.side:
        return print(json.dumps(run(arguments.folder, arguments.side)))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:

        def in_a_process(side: str) -> str:
            command = [
                sys.executable,
                __file__,
                f"--side={side}",
                f"--folder={folder}",
                f"--megabytes={arguments.megabytes}",
            ]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

        in_a_process("make")
        sides = {
            side: json.loads(in_a_process(side).splitlines()[-1]) for side in ("backbone", "in memory", "on disk")
        }
    assert sides["on disk"]["text"] == sides["in memory"]["text"]
    above = sides["on disk"]["peak"] - sides["backbone"]["peak"]
    ratio = sides["on disk"]["warm"] / sides["in memory"]["warm"]
    text = "\n".join(
        [
            f"A table of {arguments.megabytes} MB in a small Qwen4Exp; torch {torch.__version__}, one thread, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}, {platform.platform()}",
            "",
            "| table | peak memory, MB | first text, tokens/s | warm, tokens/s of CPU |",
            "|---|---|---|---|",
            *(
                f"| {side} | {found['peak']:.0f} | {found['first']:.1f} | {found['warm']:.1f} |"
                for side, found in sides.items()
            ),
            "",
            "| check | found | limit | |",
            "|---|---|---|---|",
            f"| peak memory above the backbone's, MB | {above:.0f} | 300 | {'yes' if above <= 300 else '**no**'} |",
            f"| warm speed, as a share of that in memory | {ratio:.2f} | 0.95 | {'yes' if ratio >= 0.95 else '**no**'} |",
        ]
    )
    print(text)
    (Path(__file__).parent / "results" / "table_in_a_model.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
