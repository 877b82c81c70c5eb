"""Second moments of layer inputs: all that an edit has to know about the data.

A `Moment` is the sum of outer products of the inputs of one layer, a `Statistics` holds one for every selected layer
and says where they come from. Layers that read the same tensor (`q_proj`, `k_proj` and `v_proj`, say) share one moment.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..files import replace_safetensors


# Height of a panel of the packed upper triangle. Low panels waste little below the diagonal, high ones multiply faster.
PANEL_ROWS = 192
# A float32 sum takes up to this many rows; it then becomes a float64 sum of float32 products of this many rows each.
FLOAT32_ROWS = 32768

FILE_FORMAT = "engram_peft.statistics"
FILE_VERSION = "1"

Panels = list[torch.Tensor]


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, and no TF32 or bfloat16 shortcuts in float32 products: either costs three digits."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


class Moment:
    """Sum of outer products `S = sum_i x_i x_i^T` over `count` rows `x_i` of width `dim`.

    As long as there are at most `dim / 2` rows, the rows themselves are kept: they take less room than the sum, and they
    are its exact factor. Beyond that the sum is kept as panels of its upper triangle: panel `k` holds the rows
    `S[192k : 192(k+1), 192k:]`, which is half the memory and half the work of the full matrix. Merging lists the parts
    side by side; they are added up when the sum is read, in float64.

    Rows may count more or less than once: see `Moment.weighted`.

    A layer that is several maps side by side has rows `(groups, dim)`, and a sum a group, `(groups, dim, dim)`, which is the only
    panel. Where rows are one-hot vectors, `dim` is 1 and the sums are counts.

    Args:
        dim (`int`): Width of a row.
        groups (`int`): Number of rows side by side.

    **Attributes**:
        - **dim** (`int`) -- Width of a row; one more than the layer's input where a constant 1 carries the bias.
        - **groups** (`int`) -- Number of rows side by side.
        - **count** (`int` or `float`) -- Number of rows, each as often as it counts.
        - **rows** (`list[torch.Tensor]`) -- Rows not yet summed up, float32, `(n_i, dim)`.
        - **sums** (`list[list[torch.Tensor]]`) -- Sums as panels, float32 or float64.
    """

    def __init__(self, dim: int, groups: int = 1) -> None:
        self.dim, self.groups = dim, groups
        self.count: int | float = 0
        self.rows: list[torch.Tensor] = []
        self.sums: list[Panels] = []
        self._size: int | None = None  # `size`, where rows do not count once each
        self._summed_up = 0  # rows in `sums[-1]` if `add` may write into it; 0: it is shared, or there is none

    @property
    def size(self) -> int:
        """Number of rows, whatever they count for: what bounds the rank."""
        return int(self.count) if self._size is None else self._size

    @property
    def width(self) -> str:
        """`dim`, or `groups x dim`, for messages."""
        return str(self.dim) if self.groups == 1 else f"{self.groups} x {self.dim}"

    def add(self, rows: torch.Tensor) -> None:
        """Adds float32 `rows`, `(n, dim)` or `(n, groups, dim)`, which count once; or indices `(n,)` of one-hot rows."""
        self.count += len(rows)
        if self._size is not None:
            self._size += len(rows)
        if self.groups == 1 and not self.sums and self.size <= self.dim // 2:
            self.rows.append(rows.clone())
            return
        pending, self.rows = [*self.rows, rows], []
        for block in pending:
            for chunk in block.split(FLOAT32_ROWS):
                self._sum_up(chunk)

    def _products(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """The sum of some rows, panel by panel."""
        if not rows.is_floating_point():
            yield torch.bincount(rows, minlength=self.groups).float()[:, None, None]
        elif self.groups > 1:
            yield torch.einsum("ngi,ngj->gij", rows, rows)
        else:
            yield from (rows[:, i : i + PANEL_ROWS].mT @ rows[:, i:] for i in range(0, self.dim, PANEL_ROWS))

    def _sum_up(self, rows: torch.Tensor) -> None:
        products = self._products(rows)
        if self._summed_up == 0:
            self.sums.append(list(products))
        else:
            panels = self.sums[-1]
            if self._summed_up + len(rows) > FLOAT32_ROWS and panels[0].dtype == torch.float32:
                panels[:] = [panel.double() for panel in panels]
            for panel, product in zip(panels, products, strict=True):
                panel += product
        self._summed_up += len(rows)

    def dense(self, device: str | torch.device | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The sum itself, `(dim, dim)` or `(groups, dim, dim)`, exactly symmetric."""
        device = self.device if device is None else torch.device(device)
        if self.groups > 1:
            total = torch.zeros(self.groups, self.dim, self.dim, dtype=dtype, device=device)
            for (blocks,) in self.sums:
                total += blocks.to(device)
            return total.triu() + total.triu(1).mT
        total = torch.empty(self.dim, self.dim, dtype=dtype, device=device)
        if self.rows or not self.sums:
            rows = torch.cat([*self.rows, torch.zeros(0, self.dim, device=self.device)]).to(device, dtype)
            torch.matmul(rows.mT, rows, out=total)
        for number, panels in enumerate(self.sums):
            start = 0
            for panel in panels:
                block = total[start : start + len(panel), start:]
                if number or self.rows:
                    block += panel.to(device)
                else:
                    block.copy_(panel)
                start += len(panel)
        # only what is on and above the diagonal counts; mirror it block by block
        for start in range(0, self.dim, PANEL_ROWS):
            stop = start + PANEL_ROWS
            square = total[start:stop, start:stop]
            square.copy_(square.triu() + square.triu(1).mT)
            total[stop:, start:stop] = total[start:stop, stop:].mT
        return total

    def factor(self, device: str | torch.device | None = None) -> torch.Tensor | None:
        """`F` with `S = F F^T`, `(dim, n)` float64, where the rank is at most `dim / 2`; otherwise `None`."""
        if self.size > self.dim // 2 or self.groups > 1:
            return None
        device = self.device if device is None else torch.device(device)
        if not self.sums:
            rows = [part.to(device, torch.float64) for part in self.rows]
            return torch.cat(rows).mT if rows else torch.zeros(self.dim, 0, dtype=torch.float64, device=device)
        eigenvalues, vectors = torch.linalg.eigh(self.dense(device))
        top = slice(self.dim - self.size, None)
        return vectors[:, top] * eigenvalues[top].clamp_min(0).sqrt()

    @property
    def device(self) -> torch.device:
        for tensor in self.tensors():
            return tensor.device
        return torch.device("cpu")

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is held, rows first."""
        yield from self.rows
        for panels in self.sums:
            yield from panels

    def copy(self) -> Moment:
        """A moment to which rows can be added without changing this one."""
        other = Moment.merged([self])
        other.sums = [[panel.clone() for panel in panels] for panels in self.sums]
        return other

    def weighted(self, weight: float) -> Moment:
        """The moment of the same rows, each counting `weight` times: `weight S` over `weight count` rows.

        Raises:
            `ValueError`: `weight` is not a positive finite number.
        """
        if not (0 < weight < math.inf):
            raise ValueError(f"`weight` must be a positive finite number, got {weight}.")
        other = Moment.merged([self])
        if weight == 1:
            return other
        count = self.count * weight
        other.count = int(count) if float(count).is_integer() else count
        other._size = self.size
        other.rows = [rows * math.sqrt(weight) for rows in self.rows]
        other.sums = [[panel * weight for panel in panels] for panels in self.sums]
        return other

    def to(self, device: str | torch.device) -> Moment:
        """The same moment on `device`; tensors that are there already are shared."""
        other = Moment.merged([self])
        other.rows = [rows.to(device) for rows in self.rows]
        other.sums = [[panel.to(device) for panel in panels] for panels in self.sums]
        return other

    @staticmethod
    def of_sum(total: torch.Tensor, count: int | float, size: int | None = None) -> Moment:
        """The moment of a sum, `(dim, dim)` symmetric, over `count` rows; of `size` rows if they do not count once each."""
        moment = Moment(len(total))
        moment.count, moment._size = count, size
        moment.sums = [_panels(total)]
        return moment

    @staticmethod
    def merged(moments: Iterable[Moment]) -> Moment:
        """The moment of all rows together. Nothing is copied: the tensors of the parts are shared."""
        moments = list(moments)
        total = Moment(moments[0].dim, moments[0].groups)
        if any(moment._size is not None for moment in moments):
            total._size = sum(moment.size for moment in moments)
        for moment in moments:
            if (moment.groups, moment.dim) != (total.groups, total.dim):
                raise ValueError(f"Cannot merge moments of width {total.width} and {moment.width}.")
            total.count += moment.count
            total.rows += moment.rows
            total.sums += moment.sums
            moment._summed_up = 0  # from here on its sums are shared
        return total


@dataclass(frozen=True)
class Provenance:
    """Where statistics come from. Empty strings mean unknown and agree with everything.

    Args:
        model (`str`): Name or path of the model.
        model_fingerprint (`str`): Hash of the model's configuration.
        tokenizer (`str`): Fingerprint of the tokenizer.
        mask (`str`):
            Which rows were taken: `"answer"`, `"predict"`, `"subject"`, `"labels"`, `"attention_mask"`, `"mask_fn"` or
            `"all"`; several are joined by `+`.
        texts (`int`): Number of texts, or of sequences of a loader.
        library_version (`str`): Version of engram_peft.
    """

    model: str = ""
    model_fingerprint: str = ""
    tokenizer: str = ""
    mask: str = ""
    texts: int = 0
    library_version: str = ""

    def check_agrees(self, other: Provenance, what: str = "statistics") -> None:
        """Raises a `ValueError` if the two cannot come from the same model, tokenizer and mask rule.

        `"subject"` takes one row where `"answer"` and `"predict"` take all of theirs, so it goes with either.
        """

        def differ(mine: str, theirs: str) -> bool:
            return bool(mine and theirs and mine != theirs)

        if differ(self.model_fingerprint, other.model_fingerprint):
            raise ValueError(
                f"These {what} belong to different models: {self.model or 'one'} and {other.model or 'another'} have "
                "different configurations. Collect both on the model that is to be edited."
            )
        if differ(self.tokenizer, other.tokenizer):
            raise ValueError(f"These {what} were collected with different tokenizers. Collect them with the same one.")
        rules = {*self.mask.split("+"), *other.mask.split("+")}
        if {"answer", "predict"} <= rules:
            raise ValueError(
                f"These {what} were collected with different mask rules: token_position='answer' and 'predict' take "
                "different rows of the same text. Collect them with the same `token_position`."
            )

    def merged(self, other: Provenance) -> Provenance:
        """The provenance of both together, after `Provenance.check_agrees`."""
        self.check_agrees(other)
        return Provenance(
            model=self.model or other.model,
            model_fingerprint=self.model_fingerprint or other.model_fingerprint,
            tokenizer=self.tokenizer or other.tokenizer,
            mask="+".join(sorted({*self.mask.split("+"), *other.mask.split("+")} - {""})),
            texts=self.texts + other.texts,
            library_version=self.library_version or other.library_version,
        )


@dataclass
class Statistics:
    """Second moments of the inputs of the selected layers.

    Args:
        moments (`dict[str, Moment]`):
            One `Moment` a layer, by the layer's name in the unwrapped model. Layers that read the same input share one.
        provenance (`Provenance`): Model, tokenizer and mask rule they were collected with.

    Example:

        ```py
        >>> target = collect_statistics(model, forget, tokenizer=tokenizer, target_modules=["down_proj"])
        >>> target.save("forget.safetensors")
        >>> total = merge_statistics(target, Statistics.load("retain.safetensors"))
        ```
    """

    moments: dict[str, Moment]
    provenance: Provenance = field(default_factory=Provenance)

    def __len__(self) -> int:
        return len(self.moments)

    def __contains__(self, name: str) -> bool:
        return name in self.moments

    @property
    def counts(self) -> dict[str, int | float]:
        """Number of rows each layer was fed, each as often as it counts."""
        return {name: moment.count for name, moment in self.moments.items()}

    def covariance(self, name: str) -> torch.Tensor:
        """`C = S / count` of a layer, uncentred, `(dim, dim)` float64; of width `in_features + 1` for a layer with a bias.

        `(groups, dim, dim)` for a layer of several groups; of an embedding, the share of every token, `(tokens, 1, 1)`.
        """
        moment = self.moments[name]
        if moment.count == 0:
            raise ValueError(f"{name} was never fed, so it has no covariance.")
        return moment.dense() / moment.count

    def groups(self) -> list[tuple[Moment, list[str]]]:
        """The distinct moments, each with the names of the layers that share it."""
        names: dict[int, list[str]] = {}
        for name, moment in self.moments.items():
            names.setdefault(id(moment), []).append(name)
        return [(self.moments[group[0]], group) for group in names.values()]

    def _with_moments(self, transformed: list[Moment]) -> dict[str, Moment]:
        replaced = {
            name: moment for moment, (_, names) in zip(transformed, self.groups(), strict=True) for name in names
        }
        return {name: replaced[name] for name in self.moments}

    def to(self, device: str | torch.device) -> Statistics:
        """The same statistics with their tensors on `device`."""
        return Statistics(self._with_moments([moment.to(device) for moment, _ in self.groups()]), self.provenance)

    def weighted(self, weight: float) -> Statistics:
        """The statistics of the same data with every row counting `weight` times: sums and counts are multiplied by it.

        What is to be kept can so outweigh what is to be forgotten: with `total = target.merge(retain.weighted(w), general)`
        the reference is `S_a = S_t + w S_retain + S_general`. Whole weights are the same as listing the data that often.
        Nothing is copied where `weight` is 1; otherwise the sums are.

        Args:
            weight (`float`): How often a row counts, above 0.

        Raises:
            `ValueError`: `weight` is not a positive finite number.

        Example:

            ```py
            >>> total = merge_statistics(target, retain.weighted(30), general)
            >>> report = extract_engram(model, target, total)
            ```
        """
        return Statistics(
            self._with_moments([moment.weighted(weight) for moment, _ in self.groups()]), self.provenance
        )

    def merge(self, *others: Statistics) -> Statistics:
        """The statistics of all data together: see `merge_statistics`."""
        return merge_statistics(self, *others)

    def save(self, path: str | os.PathLike) -> None:
        """Writes one safetensors file: upper triangles packed row by row, shared moments once, provenance in the header.

        The file is written beside `path` and renamed, so an interrupted write leaves an earlier file as it was.

        Note that the statistics of a few texts are close to the texts' own hidden states: keep the file as private as
        the texts.
        """
        tensors: dict[str, torch.Tensor] = {}
        index = []
        for number, (moment, names) in enumerate(self.groups()):
            index.append({"dim": moment.dim, "count": moment.count, "names": names})
            if moment.size != moment.count:
                index[-1]["size"] = moment.size
            if moment.groups > 1:
                index[-1]["groups"] = moment.groups
            if moment.sums or moment.groups > 1:
                tensors[f"{number}.upper"] = _pack_upper(moment)
            else:
                empty = torch.zeros(0, moment.dim)
                tensors[f"{number}.rows"] = torch.cat(moment.rows).cpu() if moment.rows else empty
        metadata = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "moments": json.dumps(index),
            "provenance": json.dumps(asdict(self.provenance)),
        }
        replace_safetensors(Path(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike, device: str | torch.device = "cpu") -> Statistics:
        """Reads what `Statistics.save` wrote.

        Raises:
            `FileNotFoundError`: There is no such file.
            `ValueError`: The file is truncated, was not written by `Statistics.save`, or its header does not fit its tensors.
        """
        if not Path(path).exists():
            raise FileNotFoundError(f"There is no statistics file {path}.")
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                header = file.metadata() or {}
                if header.get("format") != FILE_FORMAT:
                    raise ValueError(f"{path} is not a statistics file of engram_peft.")
                if header.get("version") != FILE_VERSION:
                    raise ValueError(
                        f"{path} has version {header.get('version')} of the statistics format, this library reads "
                        f"version {FILE_VERSION}. Update engram_peft."
                    )
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file ({error}).") from None
        return cls(*_read_header(path, header, tensors))


def merge_statistics(*statistics: Statistics) -> Statistics:
    """The statistics of all data together; exact, associative, and free: the sums are shared, not copied.

    Args:
        statistics (`Statistics`): Statistics of the same layers of the same model.

    Raises:
        `ValueError`: They hold different layers, or come from different models, tokenizers or mask rules.
    """
    if not statistics:
        raise ValueError("merge_statistics needs at least one `Statistics`.")
    first, provenance = statistics[0], statistics[0].provenance
    for other in statistics[1:]:
        if different := sorted(first.moments.keys() ^ other.moments.keys()):
            raise ValueError(f"Only one of the statistics holds {different[:5]}. Collect both on the same layers.")
        provenance = provenance.merged(other.provenance)
    shared: dict[tuple[int, ...], Moment] = {}
    moments = {}
    for name in first.moments:
        parts = [part.moments[name] for part in statistics]
        key = tuple(id(part) for part in parts)
        if key not in shared:
            shared[key] = Moment.merged(parts)
        moments[name] = shared[key]
    return Statistics(moments, provenance)


def _pack_upper(moment: Moment) -> torch.Tensor:
    """The upper triangle of `S`, row by row, `(dim (dim + 1) / 2,)`; float32 where a single float32 sum is held.

    Of a moment of several groups one a group, `(groups, dim (dim + 1) / 2)`.
    """
    exact = len(moment.sums) == 1 and not moment.rows
    if moment.groups > 1:
        blocks = moment.sums[0][0] if exact else moment.dense()
        return blocks[:, _upper_of(blocks[0])].cpu()
    panels = moment.sums[0] if exact else _panels(moment.dense())
    return torch.cat([panel[_upper_of(panel)] for panel in panels]).cpu()


def _panels(matrix: torch.Tensor) -> Panels:
    return [matrix[i : i + PANEL_ROWS, i:] for i in range(0, len(matrix), PANEL_ROWS)]


def _upper_of(panel: torch.Tensor) -> torch.Tensor:
    return torch.ones(panel.shape, dtype=torch.bool, device=panel.device).triu()


def _unpack_upper(upper: torch.Tensor, dim: int) -> Panels:
    if upper.dim() == 2:
        blocks = upper.new_zeros(len(upper), dim, dim)
        blocks[:, _upper_of(blocks[0])] = upper
        return [blocks]
    panels, start = [], 0
    for i in range(0, dim, PANEL_ROWS):
        height, width = min(PANEL_ROWS, dim - i), dim - i
        panel = upper.new_zeros(height, width)
        mask = _upper_of(panel)
        length = int(mask.sum())
        panel[mask] = upper[start : start + length]
        start += length
        panels.append(panel)
    return panels


def _read_header(
    path: str | os.PathLike, header: dict[str, str], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Moment], Provenance]:
    """Moments and provenance of a file; every claim of the header is checked against the tensors."""

    def check(condition: bool, claim: str) -> None:
        if not condition:
            raise ValueError(f"{path} is damaged: {claim}.")

    try:
        index: list[dict[str, Any]] = json.loads(header["moments"])
        known = {f.name for f in fields(Provenance)}
        provenance = Provenance(**{k: v for k, v in json.loads(header["provenance"]).items() if k in known})
        entries = [
            (int(entry["dim"]), int(entry.get("groups", 1)), *_counted(entry), [str(n) for n in entry["names"]])
            for entry in index
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error!r}).") from None
    moments: dict[str, Moment] = {}
    for number, (dim, groups, count, size, names) in enumerate(entries):
        upper, rows = tensors.pop(f"{number}.upper", None), tensors.pop(f"{number}.rows", None)
        tensor = upper if upper is not None else rows
        check(tensor is not None and (upper is None or rows is None), f"moment {number} has no single tensor")
        assert tensor is not None
        check(
            dim > 0 and groups > 0 and 0 <= count < math.inf and size >= 0 and bool(names),
            f"moment {number} claims width {dim}, {groups} groups and {count} rows",
        )
        check(tensor.dtype in (torch.float32, torch.float64), f"moment {number} has dtype {tensor.dtype}")
        check(bool(torch.isfinite(tensor).all()), f"moment {number} holds NaN or infinity")
        check(not set(names) & set(moments), f"moment {number} repeats a layer of an earlier one")
        moment = Moment(dim, groups)
        moment.count, moment._size = count, None if size == count else size
        if rows is not None:
            check(groups == 1, f"moment {number} holds rows of {groups} groups")
            check(tuple(rows.shape) == (size, dim), f"moment {number} claims {size} x {dim}, holds {list(rows.shape)}")
            moment.rows = [rows] if size else []
        else:
            claimed = [dim * (dim + 1) // 2] if groups == 1 else [groups, dim * (dim + 1) // 2]
            check(
                list(tensor.shape) == claimed,
                f"moment {number} claims {math.prod(claimed)} values, holds {tensor.numel()}",
            )
            moment.sums = [_unpack_upper(tensor, dim)]
        moments.update(dict.fromkeys(names, moment))
    check(not tensors, f"it holds unexpected tensors {sorted(tensors)[:5]}")
    return moments, provenance


def _counted(entry: dict[str, Any]) -> tuple[int | float, int]:
    """Count and size of a moment in a header, which names the size only where it is another number."""
    count = entry["count"] if isinstance(entry["count"], float) else int(entry["count"])
    return count, operator.index(entry.get("size", count))
