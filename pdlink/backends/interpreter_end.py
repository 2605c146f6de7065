"""Owns the end of the interpreter for native libraries: from then on only its main thread calls into one. It ends none.

CPython up to 3.13 ends a thread that wants the GIL back meanwhile, inside whatever has released it. Frames of C++ that
must not be unwound abort the process then: "terminate called without an active exception", seen with nixl 1.5.1 and
mooncake 0.3.13 whenever a thread was at work at the end.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any, TypeVar

from pdlink.errors import BackendError

WAIT_S = 2.0
"""How long the end waits for a thread that is inside a library."""

LockT = TypeVar("LockT")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_has_begun = threading.Event()


def held_for_calls(lock: LockT) -> LockT:
    """Returns `lock`, which is held for every call that releases the GIL, after `refuse_at_end`."""
    _locks.add(lock)
    return lock


def refuse_at_end() -> None:
    """Raise `BackendError` on any thread but the main one while the interpreter ends. Asked with the lock held."""
    if _has_begun.is_set() and threading.current_thread() is not threading.main_thread():
        raise BackendError("this process is ending")


@atexit.register
def _begin() -> None:
    """Let whoever is inside come out, and nobody in."""
    _has_begun.set()
    for lock in list(_locks):
        if lock.acquire(timeout=WAIT_S):
            lock.release()
