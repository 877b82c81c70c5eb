"""What an adapter took out, and at what price, as one HTML page that needs nothing else: no network, no scripts.

`html_report` shows what `unlearn` found, and whatever was measured with a suite and over the strength (`tuning.scale_curve`). Charts are drawn by hand, as tables with coloured cells and one inline SVG: so they follow the reader's light or dark theme,
and a page looks the same whatever is installed. The forgotten texts themselves are shown only if they are passed.
"""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .editing.extraction import ExtractionReport
from .editing.item_edit import ItemReport
from .editing.tuning import AlphaCurve
from .evaluation.report import FORGOTTEN, KEPT, Evaluation, GroupScores


if TYPE_CHECKING:
    from peft import PeftModel

    from .tuners.engram import EngramConfig


class Html(str):
    """A piece of HTML; any other string is text and gets escaped."""


def html_report(
    model: PeftModel,
    adapter_name: str = "default",
    *,
    path: str = "adapter",
    curve: AlphaCurve | None = None,
    before: Evaluation | None = None,
    after: Evaluation | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """One page about an adapter that `unlearn` made.

    Args:
        model (`PeftModel`): What `unlearn` returned.
        adapter_name (`str`): Which adapter.
        path (`str`): Where the adapter is saved, for the page to say.
        curve (`AlphaCurve`, *optional*): The trade-off over the strength; by default what `unlearn(alpha="auto")` saw.
        before, after (`Evaluation`, *optional*): The same suite on the base model and with the adapter.
        texts (`Mapping`, *optional*): The texts of every item, by its name. Without them the page holds names only.

    Returns:
        `str`: The page.

    Raises:
        `ValueError`: The adapter was not made by `unlearn` in this process, so nothing is known about it.
    """
    tuner = model.base_model
    found = tuner.reports.get(adapter_name)
    if found is None:
        raise ValueError(f"Nothing is known about the adapter {adapter_name!r}: `unlearn` did not make it just now.")
    config = tuner.peft_config[adapter_name]
    base = config.base_model_name_or_path or "a model"
    curve = tuner.curves.get(adapter_name) if curve is None else curve
    title = _title(found, config)
    sections = [
        _summary(found, config, base, path),
        _items(found, texts) if isinstance(found, ItemReport) else _layers(found),
        "" if after is None else _groups(after, before),
        "" if curve is None else _trade_off(curve),
        _layer_map(found),
        _how_to(config, adapter_name, base, path),
    ]
    footer = f"Made on {datetime.date.today().isoformat()} with engram_peft {_version()}."
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(filter(None, sections)) + f"\n</main>\n"
        f"<footer>{html.escape(footer)}</footer>\n</body>\n</html>\n"
    )


# -------------------------------------------------------------------------------------------------- sections


def _title(found: ItemReport | ExtractionReport, config: EngramConfig) -> str:
    count = len(found.items) if isinstance(found, ItemReport) else (config.extraction or {}).get("target_texts", 0)
    what = "item" if isinstance(found, ItemReport) else "text"
    return f"{count} {what}{'' if count == 1 else 's'} to forget"


def _summary(found: ItemReport | ExtractionReport, config: EngramConfig, base: str, path: str) -> str:
    record = config.extraction or {}
    facts: list[tuple[str, Any]] = [("Model", base), ("Adapter", path)]
    facts.append(
        ("Method", "item by item" if config.method == "items" else "closed form of the paper, one strength for all")
    )
    if isinstance(found, ItemReport):
        resisting = len(found.resisting)
        facts.append(("Forgotten", f"{len(found.items) - resisting} of {len(found.items)} items"))
        before, after = ([getattr(item, when) for item in found.items] for when in ("before", "after"))
        facts.append(("Mean probability", f"{_number(_mean(before))} → {_number(_mean(after))}"))
    facts.append(("Forget data", f"{record.get('target_texts', 0)} texts, {record.get('target_rows', 0)} tokens"))
    kept_texts = record.get("total_texts", 0) - record.get("target_texts", 0)
    kept_rows = record.get("total_rows", 0) - record.get("target_rows", 0)
    facts.append(("Retain data", f"{kept_texts} texts, {kept_rows} tokens"))
    facts.append(("Strength", f"alpha {config.alpha:g}, scale {config.scale:g}"))
    pairs = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts
    )
    return f'<dl class="facts">{pairs}</dl>'


def _items(report: ItemReport, texts: Mapping[str, Sequence[str]] | None) -> str:
    header = ["Item", "Before", "After", "Goal", "Strength", "State"]
    rows: list[list[str]] = []
    for item in report.items:
        name = html.escape(item.name)
        for text in (texts or {}).get(item.name, ()):
            name += f'<p class="text">{html.escape(text)}</p>'
        state = Html('<strong class="bad">resists</strong>') if item.resists else "forgotten"
        rows.append(
            [Html(name), _bar(item.before), _bar(item.after), _number(item.goal), _number(item.strength), state]
        )
    note = (
        "How likely the model says each item, before and now; the goal is what it may be at most. An item resists if it is "
        "still likelier than that, or still what greedy decoding says."
    )
    return _section("Items", note, _table("The items, one by one", header, rows))


def _layers(report: ExtractionReport) -> str:
    header = ["Layer", "Rank", "Kept", "Coverage", "Strength"]
    rows = [
        [d.name, str(d.rank), f"{d.kept} of {d.width}", _number(d.coverage), _number(d.relative_strength)]
        for d in report.layers.values()
    ]
    note = "Strength is by how much the layer's weight changes at alpha 1, as a share of its norm."
    return _section("Layers", note, _table("The edit, layer by layer", header, rows))


def _groups(after: Evaluation, before: Evaluation | None) -> str:
    columns = [
        field.name
        for field in fields(GroupScores)
        if any(getattr(scores, field.name) is not None for scores in after.groups.values())
    ]
    header = ["Group", *(column.replace("_", " ").capitalize() for column in columns)]
    rows = []
    for name, scores in after.groups.items():
        earlier = before.groups.get(name) if before else None
        cells = [_change(column, getattr(scores, column), getattr(earlier, column, None)) for column in columns]
        rows.append([name.replace("_", " "), *cells])
    parts = [_table("Probes by group, before → now", header, rows)] if rows else []
    totals = _totals(after, before)
    if totals:
        parts.append(_table("All in all", ["Measure", "Value"], totals))
    note = (
        "Named is the share of the probes whose answer greedy decoding gives: low is good in forget, paraphrase and cloze, "
        "high is good in the other groups. Bars show it, the paler one before the edit."
    )
    return _section("Measured with the suite", note, *parts)


def _totals(after: Evaluation, before: Evaluation | None) -> list[list[str]]:
    rows = []
    for name, label in (("perplexity", "Perplexity of general texts"), ("membership_auc", "Membership AUC")):
        if (now := getattr(after, name)) is not None:
            rows.append([label, _change(name, now, getattr(before, name, None))])
    if set(FORGOTTEN) & set(after.groups):
        rows.append(["Forgetting", _number(after.forgetting)])
    if before is not None and set(KEPT) & set(after.groups):
        rows.append(["Utility", _number(after.utility(before))])
        if set(FORGOTTEN) & set(after.groups):
            rows.append(["Balance", _number(after.balance(before))])
    return rows


def _change(column: str, now: float | None, before: float | None) -> str:
    """A cell that says what a number was and is; shares of the greedy choice get bars as well."""
    if column == "count" or now is None:
        return "–" if now is None else str(now)
    text = _number(now) if before is None else f"{_number(before)} → {_number(now)}"
    if column != "named":
        return text
    bars = "".join(_bar_span(value, kind) for value, kind in ((before, "pale"), (now, "")) if value is not None)
    return Html(f"{html.escape(text)}{bars}")


def _trade_off(curve: AlphaCurve) -> str:
    header = ["Scale", "Still said", "Damage", ""]
    reasons = {"goal": "chosen: the least that forgets", "budget": "chosen: more would cost too much"}
    chosen = reasons.get(curve.reason, curve.reason)
    rows = [
        [_number(p.scale), _number(p.forget), _number(p.damage), chosen if p.scale == curve.chosen else ""]
        for p in curve.points
    ]
    note = (
        "Still said is how likely the forgotten answers are, on average; damage is the share of their probability that the "
        "kept answers lost. Scale 0 is the base model. Moving along the curve recomputes nothing."
    )
    table = _table("The trade-off in numbers", header, rows)
    return _section("Trade-off", note, _curve_svg(curve), f"<details><summary>In numbers</summary>{table}</details>")


def _layer_map(found: ItemReport | ExtractionReport) -> str:
    if isinstance(found, ItemReport):
        values = found.layer_effects
        note = "By how much each layer's edit lowers the logit of what is forgotten, on average."
    else:
        values = {name: d.relative_strength for name, d in found.layers.items()}
        note = "By how much each layer's weight changes at alpha 1, as a share of its norm."
    if not values:
        return ""
    cells = {_place(name): value for name, value in values.items()}
    layers = sorted({layer for layer, _ in cells})
    modules = list(dict.fromkeys(module for _, module in cells))
    largest = max(abs(value) for value in cells.values()) or 1.0
    rows = [[module, *(_heat(cells.get((layer, module)), largest) for layer in layers)] for module in modules]
    header = ["Layer", *("–" if layer < 0 else str(layer) for layer in layers)]
    return _section("Where the edit acts", note, _table("Layers by modules", header, rows, "heat"))


def _how_to(config: EngramConfig, adapter_name: str, base: str, path: str) -> str:
    item = next(iter(config.items or {}), None)
    lines = [
        "import engram_peft  # makes the method known to PEFT",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({base!r})",
        f"model = PeftModel.from_pretrained(model, {path!r}, adapter_name={adapter_name!r})",
        "",
        f"model.set_scale({adapter_name!r}, {1.2 * config.scale:g})  # stronger; 0 is the base model",
    ]
    if item is not None:
        lines.append(f"model.restore_item({item!r}, {adapter_name!r})  # give this one item back")
    lines += [
        "with model.disable_adapter():",
        "    ...  # the base model for a while",
        f"model.save_pretrained({path!r})  # keep the changes",
        "model = model.unload()  # remove it: the base model again",
    ]
    code = f"<pre><code>{html.escape(chr(10).join(lines))}</code></pre>"
    return _section("How to use, change and remove it", "The base model is not changed by the adapter.", code)


# -------------------------------------------------------------------------------------------------- pieces


def _section(title: str, note: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>{''.join(parts)}</section>"


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "plain") -> str:
    """A table whose first column names the rows. It scrolls by itself where the page is too narrow for it."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{_escaped(row[0])}</th>'
        + "".join(f"<td>{_escaped(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f'<table class="{kind}"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _escaped(cell: str) -> str:
    return cell if isinstance(cell, Html) else html.escape(cell)


def _bar(share: float) -> Html:
    return Html(f"{_number(share)}{_bar_span(share)}")


def _bar_span(share: float, kind: str = "") -> str:
    width = 100 * min(max(share, 0.0), 1.0)
    return f'<span class="bar {kind}" style="width:{width:.1f}%" aria-hidden="true"></span>'


def _heat(value: float | None, largest: float) -> str:
    if value is None:
        return "–"
    color = "var(--warm)" if value >= 0 else "var(--cold)"
    shade = f'<span class="shade" style="background:{color};opacity:{0.7 * abs(value) / largest:.3f}" aria-hidden="true"></span>'
    return Html(f'{shade}<span class="value">{_number(value)}</span>')


def _curve_svg(curve: AlphaCurve) -> str:
    """Both quantities over the scale."""
    left, right, top, bottom = 40, 590, 12, 210
    scales = [point.scale for point in curve.points]
    low, span = min(scales), (max(scales) - min(scales)) or 1.0

    def x(scale: float) -> float:
        return left + (scale - low) / span * (right - left)

    def y(share: float) -> float:
        return bottom - min(max(share, 0.0), 1.0) * (bottom - top)

    parts = [
        f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in (0, 0.25, 0.5, 0.75, 1)
    ]
    ticks = [low + span * i / 4 for i in range(5)]
    parts += [f'<text x="{x(t):.1f}" y="{bottom + 18}" text-anchor="middle">{t:.3g}</text>' for t in ticks]
    chosen = x(curve.chosen)
    parts.append(f'<line class="chosen" x1="{chosen:.1f}" x2="{chosen:.1f}" y1="{top}" y2="{bottom}"/>')
    for name, kind in (("forget", "said"), ("damage", "damage")):
        places = [(x(point.scale), y(getattr(point, name)), getattr(point, name)) for point in curve.points]
        parts.append(f'<polyline class="{kind}" points="{" ".join(f"{px:.1f},{py:.1f}" for px, py, _ in places)}"/>')
        parts += [
            f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>{_number(value)}</title></circle>'
            for px, py, value in places
        ]
    parts.append(f'<text x="{(left + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">scale</text>')
    return (
        '<figure><svg viewBox="0 0 600 250" role="img" aria-labelledby="curve-title"><title id="curve-title">'
        "How likely the forgotten answers still are, and the damage to the kept ones, over the scale of the adapter"
        f"</title>{''.join(parts)}</svg><figcaption>"
        '<span class="key said"></span> still said <span class="key damage"></span> damage '
        '<span class="key chosen"></span> the adapter as saved</figcaption></figure>'
    )


def _place(name: str) -> tuple[int, str]:
    """The index of the decoder layer in a layer's name, -1 if there is none, and the last part of the name."""
    parts = name.split(".")
    return next((int(part) for part in parts if part.isdigit()), -1), parts[-1]


def _number(value: float) -> str:
    return f"{value:.3g}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _version() -> str:
    from . import __version__

    return __version__


STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #59636e; --back: #fff; --line: #d8dee4; --bar: #2f6fdb;
  --warm: #d1495b; --cold: #2f6fdb; --good: #1a7f4b; --code: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa5b1; --back: #14171b; --line: #333b44;
  --bar: #6aa0ff; --warm: #ff7a8a; --cold: #6aa0ff; --good: #56d08f; --code: #1e2329; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main, footer { max-width: 60rem; margin: 0 auto; padding: 1rem; }
footer, p, figcaption, caption, dt { color: var(--soft); }
h1 { line-height: 1.2; } h2 { margin: 2rem 0 .25rem; } section > p { margin: 0 0 .75rem; max-width: 46rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 0; }
.facts > div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; }
.facts dt { font-size: .85rem; } .facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: .85rem; padding-bottom: .25rem; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; }
td { white-space: nowrap; min-width: 4rem; } tbody th { font-weight: 500; overflow-wrap: anywhere; }
.text { margin: .2rem 0 0; font-weight: 400; font-size: .9rem; max-width: 30rem; white-space: pre-wrap; }
.bad { color: var(--warm); }
.bar { display: block; height: .3rem; min-width: 1px; margin-top: .15rem; border-radius: .15rem; background: var(--bar); }
.bar.pale { opacity: .4; }
.heat td { position: relative; min-width: 3rem; font-size: .75rem; text-align: center; }
.shade { position: absolute; inset: 1px; border-radius: .2rem; } .value { position: relative; }
figure { margin: 0; } svg { width: 100%; height: auto; max-width: 44rem; }
svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
.chosen { stroke: var(--soft); stroke-dasharray: 4 4; } polyline { fill: none; stroke-width: 2.5; }
polyline.said { stroke: var(--warm); } circle.said { fill: var(--warm); }
polyline.damage { stroke: var(--good); } circle.damage { fill: var(--good); }
.key { display: inline-block; width: .8rem; height: .8rem; margin-left: .8rem; border-radius: .2rem; }
.key.said { background: var(--warm); } .key.damage { background: var(--good); }
.key.chosen { border: 1px dashed var(--soft); }
pre { background: var(--code); border-radius: .5rem; padding: .75rem; overflow-x: auto; font-size: .85rem; }
"""
