"""Collect, compute, apply and save against ai-engram: the same model, the same data, one run, one thread.

    python benchmarks/editing.py                  # SmolLM2-135M's shape with random weights, about five minutes
    python benchmarks/editing.py --layers 4       # a quick look

Each side runs in a process of its own, so that their peaks of memory do not mix. A peak is the high-water mark of the
process' resident memory over a step, less what was resident before it. Seconds are CPU seconds. The table that is printed
is also written to `benchmarks/results/editing.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel


SEQUENCE, REFERENCE, TARGET, BATCH = 128, 64, 16, 8
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def smollm2_shape(layers: int) -> PreTrainedModel:
    """SmolLM2-135M's architecture with random weights, float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def batches(sequences: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in sequences.split(BATCH)]


class Meter:
    """CPU seconds and the peak of resident memory of every step."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, step: Callable[[], Any]) -> Any:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed does not hide what is taken now
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before, started = self._megabytes("VmRSS"), time.process_time()
        result = step()
        seconds, peak = time.process_time() - started, self._megabytes("VmHWM") - before
        total = self.steps.setdefault(name, {"seconds": 0.0, "peak": 0.0})
        total["seconds"] += seconds
        total["peak"] = max(total["peak"], peak)
        return result

    @staticmethod
    def _megabytes(field: str) -> float:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def run_engram_peft(model: PreTrainedModel, ids: torch.Tensor, rank: int | None, meter: Meter) -> None:
    from peft import get_peft_model
    from transformers.utils import logging

    from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics

    logging.disable_progress_bar()

    def collect() -> Any:
        # every text once: the reference is the sum of both
        target = collect_statistics(model, batches(ids[:TARGET]), target_modules=EVERYTHING)
        return target, collect_statistics(model, batches(ids[TARGET:]), target_modules=EVERYTHING)

    target, retain = meter("collect", collect)
    peft_model = get_peft_model(model, EngramConfig(target_modules=EVERYTHING, r=rank))
    meter("compute", lambda: extract_engram(peft_model, target, merge_statistics(target, retain)))
    meter("apply", lambda: peft_model.merge_adapter(untie=True))
    with tempfile.TemporaryDirectory() as folder:
        meter("save", lambda: peft_model.save_pretrained(folder, save_embedding_layers=False))
        saved = Path(folder, "adapter_model.safetensors").stat().st_size
    meter.steps["save"]["size"] = saved / 2**20


def run_ai_engram(model: PreTrainedModel, ids: torch.Tensor, rank: int | None, meter: Meter) -> None:
    from engram import EngramEditor

    editor = EngramEditor(model)
    options: dict[str, Any] = {
        "mask_fn": lambda batch: batch["attention_mask"].bool(),
        "batch_fn": lambda batch: batch,
    }

    def collect() -> Any:
        target = editor.collect_statistics(batches(ids[:TARGET]), **options)
        return target, editor.collect_statistics(batches(ids), **options)

    target, total = meter("collect", collect)
    engram = meter("compute", lambda: editor.compute_engram_weights(target, total))
    meter("apply", lambda: editor.apply(engram, alpha=1.0))
    # it has no file format for its engram: the dense projections as they are
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engram.pt")
        projections = {name: layer.projection for name, layer in engram.layers.items()}
        meter("save", lambda: torch.save(projections, path))
        meter.steps["save"]["size"] = path.stat().st_size / 2**20


def measure_forward(model: PreTrainedModel, ids: torch.Tensor, meter: Meter) -> None:
    def forward(runner: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in batches(ids):
                runner(**batch, use_cache=False)

    meter("plain forward", lambda: forward(model))
    meter("body forward", lambda: forward(model.model))


def run_side(side: str, layers: int, rank: int | None) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    model = smollm2_shape(layers)
    ids = torch.randint(3, 49152, (REFERENCE, SEQUENCE), generator=torch.Generator().manual_seed(1))
    meter = Meter()
    with torch.no_grad():
        model.model(input_ids=ids[:BATCH])  # warm up
    if side == "forward":
        measure_forward(model, ids, meter)
    elif side == "engram_peft":
        run_engram_peft(model, ids, rank, meter)
    else:
        run_ai_engram(model, ids, rank, meter)
    return meter.steps


def few_rows_size(layers: int) -> float:
    """The saved adapter of every `down_proj` for 80 target tokens, as a share of the dense deltas."""
    from peft import get_peft_model

    from engram_peft import EngramConfig, collect_statistics, extract_engram, merge_statistics

    model = smollm2_shape(layers)
    ids = torch.randint(3, 49152, (9, 128), generator=torch.Generator().manual_seed(1))
    peft_model = get_peft_model(model, EngramConfig(target_modules=["down_proj"]))
    target = collect_statistics(peft_model, [ids[:1, :80]])
    retain = collect_statistics(peft_model, batches(ids[1:]))
    extract_engram(peft_model, target, merge_statistics(target, retain))
    with tempfile.TemporaryDirectory() as folder:
        peft_model.save_pretrained(folder)
        saved = Path(folder, "adapter_model.safetensors").stat().st_size
    return saved / (layers * 576 * 1536 * 4)


def in_a_process(*arguments: str) -> Any:
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def table(
    ours: dict[str, Any],
    truncated: dict[str, Any],
    theirs: dict[str, Any],
    forward: dict[str, Any],
    share: float,
    layers: int,
    rank: int,
) -> str:
    import importlib.metadata

    def total(steps: dict[str, Any]) -> float:
        return sum(steps[name]["seconds"] for name in ("collect", "compute", "apply"))

    def cells(name: str, what: str, unit: str) -> str:
        rival = theirs[name][what]
        row = f"| {name}, {unit} | {rival:.1f} "
        return (
            row
            + "".join(f"| {side[name][what]:.1f} | **{side[name][what] / rival:.2f}** " for side in (ours, truncated))
            + "|"
        )

    def times(name: str) -> str:
        return f"{ours['collect']['seconds'] / forward[name]['seconds']:.2f} times"

    lines = [
        "# Editing against ai-engram",
        "",
        f"SmolLM2-135M's shape with random weights, {layers} layers, float32; {REFERENCE} x {SEQUENCE} reference tokens, of which "
        f"{TARGET} x {SEQUENCE} are the target; every linear layer and the head; one thread. The target has more rows than the layers "
        "are wide, which is the least favourable case: the exact edit has full rank. Seconds are CPU seconds, MB are peaks of resident "
        "memory over the step. Ratios are ours over theirs, from one run.",
        "",
        f"| | ai-engram {importlib.metadata.version('ai-engram')} | engram_peft, exact (`r=None`) | ratio | engram_peft, `r={rank}` | ratio |",
        "|---|---|---|---|---|---|",
        *(cells(name, "seconds", "s") for name in ("collect", "compute", "apply", "save")),
        f"| end to end, s | {total(theirs):.1f} "
        + "".join(f"| {total(side):.1f} | **{total(side) / total(theirs):.2f}** " for side in (ours, truncated))
        + "|",
        *(cells(name, "peak", "MB") for name in ("collect", "compute", "apply")),
        cells("save", "size", "MB on disk"),
        "",
        f"Collecting costs {times('plain forward')} a plain forward pass over the same tokens, and {times('body forward')} one without "
        "the head. A smaller `r` makes the exact edit of such a target small.",
        "",
        f"For 80 target tokens the saved adapter of every `down_proj` takes {share:.1%} of the dense deltas.",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="number of decoder layers")
    parser.add_argument("--rank", type=int, default=64, help="rank of the truncated run")
    parser.add_argument("--side", choices=["engram_peft", "ai_engram", "forward", "size"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side == "size":
        print(few_rows_size(args.layers))
        return
    if args.side:
        print(json.dumps(run_side(args.side, args.layers, args.rank or None)))
        return
    layers = f"--layers={args.layers}"
    theirs = in_a_process("--side=ai_engram", layers)
    ours = in_a_process("--side=engram_peft", layers, "--rank=0")
    forward = in_a_process("--side=forward", layers)
    truncated = in_a_process("--side=engram_peft", layers, f"--rank={args.rank}")
    share = in_a_process("--side=size", layers)
    text = table(ours, truncated, theirs, forward, share, args.layers, args.rank)
    print(text)
    if args.layers == 30:
        Path(__file__).with_name("results").joinpath("editing.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
