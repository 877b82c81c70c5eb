"""`engram-peft unlearn` and `evaluate`: make a model forget, and measure it."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .application import BadInput, app, examples, working
from .loading import check_chat, load, load_model, load_suite
from .options import (
    FILE,
    HOW,
    OUT,
    RUN,
    BaseOption,
    BatchOption,
    ChatOption,
    DebugOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    FolderOption,
    GenerateOption,
    JsonOption,
    LayersOption,
    LengthOption,
    Method,
    ModelOption,
    OverwriteOption,
    QuietOption,
    TargetOption,
    layers_of,
    modules_of,
)
from .output import check_file_is_free, check_folder_is_free, make_parent, new_folder, show, size_of, write_text
from .rows import items_of, read_rows, texts_by_item


if TYPE_CHECKING:
    from ..editing.extraction import ExtractionReport
    from ..editing.item_edit import ItemReport
    from ..editing.tuning import AlphaCurve
    from ..evaluation import Evaluation


# Longer tables say less on a screen: beyond that many items, those that resist come first and the rest is counted.
SHOWN_ITEMS = 30


@app.command(
    epilog=examples(
        "unlearn --model HuggingFaceTB/SmolLM2-135M-Instruct --forget forget.jsonl --retain retain.jsonl --output adapter --chat",
        "unlearn --model ./model --forget facts.json --retain retain.txt --output adapter --suite suite.json --report report.html",
        "unlearn --model ./model --forget forget.jsonl --retain retain.jsonl --output adapter --method paper --alpha auto --layers 10-20",
    )
)
def unlearn(
    model: ModelOption,
    forget: Annotated[Path, typer.Option(help="What to forget: .jsonl, .json or .txt.", **FILE)],
    retain: Annotated[Path, typer.Option(help="What to keep, likewise.", **FILE)],
    output: FolderOption,
    alpha: Annotated[
        str | None,
        typer.Option(help="Strength of the whole adapter: a number, or auto to find it.", metavar="auto|FLOAT", **HOW),
    ] = None,
    method: Annotated[Method, typer.Option(help="Item by item, or the paper's closed form.", **HOW)] = Method.items,
    target_modules: TargetOption = None,
    layers: LayersOption = None,
    forget_probability: Annotated[
        float | None, typer.Option(help="How likely the model may still say an item, 0.05 by default.", **HOW)
    ] = None,
    replacement: Annotated[str | None, typer.Option(help="What the model should say instead.", **HOW)] = None,
    retain_weight: Annotated[
        float | None, typer.Option(help="What a kept answer weighs against a kept text, 30 by default.", **HOW)
    ] = None,
    chat: ChatOption = False,
    suite: Annotated[Path | None, typer.Option(help="Measure with this suite before and after.", **FILE)] = None,
    generate: GenerateOption = True,
    report: Annotated[Path | None, typer.Option(help="Write a page of HTML about the outcome.", **OUT)] = None,
    report_texts: Annotated[
        bool, typer.Option("--report-texts", help="Show the forgotten texts on that page.", **OUT)
    ] = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    batch_size: BatchOption = 8,
    max_length: LengthOption = 512,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a model forget texts, and save that as an adapter.

    The files hold one JSON object a line: {"text"}, {"prompt", "answer"}, {"question", "answer"} or {"messages"}. In the forget file
    a "name" calls the item (lines of one name are one item) and a "span" is the part of the answer to forget.
    """
    with working(as_json, quiet, debug):
        item_options = {
            "forget_probability": forget_probability,
            "replacement": replacement,
            "retain_weight": retain_weight,
        }
        options = _item_options(method, {name: value for name, value in item_options.items() if value is not None})
        strength = _alpha_of(alpha)
        config = _adapter_config(method, target_modules, layers)
        forget_rows, retain_rows = read_rows(forget, chat), read_rows(retain, chat)
        forgotten = items_of(forget_rows, forget)
        measured = load_suite(suite, generate)
        check_folder_is_free(output, overwrite, [model])
        check_file_is_free(report, overwrite)
        base, tokenizer = load_model(model, dtype, device)
        check_chat(tokenizer, chat, [*forget_rows, *retain_rows], quiet)
        sizes: dict[str, Any] = {"batch_size": batch_size, "max_length": max_length}

        from .. import evaluation, html_report, recipes
        from ..editing import tuning

        before = after = None
        if measured is not None:
            before = evaluation.evaluate(base, tokenizer, measured, batch_size=batch_size, generate=generate)
        peft_model = recipes.unlearn(
            base, tokenizer, forgotten, retain_rows, config, alpha=strength, **sizes, **options
        )
        with new_folder(output) as folder:
            peft_model.save_pretrained(str(folder))
        if measured is not None:
            after = evaluation.evaluate(peft_model, tokenizer, measured, batch_size=batch_size, generate=generate)
        tuner = peft_model.base_model
        found, curve = tuner.reports["default"], tuner.curves.get("default")
        if report is not None:
            if curve is None:
                curve = tuning.scale_curve(peft_model, tokenizer, forgotten, retain_rows, **sizes)
            texts = texts_by_item(forgotten) if report_texts else None
            page = html_report.html_report(
                peft_model, path=str(output), curve=curve, before=before, after=after, texts=texts
            )
            write_text(report, page)
        outcome = {
            "model": model,
            "output": str(output),
            "report": None if report is None else str(report),
            "method": method.value,
            "alpha": tuner.peft_config["default"].alpha,
            "scale": tuner.peft_config["default"].scale,
            **_outcome(found),
            "curve": None if curve is None else asdict(curve),
            "evaluation": None
            if after is None or before is None
            else {"before": before.to_dict(), "after": after.to_dict()},
        }
        summary = _summary(found, tuner.curves.get("default"), before, after)
        summary += f"\nAdapter: {output} ({size_of(output)})" + ("" if report is None else f"\nReport:  {report}")
    show(outcome, summary, as_json, quiet)


@app.command(
    epilog=examples(
        "evaluate --model ./model --suite suite.json",
        "evaluate --model ./model --adapter adapter --suite suite.json --output results.json",
        "evaluate --adapter adapter --suite suite.json --samples 10 --json",
    )
)
def evaluate(
    suite: Annotated[Path, typer.Option(help="The suite to measure with, a JSON file.", **FILE)],
    model: BaseOption = None,
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="Measure with this adapter.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the scores to this JSON file.")] = None,
    generate: GenerateOption = True,
    samples: Annotated[int, typer.Option(min=0, help="Answers to sample for every probe.", **RUN)] = 0,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    batch_size: BatchOption = 16,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a model, with or without an adapter, with a suite of probes and texts."""
    with working(as_json, quiet, debug):
        measured = load_suite(suite, generate)
        assert measured is not None
        check_file_is_free(output, overwrite)
        loaded, tokenizer = load(model, adapter, dtype, device)

        from .. import evaluation

        found = evaluation.evaluate(
            loaded, tokenizer, measured, batch_size=batch_size, generate=generate, samples=samples
        )
        if output is not None:
            make_parent(output)
            found.to_json(output)
    show(found.to_dict(), str(found), as_json, quiet)


def _outcome(found: ItemReport | ExtractionReport) -> dict[str, Any]:
    """A report of either method as dictionaries, lists and numbers."""
    from ..editing.item_edit import ItemReport

    if isinstance(found, ItemReport):
        items = [{**asdict(item), "resists": item.resists} for item in found.items]
        return {"items": items, "rounds": found.rounds, "layer_effects": found.layer_effects}
    numbers = ("rank", "kept", "width", "coverage", "factor", "relative_strength")
    return {"layers": {name: {n: getattr(d, n) for n in numbers} for name, d in found.layers.items()}}


def _summary(
    found: ItemReport | ExtractionReport, curve: AlphaCurve | None, before: Evaluation | None, after: Evaluation | None
) -> str:
    """What came of `unlearn`, in the library's own tables."""
    from ..editing.item_edit import ItemReport

    if isinstance(found, ItemReport):
        shown = sorted(found.items, key=lambda item: not item.resists)[:SHOWN_ITEMS]
        lines = [str(ItemReport(found.items if len(found.items) <= SHOWN_ITEMS else shown, found.rounds))]
        if len(found.items) > SHOWN_ITEMS:
            lines.append(f"... and {len(found.items) - SHOWN_ITEMS} more: --json and --report have all of them")
        count = len(found.items) - len(found.resisting)
        lines.append(f"\n{count} of {len(found.items)} items forgotten in {found.rounds} rounds.")
        if found.resisting:
            lines.append("The others resist: edit more layers with --layers, or keep less that is like them.")
    else:
        lines = [str(found)]
    if curve is not None:
        lines += ["", str(curve)]
    if after is not None and before is not None:
        lines += ["", after.compare(before)]
    return "\n".join(lines)


def _item_options(method: Method, given: dict[str, Any]) -> dict[str, Any]:
    from ..editing.item_edit import ItemOptions

    if given and method is Method.paper:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise BadInput(f"{options}: only --method items has that. Leave it out, or forget item by item.")
    ItemOptions(**given)  # its errors belong before the model is loaded
    return given


def _alpha_of(text: str | None) -> float | str | None:
    if text is None or text == "auto":
        return text
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not math.isfinite(alpha):
        raise BadInput(f"--alpha must be a number or auto, got {text!r}.")
    return alpha


def _adapter_config(method: Method, target_modules: str | None, layers: str | None) -> Any:
    from ..tuners.engram import EngramConfig

    return EngramConfig(
        task_type="CAUSAL_LM",
        method=method.value,
        target_modules=modules_of(target_modules),
        layers_to_transform=layers_of(layers),
    )
