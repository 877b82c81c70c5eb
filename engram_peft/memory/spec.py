"""What defines an n-gram memory: which n-grams, hashed how, into tables of what size, gated and convolved how.

A `NgramMemorySpec` is all that the other modules of this package need to know. It depends on no model and no configuration
class; whoever has those builds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np


VARIANTS = ("deepseek", "deepseek_v41", "qwen_ple", "needle")
GATES = ("signed_sqrt", "copysign", "sigmoid")
CONVS = ("none", "short_conv", "taps")

_SEED_STRIDE = 10007  # between the layers' seeds, in every published XOR hash
_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64, Steele et al., 2014

# What a variant fixes; every one of these can be overridden.
_PRESETS: dict[str, dict[str, Any]] = {
    "deepseek": {"max_ngram_size": 3, "n_heads": 8, "head_dim": 64, "gate": "signed_sqrt", "conv": "short_conv"}
    | {"bias": True, "norm_eps": None, "conv_norm_eps": 1e-5},
    "deepseek_v41": {"max_ngram_size": 4, "n_heads": 8, "head_dim": 256, "gate": "copysign", "conv": "none"}
    | {"bias": False, "norm_eps": 1e-6, "conv_norm_eps": 1e-6},
    "qwen_ple": {"max_ngram_size": 3, "n_heads": 8, "head_dim": 160, "gate": "signed_sqrt", "conv": "short_conv"}
    | {"bias": False, "norm_eps": 1e-6, "conv_norm_eps": 1e-6},
    "needle": {"max_ngram_size": 3, "n_heads": None, "head_dim": 128, "gate": "sigmoid", "conv": "taps"}
    | {"bias": False, "norm_eps": 1e-6, "conv_norm_eps": 1e-6},
}


@dataclass(frozen=True)
class NgramMemorySpec:
    """An n-gram memory, the same for all its layers but for multipliers and table sizes.

    What is `None` is filled in from the variant:

    | | `deepseek` | `deepseek_v41` | `qwen_ple` | `needle` |
    |---|---|---|---|---|
    | published with | the paper's demo | DeepSeek-V4.1 | Qwen's `qwen4_exp` | Needle 2 and 3 |
    | `max_ngram_size`, `n_heads`, `head_dim` | 3, 8, 64 | 4, 8, 256 | 3, 8, 160 | 3, `hidden_size // 256`, 128 |
    | hash | XOR, NumPy multipliers | the same | XOR, SplitMix64 multipliers | FNV-like, 32 bits |
    | table sizes | unused primes | unused primes | unused primes | all `vocab_size` |
    | `gate` | `signed_sqrt` | `copysign` | `signed_sqrt` | `sigmoid`, norms without weights |
    | `conv` | `short_conv` | `none` | `short_conv` | `taps` |
    | `bias` | yes | no | no | no |
    | `norm_eps`, `conv_norm_eps` | machine epsilon, 1e-5 | 1e-6 | 1e-6, 1e-6 | 1e-6 |

    Args:
        hidden_size (`int`): Width `d` of the hidden states (of one branch, if there are several).
        layer_ids (`Sequence[int]`):
            The decoder layers with a memory, 0-indexed. Their order matters: table sizes are dealt out in it.
        vocab_size (`int` or `Sequence[int]`): Slots per table, one number or one per order. The primes start here.
        compressed_vocab_size (`int`, *optional*):
            How many different ids the hash sees, `V'`: bounds the multipliers. `needle` does without.
        variant (`str`): One of the four.
        max_ngram_size (`int`, *optional*): The longest n-gram, `N`.
        n_heads (`int`, *optional*): Tables per order, `K`.
        head_dim (`int`, *optional*): Width of a row.
        orders (`Sequence[int]`, *optional*): The n of the n-grams, by default 2..N.
        seed (`int`): Of the multipliers.
        pad_token_id (`int`): What stands before the start of a text, a compressed id.
        eos_token_id (`int`, *optional*): For `qwen_ple`: ends a segment, and stands before its start.
        seed_heads (`int`, *optional*): For `needle`: heads of the model that this one was cut from (`engram_seed_heads`).
        hc_mult (`int`): Branches of the residual stream; each gets its own gate and key.
        kernel_size (`int`): Taps of the convolution; its dilation is `max_ngram_size`.
        gate, conv, bias, norm_eps, conv_norm_eps (*optional*): See the table. `norm_eps=None` is the machine epsilon.

    Raises:
        `ValueError`: An argument is out of its range, or one that the variant needs is missing.
    """

    hidden_size: int
    layer_ids: Sequence[int]
    vocab_size: int | Sequence[int]
    compressed_vocab_size: int | None = None
    variant: str = "deepseek"
    max_ngram_size: int = None  # type: ignore[assignment]  # filled in below, here and for the next ones
    n_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    orders: Sequence[int] = None  # type: ignore[assignment]
    seed: int = 0
    pad_token_id: int = 0
    eos_token_id: int | None = None
    seed_heads: int | None = None
    hc_mult: int = 1
    kernel_size: int = 4
    gate: str = None  # type: ignore[assignment]
    conv: str = None  # type: ignore[assignment]
    bias: bool = None  # type: ignore[assignment]
    norm_eps: float | None = None
    conv_norm_eps: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _one_of("variant", self.variant, VARIANTS)
        _at_least("hidden_size", self.hidden_size, 1)
        if self.orders is not None:
            self._set("orders", tuple(self.orders))
            if not self.orders or min(self.orders) < 1 or len(set(self.orders)) < len(self.orders):
                raise ValueError(f"`orders` must be different integers of at least 1, got {self.orders}.")
            if self.max_ngram_size not in (None, max(self.orders)):
                raise ValueError(
                    f"`max_ngram_size` ({self.max_ngram_size}) is not the largest of `orders` {self.orders}."
                )
            self._set("max_ngram_size", max(self.orders))
        for name, value in _PRESETS[self.variant].items():
            if getattr(self, name) is None:
                self._set(name, value)
        if self.orders is None:
            _at_least("max_ngram_size", self.max_ngram_size, 2)
            self._set("orders", tuple(range(2, self.max_ngram_size + 1)))
        if self.n_heads is None:
            self._set("n_heads", max(1, self.hidden_size // (len(self.orders) * self.head_dim)))
        self._set("layer_ids", tuple(self.layer_ids))
        if not isinstance(self.vocab_size, int):
            self._set("vocab_size", tuple(self.vocab_size))
        self._check()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check(self) -> None:
        for name in ("n_heads", "head_dim", "hc_mult", "kernel_size"):
            _at_least(name, getattr(self, name), 1)
        _one_of("gate", self.gate, GATES)
        _one_of("conv", self.conv, CONVS)
        if not self.layer_ids or min(self.layer_ids) < 0 or len(set(self.layer_ids)) < len(self.layer_ids):
            raise ValueError(f"`layer_ids` must be different 0-indexed layers, at least one, got {self.layer_ids}.")
        if not isinstance(self.vocab_size, int) and len(self.vocab_size) != len(self.orders):
            raise ValueError(
                f"`vocab_size` must be one number, or one for each of the n-gram orders {self.orders}, got {self.vocab_size}."
            )
        if min(self.sizes_per_order) < 2:
            raise ValueError(f"`vocab_size` must be at least 2 slots a table, got {self.vocab_size}.")
        if self.variant != "needle" and (self.compressed_vocab_size is None or self.compressed_vocab_size < 1):
            raise ValueError(
                f"`compressed_vocab_size` must be the number of different token ids that are hashed: the multipliers of "
                f"variant {self.variant!r} depend on it. Got {self.compressed_vocab_size}."
            )
        if self.variant == "needle" and len(set(self.sizes_per_order)) > 1:
            raise ValueError(f"`vocab_size` must be one number for variant 'needle', got {self.vocab_size}.")
        if self.variant == "qwen_ple" and self.eos_token_id is None:
            raise ValueError("`eos_token_id` must be given for variant 'qwen_ple': it ends the segments.")

    # ------------------------------------------------------------------------------------------------- sizes

    @property
    def sizes_per_order(self) -> tuple[int, ...]:
        """The requested slots per table, one number an order."""
        if isinstance(self.vocab_size, int):
            return (self.vocab_size,) * len(self.orders)
        return tuple(self.vocab_size)

    @property
    def n_tables(self) -> int:
        """Tables per layer: orders times heads."""
        return len(self.orders) * self.n_heads

    @property
    def memory_dim(self) -> int:
        """Width of the concatenated rows of one token."""
        return self.n_tables * self.head_dim

    @property
    def ids_lookback(self) -> int:
        """How many tokens before the current one the hash reads."""
        return self.max_ngram_size - 1

    @property
    def conv_lookback(self) -> int:
        """How many positions before the current one the convolution reads."""
        return 0 if self.conv == "none" else (self.kernel_size - 1) * self.max_ngram_size

    @property
    def lookback(self) -> int:
        """The larger of the two: a reach above it makes no difference."""
        return max(self.ids_lookback, self.conv_lookback)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: `hc_mult * hidden_size`, branch-major; `hidden_size` for taps; 0 without."""
        return {"none": 0, "short_conv": self.hc_mult * self.hidden_size, "taps": self.hidden_size}[self.conv]

    @property
    def fill_id(self) -> int:
        """The id that stands for tokens that must not be read."""
        if self.variant == "needle":
            return 0
        return self.eos_token_id if self.variant == "qwen_ple" else self.pad_token_id  # type: ignore[return-value]

    def head_sizes(self, layer_id: int) -> tuple[int, ...]:
        """Slots of each of the layer's tables, order-major: no two tables of a model share a prime."""
        index = self._layer_index(layer_id)
        if self.variant == "needle":
            return self.sizes_per_order[:1] * self.n_tables
        return _prime_sizes(self.sizes_per_order, self.n_heads, len(self.layer_ids))[index]

    def multipliers(self, layer_id: int) -> tuple[int, ...]:
        """Odd multipliers of the XOR hash, the first for the current token; none for `needle`."""
        index = self._layer_index(layer_id)
        if self.variant == "needle":
            return ()
        vocabulary: int = self.compressed_vocab_size  # type: ignore[assignment]
        half = max(1, (2**63 - 1) // vocabulary // 2)
        if self.variant == "qwen_ple":
            seed = self.seed + _SEED_STRIDE * index
            draws = [_splitmix64(seed + _GOLDEN_GAMMA * (k + 1)) % half for k in range(self.max_ngram_size)]
        else:
            generator = np.random.default_rng(self.seed + _SEED_STRIDE * layer_id)
            draws = generator.integers(0, half, size=self.max_ngram_size, dtype=np.int64).tolist()
        return tuple(2 * draw + 1 for draw in draws)

    def _layer_index(self, layer_id: int) -> int:
        if layer_id not in self.layer_ids:
            raise ValueError(f"`layer_id` {layer_id} has no memory: `layer_ids` are {self.layer_ids} (0-indexed).")
        return list(self.layer_ids).index(layer_id)

    def __repr__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) is not None)
        return f"{type(self).__name__}({', '.join(changed)})"


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}.")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}.")


# ------------------------------------------------------------------------------------------------- numbers


def _splitmix64(state: int) -> int:
    """One output of SplitMix64 for a state, which is advanced first."""
    state = (state + _GOLDEN_GAMMA) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


@lru_cache(maxsize=16)
def _prime_sizes(sizes: tuple[int, ...], n_heads: int, n_layers: int) -> tuple[tuple[int, ...], ...]:
    """For each layer, its tables' primes: each the smallest unused one from the order's size on."""
    used: set[int] = set()
    layers = []
    for _ in range(n_layers):
        primes: list[int] = []
        for size in sizes:
            candidate = size
            for _ in range(n_heads):
                candidate = next(n for n in count(candidate) if n not in used and _is_prime(n))
                used.add(candidate)
                primes.append(candidate)
        layers.append(tuple(primes))
    return tuple(layers)


def _is_prime(number: int) -> bool:
    """Miller-Rabin with the bases that decide every number below 3.3e24 (Sorenson and Webster, 2015)."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if number < 2 or any(number % base == 0 for base in bases):
        return number in bases
    exponent, twos = number - 1, 0
    while exponent % 2 == 0:
        exponent, twos = exponent // 2, twos + 1
    for base in bases:
        power = pow(base, exponent, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True
