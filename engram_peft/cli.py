"""The command line, `engram-peft`: a thin door to the library.

A command reads its input, calls the library, and prints what came back: as text, or with `--json` as one JSON document, and then
nothing else is on stdout. Exit codes: 0 is success, 1 a failure while working, 2 input that cannot be used. Errors are one line
on stderr; `--debug` shows where they come from. Files and folders get their names when they are complete.

torch and transformers are imported inside the commands, so that this module has nothing to wait for.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .editing.extraction import ExtractionReport
    from .editing.item_edit import ItemReport
    from .editing.statistics import Statistics
    from .editing.tuning import AlphaCurve
    from .evaluation import Evaluation, Suite


# Longer tables say less on a screen: beyond that many items, those that resist come first and the rest is counted.
SHOWN_ITEMS = 30

Row = dict[str, Any]


class BadInput(ValueError):
    """What was given cannot be used; the message says what to do."""


class OneLineErrors(TyperGroup):
    """Commands whose usage errors are one line on stderr, where typer would draw a box."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except typer.Abort:
            code = 130
        except Exception as error:
            # typer's and click's usage errors, which have no common base class that every version exports
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" See `{context.command_path} --help`."
            typer.echo(f"Error: {_sentence(error.format_message())}{hint}", err=True)
            code = getattr(error, "exit_code", 2)
        sys.exit(code if isinstance(code, int) else 0)


def _examples(*commands: str) -> str:
    return "\n\n".join(["Examples:", *(f"  engram-peft {command}" for command in commands)])


_TYPER_OPTIONS: dict[str, Any] = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}
app = typer.Typer(
    name="engram-peft",
    cls=OneLineErrors,
    help="Make language models forget, in closed form, and carry what was taken out as a PEFT adapter.",
    epilog=_examples(
        "unlearn --model NAME --forget forget.jsonl --retain retain.jsonl --output adapter", "inspect adapter"
    ),
    **_TYPER_OPTIONS,
)
statistics_app = typer.Typer(
    help="Second moments of layer inputs: collect them once, merge them, look into them.",
    epilog=_examples(
        "statistics collect --model ./model --data a.jsonl --output a.safetensors",
        "statistics merge a.safetensors b.safetensors --output both.safetensors",
    ),
    **_TYPER_OPTIONS,
)
app.add_typer(statistics_app, name="statistics")


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Method(str, Enum):
    items = "items"
    paper = "paper"


class TokenPosition(str, Enum):
    answer = "answer"
    predict = "predict"
    subject = "subject"


_FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "readable": True, "show_default": False}
_HOW: dict[str, Any] = {"rich_help_panel": "What and how"}
_RUN: dict[str, Any] = {"rich_help_panel": "Running the model"}
_OUT: dict[str, Any] = {"rich_help_panel": "Output"}

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Folder or Hub name of the model.", show_default=False)
]
BaseOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or Hub name of the model; by default the one the adapter names."),
]
AdapterOption = Annotated[
    str, typer.Option("--adapter", "-a", help="Folder or Hub name of the adapter.", show_default=False)
]
FolderOption = Annotated[
    Path, typer.Option("--output", "-o", help="Folder to write; it must not exist yet.", show_default=False)
]
StatisticsOption = Annotated[
    Path, typer.Option("--output", "-o", help="File to write; it must not exist yet.", show_default=False)
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target-modules", help="Which modules, by the ends of their names: down_proj,o_proj", **_HOW),
]
LayersOption = Annotated[str | None, typer.Option("--layers", help="Which layers: 10-20 or 4,8,12-15", **_HOW)]
ChatOption = Annotated[
    bool,
    typer.Option("--chat", help="Pass prompts and answers through the chat template, as user and assistant.", **_RUN),
]
GenerateOption = Annotated[
    bool, typer.Option(help="Let the model answer the suite freely, which takes most of the time.", **_RUN)
]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the weights; auto: that of the checkpoint.", **_RUN)]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default a GPU if there is one.", **_RUN)
]
BatchOption = Annotated[int, typer.Option(min=1, help="Texts a batch.", **_RUN)]
LengthOption = Annotated[int, typer.Option(min=2, help="Longer texts are cut on the right, in tokens.", **_RUN)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.", **_OUT)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.", **_OUT)]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no summary.", **_OUT)]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", **_OUT)]


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"engram-peft {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    _help_if_alone(context)


@statistics_app.callback(invoke_without_command=True)
def _start_statistics(context: typer.Context) -> None:
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ---------------------------------------------------------------------------------------------------- commands


@app.command(
    epilog=_examples(
        "unlearn --model HuggingFaceTB/SmolLM2-135M-Instruct --forget forget.jsonl --retain retain.jsonl --output adapter --chat",
        "unlearn --model ./model --forget facts.json --retain retain.txt --output adapter --suite suite.json --report report.html",
        "unlearn --model ./model --forget forget.jsonl --retain retain.jsonl --output adapter --method paper --alpha auto --layers 10-20",
    )
)
def unlearn(
    model: ModelOption,
    forget: Annotated[Path, typer.Option(help="What to forget: .jsonl, .json or .txt.", **_FILE)],
    retain: Annotated[Path, typer.Option(help="What to keep, likewise.", **_FILE)],
    output: FolderOption,
    alpha: Annotated[
        str | None,
        typer.Option(
            help="Strength of the whole adapter: a number, or auto to find it.", metavar="auto|FLOAT", **_HOW
        ),
    ] = None,
    method: Annotated[Method, typer.Option(help="Item by item, or the paper's closed form.", **_HOW)] = Method.items,
    target_modules: TargetOption = None,
    layers: LayersOption = None,
    forget_probability: Annotated[
        float | None, typer.Option(help="How likely the model may still say an item, 0.05 by default.", **_HOW)
    ] = None,
    replacement: Annotated[str | None, typer.Option(help="What the model should say instead.", **_HOW)] = None,
    retain_weight: Annotated[
        float | None, typer.Option(help="What a kept answer weighs against a kept text, 30 by default.", **_HOW)
    ] = None,
    chat: ChatOption = False,
    suite: Annotated[Path | None, typer.Option(help="Measure with this suite before and after.", **_FILE)] = None,
    generate: GenerateOption = True,
    report: Annotated[Path | None, typer.Option(help="Write a page of HTML about the outcome.", **_OUT)] = None,
    report_texts: Annotated[
        bool, typer.Option("--report-texts", help="Show the forgotten texts on that page.", **_OUT)
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
    with _working(as_json, quiet, debug):
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
        measured = _load_suite(suite, generate)
        _check_folder_is_free(output, overwrite, [model])
        _check_file_is_free(report, overwrite)
        base, tokenizer = _load_model(model, dtype, device)
        _check_chat(tokenizer, chat, [*forget_rows, *retain_rows], quiet)
        sizes: dict[str, Any] = {"batch_size": batch_size, "max_length": max_length}

        from . import evaluation, html_report, recipes
        from .editing import tuning

        before = after = None
        if measured is not None:
            before = evaluation.evaluate(base, tokenizer, measured, batch_size=batch_size, generate=generate)
        peft_model = recipes.unlearn(
            base, tokenizer, forgotten, retain_rows, config, alpha=strength, **sizes, **options
        )
        with _new_folder(output) as folder:
            peft_model.save_pretrained(str(folder))
        if measured is not None:
            after = evaluation.evaluate(peft_model, tokenizer, measured, batch_size=batch_size, generate=generate)
        tuner = peft_model.base_model
        found, curve = tuner.reports["default"], tuner.curves.get("default")
        if report is not None:
            if curve is None:
                curve = tuning.scale_curve(peft_model, tokenizer, forgotten, retain_rows, **sizes)
            texts = _texts_by_item(forgotten) if report_texts else None
            page = html_report.html_report(
                peft_model, path=str(output), curve=curve, before=before, after=after, texts=texts
            )
            _write_text(report, page)
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
        summary += f"\nAdapter: {output} ({_size(output)})" + ("" if report is None else f"\nReport:  {report}")
    _show(outcome, summary, as_json, quiet)


@app.command(
    epilog=_examples(
        "evaluate --model ./model --suite suite.json",
        "evaluate --model ./model --adapter adapter --suite suite.json --output results.json",
        "evaluate --adapter adapter --suite suite.json --samples 10 --json",
    )
)
def evaluate(
    suite: Annotated[Path, typer.Option(help="The suite to measure with, a JSON file.", **_FILE)],
    model: BaseOption = None,
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="Measure with this adapter.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the scores to this JSON file.")] = None,
    generate: GenerateOption = True,
    samples: Annotated[int, typer.Option(min=0, help="Answers to sample for every probe.", **_RUN)] = 0,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    batch_size: BatchOption = 16,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure a model, with or without an adapter, with a suite of probes and texts."""
    with _working(as_json, quiet, debug):
        measured = _load_suite(suite, generate)
        assert measured is not None
        _check_file_is_free(output, overwrite)
        loaded, tokenizer = _load(model, adapter, dtype, device)

        from . import evaluation

        found = evaluation.evaluate(
            loaded, tokenizer, measured, batch_size=batch_size, generate=generate, samples=samples
        )
        if output is not None:
            _make_parent(output)
            found.to_json(output)
    _show(found.to_dict(), str(found), as_json, quiet)


@app.command(
    epilog=_examples(
        "merge --adapter adapter --output merged",
        "merge --model ./model --adapter adapter --output merged --untie --dtype bfloat16",
    )
)
def merge(
    adapter: AdapterOption,
    output: FolderOption,
    model: BaseOption = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Give a layer that shares its weight, such as a tied head, one of its own.")
    ] = False,
    safe_merge: Annotated[bool, typer.Option(help="Check every weight for NaN before the first is changed.")] = True,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a whole model with the edit in its weights, and its tokenizer."""
    with _working(as_json, quiet, debug):
        _check_folder_is_free(output, overwrite, [adapter, model])
        peft_model, tokenizer = _load(model, adapter, dtype, device, engram=True)
        merged = peft_model.merge_and_unload(safe_merge=safe_merge, untie=untie)
        with _new_folder(output) as folder:
            merged.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
    _show({"adapter": adapter, "output": str(output)}, f"Model: {output} ({_size(output)})", as_json, quiet)


@app.command(epilog=_examples("export-lora --adapter adapter --output lora"))
def export_lora(
    adapter: AdapterOption,
    output: FolderOption,
    model: BaseOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the adapter as a stock LoRA adapter, which needs no engram_peft."""
    with _working(as_json, quiet, debug):
        _check_folder_is_free(output, overwrite, [adapter, model])
        peft_model, _ = _load(model, adapter, dtype, device, engram=True)
        with _new_folder(output) as folder:
            peft_model.base_model.save_as_lora(folder)
    _show({"adapter": adapter, "output": str(output)}, f"LoRA adapter: {output} ({_size(output)})", as_json, quiet)


@app.command(epilog=_examples("inspect adapter", "inspect adapter --json"))
def inspect(
    adapter: Annotated[Path, typer.Argument(help="Folder of the adapter.", show_default=False)],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what an adapter holds: items and their strengths, layers and ranks, size. No model is loaded."""
    with _working(as_json, True, debug):
        content = describe_adapter(adapter)
    _show(content, _adapter_text(content), as_json, False)


@statistics_app.command(
    epilog=_examples(
        "statistics collect --model ./model --data retain.jsonl --output retain.safetensors --target-modules down_proj"
    )
)
def collect(
    model: ModelOption,
    data: Annotated[Path, typer.Option(help="The texts: .jsonl, .json or .txt.", **_FILE)],
    output: StatisticsOption,
    target_modules: TargetOption = None,
    layers: LayersOption = None,
    token_position: Annotated[
        TokenPosition,
        typer.Option(help="Which rows: at the tokens that count, one earlier, or at the subject.", **_HOW),
    ] = TokenPosition.answer,
    chat: ChatOption = False,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
    batch_size: BatchOption = 8,
    max_length: LengthOption = 512,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Collect the statistics of texts. Keep the file as private as the texts."""
    with _working(as_json, quiet, debug):
        rows, modules, numbers = read_rows(data, chat), _modules_of(target_modules), _layers_of(layers)
        _check_file_is_free(output, overwrite)
        base, tokenizer = _load_model(model, dtype, device)
        _check_chat(tokenizer, chat, rows, quiet)

        from .editing.collection import collect_statistics

        found = collect_statistics(
            base,
            rows,
            tokenizer=tokenizer,
            token_position=token_position.value,
            target_modules=modules,
            layers_to_transform=numbers,
            batch_size=batch_size,
            max_length=max_length,
        )
        _make_parent(output)
        found.save(output)
        content = _describe_statistics(found, output)
    _show(content, _statistics_text(content), as_json, quiet)


@statistics_app.command(
    "merge", epilog=_examples("statistics merge a.safetensors b.safetensors --output both.safetensors")
)
def merge_files(
    files: Annotated[list[Path], typer.Argument(help="Statistics of the same layers of the same model.", **_FILE)],
    output: StatisticsOption,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Merge statistics: exactly those of all the data together."""
    with _working(as_json, quiet, debug):
        _check_file_is_free(output, overwrite)

        from .editing.statistics import Statistics, merge_statistics

        merged = merge_statistics(*(Statistics.load(file) for file in files))
        _make_parent(output)
        merged.save(output)
        content = _describe_statistics(merged, output)
    _show(content, _statistics_text(content), as_json, quiet)


@statistics_app.command(epilog=_examples("statistics info retain.safetensors"))
def info(
    file: Annotated[Path, typer.Argument(help="A file of statistics.", **_FILE)],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a file of statistics holds and where it comes from."""
    with _working(as_json, True, debug):
        from .editing.statistics import Statistics

        content = _describe_statistics(Statistics.load(file), file)
    _show(content, _statistics_text(content), as_json, False)


def main() -> None:
    """Entry point of `engram-peft`."""
    app()


# ---------------------------------------------------------------------------------------------------- errors, output


@contextmanager
def _working(as_json: bool, quiet: bool, debug: bool) -> Iterator[None]:
    """Progress bars as wanted, stdout kept for the JSON document, and a failure as one line and an exit code."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    if as_json or quiet:
        logging.disable_progress_bar()
    try:
        with contextlib.ExitStack() as stack:
            if as_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if not debug:
                stack.enter_context(warnings.catch_warnings())
                # what other libraries will change is no business of who runs a command
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|torch)\b")
            yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        typer.echo(f"Error: {_message(error)}", err=True)
        raise typer.Exit(2 if _is_refusal(error) else 1) from None
    finally:
        if bars:
            logging.enable_progress_bar()


def _is_refusal(error: Exception) -> bool:
    """Whether what was given was refused: by a `raise` of the errors that are for that, and not by an operation gone wrong."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or "raise"
    return isinstance(error, ValueError | TypeError) and line.startswith("raise")


def _message(error: Exception) -> str:
    """What went wrong, in one line and in the words of the command line."""
    text = _sentence(str(error))
    if not _is_refusal(error):
        text = f"{type(error).__name__}: {text} "
        text += "Lower --batch-size or --max-length." if "out of memory" in text else "--debug shows where."
    return re.sub(r"`(\w+)(?:=(\w+))?`", _as_option, text)


def _as_option(match: re.Match[str]) -> str:
    """A parameter of the library as the option that sets it."""
    name, value = match.groups()
    option = {"layers_to_transform": "layers"}.get(name, name)
    if option not in _OPTION_NAMES:
        return match.group()
    return "--" + option.replace("_", "-") + ("" if value in (None, "True") else f" {value}")


_OPTION_NAMES = {
    "alpha", "batch_size", "data", "forget", "forget_probability", "generate", "head_sizes", "layers", "max_length", "placement",
    "replacement", "retain", "retain_weight", "samples", "scales", "suite", "target_modules", "tensor", "token_position", "untie",
}  # fmt: skip


def _sentence(text: str) -> str:
    """A text on one line, with a full stop."""
    return " ".join(text.split()).rstrip(".") + "."


def _show(content: Mapping[str, Any], text: str, as_json: bool, quiet: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))
    elif not quiet:
        typer.echo(text)


def _finite(value: Any) -> Any:
    """The same with `None` for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _outcome(found: ItemReport | ExtractionReport) -> dict[str, Any]:
    """A report of either method as dictionaries, lists and numbers."""
    from .editing.item_edit import ItemReport

    if isinstance(found, ItemReport):
        items = [{**asdict(item), "resists": item.resists} for item in found.items]
        return {"items": items, "rounds": found.rounds, "layer_effects": found.layer_effects}
    numbers = ("rank", "kept", "width", "coverage", "factor", "relative_strength")
    return {"layers": {name: {n: getattr(d, n) for n in numbers} for name, d in found.layers.items()}}


def _summary(
    found: ItemReport | ExtractionReport, curve: AlphaCurve | None, before: Evaluation | None, after: Evaluation | None
) -> str:
    """What came of `unlearn`, in the library's own tables."""
    from .editing.item_edit import ItemReport

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


# ---------------------------------------------------------------------------------------------------- reading


def read_rows(path: Path, chat: bool = False) -> list[Row]:
    """The items in a file, as rows that the library takes.

    Args:
        path (`Path`):
            `.jsonl`: a JSON object or a string a line. `.json`: a list of such, or an object from names to one or several. `.txt`: a
            text a line.
        chat (`bool`): Whether a prompt and an answer become chat messages.

    Raises:
        `BadInput`: The file cannot be used; the message names the line.
    """
    entries = _entries_of(path)
    if not entries:
        raise BadInput(f"{path} holds no texts.")
    rows = [_row_of(entry, where) for where, entry in entries]
    return [_as_chat(row) for row in rows] if chat else rows


def _entries_of(path: Path) -> list[tuple[str, Any]]:
    """What a file holds, each with a name for it in errors."""
    text = _read_text(path)
    kind = path.suffix.lower()
    if kind == ".json":
        content = _parsed(text, str(path))
        if isinstance(content, dict):
            named = [
                (name, part)
                for name, value in content.items()
                for part in (value if isinstance(value, list) else [value])
            ]
            return [(f"{path}, item {name!r}", _named(part, name)) for name, part in named]
        if not isinstance(content, list):
            raise BadInput(f"{path} must hold a list of items, or an object from names to items.")
        return [(f"{path}, entry {i}", entry) for i, entry in enumerate(content, 1)]
    if kind not in (".jsonl", ".ndjson", ".txt"):
        raise BadInput(f"{path} has an unknown ending. Use .jsonl, .json or .txt.")
    # not `splitlines`, which also splits at characters that JSON strings may hold
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [(where, line.strip() if kind == ".txt" else _parsed(line, where)) for where, line in lines]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}). Convert it to UTF-8.") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInput(f"{where} is not JSON: {error}") from None


def _named(entry: Any, name: str) -> Any:
    return (
        {**({"text": entry} if isinstance(entry, str) else entry), "name": name}
        if isinstance(entry, str | dict)
        else entry
    )


def _row_of(entry: Any, where: str) -> Row:
    """An entry as a row with a text, a prompt and an answer, or messages, none of them empty."""
    row = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(row, dict):
        raise BadInput(f'{where} is no JSON object. Write {{"text": ...}} or {{"prompt": ..., "answer": ...}}.')
    columns = _columns_of(row)
    if not columns:
        raise BadInput(
            f"{where} has the columns {sorted(row)}. Expected `text`, `prompt` and `answer`, `question` and `answer`, or `messages`."
        )
    for column in columns:
        kind = list if column == "messages" else str
        if not isinstance(row[column], kind):
            raise BadInput(f"{where}: {column!r} must be a {'list of messages' if kind is list else 'text'}.")
        if not (row[column].strip() if isinstance(row[column], str) else row[column]):
            raise BadInput(f"{where}: {column!r} is empty.")
    if not isinstance(row.get("name", ""), str):
        raise BadInput(f"{where}: 'name' must be a text.")
    return row


def _columns_of(row: Row) -> tuple[str, ...]:
    """The columns that hold the item."""
    pairs = (("prompt", "answer"), ("prompt", "completion"), ("question", "answer"), ("question", "completion"))
    return next((columns for columns in (("messages",), *pairs, ("text",)) if set(columns) <= row.keys()), ())


def _as_chat(row: Row) -> Row:
    columns = _columns_of(row)
    if len(columns) < 2:
        return row
    prompt, answer = (row[column] for column in columns)
    rest = {name: value for name, value in row.items() if name not in columns}
    return {**rest, "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def items_of(rows: Sequence[Row], path: Path) -> list[Row] | dict[str, list[Row]]:
    """Rows as `unlearn` takes them: lines that have the same name are one item.

    Raises:
        `BadInput`: Some rows have a name and others do not.
    """
    named = [row for row in rows if "name" in row]
    if not named:
        return list(rows)
    if len(named) < len(rows):
        raise BadInput(
            f"{len(named)} of {len(rows)} items in {path} have a 'name'. Give it to all of them or to none."
        )
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row["name"], []).append(row)
    return items


def _texts_by_item(forgotten: list[Row] | dict[str, list[Row]]) -> dict[str, list[str]]:
    named = forgotten if isinstance(forgotten, dict) else {str(i): [row] for i, row in enumerate(forgotten)}
    return {name: [_text_of(row) for row in rows] for name, rows in named.items()}


def _text_of(row: Row) -> str:
    parts = (
        [message["content"] for message in row["messages"]]
        if "messages" in row
        else [row[c] for c in _columns_of(row)]
    )
    return " → ".join(parts)


def _load_suite(path: Path | None, generate: bool) -> Suite | None:
    if path is None:
        return None
    from importlib.util import find_spec

    from .evaluation import Suite

    if generate and find_spec("rouge_score") is None:
        raise BadInput(
            "Free answers are judged with rouge-score: pip install 'engram-adapters[evaluation]', or pass --no-generate."
        )
    try:
        return Suite.load(path)
    except ValueError as error:
        raise BadInput(f"{path} is no suite: {error}") from error


# ---------------------------------------------------------------------------------------------------- options


def _item_options(method: Method, given: dict[str, Any]) -> dict[str, Any]:
    from .editing.item_edit import ItemOptions

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
    from .tuners.engram import EngramConfig

    return EngramConfig(
        task_type="CAUSAL_LM",
        method=method.value,
        target_modules=_modules_of(target_modules),
        layers_to_transform=_layers_of(layers),
    )


def _modules_of(text: str | None) -> list[str] | str | None:
    """`a,b` as PEFT's `target_modules`."""
    if text is None or text == "all-linear":
        return text
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadInput("--target-modules names no module. Write, for example, down_proj,o_proj.")
    return names


def _layers_of(text: str | None) -> list[int] | None:
    """`4,8,12-15` as numbers."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise BadInput(f"--layers {text} is no list of layers. Write, for example, 10-20 or 4,8,12-15.")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


# ---------------------------------------------------------------------------------------------------- loading


def _load_model(name: str, dtype: Dtype, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, on the device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if _is_path(name) and not Path(name).is_dir():
        raise BadInput(f"There is no folder {name}. --model takes the folder of a model or its name on the Hub.")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"Cannot use --device {device}: {error}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.value)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"Cannot load the model {name}: {error}") from error
    return model.to(device).eval(), tokenizer


def _load(
    model: str | None, adapter: str | None, dtype: Dtype, device: str | None, engram: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model, with its adapter if there is one, and its tokenizer."""
    from peft import PeftModel

    if adapter is None:
        if model is None:
            raise BadInput("Nothing to load: pass --model, --adapter, or both.")
        return _load_model(model, dtype, device)
    config = _config_of(adapter)
    kind = getattr(config.peft_type, "value", config.peft_type)
    if engram and kind != "ENGRAM":
        raise BadInput(f"{adapter} is a {kind} adapter. This command is for ENGRAM adapters.")
    name = model or config.base_model_name_or_path
    if not name:
        raise BadInput(f"{adapter} does not say which model it was made for. Pass --model.")
    base, tokenizer = _load_model(name, dtype, device)
    try:
        return PeftModel.from_pretrained(base, adapter).eval(), tokenizer
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"Cannot load the adapter {adapter}: {error}") from error


def _config_of(adapter: str) -> Any:
    """The config of an adapter, of whatever kind."""
    from peft import PeftConfig

    folder = Path(adapter)
    # a Hub name has one slash: anything else that is not there would be looked for in vain
    if _is_path(adapter) or adapter.count("/") != 1 or folder.exists():
        _check_is_adapter(folder)
    try:
        return PeftConfig.from_pretrained(adapter)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"Cannot read the adapter {adapter}: {error}") from error


def _check_is_adapter(folder: Path) -> None:
    if not folder.is_dir():
        raise BadInput(f"There is no folder {folder}. Pass the folder that an adapter was saved to.")
    if not (folder / "adapter_config.json").is_file():
        raise BadInput(f"{folder} is no adapter: it has no adapter_config.json.")


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: the Hub's names have one slash at most."""
    return (
        name.startswith((".", "~", "/", "\\")) or name.endswith("/") or name.count("/") > 1 or Path(name).is_absolute()
    )


def _check_chat(tokenizer: PreTrainedTokenizerBase, chat: bool, rows: Sequence[Row], quiet: bool) -> None:
    """Raises an error for `--chat` without a chat template; says so if it might have been wanted."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise BadInput("--chat needs a tokenizer with a chat template, which this model lacks. Leave --chat out.")
    if has_template and not quiet and any(len(_columns_of(row)) > 1 for row in rows):
        typer.echo(
            "Note: prompts and answers are joined as they are. This is a chat model: --chat asks it as in a chat.",
            err=True,
        )


# ---------------------------------------------------------------------------------------------------- writing


def _check_folder_is_free(folder: Path, overwrite: bool, sources: Sequence[str | None]) -> None:
    """Raises an error if a folder cannot be written, or holds something that must not be lost."""
    if any(
        source is not None and Path(source).exists() and folder.resolve() == Path(source).resolve()
        for source in sources
    ):
        raise BadInput(f"{folder} is what is read from. Choose another --output.")
    if folder.exists():
        if not overwrite:
            raise BadInput(f"{folder} exists already. Choose another --output, or pass --overwrite.")
        ours = any((folder / name).is_file() for name in ("adapter_config.json", "config.json"))
        # replacing a folder deletes what is in it
        if not folder.is_dir() or not (ours or not any(folder.iterdir())):
            raise BadInput(
                f"{folder} holds neither an adapter nor a model, so it is not replaced. Choose another --output."
            )
    _check_parent(folder)


def _check_file_is_free(file: Path | None, overwrite: bool) -> None:
    """Raises an error if a file cannot be written, or is there already."""
    if file is None:
        return
    if file.is_dir():
        raise BadInput(f"{file} is a folder. Name a file.")
    if file.exists() and not overwrite:
        raise BadInput(f"{file} exists already. Choose another name, or pass --overwrite.")
    _check_parent(file)


def _check_parent(path: Path) -> None:
    """Raises an error if nothing can be made at `path`: better now than after the work."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise BadInput(f"Cannot write to {parent}. Choose another place for {path.name}.")


def _make_parent(path: Path) -> None:
    path.absolute().parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` when it is complete."""
    _make_parent(folder)
    place = folder.absolute().parent
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=place, ignore_cleanup_errors=True) as beside:
        new, old = Path(beside) / "new", Path(beside) / "old"
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def _write_text(path: Path, text: str) -> None:
    from .files import replace_text

    _make_parent(path)
    replace_text(path, text)


def _size(path: Path) -> str:
    """How large a file is, or all files in a folder, for people."""
    return _shown_size(_bytes(path))


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _shown_size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


# ---------------------------------------------------------------------------------------------------- looking into files


def describe_adapter(folder: Path) -> dict[str, Any]:
    """What an adapter's files say, without its model.

    Raises:
        `BadInput`: It is no ENGRAM adapter, or its files do not fit each other.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors import safe_open

    from .tuners.engram.card import check_weights_file

    _check_is_adapter(folder)
    config = _config_of(str(folder))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "ENGRAM":
        raise BadInput(f"{folder} is a {kind} adapter. `inspect` reads ENGRAM adapters.")
    path = folder / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        raise BadInput(f"{folder} has no {SAFETENSORS_WEIGHTS_NAME}.")
    check_weights_file(str(folder))
    with safe_open(path, framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (not a dict)
        ends = {key.removesuffix(_STRENGTHS): key for key in shapes if key.endswith(_STRENGTHS)}
        first = file.get_tensor(next(iter(ends.values()))).tolist() if ends else []
    rows = config.items or {}
    if not ends or (rows and sum(rows.values()) != len(first)):
        raise BadInput(f"{path} does not fit {folder / 'adapter_config.json'}: one of them is of another adapter.")
    items, start = {}, 0
    for name, count in rows.items():
        items[name] = {"rows": count, "strength": first[start]}
        start += count
    return {
        "adapter": str(folder),
        "model": config.base_model_name_or_path,
        "method": config.method,
        "alpha": config.alpha,
        "scale": config.scale,
        "items": items,
        # a layer without `A` holds the whole of M
        "layers": {
            name.removeprefix("base_model.model."): shapes[key][0] if f"{name}.engram_A.weight" in shapes else None
            for name, key in ends.items()
        },
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "bytes": path.stat().st_size,
        "extraction": config.extraction,
    }


_STRENGTHS = ".engram_strength.weight"


def _adapter_text(content: Mapping[str, Any]) -> str:
    from .evaluation.report import aligned

    layers, record = content["layers"], content["extraction"]
    facts = [
        ("adapter", content["adapter"]),
        ("model", content["model"] or "unknown"),
        ("method", content["method"]),
        ("strength", f"alpha {content['alpha']:g}, scale {content['scale']:g}"),
        ("size", f"{_shown_size(content['bytes'])}, {content['parameters']:,} parameters"),
    ]
    if record is None:
        facts.append(("filled", "no"))
    else:
        kept = record["total_texts"] - record["target_texts"]
        facts.append(("made from", f"{record['target_texts']} texts to forget, {kept} to keep"))
    lines = [
        *_facts(facts),
        "",
        *aligned([("layer", "rank"), *((n, str(r or "whole")) for n, r in layers.items())]),
    ]
    if items := content["items"]:
        rows = [(name, str(item["rows"]), f"{item['strength']:.3g}") for name, item in items.items()]
        lines += ["", *aligned([("item", "rows", "strength"), *rows])]
    return "\n".join(lines)


def _describe_statistics(statistics: Statistics, path: Path) -> dict[str, Any]:
    moments = [{"layers": names, "width": moment.dim, "rows": moment.count} for moment, names in statistics.groups()]
    return {"file": str(path), "bytes": _bytes(path), "provenance": asdict(statistics.provenance), "moments": moments}


def _statistics_text(content: Mapping[str, Any]) -> str:
    from .evaluation.report import aligned

    origin = content["provenance"]
    facts = [
        ("file", f"{content['file']} ({_shown_size(content['bytes'])})"),
        ("model", f"{origin['model'] or 'unknown'} {origin['model_fingerprint']}".strip()),
        ("texts", f"{origin['texts']}, rows: {origin['mask'] or 'unknown'}"),
    ]
    layers = [
        (name, str(moment["width"]), f"{moment['rows']:g}")
        for moment in content["moments"]
        for name in moment["layers"]
    ]
    return "\n".join([*_facts(facts), "", *aligned([("layer", "width", "rows"), *layers])])


def _facts(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {value}" for name, value in rows]


from . import table_cli  # noqa: E402, F401 (adds its commands, with what is defined above)


if __name__ == "__main__":
    table_cli.app()  # the module that has them: this one was loaded under another name
