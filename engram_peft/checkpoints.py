"""Merging an adapter into a checkpoint on disk: for models that are larger than the memory at hand.

An edited weight has the shape and the dtype that it had, so the files are copied as they are and only the bytes of the edited
weights are written anew, one layer at a time. What is in memory is one layer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from .memory.tables.checkpoint import StoredTensor, stored_tensors
from .tuners.engram import EngramConfig


# What may hold weights: copies of them in other files would be left unedited beside the edited ones.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx")


def edit_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> None:
    """Writes the checkpoint that `merge_and_unload` and `save_pretrained` would write, to the bit, without loading the model.

    The shards are those of the source. `dst` appears when everything in it is complete: an interrupted call leaves at most a
    hidden folder beside it.

    Args:
        src (`str`): The base model: a folder with `model.safetensors` or its shards, or a name on the hub.
        dst (`str`): The folder to write. It must not exist yet.
        adapter (`str` or `Sequence[str]`):
            Folder of an ENGRAM adapter of that model, or its name on the hub; or several, whose edits add up.

    Raises:
        `FileExistsError`: There is something at `dst`.
        `FileNotFoundError`: `src` has no safetensors weights.
        `ValueError`: An adapter is not an ENGRAM adapter or does not fit the model; the model is quantised, or its checkpoint
            calls the weights otherwise than the model does; an edited weight belongs to several layers, or is a Parameter
            (`target_parameters`).
    """
    target = Path(dst)
    if target.exists():
        raise FileExistsError(f"`dst` exists already: {target}. Choose another folder, or remove it.")
    source = _local_folder(src)
    paths = [adapter] if isinstance(adapter, str | os.PathLike) else list(adapter)
    if not paths:
        raise ValueError("`adapter` must name at least one adapter.")
    adapters = {f"edit_{i}": _local_folder(path) for i, path in enumerate(paths)}
    weights = _stored_weights(source)
    model = _without_weights(source)
    edited = _adapted(model, adapters)
    layers = list(_edited_layers(edited, weights))

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        work = Path(beside) / "checkpoint"
        files = sorted({Path(weight.path).relative_to(source) for weight in weights.values()})
        shutil.copytree(source, work, ignore=shutil.ignore_patterns(".*", *_WEIGHTS))
        for file in files:
            shutil.copyfile(source / file, work / file)
        for layer in logging.tqdm(layers, desc="Editing layers"):
            for key, tensor in _merged(layer, adapters, weights).items():
                _overwrite(work / Path(weights[key].path).relative_to(source), weights[key], tensor)
        for file in files:
            with open(work / file, "rb") as written:
                os.fsync(written.fileno())
        os.rename(work, target)


def _local_folder(name: str | os.PathLike[str]) -> Path:
    return Path(name) if os.path.isdir(name) else Path(snapshot_download(str(name)))


def _stored_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint by its name in the files."""
    if not any((folder / name).exists() for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)):
        raise FileNotFoundError(
            f"{folder / SAFE_WEIGHTS_NAME} does not exist. `src` must hold safetensors weights: load the model and `save_pretrained` "
            "it once."
        )
    return stored_tensors(folder)


def _read(key: str, weight: StoredTensor) -> torch.Tensor:
    with safe_open(weight.path, "pt") as stored:
        return stored.get_tensor(key)


def _without_weights(folder: Path) -> PreTrainedModel:
    """The model on the meta device."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "`src` is quantised: its weights cannot be edited in place. Edit the unquantised checkpoint and quantise the result, "
            "or keep the adapter unmerged."
        )
    architecture = next(iter(config.architectures or ()), None)
    with torch.device("meta"):
        if architecture is not None and hasattr(transformers, architecture):
            return getattr(transformers, architecture)(config)
        return AutoModelForCausalLM.from_config(config)


def _adapted(model: PreTrainedModel, adapters: dict[str, Path]) -> PeftModel:
    """The model with adapters that have no weights yet either."""
    peft_model: PeftModel | None = None
    for name, folder in adapters.items():
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config, EngramConfig):
            raise ValueError(f"The adapter in {folder} is {config.peft_type}, not ENGRAM.")
        if config.modules_to_save:
            raise ValueError(
                f"The adapter in {folder} holds whole modules ({config.modules_to_save}). Load the model and merge it there."
            )
        if config.target_parameters:
            raise ValueError(
                f"The adapter in {folder} edits Parameters ({config.target_parameters[:2]}), which checkpoints store otherwise than the "
                "model does. Load the model and merge it there."
            )
        config.inference_mode = True
        with torch.device("meta"):
            if peft_model is None:
                peft_model = get_peft_model(model, config, adapter_name=name)
            else:
                peft_model.add_adapter(name, config)
    assert peft_model is not None
    peft_model.base_model.set_adapter(list(adapters), inference_mode=True)
    peft_model.base_model._check_untied(list(adapters), untie=False)
    return peft_model


@dataclass
class _EditedLayer:
    """A layer with an adapter, its name in the model, and the names of its own tensors in the checkpoint, by parameter."""

    name: str
    layer: Any
    keys: dict[str, str]


def _edited_layers(model: PeftModel, weights: dict[str, StoredTensor]) -> Iterator[_EditedLayer]:
    prefix = f"{getattr(model.get_base_model(), 'base_model_prefix', '')}."
    for name, layer in model.base_model.engram_layers().items():
        keys = {}
        for parameter, meta in layer.get_base_layer().named_parameters(recurse=False):
            key = f"{name}.{parameter}"
            # a body that was saved without its head, or the other way round
            found = next((k for k in (key, key.removeprefix(prefix), prefix + key) if k in weights), None)
            if found is None:
                raise ValueError(
                    f"{key} is not in the checkpoint: transformers converts its weights while loading. Load the model and "
                    "`save_pretrained` it once, and edit that checkpoint."
                )
            if weights[found].entry.shape != tuple(meta.shape):
                raise ValueError(
                    f"{found} has shape {list(weights[found].entry.shape)} in the checkpoint and {list(meta.shape)} in the model."
                )
            keys[parameter] = found
        yield _EditedLayer(name, layer, keys)


def _merged(
    edited: _EditedLayer, adapters: dict[str, Path], weights: dict[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """The layer's changed tensors by their names in the checkpoint. The layer has weights for the time being."""
    base = edited.layer.get_base_layer()
    empty = dict(base.named_parameters(recurse=False))
    original = {name: nn.Parameter(_read(key, weights[key]), requires_grad=False) for name, key in edited.keys.items()}
    for name, parameter in original.items():
        setattr(base, name, parameter)
    for adapter, folder in adapters.items():
        _load_factors(edited, adapter, folder)
    edited.layer.merge(safe_merge=True)
    changed = {
        edited.keys[name]: getattr(base, name).detach()
        for name, parameter in original.items()
        if getattr(base, name) is not parameter
    }
    edited.layer.unmerge()
    for name, parameter in empty.items():
        setattr(base, name, parameter)
    for adapter in adapters:
        edited.layer.delete_adapter(adapter)
    return changed


def _load_factors(edited: _EditedLayer, adapter: str, folder: Path) -> None:
    file = folder / SAFETENSORS_WEIGHTS_NAME
    with safe_open(file, "pt") as stored:
        for module in edited.layer.adapter_layer_names:
            factors = getattr(edited.layer, module)
            if adapter not in factors:
                return
            for name, meta in list(factors[adapter].named_parameters()):
                key = f"base_model.model.{edited.name}.{module}.{name}"
                tensor = stored.get_tensor(key)
                if tensor.shape != meta.shape:
                    raise ValueError(
                        f"{key} has shape {list(tensor.shape)} in {file}, its config says {list(meta.shape)}."
                    )
                setattr(factors[adapter], name, nn.Parameter(tensor, requires_grad=False))


def _overwrite(file: Path, weight: StoredTensor, tensor: torch.Tensor) -> None:
    """Replaces the bytes of one tensor."""
    content = tensor.contiguous().flatten().view(torch.uint8).numpy()
    size = weight.entry.end - weight.entry.start
    if content.nbytes != size:
        raise ValueError(f"A weight in {weight.path} has {size} bytes, what it is merged to {content.nbytes}.")
    with open(file, "r+b") as stored:
        stored.seek(weight.entry.start)
        stored.write(content.data)
