"""A thread that asks for pages ahead, so that whoever computes does not wait for the asking."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


_lock = threading.Lock()
_worker: ThreadPoolExecutor | None = None


def in_background(work: Callable[[], int]) -> Future[int]:
    """Runs `work` after what was handed in before, on the one thread that all tables share."""
    global _worker
    with _lock:
        if _worker is None:
            _worker = ThreadPoolExecutor(1, thread_name_prefix="engram-prefetch")
        return _worker.submit(work)


def _after_fork() -> None:
    """A child process has no threads of its parent's."""
    global _worker, _lock
    _worker, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
