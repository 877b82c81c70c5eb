"""A domain learnt with an n-gram memory, with LoRA, with both, and with engram-peft 1.2.7, at equal trained numbers and steps.

    python benchmarks/domain_memory.py --engram-peft FOLDER --bf16      # four ways, three seeds: half an hour of one core
    python benchmarks/domain_memory.py --steps 10 --seeds 1             # a quick look

SmolLM2-135M-Instruct learns Python's documentation, as in `examples/domain_memory.py`. Every way and seed runs in a process of its
own, on the same batches. engram-peft is optional: `pip install --no-deps --target FOLDER engram-peft==1.2.7`, and what it imports.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import set_seed


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import domain_memory as example  # noqa: E402
from common import load_model, load_tokenizer  # noqa: E402
from pretrain_tiny import LENGTH, split_documentation, token_blocks  # noqa: E402

from engram_peft import create_optimizer  # noqa: E402


RESULTS = Path(__file__).parent / "results" / "domain_memory.md"
RIVAL = "engram-peft 1.2.7"
# 8 tables a layer of about 5,000 slots x 32: as the memory of the example
RIVAL_CONFIG = {
    "engram_vocab_size_per_ngram": [20_000, 20_000], "n_head_per_ngram": 4, "embedding_dim": 256, "hc_mult": 1,
    "target_layers": [1, 14], "hidden_size": 576, "learning_rate_multiplier": example.TABLE_LR_RATIO,
}  # fmt: skip


def rival_model(model: torch.nn.Module, tokenizer: Any, folder: str) -> tuple[Any, torch.optim.Optimizer]:
    """The model wrapped by engram-peft, and the optimizer that it makes. It has this package's name, so takes its place here."""
    if not hasattr(typing, "override"):  # it was written for Python 3.12
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.partition(".")[0] == "engram_peft"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    import engram_peft as rival

    wrapped = rival.get_engram_model(model, rival.EngramConfig(**RIVAL_CONFIG), tokenizer)
    return wrapped, rival.get_optimizer(wrapped, base_learning_rate=example.LEARNING_RATE)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One way and seed: losses, CPU milliseconds a step, MB of optimizer state and of files."""
    tokenizer, model = load_tokenizer(None), load_model(None)
    data = load_file(options.data)
    general = [(ids, int(name.split("/")[2])) for name, ids in sorted(data.items()) if name.startswith("general")]
    domain = [(ids, 1) for ids in data["held_out"]]
    if options.side == "before":
        return {
            "domain": example.nats_per_token(model, domain),
            "general": example.nats_per_token(model, general),
        }
    set_seed(options.seed)
    if options.side == RIVAL:
        adapted, optimizer = rival_model(model, tokenizer, options.engram_peft)
    else:
        adapted = example.adapted(model, tokenizer, *example.ADAPTERS[options.side])
        optimizer = create_optimizer(adapted, lr=example.LEARNING_RATE, table_lr_ratio=example.TABLE_LR_RATIO)
    started = time.process_time()
    example.train(adapted, optimizer, data["training"], steps=options.steps, seed=options.seed, bf16=options.bf16)
    seconds = time.process_time() - started
    optimizers = getattr(optimizer, "optimizers", [optimizer])
    states = [value for one in optimizers for state in one.state.values() for value in state.values()]
    return {
        "trained": example.trained_numbers(adapted),
        "domain": example.nats_per_token(adapted, domain),
        "general": example.nats_per_token(adapted, general),
        "step": seconds / options.steps * 1e3,
        "state": sum(value.nbytes for value in states if isinstance(value, torch.Tensor)) / 2**20,
        "file": example.saved_megabytes(adapted),
    }


def write_data(path: Path) -> None:
    """What all ways learn and are measured on."""
    tokenizer, model = load_tokenizer(None), load_model(None)
    training, held_out = (token_blocks(tokenizer, texts) for texts in split_documentation())
    general = example.own_answers(model, tokenizer, example.EVALUATED)
    tensors = {f"general/{i:03}/{given}": ids for i, (ids, given) in enumerate(general)}
    save_file({"training": training, "held_out": held_out[: example.EVALUATED].clone(), **tensors}, path)


def run_alone(arguments: list[str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> str:
    """The mean, and from where to where."""
    return f"**{statistics.mean(values):.3f}** ({min(values):.3f} to {max(values):.3f})"


def report(
    before: dict[str, float], found: dict[str, list[dict[str, float]]], options: argparse.Namespace, load: float
) -> str:
    rows = [f"| as it was | | {before['domain']:.3f} | {before['general']:.3f} | | | |"]
    for name, runs in found.items():
        of = {key: [run[key] for run in runs] for key in runs[0]}
        rows.append(
            f"| {name} | {of['trained'][0]:,.0f} | {spread(of['domain'])} | {spread(of['general'])} | {min(of['step']):.0f} "
            f"| {of['state'][0]:.1f} | {of['file'][0]:.1f} |"
        )
    precision = "products in bfloat16" if options.bf16 else "float32"
    return "\n".join(
        [
            "# A domain, learnt beside the weights",
            "",
            f"SmolLM2-135M-Instruct, {options.steps} steps of {example.BATCH_SIZE} x {LENGTH} tokens of Python's documentation, "
            f"{precision}, one thread; losses in nats a token on documentation held out and on answers that the model gave "
            f"before, mean and range of {options.seeds} seeds; CPU ms are the least of the seeds; MB of optimizer state and of "
            "what is saved.",
            "",
            "| | trained numbers | domain | general | step, ms | state, MB | file, MB |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}. Load of the machine at the end: {load:.1f} "
            f"on {os.cpu_count()} cores.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="train with products in bfloat16")
    parser.add_argument("--engram-peft", help="folder that engram-peft 1.2.7 was installed into")
    for name in ("--side", "--data", "--seed"):
        parser.add_argument(name, type=int if name == "--seed" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side is not None:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.safetensors"
        write_data(data)
        given = [f"--data={data}", f"--steps={options.steps}", *(["--bf16"] if options.bf16 else [])]
        given += [f"--engram-peft={options.engram_peft}"] if options.engram_peft else []
        before = run_alone([*given, "--side=before"])
        print("before", before, flush=True)
        sides = [*example.ADAPTERS, *([RIVAL] if options.engram_peft else [])]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for seed in range(options.seeds):
            for name in sides:
                found[name].append(run_alone([*given, f"--side={name}", f"--seed={seed}"]))
                print(name, seed, {key: round(value, 3) for key, value in found[name][-1].items()}, flush=True)
    text = report(before, found, options, os.getloadavg()[0])
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
