"""N-gram memory layers against others': engram-peft 1.2.7 of PyPI, transformers' Qwen4 layer, and the Engram paper's demo.

    pip install --no-deps --target /tmp/rival engram-peft==1.2.7 jaxtyping wadler-lindig typeguard
    python benchmarks/ngram_layer.py --engram-peft /tmp/rival            # about five minutes
    python benchmarks/ngram_layer.py --engram-peft /tmp/rival --demo engram_demo_v1.py

engram-peft is the name of somebody else's distribution, whose import name is ours too: it is imported from that folder, in a
process of its own. So is every side, in turns, so that their peaks of memory do not mix and a busy minute hits all alike.

Two memory layers of width 576, each 2 x 8 tables of 100,000 slots x 64; 4 x 512 tokens of Python's documentation, word by word;
one thread, float32. Times are CPU milliseconds, the least of all rounds. A training step is forward, backward and the
optimizer's step: ours is `create_optimizer`, engram-peft's SparseAdam and Adam as its `get_optimizer` builds them, the others'
AdamW, which is what `Trainer` takes. The table that is printed is also written to `benchmarks/results/ngram_layer.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import pydoc_data.topics
import re
import statistics
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn


HIDDEN, HEADS, SLOTS, DIM, VOCABULARY = 576, 8, 100_000, 64, 49152
BATCH, LENGTH = 4, 512
LAYERS = (0, 1)
WARM_UP, REPEATS = 2, 8
RESULTS = Path(__file__).parent / "results" / "ngram_layer.md"

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Side:
    """One implementation.

    **Attributes**:
        - **read** -- hidden states `(batch, length, width)` and ids `(batch, length)` -> hidden states after all layers.
        - **tables** -- its tables' parameters.
        - **optimizers** -- together of all its parameters.
    """

    read: Read
    tables: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]


def text_batches() -> Iterator[torch.Tensor]:
    """Word ids of Python's documentation, the commonest word first, `(BATCH, LENGTH)`; over and over."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()))
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    rank = {word: i for i, word in enumerate(sorted(counts, key=lambda word: -counts[word]))}
    ids = torch.tensor([rank[word] for word in words])
    size = BATCH * LENGTH
    return cycle(ids[: len(ids) // size * size].view(-1, BATCH, LENGTH))


def ours(variant: str, row_wise: bool) -> Side:
    from engram_peft.memory import NgramMemory, NgramMemorySpec, NgramTable, token_reach
    from engram_peft.training import create_optimizer

    spec = NgramMemorySpec(
        hidden_size=HIDDEN, layer_ids=LAYERS, vocab_size=SLOTS, compressed_vocab_size=VOCABULARY, variant=variant,
        n_heads=HEADS, head_dim=DIM, eos_token_id=VOCABULARY - 1 if variant == "qwen_ple" else None,
    )  # fmt: skip
    memories = nn.ModuleList(NgramMemory(spec, layer_id) for layer_id in LAYERS)
    optimizer = create_optimizer(memories, lr=1e-3, row_wise=row_wise)

    def read(hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        reach = token_reach(ids, eos_token_id=spec.eos_token_id, limit=spec.lookback)
        history = nn.functional.pad(ids, (spec.ids_lookback, 0))
        for memory in memories:
            hidden_states = hidden_states + memory(hidden_states, history, reach)[0]
        return hidden_states

    return Side(read, [module.weight for module in memories.modules() if isinstance(module, NgramTable)], [optimizer])


def engram_peft(folder: str) -> Side:
    if not hasattr(typing, "override"):  # it was written for Python 3.12
        from typing_extensions import override

        typing.override = override  # type: ignore[attr-defined]
    sys.path.insert(0, folder)
    import engram_peft as rival
    from engram_peft.layer import EngramLayer

    config = rival.EngramConfig(
        engram_vocab_size_per_ngram=[SLOTS * HEADS] * 2, n_head_per_ngram=HEADS, embedding_dim=2 * HEADS * DIM, hc_mult=1,
        target_layers=list(LAYERS), hidden_size=HIDDEN, compressed_vocab_size=VOCABULARY, pad_id=0,
    )  # fmt: skip
    same = types.SimpleNamespace(map_id=lambda token: token, compress=lambda ids: ids)  # nobody compresses here
    layers = nn.ModuleList()
    for layer_id in LAYERS:
        mapping = rival.layer.create_hash_mapping(
            compressed_vocab_size=VOCABULARY, engram_vocab_size_per_ngram=config.engram_vocab_size_per_ngram,
            ngram_sizes=config.ngram_sizes, n_head_per_ngram=HEADS, layer_ids=[layer_id], pad_id=0, seed=0,
        )  # fmt: skip
        primes = [prime for order in mapping.prime_tables[layer_id] for prime in order]
        layers.append(EngramLayer(config, layer_id, primes, same))
    tables = [layer.multi_head_embedding.embedding.weight for layer in layers]
    dense = [p for p in layers.parameters() if not any(p is table for table in tables)]
    optimizers: list[Any] = [torch.optim.SparseAdam(tables, lr=5e-3), torch.optim.Adam(dense, lr=1e-3)]

    def read(hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden_states = layer(input_ids=ids, hidden_states=hidden_states)
        return hidden_states

    return Side(read, tables, optimizers)


def transformers_layer(sparse: bool) -> Side:
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

    config = Qwen4ExpTextConfig(
        hidden_size=HIDDEN, hc_count=2, num_hidden_layers=2, layer_types=["linear_attention"] * 2, vocab_size=VOCABULARY,
        ple_layer_ids=[1, 2], ple_embed_dim=2 * HEADS * DIM, heads_per_ngram=HEADS, ngram_vocab_size_base=SLOTS,
        eos_token_id=VOCABULARY - 1,
    )  # fmt: skip
    config.hc_count = 1  # one stream, as in the others; only the whole model refuses it
    layers = nn.ModuleList(Qwen4ExpTextPLELayer(config, i, i) for i in LAYERS)
    embeddings = [layer.ple_embedding.ngram_embedding for layer in layers]
    tables = [embedding.weight for embedding in embeddings]
    if sparse:
        for embedding in embeddings:
            embedding.sparse = True
        dense = [p for p in layers.parameters() if not any(p is table for table in tables)]
        optimizers: list[Any] = [torch.optim.SparseAdam(tables, lr=5e-3), torch.optim.AdamW(dense, lr=1e-3)]
    else:
        optimizers = [torch.optim.AdamW(layers.parameters(), lr=1e-3, fused=True)]

    def read(hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden_states = hidden_states + layer(hidden_states, ids, None)
        return hidden_states

    return Side(read, tables, optimizers)


def demo(path: str) -> Side:
    """The layer of the paper's demo, which reads its sizes from globals and its vocabulary from a tokenizer."""
    found = importlib.util.spec_from_file_location("engram_demo", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["engram_demo"] = module
    found.loader.exec_module(module)

    class Uncompressed:
        lookup_table = torch.arange(VOCABULARY).numpy()

        def __init__(self, tokenizer_name_or_path: str) -> None:
            pass

        def __len__(self) -> int:
            return VOCABULARY

        def __call__(self, input_ids: torch.Tensor) -> Any:
            return input_ids.numpy()

    module.CompressedTokenizer = Uncompressed  # type: ignore[attr-defined]
    for name, value in {
        "engram_vocab_size": [SLOTS, SLOTS], "n_embed_per_ngram": HEADS * DIM, "n_head_per_ngram": HEADS, "layer_ids": LAYERS,
        "pad_id": 0,
    }.items():  # fmt: skip
        setattr(module.engram_cfg, name, value)
    module.backbone_config.hidden_size, module.backbone_config.hc_mult = HIDDEN, 1
    layers = nn.ModuleList(module.Engram(layer_id) for layer_id in LAYERS)

    def read(hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden_states = hidden_states + layer(hidden_states.unsqueeze(2), ids).squeeze(2)
        return hidden_states

    tables = [layer.multi_head_embedding.embedding.weight for layer in layers]
    return Side(read, tables, [torch.optim.AdamW(layers.parameters(), lr=1e-3, fused=True)])


def measure(side: Side) -> dict[str, float]:
    """CPU milliseconds of a forward pass and of a training step, MB at the peak of a step, and of the tables' state."""
    torch.manual_seed(0)
    for table in side.tables:
        nn.init.normal_(table, std=0.02)  # also what starts at zero
    batches = text_batches()

    def forward() -> None:
        with torch.no_grad():
            side.read(torch.randn(BATCH, LENGTH, HIDDEN), next(batches))

    def step() -> None:
        for optimizer in side.optimizers:
            optimizer.zero_grad()
        hidden_states = torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True)
        side.read(hidden_states, next(batches)).square().mean().backward()
        for optimizer in side.optimizers:
            optimizer.step()

    measured = {"forward": _least(forward)}
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _megabytes("VmRSS")
    measured["step"] = _least(step)
    measured["peak"] = _megabytes("VmHWM") - before
    states = [o.state[table] for o in side.optimizers for table in side.tables if table in o.state]
    measured["state"] = sum(v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor)) / 2**20
    return measured


def measure_decoding() -> dict[str, float]:
    """CPU milliseconds a token of greedy decoding, in SmolLM2-135M's shape without and with two memories."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from engram_peft.models.engram import EngramForCausalLM, EngramLMConfig

    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=2,
    )  # fmt: skip
    base, backbone = (AutoModelForCausalLM.from_config(shape).eval() for _ in range(2))
    config = EngramLMConfig.from_backbone(
        shape, engram_layer_ids=[1, 14], engram_vocab_size=SLOTS, engram_n_heads=HEADS, engram_head_dim=DIM
    )
    model = EngramForCausalLM.from_backbone(backbone, config).eval()
    ids, tokens = next(text_batches())[:1, :128], 32
    seconds: dict[str, list[float]] = {"base": [], "memory": []}
    for round_ in range(13):
        for name, runner in (("base", base), ("memory", model)):
            started = time.process_time()
            runner.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            if round_:  # the first warms up
                seconds[name].append((time.process_time() - started) / tokens)
    return {name: min(values) * 1e3 for name, values in seconds.items()}


def _least(work: Callable[[], None]) -> float:
    times = []
    for turn in range(WARM_UP + REPEATS):
        started = time.process_time()
        work()
        if turn >= WARM_UP:
            times.append((time.process_time() - started) * 1e3)
    return min(times)


def _megabytes(field: str) -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


OURS = "engram_peft (deepseek)"
SIDES: dict[str, Callable[[argparse.Namespace], Side]] = {
    OURS: lambda options: ours("deepseek", row_wise=True),
    "engram_peft (deepseek), both moments": lambda options: ours("deepseek", row_wise=False),
    "engram_peft (qwen_ple)": lambda options: ours("qwen_ple", row_wise=True),
    "engram-peft 1.2.7": lambda options: engram_peft(options.engram_peft),
    "transformers' Qwen4ExpTextPLELayer": lambda options: transformers_layer(sparse=False),
    "the same, its table made sparse, SparseAdam": lambda options: transformers_layer(sparse=True),
    "the paper's demo": lambda options: demo(options.demo),
}


def run_alone(arguments: list[str]) -> dict[str, float]:
    """What this script prints last when it measures one side in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(sides: dict[str, dict[str, float]], decoding: dict[str, float], load: float) -> str:
    rivals = {name: values for name, values in sides.items() if not name.startswith("engram_peft")}
    fastest = {key: min(values[key] for values in rivals.values()) for key in ("forward", "step")}
    lines = [
        "# N-gram memory layers",
        "",
        f"Two layers of width {HIDDEN}, each 2 x {HEADS} tables of {SLOTS:,} slots x {DIM}; {BATCH} x {LENGTH} tokens of Python's "
        "documentation; float32, one thread. Times are CPU ms, the least of all rounds; a step is forward, backward and the "
        "optimizer's step. MB are the peak of resident memory over the steps, above the model, and what the optimizer keeps "
        "for the tables.",
        "",
        "| | forward, ms | of the fastest rival | step, ms | of the fastest rival | peak, MB | state of tables, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, values in sides.items():
        ratios = {key: f"**{values[key] / fastest[key]:.2f}**" for key in fastest}
        lines.append(
            f"| {name} | {values['forward']:.0f} | {ratios['forward']} | {values['step']:.0f} | {ratios['step']} "
            f"| {values['peak']:.0f} | {values['state']:.0f} |"
        )
    least = min(values["state"] for values in rivals.values())
    lines += [
        "",
        "The first two rows differ in the optimizer alone: how far their forward passes lie apart is what this measurement cannot tell.",
        "",
        f"The optimizer's state for the tables is {sides[OURS]['state'] / least:.1%} of the smallest rival's.",
        "",
        f"Decoding in SmolLM2-135M's shape: {decoding['base']:.1f} ms a token without memories, {decoding['memory']:.1f} with two "
        f"of them, **{decoding['memory'] / decoding['base']:.3f}** times.",
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}. Load of the machine while this ran: "
        f"{load:.1f} on {os.cpu_count()} cores"
        + ("; others were computing, so ratios count and milliseconds do not." if load > 1.5 else "."),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engram-peft", help="folder that engram-peft 1.2.7 was installed into")
    parser.add_argument("--demo", help="the paper's demo, engram_demo_v1.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=[*SIDES, "decoding"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side is not None:
        found = measure_decoding() if options.side == "decoding" else measure(SIDES[options.side](options))
        print(json.dumps(found))
        return

    skipped = {
        name
        for name, path in (("engram-peft 1.2.7", options.engram_peft), ("the paper's demo", options.demo))
        if not path
    }
    paths = [
        f"--{name}={path}" for name, path in (("engram-peft", options.engram_peft), ("demo", options.demo)) if path
    ]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES if name not in skipped}
    loads = []
    for _ in range(options.rounds):
        for name, found in rounds.items():
            found.append(run_alone([f"--side={name}", *paths]))
            loads.append(os.getloadavg()[0])
            print(name, {key: round(value, 1) for key, value in found[-1].items()}, flush=True)
    sides = {name: {key: min(one[key] for one in found) for key in found[0]} for name, found in rounds.items()}
    text = report(sides, run_alone(["--side=decoding"]), statistics.mean(loads))
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
