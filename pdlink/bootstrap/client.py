"""Owns how decode asks bootstrap services about prefill instances: one answer (`resolve`), or all of them (`watch`).

Any of the listed addresses will do. It keeps no cache and registers nothing (see `keeper`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from pdlink.address import Address
from pdlink.bootstrap.access import renewed_access
from pdlink.bootstrap.answers import ask, summarise
from pdlink.bootstrap.messages import PROTOCOL, PrefillServerInfo, ProtocolRange, Side, check_name
from pdlink.bootstrap.rpc import BootstrapUnreachable
from pdlink.bootstrap.watch import OnAnswer, Watch
from pdlink.config import Settings
from pdlink.errors import DeadlineExceeded, IncompatibleError, InvalidInput, NotReady, PdlinkError, StateError
from pdlink.events import Events
from pdlink.layout import Fingerprint
from pdlink.threads import OnDeath

POLL_INTERVAL_S = 0.1


class BootstrapClient:
    """Asks `addresses` in turn. Thread-safe; `close` ends its watches and may be called twice.

    Raises `ConfigError` for credentials that cannot be used, or that would go over the network in plain text.

    `protocol` is what this side speaks, of which only tests say anything else.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        settings: Settings | None = None,
        *,
        protocol: ProtocolRange = PROTOCOL,
        events: Events | None = None,
    ) -> None:
        if not addresses:
            raise InvalidInput("a bootstrap client needs at least one bootstrap address; write host:port")
        self._addresses = tuple(addresses)
        self._settings = settings or Settings()
        self._access = renewed_access(self._settings)
        self._access.get().check(addresses)
        self._protocol = protocol
        self._events = events or Events()
        self._watches: set[Watch] = set()
        self._lock = threading.Lock()
        self._closed = False

    def resolve(self, instance: str, fingerprint: Fingerprint, timeout_s: float | None = None) -> PrefillServerInfo:
        """The instance, checked whole and compatible, from the first address that has it.

        Each address is asked once and gets a fair share of `timeout_s` (default: `resolve_timeout_s` for each).
        `IncompatibleError` is final (`IncompatibleInstance` also has the ranks to tell); otherwise the error lists
        what every address said: `UnknownInstance`, `NotReady`, `AccessDenied`, `DeadlineExceeded` or
        `BootstrapUnreachable`.
        """
        self._check_open()
        check_name("instance", instance)
        side = Side(self._protocol, fingerprint)
        said: list[tuple[Address, PdlinkError]] = []
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        for index, address in enumerate(self._addresses):
            share = self._settings.resolve_timeout_s
            if give_up is not None:
                share = min(share, max(give_up - time.monotonic(), 0.001) / (len(self._addresses) - index))
            try:
                return ask(address, instance, side, share, self._access.get())
            except IncompatibleError:
                raise
            except PdlinkError as error:
                said.append((address, error))
        raise summarise(instance, said)

    def wait_ready(self, instance: str, fingerprint: Fingerprint, timeout_s: float) -> PrefillServerInfo:
        """Resolve again until the instance is ready. Raises what `resolve` said last, at the latest after `timeout_s`.

        Why the instance is not ready is not forgotten for an attempt that ran out of time. An incompatible instance,
        and credentials that are refused, end it at once.
        """
        give_up = time.monotonic() + timeout_s
        said: NotReady | DeadlineExceeded | BootstrapUnreachable | None = None
        while True:
            left = give_up - time.monotonic()
            try:
                return self.resolve(instance, fingerprint, max(left, 0.001))
            except IncompatibleError:
                raise
            except (NotReady, DeadlineExceeded, BootstrapUnreachable) as error:
                if not (isinstance(said, NotReady) and isinstance(error, DeadlineExceeded)):
                    said = error  # an attempt that the end cut short knows less than the one before
                if give_up - time.monotonic() <= POLL_INTERVAL_S:
                    raise type(said)(f"{said} (waited {timeout_s:g} s)") from error
            time.sleep(POLL_INTERVAL_S)

    def watch(
        self, instance: str, fingerprint: Fingerprint, on_answer: OnAnswer, on_death: OnDeath | None = None
    ) -> Watch:
        """Call `on_answer` on a thread of the watch, with the instance now and after each change.

        It gets an error instead while the instance is not ready, incompatible, or no address answers; repeats are
        left out. `Watch.close` ends it. What `on_answer` raises ends the thread too, and then `on_death` is called.
        """
        check_name("instance", instance)
        side = Side(self._protocol, fingerprint)
        told = (self._settings, self._events, self._access, on_death)
        watch = Watch(self._addresses, instance, side, on_answer, *told)
        with self._lock:
            self._check_open()
            self._watches = {one for one in self._watches if one.is_alive} | {watch}
            watch.start()
        return watch

    def close(self) -> None:
        with self._lock:
            self._closed = True
            watches, self._watches = self._watches, set()
        for watch in watches:
            watch.close()

    def __enter__(self) -> BootstrapClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the bootstrap client is closed")
