"""Owns the thread that follows one instance at any of several bootstrap addresses. It keeps no instance itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import grpc

from pdlink.address import Address
from pdlink.bootstrap import error_wire, service_wire, wire
from pdlink.bootstrap.answers import read_answer, summarise
from pdlink.bootstrap.messages import PrefillServerInfo, Side
from pdlink.bootstrap.rpc import BootstrapUnreachable, Link, translate
from pdlink.config import Settings
from pdlink.errors import DeadlineExceeded, NotReady, PdlinkError
from pdlink.events import Events
from pdlink.v1 import bootstrap_pb2 as pb

log = logging.getLogger("pdlink.bootstrap")
ROUND_INTERVAL_S = 0.1
JOIN_TIMEOUT_S = 5.0

Answer = PrefillServerInfo | PdlinkError
OnAnswer = Callable[[Answer], None]


class Watch:
    """One thread that follows one instance at any of several addresses. Made by `BootstrapClient.watch`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        instance: str,
        side: Side,
        on_answer: OnAnswer,
        settings: Settings,
        events: Events,
    ) -> None:
        self._addresses = tuple(addresses)
        self._instance = instance
        self._side = side
        self._on_answer = on_answer
        self._settings = settings
        self._events = events
        self._told: object = None
        self._closing = threading.Event()
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"pdlink-watch-{instance}", daemon=True)
        self.failure: Exception | None = None
        """What ended the thread, where that was not `close`."""

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._link is not None:
                self._link.close()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._round()
                self._closing.wait(ROUND_INTERVAL_S)
        except Exception as error:  # the callback's, or a defect
            self.failure = error
            log.exception("watch of %s died", self._instance)
            self._events.emit("bootstrap.watch_died", instance=self._instance, error=str(error))

    def _round(self) -> None:
        """Follow each address for as long as it has the instance; when none has, say so."""
        said: list[tuple[Address, PdlinkError]] = []
        for address in self._addresses:
            if self._closing.is_set():
                return
            try:
                self._follow(address)
                return
            except PdlinkError as error:
                said.append((address, error))
        if not self._closing.is_set():
            self._tell(summarise(self._instance, said))

    def _follow(self, address: Address) -> None:
        """Tell what this address answers until it goes away; raises what it said if it never had the instance."""
        link, had_it, late = Link(address), False, threading.Event()
        with self._lock:
            self._link = link
        request = pb.WatchRequest(instance=self._instance, decode=wire.pack_side(self._side))
        stream = link.stream("Watch", request)

        def give_up() -> None:
            late.set()
            stream.cancel()

        first = threading.Timer(self._settings.resolve_timeout_s, give_up)
        first.daemon = True
        first.start()
        try:
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
                raise self._went_away(error, address, late.is_set()) from error
        finally:
            first.cancel()
            stream.cancel()
            with self._lock:
                self._link = None
            link.close()

    def _went_away(self, error: grpc.RpcError, address: Address, late: bool) -> PdlinkError:
        timeout_s = self._settings.resolve_timeout_s
        if late:
            return DeadlineExceeded(f"bootstrap {address} did not answer a watch within {timeout_s:g} s")
        return translate(error, address, timeout_s)

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
