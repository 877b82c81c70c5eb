"""Settings: what the variants fill in, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engram_peft.memory import NgramMemorySpec

from .tiny import VARIANTS, tiny_spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "deepsek"}, "`variant` must be one of .*'deepseek_v41'.*got 'deepsek'"),
        ({"gate": "tanh"}, "`gate` must be one of"),
        ({"conv": "long"}, "`conv` must be one of"),
        ({"hidden_size": 0}, "`hidden_size` must be at least 1"),
        ({"max_ngram_size": 1}, "`max_ngram_size` must be at least 2"),
        ({"max_ngram_size": None, "orders": (2, 2)}, "`orders` must be different"),
        ({"orders": (2, 4)}, "`max_ngram_size` .3. is not the largest of `orders`"),
        ({"n_heads": 0}, "`n_heads` must be at least 1"),
        ({"head_dim": -4}, "`head_dim` must be at least 1"),
        ({"hc_mult": 0}, "`hc_mult` must be at least 1"),
        ({"kernel_size": 0}, "`kernel_size` must be at least 1"),
        ({"layer_ids": []}, "`layer_ids` must be different 0-indexed layers"),
        ({"layer_ids": [-1]}, "`layer_ids` must be different 0-indexed layers"),
        ({"layer_ids": [1, 1]}, "`layer_ids` must be different 0-indexed layers"),
        ({"vocab_size": [100]}, "`vocab_size` must be one number, or one for each"),
        ({"vocab_size": 1}, "`vocab_size` must be at least 2"),
        ({"compressed_vocab_size": None}, "`compressed_vocab_size` must be the number of different token ids"),
        ({"variant": "needle", "vocab_size": [61, 67]}, "one number for variant 'needle'"),
        ({"variant": "qwen_ple", "eos_token_id": None}, "`eos_token_id` must be given"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_spec(**{"variant": "deepseek", **changes})


def test_a_layer_without_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`layer_ids` are \(1, 3\) \(0-indexed\)"):
        tiny_spec("deepseek").head_sizes(2)


@pytest.mark.parametrize("variant", ["deepseek", "deepseek_v41", "qwen_ple"])
def test_table_sizes_are_unused_primes(variant: str) -> None:
    spec = tiny_spec(variant, layer_ids=[3, 0, 7], vocab_size=90)
    sizes = [size for layer in spec.layer_ids for size in spec.head_sizes(layer)]
    primes = [n for n in range(90, 1000) if all(n % d for d in range(2, n))]
    assert sizes == primes[: len(sizes)]  # in the order of the layers


def test_order_of_the_layers_matters_for_sizes_and_not_for_multipliers() -> None:
    forward, backward = (tiny_spec("deepseek", layer_ids=ids) for ids in ([1, 3], [3, 1]))
    assert forward.head_sizes(1) == backward.head_sizes(3)
    assert forward.multipliers(1) == backward.multipliers(1)


def test_each_order_has_its_size() -> None:
    spec = tiny_spec("deepseek", vocab_size=[50, 200])
    assert spec.head_sizes(1) == (53, 59, 211, 223)
    assert spec.head_sizes(3) == (61, 67, 227, 229)


def test_multipliers_are_odd_and_never_overflow() -> None:
    for variant in ("deepseek", "qwen_ple"):
        spec = tiny_spec(variant, compressed_vocab_size=99_092)
        assert all(m % 2 == 1 and m * (99_092 - 1) < 2**63 for m in spec.multipliers(1))
        assert spec.multipliers(1) != spec.multipliers(3)
        assert spec.multipliers(1) != tiny_spec(variant, compressed_vocab_size=99_092, seed=1).multipliers(1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_spec_is_a_value(variant: str) -> None:
    spec = tiny_spec(variant)
    assert spec == tiny_spec(variant) and hash(spec) == hash(tiny_spec(variant))
    assert spec == eval(repr(spec), {"NgramMemorySpec": NgramMemorySpec})


def test_large_primes_are_primes() -> None:
    """The largest 31-bit prime is a Mersenne prime; 3215031751 fools the first four bases of the test."""
    spec = tiny_spec("deepseek", vocab_size=2**31 - 1, n_heads=1, layer_ids=[0])
    assert spec.head_sizes(0)[0] == 2**31 - 1
    assert tiny_spec("deepseek", vocab_size=3215031751, n_heads=1).head_sizes(1)[0] != 3215031751
