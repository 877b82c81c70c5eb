"""What was measured on a model: numbers by group and by probe, as tables, plots and JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..files import replace_text
from .probes import ProbeScore


if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORGOTTEN = ("forget", "paraphrase", "cloze")
KEPT = ("retain", "held_out", "neighbour", "other")
GROUPS = (*FORGOTTEN, *KEPT)


@dataclass(frozen=True)
class GroupScores:
    """What a model makes of a group of probes. `None` is what was not measured.

    **Attributes**:
        - **count** (`int`) -- How many probes.
        - **named** (`float`) -- Share whose answer is, token by token, the greedy choice.
        - **probability** (`float`) -- Mean probability of the whole answer.
        - **rank** (`float`) -- Median over the probes of the largest rank of the answer's tokens.
        - **nll** (`float`) -- Mean over the probes of the mean negative log-likelihood of the answer's tokens, in nats.
        - **rouge_l** (`float`, *optional*) -- Mean ROUGE-L recall of the greedy generations.
        - **truth_ratio** (`float`, *optional*) -- Mean truth ratio of the probes with wrong answers.
        - **leaked** (`float`, *optional*) -- Share whose greedy generation contains the answer.
        - **leaked_sampled** (`float`, *optional*) -- Share of which any sampled generation does.
    """

    count: int
    named: float
    probability: float
    rank: float
    nll: float
    rouge_l: float | None = None
    truth_ratio: float | None = None
    leaked: float | None = None
    leaked_sampled: float | None = None

    @classmethod
    def of(cls, scores: Sequence[ProbeScore]) -> GroupScores:
        """The scores of a group's probes, at least one, summed up."""
        return cls(
            count=len(scores),
            named=statistics.fmean(score.named for score in scores),
            probability=statistics.fmean(score.probability for score in scores),
            rank=float(statistics.median(score.rank for score in scores)),
            nll=statistics.fmean(score.nll for score in scores),
            **{name: _mean_of_known(scores, name) for name in ("rouge_l", "truth_ratio", "leaked", "leaked_sampled")},
        )


def _mean_of_known(scores: Sequence[ProbeScore], name: str) -> float | None:
    known = [getattr(score, name) for score in scores if getattr(score, name) is not None]
    return statistics.fmean(known) if known else None


@dataclass
class Evaluation:
    """What `evaluate` found. `print` shows it as a table.

    **Attributes**:
        - **groups** (`dict[str, GroupScores]`) -- By the group's name in the suite, those that have probes.
        - **perplexity** (`float`, *optional*) -- Of the suite's general texts.
        - **membership_auc** (`float`, *optional*) --
          How well min-k% prob tells members from non-members: 0.5 is chance, 1 is certainty. Below 0.5 the forgotten texts
          stand out as ones that the model finds strangely unlikely, which gives them away as well.
        - **probes** (`dict[str, list[ProbeScore]]`) -- The scores of every probe, in the suite's order.
    """

    groups: dict[str, GroupScores]
    perplexity: float | None = None
    membership_auc: float | None = None
    probes: dict[str, list[ProbeScore]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.groups, *self.probes):
            if name not in GROUPS:
                raise ValueError(f"There is no group {name!r}. The groups are {list(GROUPS)}.")

    @property
    def forgetting(self) -> float:
        """1 - the mean of `named` over the groups forget, paraphrase and cloze, of those that were measured."""
        return 1 - self._mean_named(FORGOTTEN)

    def utility(self, before: Evaluation) -> float:
        """The mean of `named` over the groups retain, held_out, neighbour and other, of those that were measured, times
        `min(1, perplexity before / perplexity now)` where both were measured.

        Args:
            before (`Evaluation`): The same suite on the model before it was edited.

        Raises:
            `ValueError`: None of these groups was measured.
        """
        named = self._mean_named(KEPT)
        if self.perplexity is None or before.perplexity is None:
            return named
        return named * min(1.0, before.perplexity / self.perplexity)

    def balance(self, before: Evaluation) -> float:
        """Harmonic mean of `forgetting` and `utility(before)`: high only if both are."""
        return harmonic_mean([self.forgetting, self.utility(before)])

    def _mean_named(self, names: Sequence[str]) -> float:
        named = [self.groups[name].named for name in names if name in self.groups]
        if not named:
            raise ValueError(f"None of the groups {list(names)} was measured. Give the suite probes for one of them.")
        return statistics.fmean(named)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dictionaries, lists and numbers."""
        return asdict(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON.

        Args:
            path (`str`, *optional*): A file to write it to as well; it replaces an older one at once or not at all.
        """
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            replace_text(path, text + "\n")
        return text

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Evaluation:
        """What `to_dict` was made of.

        Raises:
            `ValueError`: There is a group of an unknown name.
        """
        return cls(
            groups={name: GroupScores(**scores) for name, scores in content["groups"].items()},
            perplexity=content["perplexity"],
            membership_auc=content["membership_auc"],
            probes={name: [ProbeScore(**score) for score in scores] for name, scores in content["probes"].items()},
        )

    def __str__(self) -> str:
        return self._table(None)

    def compare(self, before: Evaluation) -> str:
        """A table of what was measured before and now, `before -> now` in every cell.

        Args:
            before (`Evaluation`): The same suite on the model before it was edited.
        """
        return self._table(before)

    def _table(self, before: Evaluation | None) -> str:
        rows = [["group", *(column.name.replace("_", " ") for column in fields(GroupScores))]]
        for name, scores in self.groups.items():
            earlier = before.groups.get(name) if before else None
            cells = [
                _cell(getattr(scores, column.name), getattr(earlier, column.name, None), before is not None)
                for column in fields(GroupScores)[1:]
            ]
            rows.append([name, str(scores.count), *cells])
        empty = {"-", "- -> -"}
        columns = [cells for cells in zip(*rows, strict=True) if not set(cells[1:]) <= empty]
        lines = aligned(list(zip(*columns, strict=True))) if self.groups else []
        known = [
            (label, _cell(getattr(self, name), getattr(before, name, None), before is not None))
            for name, label in (("perplexity", "perplexity"), ("membership_auc", "membership AUC"))
            if getattr(self, name) is not None
        ]
        if set(FORGOTTEN) & set(self.groups):
            known.append(("forgetting", f"{self.forgetting:.3f}"))
        if before is not None and set(KEPT) & set(self.groups):
            known.append(("utility", f"{self.utility(before):.3f}"))
            if set(FORGOTTEN) & set(self.groups):
                known.append(("balance", f"{self.balance(before):.3f}"))
        return "\n".join([*lines, *([""] if lines and known else []), *aligned(known)])

    def plot(self, before: Evaluation | None = None, ax: Axes | None = None) -> Axes:
        """Bars of the named share and of the mean probability by group. Needs matplotlib.

        Args:
            before (`Evaluation`, *optional*): The same suite on the model before it was edited, as paler bars beside.
            ax (`matplotlib.axes.Axes`, *optional*): Where to draw.
        """
        from matplotlib import pyplot

        if ax is None:
            _, ax = pyplot.subplots(figsize=(max(5.0, 1.2 * len(self.groups) + 1), 3.6), layout="constrained")
        series = [(self, 1.0, "")] if before is None else [(before, 0.4, " before"), (self, 1.0, " now")]
        bars = [
            (evaluation, quantity, color, opacity, quantity + when)
            for quantity, color in (("named", "tab:blue"), ("probability", "tab:orange"))
            for evaluation, opacity, when in series
        ]
        width = 0.8 / len(bars)
        for i, (evaluation, quantity, color, opacity, label) in enumerate(bars):
            heights = [getattr(evaluation.groups.get(name), quantity, float("nan")) for name in self.groups]
            places = [group + (i - (len(bars) - 1) / 2) * width for group in range(len(heights))]
            ax.bar(places, heights, width, color=color, alpha=opacity, label=label)
        ax.set_xticks(range(len(self.groups)), [name.replace("_", " ") for name in self.groups])
        ax.set_ylim(0, 1)
        ax.set_ylabel("share")
        ax.legend()
        return ax


def _cell(now: float | None, before: float | None, compared: bool) -> str:
    return f"{_number(before)} -> {_number(now)}" if compared else _number(now)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their widest cell; numbers are flush right, what is left of them flush left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def harmonic_mean(values: Sequence[float]) -> float:
    """The harmonic mean of values that are not negative: 0 if one of them is."""
    return len(values) / sum(1 / value for value in values) if min(values) > 0 else 0.0
