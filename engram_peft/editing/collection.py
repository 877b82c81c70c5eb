"""Runs a model over data and hands the inputs of its layers on: to sums of second moments, or to any other `RowSink`.

Forward pre-hooks see the input of every selected layer. Layers that are handed the same tensor share one moment from the
first batch on; that they still do is checked in every batch. The output head is not run: its input is the body's output.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .encoding import Batch, Item, batches, encode_items, tokenizer_fingerprint
from .experts import ExpertCollector, ParameterStack
from .parameters import expert_parameters, select_parameters
from .routing import RowTokens, expert_family, expert_module
from .selection import (
    Selection,
    base_layer_of,
    input_width,
    outer_modules,
    output_head,
    select_layers,
    unwrap,
)
from .statistics import Moment, Provenance, Statistics, full_precision


MaskFn = Callable[[Any], torch.Tensor]


def collect_statistics(
    model: nn.Module,
    data: Sequence[Item] | Iterable[Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    mask_fn: MaskFn | None = None,
    token_position: str = "answer",
    target_modules: list[str] | str | None = None,
    exclude_modules: list[str] | str | None = None,
    layers_to_transform: list[int] | int | None = None,
    layers_pattern: list[str] | str | None = None,
    target_parameters: list[str] | None = None,
    target_experts: bool = True,
    batch_size: int = 8,
    max_length: int = 512,
    device: str | torch.device | None = None,
) -> Statistics:
    """Collects the second moments of the selected layers' inputs over `data`. Nothing is trained or changed.

    Args:
        model (`nn.Module`):
            A transformers model, or a `PeftModel` around one. Adapters that are active take part in the forward pass;
            an ENGRAM adapter that was not filled yet is an identity.
        data (`Sequence` or `DataLoader`):
            With a `tokenizer`: a sequence of `str`, `(prompt, answer)` pairs or chat messages, mixed at will, or a
            `datasets.Dataset`. Without: an iterable of batches (tensors of token ids, or dictionaries of model inputs).
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer for texts.
        mask_fn (`Callable`, *optional*):
            For batches: maps a batch to a boolean tensor, one entry a token, that is `True` where the hidden state is a row.
            By default the tokens whose label is not -100, else those of the attention mask, else all.
        token_position (`str`):
            For texts: `"answer"` (rows at the tokens that count), `"predict"` (the rows one earlier) or `"subject"` (the one row
            at the last token of what is asked about: see `subjects.subject_positions`).
        target_modules (`list[str]` or `str`, *optional*):
            Which layers, as in a PEFT config. By default the ENGRAM layers of the model; if it has none, every linear layer
            but the output head.
        exclude_modules (`list[str]` or `str`, *optional*): Which of them not.
        layers_to_transform (`list[int]` or `int`, *optional*): Only those with these indices.
        layers_pattern (`list[str]` or `str`, *optional*): Name of the layers' container.
        target_parameters (`list[str]`, *optional*):
            Which Parameters, as in a PEFT config: those that hold the weights of all experts of a layer, or a matrix of a module
            that is no linear layer.
        target_experts (`bool`): Whether every linear layer includes experts whose weights are stacked.
        batch_size (`int`): Texts a batch.
        max_length (`int`): Longer texts are cut on the right.
        device (`str` or `torch.device`, *optional*): Where the sums are kept; by default beside the layer.

    Returns:
        `Statistics`: One moment a layer, by its name in the unwrapped model; where a Parameter holds the weights of experts one
        an expert, `<name of the Parameter>.<index>`, which is empty for experts that no row was sent to.

    Raises:
        `ValueError`: No layer matches; a mask is not boolean, has another shape than the ids, or is empty everywhere; a layer
            is never fed; an activation is NaN or infinite (the message names the layer); the data is empty.
        `TypeError`: A matching module cannot be edited, or the data is of another kind.
    """
    base = unwrap(model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        raise TypeError(
            f"{type(base).__name__} is an encoder-decoder model, which `collect_statistics` does not support."
        )
    selection = Selection(target_modules, exclude_modules, layers_to_transform, layers_pattern, target_parameters)
    layers, stacks = _engram_layers(base) if selection == Selection() else ({}, {})
    if not layers and not stacks:
        layers, stacks = _select(base, selection, target_experts)
    stream = _Stream(data, tokenizer, mask_fn, token_position, batch_size, max_length)

    collector = Collector(
        layers, device, experts=ExpertCollector(base, stacks, device), tokens=RowTokens(base, layers)
    )
    # a caller's inference mode would hide in-place changes from us
    with torch.inference_mode(False), torch.no_grad(), evaluating(base), collector:
        run = BodyRunner(base, layers, collector)
        progress = logging.tqdm(stream, total=len(stream), desc="Collecting statistics")
        for inputs, mask in progress:
            collector.start_batch(mask)
            run(inputs)
            collector.end_batch()
    collector.check_fed(stream.selected)
    return Statistics(collector.sinks(), stream.provenance(base))


def _engram_layers(base: nn.Module) -> tuple[dict[str, nn.Module], dict[str, ParameterStack]]:
    """The layers and the experts' weights of the ENGRAM adapters, by name."""
    layers: dict[str, nn.Module] = {}
    stacks: dict[str, ParameterStack] = {}
    for name, module in base.named_modules():
        if not hasattr(module, "engram_A"):
            continue
        stack: ParameterStack | None = getattr(module, "stack", None)
        if stack is None:
            layers[name] = module
        elif stack.is_routed:
            stacks[module.public_name(name)] = stack
        else:
            layers[module.public_name(name)] = module
    return layers, stacks


def _select(
    base: nn.Module, selection: Selection, target_experts: bool
) -> tuple[dict[str, nn.Module], dict[str, ParameterStack]]:
    """The layers and the experts' weights that are asked for, by name."""
    targets = selection.target_parameters
    if targets is None and target_experts and selection.target_modules in (None, "all-linear"):
        targets = expert_parameters(base, selection)
    chosen = select_parameters(base, replace(selection, target_parameters=targets))
    layers = select_layers(base, selection)
    outer = {base_layer_of(module): module for _, module in outer_modules(base)}
    layers |= {name: outer[stack.module] for name, stack in chosen.items() if not stack.is_routed}
    return layers, {name: stack for name, stack in chosen.items() if stack.is_routed}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time being; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Stream:
    """The data as pairs of model inputs and a boolean mask (`None`: every row)."""

    def __init__(
        self,
        data: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        mask_fn: MaskFn | None,
        token_position: str,
        batch_size: int,
        max_length: int,
    ) -> None:
        self.data, self.mask_fn, self.token_position = data, mask_fn, token_position
        self.tokenizer, self.batch_size = tokenizer, batch_size
        self.texts = self.selected = 0
        self.rules: set[str] = set()
        self.encoded = None
        if isinstance(data, str):
            raise TypeError("`data` is a single string. Pass a list of texts.")
        if tokenizer is not None:
            if mask_fn is not None:
                raise ValueError(
                    "`mask_fn` is for batches; with a `tokenizer` the items themselves say which tokens count."
                )
            self.encoded = encode_items(tokenizer, data, max_length, token_position)
            if not self.encoded:
                raise ValueError("`data` is empty.")
        elif isinstance(data, Sequence) and data and isinstance(data[0], str | tuple):
            raise ValueError("`data` holds texts: pass the `tokenizer` too.")

    def __len__(self) -> int:
        if self.encoded is not None:
            return -(-len(self.encoded) // self.batch_size)
        return len(self.data) if hasattr(self.data, "__len__") else 0

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor | None]]:
        for inputs, mask, rule in self._text_batches() if self.encoded is not None else self._loader_batches():
            self.rules.add(rule)
            self.texts += len(_ids_of(inputs))
            self.selected += int(mask.sum()) if mask is not None else 1
            yield inputs, mask

    def _text_batches(self) -> Iterator[tuple[Any, torch.Tensor, str]]:
        assert self.encoded is not None and self.tokenizer is not None
        for batch in batches(self.encoded, self.batch_size, self.tokenizer.pad_token_id):
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            yield inputs, batch.mask, self.token_position

    def _loader_batches(self) -> Iterator[tuple[Any, torch.Tensor | None, str]]:
        for batch in self.data:
            if not isinstance(batch, Mapping | torch.Tensor):
                raise TypeError(
                    f"A batch is a {type(batch).__name__}; expected a tensor of token ids or a dictionary of inputs."
                )
            if self.mask_fn is not None:
                yield batch, _checked_mask(self.mask_fn(batch), batch), "mask_fn"
            elif isinstance(batch, Mapping) and batch.get("labels") is not None:
                yield batch, _checked_mask(batch["labels"] != -100, batch), "labels"
            elif isinstance(batch, Mapping) and batch.get("attention_mask") is not None:
                yield batch, _checked_mask(batch["attention_mask"].bool(), batch), "attention_mask"
            else:
                yield batch, None, "all"

    def provenance(self, model: nn.Module) -> Provenance:
        config = getattr(model, "config", None)
        return Provenance(
            model=str(getattr(config, "_name_or_path", "") or ""),
            model_fingerprint=model_fingerprint(model),
            tokenizer="" if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer),
            mask="+".join(sorted(self.rules)),
            texts=self.texts,
            library_version=library_version(),
        )


def library_version() -> str:
    """The version that files say they were written by."""
    from engram_peft import __version__

    return __version__


def model_fingerprint(model: nn.Module) -> str:
    """Hash of what the model's configuration says about its shape, or of its parameters' shapes if it has none."""
    if isinstance(model, PreTrainedModel):
        # what saving, loading in another dtype or merging a tied head changes does not make it another model
        volatile = {"_name_or_path", "architectures", "dtype", "quantization_config", "tie_word_embeddings"}
        volatile |= {"transformers_version", "use_cache"}
        config = {k: v for k, v in model.config.to_dict().items() if k not in volatile and "_token_id" not in k}
        described = json.dumps(config, sort_keys=True, default=str)
    else:
        named = ((name.replace("base_layer.", ""), tuple(p.shape)) for name, p in model.named_parameters())
        described = str([(name, shape) for name, shape in named if "engram_" not in name])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _ids_of(inputs: Any) -> torch.Tensor:
    if isinstance(inputs, torch.Tensor):
        return inputs
    for name in ("input_ids", "inputs_embeds"):
        if inputs.get(name) is not None:
            return inputs[name]
    return next(iter(inputs.values()))


def _checked_mask(mask: Any, batch: Any) -> torch.Tensor:
    """The mask, if it is boolean and as large as the ids."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"`mask_fn` must return a boolean tensor, got {found}. An integer mask would be read as indices."
        )
    ids = _ids_of(batch)
    shape = ids.shape[:2] if isinstance(batch, Mapping) or not ids.is_floating_point() else ids.shape[:-1]
    if mask.shape != shape:
        raise ValueError(
            f"The mask has shape {list(mask.shape)}, the batch has {list(shape)}: one entry a token is needed."
        )
    return mask


class BodyRunner:
    """Runs what is needed of a model: the body without the head where the head's input is the body's output."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], collector: Collector) -> None:
        self.model, self.body, self.collector = model, model, collector
        self.head: nn.Module | None = None
        self._device = next((p.device for p in model.parameters() if p.device.type != "meta"), None)
        if self._device is None:
            raise ValueError("The model's weights are on the meta device. Load them before collecting statistics.")
        if isinstance(model, PreTrainedModel) and model.base_model is not model:
            prefix = model.base_model_prefix + "."
            head = output_head(model)
            outside = [module for name, module in layers.items() if not name.startswith(prefix)]
            if all(base_layer_of(module) is head for module in outside):
                self.body = model.base_model
                self.head = outside[0] if outside else None
        accepted = inspect.signature(self.body.forward).parameters
        self._accepted = set(accepted) - {"labels"}
        self._no_cache = {"use_cache": False} if "use_cache" in accepted else {}

    def batch(self, batch: Batch) -> None:
        """Runs a batch of texts, whose mask says which rows go to the sinks."""
        self.collector.start_batch(batch.mask)
        self({"input_ids": batch.input_ids, "attention_mask": batch.attention_mask})
        self.collector.end_batch()

    def __call__(self, inputs: Any) -> None:
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.to(self._device)
            named = {"input_ids": inputs} if isinstance(self.model, PreTrainedModel) else None
            if named is None:
                self.body(inputs)
                return
            inputs = named
        _check_padding_is_masked(inputs, getattr(self.model, "config", None))
        kept = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
            if name in self._accepted
        }
        if self.head is not None and not self._head_reads_the_body(kept):
            self.head, self.body = None, self.model
        output = self.body(**kept, **self._no_cache)
        if self.head is not None:
            self.collector.see(self.head, output.last_hidden_state)

    def _head_reads_the_body(self, inputs: dict[str, Any]) -> bool:
        """Whether the head is handed the body's output as it is; tried once, on the first tokens of the first text."""
        if hasattr(self, "_head_checked"):
            return True
        self._head_checked = True
        few = {"input_ids": inputs["input_ids"][:1, :2]} if "input_ids" in inputs else None
        if few is None:
            return False
        seen: list[torch.Tensor] = []
        head = output_head(self.model)
        assert head is not None
        handle = head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        with self.collector.paused():
            try:
                self.model(**few, **self._no_cache)
                hidden = self.body(**few, **self._no_cache).last_hidden_state
            finally:
                handle.remove()
        return len(seen) == 1 and seen[0].shape == hidden.shape and torch.equal(seen[0], hidden)


def _check_padding_is_masked(inputs: Mapping[str, Any], config: Any) -> None:
    ids, pad = inputs.get("input_ids"), getattr(config, "pad_token_id", None)
    if pad is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or inputs.get("attention_mask") is not None:
        return
    for edge in (ids[:, 0], ids[:, -1]):
        padded = int((edge == pad).sum())
        if 0 < padded < len(edge):
            raise ValueError(
                f"A batch starts or ends with pad tokens (id {pad}) but has no `attention_mask`: the pads would be read as "
                "text. Add the attention mask to the batch."
            )


def _version(x: torch.Tensor) -> float:
    # tensors made in inference mode do not count their changes: never the same as before
    return float("nan") if x.is_inference() else x._version


class RowSink(Protocol):
    """Where the selected rows of a layer's input go."""

    @property
    def count(self) -> int | float:
        """Number of rows."""
        ...

    def add(self, rows: torch.Tensor) -> None:
        """Takes float32 `rows`, `(n, dim)`, which it must not keep or change."""
        ...

    def copy(self) -> RowSink:
        """A sink of the same rows that can be added to without changing this one."""
        ...


class _Group:
    """Layers that are handed the same tensor in every forward pass, and the sink of its rows."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.members: list[str] = []
        self.tensor: weakref.ref[torch.Tensor] | None = None  # what this batch's first member was handed
        self.version = -1.0
        self.arrived: set[str] = set()
        self.pending: torch.Tensor | None = None  # its rows, until all members have come

    def take(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        self.tensor, self.version, self.pending = weakref.ref(x), _version(x), rows

    def holds(self, x: torch.Tensor) -> bool:
        return self.tensor is not None and self.tensor() is x and self.version == _version(x)

    def fold(self) -> None:
        if self.pending is not None:
            with full_precision(self.pending.device):
                self.sink.add(self.pending)
            self.pending = None


class Collector:
    """Forward pre-hooks on the selected layers, and the sinks that they feed."""

    def __init__(
        self,
        layers: dict[str, nn.Module],
        device: str | torch.device | None,
        sink: Callable[[int], Any] = Moment,
        experts: ExpertCollector | None = None,
        tokens: RowTokens | None = None,
    ) -> None:
        self.layers, self.device, self.sink, self.experts, self.tokens = layers, device, sink, experts, tokens
        self.names = {module: name for name, module in layers.items()}
        self.group_of: dict[str, _Group] = {}
        self.handles: list[Any] = []
        self.mask: torch.Tensor | None = None
        self.mask_is_full = True
        self.first_batch = True
        self.listening = True
        self.by_tensor: dict[tuple[int, bool], _Group] = {}  # the groups that this batch made, by the tensor seen

    def __enter__(self) -> Collector:
        for module in self.layers.values():
            self.handles.append(module.register_forward_pre_hook(self._hook, with_kwargs=True))
        for beside in (self.experts, self.tokens):
            if beside is not None:
                beside.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for beside in (self.experts, self.tokens):
            if beside is not None:
                beside.__exit__(*error)
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._listen(False)
        try:
            yield
        finally:
            self._listen(True)

    def _listen(self, listening: bool) -> None:
        self.listening = listening
        if self.experts is not None:
            self.experts.listening = listening

    def _hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.listening:
            self.see(module, args[0] if args else next(iter(kwargs.values())))

    def start_batch(self, mask: torch.Tensor | None) -> None:
        self.mask, self.mask_is_full = mask, mask is None or bool(mask.all())
        if self.experts is not None:
            self.experts.mask = mask
        if self.tokens is not None:
            self.tokens.num_tokens = None if mask is None else mask.numel()

    def end_batch(self) -> None:
        for group in set(self.group_of.values()):
            if group.tensor is not None:
                for name in set(group.members) - group.arrived:  # left out of this pass: it has none of its rows
                    self._split_off(name, group)
            group.fold()
            group.tensor, group.arrived = None, set()
        self.by_tensor.clear()
        self.first_batch = False

    def see(self, module: nn.Module, x: torch.Tensor) -> None:
        """Adds the selected rows of `x`, `(..., in_features)`, to the moment of `module`."""
        name = self.names[module]
        group = self.group_of.get(name)
        if group is None:
            group = self._first_group(name, module, x)
            if group.holds(x):  # a sibling brought these very rows
                group.arrived.add(name)
                return
        elif name in group.arrived or (group.tensor is not None and not group.holds(x)):
            # called twice in one pass, or no longer handed what its siblings are: from here on it counts for itself
            group = self._split_off(name, group)
        if group.tensor is None:
            group.take(x, self._rows(name, module, x))
        group.arrived.add(name)
        if self.first_batch or len(group.arrived) == len(group.members):
            group.fold()

    def _first_group(self, name: str, module: nn.Module, x: torch.Tensor) -> _Group:
        has_bias = _has_bias(module)
        key = (id(x), has_bias)
        group = self.by_tensor.get(key)
        if group is None or not group.holds(x):
            group = self.by_tensor[key] = _Group(self.sink(x.shape[-1] + has_bias))
        group.members.append(name)
        self.group_of[name] = group
        return group

    def _split_off(self, name: str, group: _Group) -> _Group:
        if group.members == [name]:
            group.fold()
            group.tensor = None
            return group
        alone = _Group(group.sink.copy())
        if name in group.arrived and group.pending is not None:
            alone.sink.add(group.pending)  # its earlier rows of this pass
        group.members.remove(name)
        group.arrived.discard(name)
        alone.members.append(name)
        self.group_of[name] = alone
        return alone

    def _rows(self, name: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The selected rows in float32, with a column of ones where the layer has a bias: `(n, dim)`."""
        rows = x.detach().reshape(-1, x.shape[-1])
        chosen = self._chosen_of_expert(name, len(rows))
        if chosen is not None:
            rows = rows[chosen]
        elif self.mask is not None and not (self.mask_is_full and expert_module(name) is not None):
            if self.mask.numel() != len(rows):
                raise ValueError(
                    f"The input of {name} has {len(rows)} rows, the mask has {self.mask.numel()} entries: the layer does not "
                    "see one row a token. Leave it out with `exclude_modules`."
                )
            if not self.mask_is_full:
                rows = rows[self.mask.to(rows.device).flatten()]
        device = rows.device if self.device is None else torch.device(self.device)
        # siblings may change the tensor in place before the last of them has come
        copy = self.mask_is_full and len(self.group_of[name].members) > 1
        rows = rows.to(torch.float32, copy=copy).to(device)
        if not torch.isfinite(rows.sum()):  # one pass; NaN and infinity survive the sum
            raise ValueError(f"The input of {name} holds NaN or infinity. Check the model's weights and dtype.")
        if _has_bias(module):
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        return rows

    def _chosen_of_expert(self, name: str, count: int) -> torch.Tensor | None:
        """Which of the rows that an expert is handed are selected; `None` if it is no expert, or has all rows selected."""
        if self.mask is None or self.tokens is None or expert_module(name) is None:
            return None
        tokens = self.tokens.of(name)
        if tokens is None or len(tokens) != count:
            if self.mask_is_full:
                return None
            raise ValueError(
                f"The rows that reach {name} cannot be followed from the input of its mixture, so the mask cannot be applied to "
                "them. Leave the layer out with `exclude_modules`."
            )
        return (tokens >= 0) & self.mask.to(tokens.device).flatten()[tokens.clamp_min(0)]

    def check_fed(self, selected: int) -> None:
        if selected == 0:
            raise ValueError("The mask selects no token of the data: there is nothing to collect.")
        fed = {name for name, group in self.group_of.items() if group.sink.count}
        # a router may never choose an expert, but some it does
        fed_families = {expert_family(name) for name in fed if expert_module(name) is not None}
        unfed = [name for name in self.layers if name not in fed and expert_family(name) not in fed_families]
        if unfed:
            raise ValueError(f"The forward pass never fed {unfed[:5]}. Leave them out with `exclude_modules`.")
        if self.experts is not None:
            self.experts.check_fed()

    def sinks(self) -> dict[str, Any]:
        of_experts = {} if self.experts is None else self.experts.sinks()
        return {name: self._sink_of(name) for name in self.layers} | of_experts

    def _sink_of(self, name: str) -> Any:
        group, module = self.group_of.get(name), self.layers[name]
        return self.sink(input_width(module) + _has_bias(module)) if group is None else group.sink


def _has_bias(module: nn.Module) -> bool:
    return getattr(base_layer_of(module), "bias", None) is not None
