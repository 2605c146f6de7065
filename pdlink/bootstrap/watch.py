"""Owns the thread that follows one instance at any of several bootstrap addresses. It keeps no instance itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import grpc

from pdlink.address import Address
from pdlink.bootstrap import error_wire, service_wire, wire
from pdlink.bootstrap.access import Access
from pdlink.bootstrap.answers import read_answer, summarise
from pdlink.bootstrap.messages import PrefillServerInfo, Side
from pdlink.bootstrap.renewed import Renewed
from pdlink.bootstrap.rpc import BootstrapUnreachable, Link
from pdlink.config import Settings
from pdlink.errors import AccessDenied, DeadlineExceeded, NotReady, PdlinkError
from pdlink.events import Events
from pdlink.threads import Countdown, OnDeath, SupervisedThread
from pdlink.v1 import bootstrap_pb2 as pb

log = logging.getLogger("pdlink.bootstrap")
ROUND_INTERVAL_S = 0.1
DENIED_INTERVAL_S = 2.0
"""Credentials that are refused are not better the next moment, and every try is work for both sides."""
JOIN_TIMEOUT_S = 5.0

Answer = PrefillServerInfo | PdlinkError
OnAnswer = Callable[[Answer], None]


class Watch:
    """One thread that follows one instance at any of several addresses. Made by `BootstrapClient.watch`.

    `on_death` is called on it when it ends unasked: nothing is told any more then.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        instance: str,
        side: Side,
        on_answer: OnAnswer,
        settings: Settings,
        events: Events,
        access: Renewed[Access],
        on_death: OnDeath | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._access = access
        self._instance = instance
        self._side = side
        self._on_answer = on_answer
        self._settings = settings
        self._events = events
        self._told: object = None
        self._closing = threading.Event()
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._owner = f"watch of {instance}"
        self._thread = SupervisedThread(
            self._run,
            f"pdlink-watch-{instance}",
            self._owner,
            events=events,
            on_death=on_death,
            was_asked=self._closing.is_set,
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, where that was not `close`."""
        return self._thread.death.error if self._thread.death else None

    def stop(self) -> None:
        """Have the thread end; returns at once."""
        self._closing.set()
        with self._lock:
            if self._link is not None:
                self._link.close()

    def close(self) -> None:
        self.stop()
        self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._closing.wait(self._round())

    def _round(self) -> float:
        """Follow each address for as long as it has the instance; when none has, say so. Seconds until the next."""
        said: list[tuple[Address, PdlinkError]] = []
        for address in self._addresses:
            if self._closing.is_set():
                return 0.0
            try:
                self._follow(address)
                return ROUND_INTERVAL_S
            except PdlinkError as error:
                said.append((address, error))
        answer = summarise(self._instance, said)
        if not self._closing.is_set():
            self._tell(answer)
        return DENIED_INTERVAL_S if isinstance(answer, AccessDenied) else ROUND_INTERVAL_S

    def _follow(self, address: Address) -> None:
        """Tell what this address answers until it goes away; raises what it said if it never had the instance."""
        link, had_it, late = Link(address, self._access.get()), False, threading.Event()
        with self._lock:
            self._link = link
        takes_keys = link.access.may_send_secrets(address)
        decode = wire.pack_side(self._side)
        request = pb.WatchRequest(instance=self._instance, decode=decode, takes_control_keys=takes_keys)
        stream = link.stream("Watch", request)

        def give_up() -> None:
            late.set()
            stream.cancel()

        name = f"pdlink-watch-first-{self._instance}"
        first = Countdown(self._settings.resolve_timeout_s, give_up, name, self._owner, self._events)
        try:
            first.start()
            for data in stream:
                first.cancel()
                answer = self._read(data)
                if isinstance(answer, NotReady) and len(self._addresses) > 1:
                    if had_it:
                        return
                    raise answer
                had_it = True
                self._tell(answer)
            if not had_it:
                raise BootstrapUnreachable(f"what listens at {address} ended a watch without an answer")
        except grpc.RpcError as error:
            if not had_it:
                raise self._went_away(error, link, late.is_set()) from error
        finally:
            first.cancel()
            stream.cancel()
            with self._lock:
                self._link = None
            link.close()

    def _went_away(self, error: grpc.RpcError, link: Link, late: bool) -> PdlinkError:
        timeout_s = self._settings.resolve_timeout_s
        if late:
            return DeadlineExceeded(f"bootstrap {link.address} did not answer a watch within {timeout_s:g} s")
        return link.translate(error, timeout_s)

    def _read(self, data: bytes) -> Answer:
        message = service_wire.parse(pb.WatchResponse, data)
        if message.WhichOneof("answer") == "not_ready":
            error = error_wire.unpack_error(message.not_ready)
            return error if isinstance(error, NotReady) else NotReady(str(error))
        try:
            return read_answer(self._instance, self._side, message)
        except PdlinkError as error:
            return error

    def _tell(self, answer: Answer) -> None:
        told = _content(answer)
        if told != self._told and not self._closing.is_set():
            self._told = told
            self._on_answer(answer)


def _content(answer: Answer) -> object:
    """What makes an answer a new one: services count versions each on their own."""
    if isinstance(answer, PdlinkError):
        return (type(answer), str(answer))
    return (answer.instance, answer.protocol, answer.layout, answer.sizes, answer.kinds, answer.ranks)
