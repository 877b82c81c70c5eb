"""`engram-peft merge`, `export-lora` and `inspect`: what can be done with a saved adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .application import BadInput, app, examples, working
from .loading import check_is_adapter, config_of, load
from .options import (
    AdapterOption,
    BaseOption,
    DebugOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    FolderOption,
    JsonOption,
    OverwriteOption,
    QuietOption,
)
from .output import check_folder_is_free, fact_lines, new_folder, show, shown_size, size_of


@app.command(
    epilog=examples(
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
    with working(as_json, quiet, debug):
        check_folder_is_free(output, overwrite, [adapter, model])
        peft_model, tokenizer = load(model, adapter, dtype, device, engram=True)
        merged = peft_model.merge_and_unload(safe_merge=safe_merge, untie=untie)
        with new_folder(output) as folder:
            merged.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
    show({"adapter": adapter, "output": str(output)}, f"Model: {output} ({size_of(output)})", as_json, quiet)


@app.command(epilog=examples("export-lora --adapter adapter --output lora"))
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
    with working(as_json, quiet, debug):
        check_folder_is_free(output, overwrite, [adapter, model])
        peft_model, _ = load(model, adapter, dtype, device, engram=True)
        with new_folder(output) as folder:
            peft_model.base_model.save_as_lora(folder)
    show({"adapter": adapter, "output": str(output)}, f"LoRA adapter: {output} ({size_of(output)})", as_json, quiet)


@app.command(epilog=examples("inspect adapter", "inspect adapter --json"))
def inspect(
    adapter: Annotated[Path, typer.Argument(help="Folder of the adapter.", show_default=False)],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what an adapter holds: items and their strengths, layers and ranks, size. No model is loaded."""
    with working(as_json, True, debug):
        content = describe_adapter(adapter)
    show(content, _adapter_text(content), as_json, False)


def describe_adapter(folder: Path) -> dict[str, Any]:
    """What an adapter's files say, without its model.

    Raises:
        `BadInput`: It is no ENGRAM adapter, or its files do not fit each other.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors import safe_open

    from ..tuners.engram.card import check_weights_file

    check_is_adapter(folder)
    config = config_of(str(folder))
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
    from ..evaluation.report import aligned

    layers, record = content["layers"], content["extraction"]
    facts = [
        ("adapter", content["adapter"]),
        ("model", content["model"] or "unknown"),
        ("method", content["method"]),
        ("strength", f"alpha {content['alpha']:g}, scale {content['scale']:g}"),
        ("size", f"{shown_size(content['bytes'])}, {content['parameters']:,} parameters"),
    ]
    if record is None:
        facts.append(("filled", "no"))
    else:
        kept = record["total_texts"] - record["target_texts"]
        facts.append(("made from", f"{record['target_texts']} texts to forget, {kept} to keep"))
    lines = [
        *fact_lines(facts),
        "",
        *aligned([("layer", "rank"), *((n, str(r or "whole")) for n, r in layers.items())]),
    ]
    if items := content["items"]:
        rows = [(name, str(item["rows"]), f"{item['strength']:.3g}") for name, item in items.items()]
        lines += ["", *aligned([("item", "rows", "strength"), *rows])]
    return "\n".join(lines)
