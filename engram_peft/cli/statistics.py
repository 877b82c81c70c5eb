"""`engram-peft statistics`: collect second moments of layer inputs once, merge them, look into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .application import TYPER_OPTIONS, app, examples, help_if_alone, working
from .loading import check_chat, load_model
from .options import (
    FILE,
    HOW,
    BatchOption,
    ChatOption,
    DebugOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    LayersOption,
    LengthOption,
    ModelOption,
    OverwriteOption,
    QuietOption,
    StatisticsOption,
    TargetOption,
    TokenPosition,
    layers_of,
    modules_of,
)
from .output import bytes_of, check_file_is_free, fact_lines, make_parent, show, shown_size
from .rows import read_rows


if TYPE_CHECKING:
    from ..editing.statistics import Statistics


statistics_app = typer.Typer(
    help="Second moments of layer inputs: collect them once, merge them, look into them.",
    epilog=examples(
        "statistics collect --model ./model --data a.jsonl --output a.safetensors",
        "statistics merge a.safetensors b.safetensors --output both.safetensors",
    ),
    **TYPER_OPTIONS,
)
app.add_typer(statistics_app, name="statistics")


@statistics_app.callback(invoke_without_command=True)
def _start_statistics(context: typer.Context) -> None:
    help_if_alone(context)


@statistics_app.command(
    epilog=examples(
        "statistics collect --model ./model --data retain.jsonl --output retain.safetensors --target-modules down_proj"
    )
)
def collect(
    model: ModelOption,
    data: Annotated[Path, typer.Option(help="The texts: .jsonl, .json or .txt.", **FILE)],
    output: StatisticsOption,
    target_modules: TargetOption = None,
    layers: LayersOption = None,
    token_position: Annotated[
        TokenPosition,
        typer.Option(help="Which rows: at the tokens that count, one earlier, or at the subject.", **HOW),
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
    with working(as_json, quiet, debug):
        rows, modules, numbers = read_rows(data, chat), modules_of(target_modules), layers_of(layers)
        check_file_is_free(output, overwrite)
        base, tokenizer = load_model(model, dtype, device)
        check_chat(tokenizer, chat, rows, quiet)

        from ..editing.collection import collect_statistics

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
        make_parent(output)
        found.save(output)
        content = _describe_statistics(found, output)
    show(content, _statistics_text(content), as_json, quiet)


@statistics_app.command(
    "merge", epilog=examples("statistics merge a.safetensors b.safetensors --output both.safetensors")
)
def merge_files(
    files: Annotated[list[Path], typer.Argument(help="Statistics of the same layers of the same model.", **FILE)],
    output: StatisticsOption,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Merge statistics: exactly those of all the data together."""
    with working(as_json, quiet, debug):
        check_file_is_free(output, overwrite)

        from ..editing.statistics import Statistics, merge_statistics

        merged = merge_statistics(*(Statistics.load(file) for file in files))
        make_parent(output)
        merged.save(output)
        content = _describe_statistics(merged, output)
    show(content, _statistics_text(content), as_json, quiet)


@statistics_app.command(epilog=examples("statistics info retain.safetensors"))
def info(
    file: Annotated[Path, typer.Argument(help="A file of statistics.", **FILE)],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a file of statistics holds and where it comes from."""
    with working(as_json, True, debug):
        from ..editing.statistics import Statistics

        content = _describe_statistics(Statistics.load(file), file)
    show(content, _statistics_text(content), as_json, False)


def _describe_statistics(statistics: Statistics, path: Path) -> dict[str, Any]:
    moments = [{"layers": names, "width": moment.dim, "rows": moment.count} for moment, names in statistics.groups()]
    return {
        "file": str(path),
        "bytes": bytes_of(path),
        "provenance": asdict(statistics.provenance),
        "moments": moments,
    }


def _statistics_text(content: Mapping[str, Any]) -> str:
    from ..evaluation.report import aligned

    origin = content["provenance"]
    facts = [
        ("file", f"{content['file']} ({shown_size(content['bytes'])})"),
        ("model", f"{origin['model'] or 'unknown'} {origin['model_fingerprint']}".strip()),
        ("texts", f"{origin['texts']}, rows: {origin['mask'] or 'unknown'}"),
    ]
    layers = [
        (name, str(moment["width"]), f"{moment['rows']:g}")
        for moment in content["moments"]
        for name in moment["layers"]
    ]
    return "\n".join([*fact_lines(facts), "", *aligned([("layer", "width", "rows"), *layers])])
