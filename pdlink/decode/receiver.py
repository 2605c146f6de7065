"""Owns the handle of one receive that an engine holds: poll, wait, abort, result. It decides nothing (see `merge`).

Memory rule: from `DecodeWorker.receive` until a final state, pdlink may write the destination pages and nobody else
touches them. After DONE they hold the prompt's cache; after FAILED or ABORTED they hold anything, and are the engine's
again: nothing lands in them any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdlink.errors import DeadlineExceeded, TransferFailed
from pdlink.transfer.failure import Failure
from pdlink.transfer.states import ReceiverState

log = logging.getLogger("pdlink.decode")

YIELD_EVERY_S = 100e-6
YIELD_S = 20e-6
SPIN_S = 100e-6
"""Two polls of one receiver in a row, closer than this: the caller does nothing else."""
SPIN_WAIT_S = 1e-3


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What a finished receive brought. `elapsed_s` runs from open to the end.

    `num_bytes`, `backends` and `ways` are per owner that bytes came from: how many, over which backend, and by which
    ways ("direct", "staged", "mapped"). `num_descriptors` are those of the direct way.
    """

    aux: bytes | None
    num_bytes: Mapping[str, int]
    backends: Mapping[str, str]
    num_descriptors: int
    elapsed_s: float
    ways: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Receiver:
    """One request. Any thread may use it; callbacks run on pdlink's I/O thread, hold no lock, and must be quick."""

    def __init__(
        self,
        transfer_id: str,
        attempt: int,
        abort: Callable[[Receiver, str], None],
        waits_for: Callable[[Receiver], Sequence[str]] = lambda _: (),
    ) -> None:
        """`waits_for` names the owners that are not through."""
        self.transfer_id = transfer_id
        self.attempt = attempt
        self.failure: Failure | None = None
        self._abort = abort
        self._waits_for = waits_for
        self._state = ReceiverState.RESOLVING
        self._result: ReceiveResult | None = None
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Receiver], None]] = []
        self._changed: Callable[[Receiver], None] | None = None
        self._lock = threading.Lock()
        self._seen = ReceiverState.RESOLVING

    @property
    def state(self) -> ReceiverState:
        return self._state

    def poll(self) -> ReceiverState:
        """The state now. Never waits for the transfer.

        A loop that polls must not starve the threads that do the work: when nothing has changed since the last call,
        the GIL is given away for some microseconds, at most once in `YIELD_EVERY_S`. A loop that does nothing but poll
        this one receiver sleeps until the end, or for `SPIN_WAIT_S`.
        """
        state = self._state
        if state is self._seen and not state.is_final:
            if _is_spinning(self):
                self._ended.wait(SPIN_WAIT_S)
            else:
                _give_way()
            _remember(self)
            state = self._state
        self._seen = state
        return state

    def wait(self, timeout_s: float | None = None) -> ReceiveResult:
        """Block until the end and return the result.

        Raises `TransferFailed` with the first cause, or `DeadlineExceeded` while the transfer goes on.
        """
        if not self._ended.wait(timeout_s):
            late = ", ".join(self.waits_for())
            on_whom = f", waiting for {late}" if late else ""
            raise DeadlineExceeded(f"transfer {self.transfer_id!r} is {self._state} after {timeout_s:g} s{on_whom}")
        return self.result()

    def waits_for(self) -> list[str]:
        """The owners that are not through, by their worker ids."""
        return list(self._waits_for(self))

    def result(self) -> ReceiveResult:
        """What came, once the state is DONE. Raises `TransferFailed` otherwise."""
        if self._result is None:
            raise TransferFailed(f"transfer {self.transfer_id!r} is {self._state}: {self.failure or 'not finished'}")
        return self._result

    def abort(self, text: str = "aborted by the decode engine") -> None:
        """End the request. The pages are the engine's again when the state is final, not when this returns."""
        self._abort(self, text)

    def on_end(self, callback: Callable[[Receiver], None]) -> None:
        """Call `callback(self)` once, at the end, or now when it has ended. One that raises is logged."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def watch(self, changed: Callable[[Receiver], None]) -> None:
        """Call `changed(self)` now, and at each change of state from now on. By one caller. It runs on whichever thread
        brings the change, under locks of pdlink: it must be quick, not raise, and call nothing here but properties."""
        with self._lock:
            self._changed = changed
            changed(self)

    # --- called by the worker -----------------------------------------------------------------------

    def update(self, state: ReceiverState, failure: Failure | None, result: ReceiveResult | None) -> None:
        """Take over the state that the merge has reached."""
        self.failure = failure
        self._result = result
        self._state = state
        with self._lock:
            if state.is_final:
                self._ended.set()
            if self._changed:
                self._changed(self)

    @property
    def has_callbacks(self) -> bool:
        """Whether anybody is to be called back; once the request has ended, nobody is added any more."""
        return bool(self._callbacks)

    def call_back(self) -> None:
        """Run the callbacks of an ended request. The caller holds no lock: they are the engine's and may call in."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # the engine's: it must not end a thread of ours, nor the next callback
                log.exception("a callback at the end of transfer %s failed", self.transfer_id)


_last_yield = 0.0
_last_polled = (0, 0.0)
"""Which receiver was polled last in this process (its `id`), and when that poll returned."""


def _is_spinning(receiver: Receiver) -> bool:
    which, when = _last_polled
    return which == id(receiver) and time.monotonic() - when < SPIN_S


def _remember(receiver: Receiver) -> None:
    global _last_polled
    _last_polled = (id(receiver), time.monotonic())


def _give_way() -> None:
    """Sleep for a moment, unless this process has just done so: a scheduler polls many receivers in a row."""
    global _last_yield
    now = time.monotonic()
    if now - _last_yield > YIELD_EVERY_S:
        time.sleep(YIELD_S)
        _last_yield = time.monotonic()
