"""What decoding remembers of an n-gram memory, inside the cache that the backbone passes around.

A memory reads the last tokens and, with a convolution, the last inputs of it. Both are kept like the states of a linear
attention layer, in layers appended to those of the backbone, so that whatever transformers does to a cache (reorder, crop,
reset, offload, repeat, select, compile) it does to them as well. No module keeps anything between calls.

This is the one module of the package that knows transformers' cache (read in 5.24).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, LinearAttentionLayer

from .spec import NgramMemorySpec


_UNDOABLE = 128  # more tokens than assistants propose at once


class NgramCacheLayer(LinearAttentionLayer):
    """The last columns of a `(batch, channels, length)` history.

    Masks and offloading treat it as a linear attention layer that needs neither.

    Args:
        content (`str`): What the history is of; layers of the same content belong together.
        length (`int`): How many columns later calls need.
        owner (`str`): Whose history it is, if several share a cache.
    """

    keys = values = None  # read of every layer of a cache by code that gathers or exports them

    def __init__(self, content: str, length: int, owner: str = "") -> None:
        super().__init__(number_of_states=1)
        self.content = content
        self.length = length
        self.owner = owner
        self._recent: list[torch.Tensor] = []  # the last columns, as they came: see `crop`

    def past(self) -> torch.Tensor | None:
        """`(batch, channels, length)`, or `None` before the first call."""
        if not self.has_previous_state[0]:
            return None
        return self.conv_states[0][..., -self.length :]

    def append(self, columns: torch.Tensor) -> None:
        """Remembers `(batch, channels, any)`. In front of the first call there are zeros, however much of it is cropped."""
        if not self.has_previous_state[0]:
            columns = pad(columns, (self.length, 0))
        recent = self._recent
        if not recent and (past := self.past()) is not None:
            recent = [past.clone()]
        self.update_conv_state(columns, conv_kernel_size=self.length)
        keep = not (self.record_past or torch.compiler.is_compiling())
        self._recent = self._shortened([*recent, columns]) if keep else []

    def _shortened(self, recent: list[torch.Tensor]) -> list[torch.Tensor]:
        """Without what nobody can ask for any more."""
        enough = self.length + _UNDOABLE
        if recent[-1].shape[-1] > enough:
            return [recent[-1][..., -enough:].clone()]
        columns = sum(chunk.shape[-1] for chunk in recent)
        while columns - recent[0].shape[-1] >= enough:
            columns -= recent.pop(0).shape[-1]
        return recent

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` columns.

        Also where nobody called `activate_past_recording`: an adapter's layers are appended by its first forward pass, and
        assisted decoding has called it by then. That goes back `_UNDOABLE` columns at least.
        """
        if self.record_past or not self._recent:
            super().crop(tokens_to_remove)
            return
        if tokens_to_remove == 0:
            return
        recent = torch.cat(self._recent, dim=-1)
        kept = recent[..., :tokens_to_remove]
        if tokens_to_remove > 0 or kept.shape[-1] < self.length:
            raise RuntimeError(
                f"The last {recent.shape[-1] - self.length} tokens can be cropped, not {-tokens_to_remove}."
            )
        self.conv_states[0].copy_(kept[..., -self.length :])
        self._recent = [kept]

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self._recent = []

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Puts the sequences at `beam_idx`."""
        super().reorder_cache(beam_idx)
        self._recent = []

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times."""
        if self.conv_states[0] is not None:
            self.conv_states[0] = self.conv_states[0].repeat_interleave(repeats, dim=0)
            self._recent = []

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences at `indices`."""
        if self.conv_states[0] is not None:
            self.conv_states[0] = self.conv_states[0][indices]
            self._recent = []


class DecodingState:
    """The view that one call has of the history in a cache: read before, written once the call has succeeded."""

    def __init__(self, layers: list[NgramCacheLayer]) -> None:
        self._layers = {layer.content: layer for layer in layers}

    def past_tokens(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compressed ids `(batch, spec.ids_lookback)` and the `past_reach` `(batch,)` that goes with them (`token_reach`)."""
        past = self._layers["tokens"].past()
        return None if past is None else (past[:, 0], past[:, 1, -1])

    def append_tokens(self, ids: torch.Tensor, carried_reach: torch.Tensor) -> None:
        """Remembers compressed ids and what may be read after each of them, `(batch, length)` both (`carried_reach`)."""
        self._layers["tokens"].append(torch.stack([ids, carried_reach], dim=1))

    def past_conv(self, layer_id: int) -> torch.Tensor | None:
        """The last inputs of a layer's convolution, `(batch, spec.conv_channels, spec.conv_lookback)`, if there are any."""
        layer = self._layers.get(f"conv {layer_id}")
        return None if layer is None else layer.past()

    def append_conv(self, layer_id: int, conv_inputs: torch.Tensor) -> None:
        """Remembers the inputs of a layer's convolution, `(batch, spec.conv_channels, length)`."""
        self._layers[f"conv {layer_id}"].append(conv_inputs)


def decoding_state(cache: Cache, spec: NgramMemorySpec, backbone_layers: int, owner: str = "") -> DecodingState:
    """The history that `cache` holds of the memories that `spec` describes; a cache without tokens gets an empty one.

    Args:
        cache (`Cache`): Any cache of the backbone.
        spec (`NgramMemorySpec`): The memories.
        backbone_layers (`int`): How many layers of the cache belong to the backbone.
        owner (`str`): Whose memories they are, if several share the cache: each has a history of its own.

    Raises:
        `TypeError`: `cache` is not a list of layers, as a paged cache is not.
        `ValueError`: Another model filled the cache.
    """
    if not isinstance(getattr(cache, "layers", None), list):
        raise TypeError(
            f"N-gram memories keep their history in a `transformers.Cache`; a {type(cache).__name__} has no layers to append "
            "it to. Continuous batching is not supported."
        )
    wanted = [("tokens", spec.ids_lookback)]
    if spec.conv_lookback:
        wanted += [(f"conv {layer_id}", spec.conv_lookback) for layer_id in spec.layer_ids]
    found = [layer for layer in cache.layers if isinstance(layer, NgramCacheLayer) and layer.owner == owner]
    if not found:
        if _holds_tokens(cache):
            raise ValueError(
                "The cache holds tokens, but no n-gram history of them: another model filled it. Pass a new cache, or one "
                "that this model returned."
            )
        if (
            cache.layer_class_to_replicate is not None
        ):  # layers are made when they are first used: ours come after them
            missing = max(0, backbone_layers - len(cache.layers))
            cache.layers.extend(cache.layer_class_to_replicate() for _ in range(missing))
        found = [NgramCacheLayer(content, length, owner) for content, length in wanted]
        cache.layers.extend(found)
    elif [(layer.content, layer.length) for layer in found] != wanted:
        raise ValueError(
            "The cache holds the history of other n-gram memories: "
            f"{[layer.content for layer in found]} instead of {[content for content, _ in wanted]}. Pass a new cache."
        )
    return DecodingState(found)


def _holds_tokens(cache: Cache) -> bool:
    """Whether anything was written, also for caches of linear attention layers only, which do not count tokens."""
    for layer in cache.layers:
        if getattr(layer, "is_initialized", False) and layer.get_seq_length() > 0:
            return True
        if any(getattr(layer, "has_previous_state", {}).values()):
            return True
    return False
