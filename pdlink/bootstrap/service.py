"""Owns the handlers of the bootstrap RPCs over one directory: bytes in, bytes out. It runs on one event loop, and
binds nothing (see `server`).

Requests arrive as bytes so that a malformed one is a typed refusal like any other. Answers that many ask for are
serialised once per version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NoReturn

import grpc

from pdlink.bootstrap import error_wire, service_wire, wire
from pdlink.bootstrap.compat import check
from pdlink.bootstrap.directory import Directory
from pdlink.bootstrap.messages import Side, check_name
from pdlink.bootstrap.rpc import ERROR_KEY, SERVICE, status_of
from pdlink.errors import FrameError, NotReady, PdlinkError
from pdlink.events import Events
from pdlink.v1 import bootstrap_pb2 as pb

log = logging.getLogger("pdlink.bootstrap")
WATCH_PAUSE_S = 0.02
"""Changes this close together reach a watcher as one."""

Context = grpc.aio.ServicerContext[bytes, bytes]


class BootstrapService:
    """The directory behind its RPCs. All calls on the loop that serves; `clock` is in seconds and never goes back."""

    def __init__(self, directory: Directory, clock: Callable[[], float], events: Events) -> None:
        self._directory = directory
        self._clock = clock
        self._events = events
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._answers: dict[str, tuple[int, pb.PrefillServerInfo]] = {}
        self._ending = False

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service, for `grpc.aio.Server.add_generic_rpc_handlers`."""
        unary = {
            "Register": self._register,
            "Renew": self._renew,
            "Withdraw": self._withdraw,
            "Resolve": self._resolve,
        }
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(self._guard(name, handle)) for name, handle in unary.items()
        }
        methods["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def expire(self) -> None:
        """Drop what has run out, and wake whoever watches it."""
        dropped = self._directory.expire(self._clock())
        if dropped:
            self._events.emit("bootstrap.expired", num_workers=dropped)
        self._wake_watchers()

    def end_watches(self) -> None:
        """Let every watch return, before the server stops: one that is cut off is logged as a defect."""
        self._ending = True
        for wakes in self._watchers.values():
            for wake in wakes:
                wake.set()

    def _register(self, data: bytes) -> bytes:
        request = service_wire.parse(pb.RegisterRequest, data)
        registration = service_wire.unpack_registration(request.registration)
        changed = self._directory.register(registration, self._clock())
        if changed:
            rank = registration.rank
            log.info("registered worker %s as rank %s of %s", rank.worker_id, rank.coordinates, registration.instance)
            self._events.emit(
                "bootstrap.registered",
                instance=registration.instance,
                worker_id=rank.worker_id,
                incarnation=rank.incarnation,
                rank=str(rank.coordinates),
            )
        self._wake_watchers()
        return pb.RegisterResponse(lease_s=self._directory.lease_s).SerializeToString()

    def _renew(self, data: bytes) -> bytes:
        request = service_wire.parse(pb.RenewRequest, data)
        wire.bounded("workers", len(request.workers), service_wire.MAX_RENEWALS)
        keys = [service_wire.unpack_key(one) for one in request.workers]
        now = self._clock()
        statuses = [service_wire.pack_status(self._directory.renew(key, now)) for key in keys]
        self._wake_watchers()
        return pb.RenewResponse(statuses=statuses, lease_s=self._directory.lease_s).SerializeToString()

    def _withdraw(self, data: bytes) -> bytes:
        key = service_wire.unpack_key(service_wire.parse(pb.WithdrawRequest, data).worker)
        removed = self._directory.withdraw(key, self._clock())
        if removed:
            log.info("worker %s of %s withdrew", key.worker_id, key.instance)
            self._events.emit("bootstrap.withdrawn", instance=key.instance, worker_id=key.worker_id)
        self._wake_watchers()
        return pb.WithdrawResponse(removed=removed).SerializeToString()

    def _resolve(self, data: bytes) -> bytes:
        request = service_wire.parse(pb.ResolveRequest, data)
        name, decode = _read_question(request)
        answer = self._answer(name, decode)
        if isinstance(answer, pb.Refusal):
            return pb.ResolveResponse(refusal=answer).SerializeToString()
        return pb.ResolveResponse(info=answer).SerializeToString()

    def _answer(self, name: str, decode: Side) -> pb.PrefillServerInfo | pb.Refusal:
        """Protocol first, then fingerprint, then whether the instance is whole. Raises `NotReady`."""
        now = self._clock()
        mismatches = check(self._directory.side(name, now), decode)
        if mismatches:
            self._events.emit("bootstrap.refused", instance=name, field=mismatches[0].field)
            endpoints = [service_wire.pack_endpoint(one) for one in self._directory.endpoints(name, now)]
            return pb.Refusal(mismatches=error_wire.pack_mismatches(mismatches), endpoints=endpoints)
        version = self._directory.version(name, now)
        kept = self._answers.get(name)
        if kept is None or kept[0] != version:
            kept = (version, service_wire.pack_info(self._directory.resolve(name, now)))
            self._answers[name] = kept
        return kept[1]

    async def _watch(self, data: bytes, context: Context) -> AsyncIterator[bytes]:
        """The answer to the question now and after every change, until the caller hangs up."""
        try:
            name, decode = _read_question(service_wire.parse(pb.WatchRequest, data))
            async with contextlib.aclosing(self._follow(name, decode)) as answers:
                async for answer in answers:
                    yield answer
            return
        except PdlinkError as error:
            refused = error
        except Exception:
            log.exception("bootstrap Watch failed")
            await self._fail("Watch", context)
        await self._refuse("Watch", refused, context)

    async def _follow(self, name: str, decode: Side) -> AsyncGenerator[bytes, None]:
        wake = asyncio.Event()
        self._watchers.setdefault(name, set()).add(wake)
        try:
            sent = b""
            while not self._ending:
                wake.clear()
                answer = self._watch_answer(name, decode)
                if answer != sent:
                    yield answer
                    sent = answer
                await wake.wait()
                await asyncio.sleep(WATCH_PAUSE_S)
        finally:
            self._watchers[name].discard(wake)
            if not self._watchers[name]:
                del self._watchers[name]

    def _watch_answer(self, name: str, decode: Side) -> bytes:
        try:
            answer = self._answer(name, decode)
        except NotReady as error:
            return pb.WatchResponse(not_ready=error_wire.pack_error(error)).SerializeToString()
        if isinstance(answer, pb.Refusal):
            return pb.WatchResponse(refusal=answer).SerializeToString()
        return pb.WatchResponse(info=answer).SerializeToString()

    def _wake_watchers(self) -> None:
        for name in self._directory.take_changes():
            if self._directory.version(name, self._clock()) == 0:
                self._answers.pop(name, None)
            for wake in self._watchers.get(name, ()):
                wake.set()

    def _guard(self, method: str, handle: Callable[[bytes], bytes]) -> Callable[[bytes, Context], object]:
        """The RPC boundary: a refusal becomes a status with its detail, a defect is logged and answers INTERNAL."""

        async def run(data: bytes, context: Context) -> bytes:
            try:
                return handle(data)
            except PdlinkError as error:
                refused = error
            except Exception:
                log.exception("bootstrap %s failed", method)
                return await self._fail(method, context)
            return await self._refuse(method, refused, context)

        return run

    async def _fail(self, method: str, context: Context) -> NoReturn:
        self._events.emit("bootstrap.error", method=method)
        await context.abort(grpc.StatusCode.INTERNAL, f"{method} failed; the bootstrap's log says why")

    async def _refuse(self, method: str, error: PdlinkError, context: Context) -> NoReturn:
        code, detail = status_of(error)
        if not isinstance(error, NotReady):  # asking early is ordinary
            log.warning("refused %s from %s: %s", method, context.peer(), error)
            self._events.emit("bootstrap.refused", method=method, kind=type(error).__name__)
        await context.abort(code, wire.clip(str(error)), trailing_metadata=((ERROR_KEY, detail),))


def _read_question(request: pb.ResolveRequest | pb.WatchRequest) -> tuple[str, Side]:
    with wire.reading("request"):
        check_name("instance", request.instance)
    if not request.HasField("decode"):
        raise FrameError("request.decode is missing")
    return request.instance, wire.unpack_side(request.decode)
