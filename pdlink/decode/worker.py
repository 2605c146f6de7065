"""Owns one decode rank as the link sees it: its live receives, and the path between their decisions and the sockets,
pullers and clocks that carry them out. The decisions themselves are in `merge`.

Engine calls come from any thread, frames from the control loop's, pull results from the pullers'; one lock orders them.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pdlink.backends.base import Backend
from pdlink.backends.staging import Arena
from pdlink.bootstrap.messages import PROTOCOL, Endpoint, ProtocolRange, Side
from pdlink.bootstrap.refusals import IncompatibleInstance
from pdlink.config import Settings
from pdlink.control.frames import Abort, Frame, Subscribe
from pdlink.control.loop import ControlLoop
from pdlink.decode.actions import Action, Pull, Resubscribe, Send
from pdlink.decode.links import Link, LinkTable, PrefillInstance
from pdlink.decode.live import Live
from pdlink.decode.merge import Merge
from pdlink.decode.puller import PullJob
from pdlink.decode.receiver import Receiver
from pdlink.decode.request import ReceiveRequest, build_request
from pdlink.errors import (
    DeadlineExceeded,
    DuplicateTransfer,
    IncompatibleError,
    NotReady,
    PdlinkError,
    StateError,
)
from pdlink.events import Events
from pdlink.layout.components import CacheLayout
from pdlink.layout.readers import ReaderSet
from pdlink.layout.regions import Region, check_region
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.failure import Failure, FailureReason

log = logging.getLogger("pdlink.decode")

TICK_S = 0.05
RESOLVE_THREADS = 16
RESOLVE_ATTEMPTS = 3


class DecodeWorker:
    """One decode rank. `receive` starts a request. `close` twice is fine.

    `regions` is where pages land: one for each (component, layer) that `layout` has; mapped until `close`.
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
    ) -> None:
        """`arena` is where packed pages come in, if anywhere; it outlives the worker."""
        self.instance = instance
        self.layout = layout
        self.events = events
        self._regions = tuple(regions)
        self._region_of = {(region.component, region.layer): region for region in regions}
        self._settings = settings
        self._loop = loop
        self._backends = backends
        self._side = Side.of(layout, protocol)
        self._lock = threading.RLock()
        self._live: dict[tuple[str, int], Live] = {}
        self._newest: dict[str, Live] = {}
        self._closed = False
        self._quiet = True
        for region in self._regions:
            check_region(region, layout)
            for backend in backends.values():
                backend.register(region)
        self._pool_pages = _pool_pages(layout, self._regions)
        told = (self._on_frame, self._on_replaced)
        self._links = LinkTable(layout, self._side, settings, loop, backends, events, *told, arena)
        self._resolvers = ThreadPoolExecutor(RESOLVE_THREADS, thread_name_prefix="pdlink-resolve")
        self._timer = loop.call_later(TICK_S, self._tick)

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
    ) -> Receiver:
        """Pull the cache of one prompt into `pages` (page group -> page ids of this rank's pool).

        Returns at once; nothing here blocks. Tokens [0, prefix_tokens) are held already, and pages are wanted from
        the first one that is not complete. With several decode ranks of one request, `readers` says which one this is.
        Raises `InvalidInput` for pages that do not fit the tokens or the pool, `DuplicateTransfer` while another
        receive of this id runs, `StateError` after `close` or when `max_transfers` are live.
        """
        readers = readers or ReaderSet(self.instance)
        request = build_request(
            self.layout,
            transfer_id,
            pages,
            num_tokens,
            prefix_tokens=prefix_tokens,
            readers=readers,
            dp=dp,
            expect_aux=expect_aux,
            pool_pages=self._pool_pages,
        )
        with self._lock:
            live = self._admit(request, prefill)
            link = self._links.known(prefill)
            if link:
                self._start(live, link)
            else:
                self._resolvers.submit(self._resolve, live)
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
            for live in list(self._live.values()):
                cause = Failure(FailureReason.ABORTED, f"decode worker {self.instance} is closing")
                live.merge.fail(cause, self._loop.clock())
                self._act(live)
        self._timer.cancel()
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        quiet = self._quiet = self._links.close()
        with self._lock:
            for live in list(self._live.values()):
                live.merge.tick(self._loop.clock() + self._settings.abort_ack_timeout_s)
                self._show(live)
        for region in self._regions if quiet else ():
            for backend in self._backends.values():
                backend.deregister(region)

    # --- start --------------------------------------------------------------------------------------

    def _admit(self, request: ReceiveRequest, prefill: PrefillInstance) -> Live:
        if self._closed:
            raise StateError(f"decode worker {self.instance} is closed")
        newest = self._newest.get(request.transfer_id)
        if newest and not newest.merge.state.is_final:
            raise DuplicateTransfer(
                f"transfer {request.transfer_id!r} is {newest.merge.state} on {self.instance} already; give every live "
                "request an id of its own"
            )
        if len(self._live) >= self._settings.max_transfers:
            raise StateError(f"{len(self._live)} transfers are live (PDLINK_MAX_TRANSFERS)")
        attempt = secrets.randbits(63) | 1
        merge = Merge(request, self._settings, self._loop.clock())
        live = Live(merge, Receiver(request.transfer_id, attempt, self._abort), prefill)
        self._live[request.transfer_id, attempt] = self._newest[request.transfer_id] = live
        return live

    def _resolve(self, live: Live) -> None:
        """On a resolver thread: find the instance and start, or fail the request with the reason."""
        try:
            for _ in range(RESOLVE_ATTEMPTS):
                self._links.resolve(live.instance)
                with self._lock:
                    # Again under the lock: a link that a watch replaced meanwhile may be closed already.
                    link = self._links.known(live.instance)
                    if link or self._closed:
                        return self._start(live, link) if link else None
            raise NotReady(f"prefill instance {live.instance.name!r} came and went while it was resolved")
        except IncompatibleError as error:
            cause = Failure.incompatible(error.mismatches, live.instance.name, "resolving")
            self._unresolved(live, cause)
            if isinstance(error, IncompatibleInstance):
                self._tell(live, cause, error.endpoints)
        except DeadlineExceeded as error:
            self._unresolved(live, Failure(FailureReason.TIMEOUT, str(error)))
        except NotReady as error:
            self._unresolved(live, Failure(FailureReason.NOT_READY, str(error)))
        except PdlinkError as error:
            self._unresolved(live, Failure(FailureReason.PEER_GONE, str(error)))
        except Exception as error:  # a thread boundary: the request must learn of it
            log.exception("resolve of %s failed", live.instance.name)
            self._unresolved(live, Failure(FailureReason.INTERNAL, f"{type(error).__name__}: {error}"))

    def _start(self, live: Live, link: Link) -> None:
        live.link = link
        try:
            plan = link.plan(live.merge.request.dp, self.layout, self._regions)
        except PdlinkError as error:
            live.merge.on_unresolved(Failure(FailureReason.PLAN, str(error)), self._loop.clock())
        else:
            live.merge.on_resolved(plan, self._loop.clock())
        self._act(live)

    def _unresolved(self, live: Live, failure: Failure) -> None:
        with self._lock:
            live.merge.on_unresolved(failure, self._loop.clock())
            self._act(live)

    def _tell(self, live: Live, cause: Failure, endpoints: Sequence[Endpoint]) -> None:
        """Make an incompatible prefill side fail too: each rank checks the same two sides and refuses.

        The abort is for differences that only this side can see.
        """
        body = self._subscribe(live, 0, 0)
        for one in endpoints:
            channel = self._loop.connect(one.control_endpoint, lambda frame: None)
            told = replace(body, incarnation=one.incarnation, fingerprint=self._side.fingerprint)
            for said in (told, Abort(cause, told.readers)):
                channel.send(live.frame(said))
            self._loop.call_later(self._settings.confirm_timeout_s, channel.close)

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

    def _tick(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._timer = self._loop.call_later(TICK_S, self._tick)
            for live in list(self._live.values()):
                try:
                    live.merge.tick(self._loop.clock())
                    self._act(live)
                except Exception:  # a bug of ours in one request must not stop the clock of the others
                    log.exception("transfer %s could not be looked at", live.receiver.transfer_id)
            # Under the lock: a request that starts now must not find its link closed.
            self._links.sweep([live.link for live in self._live.values() if live.link])

    # --- actions, under the lock --------------------------------------------------------------------

    def _act(self, live: Live) -> None:
        for action in live.merge.drain():
            self._carry_out(live, action)
        self._show(live)

    def _carry_out(self, live: Live, action: Action) -> None:
        if isinstance(action, Pull):
            self._submit(live, action)
        elif isinstance(action, Resubscribe):
            assert live.link is not None
            incarnation = live.link.ranks[action.worker_id].rank.incarnation
            live.send(action.worker_id, self._subscribe(live, incarnation, action.next_sequence))
        elif isinstance(action, Send):
            live.send(action.worker_id, action.body)
        else:
            live.stop.set()

    def _submit(self, live: Live, pull: Pull) -> None:
        assert live.link is not None
        link = live.link.ranks[pull.worker_id]
        regions: tuple[Region, ...] = ()
        if pull.digests is not None:
            cells = live.link.plan(live.merge.request.dp, self.layout, self._regions).planner.groups[pull.group].cells
            regions = tuple(self._region_of[cells[row]] for row in pull.rows.tolist())
        link.puller.submit(
            PullJob(
                pull,
                regions,
                live.stop,
                lambda failure: self._on_pull_failing(live, pull, failure),
                lambda failure: self._on_pulled(live, pull, failure),
                live.key,
                lambda body: live.send(pull.worker_id, body),
            )
        )

    def _subscribe(self, live: Live, incarnation: int, next_sequence: int) -> Subscribe:
        return Subscribe(
            self._side.protocol,
            self._side.fingerprint.digest,
            live.merge.request.readers,
            incarnation,
            live.merge.request.spans(),
            next_sequence,
            tuple(self._backends),
        )

    def _show(self, live: Live) -> None:
        """Make the merge's state visible to the engine, once per change, and forget what is settled."""
        if live.show() and live.merge.state.is_final:
            self._loop.call_soon(live.receiver.call_back)
            self._report(live)
        if live.merge.is_settled:
            self._live.pop(live.key, None)
            if self._newest.get(live.receiver.transfer_id) is live:
                del self._newest[live.receiver.transfer_id]

    def _report(self, live: Live) -> None:
        merge = live.merge
        total = sum(merge.num_bytes.values())
        if merge.failure:
            log.warning("transfer %s %s: %s", live.receiver.transfer_id, merge.state, merge.failure)
            if merge.failure.reason in (FailureReason.STALE, FailureReason.PEER_GONE):
                self._links.forget(live.instance)
        else:
            log.info("transfer %s done: %d bytes in %.1f ms", live.receiver.transfer_id, total, merge.elapsed_s * 1e3)
        self.events.emit(
            "transfer.end",
            transfer_id=live.receiver.transfer_id,
            state=merge.state.value,
            reason=merge.failure.reason.value if merge.failure else "",
            num_bytes=total,
            elapsed_s=merge.elapsed_s,
        )


def _pool_pages(layout: CacheLayout, regions: Sequence[Region]) -> dict[str, int]:
    """Pages that every region of a group has."""
    pages: dict[str, int] = {}
    for region in regions:
        group = layout.component(region.component).page_group
        pages[group] = min(pages.get(group, region.num_pages), region.num_pages)
    return pages
