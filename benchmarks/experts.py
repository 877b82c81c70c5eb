"""What mixtures cost: memory for experts that get no rows, and time against the number of experts.

    python benchmarks/experts.py        # a tiny Qwen3-MoE with random weights, about a minute

Two claims. A collection over few tokens holds nothing for the experts that they do not reach. Time grows no faster than the number of
experts: to collect over the same tokens, and to fill the adapter with as many rows an expert. Seconds are CPU seconds on one thread, the least of three runs. The
table that is printed is also written to `benchmarks/results/experts.md`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

import engram_peft
from engram_peft import EngramConfig, Statistics, collect_statistics, extract_engram, merge_statistics


HIDDEN, INNER, LAYERS, TOP_K = 128, 96, 2, 4
SIZES = (32, 128)
ROWS = 512  # of every expert, on average
TOKENS, FEW_TOKENS = 4096, 6
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tiny_qwen3_moe(experts: int) -> PreTrainedModel:
    """Random weights; routers are random too, so that all experts are used."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=HIDDEN, moe_intermediate_size=INNER, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=experts, num_experts_per_tok=TOP_K,
        initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 512, (count // 32 or 1, min(count, 32)), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(16)]


def seconds(step: Callable[[], Any]) -> float:
    """The least CPU seconds of three runs."""
    taken = []
    for _ in range(3):
        started = time.process_time()
        step()
        taken.append(time.process_time() - started)
    return min(taken)


def held(statistics: Statistics, used: bool) -> tuple[int, int]:
    """How many moments have rows, or have none, and the bytes that they hold."""
    moments = [moment for moment in statistics.moments.values() if bool(moment.count) == used]
    return len(moments), sum(tensor.nbytes for moment in moments for tensor in moment.tensors())


def grown(experts: int) -> dict[str, float]:
    """Seconds to collect over `TOKENS` tokens, and to fill with `ROWS` rows an expert, a quarter of them target."""
    model = get_peft_model(tiny_qwen3_moe(experts), EngramConfig(target_modules=[], target_parameters=STACKS))
    count = ROWS * experts // TOP_K
    forget, keep = tokens(count // 4, 1), tokens(3 * count // 4, 2)
    target = collect_statistics(model, forget)
    total = merge_statistics(target, collect_statistics(model, keep))
    same = tokens(TOKENS, 4)
    return {
        f"collect over {TOKENS} tokens": seconds(lambda: collect_statistics(model, same)),
        f"fill, with {ROWS} rows an expert": seconds(lambda: extract_engram(model, target, total)),
    }


def main() -> None:
    torch.set_num_threads(1)
    few = collect_statistics(tiny_qwen3_moe(SIZES[-1]), tokens(FEW_TOKENS, 3), target_parameters=STACKS)
    (used, used_bytes), (idle, idle_bytes) = held(few, True), held(few, False)
    times = {experts: grown(experts) for experts in SIZES}
    small, large = SIZES
    factor = large / small
    lines = [
        "# Mixtures of experts",
        "",
        f"A Qwen3-MoE with random weights: {LAYERS} layers, hidden size {HIDDEN}, experts of {INNER}, {TOP_K} experts a token; float32, "
        "one thread, CPU seconds.",
        "",
        f"{FEW_TOKENS} tokens through {SIZES[-1]} experts: {used} of {used + idle} inputs are used and hold {used_bytes / 1024:.0f} KiB; the "
        f"{idle} others hold {idle_bytes} bytes.",
        "",
        f"| | {small} experts | {large} experts | ratio, {factor:g} is linear |",
        "|---|---|---|---|",
        *(
            f"| {step}, s | {times[small][step]:.2f} | {times[large][step]:.2f} | **{times[large][step] / times[small][step]:.2f}** |"
            for step in times[small]
        ),
        "",
        f"engram_peft {engram_peft.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}.",
    ]
    print("\n".join(lines))
    (Path(__file__).parent / "results" / "experts.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
