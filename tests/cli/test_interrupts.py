"""Signals while a command runs: the first one ends it, wherever Python was when it came."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from pdlink.cli.exits import HungUp, Terminated
from pdlink.cli.interrupts import orderly_end

KINDS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, HungUp)]
PATIENCE_S = 30.0


class Subject:
    """Something that weak references may point to."""


def in_a_destructor(number: int) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)

    Dying()


def in_a_weak_reference(number: int) -> None:
    subject = Subject()
    reference = weakref.ref(subject, lambda dead: signal.raise_signal(number))
    del subject
    assert reference() is None


def in_a_callback_of_c(number: int) -> None:
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()


def in_the_collector(number: int) -> None:
    def hear(phase: str, info: dict[str, int]) -> None:
        if threading.current_thread() is threading.main_thread():  # others collect too, where nobody hears a signal
            gc.callbacks.remove(hear)
            signal.raise_signal(number)

    gc.callbacks.append(hear)
    while hear in gc.callbacks:
        gc.collect()  # does nothing while another thread collects


def twice_in_a_destructor(number: int) -> None:
    in_a_destructor(number)
    in_a_destructor(number)


PLACES = [in_a_destructor, in_a_weak_reference, in_a_callback_of_c, in_the_collector, twice_in_a_destructor]


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Some of these signals may be ignored where the tests run (under nohup)."""
    before = {number: signal.signal(number, signal.default_int_handler) for number, _ in KINDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_a_signal_that_comes_where_nothing_can_be_raised_is_not_lost(
    number: signal.Signals, kind: type[KeyboardInterrupt], place: Callable[[int], None]
) -> None:
    def work() -> None:
        place(number)
        threading.Event().wait(PATIENCE_S)
        pytest.fail(f"{number.name} was lost")

    with pytest.raises(kind), orderly_end():
        work()


@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_a_signal_that_comes_while_an_error_of_a_destructor_is_shown_is_not_lost(
    number: signal.Signals, kind: type[KeyboardInterrupt], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying:
        def __del__(self) -> None:
            raise ValueError("of a destructor")

    shown: list[object] = []

    def show(lost: sys.UnraisableHookArgs) -> None:
        signal.raise_signal(number)
        shown.append(lost.exc_type)

    def work() -> None:
        Dying()
        threading.Event().wait(PATIENCE_S)
        pytest.fail(f"{number.name} was lost")

    monkeypatch.setattr(sys, "unraisablehook", show)
    with pytest.raises(kind), orderly_end():
        work()
    assert shown == [ValueError]


@pytest.mark.parametrize(("number", "kind"), KINDS)
def test_only_the_first_signal_raises(number: signal.Signals, kind: type[KeyboardInterrupt]) -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for other, _ in KINDS:
                signal.raise_signal(other)
            cleaned.append(number)

    with pytest.raises(kind), orderly_end():
        work()
    assert cleaned == [number]


def test_other_errors_of_destructors_are_shown_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying:
        def __del__(self) -> None:
            raise ValueError("of a destructor")

    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: shown.append(lost.exc_type))
    with orderly_end():
        Dying()
    assert shown == [ValueError]


def test_handlers_and_the_hook_are_put_back() -> None:
    before = [signal.getsignal(number) for number, _ in KINDS], sys.unraisablehook
    with orderly_end():
        assert [signal.getsignal(number) for number, _ in KINDS] != before[0]
    assert ([signal.getsignal(number) for number, _ in KINDS], sys.unraisablehook) == before
