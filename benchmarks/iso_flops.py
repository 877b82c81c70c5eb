"""Is a memory worth its computation? Tiny models with the same active parameters, on the same text, for the same steps.

    python benchmarks/iso_flops.py                 # three models, three seeds: about four CPU minutes
    python benchmarks/iso_flops.py --steps 50 --seeds 1

| model | |
|---|---|
| dense | its feed-forward blocks are wider, by what the memory of the others costs a token |
| memory | one n-gram memory |
| one row | the same memory, but every n-gram reads the same row: its parameters and its computation without its knowledge |

The text is Python's documentation (see `examples/pretrain_tiny.py`); one pass over it at most. All models are trained with
`create_optimizer` at the same rate, on the same batches. What is printed is also written to `benchmarks/results/iso_flops.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, get_scheduler, set_seed

from engram_peft.memory import NgramTable
from engram_peft.models.engram import EngramForCausalLM, EngramLMConfig
from engram_peft.training import create_optimizer


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from pretrain_tiny import new_tokenizer, split_documentation, token_blocks  # noqa: E402


HIDDEN, INTERMEDIATE, LAYERS, MEMORY_LAYER = 64, 192, 3, 1
HEADS, DIM, SLOTS = 4, 16, 20_000
BATCH, RATE = 16, 4e-3
VALIDATION = 208  # sequences: whole batches
RESULTS = Path(__file__).parent / "results" / "iso_flops.md"


class OneRow(nn.Module):
    """A table whose every lookup is the same row, `(..., tables)` -> `(..., tables, dim)`."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(tables, dim))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.row.expand(*rows.shape, -1)


def backbone_config(vocab_size: int, intermediate_size: int = INTERMEDIATE) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=intermediate_size, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip


def with_memory(vocab_size: int) -> EngramForCausalLM:
    config = EngramLMConfig.from_backbone(
        backbone_config(vocab_size), engram_layer_ids=[MEMORY_LAYER], engram_n_heads=HEADS, engram_head_dim=DIM,
        engram_vocab_size=SLOTS, engram_eos_token_id=0,
    )  # fmt: skip
    return EngramForCausalLM(config)


def with_one_row(vocab_size: int) -> EngramForCausalLM:
    model = with_memory(vocab_size)
    for memory in model.memories.values():
        memory.table = OneRow(len(memory.table.head_sizes), DIM)
    return model


def dense(vocab_size: int) -> PreTrainedModel:
    difference = active_parameters(with_one_row(vocab_size)) - active_parameters(
        AutoModelForCausalLM.from_config(backbone_config(vocab_size))
    )
    wider = INTERMEDIATE + round(difference / (3 * HIDDEN * LAYERS))
    return AutoModelForCausalLM.from_config(backbone_config(vocab_size, wider))


def active_parameters(model: nn.Module) -> int:
    """Parameters that a token uses: of tables, the rows that it reads."""
    tables = [module for module in model.modules() if isinstance(module, NgramTable)]
    stored = sum(table.weight.numel() for table in tables)
    return sum(p.numel() for p in model.parameters()) - stored + sum(len(t.head_sizes) * DIM for t in tables)


def train(model: PreTrainedModel, batches: torch.Tensor) -> None:
    """One step a batch, `(steps, BATCH, length)`."""
    optimizer = create_optimizer(model, lr=RATE)
    scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=len(batches) // 20, num_training_steps=len(batches)
    )
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.inference_mode()
def validation_loss(model: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Mean over all tokens, in nats."""
    model.eval()
    return statistics.mean(model(input_ids=ids, labels=ids).loss.item() for ids in blocks[:VALIDATION].split(BATCH))


MODELS: dict[str, Callable[[int], PreTrainedModel]] = {"dense": dense, "memory": with_memory, "one row": with_one_row}


@dataclass
class Run:
    """One model after its training: validation loss in nats, CPU seconds, and numbers of parameters."""

    loss: float
    seconds: float
    active: int
    stored: int


def run(name: str, seed: int, steps: int, vocab_size: int, training: torch.Tensor, others: torch.Tensor) -> Run:
    """Trains a new model of this name; the seed is that of its weights and of the order of the texts."""
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    set_seed(seed)
    model = MODELS[name](vocab_size)
    started = time.process_time()
    train(model, training[order[: steps * BATCH]].view(-1, BATCH, training.shape[1]))
    seconds = time.process_time() - started
    return Run(validation_loss(model, others), seconds, active_parameters(model), model.num_parameters())


def report(
    runs: dict[str, list[Run]], steps: int, vocab_size: int, training: torch.Tensor, others: torch.Tensor
) -> str:
    lines = [
        "# Same computation, with and without a memory",
        "",
        f"Llama-like models of width {HIDDEN} with {LAYERS} layers and {vocab_size} tokens; the memory before layer "
        f"{MEMORY_LAYER} (counted from 0), 2 x {HEADS} tables of {SLOTS:,} slots x {DIM}. {steps} steps of {BATCH} x "
        f"{training.shape[1]} tokens of Python's documentation, {steps * BATCH / len(training):.2f} passes over it; "
        f"validation on {VALIDATION * training.shape[1]:,} tokens of other documents; `create_optimizer(lr={RATE})`. Losses are "
        "nats a token, mean and range of the seeds; seconds are CPU seconds of training on one thread.",
        "",
        "| | validation loss | lowest to highest | against dense | active parameters | stored parameters | s |",
        "|---|---|---|---|---|---|---|",
    ]
    means = {name: statistics.mean(one.loss for one in found) for name, found in runs.items()}
    for name, found in runs.items():
        losses = [one.loss for one in found]
        lines.append(
            f"| {name} | **{means[name]:.3f}** | {min(losses):.3f} to {max(losses):.3f} | {means[name] - means['dense']:+.3f} "
            f"| {found[0].active:,} | {found[0].stored:,} | {statistics.mean(one.seconds for one in found):.0f} |"
        )
    lines += [
        "",
        f"{len(runs['dense'])} seeds. Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}. Load of "
        f"the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        + ("; others were computing, which lengthens the seconds." if os.getloadavg()[0] > 1.5 else "."),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training_texts, other_texts = split_documentation()
    tokenizer = new_tokenizer(training_texts)
    data = (len(tokenizer), token_blocks(tokenizer, training_texts), token_blocks(tokenizer, other_texts))
    runs: dict[str, list[Run]] = {name: [] for name in MODELS}
    for seed in range(options.seeds):
        for name, found in runs.items():
            found.append(run(name, seed, options.steps, *data))
            print(seed, name, found[-1], flush=True)
    text = report(runs, options.steps, *data)
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
