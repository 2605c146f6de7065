"""Owns Ctrl-C and SIGTERM while a command runs: the first ends it in order, later ones don't disturb that."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pdlink.cli.exits import Terminated

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Within, SIGINT raises `KeyboardInterrupt` and SIGTERM `Terminated`, once. Does nothing off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            return
        raised = True
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
