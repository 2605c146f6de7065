"""Owns one prefill rank as the link sees it: its registration, its control socket, and how its life ends.

It holds no request (see `requests`) and moves no byte: decode pulls. Frames come in on the control loop's thread;
engine calls come from any thread; one lock orders them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from pdlink.address import Address, advertised
from pdlink.backends.base import Backend
from pdlink.backends.page_digests import PageDigests
from pdlink.backends.staging import Arena
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.messages import RankInfo, Registration, Side
from pdlink.config import Settings
from pdlink.control.curve import make_keys
from pdlink.control.frames import (
    Abort,
    Body,
    Credit,
    Frame,
    Ping,
    Pong,
    Refused,
    Release,
    Stage,
    Subscribe,
)
from pdlink.control.loop import ControlLoop
from pdlink.errors import (
    InvalidInput,
    PartDead,
    RegionError,
    StateError,
)
from pdlink.events import Events
from pdlink.layout.fingerprint import fingerprint
from pdlink.prefill import admission
from pdlink.prefill.rank import PrefillRank, facts_of
from pdlink.prefill.ready_watch import ReadyWatch
from pdlink.prefill.requests import Requests
from pdlink.prefill.sender import Send, Sender
from pdlink.prefill.stage_desk import StageDesk
from pdlink.threads import Death
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.prefill")

HOUSEKEEPING_S = 0.25
LATE_S = 2.0
"""Housekeeping that comes so much later says that this process stood still: frames of readers wait to be read."""


class PrefillWorker:
    """One prefill rank. `open` a request, publish through the `Sender` it returns. `close` twice is fine."""

    def __init__(
        self,
        rank: PrefillRank,
        settings: Settings,
        loop: ControlLoop,
        backends: Mapping[str, Backend],
        events: Events,
        arena: Arena | None = None,
    ) -> None:
        """`arena` is where pages are packed, if anywhere; it outlives the worker."""
        self.rank = rank
        self.events = events
        self._settings = settings
        self._loop = loop
        self._backends = backends
        self._lock = threading.RLock()
        self._side = Side(rank.protocol, fingerprint(rank.layout))
        self._digester = PageDigests()
        self._facts = facts_of(rank, settings, self._digester)
        self._watch = ReadyWatch(rank.worker_id, events)
        self._requests = Requests(rank, settings, self._reply)
        self._closed = False
        self._looked = self._awake_since = loop.clock()
        for region in rank.regions:
            for backend in backends.values():
                backend.register(region)
        find, answers = self._requests.senders.get, self._requests.answers
        self._desk = StageDesk(self._facts, arena, settings, self._lock, loop.clock, self._send, find, answers, events)
        self._offered: frozenset[str] = frozenset()
        self._dead: Death | None = None
        """The thread without which no request can be served."""
        keys = make_keys() if settings.uses_curve else None
        self._control_keys = keys[1] if keys else None
        self._server = loop.bind(Address(settings.bind_host, 0), self._on_frame, keys[0] if keys else None)
        self._timer = loop.call_later(HOUSEKEEPING_S, self._housekeep)
        self._keeper: RegistrationKeeper | None = None
        loop.on_death(self.on_death)

    @property
    def part(self) -> str:
        """What threads of this worker belong to, by the name that health and logs know."""
        return f"prefill {self.rank.worker_id}"

    @property
    def offered(self) -> frozenset[str]:
        """Backends over which peers have been told that they can read."""
        return self._offered

    @property
    def control_endpoint(self) -> Address:
        return advertised(self._server.address, self._settings.advertise_host)

    @property
    def num_senders(self) -> int:
        """Requests that are open or still remembered."""
        return len(self._requests.senders)

    def registration(self) -> Registration:
        """What this rank tells the bootstrap service."""
        info = RankInfo(
            self.rank.worker_id,
            self.rank.incarnation,
            self.rank.rank,
            {name: tuple(ids) for name, ids in self.rank.owned.items()},
            tuple(self.rank.regions),
            self.control_endpoint,
            self._transports(),
            self._desk.arena.area if self._desk.arena else None,
            self._control_keys,
            self._staged_only(),
        )
        rank = self.rank
        return Registration(rank.instance, rank.protocol, rank.layout, rank.sizes, dict(rank.kinds), info)

    def register(self, bootstraps: Sequence[Address]) -> None:
        """Register with every bootstrap address and keep registered until `close`. Returns at once."""
        away = [str(one) for one in bootstraps if not one.is_loopback]
        if away and self.control_endpoint.is_loopback:
            text = "%s tells bootstrap %s that readers reach it at %s, which only this machine can; %s"
            fix = (
                "for readers elsewhere set PDLINK_BIND_HOST to an address of this machine, and "
                "PDLINK_ADVERTISE_HOST where others dial another one"
            )
            log.warning(text, self.rank.worker_id, ", ".join(away), self.control_endpoint, fix)
        keeper = RegistrationKeeper(self.registration(), bootstraps, self._settings, events=self.events)
        self._keeper = keeper.start()

    def wait_registered(self, timeout_s: float) -> None:
        """Wait until one bootstrap has accepted the registration. Raises its refusal, or `DeadlineExceeded`."""
        if self._keeper is None:
            raise StateError(f"prefill worker {self.rank.worker_id} was not asked to register")
        self._keeper.wait_registered(timeout_s)

    @property
    def was_told_to_register(self) -> bool:
        return self._keeper is not None

    def standing(self) -> tuple[str, bool]:
        """What is wrong with the registration, if anything, and whether that makes this process unwell."""
        text, is_unwell = self._keeper.standing() if self._keeper else ("", False)
        return f"prefill worker {self.rank.worker_id} is {text}" if text else "", is_unwell

    def open(self, transfer_id: str) -> Sender:
        """Start a request. Readers may have subscribed before.

        Raises `DuplicateTransfer` when a live request has this id, `InvalidInput` for an unusable id, `StateError`
        after `close` and when a newer process has registered under this worker's name: `LimitReached` when
        `max_transfers` are live, `PartDead` when a thread that it needs has died.
        """
        if not transfer_id or len(transfer_id.encode()) > 256:
            raise InvalidInput(f"transfer id {transfer_id[:64]!r} must have 1 to 256 bytes")
        with self._lock:
            if self._closed:
                raise StateError(f"prefill worker {self.rank.worker_id} is closed")
            if self._dead:
                raise PartDead(f"prefill worker {self.rank.worker_id} takes no requests: {self._dead.text}")
            if self._keeper and self._keeper.is_replaced:
                raise StateError(f"no reader would come any more: {self.standing()[0]}")
            now = self._loop.clock()
            self._requests.make_place(transfer_id, now)
            told = (self._sender_send(transfer_id), self._loop.clock, self._lock, self._watch.add, self._desk)
            sender = Sender(transfer_id, self._facts, *told, self._tell_end)
            self._serve(1)
            self._requests.add(sender, now)
            return sender

    def levels(self) -> dict[str, int]:
        """What there is at this moment, by name; for whoever watches this process. Any thread."""
        with self._lock:
            senders = list(self._requests)
        return {
            "requests_open": sum(not one.poll().is_final for one in senders),
            "leases_held": sum(one.holds_lease for one in senders),
        }

    def _tell_end(self, sender: Sender) -> None:
        self.events.emit("request.end", **sender.account())

    def on_death(self, death: Death) -> None:
        """A thread without which nothing can be served here has died: fail every request, tell the readers, take no
        more, and leave the directory. Any thread; returns at once."""
        with self._lock:
            if self._dead or self._closed:
                return
            self._dead = death
            for sender in self._requests:
                sender.fail(self._death_failure(death))
            self._requests.refuse_waiting(self._death_failure(death), self._loop.clock())
        if self._keeper:
            self._keeper.stop()

    def _death_failure(self, death: Death) -> Failure:
        fix = "restart the prefill process; its log has the traceback"
        return Failure(FailureReason.INTERNAL, death.text, self.rank.worker_id, fix=fix)

    def _closing_failure(self) -> Failure:
        fix = "retry the request on another instance, or when this one is back"
        text = f"prefill worker {self.rank.worker_id} is closing"
        return Failure(FailureReason.PEER_GONE, text, self.rank.worker_id, fix=fix)

    def close(self) -> None:
        """End every live request, tell readers, those too that wait for one to be opened, and the bootstrap service,
        release the backends' regions. Whoever subscribes meanwhile is refused for as long as the socket lives."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sender in self._requests:
                sender.abort(f"prefill worker {self.rank.worker_id} is closing")
            self._requests.refuse_waiting(self._closing_failure(), self._loop.clock())
        self._timer.cancel()
        self._watch.close()
        self._desk.close()
        self._digester.close()
        if self._keeper:
            self._keeper.close()
        self._server.close()
        self._serve(0)
        for region in self.rank.regions:
            for backend in self._backends.values():
                backend.deregister(region)

    # --- frames, on the loop's thread ---------------------------------------------------------------

    def _on_frame(self, route: bytes, frame: Frame) -> None:
        body = frame.body
        with self._lock:
            if self._closed:
                if isinstance(body, Subscribe):
                    self._reply(route, frame, Refused(self._closing_failure()))
                return
            if isinstance(body, Ping):
                self._server.send(route, Frame("", 0, Pong(body.nonce, self.rank.incarnation)))
            elif isinstance(body, Subscribe):
                self._on_subscribe(route, frame, body)
            elif isinstance(body, Release):
                self._requests.on_release(route, frame, body, self._loop.clock())
                self._desk.look(frame.transfer_id, frame.attempt)
            elif isinstance(body, Abort):
                self._requests.on_abort(route, frame, body, self._loop.clock())
                self._desk.look(frame.transfer_id, frame.attempt)
            elif isinstance(body, Stage):
                self._desk.on_stage(route, frame, body)
            elif isinstance(body, Credit):
                self._desk.on_credit(frame, body)
            else:
                self.events.emit("control.unexpected", worker_id=self.rank.worker_id, kind=type(body).__name__)

    def _on_subscribe(self, route: bytes, frame: Frame, body: Subscribe) -> None:
        refusal = admission.refusal(self._side, self.rank.worker_id, self.rank.incarnation, body)
        if self._dead and not refusal:
            refusal = self._death_failure(self._dead)
        now = self._loop.clock()
        if refusal:
            self._reply(route, frame, Refused(refusal))
            self.events.emit(
                "transfer.refused",
                worker_id=self.rank.worker_id,
                reason=refusal.reason.value,
                field=refusal.mismatches[0].field if refusal.mismatches else "",
            )
            if refusal.reason is FailureReason.INCOMPATIBLE:
                self._requests.on_incompatible(route, frame, body, refusal, now)
            return
        if frame.transfer_id in self._requests.senders:
            self._serve(1)
        if self._requests.on_subscribe(route, frame, body, now):
            self._desk.reroute(route, frame.transfer_id, frame.attempt)

    def _transports(self) -> dict[str, bytes]:
        """The endpoints that peers may choose from. A backend that cannot serve these regions is left out, with a
        warning; when none can, its `RegionError` is raised."""
        offered: dict[str, bytes] = {}
        refusals: list[RegionError] = []
        for name, backend in self._backends.items():
            try:
                offered[name] = backend.endpoint()
            except RegionError as error:
                refusals.append(error)
                log.warning("%s does not offer backend %s: %s", self.rank.worker_id, name, error)
        if refusals and not offered:
            raise refusals[0]
        self._offered = frozenset(offered)
        return offered

    def _staged_only(self) -> frozenset[str]:
        return frozenset(name for name in self._offered if self._backends[name].capabilities.staged_only)

    def _serve(self, num_readers: int) -> None:
        """Let engines that must be driven while they are read know."""
        for backend in self._backends.values():
            backend.serve(self.rank.worker_id, num_readers)

    def _send(self, route: bytes, frame: Frame) -> None:
        self._server.send(route, frame)

    def _reply(self, route: bytes, frame: Frame, body: Body) -> None:
        self._send(route, Frame(frame.transfer_id, frame.attempt, body))

    def _sender_send(self, transfer_id: str) -> Send:
        def send(route: bytes, attempt: int, body: Body) -> None:
            self._server.send(route, Frame(transfer_id, attempt, body))

        return send

    def _housekeep(self) -> None:
        now = self._loop.clock()
        with self._lock:
            if self._closed:
                return
            self._timer = self._loop.call_later(HOUSEKEEPING_S, self._housekeep)
            if now - self._looked > LATE_S:
                self._awake_since = now
            self._looked = now
            self._requests.expire(now, self._awake_since)
            self._desk.sweep()
            if self._requests.are_all_final:
                self._serve(0)
