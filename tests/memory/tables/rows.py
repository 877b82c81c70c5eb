"""Rows that no arithmetic survives, and what a gather has to return, computed another way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import torch
from transformers.utils import logging


PLAIN = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SPECIALS = {  # -0.0, the smallest subnormal, a quiet and a signalling NaN with payloads, -infinity
    torch.float32: [-(2**31), 1, 0x7FC12345, 0x7F800001, -(2**23)],
    torch.float16: [-(2**15), 1, 0x7E23, 0x7C01, -(2**10)],
    torch.bfloat16: [-(2**15), 1, 0x7FC5, 0x7F81, -(2**7)],
    torch.float8_e4m3fn: [0x80, 1, 0x7F, 0xFF, 0xFE],
    torch.int8: [0x80, 1, 0x7F, 0xFF, 0],
}


def wild(dtype: torch.dtype, rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Rows of random bits, with the special numbers of the dtype in the first ones."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, (rows, dim * dtype.itemsize), generator=generator, dtype=torch.uint8)
    numbers = found.view(_INTEGERS[dtype.itemsize])
    special = torch.tensor(_SPECIALS[dtype], dtype=torch.int64).to(numbers.dtype)
    numbers.view(-1)[: len(special)] = special
    return numbers.view(dtype)


def scales(dtype: torch.dtype, rows: int, blocks: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float8_e8m0fnu:
        return torch.randint(0, 256, (rows, blocks), generator=generator, dtype=torch.uint8).view(dtype)
    return torch.rand(rows, blocks, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    return (found.shape, found.dtype) == (expected.shape, expected.dtype) and torch.equal(bits(found), bits(expected))


def looked_up(weight: torch.Tensor, head_sizes: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Row by row, head by head: what a gather has to return."""
    out = bits(weight).new_empty(*ids.shape, weight.shape[1] * weight.dtype.itemsize)
    flat_ids, flat_out = ids.reshape(-1, len(head_sizes)), out.view(-1, len(head_sizes), out.shape[-1])
    start = 0
    for head, size in enumerate(head_sizes):
        table = bits(weight)[start : start + size]
        for i, row in enumerate(flat_ids[:, head].tolist()):
            flat_out[i, head] = table[row]
        start += size
    return out.view(weight.dtype)


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process. Returns 0, or 1 after an exception, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            logging.disable_progress_bar()  # tqdm's lock may have been held when the process was forked
            torch.set_num_threads(1)  # makes torch's threads anew, which two threads at once would not survive
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
