"""Models with a large table on disk: how much memory generating takes, and how fast it is, beside the same models with it in memory.

    python benchmarks/table_in_a_model.py                     # 4 GB of table, some minutes; needs 10 GB of disk and 9 of memory
    python benchmarks/table_in_a_model.py --megabytes 256     # a quick look

Two small models with random weights are written to checkpoints: transformers' own Qwen4Exp, its table in shards, and an
EngramForCausalLM. Of each, three processes write the same text: with the table in memory, with the table served from the checkpoint, and
with a table of few rows (the backbone). The page cache holds nothing of the files when a process starts. Memory is the high-water mark
of the process. Warm is the quickest of three more texts, when the rows are in the page cache, in tokens per second of CPU time.
What is printed is also written to `benchmarks/results/table_in_a_model.md`.
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
from tables import drop_pages
from transformers import LlamaConfig, PreTrainedModel, Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.utils import logging

from engram_peft import EngramForCausalLM, EngramLMConfig, load_with_tables


DIM, HEADS = 128, 16
NEW_TOKENS = 64


MODELS = ("Qwen4Exp", "EngramForCausalLM")
SIDES = ("backbone", "in memory", "on disk")


def qwen_config(rows_a_head: int) -> Qwen4ExpTextConfig:
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


def engram_config(rows_a_head: int) -> EngramLMConfig:
    """The same table in a Llama of the same width."""
    backbone = LlamaConfig(
        vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1536, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return EngramLMConfig.from_backbone(
        backbone, engram_layer_ids=[1], engram_max_ngram_size=3, engram_n_heads=HEADS // 2, engram_head_dim=DIM,
        engram_vocab_size=rows_a_head,
    )  # fmt: skip


def make(folder: Path, megabytes: int) -> None:
    for size, what in ((megabytes, "model"), (1, "backbone")):
        rows_a_head = size * 2**20 // (2 * DIM * HEADS)
        for name in MODELS:
            torch.manual_seed(0)
            if name == "Qwen4Exp":
                model = Qwen4ExpForCausalLM._from_config(qwen_config(rows_a_head), dtype=torch.bfloat16)
            else:
                model = EngramForCausalLM._from_config(engram_config(rows_a_head), dtype=torch.bfloat16)
                torch.nn.init.normal_(model.memories["1"].table.weight)
            model.save_pretrained(folder / name / what)
            del model


def load(path: Path, name: str, on_disk: bool) -> PreTrainedModel:
    if name == "EngramForCausalLM":
        return EngramForCausalLM.from_pretrained(path, table_placement="mmap" if on_disk else None)
    if on_disk:
        return load_with_tables(Qwen4ExpForCausalLM, path, dtype=torch.bfloat16)
    return Qwen4ExpForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def run(folder: Path, name: str, side: str) -> dict[str, float | list[int]]:
    torch.set_num_threads(1)
    drop_pages(folder / name)
    model = load(folder / name / ("backbone" if side == "backbone" else "model"), name, side == "on disk")
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


def report(name: str, sides: dict[str, dict]) -> list[str]:
    assert sides["on disk"]["text"] == sides["in memory"]["text"]
    above = sides["on disk"]["peak"] - sides["backbone"]["peak"]
    ratio = sides["on disk"]["warm"] / sides["in memory"]["warm"]
    return [
        f"### {name}",
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
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=4096, help="size of the table")
    parser.add_argument("--folder", type=Path, help="where files are made, on the disk that is measured")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)  # what a process of its own does
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if arguments.one == ["make"]:
        return make(arguments.folder, arguments.megabytes)
    if arguments.one:
        return print(json.dumps(run(arguments.folder, *arguments.one)))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:

        def in_a_process(*one: str) -> str:
            options = [f"--folder={folder}", f"--megabytes={arguments.megabytes}", "--one", *one]
            command = [sys.executable, __file__, *options]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

        in_a_process("make")
        lines = [
            f"A table of {arguments.megabytes} MB; torch {torch.__version__}, one thread, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}, {platform.platform()}",
            "",
        ]
        for name in MODELS:
            lines += report(name, {side: json.loads(in_a_process(name, side).splitlines()[-1]) for side in SIDES})
    text = "\n".join(lines)
    print(text)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "table_in_a_model.md").write_text(text)


if __name__ == "__main__":
    main()
