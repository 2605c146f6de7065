"""Owns one request on one prefill rank: what is published, who reads it, and how it ends. It opens no socket.

The engine calls `publish`, `withdraw`, `abort` and `poll`; the worker hands in frames and time. All of it runs under
the worker's lock, and frames leave through the worker's `send`.

Memory rule: a published page stays unchanged until `poll` shows a final state, or until `withdraw` or `abort` has
returned. Each of these bumps the publications' generations first, so that a reader that was late is told so by the
verdict and never reports those bytes as a success.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Protocol, TypeAlias

import numpy as np

from pdlink.control.frames import (
    MAX_PUBLICATIONS,
    Abort,
    AbortAck,
    Body,
    Failed,
    Refused,
    Release,
    Subscribe,
    Subscribed,
    Verdict,
)
from pdlink.errors import BackendError, LayoutError, LimitReached, StateError, TransferFailed
from pdlink.layout.parts import Part
from pdlink.layout.readers import ReaderSet
from pdlink.prefill import failures
from pdlink.prefill.chunk import Chunk, RankFacts, build_chunk
from pdlink.prefill.packer import Key, Ticket
from pdlink.prefill.part_digests import digest_later, digest_parts, taken_parts
from pdlink.prefill.publication import WHOLE_PAGES, Parts, Publication, PublishedPages
from pdlink.prefill.readers import Reader, ReaderTable
from pdlink.prefill.ready_watch import DeviceEvent
from pdlink.transfer.accounts import log_end
from pdlink.transfer.ahead import Ahead
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import DigestTable
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SENDER_MOVES, SenderState, StateCell

log = logging.getLogger("pdlink.prefill")

Send: TypeAlias = Callable[[bytes, int, Body], None]
"""(route, attempt, body): hand a frame about this request to the I/O thread."""


class StageAhead(Protocol):
    """Who packs pieces that no reader has asked for yet. Both calls come under the worker's lock."""

    def reserve(
        self, key: Key, route: bytes, publication: Publication, ahead: Ahead, parts: Mapping[str, Part]
    ) -> Sequence[Ticket]:
        """Take slots for the first pieces of a publication, as many as there are free now, for a reader of `parts`."""

    def begin(self, tickets: Sequence[Ticket]) -> None:
        """Pack them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A publication that nobody has heard of: `ready` says when it may be, None as soon as those before it are."""

    chunk: Chunk
    ready: DeviceEvent | None
    since: float


class Sender:
    """One request on one rank. Made by `PrefillWorker.open`; see the module for threads and memory."""

    def __init__(
        self,
        transfer_id: str,
        rank: RankFacts,
        send: Send,
        clock: Callable[[], float],
        lock: RLock | None = None,
        wait_for: Callable[[Sender], None] | None = None,
        staging: StageAhead | None = None,
        on_end: Callable[[Sender], None] | None = None,
    ) -> None:
        """`wait_for` has somebody call `look_ready` until that says no; `staging` packs for readers unasked; `on_end`
        is told of the end, under the lock."""
        self.transfer_id = transfer_id
        self.failure: Failure | None = None
        self.ended_at: float | None = None
        self._rank = rank
        self._send = send
        self._clock = clock
        self._lock = lock or RLock()
        self._publishing = Lock()
        """Held by one `publish` at a time, and taken before `_lock`."""
        self._state = StateCell(SenderState.OPEN, SENDER_MOVES)
        self._publications: list[Publication] = []
        self._published = PublishedPages()
        self._next_page: dict[str, int] = {}
        self._readers = ReaderTable(min(rank.lease_s, rank.liveness_s))
        self._active = clock()
        self._on_end = on_end
        self._opened = clock()
        self._trace_parent = ""
        """That of the first reader which has one."""
        self._wait_for = wait_for
        self._staging = staging
        self._waiting: deque[_Waiting] = deque()
        """Publications that wait for a device, or behind one that does; in their order."""
        self._said_last = False
        self._first_pages: Mapping[str, int] | None = None
        self._tell_change: Callable[[Sender], None] = lambda _: None

    # --- engine side ------------------------------------------------------------------------------

    def poll(self) -> SenderState:
        """The state now; never blocks. RELEASED, ABORTED and EXPIRED are final: the pages are the engine's again."""
        return self._state.now

    def first_pages(self) -> Mapping[str, int] | None:
        """The least page position that a reader wants, per page group; None until every reader has subscribed.

        What lies before is on decode already, so it need not be published. Never blocks.
        """
        return self._first_pages

    def watch(self, changed: Callable[[Sender], None]) -> None:
        """Call `changed(self)` now, and at each change of the state or of `first_pages` from now on. By one caller. It
        runs under the worker's lock: it must be quick, not raise, and only `poll` and `first_pages`."""
        with self._lock:
            self._tell_change = changed
            changed(self)

    def raise_failure(self) -> None:
        """Raise `TransferFailed` with the first cause when the request ended badly."""
        if self.failure:
            raise TransferFailed(str(self.failure))

    def publish(
        self,
        page_ids: Sequence[int] | Int64Array = (),
        *,
        group: str = "kv",
        start_page: int | None = None,
        layers: Mapping[str, Iterable[int]] | None = None,
        last: bool = False,
        aux: bytes | None = None,
        ready: DeviceEvent | None = None,
    ) -> None:
        """Declare pages final, from now until the end of the request.

        `page_ids` are pages of this rank's pool that hold page positions [start_page, start_page + n) of the prompt;
        without `start_page` they follow what was published of `group` before. `layers` narrows the owned layers
        (component -> global ids). `last` ends publishing; `aux` goes with it and is sent by the elected rank only.
        Several groups: publish each, `last` with the final one. After the request has ended this does nothing.

        `ready` is recorded after the work that writes the pages, where a device still does it: until its `query` says
        yes nobody hears of this publication, nor of a later one, and no byte of it is read. Publishing does not wait.
        When it cannot be asked, the request fails.

        Raises `InvalidInput` for pages or layers that this rank does not have, `StateError` for a position published
        twice, a page given for two positions, or a publish after the last. Whether a page holds the tokens that the
        engine says is not checked here: ranks have page ids of their own.
        """
        with self._publishing:
            with self._lock:
                if self._state.now.is_final:
                    return
                if self._said_last:
                    raise StateError(f"transfer {self.transfer_id!r} was published to its end already")
                start = self._next_page.get(group, 0) if start_page is None else start_page
                if len(self._publications) + len(self._waiting) >= MAX_PUBLICATIONS:
                    raise LimitReached(
                        f"transfer {self.transfer_id!r} was published {MAX_PUBLICATIONS} times, which is the most; "
                        "publish more pages at a time"
                    )
                chunk = build_chunk(self._rank, self.transfer_id, group, page_ids, start, layers, last, aux)
                self._published.add(group, chunk.layers, start, chunk.page_ids)
                self._next_page[group] = max(self._next_page.get(group, 0), chunk.stop_page)
                self._said_last = last
                behind = bool(self._waiting)
            if not behind and self._is_done(ready):
                self._hash_and_add(chunk)
                return
            assert self._wait_for is not None, "nobody looks at device events here"
            with self._lock:
                self._waiting.append(_Waiting(chunk, ready, self._clock()))
            self._wait_for(self)

    def look_ready(self) -> bool:
        """Publish what the device has computed, and digest for readers who came late; whether something still waits. By
        one thread, without the lock."""
        while True:
            self._digest_late()
            with self._lock:
                if self._state.now.is_final:
                    self._waiting.clear()
                if not self._waiting:
                    return False
                first = self._waiting[0]
            if not self._is_done(first.ready):
                return not self._state.now.is_final
            self._hash_and_add(first.chunk)
            with self._lock:
                if self._waiting:  # which an end meanwhile may have cleared
                    self._waiting.popleft()

    def withdraw(self, page_ids: Iterable[int], *, group: str = "kv") -> None:
        """Take published pages back. When this returns they may be reused: no reader can succeed with them any more.

        A request that loses pages before every reader is through is ABORTED, and its readers are told.
        """
        with self._publishing, self._lock:
            wanted = np.fromiter(page_ids, dtype=np.int64)
            hit = [one for one in self._publications if one.group == group and np.isin(one.page_ids, wanted).any()]
            for one in hit:
                one.generation = next(self._rank.generations)
            waits = [one for one in self._waiting if one.chunk.has_any(group, wanted)]
            if (hit or waits) and not self._state.now.is_final:
                self._end(SenderState.ABORTED, failures.withdrawn(len(wanted)))

    def abort(self, text: str = "aborted by the prefill engine") -> None:
        """End the request and tell its readers. When this returns the pages may be reused. Twice is fine."""
        with self._lock:
            self.fail(Failure(FailureReason.ABORTED, text))

    def fail(self, cause: Failure) -> None:
        """End the request with `cause` unless it has ended already."""
        with self._lock:
            if not self._state.now.is_final:
                self._end(SenderState.ABORTED, cause)

    def attempts(self) -> tuple[int, ...]:
        """The attempts that have taken part: each belongs to this request and to no later one of the same id."""
        with self._lock:
            return self._readers.attempts()

    # --- frames and time, called by the worker under its lock -------------------------------------

    def is_reading(self, attempt: int) -> bool:
        """Whether `attempt` may still pull: it is a reader of this request, and neither has ended."""
        return not self._state.now.is_final and self._readers.is_reading(attempt)

    def publication(self, sequence: int) -> Publication | None:
        return self._publications[sequence] if 0 <= sequence < len(self._publications) else None

    def touch(self) -> None:
        """A reader is at work: the lease begins anew."""
        self._active = self._clock()

    def must_wait(self, readers: ReaderSet, attempt: int) -> bool:
        """Whether `attempt` must wait: an earlier attempt of that reader has not drained, or this request goes on
        without it because it has released."""
        return not self._state.now.is_final and self._readers.must_wait(readers, attempt, self._clock())

    def is_over_for(self, readers: ReaderSet, attempt: int) -> bool:
        """Whether `attempt` means a later request of the same id: this one has ended, and that reader with it."""
        if not self._state.now.is_final or self._readers.is_replaced(attempt):
            return False
        reader = self._readers.get(readers)
        return self._readers.is_stranger(readers) or (reader is not None and reader.attempt != attempt)

    def on_subscribe(self, route: bytes, attempt: int, body: Subscribe) -> None:
        now, parts = self._clock(), WHOLE_PAGES
        refusal = self._refusal(body.readers, attempt)
        try:
            parts = taken_parts(self._rank, body.parts)
        except LayoutError as error:
            refusal = refusal or Failure(FailureReason.PLAN, f"a reader takes what is not to be had: {error}")
        if refusal:
            self._send(route, attempt, Refused(refusal.at(self._state.now, self._rank.worker_id)))
            if self._state.now.is_final:
                self._readers.note(body.readers, attempt, route, now).through = True
            return
        if self.must_wait(body.readers, attempt):
            # A new attempt of the same reader runs once the old one has drained; until then it is told to wait.
            self._readers.wait(body.readers, now)
            self._send(route, attempt, Subscribed(self._rank.incarnation, 0, False))
            return
        reader = self._readers.admit(body.readers, attempt, route, now)
        if reader.spans is None:
            reader.parts = parts
        reader.spans = body.spans
        self._trace_parent = self._trace_parent or body.trace_parent
        reader.ahead = Ahead(body.stage_bytes, body.stage_pieces) if body.stage_bytes else None
        self._first_pages = self._readers.wanted_from()
        reader.seen = min(body.next_sequence, len(self._publications))
        self._active = now
        self._tell_change(self)
        self._send(route, attempt, Subscribed(self._rank.incarnation, len(self._publications), True))
        self._announce()

    def on_release(self, route: bytes, attempt: int, body: Release) -> Verdict:
        """Mark the reader as through and say whether all that it pulled was still published. The caller keeps it."""
        now = self._clock()
        cause = self._changed(body.pulled)
        if not cause and self._readers.is_stranger(body.readers):
            cause = self._other_set(body.readers)
        reader = self._readers.get(body.readers)
        if not cause and body.pulled and (reader is None or reader.attempt != attempt):
            cause = self._not_its_place()
        verdict = Verdict(cause is None, cause)
        self._send(route, attempt, verdict)
        if cause is None:
            self._active = now
            self._readers.set = self._readers.set or body.readers
            reader = self._readers.note(body.readers, attempt, route, now)
            reader.through = reader.through or reader.attempt == attempt
            self._finish_when_through()
        return verdict

    def on_abort(self, route: bytes, attempt: int, body: Abort) -> None:
        """Answer always; end the request when the abort comes from a reader that still needs it."""
        self._send(route, attempt, AbortAck())
        self.stop(body.readers, attempt, body.cause)

    def stop(self, readers: ReaderSet, attempt: int, cause: Failure) -> None:
        """End the request because `attempt` cannot or will not go on, unless it has no say in it (any more)."""
        if self._state.now.is_final or self._readers.is_stranger(readers) or self._readers.is_replaced(attempt):
            return
        reader = self._readers.note(readers, attempt, b"", self._clock())
        if reader.attempt != attempt or reader.through:
            return
        # It is that reader's request which ends, so that whoever else asks for this id means a later one.
        self._readers.set = self._readers.set or readers
        reader.through = True
        # Who has ended it, where the cause names no prefill rank: not this one, to which it would fall otherwise.
        self._end(SenderState.ABORTED, cause.at("", readers.decode_instance))

    def expire(self, now: float, awake_since: float = 0.0) -> None:
        """End the request when nobody has touched its published pages for a lease, or a reader is silent for so long
        that it must be dead. This process has listened since `awake_since`."""
        if self._state.now.is_final:
            return
        if self._publications and now - self._active > self._rank.lease_s:
            failure = failures.unread(self._readers.set is not None, now - self._active)
            self._end(SenderState.EXPIRED, failure)
        elif self._waiting and now - self._waiting[0].since > self._rank.lease_s:
            self._end(SenderState.EXPIRED, failures.unwritten(now - self._waiting[0].since))
        elif dead := self._readers.dead(now, awake_since):
            assert self._readers.set is not None
            who = (dead.index, self._readers.set.decode_instance, now - dead.heard)
            failure = failures.silent_reader(*who, is_lease=self._rank.lease_s < self._rank.liveness_s)
            self._end(SenderState.EXPIRED, failure)

    @property
    def holds_lease(self) -> bool:
        """Whether pages are published and must stay as they are."""
        return bool(self._publications) and not self._state.now.is_final

    def account(self) -> dict[str, object]:
        """The request's facts, once it has ended."""
        readers = self._readers.set
        # Layer ranges of the same pages are published apart, and count once.
        published = {(one.group, one.start_page): len(one.page_ids) for one in self._publications}
        return {
            "transfer_id": self.transfer_id,
            "worker_id": self._rank.worker_id,
            "decode": readers.decode_instance if readers else "",
            "num_readers": readers.num_readers if readers else 0,
            "state": self._state.now.value,
            "reason": self.failure.reason.value if self.failure else "",
            "num_pages": sum(published.values()),
            "num_bytes": sum(one.num_bytes(self._rank.regions) for one in self._publications),
            "num_publications": len(self._publications),
            "elapsed_s": (self.ended_at or self._clock()) - self._opened,
            "trace_parent": self._trace_parent,
        }

    # --- inside -----------------------------------------------------------------------------------

    def _is_done(self, ready: DeviceEvent | None) -> bool:
        """Whether the device is done with a publication. One that cannot be asked ends the request."""
        try:
            return ready is None or ready.query()
        except Exception as error:  # noqa: BLE001 - the engine's own object; whatever it raises is why
            self.fail(failures.event_lost(error, self._rank.worker_id))
            return False

    def _hash_and_add(self, chunk: Chunk) -> None:
        """Without the lock, because hashing takes long and the I/O thread would wait for it."""
        with self._lock:
            wanted = {reader.parts for reader in self._readers} - {WHOLE_PAGES}
        digests: dict[Parts, DigestTable] = {}
        try:
            if whole := chunk.digests(self._rank):
                digests = {one: digest_parts(self._rank, chunk.layers, chunk.page_ids, one, whole) for one in wanted}
                digests[WHOLE_PAGES] = whole
        except BackendError as error:
            self.fail(failures.undigested(error, self._rank.worker_id))
            return
        with self._lock:
            if not self._state.now.is_final:
                self._add(chunk, digests)

    def _digest_late(self) -> None:
        """As `_hash_and_add`, what was published before a reader came that takes parts of pages."""
        while True:
            with self._lock:
                found = next(self._undigested(), None)
            if found is None:
                return
            try:
                made, wrong = digest_later(self._rank, *found, lambda: self._state.now.is_final)
            except BackendError as error:
                self.fail(failures.undigested(error, self._rank.worker_id))
                return
            with self._lock:
                if wrong:
                    self.fail(wrong)
                found[0].digests.update(made)
                if not self._state.now.is_final:
                    self._announce()

    def _undigested(self) -> Iterator[tuple[Publication, list[Parts]]]:
        """Publications that readers wait for whose parts of them are not digested, and these parts."""
        readers = [] if self._state.now.is_final else [one for one in self._readers if not one.through]
        for publication in self._publications[min((one.seen for one in readers), default=0) :] if readers else ():
            wanted = {one.parts for one in readers if one.seen <= publication.sequence}
            if missing := [one for one in wanted if not publication.is_digested(one)]:
                yield publication, missing

    def _add(self, chunk: Chunk, digests: Mapping[Parts, DigestTable]) -> None:
        self._publications += chunk.publications(self._rank, len(self._publications), digests)
        if self._state.now is SenderState.OPEN or chunk.last:
            self._state.advance(SenderState.PUBLISHED if chunk.last else SenderState.PUBLISHING)
            self._tell_change(self)
        self._active = self._clock()
        self._announce()
        self._finish_when_through()

    def _announce(self) -> None:
        """Tell readers of what they have not heard of, in its order, as far as it is digested for them."""
        must_digest = False
        for reader in self._readers:
            for publication in self._publications[reader.seen :] if not reader.through else ():
                if not publication.is_digested(reader.parts):
                    must_digest = True
                    break
                tickets = self._stage_ahead(reader, publication)
                if tickets and self._staging:
                    # It takes longer than telling, and is told of later all the same: the worker's lock is held here.
                    self._staging.begin(tickets)
                self._send(reader.route, reader.attempt, publication.ready(len(tickets), reader.parts))
                reader.seen = publication.sequence + 1
            reader.told = max(reader.told, reader.seen)
        if must_digest:
            assert self._wait_for is not None, "nobody digests for readers that come late here"
            self._wait_for(self)

    def _stage_ahead(self, reader: Reader, publication: Publication) -> Sequence[Ticket]:
        """Take slots for what a reader will ask for, the first time that it hears of a publication which it wants all
        of."""
        if self._staging is None or reader.ahead is None or publication.sequence < reader.told:
            return ()
        stop = publication.start_page + len(publication.page_ids)
        if not any(
            span.group == publication.group
            and span.first_page <= publication.start_page
            and stop <= span.first_page + span.num_pages
            for span in reader.spans or ()
        ):
            return ()
        key, parts = (self.transfer_id, reader.attempt), dict(reader.parts)
        return self._staging.reserve(key, reader.route, publication, reader.ahead, parts)

    def _refusal(self, readers: ReaderSet, attempt: int) -> Failure | None:
        if self._readers.is_stranger(readers):
            return self._other_set(readers)
        if self._state.now.is_final:
            return self.failure or Failure(FailureReason.STALE, f"transfer {self.transfer_id!r} has been released")
        return self._not_its_place() if self._readers.is_replaced(attempt) else None

    def _other_set(self, readers: ReaderSet) -> Failure:
        assert self._readers.set is not None
        return failures.other_readers(self.transfer_id, self._readers.set, readers)

    def _not_its_place(self) -> Failure:
        return failures.replaced(self.transfer_id, self._rank.worker_id)

    def _changed(self, pulled: Mapping[int, int]) -> Failure | None:
        for sequence, generation in pulled.items():
            current = self._publications[sequence].generation if sequence < len(self._publications) else None
            if current != generation:
                return failures.taken_back(sequence, generation, current, self.failure, self._rank.worker_id)
        return None

    def _finish_when_through(self) -> None:
        if self._readers.are_through and self._state.now is SenderState.PUBLISHED:
            self._end(SenderState.RELEASED, None)

    def _end(self, state: SenderState, cause: Failure | None) -> None:
        if cause:
            self.failure = cause.at(self._state.now, self._rank.worker_id)
        # Generations first: once the state is final the engine may reuse the pages.
        for publication in self._publications:
            publication.generation = next(self._rank.generations)
        for reader in self._readers:
            if self.failure and not reader.through:
                self._send(reader.route, reader.attempt, Failed(self.failure))
        self.ended_at = self._clock()
        self._state.advance(state)
        self._tell_change(self)
        log_end(log, self.account(), self.failure)
        if self._on_end:
            self._on_end(self)
