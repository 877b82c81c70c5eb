"""What a memory does with texts: which n-grams fire, how far the gates open, what the output would be without it.

Everything works on any module that has `NgramMemory` layers inside: they are watched with hooks, and called as ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .capacity import Collisions, count_collisions
from .heat_map import heat_map_page
from .layer import NgramMemory


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MemoryCall:
    """What one memory did in one call. `T` tokens, all on the CPU.

    Args:
        ids (`torch.Tensor`): `(batch, T)` compressed ids.
        reach (`torch.Tensor`): `(batch, T)`.
        rows (`torch.Tensor`): `(batch, T, orders, heads)` rows within each table.
        read (`torch.Tensor`): `(batch, T, orders)` booleans: the token looked its n-gram up.
        fired (`torch.Tensor`): `(batch, T, orders)` booleans: and one of its rows is not zero.
        gates (`torch.Tensor`): `(batch, T, branches)` in [0, 1]; 0 for tokens that read nothing.
        strength (`torch.Tensor`): `(batch, T)`: the norm of what was added over that of the hidden state.
    """

    ids: torch.Tensor
    reach: torch.Tensor
    rows: torch.Tensor
    read: torch.Tensor
    fired: torch.Tensor
    gates: torch.Tensor
    strength: torch.Tensor


@dataclass(frozen=True)
class FiredNgram:
    """An n-gram that fired in a layer: how often, and on average how far the gate was open and how much was added."""

    layer: str
    ngram: str
    order: int
    count: int
    gate: float
    strength: float


@dataclass(frozen=True)
class TableUsage:
    """How much of a layer's tables is in use.

    Args:
        layer (`str`): Name of the memory in the model.
        rows (`int`): Rows of all tables.
        written (`int`): Rows that are not zero. A row that is was never touched by training, since tables start at zero.
        read (`int`): Rows that the texts look up.
        read_written (`int`): Rows that are both.
        collisions (`tuple[Collisions, ...]`): Between the n-grams of the texts.
    """

    layer: str
    rows: int
    written: int
    read: int
    read_written: int
    collisions: tuple[Collisions, ...]

    @property
    def never_touched(self) -> int:
        return self.rows - self.written


@dataclass(frozen=True)
class TextReport:
    """One text, token by token.

    Args:
        tokens (`list[str]`): The tokens.
        gates (`dict[str, torch.Tensor]`): By layer, `(T,)`: the mean over branches where an n-gram fired, else 0.
        strength (`dict[str, torch.Tensor]`): By layer, `(T,)`.
        gain (`torch.Tensor`): `(T,)`: by how much the memories raise the log-probability of the token; 0 for the first.
        logit_change (`torch.Tensor`):
            `(T,)`: the largest change, by the memories, of a logit of the prediction of the token; 0 for the first.
    """

    tokens: list[str]
    gates: dict[str, torch.Tensor]
    strength: dict[str, torch.Tensor]
    gain: torch.Tensor
    logit_change: torch.Tensor


@dataclass(frozen=True)
class MemoryReport:
    """What `memory_report` found.

    Args:
        texts (`list[TextReport]`): One a text.
        ngrams (`list[FiredNgram]`): What fired, the strongest first.
        usage (`list[TableUsage]`): One a layer.
    """

    texts: list[TextReport]
    ngrams: list[FiredNgram]
    usage: list[TableUsage]

    @property
    def gain(self) -> float:
        """Mean gain in log-probability over all predicted tokens, in nats."""
        gains = torch.cat([text.gain[1:] for text in self.texts])
        return gains.mean().item() if len(gains) else 0.0

    def to_html(self) -> str:
        """One page that needs nothing else: the texts, coloured by the gates and by the gain, and the tables."""
        panels = [
            (text.tokens, [("Gain", text.gain), *((f"Gate of {name}", gate) for name, gate in text.gates.items())])
            for text in self.texts
        ]
        ngrams = [
            [n.ngram, n.layer, str(n.order), str(n.count), f"{n.gate:.3f}", f"{n.strength:.3g}"] for n in self.ngrams
        ]
        usage = [
            [u.layer, f"{u.rows:,}", f"{u.never_touched:,}", f"{u.read:,}", f"{u.read_written:,}"]
            + [", ".join(f"{c.order}-grams: {c.shared:.1%} shared, {c.lost:g} lost" for c in u.collisions)]
            for u in self.usage
        ]
        return heat_map_page(
            "What the memories do",
            panels,
            [
                ("N-grams that fire", ["N-gram", "Layer", "Order", "Times", "Gate", "Strength"], ngrams),
                ("Tables", ["Layer", "Rows", "Never touched", "Read", "Read, written", "Collisions"], usage),
            ],
        )


# ------------------------------------------------------------------------------------------------- watching


@contextmanager
def record_memory(model: nn.Module) -> Iterator[dict[str, list[MemoryCall]]]:
    """Records what every `NgramMemory` inside `model` does, while the context lasts.

    Args:
        model (`nn.Module`): The model, or a single memory.

    Returns:
        By the memory's name, its calls so far. Nothing is compiled away: call the model itself, not a compiled one.

    Raises:
        `ValueError`: There is no memory in `model`.
    """
    calls: dict[str, list[MemoryCall]] = {}
    with ExitStack() as stack:
        for name, memory in _memories(model).items():
            watch = _Watch(calls.setdefault(name, []))
            for handle in (
                memory.gate.register_forward_hook(watch.gate),
                memory.register_forward_hook(watch.memory, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        yield calls


@contextmanager
def memory_off(model: nn.Module) -> Iterator[None]:
    """While the context lasts, no `NgramMemory` inside `model` adds anything.

    Args:
        model (`nn.Module`): The model, or a single memory.

    Raises:
        `ValueError`: There is no memory in `model`.
    """
    with ExitStack() as stack:
        for memory in _memories(model).values():
            stack.callback(memory.register_forward_hook(_nothing).remove)
        yield


def _nothing(module: nn.Module, args: Any, output: Any) -> Any:
    delta, conv_inputs = output
    return torch.zeros_like(delta), conv_inputs


def _memories(model: nn.Module) -> dict[str, NgramMemory]:
    found = {name or "memory": module for name, module in model.named_modules() if isinstance(module, NgramMemory)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no n-gram memory inside.")
    return found


class _Watch:
    """The hooks of one memory: its gate runs before it returns."""

    def __init__(self, calls: list[MemoryCall]) -> None:
        self.calls = calls
        self.gates: torch.Tensor | None = None

    def gate(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.gates = output.detach()

    @torch.no_grad()
    def memory(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        assert isinstance(module, NgramMemory) and self.gates is not None
        given = dict(zip(("hidden_states", "ids", "reach"), args, strict=False)) | kwargs
        hidden_states, ids, reach, delta = given["hidden_states"], given["ids"], given["reach"], output[0]
        spec = module.spec
        shape = (len(spec.orders), spec.n_heads)
        rows = module.hash(ids, reach)
        written = (module.table(rows) != 0).any(-1).unflatten(-1, shape).any(-1).to(reach.device)
        least = [order - 1 if spec.variant == "needle" else 0 for order in spec.orders]
        read = reach.unsqueeze(-1) >= torch.tensor(least, device=reach.device)
        width = hidden_states.flatten(2).float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        self.calls.append(
            MemoryCall(
                ids=ids[:, spec.ids_lookback :].cpu(),
                reach=reach.cpu(),
                rows=rows.unflatten(-1, shape).cpu(),
                read=read.cpu(),
                fired=(written & read).cpu(),
                gates=torch.where(reach.unsqueeze(-1) >= 0, self.gates.squeeze(-1), 0).float().cpu(),
                strength=(delta.flatten(2).float().norm(dim=-1) / width).cpu(),
            )
        )


# ------------------------------------------------------------------------------------------------- the report


@torch.no_grad()
def memory_report(
    model: nn.Module,
    texts: Sequence[str | torch.Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    top: int = 50,
) -> MemoryReport:
    """Reads texts with a model, with its memories and without them, and says what they did.

    Args:
        model (`nn.Module`): A causal language model with memories; called as `model(input_ids=...)`, it returns `logits`.
        texts (`Sequence[str | torch.Tensor]`): Texts, or `(length,)` token ids. They are read one at a time.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts; without it, tokens are shown as numbers.
        top (`int`): How many n-grams to list.

    Raises:
        `ValueError`: There is no memory in the model, or a text and no tokenizer.
    """
    if not texts:
        raise ValueError("`texts` must hold at least one text.")
    encoded = [_encode(text, tokenizer) for text in texts]
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        reports, records = [], []
        for ids in encoded:
            inputs = ids[None].to(device)
            with record_memory(model) as calls:
                logits = model(input_ids=inputs).logits[0].float()
            with memory_off(model):
                without = model(input_ids=inputs).logits[0].float()
            record = {name: found[0] for name, found in calls.items()}
            records.append(record)
            reports.append(_text_report(_tokens(ids, tokenizer), ids, record, logits.cpu(), without.cpu()))
    finally:
        model.train(was_training)
    usage = [_usage(name, memory, [record[name] for record in records]) for name, memory in _memories(model).items()]
    return MemoryReport(reports, _fired_ngrams(model, reports, records)[:top], usage)


def _encode(text: str | torch.Tensor, tokenizer: PreTrainedTokenizerBase | None) -> torch.Tensor:
    if isinstance(text, torch.Tensor):
        return text
    if tokenizer is None:
        raise ValueError("`tokenizer` must be given for texts; only token ids can do without.")
    return torch.tensor(tokenizer(text)["input_ids"])


def _tokens(ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    if tokenizer is None:
        return [f"{token_id} " for token_id in ids.tolist()]
    return list(tokenizer.batch_decode(ids[:, None].tolist()))


def _text_report(
    tokens: list[str],
    ids: torch.Tensor,
    record: dict[str, MemoryCall],
    logits: torch.Tensor,
    without: torch.Tensor,
) -> TextReport:
    targets = ids[1:, None].cpu()
    raised = [values[:-1].log_softmax(-1).gather(1, targets)[:, 0] for values in (logits, without)]
    first = torch.zeros(1)
    return TextReport(
        tokens=tokens,
        gates={name: call.gates[0].mean(-1) * call.fired[0].any(-1) for name, call in record.items()},
        strength={name: call.strength[0] for name, call in record.items()},
        gain=torch.cat([first, raised[0] - raised[1]]),
        logit_change=torch.cat([first, (logits - without)[:-1].abs().amax(-1)]),
    )


def _fired_ngrams(
    model: nn.Module, reports: list[TextReport], records: list[dict[str, MemoryCall]]
) -> list[FiredNgram]:
    """All that fired, the strongest on the whole first. An n-gram is named by its tokens in the text."""
    orders = {name: memory.spec.orders for name, memory in _memories(model).items()}
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for report, record in zip(reports, records, strict=True):
        for name, call in record.items():
            for t, index in call.fired[0].nonzero().tolist():
                order = orders[name][index]
                start = t - min(order - 1, int(call.reach[0, t]))
                key = (name, "".join(report.tokens[start : t + 1]), order)
                found[key].append((call.gates[0, t].mean().item(), call.strength[0, t].item()))
    ngrams = [
        FiredNgram(*key, len(seen), *(sum(values) / len(seen) for values in zip(*seen, strict=True)))
        for key, seen in found.items()
    ]
    return sorted(ngrams, key=lambda ngram: -ngram.count * ngram.strength)


def _usage(name: str, memory: NgramMemory, calls: list[MemoryCall]) -> TableUsage:
    spec = memory.spec
    sizes = torch.tensor(spec.head_sizes(memory.layer_id))
    offsets = (sizes.cumsum(0) - sizes).view(len(spec.orders), spec.n_heads)
    read = torch.unique(torch.cat([(call.rows + offsets)[call.read].flatten() for call in calls]))
    written = _written_rows(memory)
    return TableUsage(
        layer=name,
        rows=int(sizes.sum()),
        written=int(written.sum()),
        read=len(read),
        read_written=int(written[read].sum()),
        collisions=count_collisions(
            spec,
            torch.cat([call.ids.flatten() for call in calls])[None],
            torch.cat([call.reach.flatten() for call in calls])[None],
            memory.layer_id,
        ),
    )


def _written_rows(memory: NgramMemory, at_once: int = 1 << 16) -> torch.Tensor:
    """`(rows of all tables,)` booleans: not all zero. Asks the table for its rows, so it may live anywhere."""
    sizes = memory.spec.head_sizes(memory.layer_id)
    parts: list[list[torch.Tensor]] = [[] for _ in sizes]
    for start in range(0, max(sizes), at_once):
        rows = torch.arange(start, min(start + at_once, max(sizes)))
        asked = torch.stack([rows.clamp_max(size - 1) for size in sizes], dim=-1).to(memory.hash.head_sizes.device)
        written = (memory.table(asked) != 0).any(-1).cpu()
        for head, size in enumerate(sizes):
            parts[head].append(written[: max(0, size - start), head])
    return torch.cat([torch.cat(part) for part in parts])
