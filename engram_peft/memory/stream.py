"""The stream of tokens that the memories of a model read in one forward pass, and what they remember of it for the next.

From token ids, masks, positions and the cache that a model was given to what `NgramMemory` wants. Shared by the native model and
the PEFT adapter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .layer import NgramMemory
from .reach import carried_reach, token_reach
from .spec import NgramMemorySpec
from .state import DecodingState, decoding_state
from .tables.modules import MappedModule


class OneAtATime:
    """Whose turn it is, if several threads call one model: what its memories read lies in one place while it runs.

    For the thread that has the turn, `acquire` is free. Copying or pickling a model gives the copy a lock of its own.
    A compiled pass takes no turns, as what it reads is in its graph.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[OneAtATime], tuple[()]]:
        return OneAtATime, ()

    def acquire(self) -> None:
        """Waits until it is the caller's turn."""
        if not torch.compiler.is_compiling():
            self._lock.acquire()

    def release(self) -> None:
        """Ends what one `acquire` began."""
        if not torch.compiler.is_compiling():
            self._lock.release()


class TokenStream:
    """What the memories read in one call: the tokens, those before them, and how far each may look back.

    **Attributes**:
        - **ids** (`torch.Tensor`) -- `(batch, spec.ids_lookback + length)` compressed ids.
        - **reach** (`torch.Tensor`) -- `(batch, length)`, see `token_reach`.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        reach: torch.Tensor,
        carried: torch.Tensor,
        spec: NgramMemorySpec,
        state: DecodingState | None,
        rows: torch.Tensor | None = None,
    ) -> None:
        past = None if state is None else state.past_tokens()
        before = ids.new_zeros(ids.shape[0], spec.ids_lookback) if past is None else past[0].to(ids.device)
        self.ids = torch.cat([before, ids], dim=1)
        self.reach = reach
        self._new = (ids, carried)
        self._state = state
        self._rows = {} if rows is None else dict(zip(spec.layer_ids, rows.unbind(2), strict=True))
        self._conv_inputs: dict[int, torch.Tensor] = {}
        self._asked: list[Future[int]] = []

    def prefetch(self, memories: Iterable[NgramMemory]) -> None:
        """Has the rows of memories read that are on disk, on a thread of its own, in the order in which they will be needed.

        What is hashed for that is not hashed again.
        """
        if torch.compiler.is_compiling():
            return
        for memory in memories:
            table = memory.table.table if isinstance(memory.table, MappedModule) else None
            if table is None or not table.worth_prefetching(self.reach.numel() * memory.spec.n_tables):
                continue
            device = memory.hash.multipliers.device
            if (rows := self._rows.get(memory.layer_id)) is None:
                rows = self._rows[memory.layer_id] = memory.hash(self.ids.to(device), self.reach.to(device))
            self._asked.append(table.prefetch(rows))

    def recall(self, memory: NgramMemory, hidden_states: torch.Tensor) -> torch.Tensor:
        """What `memory` adds to `hidden_states`."""
        past = None if self._state is None else self._state.past_conv(memory.layer_id)
        device = hidden_states.device  # layers may lie on several
        rows = self._rows.get(memory.layer_id)
        rows = None if rows is None else rows.to(device)
        delta, conv_inputs = memory(hidden_states, self.ids.to(device), self.reach.to(device), past, rows)
        if conv_inputs is not None:
            self._conv_inputs[memory.layer_id] = conv_inputs
        return delta

    def remember(self) -> None:
        """Writes this call's tokens into the decoding state, once nothing can fail any more.

        Not before: masks of hybrid backbones ask the cache whether its last linear layer has seen anything.

        Raises what went wrong on the thread of `prefetch`. Layers do not wait for it, they would only wait longer.
        """
        for asked in self._asked:
            asked.result()
        if self._state is not None:
            self._state.append_tokens(*self._new)
            for layer_id, conv_inputs in self._conv_inputs.items():
                self._state.append_conv(layer_id, conv_inputs)


def open_stream(
    spec: NgramMemorySpec,
    token_ids: torch.Tensor,
    *,
    vocab_size: int,
    token_map: torch.Tensor | None = None,
    masked_token_ids: Sequence[int] = (),
    attention_mask: Any = None,
    position_ids: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    cache: Cache | None = None,
    backbone_layers: int = 0,
    owner: str = "",
) -> TokenStream:
    """What the memories that `spec` describes read in a call of a model with these arguments.

    Args:
        spec (`NgramMemorySpec`): The memories.
        token_ids (`torch.Tensor`): `(batch, length)` ids of the tokenizer.
        vocab_size (`int`): How many ids there are.
        token_map (`torch.Tensor`, *optional*): The class of every id, negative where it is not known.
        masked_token_ids (`Sequence[int]`): Tokens that n-grams never hold nor read across.
        attention_mask (*optional*): What the model was given: a mask that `token_reach` takes, or a dictionary of such.
        position_ids (`torch.Tensor`, *optional*): What the model was given; a document starts where they start anew.
        segment_ids (`torch.Tensor`, *optional*): `(batch, length)`: a document starts where they change.
        rows (`torch.Tensor`, *optional*):
            `(batch, length, layers, tables)`: what hashing these arguments gives, if `NgramRowsCollator` has done it.
        cache (`Cache`, *optional*): Where the call's keys and values go.
        backbone_layers (`int`): How many layers of the cache belong to the backbone.
        owner (`str`): Whose history in the cache it is, if several models' memories share one.

    Raises:
        `ValueError`: Token ids are outside the vocabulary or the map, the cache was filled without these memories, or `rows` have
            another shape or were computed without the tokens in the cache.
    """
    ids, masked = _classes(token_ids, vocab_size, token_map, masked_token_ids)
    state = past = None
    if cache is not None:
        state = decoding_state(cache, spec, backbone_layers, owner)
        past = state.past_tokens()
    mask, positions = _plain_mask(attention_mask), _text_positions(position_ids)
    # In Qwen's layer the end of a text stops the hash, which looks for it itself, but not the convolution.
    eos_token_id = None if spec.variant == "qwen_ple" else spec.eos_token_id
    reach = token_reach(
        ids,
        attention_mask=None if mask is None else mask.to(ids.device),
        position_ids=None if positions is None else positions.to(ids.device),
        segment_ids=segment_ids,
        eos_token_id=eos_token_id,
        blocked=masked,
        past_reach=None if past is None else past[1].to(ids.device),
        past_length=_seen_tokens(cache, mask),
        limit=spec.lookback,
    )
    if rows is not None:
        expected = (*ids.shape, len(spec.layer_ids), spec.n_tables)
        if rows.shape != expected:
            raise ValueError(f"The rows that were computed must be {expected}, got {tuple(rows.shape)}.")
        if past is not None:
            raise ValueError("Rows are computed for whole texts, but the cache holds tokens that came before.")
    return TokenStream(ids, reach, carried_reach(reach, ids, eos_token_id), spec, state, rows)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a language model, which it keeps in a list of that length.

    Raises:
        `ValueError`: There is no such list.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no `nn.ModuleList` of its {count} decoder layers to put memories before."
    )


def token_ids_of(inputs_embeds: torch.Tensor, embeddings: Any) -> torch.Tensor:
    """The tokens whose embeddings `inputs_embeds` are, `(batch, length)`.

    Raises:
        `ValueError`: Some are no embeddings of a token, or of several.
    """
    if torch.compiler.is_compiling():
        raise ValueError("The memories read token ids: pass `engram_input_ids` along with `inputs_embeds`.")
    table = embeddings(torch.arange(embeddings.weight.shape[0], device=inputs_embeds.device)).detach()
    # Rows are compared as wholes by a number made of all their bits; then for good, with the one row that has this number.
    numbers, order = _fingerprints(table).sort()
    wanted = _fingerprints(inputs_embeds)
    place = torch.searchsorted(numbers, wanted).clamp(max=len(numbers) - 1)
    ids = order[place]
    found = (table[ids] == inputs_embeds).all(-1)
    ambiguous = (place + 1 < len(numbers)) & (numbers[(place + 1).clamp(max=len(numbers) - 1)] == wanted)
    if not bool((found & ~ambiguous).all()):
        raise ValueError(
            "The memories read token ids, and `inputs_embeds` do not tell them: some are the embedding of no token, or of more "
            "than one. Pass `engram_input_ids` too."
        )
    return ids


def _fingerprints(rows: torch.Tensor) -> torch.Tensor:
    """`(..., dim)` floats -> `(...)` int64, equal for equal rows and hardly ever for others."""
    bits = rows.detach().float().view(torch.int32).long()
    factors = torch.arange(1, rows.shape[-1] + 1, device=rows.device) * 0x9E3779B1 + 1
    return (bits * factors).sum(-1)


def _classes(
    token_ids: torch.Tensor, vocab_size: int, token_map: torch.Tensor | None, masked_token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids after the token map, and where tokens are masked, if any can be."""
    masked = None
    if masked_token_ids:
        masked = torch.isin(token_ids, token_ids.new_tensor(masked_token_ids))
        token_ids = token_ids.masked_fill(masked, 0)  # placeholders may lie outside the vocabulary
    _check_all(
        (token_ids >= 0) & (token_ids < vocab_size), token_ids, f"outside the vocabulary, 0 to {vocab_size - 1}"
    )
    if token_map is None:
        return token_ids, masked
    ids = token_map.to(token_ids.device)[token_ids]
    _check_all(
        ids >= 0,
        token_ids,
        "without a token map. The map lies in the checkpoint: use `from_pretrained`, or make the config from a tokenizer",
    )
    return ids, masked


def _check_all(holds: torch.Tensor, token_ids: torch.Tensor, problem: str) -> None:
    """Raises if some token is not as it should be: at once on the CPU, without waiting on an accelerator."""
    if torch.compiler.is_compiling():
        return
    if not token_ids.is_cpu:
        torch._assert_async(holds.all(), f"Token ids are {problem}.")
    elif not bool(holds.all()):
        raise ValueError(f"Token id {int(token_ids[~holds][0])} is {problem}.")


def _plain_mask(attention_mask: Any) -> torch.Tensor | None:
    """The mask that says which tokens are padding, of the one or several that a backbone takes."""
    if isinstance(attention_mask, dict):  # by kind of attention
        masks = [attention_mask.get("full_attention"), *attention_mask.values()]
        attention_mask = next((mask for mask in masks if isinstance(mask, torch.Tensor)), None)
    return attention_mask if isinstance(attention_mask, torch.Tensor) else None


def _seen_tokens(cache: Cache | None, attention_mask: torch.Tensor | None) -> int | torch.Tensor | None:
    """Where the first query lies among the keys of a prepared mask."""
    if attention_mask is None or attention_mask.dim() != 4:
        return None
    return 0 if cache is None else cache.get_seq_length()


def _text_positions(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Positions in the text, which of multimodal positions `(3 or 4, batch, length)` only the fourth kind are, the first."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if position_ids.dim() == 3 and position_ids.shape[0] == 4 else None
