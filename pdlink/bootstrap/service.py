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
from dataclasses import dataclass
from typing import NoReturn

import grpc

from pdlink.bootstrap import error_wire, inspection_wire, service_wire, wire
from pdlink.bootstrap.compat import KEYS_NOT_TAKEN, check
from pdlink.bootstrap.directory import Claim, Directory, LeaseStatus
from pdlink.bootstrap.gate import identity_of, peer_host
from pdlink.bootstrap.messages import RankInfo, Side, check_name
from pdlink.bootstrap.rpc import ERROR_KEY, SERVICE, status_of
from pdlink.denials import Denials
from pdlink.errors import AccessDenied, FrameError, NotReady, PdlinkError
from pdlink.events import Events
from pdlink.sparse_log import SparseLog
from pdlink.v1 import bootstrap_pb2 as pb

log = logging.getLogger("pdlink.bootstrap")
NOT_THE_OWNER = "not the owner"
MAX_NAMED = 8
"""Workers in a line of the log."""
WATCH_PAUSE_S = 0.02
"""Changes this close together reach a watcher as one."""

Context = grpc.aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Question:
    """Which instance, for whom, and whether that side takes keys to its control sockets."""

    instance: str
    decode: Side
    takes_control_keys: bool


class BootstrapService:
    """The directory behind its RPCs. All calls on the loop that serves; `clock` is in seconds and never goes back."""

    def __init__(
        self,
        directory: Directory,
        clock: Callable[[], float],
        events: Events,
        denials: Denials,
        name: Callable[[], str],
    ) -> None:
        """`name` says what the log calls this service."""
        self._name = name
        self._denials = denials
        self._log = SparseLog(log)
        self._directory = directory
        self._clock = clock
        self._events = events
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._answers: dict[str, tuple[int, pb.PrefillServerInfo]] = {}
        self._ending = False
        self.on_exit: Callable[[BaseException], None] = lambda error: None
        """Told when a handler raises what is no `Exception` (`SystemExit`): the service must end with it."""

    @property
    def num_workers(self) -> int:
        """Registered workers of all instances; may be read from any thread."""
        return self._directory.num_workers

    def readiness(self) -> dict[str, str]:
        """Every instance, and what keeps it from being whole ("": nothing). On the loop that serves."""
        return self._directory.readiness(self._clock())

    def inspector(self) -> grpc.GenericRpcHandler:
        """What operators ask, as a service beside that of the ranks."""
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Look": grpc.unary_unary_rpc_method_handler(self._guard("Look", self._look))
        }
        return grpc.method_handlers_generic_handler(inspection_wire.SERVICE, methods)

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
        self._directory.expire(self._clock())
        self._wake_watchers()
        expired: dict[str, list[str]] = {}
        for key in self._directory.take_expired():
            expired.setdefault(key.instance, []).append(key.worker_id)
            self._events.emit("bootstrap.expired", instance=key.instance, worker_id=key.worker_id)
        for instance, names in expired.items():
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            text = "lease of worker %s%s of %s ran out: not renewed within %g s, and so not registered any more"
            log.warning(text, ", ".join(names[:MAX_NAMED]), more, instance, self._directory.lease_s)

    def end_watches(self) -> None:
        """Let every watch return, before the server stops: one that is cut off is logged as a defect."""
        self._ending = True
        for wakes in self._watchers.values():
            for wake in wakes:
                wake.set()

    def _register(self, data: bytes, context: Context) -> bytes:
        request = service_wire.parse(pb.RegisterRequest, data)
        registration = service_wire.unpack_registration(request.registration)
        claim = Claim(service_wire.unpack_owner(request.owner_key), identity_of(context))
        rank, now = registration.rank, self._clock()
        before = self._directory.rank(registration.instance, rank.worker_id, now)
        changed = self._directory.register(registration, now, claim, len(data))
        if before and before.incarnation != rank.incarnation:
            self._tell_replaced(registration.instance, before, rank)
        if changed:
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

    def _tell_replaced(self, instance: str, before: RankInfo, after: RankInfo) -> None:
        text = "worker %s of %s was live as incarnation %d at %s, and is replaced by incarnation %d at %s: %s"
        told = (before.incarnation, before.control_endpoint, after.incarnation, after.control_endpoint)
        fix = "where that is no restart, give each worker a name of its own"
        self._log.warn(("replaced", instance, after.worker_id), text, after.worker_id, instance, *told, fix)

    def _renew(self, data: bytes, context: Context) -> bytes:
        request = service_wire.parse(pb.RenewRequest, data)
        wire.bounded("workers", len(request.workers), service_wire.MAX_RENEWALS)
        asked = [(service_wire.unpack_key(one), _claim_of(one)) for one in request.workers]
        now = self._clock()
        statuses = [self._directory.renew(key, now, claim) for key, claim in asked]
        for (key, _), status in zip(asked, statuses, strict=True):
            if status is LeaseStatus.NOT_OWNER:
                text = f"a renewal of worker {key.worker_id!r} of instance {key.instance!r} with another owner key"
                self._denials.add(self._name(), peer_host(context), NOT_THE_OWNER, text)
        self._wake_watchers()
        packed = [service_wire.pack_status(one) for one in statuses]
        return pb.RenewResponse(statuses=packed, lease_s=self._directory.lease_s).SerializeToString()

    def _withdraw(self, data: bytes, context: Context) -> bytes:
        worker = service_wire.parse(pb.WithdrawRequest, data).worker
        key = service_wire.unpack_key(worker)
        removed = self._directory.withdraw(key, self._clock(), _claim_of(worker))
        if removed:
            log.info("worker %s of %s withdrew", key.worker_id, key.instance)
            self._events.emit("bootstrap.withdrawn", instance=key.instance, worker_id=key.worker_id)
        self._wake_watchers()
        return pb.WithdrawResponse(removed=removed).SerializeToString()

    def _resolve(self, data: bytes, context: Context) -> bytes:
        request = service_wire.parse(pb.ResolveRequest, data)
        answer = self._answer(_read_question(request))
        if isinstance(answer, pb.Refusal):
            return pb.ResolveResponse(refusal=answer).SerializeToString()
        return pb.ResolveResponse(info=answer).SerializeToString()

    def _look(self, data: bytes, context: Context) -> bytes:
        name = inspection_wire.unpack_question(data)
        return inspection_wire.pack_directory(self._directory.look(self._clock(), name))

    def _answer(self, asked: _Question) -> pb.PrefillServerInfo | pb.Refusal:
        """Protocol first, then fingerprint, control keys, and whether the instance is whole. Raises `NotReady`."""
        name, now = asked.instance, self._clock()
        mismatches = check(self._directory.side(name, now), asked.decode)
        if not mismatches and not asked.takes_control_keys and self._directory.has_control_keys(name, now):
            mismatches = (KEYS_NOT_TAKEN,)
        if mismatches:
            self._events.emit("bootstrap.refused", instance=name, field=mismatches[0].field)
            with_keys = asked.takes_control_keys
            found = self._directory.endpoints(name, now)
            endpoints = [service_wire.pack_endpoint(one, with_keys=with_keys) for one in found]
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
            asked = _read_question(service_wire.parse(pb.WatchRequest, data))
            async with contextlib.aclosing(self._follow(asked)) as answers:
                async for answer in answers:
                    yield answer
            return
        except PdlinkError as error:
            refused = error
        except Exception:
            log.exception("bootstrap Watch failed")
            await self._fail("Watch", context)
        except (SystemExit, KeyboardInterrupt) as error:
            self.on_exit(error)
            await self._fail("Watch", context)
        await self._refuse("Watch", refused, context)

    async def _follow(self, asked: _Question) -> AsyncGenerator[bytes, None]:
        name, wake = asked.instance, asyncio.Event()
        self._watchers.setdefault(name, set()).add(wake)
        try:
            sent = b""
            while not self._ending:
                wake.clear()
                answer = self._watch_answer(asked)
                if answer != sent:
                    yield answer
                    sent = answer
                await wake.wait()
                await asyncio.sleep(WATCH_PAUSE_S)
        finally:
            self._watchers[name].discard(wake)
            if not self._watchers[name]:
                del self._watchers[name]

    def _watch_answer(self, asked: _Question) -> bytes:
        try:
            answer = self._answer(asked)
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

    def _guard(self, method: str, handle: Callable[[bytes, Context], bytes]) -> Callable[[bytes, Context], object]:
        """The RPC boundary: a refusal becomes a status with its detail, a defect is logged and answers INTERNAL."""

        async def run(data: bytes, context: Context) -> bytes:
            try:
                return handle(data, context)
            except PdlinkError as error:
                refused = error
            except Exception:
                log.exception("bootstrap %s failed", method)
                return await self._fail(method, context)
            except (SystemExit, KeyboardInterrupt) as error:
                self.on_exit(error)
                return await self._fail(method, context)
            return await self._refuse(method, refused, context)

        return run

    async def _fail(self, method: str, context: Context) -> NoReturn:
        self._events.emit("bootstrap.error", method=method)
        await context.abort(grpc.StatusCode.INTERNAL, f"{method} failed; the bootstrap's log says why")

    async def _refuse(self, method: str, error: PdlinkError, context: Context) -> NoReturn:
        code, detail = status_of(error)
        if isinstance(error, AccessDenied):
            self._denials.add(self._name(), peer_host(context), NOT_THE_OWNER, str(error))
        elif not isinstance(error, NotReady):  # asking early is ordinary
            kind = (method, peer_host(context), type(error))
            self._log.warn(kind, "refused %s from %s: %s", method, context.peer(), error)
            self._events.emit("bootstrap.refused", method=method, kind=type(error).__name__)
        await context.abort(code, wire.clip(str(error)), trailing_metadata=((ERROR_KEY, detail),))


def _claim_of(worker: pb.WorkerKey) -> Claim:
    return Claim(service_wire.unpack_owner(worker.owner_key))


def _read_question(request: pb.ResolveRequest | pb.WatchRequest) -> _Question:
    with wire.reading("request"):
        check_name("instance", request.instance)
    if not request.HasField("decode"):
        raise FrameError("request.decode is missing")
    return _Question(request.instance, wire.unpack_side(request.decode), request.takes_control_keys)
