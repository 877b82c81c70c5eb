"""Tables of other people's models, served from their checkpoints.

Read in transformers 5.24: `Qwen4ExpTextNGramEmbedding` keeps all heads in one `nn.Embedding` named `ngram_embedding`, to which it
hands ids of the whole table; checkpoints hold it whole or as `ngram_embedding.shard_<i>.weight`, one below the other.
`Gemma3nTextScaledWordEmbedding` and its like multiply what they look up by `embed_scale`. `from_pretrained` makes a model by
calling its class, which is where a table has to go before any weight is read, and does not mind keys of a checkpoint that
`_keys_to_ignore_on_load_unexpected` of the model matches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from .checkpoint import LOADING_OPTIONS, Paths, files_of_model, model_files, stored_tensors
from .modules import MappedEmbedding
from .saving import SaveWithTables
from .table import Table, open_table


KNOWN_TABLES = ("ple_embedding.ngram_embedding", "embed_tokens_per_layer")
_COMPARED_ROWS = 1024
Model = TypeVar("Model", bound=PreTrainedModel)


def offload_tables(
    model: nn.Module,
    modules: Sequence[str] | None = None,
    *,
    checkpoint: Paths | None = None,
    placement: str = "mmap",
    device: str | torch.device | None = None,
    freeze: bool = False,
) -> dict[str, Table]:
    """Serves embeddings of a model from the model's checkpoint, where it lies. Their weights are given up, or never come to be.

    Args:
        model (`nn.Module`):
            The model, loaded or with these weights on the meta device. It is left as it was if anything is wrong.
        modules (`Sequence[str]`, *optional*):
            Ends of the names of `nn.Embedding` modules. By default the tables that are known to be large: `ngram_embedding` of
            Qwen's per-layer embeddings and `embed_tokens_per_layer` of Gemma's.
        checkpoint (`str`, `os.PathLike` or a sequence of them, *optional*):
            Folder or safetensors files; by default where the model was loaded from.
        placement (`str`): See `open_table`.
        device (`str` or `torch.device`, *optional*): See `open_table`.
        freeze (`bool`): Whether the rows stay as they are. If not, `model.train()` is an error, as they cannot be trained.

    Returns:
        The tables, by the names of the modules.

    Raises:
        `ValueError`:
            There is no such module; it is tied to another; it does more than look up rows; the checkpoint has no such table or
            another one than the model holds (1,024 rows are compared).

    Example:

        ```py
        >>> tables = offload_tables(model)
        >>> print(tables["model.layers.1.ple.ple_embedding.ngram_embedding"].stats())
        ```
    """
    found = _embeddings(model, KNOWN_TABLES if modules is None else modules, required=modules is not None)
    stored = stored_tensors(files_of_model(model) if checkpoint is None else checkpoint)
    replacements = {}
    for name, module in found.items():
        tensors = _tensors_of(name, stored)
        files = list(dict.fromkeys(stored[tensor].path for tensor in tensors))
        table = open_table(files, tensor=tensors, placement=placement, device=device)
        _check_same_rows(name, module.weight, table)
        replacement = MappedEmbedding(table, scale=_scale_of(module), dtype=module.weight.dtype, freeze=freeze)
        replacements[name] = replacement
    for name, replacement in replacements.items():
        model.set_submodule(name, replacement)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and any(module in replacements.values() for module in part.modules()):
            part.save_pretrained = SaveWithTables(part)
    return {name: replacement.table for name, replacement in replacements.items()}


def load_with_tables(
    model_class: type[Model],
    name: str | os.PathLike,
    modules: Sequence[str] | None = None,
    *,
    placement: str = "mmap",
    device: str | torch.device | None = None,
    freeze: bool = False,
    **kwargs: Any,
) -> Model:
    """`model_class.from_pretrained(name)` with the tables of the model served from the checkpoint: they are never read into memory.

    Args:
        model_class (`type`): Class of the model, such as `Qwen4ExpForCausalLM`; not one of the `Auto` classes.
        name (`str` or `os.PathLike`): Folder or Hub name of a checkpoint in safetensors files.
        modules, placement, device, freeze: See `offload_tables`.
        kwargs: What `from_pretrained` takes besides.

    Example:

        ```py
        >>> model = load_with_tables(Qwen4ExpForCausalLM, "Qwen3.8-Flash-Next", dtype="auto")
        ```
    """
    files = model_files(name, **{key: kwargs[key] for key in LOADING_OPTIONS if key in kwargs})
    kwargs.pop("force_download", None)  # has happened, and once more would replace the files

    def with_tables(self: Model, config: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(self, config, *args, **options)
        tables = offload_tables(
            self, modules, checkpoint=files, placement=placement, device=device, freeze=freeze
        )  # fmt: skip
        ends = {re.escape(module.rpartition(".")[2]) for module in tables}
        known = {rf"(^|\.){end}\.(shard_\d+\.)?weight$" for end in ends}
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *known}

    # a class of its own for the time of loading, since from_pretrained has no other moment between making and filling a model
    names = {"__init__": with_tables, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    loading: type[Model] = type(model_class.__name__, (model_class,), names)
    found = loading.from_pretrained(name, **kwargs)
    model: Model = found[0] if isinstance(found, tuple) else found
    model.__class__ = model_class
    return found


def _embeddings(model: nn.Module, ends: Sequence[str], *, required: bool) -> dict[str, nn.Embedding]:
    """The modules whose names end so, after everything was checked that can be without the checkpoint."""
    named = dict(model.named_modules())
    found: dict[str, nn.Embedding] = {}
    for end in ends:
        names = [name for name in named if name == end or name.endswith(f".{end}")]
        if required and not names:
            raise ValueError(f"`modules`: the model has no module {end!r}.")
        for name in names:
            module = named[name]
            if isinstance(module, MappedEmbedding):
                continue
            if not isinstance(module, nn.Embedding):
                raise ValueError(f"`modules`: {name} is a {type(module).__name__}, only embeddings can be served.")
            found[name] = module
    if not found:
        raise ValueError(f"The model has no embedding {' or '.join(ends)}. Name what to serve: `modules`.")
    for name, module in found.items():
        _check_is_lookup(name, module)
        owners = [other for other, part in named.items() if part is not module and module.weight in _direct(part)]
        if owners:
            raise ValueError(f"{name} shares its weight with {owners[0]}, which needs it in memory.")
    return found


class _Identities(set[int]):
    def __contains__(self, tensor: object) -> bool:
        return super().__contains__(id(tensor))


def _direct(module: nn.Module) -> _Identities:
    """The parameters of a module itself, by identity."""
    return _Identities(id(parameter) for parameter in module._parameters.values())


def _check_is_lookup(name: str, module: nn.Embedding) -> None:
    """Raises a `ValueError` if an embedding does more than look up rows and scale them."""
    if module.max_norm is not None:
        raise ValueError(f"{name} renormalises its rows (`max_norm`), which a read-only table cannot.")
    if type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale"):
        return
    raise ValueError(f"{name} is a {type(module).__name__}, whose forward is not that of an nn.Embedding.")


def _scale_of(module: nn.Embedding) -> float:
    """What an embedding multiplies its rows by. Where it is a buffer on the meta device, the number it is made from."""
    scale: Any = getattr(module, "embed_scale", 1.0)
    on_meta = isinstance(scale, torch.Tensor) and scale.is_meta
    return float(getattr(module, "scalar_embed_scale", 1.0) if on_meta else scale)


def _tensors_of(name: str, stored: Mapping[str, Any]) -> list[str]:
    """The tensors of a checkpoint that are the weight of a module: the one with the longest common end, or its shards.

    The number of a layer is never given up on the way: a table of another layer would be found.
    """
    parts = name.split(".")
    least = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    for start in range(least + 1):
        end = ".".join(parts[start:])
        pattern = re.compile(rf"(?:.*\.)?{re.escape(end)}\.(?:shard_(\d+)\.)?weight")
        matches = {tensor: match for tensor in stored if (match := pattern.fullmatch(tensor))}
        whole = [tensor for tensor, match in matches.items() if match[1] is None]
        shards = sorted((int(match[1]), tensor) for tensor, match in matches.items() if match[1] is not None)
        if len(whole) == 1 and not shards:
            return whole
        if shards and not whole and [number for number, _ in shards] == list(range(len(shards))):
            return [tensor for _, tensor in shards]
        if matches:
            raise ValueError(f"The checkpoint holds several tensors that could be {name}: {sorted(matches)[:5]}.")
    raise ValueError(f"The checkpoint holds no weight of {name}. Name the files that do: `checkpoint`.")


def _check_same_rows(name: str, weight: torch.Tensor, table: Table) -> None:
    """Raises a `ValueError` if a table is not the one that a model holds, as far as some of its rows tell."""
    if tuple(weight.shape) != (table.rows, table.dim):
        raise ValueError(f"{name} is {list(weight.shape)}, the checkpoint holds {[table.rows, table.dim]}.")
    if table.dtype.itemsize == 1 and weight.dtype is not table.dtype:
        raise ValueError(
            f"The checkpoint holds {name} as {table.dtype}, which means something together with its scales only. Put a "
            "`MappedEmbedding` of `open_table(..., scales=...)` there, or one with `scale`, if it is one number."
        )
    if weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    sample = torch.randint(table.rows, (_COMPARED_ROWS,), generator=generator, device="cpu")
    sample[:2] = torch.tensor([0, table.rows - 1], device="cpu")
    with torch.no_grad():
        held = F.embedding(sample.to(weight.device), weight).cpu()
        rows = table.gather(sample)
    assert isinstance(rows, torch.Tensor)
    if not torch.equal(held.nan_to_num(), rows.to(weight.dtype).cpu().nan_to_num()):
        raise ValueError(
            f"{name} is another table than the checkpoint holds: it was changed after loading. Save the model first, and name "
            "what was saved: `checkpoint`."
        )
