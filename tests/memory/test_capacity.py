"""Collisions: counted by brute force, expected by the formulas; sizes against real layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from engram_peft.memory import (
    NgramHash,
    NgramMemory,
    count_collisions,
    count_ngrams,
    expected_collisions,
    plan_capacity,
    slots_for,
    token_reach,
)

from .tiny import EOS, VARIANTS, random_ids, tiny_spec


variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
def test_collisions_are_counted(variant: str) -> None:
    spec = tiny_spec(variant)
    ids = random_ids(2, 60)
    ids[0, 20] = ids[1, 3] = EOS
    reach = token_reach(ids, eos_token_id=EOS, limit=spec.ids_lookback)
    rows = NgramHash(spec, 3)(F.pad(ids, (2, 0)), reach).unflatten(-1, (2, 2))
    found = count_collisions(spec, ids, reach, layer_id=3)
    assert {c.order: c.ngrams for c in found} == count_ngrams(spec, ids, reach)
    for index, collisions in enumerate(found):
        order = collisions.order
        by_ngram = {}
        for row in range(2):
            for t in range(60):
                span = int(reach[row, t])
                if variant == "needle" and span < order - 1:
                    continue
                kept = ids[row, max(0, t - min(span, order - 1)) : t + 1].tolist()
                by_ngram[(spec.fill_id,) * (order - len(kept)) + tuple(kept)] = rows[row, t, index].tolist()
        users = [Counter(heads[head] for heads in by_ngram.values()) for head in range(2)]
        shares = [[users[head][heads[head]] > 1 for head in range(2)] for heads in by_ngram.values()]
        assert collisions.ngrams == len(by_ngram)
        assert collisions.shared == pytest.approx(sum(map(sum, shares)) / (2 * len(shares)))
        assert collisions.lost == sum(map(all, shares))
        assert collisions.slots == sum(spec.head_sizes(3)[2 * index : 2 * index + 2])


@pytest.mark.parametrize("vocab_size", [1000, 4000])
@variants
def test_counts_are_what_is_expected(variant: str, vocab_size: int) -> None:
    spec = tiny_spec(variant, vocab_size=vocab_size, compressed_vocab_size=3000)
    ids = torch.randint(3, 3000, (1, 3000), generator=torch.Generator().manual_seed(0))
    counted = count_collisions(spec, ids)
    expected = expected_collisions(spec, count_ngrams(spec, ids))
    for count, expectation in zip(counted, expected, strict=True):
        assert (count.order, count.ngrams, count.slots) == (expectation.order, expectation.ngrams, expectation.slots)
        assert count.shared == pytest.approx(expectation.shared, abs=0.04)
        assert count.lost == pytest.approx(expectation.lost, abs=0.05 * count.ngrams)


def test_slots_for_a_share_of_lost_ngrams() -> None:
    slots = slots_for(10_000, n_heads=2, lost=0.01)
    spec = tiny_spec("needle", vocab_size=slots)
    for collisions in expected_collisions(spec, {2: 10_000, 3: 10_000}):
        assert collisions.lost == pytest.approx(100, rel=0.001)
    assert slots_for(10_000, n_heads=8, lost=0.01) < slots / 5  # more heads, far smaller tables
    with pytest.raises(ValueError, match="`lost`"):
        slots_for(10, 2, lost=0)


@pytest.mark.parametrize("branches", [1, 3])
@variants
def test_a_plan_costs_what_the_memory_costs(variant: str, branches: int) -> None:
    spec = tiny_spec(variant, hc_mult=branches)
    layers = [NgramMemory(spec, layer_id) for layer_id in spec.layer_ids]
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    tables = sum(layer.table.weight.numel() for layer in layers)
    plan = plan_capacity(spec, dtype=torch.bfloat16)
    assert plan.table_parameters == tables == plan.slots * spec.head_dim
    assert plan.other_parameters == parameters - tables
    assert plan.bytes == 2 * parameters
    assert plan.active_parameters == parameters - tables + 2 * spec.memory_dim
    assert plan.collisions == ()
    assert plan_capacity(spec, {2: 40, 3: 50}).collisions == expected_collisions(spec, {2: 40, 3: 50})


def test_a_published_size() -> None:
    """Engram-27B of the paper: 2,262,400 slots a table, 1,280 numbers a token, two layers: 5.79 B parameters."""
    spec = tiny_spec("deepseek", hidden_size=2560, layer_ids=[1, 14], vocab_size=2_262_400, n_heads=8, head_dim=80)
    assert spec.memory_dim == 1280
    assert plan_capacity(spec).table_parameters == pytest.approx(5.79e9, rel=0.002)


def test_nothing_to_count() -> None:
    spec = tiny_spec("needle")
    ids = random_ids(1, 1)
    assert count_ngrams(spec, ids) == {2: 0, 3: 0}  # too short for any
    assert (
        [c.lost for c in count_collisions(spec, ids)]
        == [0, 0]
        == [c.lost for c in plan_capacity(spec, {2: 0, 3: 0}).collisions]
    )
    with pytest.raises(ValueError, match="each of the orders"):
        expected_collisions(spec, {2: 5})
