"""How well facts are forgotten, and at what price: engram_peft's recipes against other people's methods.

    python benchmarks/forgetting.py --methods engram graddiff --splits 0     # minutes: see --help for all methods
    python benchmarks/forgetting.py --splits 0 1 2 3 4 5                     # everything: two hours of one free core
    python benchmarks/forgetting.py --task symbols --splits 0 1 2
    python benchmarks/forgetting.py --report                                 # seconds: writes the table and the plot
    python benchmarks/forgetting.py --relearn --methods engram graddiff ga   # minutes: how fast it all comes back

SmolLM2-135M-Instruct forgets ten capitals (or five chemical symbols) and should keep everything else; see
`forgetting_data.py`. A fact counts as known if greedy decoding names it, given the question and the answer's first words.

- FQ, how well it forgot: 1 less the mean share of the forgotten facts that is named to the question asked in training, to
  a paraphrase, and as plain text.
- U, what is left: the mean share that is named of the kept facts, of facts of the same kind that the method never saw, of
  other facts about the same subjects, and of facts of another kind; times the perplexity before over the one after, if less
  than 1.
- H: the harmonic mean of both.

Every run adds a line to `results/forgetting.jsonl`, and what is there already is not run again. Splits 1 and up are fresh
choices of facts: settings are chosen on split 0 and judged on the others. One item of ten is 0.1, so single splits are noise.

Seconds are CPU seconds of the method from its start to that setting, without evaluations. Peaks are resident memory over what
was resident before, likewise.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forgetting_data import TASKS, Pair, Task, invented_capitals, load_task
from rivals import RIVALS, Method
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from engram_peft import EngramConfig, unlearn
from engram_peft.evaluation import Evaluation, Probe, RelearningCurve, evaluate, relearning_curve


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from smollm2 import smollm2_folder  # noqa: E402


RESULTS = Path(__file__).parent / "results"
GROUPS = ["forget", "paraphrase", "cloze", "retain", "held_out", "neighbour", "other"]
Line = dict[str, Any]  # of results/forgetting.jsonl


# ------------------------------------------------------------------------------------------------------ our methods


def engram(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """`unlearn` with the library's defaults."""
    peft_model = unlearn(model, tokenizer, forget, retain=[*retain, *general])
    yield from at_strengths(peft_model, settings)


def paper(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence[Pair],
    retain: Sequence[Pair],
    general: Sequence[str],
    settings: Sequence[float],
    seed: int,
) -> Iterator[tuple[float, nn.Module]]:
    """The paper's edit with adaptive strengths, on what the MLPs write."""
    config = EngramConfig.paper(target_modules=["down_proj"], task_type="CAUSAL_LM")
    peft_model = unlearn(model, tokenizer, forget, [*retain, *general], config, scale="adaptive")
    yield from at_strengths(peft_model, settings)


def at_strengths(peft_model: Any, settings: Sequence[float]) -> Iterator[tuple[float, nn.Module]]:
    """An adapter at every strength of `settings`; then it is taken off the model."""
    try:
        for setting in settings:
            peft_model.set_scale("default", setting)
            yield setting, peft_model
    finally:
        peft_model.unload()


METHODS = RIVALS | {
    "paper": Method("engram_peft, the paper's edit", "alpha", paper, (0.5, 0.75, 1.0, 1.5)),
    "engram": Method("engram_peft, default", "alpha", engram, (1.0,)),
}


# ------------------------------------------------------------------------------------------------------ running


class Meter:
    """CPU seconds and peak resident memory of a generator's work, without what happens between its values."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed does not hide what is taken now
        self.seconds, self.megabytes = 0.0, 0.0
        self._before = self._resident("VmRSS")

    def __call__(self, values: Iterator[Any]) -> Iterator[Any]:
        while True:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            started = time.process_time()
            try:
                value = next(values)
            except StopIteration:
                return
            self.seconds += time.process_time() - started
            self.megabytes = max(self.megabytes, self._resident("VmHWM") - self._before)
            yield value

    @staticmethod
    def _resident(field: str) -> float:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def fingerprint(model: nn.Module) -> tuple[int, float]:
    """The same only if no module was added and, as good as certainly, no weight changed."""
    return len(list(model.modules())), sum(p.detach().sum(dtype=torch.float64).item() for p in model.parameters())


def run(task_name: str, split: int, methods: Sequence[str], settings: Sequence[float] | None, out: Path) -> None:
    """Runs every method on one split and adds a line to `out` for every setting that it does not have yet."""
    done = {(line["task"], line["split"], line["method"], line["setting"]) for line in read_lines(out)}
    missing = {}
    for method in methods:
        wanted = settings or METHODS[method].settings
        missing[method] = [s for s in wanted if (task_name, split, method, s) not in done]
    if not any(missing.values()):
        return
    model, tokenizer = load_model()
    task = load_task(task_name, split, tokenizer)
    before, untouched = evaluate(model, tokenizer, task.suite, generate=False), fingerprint(model)
    key = {"task": task_name, "split": split}
    if (task_name, split, "unedited", 0) not in done:
        nothing = {"method": "unedited", "setting": 0, "seconds": 0, "peak_mb": 0}
        add_line(out, {**key, **nothing, **scores(before, before)})
    for method in methods:
        if not missing[method]:
            continue
        meter = Meter()
        for setting, edited in meter(sweep(method, model, tokenizer, task, missing[method], split)):
            after = evaluate(edited, tokenizer, task.suite, generate=False)
            cost = {"seconds": round(meter.seconds, 1), "peak_mb": round(meter.megabytes)}
            add_line(out, {**key, "method": method, "setting": setting, **scores(after, before), **cost})
            del edited
        if fingerprint(model) != untouched:
            raise RuntimeError(f"{method} did not leave the model as it was.")


def load_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def sweep(
    method: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: Sequence[float],
    split: int,
) -> Iterator[tuple[float, nn.Module]]:
    return METHODS[method].sweep(model, tokenizer, task.forget, task.retain, task.general, settings, seed=split)


def scores(after: Evaluation, before: Evaluation) -> Line:
    assert after.perplexity is not None and before.perplexity is not None  # every task has general texts
    return {
        "FQ": round(after.forgetting, 4),
        "U": round(after.utility(before), 4),
        "H": round(after.balance(before), 4),
        "named": {name: round(group.named, 4) for name, group in after.groups.items()},
        "probability": {name: round(group.probability, 4) for name, group in after.groups.items()},
        "perplexity": round(after.perplexity, 3),
        "perplexity_before": round(before.perplexity, 3),
    }


def add_line(path: Path, line: Line) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    shown = "  ".join(f"{name} {line[name]:.2f}" for name in ("FQ", "U", "H"))
    print(
        f"{line['task']} {line['split']}  {line['method']:20} {line['setting']:<8g} {shown}  {line['seconds']:.0f} s",
        flush=True,
    )


def read_lines(path: Path) -> list[Line]:
    """One line for every task, split, method and setting; two commands at once may have added the same."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(line["task"], line["split"], line["method"], line["setting"]): line for line in lines}.values())


# ------------------------------------------------------------------------------------------------------ reporting


@dataclass(frozen=True)
class Choice:
    """A method at one setting: its lines on the splits that judge."""

    method: str
    setting: float
    lines: list[Line]

    def mean(self, name: str) -> float:
        return statistics.fmean(line[name] for line in self.lines)

    def named(self, group: str) -> float | None:
        """Mean share of a group that is named; `None` if the task has no such group."""
        shares = [line["named"][group] for line in self.lines if group in line["named"]]
        return statistics.fmean(shares) if shares else None


def choices(lines: Sequence[Line], method: str) -> list[Choice]:
    """A method at every setting that was run on a split from 1 on, by setting."""
    judging = [line for line in lines if line["method"] == method and line["split"] > 0]
    settings = sorted({line["setting"] for line in judging})
    return [Choice(method, s, [line for line in judging if line["setting"] == s]) for s in settings]


def chosen_on_split_0(lines: Sequence[Line], method: str) -> Choice | None:
    tried = [line for line in lines if line["method"] == method and line["split"] == 0]
    if not tried:
        return None
    setting = max(tried, key=lambda line: line["H"])["setting"]
    return next((choice for choice in choices(lines, method) if choice.setting == setting), None)


def best_in_hindsight(lines: Sequence[Line], method: str) -> Choice | None:
    return max(choices(lines, method), key=lambda choice: choice.mean("H"), default=None)


def table(chosen: Sequence[Choice]) -> list[str]:
    """One row for every method, the best first."""
    header = "| method | setting | FQ | U | **H** | H, lowest to highest | " + " | ".join(
        group.replace("_", "-") for group in GROUPS
    )
    rows = []
    for choice in sorted(chosen, key=lambda choice: -choice.mean("H")):
        method = METHODS[choice.method]
        heights = [line["H"] for line in choice.lines]
        groups = [choice.named(group) for group in GROUPS]
        ratio = statistics.fmean(line["perplexity"] / line["perplexity_before"] for line in choice.lines)
        rows.append(
            f"| {method.label} | {method.setting} {choice.setting:g} | {choice.mean('FQ'):.2f} | {choice.mean('U'):.2f} "
            f"| **{choice.mean('H'):.2f}** | {min(heights):.2f} to {max(heights):.2f} | "
            + " | ".join("–" if share is None else f"{share:.2f}" for share in groups)
            + f" | {ratio:.2f} | {choice.mean('seconds'):.0f} | {choice.mean('peak_mb'):.0f} | {len(heights)} |"
        )
    return [f"{header} | perplexity | s | MB | splits |", "|---" * (10 + len(GROUPS)) + "|", *rows]


def report(lines: Sequence[Line]) -> str:
    text = [
        "# Forgetting facts",
        "",
        "SmolLM2-135M-Instruct, float32. FQ is how well facts were forgotten, U how much of everything else is left, H their "
        "harmonic mean; the groups are shares of facts that are named, and perplexity is relative to the unedited model. "
        "`benchmarks/forgetting.py` says exactly what they are, `benchmarks/rivals.py` what was compared.",
    ]
    for task in TASKS:
        of_task = [line for line in lines if line["task"] == task]
        methods = [method for method in METHODS if choices(of_task, method)]
        if not methods:
            continue
        fair = [choice for method in methods if (choice := chosen_on_split_0(of_task, method))]
        hindsight = [choice for method in methods if (choice := best_in_hindsight(of_task, method))]
        text += [
            "",
            f"## Task: {task}",
            "",
            "Settings chosen on split 0, means over the other splits:",
            "",
            *table(fair),
            "",
            "The same with hindsight: settings chosen by the very splits that are shown, which no user can do:",
            "",
            *table(hindsight),
        ]
    text += ["", f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread."]
    return "\n".join(text)


def plot_frontiers(lines: Sequence[Line], path: Path) -> None:
    """FQ against U: a line for every method, a point for every setting, means over the judging splits."""
    from matplotlib import pyplot

    tasks = [task for task in TASKS if any(line["task"] == task and line["split"] > 0 for line in lines)]
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 5.6), squeeze=False, layout="constrained")
    colours = {method: f"C{i}" for i, method in enumerate(METHODS)}
    for task, axis in zip(tasks, axes[0], strict=True):
        of_task = [line for line in lines if line["task"] == task]
        for balance in (0.5, 0.6, 0.7, 0.8, 0.9):
            fq = torch.linspace(balance / (2 - balance), 1.0, 100)
            axis.plot(fq, balance * fq / (2 * fq - balance), color="0.85", linewidth=1, zorder=0)
            axis.annotate(f"H {balance:g}", (1.0, balance / (2 - balance)), color="0.6", fontsize=8)
        for method, colour in colours.items():
            points = [(choice.mean("FQ"), choice.mean("U")) for choice in choices(of_task, method)]
            if points:
                style = {"linewidth": 1.2, "marker": "o"}
                if method not in RIVALS:
                    style = {"linewidth": 2.5, "marker": "*", "markersize": 12}
                axis.plot(*zip(*points, strict=True), color=colour, label=METHODS[method].label, **style)
        axis.set(xlabel="FQ: forgotten", ylabel="U: left of everything else", title=task)
        axis.set(xlim=(0.0, 1.05), ylim=(0.0, 1.05))
        axis.legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------------------ relearning

NEVER_KNOWN = "never known: made-up countries"
RELEARNING_STEPS = 12
RELEARNING_RATE = 1e-5


def relearn(split: int, methods: Sequence[str], forgetting: float, out: Path) -> None:
    """How fast fine-tuning brings the forgotten capitals back, against facts that the model never knew.

    Every method runs at the setting, of those in `out`, that forgets most nearly as much as `forgetting` says.
    """
    lines = [line for line in read_lines(out) if line["task"] == "capitals" and line["split"] == split]
    model, tokenizer = load_model()
    task = load_task("capitals", split, tokenizer)
    curves = {NEVER_KNOWN: learnt(model, tokenizer, *invented_capitals())}
    print(NEVER_KNOWN, curves[NEVER_KNOWN].named, flush=True)
    for method in methods:
        tried = [line for line in lines if line["method"] == method]
        if not tried:
            raise SystemExit(f"{out} has no line of {method} on split {split}: run it first.")
        nearest = min(tried, key=lambda line: abs(line["FQ"] - forgetting))
        label = f"{METHODS[method].label} (FQ {nearest['FQ']:.2f}, U {nearest['U']:.2f})"
        for _, edited in sweep(method, model, tokenizer, task, [nearest["setting"]], split):
            curves[label] = learnt(edited, tokenizer, task.forget, task.suite.forget)
            print(label, curves[label].named, flush=True)
    RESULTS.joinpath("relearning.md").write_text(relearning_table(curves) + "\n")
    plot_relearning(curves, RESULTS / "relearning.png")


def learnt(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], probes: Sequence[Probe]
) -> RelearningCurve:
    """The curve of fine-tuning on all pairs at once."""
    return relearning_curve(
        model,
        tokenizer,
        pairs,
        probes,
        steps=RELEARNING_STEPS,
        learning_rate=RELEARNING_RATE,
        batch_size=len(pairs),
    )


def relearning_table(curves: Mapping[str, RelearningCurve]) -> str:
    steps = next(iter(curves.values())).steps
    return "\n".join(
        [
            "# Relearning",
            "",
            "Share of the ten forgotten capitals that is named, and their mean probability, after steps of fine-tuning on them "
            f"(every weight, learning rate {RELEARNING_RATE:g}).",
            "",
            "| steps | " + " | ".join(str(step) for step in steps) + " |",
            "|---" * (1 + len(steps)) + "|",
            *(
                f"| {label} | "
                + " | ".join(f"{n:.1f} ({p:.2f})" for n, p in zip(curve.named, curve.probability, strict=True))
                + " |"
                for label, curve in curves.items()
            ),
        ]
    )


def plot_relearning(curves: Mapping[str, RelearningCurve], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for label, curve in curves.items():
        style = {"color": "black", "linestyle": "--"} if label == NEVER_KNOWN else {"marker": "o"}
        axes[0].plot(curve.steps, curve.named, label=label, **style)
        axes[1].plot(curve.steps, curve.probability, label=label, **style)
    axes[0].set(xlabel="steps of fine-tuning", ylabel="share", title="named", ylim=(-0.03, 1.03))
    axes[1].set(xlabel="steps of fine-tuning", title="probability")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


# ------------------------------------------------------------------------------------------------------ the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="capitals")
    parser.add_argument("--splits", type=int, nargs="+", default=[0], help="choices of facts")
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--settings", type=float, nargs="+", help="instead of the methods' own")
    parser.add_argument("--out", type=Path, default=RESULTS / "forgetting.jsonl", help="file that lines are added to")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="write the table and the plot of what is in --out")
    parser.add_argument("--relearn", action="store_true", help="fine-tune the first split's edited models instead")
    parser.add_argument("--forgetting", type=float, default=0.8, help="about the FQ from which to relearn")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    if args.report:
        lines = read_lines(args.out)
        RESULTS.joinpath("forgetting.md").write_text(report(lines) + "\n")
        plot_frontiers(lines, RESULTS / "forgetting.png")
    elif args.relearn:
        relearn(args.splits[0], args.methods, args.forgetting, args.out)
    else:
        for split in args.splits:
            run(args.task, split, args.methods, args.settings, args.out)


if __name__ == "__main__":
    main()
