"""Owns one prefill rank as the link sees it: its registration, its control socket and its live requests.

It holds no request's state (see `sender`) and moves no byte: decode pulls. Frames come in on the control loop's thread;
engine calls come from any thread; one lock orders them.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdlink.address import Address, advertised
from pdlink.backends.base import Backend
from pdlink.backends.page_digests import PageDigests
from pdlink.backends.staging import Arena
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.messages import PROTOCOL, ProtocolRange, RankInfo, Registration, Side
from pdlink.config import Settings
from pdlink.control.curve import make_keys
from pdlink.control.frames import (
    Abort,
    AbortAck,
    Body,
    Credit,
    Frame,
    Ping,
    Pong,
    Refused,
    Release,
    Stage,
    Subscribe,
    Subscribed,
    Verdict,
)
from pdlink.control.loop import ControlLoop
from pdlink.errors import (
    DuplicateTransfer,
    InvalidInput,
    LayoutError,
    LimitReached,
    PartDead,
    RegionError,
    StateError,
)
from pdlink.events import Events
from pdlink.layout.components import CacheLayout
from pdlink.layout.election import may_send_aux
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.layer_plan import OwnedLayers, PlanKind
from pdlink.layout.parallel import ParallelSizes, RankCoordinates
from pdlink.layout.parts import part_of
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region, check_region
from pdlink.prefill import admission
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.early import Early
from pdlink.prefill.early_book import EarlyBook
from pdlink.prefill.leases import AnswerBook, ExpiringBook
from pdlink.prefill.ready_watch import ReadyWatch
from pdlink.prefill.sender import Send, Sender
from pdlink.prefill.stage_desk import StageDesk
from pdlink.threads import Death
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.prefill")

HOUSEKEEPING_S = 0.25
LATE_S = 2.0
"""Housekeeping that comes so much later says that this process stood still: frames of readers wait to be read."""


@dataclass(frozen=True)
class PrefillRank:
    """What an engine says of one prefill rank.

    `owned` and `regions` must agree: one region for each owned (component, layer), none for others; their memory stays
    mapped until the worker is closed. `kinds` says per component whether the instance splits or replicates it.
    """

    instance: str
    layout: CacheLayout
    sizes: ParallelSizes
    rank: RankCoordinates
    kinds: Mapping[str, PlanKind]
    owned: OwnedLayers
    regions: Sequence[Region]
    protocol: ProtocolRange = PROTOCOL
    incarnation: int = field(default_factory=time.time_ns)

    @property
    def worker_id(self) -> str:
        return f"{self.instance}/{self.rank}"


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
        self._facts = _facts(rank, settings, self._digester)
        self._watch = ReadyWatch(rank.worker_id, events)
        self._senders: dict[str, Sender] = {}
        self._early = EarlyBook(settings.publication_lease_s, settings.max_transfers)
        self._answers: AnswerBook = ExpiringBook(settings.verdict_ttl_s, settings.max_transfers)
        self._strays: AnswerBook = ExpiringBook(settings.verdict_ttl_s, settings.max_transfers)
        """Answers about requests that nobody has opened: a flood of those pushes out no verdict that counts."""
        self._closed = False
        self._looked = self._awake_since = loop.clock()
        for region in rank.regions:
            for backend in backends.values():
                backend.register(region)
        find, answers = self._senders.get, self._answers
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
        return len(self._senders)

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
            known = self._senders.get(transfer_id)
            if known and not known.poll().is_final:
                raise DuplicateTransfer(
                    f"transfer {transfer_id!r} is {known.poll()} on {self.rank.worker_id} already; give every live "
                    "request an id of its own"
                )
            now = self._loop.clock()
            if known:
                self._forget(known, now)
            self._make_room(now)
            told = (self._sender_send(transfer_id), self._loop.clock, self._lock, self._watch.add, self._desk)
            sender = Sender(transfer_id, self._facts, *told, self._tell_end)
            self._senders[transfer_id] = sender
            self._serve(1)
            early = self._early.take(transfer_id, now)
            if early:
                self._replay(sender, early, now)
            return sender

    def levels(self) -> dict[str, int]:
        """What there is at this moment, by name; for whoever watches this process. Any thread."""
        with self._lock:
            senders = list(self._senders.values())
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
            for sender in self._senders.values():
                sender.fail(self._death_failure(death))
            self._refuse_early(self._death_failure(death))
        if self._keeper:
            self._keeper.stop()

    def _death_failure(self, death: Death) -> Failure:
        fix = "restart the prefill process; its log has the traceback"
        return Failure(FailureReason.INTERNAL, death.text, self.rank.worker_id, fix=fix)

    def _closing_failure(self) -> Failure:
        fix = "retry the request on another instance, or when this one is back"
        text = f"prefill worker {self.rank.worker_id} is closing"
        return Failure(FailureReason.PEER_GONE, text, self.rank.worker_id, fix=fix)

    def _refuse_early(self, cause: Failure) -> None:
        """Under the lock: tell those that wait for a request which is not to be opened any more."""
        for transfer_id, (route, attempt, body) in self._early.take_all(self._loop.clock()):
            if isinstance(body, Subscribe):
                self._send(route, Frame(transfer_id, attempt, Refused(cause)))

    def close(self) -> None:
        """End every live request, tell readers, those too that wait for one to be opened, and the bootstrap service,
        release the backends' regions. Whoever subscribes meanwhile is refused for as long as the socket lives."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sender in self._senders.values():
                sender.abort(f"prefill worker {self.rank.worker_id} is closing")
            self._refuse_early(self._closing_failure())
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
                self._on_release(route, frame, body)
                self._desk.look(frame.transfer_id, frame.attempt)
            elif isinstance(body, Abort):
                self._on_abort(route, frame, body)
                self._desk.look(frame.transfer_id, frame.attempt)
            elif isinstance(body, Stage):
                self._desk.on_stage(route, frame, body)
            elif isinstance(body, Credit):
                self._desk.on_credit(frame, body)
            else:
                self.events.emit("control.unexpected", worker_id=self.rank.worker_id, kind=type(body).__name__)

    def _on_subscribe(self, route: bytes, frame: Frame, body: Subscribe) -> None:
        sender = self._senders.get(frame.transfer_id)
        refusal = admission.refusal(self._side, self.rank.worker_id, self.rank.incarnation, body)
        if self._dead and not refusal:
            refusal = self._death_failure(self._dead)
        if sender and not refusal:
            self._serve(1)
        if refusal:
            self._reply(route, frame, Refused(refusal))
            self.events.emit(
                "transfer.refused",
                worker_id=self.rank.worker_id,
                reason=refusal.reason.value,
                field=refusal.mismatches[0].field if refusal.mismatches else "",
            )
            if refusal.reason is FailureReason.INCOMPATIBLE:
                self._refuse(route, frame, body, sender, refusal)
            return
        known = self._answer_to((frame.transfer_id, frame.attempt), self._loop.clock())
        if known:  # it is over: a late duplicate, or it does not know yet that it will be denied
            if isinstance(known, Verdict) and known.cause:
                self._reply(route, frame, Refused(known.cause))
            return
        if sender and sender.must_wait(body.readers, frame.attempt):
            self._keep_early(route, frame, body)
        if sender and not sender.is_over_for(body.readers, frame.attempt):
            sender.on_subscribe(route, frame.attempt, body)
            self._desk.reroute(route, frame.transfer_id, frame.attempt)
            return
        self._keep_early(route, frame, body)
        self._reply(route, frame, Subscribed(self.rank.incarnation, 0, False))

    def _on_release(self, route: bytes, frame: Frame, body: Release) -> None:
        key = (frame.transfer_id, frame.attempt)
        now = self._loop.clock()
        known = self._answer_to(key, now)
        sender = self._senders.get(frame.transfer_id)
        is_later = sender is None or _means_later(sender, body.readers, frame.attempt)
        if known:
            self._reply(route, frame, known)
        elif sender and (body.pulled or not (is_later or sender.poll().is_final)):
            self._answers.put(key, sender.on_release(route, frame.attempt, body), now)
        else:
            verdict = admission.verdict_without_request(self.rank.worker_id, body)
            (self._answers if sender else self._strays).put(key, verdict, now)
            self._reply(route, frame, verdict)
            if verdict.unchanged and is_later:
                self._keep_early(route, frame, body)

    def _on_abort(self, route: bytes, frame: Frame, body: Abort) -> None:
        key = (frame.transfer_id, frame.attempt)
        now = self._loop.clock()
        sender = self._senders.get(frame.transfer_id)
        known = self._answer_to(key, now)
        if known:  # it is over, so it has no say in a later request of this id
            if isinstance(known, Verdict) and known.cause:
                self._answers.put(key, AbortAck(), now)  # it knows now, and need not be told again
            self._reply(route, frame, AbortAck())
            return
        (self._answers if sender else self._strays).put(key, AbortAck(), now)
        if sender:
            self._early.drop(frame.transfer_id, body.readers, frame.attempt)  # it waited for that before it to end
        if sender and not sender.poll().is_final:
            sender.on_abort(route, frame.attempt, body)
            return
        self._reply(route, frame, AbortAck())
        if sender is None or sender.is_over_for(body.readers, frame.attempt):
            self._keep_early(route, frame, body)

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

    def _refuse(self, route: bytes, frame: Frame, body: Subscribe, sender: Sender | None, refusal: Failure) -> None:
        """Fail this end too: the open request, or the one that the engine will open."""
        if sender:
            sender.stop(body.readers, frame.attempt, refusal)
        else:
            self._keep_early(route, frame, Abort(refusal, body.readers))

    def _keep_early(self, route: bytes, frame: Frame, body: Subscribe | Release | Abort) -> None:
        self._early.keep(frame.transfer_id, route, frame.attempt, body, self._loop.clock())

    def _replay(self, sender: Sender, early: Early, now: float) -> None:
        for route, attempt, body in early.in_order(now - self._settings.liveness_timeout_s):
            if isinstance(body, Release):
                sender.on_release(route, attempt, body)
            elif isinstance(body, Abort):
                sender.stop(body.readers, attempt, body.cause)
            elif not self._answer_to((sender.transfer_id, attempt), now):
                sender.on_subscribe(route, attempt, body)

    def _answer_to(self, key: tuple[str, int], now: float) -> Verdict | AbortAck | None:
        """How that attempt ended here, where it has. Its frames are known for what they are as long as they come."""
        return self._answers.renew(key, now) or self._strays.renew(key, now)

    def _make_room(self, now: float) -> None:
        """Forget requests that ended, the oldest first, when there are too many. Raises `StateError` if all live."""
        if len(self._senders) < self._settings.max_transfers:
            return
        ended = next((one for one in self._senders.values() if one.poll().is_final), None)
        if ended is None:
            raise LimitReached(f"{len(self._senders)} transfers are live (PDLINK_MAX_TRANSFERS)")
        self._forget(ended, now)

    def _forget(self, sender: Sender, now: float) -> None:
        """Let go of a request that ended. What its attempts still send must not reach a later one of the same id."""
        del self._senders[sender.transfer_id]
        text = f"transfer {sender.transfer_id!r} has ended here ({sender.poll()})"
        ended = sender.failure or Failure(FailureReason.STALE, text, self.rank.worker_id)
        for attempt in sender.attempts():
            key = (sender.transfer_id, attempt)
            if not self._answers.get(key, now):
                self._answers.put(key, Verdict(False, ended), now)

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
            for sender in list(self._senders.values()):
                sender.expire(now, self._awake_since)
                if sender.ended_at is not None and now - sender.ended_at > self._settings.verdict_ttl_s:
                    self._forget(sender, now)
            self._desk.sweep()
            if all(sender.poll().is_final for sender in self._senders.values()):
                self._serve(0)
            self._early.expire(now)
            self._answers.expire(now)
            self._strays.expire(now)


def _means_later(sender: Sender, readers: ReaderSet, attempt: int) -> bool:
    """Whether `attempt` speaks of a request that the engine has not opened yet, though one of that id is here."""
    return sender.is_over_for(readers, attempt) or sender.must_wait(readers, attempt)


def _facts(rank: PrefillRank, settings: Settings, digester: PageDigests) -> RankFacts:
    held: dict[tuple[str, int], Region] = {}
    for region in rank.regions:
        check_region(region, rank.layout)
        held[region.component, region.layer] = region
    for name, ids in rank.owned.items():
        missing = [layer for layer in ids if (name, layer) not in held]
        if missing:
            raise LayoutError(f"{rank.worker_id} owns {name!r} layers {missing} but gives no region for them")
    rank.sizes.check(rank.rank)
    return RankFacts(
        rank.worker_id,
        rank.incarnation,
        rank.layout,
        rank.owned,
        held,
        may_send_aux(rank.layout, rank.owned, rank.rank),
        settings.max_aux_bytes,
        settings.publication_lease_s,
        settings.liveness_timeout_s,
        digester.choose(settings.digest_kind, rank.regions) if settings.verify_digests else None,
        # Generations of two lives of a worker never meet, because each counts from somewhere else.
        itertools.count(secrets.randbits(62)),
        digester,
        {one.name: part_of(one, rank.rank.tp, rank.sizes.tp) for one in rank.layout.components},
    )
