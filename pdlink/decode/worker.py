"""Owns one decode rank as the link sees it: its live receives, and the path between their decisions and the sockets,
pullers and clocks that carry them out. The decisions themselves are in `merge`.

Engine calls come from any thread, frames from the control loop's, pull results from the pullers'; one lock orders them.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdlink.backends.base import Backend
from pdlink.backends.staging import Arena
from pdlink.bootstrap.messages import PROTOCOL, Endpoint, ProtocolRange, Side
from pdlink.config import Settings
from pdlink.control.frames import Abort, Frame
from pdlink.control.loop import ControlLoop
from pdlink.decode.actions import Action, Pull, Resubscribe, Send
from pdlink.decode.end_reports import EndReports
from pdlink.decode.facts import DecodeFacts
from pdlink.decode.failures import RESTART
from pdlink.decode.links import Link, LinkTable, PrefillInstance, RankLink
from pdlink.decode.live import Live
from pdlink.decode.merge import Merge
from pdlink.decode.pull_job import PullJob
from pdlink.decode.receiver import Receiver
from pdlink.decode.request import ReceiveRequest, build_request
from pdlink.decode.resolver import Resolver
from pdlink.decode.subscription import subscription
from pdlink.decode.teller import Teller
from pdlink.errors import (
    DuplicateTransfer,
    LimitReached,
    PartDead,
    PdlinkError,
    StateError,
)
from pdlink.events import Events
from pdlink.layout.components import CacheLayout
from pdlink.layout.decode_plan import DecodePlace
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region
from pdlink.threads import Death, SupervisedThread
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import ReceiverState
from pdlink.transfer.trace_parent import clean

log = logging.getLogger("pdlink.decode")

TICK_S = 0.05
LATE_S = 2.0
"""A tick that comes so much later says that this process stood still: frames of owners wait to be read."""
PULLED_FROM = (ReceiverState.SUBSCRIBED, ReceiverState.PULLING)
"""States in which a request still needs the threads that pull."""


class DecodeWorker:
    """One decode rank. `receive` starts a request. `close` twice is fine.

    `regions` is where pages land: one for each (component, layer) that the rank holds, of those that `layout` has;
    mapped until `close`. `place` says where the rank stands in its instance, and so what it holds (default: a rank
    alone, which holds all); `layout` describes its own pages, thus its own heads.
    """

    def __init__(
        self,
        instance: str,
        layout: CacheLayout,
        regions: Sequence[Region],
        settings: Settings,
        loop: ControlLoop,
        backends: Mapping[str, Backend],
        events: Events,
        protocol: ProtocolRange = PROTOCOL,
        arena: Arena | None = None,
        place: DecodePlace | None = None,
    ) -> None:
        """`arena` is where packed pages come in, if anywhere; it outlives the worker."""
        self.instance = instance
        self.layout = layout
        self.events = events
        self._facts = DecodeFacts(layout, tuple(regions), place or DecodePlace())
        self._settings = settings
        self._loop = loop
        self._backends = backends
        self._side = Side.of(layout, protocol)
        self._lock = threading.RLock()
        self._live: dict[tuple[str, int], Live] = {}
        self._newest: dict[str, Live] = {}
        self._ends = EndReports(instance, loop, self._lock, events)
        self._closed = False
        self._quiet = True
        for region in self._facts.regions:
            for backend in backends.values():
                backend.register(region)
        told = (self._on_frame, self._on_replaced, self._on_dead_puller)
        self._links = LinkTable(self._facts, self._side, settings, loop, backends, events, *told, arena, self.part)
        found = (self._start, self._unresolved, self._tell)
        self._resolver = Resolver(self._links, self._lock, events, self.part, *found)
        self._ticked = loop.clock()
        self._teller = Teller(settings, loop, self._lock)
        self._timer = loop.call_later(TICK_S, self._tick)
        loop.on_death(self._on_dead_loop)

    @property
    def part(self) -> str:
        """What threads of this worker belong to, by the name that health and logs know."""
        return f"decode {self.instance}"

    @property
    def num_receives(self) -> int:
        """Requests that run, or still say goodbye to an owner."""
        return len(self._live)

    @property
    def is_quiet(self) -> bool:
        """After `close`: whether nothing can land in memory of this process any more."""
        return self._quiet

    def receive(
        self,
        transfer_id: str,
        prefill: PrefillInstance,
        pages: Mapping[str, Sequence[int] | Int64Array],
        num_tokens: int,
        *,
        prefix_tokens: int = 0,
        readers: ReaderSet | None = None,
        dp: int = 0,
        expect_aux: bool = False,
        trace_parent: str = "",
    ) -> Receiver:
        """Pull the cache of one prompt into `pages` (page group -> page ids of this rank's pool).

        Returns at once; nothing here blocks. Tokens [0, prefix_tokens) are held already, and pages are wanted from
        the first one that is not complete. With several decode ranks of one request, `readers` says which one this is
        (default: as its place says, for which all of them have one instance name). Where ranks share tokens, a page is
        that of dcp times its tokens. `trace_parent` is the W3C trace context that this request's spans belong to; what
        is none is ignored.
        Raises `InvalidInput` for pages that do not fit the tokens or the pool, `DuplicateTransfer` while another
        receive of this id runs, `StateError` after `close`: `LimitReached` when `max_transfers` are live, `PartDead`
        when a thread that it needs has died.
        """
        place = self._facts.place
        readers = readers or place.readers(self.instance)
        request = build_request(
            self.layout,
            transfer_id,
            pages,
            num_tokens,
            prefix_tokens=prefix_tokens,
            readers=readers,
            dp=dp,
            expect_aux=expect_aux,
            turns=place.sizes.dcp,
            pool_pages=self._facts.pool_pages,
        )
        with self._lock:
            live = self._admit(request, prefill)
            live.trace_parent = clean(trace_parent)
            link = self._links.take(prefill)
            if link:
                self._start(live, link)
            else:
                self._resolver.resolve_soon(live)
        return live.receiver

    def explain(self, prefill: PrefillInstance) -> dict[str, str]:
        """Worker id -> how the newest pull from that rank moved and why, where there was one."""
        link = self._links.known(prefill)
        told = {worker_id: one.puller.ways.explain() for worker_id, one in link.ranks.items()} if link else {}
        return {worker_id: text for worker_id, text in told.items() if text}

    def close(self) -> None:
        """Abort every live request, wait for their pulls to be quiet, and end the threads.

        Where a backend does not return in time, the requests it serves stay unfinished and its regions registered.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._resolver.stop()
            for live in list(self._live.values()):
                cause = Failure(FailureReason.ABORTED, f"decode worker {self.instance} is closing")
                live.merge.fail(cause, self._loop.clock())
                self._act(live)
        self._timer.cancel()
        self._resolver.close()
        quiet = self._quiet = self._links.close()
        with self._lock:
            for live in list(self._live.values()):
                if quiet:
                    self._bury(live)
                self._end_alone(live)
                if not live.merge.state.is_final:  # its pages may still be written, so that they are nobody else's
                    text = "transfer %s stays %s: pulls from %s are not quiet"
                    log.error(text, live.receiver.transfer_id, live.merge.state, ", ".join(live.merge.pulling()))
            self._ends.all_now()
        for region in self._facts.regions if quiet else ():
            for backend in self._backends.values():
                backend.deregister(region)

    # --- start --------------------------------------------------------------------------------------

    def _admit(self, request: ReceiveRequest, prefill: PrefillInstance) -> Live:
        if self._closed:
            raise StateError(f"decode worker {self.instance} is closed")
        if death := self._loop.death:
            raise PartDead(f"decode worker {self.instance} takes no requests: {death.text}")
        newest = self._newest.get(request.transfer_id)
        if newest and not newest.merge.state.is_final:
            raise DuplicateTransfer(
                f"transfer {request.transfer_id!r} is {newest.merge.state} on {self.instance} already; give every live "
                "request an id of its own"
            )
        if len(self._live) >= self._settings.max_transfers:
            raise LimitReached(f"{len(self._live)} transfers are live (PDLINK_MAX_TRANSFERS)")
        attempt = secrets.randbits(63) | 1
        key = request.transfer_id, attempt
        merge = Merge(request, self._settings, self._loop.clock(), lambda worker_id: self._place(key, worker_id))
        live = Live(merge, Receiver(*key, self._abort, self._waits_for), prefill)
        self._live[key] = self._newest[request.transfer_id] = live
        return live

    def _start(self, live: Live, link: Link) -> None:
        """With a link that was taken for it."""
        live.link = link
        if death := self._links.death_in(link):
            failure = Failure(FailureReason.INTERNAL, death.text, fix=RESTART)
            live.merge.on_unresolved(failure, self._loop.clock())
            self._act(live)
            return
        began = time.perf_counter()
        try:
            plan = link.plan(live.merge.request.dp)
            live.plan_s = time.perf_counter() - began
        except PdlinkError as error:
            live.merge.on_unresolved(Failure(FailureReason.PLAN, str(error)), self._loop.clock())
        else:
            live.merge.on_resolved(plan, self._loop.clock())
        self._act(live)

    def _unresolved(self, lives: Sequence[Live], failure: Failure) -> None:
        for live in lives:
            live.merge.on_unresolved(failure, self._loop.clock())
            self._act(live)

    def _tell(self, live: Live, cause: Failure, endpoints: Sequence[Endpoint]) -> None:
        """Make an incompatible prefill side fail too: each rank checks the same two sides and refuses.

        The abort is for differences that only this side can see.
        """
        body = subscription(live, self._side, self._backends, 0, 0)
        for one in endpoints:
            told = replace(body, incarnation=one.incarnation, fingerprint=self._side.fingerprint)
            self._teller.tell(one, [live.frame(said) for said in (told, Abort(cause, told.readers))])

    # --- events -------------------------------------------------------------------------------------

    def _on_frame(self, worker_id: str, frame: Frame) -> None:
        with self._lock:
            live = self._live.get((frame.transfer_id, frame.attempt))
            if live is None:
                self.events.emit("control.stray", worker_id=worker_id, kind=type(frame.body).__name__)
                return
            if not live.dispatch(worker_id, frame.body, self._loop.clock()):
                self.events.emit("control.unexpected", worker_id=worker_id, kind=type(frame.body).__name__)
            self._act(live)

    def _on_pulled(self, live: Live, pull: Pull, failure: Failure | None) -> None:
        with self._lock:
            live.on_pulled(pull.worker_id, pull.ticket, failure, self._loop.clock())
            self._act(live)
            if self._loop.death:
                self._end_alone(live)

    def _on_pull_failing(self, live: Live, pull: Pull, failure: Failure) -> None:
        with self._lock:
            live.merge.on_pull_failing(pull.worker_id, failure, self._loop.clock())
            self._act(live)

    def _on_replaced(self, instance: PrefillInstance, incarnations: Mapping[str, int]) -> None:
        """These processes carry the ranks of an instance now: requests that still need older ones cannot succeed."""
        with self._lock:
            for live in [one for one in self._live.values() if one.instance == instance]:
                for worker_id, incarnation in incarnations.items():
                    live.merge.on_incarnation(worker_id, incarnation, self._loop.clock())
                self._act(live)

    def _abort(self, receiver: Receiver, text: str) -> None:
        with self._lock:
            live = self._live.get((receiver.transfer_id, receiver.attempt))
            if live:
                live.merge.fail(Failure(FailureReason.ABORTED, text), self._loop.clock())
                self._act(live)

    def _place(self, key: tuple[str, int], worker_id: str) -> str:
        live = self._live.get(key)
        return self._links.place(live.instance, live.link, worker_id) if live and live.link else ""

    def _waits_for(self, receiver: Receiver) -> list[str]:
        with self._lock:
            live = self._live.get((receiver.transfer_id, receiver.attempt))
            return live.merge.waits_for() if live else []

    def _tick(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._timer = self._loop.call_later(TICK_S, self._tick)
            now = self._loop.clock()
            stood_still_s, self._ticked = now - self._ticked, now
            for live in list(self._live.values()):
                try:
                    if stood_still_s > LATE_S:
                        live.merge.excuse(stood_still_s)
                    self._bury(live)
                    live.merge.tick(now)
                    self._act(live)
                except Exception:  # a bug of ours in one request must not stop the clock of the others
                    log.exception("transfer %s could not be looked at", live.receiver.transfer_id)
            self._links.sweep()

    # --- threads that died --------------------------------------------------------------------------

    def _on_dead_puller(self, link: RankLink, death: Death) -> None:
        """On the dying thread, when its own pulls were told of: whoever still needs it fails too."""
        cause = Failure(FailureReason.INTERNAL, death.text, link.rank.worker_id, fix=RESTART)
        with self._lock:
            for live in list(self._live.values()):
                ranks = live.link.ranks if live.link else {}
                if ranks.get(link.rank.worker_id) is link and live.merge.state in PULLED_FROM:
                    live.merge.fail(cause, self._loop.clock())
                    self._act(live)

    def _on_dead_loop(self, death: Death) -> None:
        """On the dying thread, whose last frames tell the owners. Nothing is heard or timed from now on, so what is
        quiet ends now, and the rest when its pulls are."""
        with self._lock:
            for live in list(self._live.values()):
                live.merge.fail(Failure(FailureReason.INTERNAL, death.text, fix=RESTART), self._loop.clock())
                self._act(live)
                self._end_alone(live)
            self._ends.all_now()

    def _bury(self, live: Live) -> None:
        """Wait no longer for the report of a pull whose puller is over: its thread has ended, and its wire with it."""
        for worker_id in live.merge.pulling():
            if live.link and live.link.ranks[worker_id].puller.is_over:
                live.merge.on_puller_over(worker_id, self._loop.clock())

    def _end_alone(self, live: Live) -> None:
        """End without the answers of the owners, which nobody would hear."""
        live.merge.tick(self._loop.clock() + self._settings.abort_ack_timeout_s)
        self._show(live)

    # --- actions, under the lock --------------------------------------------------------------------

    def _act(self, live: Live) -> None:
        while actions := live.merge.drain():
            for action in actions:
                try:
                    self._carry_out(live, action)
                except Exception as error:  # a bug of ours: it ends this request, and hides no other action
                    log.exception("transfer %s: %s failed", live.receiver.transfer_id, type(action).__name__)
                    self._give_up(live, action, Failure(FailureReason.INTERNAL, f"{type(error).__name__}: {error}"))
        self._show(live)

    def _give_up(self, live: Live, action: Action, cause: Failure) -> None:
        now = self._loop.clock()
        if isinstance(action, Pull):  # it was not begun, and nobody else would report it
            live.merge.on_pulled(action.worker_id, action.ticket, cause, now)
        else:
            live.merge.fail(cause, now)

    def _carry_out(self, live: Live, action: Action) -> None:
        if isinstance(action, Pull):
            self._submit(live, action)
        elif isinstance(action, Resubscribe):
            assert live.link is not None
            incarnation = live.link.ranks[action.worker_id].rank.incarnation
            told = (incarnation, action.next_sequence, action.worker_id)
            live.send(action.worker_id, subscription(live, self._side, self._backends, *told))
        elif isinstance(action, Send):
            live.send(action.worker_id, action.body)
        else:
            live.stop.set()

    def _submit(self, live: Live, pull: Pull) -> None:
        assert live.link is not None
        link = live.link.ranks[pull.worker_id]
        regions: tuple[Region, ...] = ()
        if pull.digests is not None:
            regions = tuple(self._facts.region_of[cell] for cell in pull.cells)
        link.puller.submit(
            PullJob(
                pull,
                regions,
                live.stop,
                lambda failure: self._on_pull_failing(live, pull, failure),
                lambda failure: self._on_pulled(live, pull, failure),
                live.key,
                lambda *bodies: live.send(pull.worker_id, *bodies),
                live.ahead_of(pull),
            )
        )

    def _show(self, live: Live) -> None:
        """Make the merge's state visible to the engine, once per change, and forget what is settled."""
        if live.show() and live.merge.state.is_final:
            if live.receiver.has_callbacks and not self._loop.call_soon(live.receiver.call_back):
                # The loop has died. Not here, under the lock: what is called back may want another thread's help.
                SupervisedThread(live.receiver.call_back, "pdlink-call-back", self.part, events=self.events).start()
            if live.merge.failure and live.merge.failure.reason in (FailureReason.STALE, FailureReason.PEER_GONE):
                self._links.forget(live.instance)
            self._ends.add(live)
        if live.merge.is_settled:
            if self._live.pop(live.key, None) and live.link:
                self._links.give_back(live.link)
            if self._newest.get(live.receiver.transfer_id) is live:
                del self._newest[live.receiver.transfer_id]

    def levels(self) -> dict[str, int]:
        """What there is at this moment, by name; for whoever watches this process. Any thread."""
        with self._lock:
            states = Counter(live.merge.state.value for live in self._live.values() if not live.merge.state.is_final)
            pages = sum(live.merge.quarantined_pages() for live in self._live.values())
        told = {f"transfers_{state.value}": states[state.value] for state in ReceiverState if not state.is_final}
        return told | {"pages_quarantined": pages} | self._links.levels()
