"""Runs a model over data and hands the inputs of its layers on: to sums of second moments, or to any other `RowSink`.

Forward pre-hooks see the input of every selected layer. Layers that are handed the same tensor share one moment from the
first batch on; that they still do is checked in every batch. The output head is not run: its input is the body's output.

An encoder-decoder model has two sequences, each with a mask of its own. Layers of the encoder, and those of the decoder that are
handed what the encoder made (the keys and values of cross-attention), have the encoder's rows; all others have the decoder's.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..sharded import whole_input
from .encoding import Batch, Item, batches, encode_items, encode_pairs, pair_batches, tokenizer_fingerprint
from .experts import ExpertCollector, ParameterStack
from .kinds import LayerKind, kind_of
from .parameters import expert_parameters, select_parameters
from .routing import RowTokens, expert_family, expert_module
from .selection import Selection, base_layer_of, outer_modules, output_head, select_layers, unwrap
from .statistics import Moment, Provenance, Statistics, full_precision
from .weights import input_device


@dataclass(frozen=True)
class RowMask:
    """Which hidden states are rows, `(batch, length)` bool; `None` means all of them.

    `encoder` is the mask of an encoder-decoder model's encoder, `rows` then that of its decoder.
    """

    rows: torch.Tensor | None = None
    encoder: torch.Tensor | None = None

    @property
    def selected(self) -> int:
        """How many rows it selects; 1 if that is not known."""
        return 1 if self.rows is None else int(self.rows.sum())

    @cached_property
    def has_all_rows(self) -> bool:
        """Whether `rows` selects every one; looked at once, not by every layer."""
        return self.rows is None or bool(self.rows.all())

    @cached_property
    def has_all_of_encoder(self) -> bool:
        """Whether `encoder` selects every row."""
        return self.encoder is None or bool(self.encoder.all())


MaskFn = Callable[[Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


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
            `datasets.Dataset`. An encoder-decoder model reads the prompt and writes the answer; a plain text is both. Without: an iterable of batches (tensors of token ids, or dictionaries of model inputs).
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer for texts.
        mask_fn (`Callable`, *optional*):
            For batches: maps a batch to a boolean tensor, one entry a token, that is `True` where the hidden state is a row.
            By default the tokens whose label is not -100, else those of the attention mask, else all. Where the inputs are no
            tokens, as in images, an entry a sample: it holds for every position of the sample. For an encoder-decoder model it
            returns two, the encoder's and the decoder's.
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
            is never fed; an activation is NaN or infinite (the message names the layer); the data is empty; the weights are on the
            meta device.
        `TypeError`: A matching module cannot be edited, or the data is of another kind.
    """
    base = unwrap(model)
    encoder = encoder_of(base)
    selection = Selection(target_modules, exclude_modules, layers_to_transform, layers_pattern, target_parameters)
    layers, stacks = _engram_layers(base) if selection == Selection() else ({}, {})
    if not layers and not stacks:
        layers, stacks = _select(base, selection, target_experts)
    stream = _Stream(data, tokenizer, mask_fn, token_position, batch_size, max_length, encoder is not None)

    routed = {name: stack for name, stack in stacks.items() if stack.is_routed}
    collector = Collector(
        layers,
        device,
        encoder=encoder,
        kinds={name: stack.kind for name, stack in stacks.items() if not stack.is_routed},
        experts=ExpertCollector(base, routed, device),
        tokens=RowTokens(base, layers),
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
    """The layers of the ENGRAM adapters, and the Parameters, by name; one that is a matrix is among the layers as well."""
    layers: dict[str, nn.Module] = {}
    stacks: dict[str, ParameterStack] = {}
    for name, outer in outer_modules(base):
        for module in _wrappers(outer):
            if not hasattr(module, "engram_A"):
                continue
            public, stack = cast(Any, module).public_name(name), getattr(module, "stack", None)
            if stack is not None:
                stacks[public] = stack
            if stack is None or not stack.is_routed:
                layers[public] = outer
    return layers, stacks


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """PEFT's wrappers around a layer, from outside."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        yield module
        module = inner


def _select(
    base: nn.Module, selection: Selection, target_experts: bool
) -> tuple[dict[str, nn.Module], dict[str, ParameterStack]]:
    """The layers that are asked for, and the Parameters, by name; one that is a matrix is among the layers as well."""
    targets = selection.target_parameters
    if targets is None and target_experts and selection.target_modules in (None, "all-linear"):
        targets = expert_parameters(base, selection)
    stacks = select_parameters(base, replace(selection, target_parameters=targets))
    layers = select_layers(base, selection)
    outer = {base_layer_of(module): module for _, module in outer_modules(base)}
    layers |= {name: outer[stack.module] for name, stack in stacks.items() if not stack.is_routed}
    return layers, stacks


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder model, `None` for any other model."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    return cast(PreTrainedModel, model).get_encoder()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time being, and nothing compiled; afterwards every module is in the mode it was in.

    What `torch.compile` made of a model before does not call hooks that were added since.
    """
    training = [module for module in model.modules() if module.training]
    # nothing can have been compiled before this module was imported, which takes seconds
    is_compiled = "torch._dynamo" in sys.modules
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
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
        has_encoder: bool,
    ) -> None:
        self.data, self.mask_fn, self.token_position = data, mask_fn, token_position
        self.tokenizer, self.batch_size, self.has_encoder = tokenizer, batch_size, has_encoder
        self.texts = self.selected = 0
        self.rules: set[str] = set()
        self.encoded: list[Any] | None = None
        if isinstance(data, str):
            raise TypeError("`data` is a single string. Pass a list of texts.")
        if tokenizer is not None:
            if mask_fn is not None:
                raise ValueError(
                    "`mask_fn` is for batches; with a `tokenizer` the items themselves say which tokens count."
                )
            encode: Callable[..., list[Any]] = encode_pairs if has_encoder else encode_items
            self.encoded = encode(tokenizer, data, max_length, token_position)
            if not self.encoded:
                raise ValueError("`data` is empty.")
        elif isinstance(data, Sequence) and data and isinstance(data[0], str | tuple):
            raise ValueError("`data` holds texts: pass the `tokenizer` too.")

    def __len__(self) -> int:
        if self.encoded is not None:
            return -(-len(self.encoded) // self.batch_size)
        return len(self.data) if hasattr(self.data, "__len__") else 0

    def __iter__(self) -> Iterator[tuple[Any, RowMask]]:
        for inputs, mask, rule in self._text_batches() if self.encoded is not None else self._loader_batches():
            self.rules.add(rule)
            self.texts += len(_ids_of(inputs))
            self.selected += mask.selected
            yield inputs, mask

    def _text_batches(self) -> Iterator[tuple[Any, RowMask, str]]:
        assert self.encoded is not None and self.tokenizer is not None
        pad = self.tokenizer.pad_token_id
        if self.has_encoder:
            for read, written in pair_batches(self.encoded, self.batch_size, pad):
                inputs = {
                    "input_ids": read.input_ids,
                    "attention_mask": read.attention_mask,
                    "labels": written.input_ids,
                    "decoder_attention_mask": written.attention_mask,
                }
                yield inputs, RowMask(written.mask, read.mask), self.token_position
            return
        for batch in batches(self.encoded, self.batch_size, pad):
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            yield inputs, RowMask(batch.mask), self.token_position

    def _loader_batches(self) -> Iterator[tuple[Any, RowMask, str]]:
        for batch in self.data:
            if not isinstance(batch, Mapping | torch.Tensor):
                raise TypeError(
                    f"A batch is a {type(batch).__name__}; expected a tensor of token ids or a dictionary of inputs."
                )
            yield batch, *(self._sided_mask(batch) if self.has_encoder else self._mask(batch))

    def _mask(self, batch: Any) -> tuple[RowMask, str]:
        if self.mask_fn is not None:
            return RowMask(_checked_mask(self.mask_fn(batch), batch)), "mask_fn"
        if isinstance(batch, Mapping) and batch.get("labels") is not None:
            return RowMask(_checked_mask(batch["labels"] != -100, batch)), "labels"
        if isinstance(batch, Mapping) and batch.get("attention_mask") is not None:
            return RowMask(_checked_mask(batch["attention_mask"].bool(), batch)), "attention_mask"
        return RowMask(), "all"

    def _sided_mask(self, batch: Any) -> tuple[RowMask, str]:
        """The masks of the encoder's and of the decoder's sequence."""
        written = None
        if isinstance(batch, Mapping):
            written = next((batch[n] for n in ("decoder_input_ids", "labels") if batch.get(n) is not None), None)
        if written is None:
            raise ValueError(
                "A batch for an encoder-decoder model must be a dictionary with `labels` or `decoder_input_ids`, or else its decoder "
                "has nothing to read."
            )
        if self.mask_fn is not None:
            masks = self.mask_fn(batch)
            if not isinstance(masks, tuple) or len(masks) != 2:
                raise ValueError(
                    "`mask_fn` must return two masks for an encoder-decoder model: the encoder's and the decoder's."
                )
            return RowMask(_checked_mask(masks[1], written), _checked_mask(masks[0], batch)), "mask_fn"
        read = batch.get("attention_mask")
        encoder = None if read is None else _checked_mask(read.bool(), batch)
        if batch.get("labels") is not None:
            return RowMask(_checked_mask(batch["labels"] != -100, written), encoder), "labels"
        if batch.get("decoder_attention_mask") is not None:
            return RowMask(_checked_mask(batch["decoder_attention_mask"].bool(), written), encoder), "attention_mask"
        return RowMask(None, encoder), "all"

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
    if mask.shape != shape and not (mask.shape == ids.shape[:1] and not _are_tokens(batch)):
        raise ValueError(
            f"The mask has shape {list(mask.shape)}, the batch has {list(shape)}: one entry a token is needed."
        )
    return mask


def _are_tokens(batch: Any) -> bool:
    """Whether the inputs are texts, which have an entry a token in every mask."""
    if isinstance(batch, Mapping):
        return any(batch.get(name) is not None for name in ("input_ids", "inputs_embeds"))
    return not batch.is_floating_point()


class BodyRunner:
    """Runs what is needed of a model: the body without the head where the head's input is the body's output."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], collector: Collector) -> None:
        self.model, self.body, self.collector = model, model, collector
        self.head: nn.Module | None = None
        self._device = input_device(model)
        self._has_encoder = encoder_of(model) is not None
        is_whole = isinstance(model, FSDPModule)  # whose weights are gathered by the outermost module alone
        if isinstance(model, PreTrainedModel) and model.base_model is not model and not is_whole:
            prefix = model.base_model_prefix + "."
            head = output_head(model)
            outside = [module for name, module in layers.items() if not name.startswith(prefix)]
            if all(base_layer_of(module) is head for module in outside) and not (outside and self._has_encoder):
                self.body = model.base_model
                self.head = outside[0] if outside else None
        accepted = inspect.signature(self.body.forward).parameters
        self._accepted = set(accepted) - {"labels"}
        self._no_cache = {"use_cache": False} if "use_cache" in accepted else {}

    def batch(self, batch: Batch) -> None:
        """Runs a batch of texts, whose mask says which rows go to the sinks."""
        self.collector.start_batch(RowMask(batch.mask))
        self({"input_ids": batch.input_ids, "attention_mask": batch.attention_mask})
        self.collector.end_batch()

    def __call__(self, inputs: Any) -> None:
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.to(self._device)
            named = {self.model.main_input_name: inputs} if isinstance(self.model, PreTrainedModel) else None
            if named is None:
                self.body(inputs)
                return
            inputs = named
        _check_padding_is_masked(inputs, getattr(self.model, "config", None))
        if self._has_encoder and inputs.get("decoder_input_ids") is None and inputs.get("labels") is not None:
            shift = cast(Any, self.model).prepare_decoder_input_ids_from_labels
            inputs = {**inputs, "decoder_input_ids": shift(labels=inputs["labels"])}
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
        """Takes float32 `rows`, `(n, dim)`, which it must not keep or change. For other rows see `Moment.add`."""
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
        sink: Callable[..., Any] = Moment,
        encoder: nn.Module | None = None,
        kinds: Mapping[str, LayerKind] | None = None,
        experts: ExpertCollector | None = None,
        tokens: RowTokens | None = None,
    ) -> None:
        self.layers, self.device, self.sink, self.encoder = layers, device, sink, encoder
        self.experts, self.tokens = experts, tokens
        # `kinds` says how to read what is no layer that has one
        self.kinds = {name: (kinds or {}).get(name) or _known_kind(module) for name, module in layers.items()}
        self.in_encoder = set() if encoder is None else set(encoder.modules())
        self.encoded: torch.Tensor | None = None  # what the encoder made in this batch
        self.names = {module: name for name, module in layers.items()}
        self.group_of: dict[str, _Group] = {}
        self.handles: list[Any] = []
        self.mask = RowMask()
        self.first_batch = True
        self.listening = True
        # the groups that this batch made, by the tensor seen and the way to make rows of it
        self.by_tensor: dict[tuple[int, bool, Hashable], _Group] = {}

    def __enter__(self) -> Collector:
        for module in self.layers.values():
            self.handles.append(module.register_forward_pre_hook(self._hook, with_kwargs=True))
        if self.encoder is not None:
            self.handles.append(self.encoder.register_forward_hook(self._see_encoded))
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

    def _see_encoded(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.encoded = output[0]

    def start_batch(self, mask: RowMask) -> None:
        self.mask = mask
        if self.experts is not None:
            self.experts.mask = mask.rows
        if self.tokens is not None:
            self.tokens.num_tokens = {side.numel() for side in (mask.rows, mask.encoder) if side is not None}

    def end_batch(self) -> None:
        self.encoded = None
        for group in set(self.group_of.values()):
            if group.tensor is not None:
                for name in set(group.members) - group.arrived:  # left out of this pass: it has none of its rows
                    self._split_off(name, group)
            group.fold()
            group.tensor, group.arrived = None, set()
        self.by_tensor.clear()
        self.first_batch = False

    def see(self, module: nn.Module, x: torch.Tensor) -> None:
        """Adds the selected rows of the input `x` to the moment of `module`."""
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
        key = (id(x), _has_bias(module), self.kinds[name].geometry(base_layer_of(module)))
        group = self.by_tensor.get(key)
        if group is None or not group.holds(x):
            group = self.by_tensor[key] = _Group(self._new_sink(name))
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
        """The selected rows, `(n, dim)` or `(n, groups, dim)` in float32 with a column of ones where the layer has a bias.

        One-hot rows stay the indices that they are, `(n,)`.
        """
        layer, kind = base_layer_of(module), self.kinds[name]
        rows = kind.rows(layer, whole_input(x.detach(), layer))
        groups, _, width = kind.shape(layer)
        if not kind.one_hot and rows.shape[-1] != width:
            raise ValueError(
                f"{type(kind).__name__} makes rows of width {rows.shape[-1]} of the input of {name}, and a matrix of width {width}: "
                "the two must agree."
            )
        of_a_row = 0 if kind.one_hot else 1 if groups == 1 else 2  # dimensions
        positions, row = rows.shape[: rows.dim() - of_a_row], rows.shape[rows.dim() - of_a_row :]
        rows = rows.reshape(-1, *row)
        chosen = self._chosen(name, positions, *self._mask_of(module, x))
        rows = rows if chosen is None else rows[chosen.to(rows.device)]
        device = rows.device if self.device is None else torch.device(self.device)
        # siblings may change the tensor in place before the last of them has come
        copy = chosen is None and len(self.group_of[name].members) > 1
        if kind.one_hot:
            return rows.to(device, torch.int64, copy=copy)
        rows = rows.to(torch.float32, copy=copy).to(device)
        if not torch.isfinite(rows.sum()):  # one pass; NaN and infinity survive the sum
            raise ValueError(f"The input of {name} holds NaN or infinity. Check the model's weights and dtype.")
        if _has_bias(module):
            rows = torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)
        return rows

    def _chosen(
        self, name: str, positions: torch.Size, mask: torch.Tensor | None, is_full: bool
    ) -> torch.Tensor | None:
        """Which of the rows at `positions` are selected, flat; `None` for all."""
        if mask is None:
            return None
        if expert_module(name) is not None:
            tokens = None if self.tokens is None else self.tokens.of(name)
            if tokens is not None and len(tokens) == positions.numel():
                return (tokens >= 0) & mask.to(tokens.device).flatten()[tokens.clamp_min(0)]
            if is_full:
                return None
            if self.tokens is not None:
                raise ValueError(
                    f"The rows that reach {name} cannot be followed from the input of its mixture, so the mask cannot be applied to "
                    "them. Leave the layer out with `exclude_modules`."
                )
        chosen = _mask_of_rows(name, positions, mask, is_full)
        return None if is_full else chosen

    def _mask_of(self, module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """The mask of the side that `x` is on, and whether it selects everything."""
        if self.encoder is not None and self._is_encoded(module, x):
            return self.mask.encoder, self.mask.has_all_of_encoder
        return self.mask.rows, self.mask.has_all_rows

    def _is_encoded(self, module: nn.Module, x: torch.Tensor) -> bool:
        """Whether `x` is on the encoder's side."""
        if module in self.in_encoder or self.encoded is None:
            return module in self.in_encoder
        return x is self.encoded or (x.shape == self.encoded.shape and torch.equal(x, self.encoded.to(x)))

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
        group = self.group_of.get(name)
        return self._new_sink(name) if group is None else group.sink

    def _new_sink(self, name: str) -> Any:
        module = self.layers[name]
        groups, _, width = self.kinds[name].shape(base_layer_of(module))
        width += _has_bias(module)
        return self.sink(width) if groups == 1 else self.sink(width, groups)


def _mask_of_rows(name: str, positions: torch.Size, mask: torch.Tensor, is_full: bool) -> torch.Tensor:
    """The mask as one entry a row, flat."""
    if mask.dim() == 1 and (is_full or len(mask) == positions[0]):
        return mask.repeat_interleave(
            positions[1:].numel()
        )  # an entry a sample, which may have any number of positions
    if mask.numel() != positions.numel():
        entry = "sample" if mask.dim() == 1 else "token"
        raise ValueError(
            f"The input of {name} has {positions.numel()} rows, the mask has {mask.numel()} entries: the layer does not "
            f"see one row a {entry}. Leave it out with `exclude_modules`."
        )
    return mask.flatten()


def _known_kind(module: nn.Module) -> LayerKind:
    kind = kind_of(base_layer_of(module))
    assert kind is not None, module  # only layers that have one are selected
    return kind


def _has_bias(module: nn.Module) -> bool:
    return getattr(base_layer_of(module), "bias", None) is not None
