"""Owns how background threads start and how their end is noticed: one that ends unasked is told of, once, to whoever it
served. It knows nothing of what a thread does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from pdlink.errors import LimitReached, StateError
from pdlink.events import Events

log = logging.getLogger("pdlink.threads")


@dataclass(frozen=True, slots=True)
class Death:
    """A thread, or a call on a thread of a pool, that ended unasked. `owner` is the part of the process it is of."""

    thread: str
    owner: str
    error: BaseException

    @property
    def text(self) -> str:
        said = f"{type(self.error).__name__}: {self.error}".removesuffix(": ")
        return f"thread {self.thread} of {self.owner} died ({said})"


OnDeath: TypeAlias = Callable[[Death], None]
Call: TypeAlias = Callable[[], None]


def report(death: Death, events: Events | None) -> None:
    """Log a death with its traceback and emit it as `thread.died`."""
    log.critical("%s", death.text, exc_info=death.error)
    _let_go(death.error)
    if events:
        announce(death, events)


def _let_go(error: BaseException | None) -> None:
    """Forget the frames in which an error came up: a death is kept, and must keep no engine, page or request alive."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def announce(death: Death, events: Events) -> None:
    """Emit a death that is in the log already."""
    error = f"{type(death.error).__name__}: {death.error}"
    events.emit("thread.died", thread=death.thread, owner=death.owner, error=error, text=death.text)


class SupervisedThread:
    """A daemon thread that runs `body`. Whatever `body` raises, `SystemExit` included, is a death; so is its return
    before `was_asked` says yes.

    A death is logged with its traceback and emitted as `thread.died`, then `on_death` is called, all on the dying
    thread and once. `at_end` comes after that, and also after an end that was asked for.
    """

    def __init__(
        self,
        body: Call,
        name: str,
        owner: str,
        *,
        events: Events | None = None,
        on_death: OnDeath | None = None,
        at_end: Call | None = None,
        was_asked: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.owner = owner
        self.death: Death | None = None
        self._body = body
        self._events = events
        self._on_death = on_death
        self._at_end = at_end
        self._was_asked = was_asked
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Raises `LimitReached` where the system gives no further thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            if self._thread.ident is not None:
                raise
            raise LimitReached(
                f"thread {self.name} of {self.owner} cannot be started: {error}; "
                f"{threading.active_count()} run already (ulimit -u, the memory or the pids limit of the container)"
            ) from error

    @property
    def has_started(self) -> bool:
        return self._thread.ident is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, `at_end` included; whether it has come. Fine before `start`, and on the thread itself."""
        if self.has_started and not self.is_current:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._body()
            if self._was_asked is not None and not self._was_asked():
                raise StateError("it returned without being asked to")
        except BaseException as error:  # noqa: BLE001 - a thread boundary: nobody else would ever hear of it
            self._die(error)
        finally:
            if self._at_end:
                _guard(self._at_end, self.name)

    def _die(self, error: BaseException) -> None:
        death = self.death = Death(self.name, self.owner, error)
        try:
            report(death, self._events)
        finally:
            on_death = self._on_death
            if on_death:
                _guard(lambda: on_death(death), self.name)


class Pool:
    """Up to `num_threads` threads that run calls in turn. A call that raises ends, as a death of this pool's, and with
    it nothing else: `lost` hears of it, on that thread. `close` twice is fine.
    """

    def __init__(self, name: str, owner: str, num_threads: int, events: Events | None = None) -> None:
        self.name = name
        self.owner = owner
        self._events = events
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def submit(self, call: Call, lost: OnDeath | None = None) -> None:
        """Run `call` when a thread is free. Raises `StateError` once closed, `LimitReached` without any thread."""
        try:
            self._threads.submit(self._run, call, lost)
        except RuntimeError as error:
            if "shutdown" in str(error):
                raise StateError(f"the threads {self.name} of {self.owner} are closed") from error
            raise LimitReached(f"no thread {self.name} of {self.owner} can be started: {error}") from error

    def close(self) -> None:
        """Drop what has not begun; returns at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, call: Call, lost: OnDeath | None) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - a thread boundary: the future is nobody's
            death = Death(threading.current_thread().name, self.owner, error)
            try:
                report(death, self._events)
            finally:
                if lost:
                    _guard(lambda: lost(death), self.name)


def handler_threads(name: str, num_threads: int) -> ThreadPoolExecutor:
    """Threads for the handlers of a gRPC server, which itself ends a call whose handler raises, and closes them."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name)


class Countdown:
    """Runs `call` once `delay_s` is over, on a thread of its own, unless it was cancelled before."""

    def __init__(self, delay_s: float, call: Call, name: str, owner: str, events: Events | None = None) -> None:
        self._delay_s = delay_s
        self._call = call
        self._cancelled = threading.Event()
        self._thread = SupervisedThread(self._run, name, owner, events=events)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Any thread, any number of times."""
        self._cancelled.set()

    def _run(self) -> None:
        if not self._cancelled.wait(self._delay_s):
            self._call()


def _guard(call: Call, name: str) -> None:
    """What is done about a death, or after an end, must not itself end silently."""
    try:
        call()
    except BaseException:
        log.exception("the end of thread %s could not be dealt with", name)
