"""What decoding remembers: the end of everything that was ever passed, whatever happened to the cache in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from engram_peft.memory import NgramMemorySpec
from engram_peft.memory.state import NgramCacheLayer, decoding_state


LENGTH = 5
PIECES = [2, 1, 1, 4, 7, 1]


def history(batch: int = 3, length: int = sum(PIECES)) -> torch.Tensor:
    return torch.randn(batch, 4, length, generator=torch.Generator().manual_seed(0))


def filled(columns: torch.Tensor, recording: bool = False) -> NgramCacheLayer:
    layer = NgramCacheLayer("tokens", LENGTH)
    if recording:
        layer.activate_past_recording()
    for piece in columns.split(PIECES[: len(PIECES)], dim=-1):
        layer.append(piece)
    return layer


def spec(**changes) -> NgramMemorySpec:
    return NgramMemorySpec(
        **{"hidden_size": 8, "layer_ids": [0, 1], "vocab_size": 20, "compressed_vocab_size": 50, **changes}
    )


def keys(batch: int = 1, length: int = 3) -> torch.Tensor:
    return torch.zeros(batch, 1, length, 2)


@pytest.mark.parametrize("recording", [False, True])
def test_the_past_is_the_end_of_everything(recording: bool):
    columns = history()
    layer = NgramCacheLayer("tokens", LENGTH)
    if recording:
        layer.activate_past_recording()
    assert layer.past() is None
    seen = torch.zeros(3, 4, LENGTH)
    for piece in columns.split(PIECES, dim=-1):
        layer.append(piece)
        seen = torch.cat([seen, piece], dim=-1)
        assert torch.equal(layer.past(), seen[..., -LENGTH:])


def test_its_memory_stays_where_it_is():
    """A compiled step that was captured with the addresses of its inputs needs that."""
    layer = filled(history())
    address = layer.past().data_ptr()
    layer.append(history(length=1))
    layer.reset()
    layer.append(history(length=3))
    assert layer.past().data_ptr() == address


def test_tokens_can_be_taken_back():
    columns = history()
    layer = filled(columns, recording=True)
    assert layer.is_croppable
    layer.crop(-6)
    assert torch.equal(layer.past(), columns[..., -6 - LENGTH : -6])
    layer.append(columns[..., -6:-4])
    assert torch.equal(layer.past(), columns[..., -4 - LENGTH : -4])


@pytest.mark.parametrize("recording", [False, True])
def test_a_first_call_can_be_taken_back(recording):
    columns = history(length=LENGTH + 1)
    layer = NgramCacheLayer("tokens", LENGTH)
    layer.record_past = recording
    layer.append(columns)
    layer.crop(-LENGTH)
    assert torch.equal(layer.past(), torch.cat([torch.zeros(3, 4, LENGTH - 1), columns[..., :1]], dim=-1))


def test_a_short_history_can_be_taken_back_to_its_beginning():
    columns = history(length=4)
    layer = NgramCacheLayer("tokens", LENGTH)
    layer.activate_past_recording()
    layer.append(columns[..., :1])
    layer.append(columns[..., 1:])
    layer.crop(-3)
    assert torch.equal(layer.past(), torch.cat([torch.zeros(3, 4, LENGTH - 1), columns[..., :1]], dim=-1))
    layer.record_past = False  # as generation leaves it
    layer.append(columns[..., 1:2])
    assert torch.equal(layer.past()[..., -2:], columns[..., :2])


def test_without_recording_the_last_tokens_can_be_taken_back():
    """An adapter's layers are made too late to be told to record."""
    columns = history(length=200)
    layer = NgramCacheLayer("tokens", LENGTH)
    layer.append(columns[..., :150])
    for end in range(151, 201):
        layer.append(columns[..., end - 1 : end])
    layer.crop(0)
    assert torch.equal(layer.past(), columns[..., -LENGTH:])
    layer.crop(-60)
    assert torch.equal(layer.past(), columns[..., 140 - LENGTH : 140])
    layer.append(columns[..., 140:142])
    layer.crop(-1)
    assert torch.equal(layer.past(), columns[..., 141 - LENGTH : 141])
    with pytest.raises(RuntimeError, match="tokens can be cropped, not 150"):
        layer.crop(-150)
    layer.reorder_cache(torch.tensor([1, 0, 2]))
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-1)
    layer.append(columns[..., 141:142])
    layer.crop(-1)
    assert torch.equal(layer.past(), columns[[1, 0, 2], :, 141 - LENGTH : 141])


def test_owners_have_histories_of_their_own():
    cache, spec = DynamicCache(), NgramMemorySpec(8, [0], 11, compressed_vocab_size=9)
    one, other = (decoding_state(cache, spec, 1, owner) for owner in ("one", "other"))
    one.append_tokens(torch.tensor([[5, 6]]), torch.tensor([[1, 2]]))
    assert other.past_tokens() is None
    assert decoding_state(cache, spec, 1, "one").past_tokens()[0].tolist() == [[5, 6]]
    with pytest.raises(ValueError, match="another model filled it"):
        decoding_state(cache, spec, 1, "third")


def test_sequences_are_reordered_repeated_and_selected():
    columns = history()
    end = columns[..., -LENGTH:]
    layer = filled(columns)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(layer.past(), end[[2, 0, 0]])
    layer = filled(columns)
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.past(), end[[0, 0, 1, 1, 2, 2]])
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert torch.equal(layer.past(), end[[0, 2]])
    layer.append(end[[1, 1], :, :1])
    assert torch.equal(layer.past(), torch.cat([end[[0, 2], :, 1:], end[[1, 1], :, :1]], dim=-1))


def test_before_anything_was_seen_there_is_nothing_to_change():
    layer = NgramCacheLayer("tokens", LENGTH)
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reset()
    layer.offload()
    layer.prefetch()
    assert layer.past() is None


def test_reset_forgets():
    layer = filled(history())
    layer.reset()
    assert layer.past() is None
    layer.append(history(length=1))
    assert torch.equal(layer.past()[..., :-1], torch.zeros(3, 4, LENGTH - 1))


def test_offloading_brings_everything_back():
    layer = filled(history())
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.past(), history()[..., -LENGTH:])


@pytest.mark.parametrize("make", [DynamicCache, lambda: DynamicCache(config=LlamaConfig(num_hidden_layers=2))])
def test_the_history_comes_after_the_layers_of_the_backbone(make):
    cache = make()
    decoding_state(cache, spec(), 2)
    assert [layer.content for layer in cache.layers[2:]] == ["tokens", "conv 0", "conv 1"]
    cache.update(keys(), keys(), 0)
    cache.update(keys(), keys(), 1)
    assert cache.get_seq_length() == 3
    assert len(cache.layers) == 5


def test_a_memory_without_convolution_remembers_tokens_only():
    cache = DynamicCache()
    decoding_state(cache, spec(variant="deepseek_v41"), 2)
    assert [layer.content for layer in cache.layers[2:]] == ["tokens"]


def test_a_call_reads_what_the_one_before_wrote():
    cache = StaticCache(config=LlamaConfig(num_hidden_layers=2), max_cache_len=8)
    assert decoding_state(cache, spec(), 2).past_tokens() is None
    ids, carried = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 2, 3]])
    state = decoding_state(cache, spec(), 2)
    state.append_tokens(ids, carried)
    state.append_conv(1, torch.ones(1, 8, 3))
    again = decoding_state(cache, spec(), 2)
    past_ids, past_reach = again.past_tokens()
    assert past_ids.tolist() == [[6, 7]] and past_reach.tolist() == [3]
    assert again.past_conv(0) is None
    assert again.past_conv(1).shape == (1, 8, 9) and float(again.past_conv(1).sum()) == 24


def test_what_another_model_filled_is_refused():
    cache = DynamicCache()
    cache.update(keys(), keys(), 0)
    with pytest.raises(ValueError, match="another model filled it"):
        decoding_state(cache, spec(), 2)
    assert len(cache.layers) == 1


def test_the_history_of_other_memories_is_refused():
    cache = DynamicCache()
    decoding_state(cache, spec(), 2)
    for other in (spec(max_ngram_size=4), spec(layer_ids=[1]), spec(conv="none")):
        with pytest.raises(ValueError, match="other n-gram memories"):
            decoding_state(cache, other, 2)


def test_a_cache_without_layers_is_refused():
    with pytest.raises(TypeError, match="Continuous batching is not supported"):
        decoding_state(SimpleNamespace(layers=None), spec(), 2)  # type: ignore[arg-type]
