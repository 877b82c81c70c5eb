"""Facts written into the rows of an n-gram memory, and taken out again to the bit.

No weight is trained. A fact is a prompt and its answer; the n-grams that end where the answer's tokens are predicted are its
triggers. For every trigger `write_facts` looks for the change `delta` of the hidden state behind the memory that makes the next
token of the answer likely (a few gradient steps on one vector). With the concatenated rows `e` of the trigger, its gate `alpha`
and the value projection `W_V`, the rows `e + x` that bring it about are those of

    minimise over x:  sum_s || alpha_s W_V (e_s + x_s) - u_s - delta_s ||^2 + ridge ||x||^2

over all triggers `s` at once, where `u_s` is what the memory says so far: facts that share a row share its `x`. The gate depends
on the rows in turn, but on their direction only, so solving and looking at the gates again settles it.

`erase_ngrams` empties the rows that only the texts to forget touch, and solves likewise for those that others touch, too.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..files import replace_safetensors
from .layer import NgramMemory, NgramTable
from .packed import writable_table
from .spec import NgramMemorySpec


_GATE_ROUNDS = 4
_FORMAT = "engram-edit-1"


# ------------------------------------------------------------------------------------------------- edits


@dataclass
class FactOutcome:
    """What became of one fact.

    **Attributes**:
        - **prompt**, **answer** (`str`) -- The fact.
        - **success** (`bool`) -- Whether greedy decoding answers exactly so.
        - **probability** (`float`) -- Of the whole answer, given the prompt.
        - **probability_before** (`float`) -- The same before the edit.
        - **triggers** (`int`) -- How many n-grams were written for it, one a token of the answer.
        - **shared_with_facts** (`int`) -- Of its rows, how many other facts of the edit wrote to as well.
        - **shared_with_texts** (`int`) -- How many tokens of the reference texts read one of its rows.
    """

    prompt: str
    answer: str
    success: bool
    probability: float
    probability_before: float
    triggers: int
    shared_with_facts: int
    shared_with_texts: int | None = None


@dataclass
class Locality:
    """What an edit changed in texts that it was not about.

    **Attributes**:
        - **tokens** (`int`) -- How many were looked at.
        - **equal** (`float`) -- Share of the positions whose logits are the same to the bit.
        - **kl** (`float`) -- Mean Kullback-Leibler divergence of the next token, before from after, in nats.
    """

    tokens: int
    equal: float
    kl: float


@dataclass
class EditReport:
    """What an edit did: the outcome of every fact, and what it changed elsewhere, if reference texts were given."""

    facts: list[FactOutcome] = field(default_factory=list)
    locality: Locality | None = None

    @property
    def success(self) -> float:
        """Share of the facts that are answered exactly."""
        return sum(fact.success for fact in self.facts) / max(len(self.facts), 1)


class MemoryEdit:
    """A change of some rows of a model's memories. Edits lie on top of each other, and any of them can be taken away.

    What a row is, is what it was before the first edit plus what each edit that is in force adds, in their order: `undo` gives
    back what would be there without the edit, to the bit.

    **Attributes**:
        - **changes** (`dict[int, tuple[torch.Tensor, torch.Tensor]]`) -- For each decoder layer, row numbers `(n,)` and what is
          added to them `(n, head_dim)`.
        - **report** (`EditReport`) -- What it did.
        - **active** (`bool`) -- Whether it is in force.
    """

    def __init__(
        self,
        memories: dict[int, NgramMemory],
        changes: dict[int, tuple[torch.Tensor, torch.Tensor]],
        report: EditReport | None = None,
    ) -> None:
        self._memories = memories
        self.changes = changes
        self.report = EditReport() if report is None else report
        self.active = False

    def apply(self) -> MemoryEdit:
        """Puts the edit in force, on top of those that are.

        Raises:
            `ValueError`: It is in force, or rows that other edits changed were changed by something else since.
        """
        if self.active:
            raise ValueError("This edit is in force already.")
        overlays = {layer: _overlays(self._memories[layer]) for layer in self.changes}
        for overlay in overlays.values():
            overlay.check()
        for layer, overlay in overlays.items():
            overlay.push(self, *self.changes[layer])
        self.active = True
        return self

    def undo(self) -> None:
        """Takes the edit away. Rows become what they would be without it, to the bit.

        Raises:
            `ValueError`: It is not in force, or the rows were changed by something else since, such as training.
        """
        if not self.active:
            raise ValueError("This edit is not in force.")
        overlays = [_overlays(self._memories[layer]) for layer in self.changes]
        for overlay in overlays:
            overlay.check()
        for overlay in overlays:
            overlay.remove(self)
        self.active = False

    def save(self, path: str | Path) -> None:
        """Writes the edit as a safetensors file: row numbers and what is added to the rows. No texts are written."""
        tensors = {}
        for layer, (rows, added) in self.changes.items():
            tensors[f"{layer}.rows"], tensors[f"{layer}.added"] = rows.cpu(), added.cpu().contiguous()
        described = {str(layer): _fingerprint(self._memories[layer]) for layer in self.changes}
        replace_safetensors(Path(path), tensors, {"format": _FORMAT, "memories": json.dumps(described)})

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> MemoryEdit:
        """Reads an edit for the active memories of `model`; `apply` puts it in force.

        Raises:
            `ValueError`: The file is damaged, or was written for memories that hash differently.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or not a safetensors file ({error}).") from None
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} is not an edit of a memory: its format is {metadata.get('format')!r}.")
        memories = active_memories(model)
        changes = {}
        for name, fingerprint in json.loads(metadata["memories"]).items():
            memory = memories.get(int(name))
            if memory is None or _fingerprint(memory) != fingerprint:
                here = None if memory is None else _fingerprint(memory)
                raise ValueError(
                    f"The edit was written for other memories: in front of layer {name}, {fingerprint} there and {here} here."
                )
            rows, added = tensors.get(f"{name}.rows"), tensors.get(f"{name}.added")
            table = writable_table(memory)
            if rows is None or added is None or added.shape != (len(rows), table.embedding_dim):
                raise ValueError(f"{path} is damaged: it lacks the rows of layer {name}, or they have another shape.")
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < table.num_embeddings:
                raise ValueError(f"{path} is damaged: it names rows that the table of layer {name} does not have.")
            changes[int(name)] = (rows.to(table.weight.device), added.to(table.weight))
        return cls({layer: memories[layer] for layer in changes}, changes)


def active_edits(model: nn.Module) -> list[MemoryEdit]:
    """The edits that are in force in a model, in their order."""
    edits: list[MemoryEdit] = []
    for module in model.modules():
        if isinstance(overlays := module.__dict__.get("overlays"), _Overlays):
            edits += [edit for edit, _, _ in overlays.layers if edit not in edits]
    return edits


class _Overlays:
    """The edits that lie on one table, and what their rows were before the first."""

    def __init__(self, table: NgramTable) -> None:
        self.table = table
        self.layers: list[tuple[MemoryEdit, torch.Tensor, torch.Tensor]] = []
        self.before: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def push(self, edit: MemoryEdit, rows: torch.Tensor, added: torch.Tensor) -> None:
        for row in rows.tolist():
            self.before.setdefault(row, self.table.weight[row].clone())
        self.layers.append((edit, rows, added))
        self._write(rows.tolist())

    @torch.no_grad()
    def remove(self, edit: MemoryEdit) -> None:
        rows = next(rows for other, rows, _ in self.layers if other is edit).tolist()
        self.layers = [layer for layer in self.layers if layer[0] is not edit]
        self._write(rows)
        still = {row for _, others, _ in self.layers for row in others.tolist()}
        self.before = {row: value for row, value in self.before.items() if row in still}

    @torch.no_grad()
    def check(self) -> None:
        """Raises a `ValueError` if rows are not what the edits made them."""
        rows = list(self.before)
        if rows and not torch.equal(self._values(rows), self.table.weight[rows]):
            raise ValueError(
                "Rows of the memory were changed since they were edited, for example by training. Undo edits before training, "
                "or leave them in place for good."
            )

    def _write(self, rows: list[int]) -> None:
        if rows:
            self.table.weight[rows] = self._values(rows)

    def _values(self, rows: list[int]) -> torch.Tensor:
        places = {row: place for place, row in enumerate(rows)}
        values = torch.stack([self.before[row] for row in rows])
        for _, edited, added in self.layers:
            chosen = [(i, places[row]) for i, row in enumerate(edited.tolist()) if row in places]
            if chosen:
                sources, targets = zip(*chosen, strict=True)
                values[list(targets)] += added[list(sources)]
        return values


def _overlays(memory: NgramMemory) -> _Overlays:
    """What lies on the memory's table; copied and pickled with it, but no part of its state."""
    table = writable_table(memory)
    return table.__dict__.setdefault("overlays", _Overlays(table))


def _fingerprint(memory: NgramMemory) -> dict[str, Any]:
    """What has to agree for a row to mean the same."""
    spec = memory.spec
    return {
        "variant": spec.variant,
        "orders": list(spec.orders),
        "head_sizes": list(spec.head_sizes(memory.layer_id)),
        "multipliers": list(spec.multipliers(memory.layer_id)),
        "head_dim": spec.head_dim,
    }


# ------------------------------------------------------------------------------------------------- facts


def write_facts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    facts: Sequence[tuple[str | Sequence[str], str]],
    *,
    layer: int | None = None,
    orders: Sequence[int] | None = None,
    target_probability: float = 0.9,
    max_steps: int = 40,
    rounds: int = 4,
    ridge: float = 1e-2,
    reference_texts: Sequence[str] = (),
    batch_size: int = 16,
) -> MemoryEdit:
    """Writes facts into the rows of a model's memory, without training. The edit is in force when this returns.

    Args:
        model (`nn.Module`): A model with n-gram memories, native or as a PEFT adapter.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        facts (`Sequence[tuple[str | Sequence[str], str]]`):
            Prompts and answers, which are put together as they are: mind the blank, as in `("The capital of France is", " Paris")`.
            Several prompts are paraphrases of one fact. The n-gram at the end of a prompt is what triggers the answer: facts
            with the same one cannot both be true.
        layer (`int`, *optional*): The decoder layer whose memory is written to, by default the last one that has any.
        orders (`Sequence[int]`, *optional*):
            The n of the n-grams whose rows may change, by default the longest only, which fires least elsewhere.
        target_probability (`float`):
            Of each token of an answer. What has it is left alone; rounds after the first see to what has less than its square.
        max_steps (`int`): Gradient steps on the hidden state in a round, at most.
        rounds (`int`): How often to look at what was written and to add what is still missing, at most.
        ridge (`float`): Weight of the size of rows, relative to that of what they have to say. More keeps rows smaller.
        reference_texts (`Sequence[str]`): Texts to measure side effects on.
        batch_size (`int`): Texts at once.

    Returns:
        `MemoryEdit`: With the outcome of every fact in its `report`.

    Raises:
        `ValueError`: The model has no memory there, or several at once; a fact is empty or no n-gram ends its prompt; an option is
            out of its range.
    """
    if not facts:
        raise ValueError("`facts` is empty.")
    for name, value in (("max_steps", max_steps), ("rounds", rounds), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    if not 0 < target_probability < 1:
        raise ValueError(f"`target_probability` must lie between 0 and 1, got {target_probability}.")
    if ridge < 0:
        raise ValueError(f"`ridge` must not be negative, got {ridge}.")
    with _evaluating(model):
        memory = _memory_to_write(active_memories(model), layer)
        table = writable_table(memory)
        _overlays(memory).check()
        questions = _Questions(model, tokenizer, facts, batch_size)
        sites = _Sites.of(questions, memory, _tables_of(memory.spec, orders))
        before = questions.likelihoods()
        original = table.weight[sites.rows].detach().clone()
        added = torch.zeros_like(original, dtype=torch.float64)
        try:
            for done in logging.tqdm(range(rounds), desc="Writing facts"):
                enough = target_probability if done == 0 else target_probability**2  # no more rounds for a trifle
                wanted = questions.wanted_changes(memory, sites, enough, target_probability, max_steps)
                if not wanted.any():
                    break
                added = _solve_for_rows(memory, sites, original.double(), added, wanted, ridge)
                with torch.no_grad():
                    table.weight[sites.rows] = original + added.to(original)
            after = questions.likelihoods()
        finally:
            with torch.no_grad():
                table.weight[sites.rows] = original
        edit = MemoryEdit({memory.layer_id: memory}, {memory.layer_id: (sites.rows, added.to(original))}).apply()
        read = _rows_read(model, tokenizer, reference_texts, memory, batch_size) if reference_texts else None
        edit.report.facts = questions.outcomes(sites, before, after, read)
        if reference_texts:
            edit.report.locality = _locality(edit, model, tokenizer, reference_texts, batch_size)
    return edit


def active_memories(model: nn.Module) -> dict[int, NgramMemory]:
    """The memories that take part in a forward pass, by the number of their decoder layer.

    Raises:
        `ValueError`: There are none, or several in front of one layer.
    """
    called: list[NgramMemory] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: called.append(module))
        for module in model.modules()
        if isinstance(module, NgramMemory)
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=_device(model)), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        raise ValueError(
            "The model has no n-gram memory that is in use. Add one with `EngramForCausalLM.from_backbone` or "
            "`get_peft_model(model, NgramMemoryConfig(...))`, or activate its adapter."
        )
    memories = {memory.layer_id: memory for memory in called}
    if len(memories) < len(called):
        raise ValueError(
            "Several adapters have memories in front of the same layers. Activate the one to write to with `set_adapter`."
        )
    return dict(sorted(memories.items()))


def _memory_to_write(memories: dict[int, NgramMemory], layer: int | None) -> NgramMemory:
    layer = max(memories) if layer is None else layer
    if layer not in memories:
        raise ValueError(f"`layer` {layer} has no memory; the model has some in front of {list(memories)}.")
    if memories[layer].spec.hc_mult > 1:
        raise ValueError("Facts are written into memories of one branch; this one has a gate for each of several.")
    return memories[layer]


def _tables_of(spec: NgramMemorySpec, orders: Sequence[int] | None) -> list[int]:
    """The indices of the tables of these orders, by default the longest."""
    chosen = {max(spec.orders)} if orders is None else set(orders)
    if not chosen or not chosen <= set(spec.orders):
        raise ValueError(f"`orders` must be some of the memory's {list(spec.orders)}, got {orders}.")
    return [index for index in range(spec.n_tables) if spec.orders[index // spec.n_heads] in chosen]


@dataclass
class _Read:
    """What a memory was given in a forward pass: hidden states, ids and reach, as in `NgramMemory.forward`."""

    hidden_states: torch.Tensor
    ids: torch.Tensor
    reach: torch.Tensor


@contextmanager
def _reading(memory: NgramMemory) -> Iterator[list[_Read]]:
    """Collects what a memory is given while this is open."""
    reads: list[_Read] = []
    hook = memory.register_forward_pre_hook(lambda module, args: reads.append(_Read(*args[:3])))
    try:
        yield reads
    finally:
        hook.remove()


@contextmanager
def _saying_more(memory: NgramMemory, where: tuple[torch.Tensor, torch.Tensor], more: torch.Tensor) -> Iterator[None]:
    """Adds `more` `(sites, hidden_size)` to what a memory says at these texts and positions."""

    def add(module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        said, conv_inputs = output
        return said.index_put(where, more.to(said.dtype), accumulate=True), conv_inputs

    hook = memory.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which a model computes the same for the same input."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _device(model: nn.Module) -> torch.device:
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return embeddings.weight.device


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """One batch, filled up from the right."""
    length = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}  # type: ignore[dict-item]


@dataclass
class _Batch:
    """Some texts at once, and the positions that have to predict the tokens of answers, text by text."""

    inputs: dict[str, torch.Tensor]
    where: tuple[torch.Tensor, torch.Tensor]  # texts, positions: `(sites,)` each
    tokens: torch.Tensor  # `(sites,)`: what is to be predicted
    sites: torch.Tensor  # `(sites,)`: their numbers in the batch that this one is a part of

    def of_texts(self, texts: torch.Tensor) -> _Batch:
        """The part of the batch with these texts, ascending."""
        inputs = {
            name: value[texts] if isinstance(value, torch.Tensor) else value for name, value in self.inputs.items()
        }
        own = torch.isin(self.where[0], texts)
        where = (torch.searchsorted(texts, self.where[0][own]), self.where[1][own])
        return _Batch(inputs, where, self.tokens[own], self.sites[own])


class _Questions:
    """Facts as tokens, in batches. A site is a position that has to predict a token of an answer."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        facts: Sequence[tuple[str | Sequence[str], str]],
        batch_size: int,
    ) -> None:
        self.model = model
        found: list[tuple[str, str, list[int], list[int]]] = []
        for prompts, answer in facts:
            for prompt in [prompts] if isinstance(prompts, str) else prompts:
                asked = tokenizer(prompt)["input_ids"]
                expected = tokenizer(answer, add_special_tokens=False)["input_ids"]
                if not asked or not expected:
                    raise ValueError(f"A fact needs a prompt and an answer, got {(prompt, answer)}.")
                found.append((prompt, answer, asked, expected))
        # Prompts of about one length go together, so that few tokens follow those that all of them have.
        self.order = sorted(range(len(found)), key=lambda i: len(found[i][2]))
        found = [found[i] for i in self.order]
        self.texts = [(prompt, answer) for prompt, answer, _, _ in found]
        self.text_of_site = [i for i, (_, _, _, expected) in enumerate(found) for _ in expected]
        self.batches: list[_Batch] = []
        for begin in range(0, len(found), batch_size):
            some = [(asked, expected) for _, _, asked, expected in found[begin : begin + batch_size]]
            inputs = _padded([asked + expected for asked, expected in some], _device(model))
            sites = [(i, len(a) - 1 + k, token) for i, (a, e) in enumerate(some) for k, token in enumerate(e)]
            texts, positions, expected_tokens = torch.tensor(sites, device=inputs["input_ids"].device).unbind(1)
            numbers = torch.arange(len(sites), device=texts.device)
            self.batches.append(_Batch(inputs, (texts, positions), expected_tokens, numbers))

    def _predictions(self, batch: _Batch, cache: Cache | None = None) -> torch.Tensor:
        """Log-probabilities of all tokens at the sites of a batch, `(sites, vocab_size)`. A cache is left as it is."""
        more = {} if cache is None else {"cache": copy.deepcopy(cache), "use_cache": True}
        return self.model(**{**batch.inputs, **more}).logits[batch.where].float().log_softmax(-1)

    @torch.no_grad()
    def _from_first_site(self, batch: _Batch) -> tuple[_Batch, Cache | None]:
        """A batch without the tokens before its first site, which no change at a site reaches, and a cache that holds them."""
        before = int(batch.where[1].min())
        if before == 0:
            return batch, None
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))  # type: ignore[operator, union-attr]
        self.model(input_ids=ids[:, :before], attention_mask=mask[:, :before], cache=cache, use_cache=True)
        texts, positions = batch.where
        return replace(
            batch, inputs={**batch.inputs, "input_ids": ids[:, before:]}, where=(texts, positions - before)
        ), cache

    @torch.no_grad()
    def likelihoods(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For all sites, the log-probability of the token, and whether it is the most likely one."""
        found = []
        for batch in self.batches:
            predictions = self._predictions(batch)
            chosen = predictions.gather(1, batch.tokens[:, None].to(predictions.device))[:, 0]
            found.append((chosen.cpu(), (predictions.argmax(1).cpu() == batch.tokens.cpu())))
        return torch.cat([each for each, _ in found]), torch.cat([each for _, each in found])

    def wanted_changes(
        self, memory: NgramMemory, sites: _Sites, enough: float, target: float, max_steps: int
    ) -> torch.Tensor:
        """The changes of what the memory says that make tokens as probable as `target` if they are not as `enough`, `(sites, hidden_size)`.

        Only directions in which rows can change anything; zero where nothing has to change or nothing can.
        """
        changes, begin = [], 0
        for batch in self.batches:
            end = begin + len(batch.tokens)
            changes.append(self._wanted_changes(memory, batch, sites, slice(begin, end), enough, target, max_steps))
            begin = end
        return torch.cat(changes)

    def _wanted_changes(
        self,
        memory: NgramMemory,
        batch: _Batch,
        sites: _Sites,
        which: slice,
        enough: float,
        target: float,
        max_steps: int,
    ) -> torch.Tensor:
        device = memory.kv_proj.weight.device
        writable = sites.mask[which].any(1).to(device)
        change = torch.zeros(len(writable), memory.spec.hidden_size, device=device)
        longest = sites.hidden_states[which].float().norm(dim=1, keepdim=True).to(change)
        goal = math.log(target) / 2  # a step that only just gets there falls short
        wanted = math.log(enough)
        batch, cache = self._from_first_site(batch)
        for _ in range(max_steps):
            moved = change[batch.sites].requires_grad_()
            with torch.enable_grad(), _saying_more(memory, batch.where, moved):
                predictions = self._predictions(batch, cache)
                likelihood = predictions.gather(1, batch.tokens[:, None].to(predictions.device))[:, 0].to(device)
                missing = (likelihood < wanted) & writable[batch.sites]
                if not missing.any():
                    break
                wanted = math.log(target)
                (gradient,) = torch.autograd.grad(likelihood.sum(), moved)
            gradient = sites.reachable(gradient)
            # As far as would do if the logarithm of the probability was linear, but no further than the hidden state is long.
            size = gradient.norm(dim=1, keepdim=True) + 1e-12
            length = torch.minimum((goal - likelihood.detach())[:, None] / size, longest[batch.sites])
            change[batch.sites] += torch.where(missing[:, None], length * gradient / size, 0)
            texts = batch.where[0][missing.to(batch.where[0].device)].unique()
            batch = batch.of_texts(texts)
            if cache is not None:
                cache.reorder_cache(texts)
        return change

    def outcomes(
        self,
        sites: _Sites,
        before: tuple[torch.Tensor, torch.Tensor],
        after: tuple[torch.Tensor, torch.Tensor],
        read: torch.Tensor | None,
    ) -> list[FactOutcome]:
        """One for each prompt. `read`: the rows that each token of the reference texts reads, `(tokens, tables)`."""
        outcomes = []
        text_of_site = torch.tensor(self.text_of_site)
        rows_of_text = [sites.rows[sites.places[text_of_site == i][sites.mask[text_of_site == i]]].unique() for i in range(len(self.texts))]  # fmt: skip
        for i, (prompt, answer) in enumerate(self.texts):
            own = text_of_site == i
            same_answer = [j for j, (_, other) in enumerate(self.texts) if other == answer]
            others = [rows for j, rows in enumerate(rows_of_text) if j not in same_answer]
            shared = int(torch.isin(rows_of_text[i], torch.cat(others)).sum()) if others else 0
            outcomes.append(
                FactOutcome(
                    prompt=prompt,
                    answer=answer,
                    success=bool(after[1][own].all()),
                    probability=float(after[0][own].sum().exp()),
                    probability_before=float(before[0][own].sum().exp()),
                    triggers=int(sites.mask[own].any(1).sum()),
                    shared_with_facts=shared,
                    shared_with_texts=None if read is None else int(torch.isin(read, rows_of_text[i]).any(1).sum()),
                )
            )
        return [outcome for _, outcome in sorted(zip(self.order, outcomes, strict=True), key=lambda pair: pair[0])]


@dataclass
class _Sites:
    """The rows that the sites of some texts read, and what else of them does not change while rows do.

    **Attributes**:
        - **rows** (`torch.Tensor`) -- `(n,)` int64, ascending: the rows that may change, tables below each other.
        - **places** (`torch.Tensor`) -- `(sites, tables)`: for each site, its rows' places among them.
        - **mask** (`torch.Tensor`) -- `(sites, tables)`: False where an n-gram does not fit in front of a site.
        - **fixed** (`torch.Tensor`) -- `(sites, all tables, head_dim)` float64: the rows that may not change, zeros for the others.
        - **hidden_states** (`torch.Tensor`) -- `(sites, hidden_size)`.
        - **tables** (`list[int]`) -- Which tables `places` and `mask` are about.
    """

    rows: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor
    fixed: torch.Tensor
    hidden_states: torch.Tensor
    tables: list[int]
    basis: torch.Tensor | None  # (hidden_size, directions): what values can be; None: anything

    @classmethod
    @torch.no_grad()
    def of(cls, questions: _Questions, memory: NgramMemory, tables: list[int]) -> _Sites:
        rows, reach, states = [], [], []
        for batch in questions.batches:
            with _reading(memory) as reads:
                questions.model(**batch.inputs)
            read = reads[0]
            rows.append(_flat_rows(memory, read)[batch.where])
            reach.append(read.reach[batch.where])
            states.append(read.hidden_states[batch.where])
        return cls._from_rows(memory, tables, torch.cat(rows), torch.cat(reach), torch.cat(states))

    @classmethod
    def _from_rows(
        cls, memory: NgramMemory, tables: list[int], rows: torch.Tensor, reach: torch.Tensor, states: torch.Tensor
    ) -> _Sites:
        spec = memory.spec
        orders = torch.tensor(
            [spec.orders[index // spec.n_heads] for index in range(spec.n_tables)], device=rows.device
        )
        readable = reach[:, None] >= orders - 1
        mask = readable[:, tables]
        if not mask.any():
            raise ValueError(
                f"No prompt ends in an n-gram of {sorted({int(orders[i]) for i in tables})} tokens that could be a trigger. "
                "Use longer prompts, or shorter `orders`."
            )
        chosen = rows[:, tables]
        numbers = chosen[mask].unique()
        places = torch.searchsorted(numbers, chosen).clamp_max(len(numbers) - 1)
        fixed = writable_table(memory).weight.detach()[rows].double()
        if spec.variant == "needle":  # whose cut n-grams have no rows
            fixed[~readable] = 0
        kept = torch.ones_like(rows, dtype=torch.bool)
        kept[:, tables] = ~mask
        fixed[~kept] = 0
        value = _value_weight(memory, tables)
        basis = torch.linalg.qr(value).Q if value.shape[1] < value.shape[0] else None
        return cls(numbers, places, mask, fixed, states, tables, basis)

    def reachable(self, change: torch.Tensor) -> torch.Tensor:
        """The part of changes `(sites, hidden_size)` that rows can bring about."""
        if self.basis is None:
            return change
        basis = self.basis.to(change)
        return change @ basis @ basis.T

    def embedded(self, values: torch.Tensor) -> torch.Tensor:
        """The concatenated rows of every site `(sites, memory_dim)`, if the rows that may change are `values`."""
        whole = self.fixed.clone()
        whole[:, self.tables] += self.gathered(values)
        return whole.flatten(1)

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """`(n, head_dim)` -> `(sites, tables, head_dim)`."""
        return torch.where(self.mask[..., None], values[self.places], 0)

    def scattered(self, per_site: torch.Tensor) -> torch.Tensor:
        """The transpose of `gathered`."""
        values = per_site.new_zeros(len(self.rows), per_site.shape[-1])
        return values.index_add_(0, self.places[self.mask], per_site[self.mask])


def _flat_rows(memory: NgramMemory, read: _Read) -> torch.Tensor:
    """`(batch, length, tables)`: the rows that every token reads, tables below each other."""
    rows = memory.hash(read.ids, read.reach)
    return rows + writable_table(memory).offsets.to(rows.device)


def _value_weight(memory: NgramMemory, tables: Sequence[int]) -> torch.Tensor:
    """The columns of the value projection that these tables use, `(hidden_size, len(tables) * head_dim)` float64."""
    spec = memory.spec
    weight = memory.kv_proj.weight.detach()[spec.hc_mult * spec.hidden_size :].double()
    return weight.view(spec.hidden_size, spec.n_tables, spec.head_dim)[:, list(tables)].flatten(1)


@torch.no_grad()
def _solve_for_rows(
    memory: NgramMemory,
    sites: _Sites,
    original: torch.Tensor,
    added: torch.Tensor,
    wanted: torch.Tensor,
    ridge: float,
) -> torch.Tensor:
    """What to add to the original rows `(n, head_dim)` so that the memory says `wanted` more than with `added`; see the module."""
    gates, said = _gated_values(memory, sites, original + added)
    target = said + wanted.double()
    value = _value_weight(memory, sites.tables)
    for _ in range(_GATE_ROUNDS):
        _, without = _gated_values(memory, sites, original, gates)
        added = _ridge(sites, value, gates, target - without, ridge, added)
        gates, _ = _gated_values(memory, sites, original + added)
    return added


def _gated_values(
    memory: NgramMemory, sites: _Sites, values: torch.Tensor, gates: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates `(sites, 1)` and gated values `(sites, hidden_size)`, if the rows are `values`; float64."""
    spec = memory.spec
    embedded = sites.embedded(values)
    bias = memory.kv_proj.bias
    projected = embedded @ memory.kv_proj.weight.detach().double().T
    projected = projected if bias is None else projected + bias.detach().double()
    key, value = projected.split([spec.hidden_size, spec.hidden_size], dim=-1)
    if gates is None:
        dtype = memory.kv_proj.weight.dtype
        gates = memory.gate(sites.hidden_states[:, None].to(dtype), key[:, None].to(dtype))[:, 0].double()
    return gates, gates * value


def _ridge(
    sites: _Sites,
    value: torch.Tensor,
    gates: torch.Tensor,
    target: torch.Tensor,
    ridge: float,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows `x` that minimise `sum_s || gate_s W_V x_s - target_s ||^2 + ridge * scale * || x ||^2`, by conjugate gradients.

    `scale` is the mean eigenvalue of one site's `gate^2 W_V^T W_V`, so that `ridge` means the same for every memory.
    """
    scale = float(gates.square().mean() * value.square().sum() / value.shape[1])

    def transposed(residual: torch.Tensor) -> torch.Tensor:
        return sites.scattered((gates * residual @ value).unflatten(1, (len(sites.tables), -1)))

    def normal(x: torch.Tensor) -> torch.Tensor:
        return transposed(gates * (sites.gathered(x).flatten(1) @ value.T)) + ridge * scale * x

    right = transposed(target)
    x = torch.zeros_like(right) if start is None else start.clone()
    residual = right - normal(x)
    direction = residual.clone()
    size, enough = float(residual.square().sum()), 1e-16 * float(right.square().sum())
    for _ in range(10 * value.shape[1]):
        if size <= enough:
            break
        image = normal(direction)
        length = size / float((direction * image).sum())
        x += length * direction
        residual -= length * image
        size, last = float(residual.square().sum()), size
        direction = residual + size / last * direction
    return x


# ------------------------------------------------------------------------------------------------- erasing


def erase_ngrams(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget_texts: Sequence[str],
    retain_texts: Sequence[str] = (),
    *,
    ridge: float = 1e-2,
    batch_size: int = 16,
) -> MemoryEdit:
    """Takes out of a model's memories what they know about the n-grams of some texts. The edit is in force when this returns.

    Rows that only the texts to forget read become zero. Rows that the texts to keep read as well are solved for: what is said
    about n-grams of the former should vanish, and what is said about those of the latter should stay, with equal weight.

    Args:
        model (`nn.Module`): A model with n-gram memories, native or as a PEFT adapter.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        forget_texts (`Sequence[str]`): Whose n-grams to forget.
        retain_texts (`Sequence[str]`): Whose n-grams to keep; also what side effects are measured on.
        ridge (`float`): Weight of the change of shared rows, relative to that of what they say.
        batch_size (`int`): Texts at once.

    Raises:
        `ValueError`: No text to forget, or the model has no memory.
    """
    if not forget_texts:
        raise ValueError("`forget_texts` is empty.")
    with _evaluating(model):
        memories = active_memories(model)
        changes = {}
        for layer, memory in memories.items():
            _overlays(memory).check()
            forgotten = _rows_read(model, tokenizer, forget_texts, memory, batch_size)
            kept = _rows_read(model, tokenizer, retain_texts, memory, batch_size) if retain_texts else forgotten[:0]
            changes[layer] = _erasing_change(memory, forgotten.unique(dim=0), kept.unique(dim=0), ridge)
        edit = MemoryEdit(memories, changes).apply()
        if retain_texts:
            edit.report.locality = _locality(edit, model, tokenizer, retain_texts, batch_size)
    return edit


@torch.no_grad()
def _erasing_change(
    memory: NgramMemory, forgotten: torch.Tensor, kept: torch.Tensor, ridge: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and what to add to them. `forgotten`, `kept`: different n-grams' rows, `(n-grams, tables)`."""
    weight = writable_table(memory).weight
    rows = forgotten.unique()
    rows = rows[(weight[rows] != 0).any(1)]
    shared = torch.isin(rows, kept)
    added = -weight[rows].detach()
    if shared.any():
        ngrams = torch.cat([forgotten, kept])
        concerned = torch.isin(ngrams, rows[shared]).any(1)
        is_forgotten = (torch.arange(len(ngrams), device=rows.device) < len(forgotten))[concerned]
        ngrams = ngrams[concerned]
        tables = list(range(memory.spec.n_tables))
        mask = torch.isin(ngrams, rows[shared])
        places = torch.searchsorted(rows[shared], ngrams).clamp_max(int(shared.sum()) - 1)
        left = torch.where(torch.isin(ngrams, rows[~shared])[..., None], 0, weight[ngrams].double())
        value = _value_weight(memory, tables)
        said = left.flatten(1) @ value.T
        sites = _Sites(rows[shared], places, mask, left, left[:, 0], tables, None)
        target = torch.where(is_forgotten[:, None], -said, 0)
        added[shared] = _ridge(sites, value, torch.ones_like(said[:, :1]), target, ridge).to(added)
    return rows, added


# ------------------------------------------------------------------------------------------------- side effects


def _batches_of(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    rows = [row for row in (tokenizer(text)["input_ids"] for text in texts) if row]
    for begin in range(0, len(rows), batch_size):
        yield _padded(rows[begin : begin + batch_size], _device(model))


@torch.no_grad()
def _rows_read(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], memory: NgramMemory, batch_size: int
) -> torch.Tensor:
    """`(tokens, tables)`: the rows that each token of some texts reads."""
    found = []
    for inputs in _batches_of(model, tokenizer, texts, batch_size):
        with _reading(memory) as reads:
            model(**inputs)
        found.append(_flat_rows(memory, reads[0])[inputs["attention_mask"].to(reads[0].reach.device) != 0])
    if not found:
        raise ValueError("The texts have no tokens.")
    return torch.cat(found)


@torch.no_grad()
def _locality(
    edit: MemoryEdit, model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch_size: int
) -> Locality:
    """Compares a model with and without an edit that is in force."""
    tokens, equal, divergence = 0, 0, 0.0
    for inputs in _batches_of(model, tokenizer, texts, batch_size):
        real = inputs["attention_mask"] != 0
        after = model(**inputs).logits[real]
        edit.undo()
        before = model(**inputs).logits[real]
        edit.apply()
        tokens += len(before)
        equal += int((before == after).all(-1).sum())
        p, q = before.float().log_softmax(-1), after.float().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
    return Locality(tokens, equal / max(tokens, 1), divergence / max(tokens, 1))
