"""Checkpoints of models whose tables live elsewhere: what is saved holds every row, as if the rows were parameters.

transformers 5.24 makes checkpoints of `state_dict()`, of the model or as an argument, and safetensors 0.8 writes tensors from where they lie,
to a new file that is renamed at the end. So a mapped table goes from file to file without ever being loaded, and may go to the folder
that it is served from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .modules import MappedModule


def save_with_tables(
    model: nn.Module,
    save: Callable[..., None],
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Calls `save`, the `save_pretrained` that a model has by itself, so that it writes the rows of mapped tables along.

    Raises:
        `ValueError`: A table cannot be part of a checkpoint. Nothing was written.
        `TableChangedError`: A table's file changed. If it did so meanwhile, what was written has to be written again.
    """
    with _tables_of(model) as tables:
        if tables and kwargs.get("distributed_checkpoint"):
            raise ValueError("A distributed checkpoint cannot hold tables that are served from elsewhere.")
        if state_dict is not None:
            state_dict = {**state_dict, **tables}

        def add_tables(_: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
            found.update({prefix + name: tensor for name, tensor in tables.items()})

        hook = model.register_state_dict_post_hook(add_tables)
        try:
            save(save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            hook.remove()


@contextmanager
def _tables_of(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The rows of a model's mapped tables by the names that they have in a checkpoint of the model. Nothing is copied."""
    found: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if not isinstance(module, MappedModule):
                continue
            if module.table.layout.scale_dtype is not None:
                raise ValueError(
                    f"The rows of {name} have scales, so a checkpoint cannot hold them as its weight. Put the embedding that it "
                    "replaced back, or save the rest of the model with `state_dict()` and the table with `Table.save`."
                )
            tensors = stack.enter_context(module.table.tensors())
            if len(tensors) == 1:  # under the name of the parameter that it would be
                (tensor,) = tensors.values()
                tensors = {f"{name}.weight": tensor.view(-1, module.table.dim)}
            found |= tensors
        yield found


class SaveWithTables:
    """Takes the place of a model's `save_pretrained`, as `offload_tables` leaves the class of a model alone.

    An object that refers to the model, not a closure: copying and pickling the model copy this reference along.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        model = self._model
        save_with_tables(model, type(model).save_pretrained.__get__(model), save_directory, *args, **kwargs)
