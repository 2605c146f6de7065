"""Owns the fetches that run ahead of the reads of one forward: which layer is next, and the thread that brings it.

Layers are fetched one after the other, in the order that the engine gave at the begin, on a thread of its own. What has
been fetched counts only once the reading thread has taken it: until then scratch is not valid, and nobody reads it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from pdlink.errors import DeadlineExceeded, IntegrityError, PdlinkError
from pdlink.memory.forward import LayerKey
from pdlink.threads import Death, Pool


class _Job:
    """`done` is None once the fetch has been made where it was begun."""

    __slots__ = ("done", "error")

    def __init__(self, done: threading.Event | None) -> None:
        self.done = done
        self.error: BaseException | None = None


class Ahead:
    """The fetches ahead of one pool. One thread calls; the fetches run on another, one at a time and in order.

    A fetch ends by the time limits of its reader; `timeout_s` only bounds the wait for several of them. Fetches that
    only launch something (`runs_here`) run where they are begun.
    """

    def __init__(self, timeout_s: float, *, runs_here: bool = False) -> None:
        self._timeout_s = timeout_s
        self._runs_here = runs_here
        self._order: deque[LayerKey] = deque()
        self._jobs: dict[LayerKey, _Job] = {}
        self._thread: Pool | None = None
        self._failure: BaseException | None = None

    def start(self, order: Sequence[LayerKey]) -> None:
        """The layers to fetch in a forward that begins."""
        self.stop()
        self._failure = None
        self._order.extend(order)

    @property
    def next(self) -> LayerKey | None:
        """The first layer that no fetch has been started for."""
        return self._order[0] if self._order else None

    def under_way(self, component: str) -> list[int]:
        """Layers of a component that are fetched, or being fetched, and have not been taken."""
        return [layer for name, layer in self._jobs if name == component]

    def submit(self, fetch: Callable[[], None]) -> None:
        """Begin to fetch the next layer, by `fetch`, once those before it are there."""
        done = None if self._runs_here else threading.Event()
        job = self._jobs[self._order.popleft()] = _Job(done)
        if done is None:
            self._run(job, fetch)
            return

        def run() -> None:
            self._run(job, fetch)
            done.set()

        def lost(death: Death) -> None:
            job.error = self._failure = death.error
            done.set()

        if self._thread is None:
            self._thread = Pool("pdlink-ahead", "the layer-sharded pool", 1)
        self._thread.submit(run, lost)

    def take(self, key: LayerKey) -> bool:
        """Wait for the fetch of a layer; False when none was begun. Raises what it raised."""
        job = self._jobs.pop(key, None)
        if job is None:
            return False
        self._wait(job)
        if isinstance(job.error, PdlinkError):
            raise job.error
        if job.error is not None:
            raise IntegrityError(f"the fetch of {key[0]!r} layer {key[1]} broke: {job.error}") from job.error
        return True

    def pass_by(self, key: LayerKey) -> list[int] | None:
        """The reading thread fetches `key` itself, if it is the next; waits for the fetches before it.

        Scratch had no room for it, because layers of its component that come before it have not been read: they are
        given up, and returned. None when another layer is the next.
        """
        if self.next != key:
            return None
        self._order.popleft()
        self.drain()
        passed = self.under_way(key[0])
        for layer in passed:
            del self._jobs[key[0], layer]
        return passed

    def drain(self) -> None:
        """Return when no fetch runs. Raises `DeadlineExceeded`."""
        for job in self._jobs.values():
            self._wait(job)

    def stop(self) -> list[LayerKey]:
        """Fetch nothing more, wait for what runs, and forget it: the layers that were fetched for nothing."""
        self._order.clear()
        self.drain()
        dropped = list(self._jobs)
        self._jobs.clear()
        return dropped

    def close(self) -> None:
        """Twice is fine."""
        self.stop()
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _run(self, job: _Job, fetch: Callable[[], None]) -> None:
        # After a failure the ranks are not where the order says: nothing that follows in it may be tried.
        if self._failure is not None:
            job.error = self._failure
            return
        try:
            fetch()
        except PdlinkError as error:
            job.error = self._failure = error

    def _wait(self, job: _Job) -> None:
        if job.done is not None and not job.done.wait(self._timeout_s):
            raise DeadlineExceeded(f"a fetch of a layer did not end within {self._timeout_s:g} s")
