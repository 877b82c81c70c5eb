"""Texts with coloured tokens, as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

import torch


Panel = tuple[Sequence[str], Sequence[tuple[str, torch.Tensor]]]
Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #59636e; --back: #fff; --line: #d8dee4;
  --more: 47, 111, 219; --less: 209, 73, 91; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa5b1; --back: #14171b; --line: #333b44; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.6 system-ui, sans-serif; }
h3, figcaption { color: var(--soft); font-size: .85rem; font-weight: 500; margin: .75rem 0 .15rem; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.tokens span { border-radius: .15rem; }
article { border-top: 1px solid var(--line); padding: .5rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; white-space: pre-wrap; }
"""


def heat_map_page(title: str, panels: Sequence[Panel], tables: Sequence[Table] = ()) -> str:
    """A page of texts.

    Args:
        title (`str`): Of the page.
        panels (`Sequence`):
            For each text its tokens, and the maps to draw over it: a name and `(tokens,)` numbers each. Blue is above zero,
            red below; the strongest colour is the largest absolute value of that map over all texts. The number is the
            token's tooltip.
        tables (`Sequence`): Below the texts: a caption, the header and the rows.
    """
    largest: dict[str, float] = {}
    for _, maps in panels:
        for name, values in maps:
            largest[name] = max(largest.get(name, 0.0), float(values.abs().max()) if len(values) else 0.0)
    articles = []
    for tokens, maps in panels:
        drawn = [
            f'<h3>{html.escape(name)}, up to {largest[name]:.3g}</h3>\n<p class="tokens">{_spans(tokens, values, largest[name])}</p>'
            for name, values in maps
        ]
        articles.append("<article>\n" + "\n".join(drawn) + "\n</article>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(articles)
        + "\n"
        + "\n".join(_table(*table) for table in tables)
        + "\n</body>\n</html>\n"
    )


def _spans(tokens: Sequence[str], values: torch.Tensor, largest: float) -> str:
    spans = []
    for token, value in zip(tokens, values.tolist(), strict=True):
        color = "more" if value >= 0 else "less"
        opacity = 0.75 * abs(value) / largest if largest else 0.0
        style = f' style="background:rgba(var(--{color}),{opacity:.3f})"' if opacity > 0 else ""
        spans.append(f'<span title="{value:.4g}"{style}>{html.escape(token)}</span>')
    return "".join(spans)


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section>\n<h2>{html.escape(caption)}</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n</section>"
    )
