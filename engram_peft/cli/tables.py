"""`engram-peft table`: write a table to its file, check it, look into it, time it."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .application import TYPER_OPTIONS, BadInput, app, examples, help_if_alone, working
from .options import FILE, HOW, DebugOption, JsonOption, QuietOption
from .output import check_file_is_free, make_parent, show, shown_size


if TYPE_CHECKING:
    from ..memory.tables import Table


table_app = typer.Typer(
    help="Tables of n-gram memories: export them from checkpoints, check, describe and time them.",
    epilog=examples(
        "table export ./model --tensor model.layers.1.engram.weight --output table.safetensors",
        "table verify table.safetensors",
    ),
    **TYPER_OPTIONS,
)
app.add_typer(table_app, name="table")


class Placement(str, Enum):
    ram = "ram"
    mmap = "mmap"
    pinned = "pinned"
    cuda = "cuda"
    auto = "auto"


class Draw(str, Enum):
    uniform = "uniform"
    zipf = "zipf"


_IN_PLACE: dict[str, Any] = {"rich_help_panel": "A checkpoint, in place"}
SourceArgument = Annotated[
    Path,
    typer.Argument(help="A file of `table export`, or a checkpoint's file or folder with --tensor.", exists=True),
]
TensorOption = Annotated[
    list[str] | None,
    typer.Option("--tensor", help="Name of the checkpoint's tensor; repeat it for shards, in order.", **_IN_PLACE),
]
ScalesOption = Annotated[
    list[str] | None, typer.Option("--scales", help="Likewise, the tensor of the rows' scales.", **_IN_PLACE)
]
HeadsOption = Annotated[
    str | None, typer.Option("--head-sizes", help="Rows of every head: 500,700. By default one head.", **_IN_PLACE)
]


@table_app.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    help_if_alone(context)


@table_app.command(
    epilog=examples(
        "table export ./model --tensor model.layers.1.engram.weight --head-sizes 500,700 --output table.safetensors"
    )
)
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's safetensors file or folder.", exists=True)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; it must not exist yet.", show_default=False)
    ],
    tensor: TensorOption = None,
    scales: ScalesOption = None,
    head_sizes: HeadsOption = None,
    chunk_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes under one digest: what a lazy check reads for one row.", **HOW)
    ] = 262_144,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a checkpoint's table to a file of its own, byte for byte, with digests. Memory for two chunks is enough."""
    with working(as_json, quiet, debug):
        if not tensor:
            raise BadInput("Name the checkpoint's table: --tensor.")
        check_file_is_free(output, False)

        from ..memory.tables import export_table, open_table

        with open_table(checkpoint, tensor=tensor, scales=scales or None, head_sizes=_sizes_of(head_sizes)) as source:
            make_parent(output)
            export_table(source, source.head_sizes, output, chunk_bytes=chunk_bytes)
        with open_table(output) as table:
            content = _describe(table, output)
    show(content, _text(content), as_json, quiet)


@table_app.command(epilog=examples("table verify table.safetensors"))
def verify(
    file: Annotated[Path, typer.Argument(help="A file of `table export`.", **FILE)],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check every byte of a table against its digests."""
    with working(as_json, quiet, debug):
        from ..memory.tables import open_table

        started = time.perf_counter()
        with open_table(file, verify="full") as table:
            content = {"file": str(file), "bytes": table.nbytes, "seconds": time.perf_counter() - started}
    text = f"{file} is as it was written: {shown_size(content['bytes'])} in {content['seconds']:.1f} s."  # type: ignore[arg-type]
    show(content, text, as_json, quiet)


@table_app.command(
    epilog=examples("table info table.safetensors", "table info ./model --tensor model.layers.1.engram.weight")
)
def info(
    source: SourceArgument,
    tensor: TensorOption = None,
    scales: ScalesOption = None,
    head_sizes: HeadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a table holds and how much of it is in memory. Only its header is read."""
    with working(as_json, True, debug):
        with _opened(source, tensor, scales, head_sizes) as table:
            content = _describe(table, source)
    show(content, _text(content), as_json, False)


@table_app.command(
    epilog=examples("table bench table.safetensors", "table bench table.safetensors --rows 48 --draw zipf")
)
def bench(
    source: SourceArgument,
    tensor: TensorOption = None,
    scales: ScalesOption = None,
    head_sizes: HeadsOption = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows a gather.", **HOW)] = 16_384,
    gathers: Annotated[int, typer.Option(min=1, help="How many gathers.", **HOW)] = 50,
    draw: Annotated[Draw, typer.Option(help="How ids are drawn.", **HOW)] = Draw.uniform,
    placement: Annotated[Placement, typer.Option(help="Where the table is.", **HOW)] = Placement.mmap,
    seed: Annotated[int, typer.Option(help="Of the ids.", **HOW)] = 0,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time gathers of random rows, and show how much of the table they brought into memory."""
    with working(as_json, True, debug):
        import torch

        with _opened(source, tensor, scales, head_sizes, placement.value) as table:
            sizes = torch.tensor(table.head_sizes)
            generator = torch.Generator().manual_seed(seed)
            before = table.residency()
            for _ in range(gathers):
                share = torch.rand(-(-rows // len(sizes)), len(sizes), generator=generator, dtype=torch.float64)
                # the logarithm of a row's number is uniform: Zipf's law with exponent 1
                table.gather(((sizes**share - 1) if draw is Draw.zipf else (sizes * share)).long())
            stats = table.stats()
        content = {
            "source": str(source),
            "placement": table.placement,
            "draw": draw.value,
            "rows": stats.rows // stats.gathers,
            "gathers": stats.gathers,
            "milliseconds": {
                "p50": 1e3 * stats.wait_p50,
                "p95": 1e3 * stats.wait_p95,
                "p99": 1e3 * stats.wait_p99,
                "max": 1e3 * stats.wait_max,
            },
            "resident_before": before,
            "resident_after": stats.residency,
        }
    show(content, str(stats), as_json, False)


def _opened(
    source: Path,
    tensor: list[str] | None,
    scales: list[str] | None,
    head_sizes: str | None,
    placement: str = "mmap",
) -> Table:
    from ..memory.tables import open_table

    return open_table(
        source,
        tensor=tensor or None,
        scales=scales or None,
        head_sizes=_sizes_of(head_sizes),
        placement=placement,
    )


def _sizes_of(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BadInput(f"--head-sizes lists the rows of every head, such as 500,700; got {text!r}.")
    return [int(part) for part in parts]


def _describe(table: Table, source: Path) -> dict[str, Any]:
    layout = table.layout
    return {
        "source": str(source),
        "bytes": table.nbytes,
        "rows": table.rows,
        "dim": table.dim,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "scale_dtype": None if layout.scale_dtype is None else str(layout.scale_dtype).removeprefix("torch."),
        "scale_block": layout.scale_block or None,
        "row_bytes": layout.row_bytes,
        "head_sizes": list(table.head_sizes),
        "hash": None if table.hash is None else dict(table.hash),
        "digests": table.has_digests,
        "resident": table.residency(),
    }


def _text(content: dict[str, Any]) -> str:
    heads = content["head_sizes"]
    shown = ", ".join(str(size) for size in heads[:8]) + (", ..." if len(heads) > 8 else "")
    scales = "" if content["scale_dtype"] is None else f", a {content['scale_dtype']} a {content['scale_block']}"
    held = "unknown" if content["resident"] is None else f"{content['resident']:.1%}"
    lines = [
        f"table     {content['source']} ({shown_size(content['bytes'])})",
        f"rows      {content['rows']} x {content['dim']} {content['dtype']}{scales}, {content['row_bytes']} bytes each",
        f"heads     {len(heads)}: {shown}",
        f"digests   {'yes' if content['digests'] else 'no'}",
        f"resident  {held}",
    ]
    if content["hash"] is not None:
        lines.append(f"hash      {content['hash']}")
    return "\n".join(lines)
