"""What every option of forgetting does: variants of the default recipe, and of the paper's edit, on one split.

    python benchmarks/recipe_search.py                       # all variants on split 0: half an hour on two cores
    python benchmarks/recipe_search.py --only "rest" --split 3

Settings are chosen on split 0 alone; `forgetting.py` judges the chosen ones on others. The rows of a set of layers are collected
once and used by all variants that edit them. The paper's edit has one strength for everything, which `tune_alpha` finds. Writes
`results/recipe_search.md`. FQ, U and H are those of `forgetting.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from evidence import layers_by_causal_trace, layers_by_eigenvalues
from forgetting import RESULTS, load_model
from forgetting_data import Task, load_task

from engram_peft import EngramConfig, unlearn
from engram_peft.editing import item_edit
from engram_peft.evaluation import Evaluation, evaluate


GROUPS = ["forget", "paraphrase", "cloze", "retain", "held_out", "neighbour", "other"]


@dataclass(frozen=True)
class Variant:
    """The default recipe but for one thing."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    method: str = "items"
    evidence: Callable[..., list[int]] | None = None  # chooses the layers


VARIANTS = [
    Variant("default"),
    *(Variant(f"rest = {rest:g}", {"rest": rest}) for rest in (0.0, 0.1, 0.3, 1.0)),
    *(Variant(f"retain_weight = {weight:g}", {"retain_weight": weight}) for weight in (1.0, 10.0, 300.0)),
    *(Variant(f"forget_probability = {p:g}", {"forget_probability": p}) for p in (0.2, 0.1, 0.02)),
    Variant("null_space", {"null_space": True}),
    Variant("layers = 'auto'", {"layers": "auto"}),
    Variant("five layers, by eigenvalues", evidence=layers_by_eigenvalues),
    Variant("five layers, by a causal trace", evidence=layers_by_causal_trace),
    Variant("the last five layers", {}, {"layers_to_transform": list(range(25, 30))}),
    Variant("sequential = 3", {"sequential": 3}),
    Variant("replacement = 'unknown'", {"replacement": "unknown"}),
    Variant("lower half of the layers", {}, {"layers_to_transform": list(range(15))}),
    Variant("lower half, rest = 1", {"rest": 1.0}, {"layers_to_transform": list(range(15))}),
    Variant("last third of the layers", {}, {"layers_to_transform": list(range(20, 30))}),
    Variant("attention's outputs", {}, {"target_modules": r".*layers\.(1[5-9]|2\d)\.self_attn\.o_proj"}),
    Variant("both outputs", {}, {"target_modules": r".*layers\.(1[5-9]|2\d)\..*(o_proj|down_proj)"}),
    Variant("the MLPs' inputs", {}, {"target_modules": r".*layers\.(1[5-9]|2\d)\..*(gate_proj|up_proj)"}),
    *(
        Variant(f"paper: {name}", options, {"target_modules": ["down_proj"]}, "paper")
        for name, options in {
            "as it is": {},
            "scale = 'adaptive'": {"scale": "adaptive"},
            "token_position = 'predict'": {"token_position": "predict"},
            "token_position = 'subject'": {"token_position": "subject"},
            "retain_weight = 30": {"retain_weight": 30.0},
            "retain_weight = 30, 'predict'": {"retain_weight": 30.0, "token_position": "predict"},
            "spectral_filter = 'power'": {"spectral_filter": "power"},
            "spectral_filter = 'threshold'": {"spectral_filter": "threshold"},
            "null_space": {"null_space": True},
        }.items()
    ),
]


def collected_once(collect: Callable[..., Any]) -> Callable[..., Any]:
    """`collect_item_rows` that remembers: the rows of the same layers of the same, unedited model are the same."""
    known: dict[tuple[str, ...], Any] = {}

    def rows(model: Any, layers: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        key = tuple(layers)
        if key not in known:
            known[key] = collect(model, layers, *args, **kwargs)
        return known[key]

    return rows


def run(variant: Variant, model: Any, tokenizer: Any, task: Task, before: Evaluation) -> str:
    """The variant's row of the table."""
    started = time.perf_counter()
    chosen = {"layers_to_transform": variant.evidence(model, tokenizer, task)} if variant.evidence else {}
    config = EngramConfig(task_type="CAUSAL_LM", method=variant.method, **variant.config, **chosen)
    alpha = "auto" if variant.method == "paper" else None
    peft_model = unlearn(
        model, tokenizer, task.forget, [*task.retain, *task.general], config, alpha=alpha, **variant.options
    )
    seconds = time.perf_counter() - started
    tuner = peft_model.base_model
    report = tuner.reports["default"]
    if variant.method == "paper":
        curve = tuner.curves["default"]
        looks, outcome = len(curve.points), f"alpha {curve.chosen:.3g} ({curve.reason})"
    else:
        looks, outcome = report.rounds, f"{len(report.resisting)} resist"
    layers = len(tuner.engram_layers("default"))
    after = evaluate(peft_model, tokenizer, task.suite, generate=False)
    peft_model.unload()
    shares = " | ".join(f"{after.groups[group].named:.2f}" for group in GROUPS)
    measures = f"{after.forgetting:.2f} | {after.utility(before):.2f} | **{after.balance(before):.2f}**"
    return (
        f"| {variant.name} | {measures} | {shares} | {after.perplexity / before.perplexity:.3f} | {looks} "
        f"| {outcome} | {layers} | {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS / "recipe_search.md")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model()
    task = load_task("capitals", args.split, tokenizer)
    before = evaluate(model, tokenizer, task.suite, generate=False)
    plain_collect = item_edit.collect_item_rows
    remembering = collected_once(plain_collect)
    header = "| variant | FQ | U | **H** | " + " | ".join(GROUPS) + " | perplexity | looks | outcome | layers | s |"
    lines = [f"# Variants of the recipe, capitals, split {args.split}", "", header, "|---" * 16 + "|"]
    for variant in VARIANTS:
        if args.only in variant.name:
            # between blocks the model is edited: those rows are not the base model's
            item_edit.collect_item_rows = plain_collect if "sequential" in variant.options else remembering
            lines.append(run(variant, model, tokenizer, task, before))
            print(lines[-1], flush=True)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
