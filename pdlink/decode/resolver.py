"""Owns the search for a prefill instance: which requests wait for it, on which thread it is asked for, and what a
failure of that means to them. Starting a request over what was found is its worker's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pdlink.bootstrap.messages import Endpoint
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.decode.failures import RESTART
from pdlink.decode.links import Link, LinkTable, PrefillInstance
from pdlink.decode.live import Live
from pdlink.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    IncompatibleError,
    LimitReached,
    NotReady,
    PdlinkError,
    StateError,
)
from pdlink.events import Events
from pdlink.threads import Death, Pool
from pdlink.transfer.failure import Failure, FailureReason

RESOLVE_THREADS = 16
RESOLVE_ATTEMPTS = 3
OnFound = Callable[[Live, Link], None]
"""With a link that was taken for the request. Under the lock."""
OnFailed = Callable[[Sequence[Live], Failure], None]
"""Under the lock."""
OnMisfit = Callable[[Live, Failure, Sequence[Endpoint]], None]
"""The ranks that do not fit a request, which has failed for that."""


class Resolver:
    """`resolve_soon` and `stop` under the lock of its worker; `close` without it."""

    def __init__(
        self,
        links: LinkTable,
        lock: threading.RLock,
        events: Events,
        part: str,
        on_found: OnFound,
        on_failed: OnFailed,
        on_misfit: OnMisfit,
    ) -> None:
        self._links = links
        self._lock = lock
        self._on_found = on_found
        self._on_failed = on_failed
        self._on_misfit = on_misfit
        self._threads = Pool("pdlink-resolve", part, RESOLVE_THREADS, events)
        self._waiting: dict[PrefillInstance, list[Live]] = {}
        """Requests that wait for one answer about their instance. A flood to one that is slow takes one thread."""
        self._stopped = False

    def resolve_soon(self, live: Live) -> None:
        """Find the instance on a resolver thread, or wait for the one that asks already."""
        waiting = self._waiting.get(live.instance)
        if waiting is not None:
            waiting.append(live)
            return
        self._waiting[live.instance] = [live]
        self._ask(live.instance)

    def stop(self) -> None:
        """Start nothing more."""
        self._stopped = True

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def _ask(self, instance: PrefillInstance) -> None:
        try:
            self._threads.submit(lambda: self._resolve(instance), lambda death: self._on_death(instance, death))
        except StateError as error:
            self._on_failed(self._waiting.pop(instance), Failure(FailureReason.LIMIT, str(error)))

    def _resolve(self, instance: PrefillInstance) -> None:
        """On a resolver thread: find the instance and start what waits for it, or fail that with the reason.

        A failure is told to those that had come when it was asked; for later ones it is asked again.
        """
        with self._lock:
            num_asking = len(self._waiting[instance])
        try:
            self._find(instance)
        except IncompatibleError as error:
            cause = Failure.incompatible(error.mismatches, instance.name, "resolving")
            for live in self._end(instance, num_asking, cause):
                if isinstance(error, IncompatibleInstance):
                    self._on_misfit(live, cause, error.endpoints)
        except PdlinkError as error:
            self._end(instance, num_asking, _failure(error))

    def _find(self, instance: PrefillInstance) -> None:
        for _ in range(RESOLVE_ATTEMPTS):
            link = self._links.resolve(instance)
            try:
                with self._lock:
                    # Again under the lock: what a watch forgot meanwhile is no answer for those who ask now.
                    is_known = self._links.known(instance) is link
                    if is_known:
                        self._start(instance, link)
                    if is_known or self._stopped:
                        return
            finally:
                self._links.give_back(link)
        raise NotReady(f"prefill instance {instance.name!r} came and went while it was resolved")

    def _start(self, instance: PrefillInstance, link: Link) -> None:
        """Under the lock: start all that wait. Who has not begun is still among them, so that a death of this thread
        is told to everybody."""
        waiting = self._waiting.get(instance, [])
        while waiting:
            # It stays open though a watch may forget or replace it at any moment.
            self._links.share(link)
            self._on_found(waiting[0], link)
            del waiting[0]
        self._waiting.pop(instance, None)

    def _end(self, instance: PrefillInstance, num_asking: int, failure: Failure) -> list[Live]:
        """An instance cannot be found: fail the requests that asked, and ask again for those that came since."""
        with self._lock:
            waiting = self._waiting.pop(instance, [])
            asking, later = waiting[:num_asking], waiting[num_asking:]
            self._on_failed(asking, failure)
            if later and not self._stopped:
                self._waiting[instance] = later
                self._ask(instance)
        return asking

    def _on_death(self, instance: PrefillInstance, death: Death) -> None:
        with self._lock:
            failure = Failure(FailureReason.INTERNAL, death.text, fix=RESTART)
            self._on_failed(self._waiting.pop(instance, []), failure)


def _failure(error: PdlinkError) -> Failure:
    """What kept an instance from being found, as the end of a request."""
    if isinstance(error, AccessDenied | ConfigError):
        fix = "mend the credentials or their settings (PDLINK_TOKEN, PDLINK_TLS_*): retrying cannot help"
        return Failure(FailureReason.DENIED, str(error), fix=fix)
    reasons = (
        (DeadlineExceeded, FailureReason.TIMEOUT),
        (NotReady, FailureReason.NOT_READY),
        (LimitReached, FailureReason.LIMIT),
    )
    reason = next((one for kind, one in reasons if isinstance(error, kind)), FailureReason.PEER_GONE)
    return Failure(reason, str(error))
