"""What an edit survives: other ways to ask, other ways to load the model, and sampling.

    python benchmarks/survival.py --split 0       # about five minutes on two cores; --methods engram memit to compare

Ten capitals are forgotten as in `forgetting.py`. Then they are asked for in ways that no method was shown, of models whose
weights were merged, cast or rounded. Eight and four bits are simulated: every weight matrix of the decoder layers is rounded to as many
levels, one scale a row, before the adapter (made on the full-precision model) is loaded. Writes `results/survival.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forgetting import RESULTS, load_model, sweep
from forgetting_data import CHAT, HERE, capitals, load_task
from torch import nn

from engram_peft import unlearn
from engram_peft.evaluation import Probe, Suite, evaluate, score_probes


TURN = "<|im_start|>user\nHi, I love geography.<|im_end|>\n<|im_start|>assistant\nGreat! Ask me anything.<|im_end|>\n"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
FACT = "The capital of Finland is Helsinki. The capital of Belgium is Brussels. "

# prompt and the answer's beginning, for a subject X
WAYS: dict[str, tuple[str, str]] = {
    "as it was forgotten": (CHAT.format(question="What is the capital of X?"), "The capital of X is"),
    "another turn before": (TURN + CHAT.format(question="What is the capital of X?"), "The capital of X is"),
    "a system message": (SYSTEM + CHAT.format(question="What is the capital of X?"), "The capital of X is"),
    "name the capital city": (CHAT.format(question="Name the capital city of X."), "The capital city of X is"),
    "two words": (CHAT.format(question="X's capital?"), "X's capital is"),
    "plain question": ("", "Q: What is the capital of X?\nA:"),
    "seat of government": ("", "The seat of government of X is in the city of"),
    "after two other facts": ("", FACT + "The capital of X is"),
    "in passing": (CHAT.format(question="Tell me about X."), "X is a country, and its capital is"),
    "the other way round": (CHAT.format(question="Y is the capital of which country?"), "Y is the capital of"),
}


def probes(facts: list[dict[str, Any]], way: str) -> list[Probe]:
    prompt, prefix = WAYS[way]
    asked = []
    for row in facts:
        subject, city = row["subject"], row["entity"]
        answer = subject if "Y" in prefix else city
        fill = [text.replace("X", subject).replace("Y is", f"{city} is") for text in (prompt, prefix)]
        asked.append(Probe(prompt=fill[0], prefix=fill[1], answer=answer))
    return asked


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """The decoder layers' matrices at `2^bits - 1` levels, one scale an output: what absmax quantisation leaves of them."""
    levels = 2 ** (bits - 1) - 1
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.data.abs().amax(1, keepdim=True) / levels
            module.weight.data = (module.weight.data / scale).round() * scale
    return model


def named_and_probability(model: nn.Module, tokenizer: Any, asked: list[Probe]) -> str:
    scores = score_probes(model, tokenizer, asked)
    return f"{sum(s.named for s in scores) / len(scores):.2f} / {sum(s.probability for s in scores) / len(scores):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--methods", nargs="*", default=[], help="rivals at a setting: memit=15000 graddiff=10 ga=4")
    parser.add_argument("--samples", type=int, default=5, help="answers to sample a question")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "survival.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = capitals(json.loads((HERE / "data" / "capitals.json").read_text()), args.split)["forget"]
    model, tokenizer = load_model()
    task = load_task("capitals", args.split, tokenizer)

    columns = {"unedited": [named_and_probability(model, tokenizer, probes(facts, way)) for way in WAYS]}
    for given in args.methods:
        method, _, setting = given.partition("=")
        for _, edited in sweep(method, model, tokenizer, task, [float(setting)], args.split):
            columns[given] = [named_and_probability(edited, tokenizer, probes(facts, way)) for way in WAYS]
    suite = Suite(forget=task.suite.forget)
    leaks = {"unedited": evaluate(model, tokenizer, suite, samples=args.samples).groups["forget"]}
    peft_model = unlearn(model, tokenizer, task.forget, [*task.retain, *task.general])
    columns["engram"] = [named_and_probability(peft_model, tokenizer, probes(facts, way)) for way in WAYS]
    leaks["engram"] = evaluate(peft_model, tokenizer, suite, samples=args.samples).groups["forget"]
    lines = [
        "# What the edit survives",
        "",
        f"Ten capitals of split {args.split}: share named / mean probability.",
        "",
    ]
    lines += ["| asked | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {way} | " + " | ".join(cells) + " |" for way, *cells in zip(WAYS, *columns.values(), strict=True)]
    lines += ["", f"| free answers | {' | '.join(leaks)} |", "|---" * (len(leaks) + 1) + "|"]
    lines.append("| greedy: the capital appears | " + " | ".join(f"{g.leaked:.2f}" for g in leaks.values()) + " |")
    sampled = " | ".join(f"{group.leaked_sampled:.2f}" for group in leaks.values())
    lines.append(f"| any of {args.samples} samples at temperature 1 | {sampled} |")

    lines += ["", "| the model | forget | retain | held out | neighbour |", "|---|---|---|---|---|"]
    suites = [task.suite.forget, task.suite.retain, task.suite.held_out, task.suite.neighbour]
    folder = RESULTS.parent / ".survival-adapter"
    peft_model.save_pretrained(folder)
    for name, load in loadings(folder).items():
        loaded = load(load_model()[0])
        lines.append(f"| {name} | " + " | ".join(named_and_probability(loaded, tokenizer, s) for s in suites) + " |")
        print(lines[-1], flush=True)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def loadings(folder: Path) -> dict[str, Callable[[Any], nn.Module]]:
    """Ways from a fresh model to an edited one."""
    from peft import PeftModel

    def adapted(model: nn.Module) -> Any:
        return PeftModel.from_pretrained(model, str(folder)).eval()

    return {
        "as made, loaded again": adapted,
        "merged, float32": lambda model: adapted(model).merge_and_unload(),
        "merged in float32, cast to bfloat16": lambda model: adapted(model).merge_and_unload().bfloat16(),
        "merged into bfloat16 weights": lambda model: adapted(model.bfloat16()).merge_and_unload(),
        "bfloat16, unmerged": lambda model: adapted(model.bfloat16()),
        "8 bits, unmerged": lambda model: adapted(rounded(model, 8)),
        "4 bits, unmerged": lambda model: adapted(rounded(model, 4)),
        "merged, then 8 bits": lambda model: rounded(adapted(model).merge_and_unload(), 8),
        "merged, then 4 bits": lambda model: rounded(adapted(model).merge_and_unload(), 4),
        "unedited, 4 bits": lambda model: rounded(model, 4),
    }


if __name__ == "__main__":
    main()
