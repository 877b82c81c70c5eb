"""Forgetting facts in a model whose weights are 8-bit codes, beside the same in float32.

    python benchmarks/quantised.py                            # a few minutes: writes results/quantised.md
    python benchmarks/quantised.py --formats float32 bnb-int8

SmolLM2-135M-Instruct forgets the ten capitals of split 0 (`forgetting_data.py`), by `unlearn` with its defaults, loaded in each format
from the start: rows, readout and strengths are those of the quantised model. FQ, U and H are those of `forgetting.py`. "merged" is the
same adapter in the weights: requantised, with the rounding as a share of the edit.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from forgetting import GROUPS, RESULTS, scores
from forgetting_data import load_task
from smollm2 import smollm2_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from engram_peft import unlearn
from engram_peft.evaluation import evaluate


PACKAGES = {"torchao-int8": "torchao", "bnb-int8": "bitsandbytes"}


def quantization_config(name: str) -> Any | None:
    """How transformers is told to load a format; `None` for float32.

    Raises:
        SystemExit: Its package is not installed.
    """
    package = PACKAGES.get(name)
    if package is None:
        return None
    if importlib.util.find_spec(package) is None:
        raise SystemExit(
            f"{name} needs {package}, which is not installed. Run:\n    pip install 'engram-adapters[quantised]'"
        )
    if name == "bnb-int8":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def load(name: str) -> PreTrainedModel:
    options = {} if (config := quantization_config(name)) is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32, **options).eval()


def run(name: str) -> list[str]:
    """The table's rows of a format."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    task = load_task("capitals", 0, tokenizer)
    model = load(name)
    before = evaluate(model, tokenizer, task.suite, generate=False)
    started = time.process_time()
    peft_model = unlearn(model, tokenizer, task.forget, [*task.retain, *task.general])
    seconds = time.process_time() - started
    rows = [row(name, "before", scores(before, before), "")]
    edited = evaluate(peft_model, tokenizer, task.suite, generate=False)
    rows.append(row(name, "edited", scores(edited, before), f"{seconds:.0f}"))
    print("\n".join(rows), flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the rounding is in the table
        peft_model.merge_adapter()
    errors = peft_model.base_model.requantization_errors().values()
    rounding = f"merged, rounding {sum(errors) / len(errors):.2f}" if errors else "merged"
    merged = evaluate(peft_model, tokenizer, task.suite, generate=False)
    rows.append(row(name, rounding, scores(merged, before), ""))
    return rows


def row(name: str, state: str, found: dict[str, Any], seconds: str) -> str:
    shares = " | ".join(f"{found['named'][group]:.2f}" for group in GROUPS)
    heads = " | ".join(f"{found[key]:.2f}" for key in ("FQ", "U", "H")) if state != "before" else "– | – | –"
    forget, retain = (found["probability"][group] for group in ("forget", "retain"))
    return f"| {name} | {state} | {heads} | {shares} | {forget:.3f} / {retain:.3f} | {found['perplexity']:.2f} | {seconds} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["float32", *PACKAGES], choices=["float32", *PACKAGES])
    parser.add_argument("--out", type=Path, default=RESULTS / "quantised.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in args.formats:
        quantization_config(name)  # what is missing is said before work starts
    lines = [
        "# Forgetting facts in 8 bits",
        "",
        "SmolLM2-135M-Instruct, ten capitals of split 0, `unlearn` with its defaults on the model as it was loaded. The groups are shares of "
        "facts that are named; probability is the mean one of the forgotten and of the kept facts. `benchmarks/quantised.py` says more.",
        "",
        "| weights | | FQ | U | **H** | "
        + " | ".join(group.replace("_", "-") for group in GROUPS)
        + " | probability | perplexity | s |",
        "|---" * (8 + len(GROUPS)) + "|",
    ]
    for name in args.formats:
        lines += run(name)
    lines += [
        "",
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread, CPU seconds.",
    ]
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
