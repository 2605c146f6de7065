"""Owns Ctrl-C, SIGTERM and SIGHUP while a command runs: the first ends it in order, later ones don't disturb that."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from pdlink.cli.exits import HungUp, Terminated

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_SIGNALS: dict[signal.Signals, type[KeyboardInterrupt]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
    signal.SIGHUP: HungUp,
}

_AGAIN_S: Final = 0.01
"""How often a signal that was lost is sent again: the callback that lost it is over by then, as a rule."""

_SETTLE_TIMEOUT_S: Final = 5.0
"""How long the end of a command waits for the thread that sends signals again; it needs no more than `_AGAIN_S`."""


@contextmanager
def orderly_end() -> Iterator[None]:
    """Within, the first of these signals raises its exception. Does nothing off the main thread.

    A SIGHUP that is ignored (nohup) stays so. Where Python cannot raise (a destructor, a callback of a weak reference
    or of a C library), it hands the exception to `sys.unraisablehook` and goes on: the signal is then sent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook = sys.unraisablehook
    first = _FirstSignal(hook)
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    sys.unraisablehook = first.on_unraisable
    before = {number: signal.signal(number, first.on_signal) for number in heeded}
    try:
        yield
    finally:
        try:
            first.settle()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook


class _FirstSignal:
    """The signal that ends the command, and its exception on the way up.

    The main thread alone uses it, but anywhere: in handlers and destructors too, so that no lock may be taken here.
    """

    def __init__(self, hook: Callable[[UnraisableHookArgs], object]) -> None:
        self._hook = hook
        self._hooks_running = 0
        self._raised: KeyboardInterrupt | None = None
        self._missing: int | None = None
        self._lost: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_again, name="pdlink-signals", daemon=True)
        self._sender.start()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._raised is None and self._hooks_running:
            self._ask_for(number)  # what a hook raises is lost without a word
            return
        self._missing = None
        if self._raised is None:
            self._raised = _SIGNALS[signal.Signals(number)]()
            raise self._raised

    def on_unraisable(self, lost: UnraisableHookArgs) -> None:
        self._hooks_running += 1
        try:
            if self._raised is not None and lost.exc_value is self._raised:
                number = next(number for number, kind in _SIGNALS.items() if kind is type(self._raised))
                self._raised = None
                self._ask_for(number)
            else:
                self._hook(lost)
        finally:
            self._hooks_running -= 1

    def settle(self) -> None:
        """See that no signal of ours is still to come: it would hit whoever heeds it by then."""
        self._missing = None
        self._lost.put(None)
        self._sender.join(_SETTLE_TIMEOUT_S)

    def _ask_for(self, number: int) -> None:
        self._missing = number
        self._lost.put(number)

    def _send_again(self) -> None:
        """Until it arrives: a signal on the brink of a blocking call does not wake it, and Python hears late."""
        main = threading.main_thread().ident
        assert main is not None
        while (number := self._lost.get()) is not None:
            time.sleep(_AGAIN_S)
            while self._missing == number:
                signal.pthread_kill(main, number)
                time.sleep(_AGAIN_S)
