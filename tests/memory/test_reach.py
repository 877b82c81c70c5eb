"""Reach and hash: what a token may read, and that nothing else matters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engram_peft.memory import NgramHash, carried_reach, token_reach

from .tiny import EOS, VARIANTS, VOCAB, random_ids, tiny_spec


LIMIT = 9


def reach_by_hand(starts: list[bool], blocked: list[bool]) -> list[int]:
    found: list[int] = []
    for t, (start, masked) in enumerate(zip(starts, blocked, strict=True)):
        before = found[t - 1] if t else -1
        found.append(-1 if masked else 0 if start else before + 1)
    return [min(reach, LIMIT) for reach in found]


@pytest.mark.parametrize("seed", range(8))
def test_reach_is_counted_from_the_last_start_or_masked_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = random_ids(3, 30, seed)
    starts = torch.rand(3, 30, generator=generator) < 0.1
    starts[:, 0] = True
    blocked = torch.rand(3, 30, generator=generator) < 0.1
    expected = torch.tensor([reach_by_hand(s.tolist(), b.tolist()) for s, b in zip(starts, blocked, strict=True)])
    segment_ids = starts.long().cumsum(1)
    positions = torch.arange(30)
    position_ids = positions - torch.where(starts, positions, 0).cummax(1).values
    ends = F.pad(starts[:, 1:], (0, 1))
    with_ends = torch.where(ends, EOS, ids)
    for documents in (
        {"segment_ids": segment_ids, "blocked": blocked},
        {"position_ids": position_ids, "attention_mask": (~blocked).long()},
        {"eos_token_id": EOS, "attention_mask": F.pad(~blocked, (4, 0), value=True)},
    ):
        assert torch.equal(token_reach(with_ends, limit=LIMIT, **documents), expected)


@pytest.mark.parametrize("cut", [1, 7, 20, 29])
def test_reach_in_two_calls(cut: int) -> None:
    ids = random_ids(2, 30)
    ids[0, cut - 1] = ids[1, 5] = EOS
    mask = torch.ones_like(ids)
    mask[0, 10:12] = mask[1, :cut] = 0
    full = token_reach(ids, attention_mask=mask, eos_token_id=EOS, limit=LIMIT)
    first = token_reach(ids[:, :cut], attention_mask=mask[:, :cut], eos_token_id=EOS, limit=LIMIT)
    past = carried_reach(first, ids[:, :cut], EOS)[:, -1]
    rest = token_reach(ids[:, cut:], attention_mask=mask, eos_token_id=EOS, past_reach=past, limit=LIMIT)
    assert torch.equal(torch.cat([first, rest], dim=1), full)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_reach_from_a_prepared_mask(dtype: torch.dtype) -> None:
    """As a static cache gets it: more keys than tokens so far, and this call's queries in the middle."""
    ids = random_ids(2, 12)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    allowed = (torch.arange(12)[:, None] >= torch.arange(12)) & padding[:, None, None, :].bool()
    keys = F.pad(allowed[:, :, 4:], (0, 8))
    if dtype != torch.bool:
        keys = torch.where(keys, 0.0, torch.finfo(dtype).min).to(dtype)
    past = token_reach(ids[:, :4], attention_mask=padding[:, :4], limit=LIMIT)
    reach = token_reach(
        ids[:, 4:], attention_mask=keys, past_length=4, past_reach=carried_reach(past)[:, -1], limit=LIMIT
    )
    assert torch.equal(reach, token_reach(ids, attention_mask=padding, limit=LIMIT)[:, 4:])


def test_padding_that_is_the_end_of_sequence_token() -> None:
    """Masks say what padding is, not ids: the end of a document is a token like any other, for its own document."""
    ids = torch.tensor([[EOS, EOS, 7, 8, EOS, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert token_reach(ids, attention_mask=mask, eos_token_id=EOS, limit=LIMIT).tolist() == [[-1, -1, 0, 1, 2, 0]]


def test_inputs_that_do_not_fit() -> None:
    ids = random_ids(2, 6)
    with pytest.raises(ValueError, match="`attention_mask` has 5 columns"):
        token_reach(ids, attention_mask=torch.ones(2, 5), limit=LIMIT)
    with pytest.raises(ValueError, match="`attention_mask` must be"):
        token_reach(ids, attention_mask=torch.ones(2, 1, 5, 6), limit=LIMIT)
    with pytest.raises(ValueError, match="`position_ids` must be"):
        token_reach(ids, position_ids=torch.zeros(3, 2, 6), limit=LIMIT)
    with pytest.raises(ValueError, match="`segment_ids` must be"):
        token_reach(ids, segment_ids=torch.zeros(1, 6), limit=LIMIT)


# ------------------------------------------------------------------------------------------------- the hash


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_must_not_be_read_changes_no_row(variant: str) -> None:
    spec = tiny_spec(variant, max_ngram_size=4)
    ids = F.pad(random_ids(3, 20), (3, 0))
    reach = torch.randint(-1, 4, (3, 20), generator=torch.Generator().manual_seed(0))
    rows = NgramHash(spec, 1)(ids, reach)
    sizes = torch.tensor(spec.head_sizes(1))
    assert rows.dtype == torch.int64 and bool(((rows >= 0) & (rows < sizes)).all())
    for t in range(20):
        other = ids.clone()
        for row in range(3):
            other[row, : t + 3 - int(reach[row, t])] = VOCAB - 1  # all that the token may not read
        assert torch.equal(NgramHash(spec, 1)(other, reach)[:, t], rows[:, t])


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_order_reads_its_tokens_and_no_more(variant: str) -> None:
    spec = tiny_spec(variant, max_ngram_size=4)
    ids = random_ids(1, 4)
    whole = torch.tensor([[3]])
    rows = NgramHash(spec, 1)(ids, whole)[0, 0].view(3, 2)
    for distance in range(4):
        other = ids.clone()
        other[0, 3 - distance] += 1
        changed = (NgramHash(spec, 1)(other, whole)[0, 0].view(3, 2) != rows).all(dim=1)
        assert changed.tolist() == [order > distance for order in (2, 3, 4)]


def test_qwens_segments_end_with_their_last_token() -> None:
    spec = tiny_spec("qwen_ple")
    hashing = NgramHash(spec, 1)
    reach = torch.tensor([[2]])
    end_is_read = hashing(torch.tensor([[7, 8, EOS]]), reach)  # the last token of a segment reads the segment
    assert not torch.equal(end_is_read, hashing(torch.tensor([[7, 9, EOS]]), reach))
    after_the_end = hashing(torch.tensor([[7, EOS, 8]]), reach)
    assert torch.equal(after_the_end, hashing(torch.tensor([[9, EOS, 8]]), reach))
    assert torch.equal(after_the_end, hashing(torch.tensor([[7, 9, 8]]), torch.tensor([[0]])))


@pytest.mark.parametrize("window", [4, 6, 9])
@pytest.mark.parametrize("past", [0, 3, 6, 11])
def test_a_window_that_is_full_has_the_new_tokens_in_its_last_columns(window, past):
    """As sliding layers of a static cache have them; before it is full, a token's column is its position."""
    length = 1
    column = min(past, window - length)
    mask = torch.zeros(2, 1, length, window, dtype=torch.bool)
    mask[0, 0, 0, column] = True  # the second text's token is padding
    ids = torch.ones(2, length, dtype=torch.long)
    reach = token_reach(ids, attention_mask=mask, past_reach=torch.tensor([2, 2]), past_length=past, limit=5)
    assert reach.tolist() == [[2], [-1]]
