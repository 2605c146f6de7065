"""Owns Ctrl-C, SIGTERM and SIGHUP while a command runs: the first ends it in order, later ones don't disturb that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pdlink.cli.exits import HungUp, Terminated

_SIGNALS: dict[signal.Signals, type[KeyboardInterrupt]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: Terminated,
    signal.SIGHUP: HungUp,
}


@contextmanager
def orderly_end() -> Iterator[None]:
    """Within, the first of these signals raises its exception. Does nothing off the main thread.

    A SIGHUP that is ignored (nohup) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            return
        raised = True
        raise _SIGNALS[signal.Signals(number)]

    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
