"""What the operating system is asked for and Python has no function for: advice on many page runs, residency, and SIGBUS.

All of it is Linux; elsewhere the functions say that they did nothing, and tables are served without.

**SIGBUS.** Reading a mapped page that its file no longer has is answered with SIGBUS, which ends a process. No check before a read
can rule that out, since a file can shrink in between. So a handler puts a page of zeros where the reader stumbled, marks the
mapping, and lets the read go on; `MappedFile.check` raises after it. The signal is synchronous: the thread stands at a load from
a mapped page and holds no lock. A SIGBUS outside of mapped tables goes to whoever handled it before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch


if TYPE_CHECKING:
    from .mapping import MappedFile


LINUX = sys.platform == "linux"
PAGE = mmap.PAGESIZE
_SIGBUS, _SA_SIGINFO = 7, 4
_SI_ADDR = 16  # offset of si_addr in siginfo_t where pointers have 8 bytes
_WILLNEED, _PROCESS_MADVISE = 3, 440  # the number of the system call is the same on all architectures
_IOV_MAX = 1024
_MAP_FIXED = 0x10

_libc: Any = ctypes.CDLL(None, use_errno=True) if LINUX else None
_handler: Any = None
_mapped: dict[int, weakref.ref[MappedFile]] = {}
_pidfd: tuple[int, int] = (-1, -1)  # process id and its descriptor


class _SigAction(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_previous = _SigAction()


if LINUX:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    _libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    _libc.syscall.restype = ctypes.c_long


def guard(mapped: MappedFile) -> None:
    """From now on a read of `mapped` beyond the end of its file marks it as damaged instead of ending the process."""
    global _handler
    if not LINUX or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    for address in [address for address, other in list(_mapped.items()) if other() is None]:
        _mapped.pop(address, None)
    _mapped[mapped.address] = weakref.ref(mapped)
    if _handler is None:
        _handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_on_sigbus)
    ours = _SigAction(ctypes.cast(_handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
    found = _SigAction()
    _libc.sigaction(_SIGBUS, None, ctypes.byref(found))
    if found.handler != ours.handler:
        ctypes.memmove(ctypes.byref(_previous), ctypes.byref(found), ctypes.sizeof(found))
        _libc.sigaction(_SIGBUS, ctypes.byref(ours), None)


def _on_sigbus(signal: int, info: int, context: int) -> None:
    address = ctypes.c_void_p.from_address(info + _SI_ADDR).value or 0
    for reference in list(_mapped.values()):
        mapped = reference()
        if mapped is not None and mapped.address <= address < mapped.address + mapped.length:
            mapped.damaged = True
            start = address - address % PAGE
            length = mapped.address + mapped.length - start
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            if _libc.mmap(start, length, mmap.PROT_READ, flags, -1, 0) == start:
                return
    # not ours: the read is repeated, under whatever was in force before
    _libc.sigaction(_SIGBUS, ctypes.byref(_previous), None)


def bytes_at(address: int, length: int) -> torch.Tensor:
    """A view of memory, uint8 `[length]`. Whoever asks for it sees to it that what is read through it stays mapped."""
    return torch.frombuffer((ctypes.c_ubyte * length).from_address(address), dtype=torch.uint8)


def advise_needed(address: int, runs: np.ndarray) -> bool:
    """Asks for the page runs `[n, 2]` (first page, number of pages, from `address` on) to be read, without waiting.

    Returns:
        Whether the system took the advice; where not, `posix_fadvise` is the way.
    """
    if not LINUX or (pidfd := _own_pidfd()) < 0:
        return False
    vectors = np.empty(runs.shape, np.uint64)  # struct iovec: where, and how many bytes
    vectors[:, 0] = address + runs[:, 0] * PAGE
    vectors[:, 1] = runs[:, 1] * PAGE
    for start in range(0, len(vectors), _IOV_MAX):
        part = vectors[start : start + _IOV_MAX]
        where, count = ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(len(part))
        call = (
            ctypes.c_long(_PROCESS_MADVISE),
            ctypes.c_int(pidfd),
            where,
            count,
            ctypes.c_int(_WILLNEED),
            ctypes.c_uint(0),
        )
        if _libc.syscall(*call) < 0:
            return False
    return True


def _own_pidfd() -> int:
    """A descriptor of this process, or -1; after a fork a new one."""
    global _pidfd
    if _pidfd[0] != os.getpid():
        try:
            _pidfd = (os.getpid(), os.pidfd_open(os.getpid()))  # type: ignore[attr-defined, unused-ignore]
        except (AttributeError, OSError):
            _pidfd = (os.getpid(), -1)
    return _pidfd[1]


def resident_pages(address: int, first: int, count: int) -> np.ndarray | None:
    """Which of `count` pages are in memory, bool `[count]`; None where that cannot be known."""
    if not LINUX:
        return None
    held = np.empty(count, np.uint8)
    if _libc.mincore(address + first * PAGE, count * PAGE, held.ctypes.data) != 0:
        return None
    return (held & 1).astype(bool)
