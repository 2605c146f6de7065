"""Owns one request on one prefill rank: what is published, who reads it, and how it ends. It opens no socket.

The engine calls `publish`, `withdraw`, `abort` and `poll`; the worker hands in frames and time. All of it runs under
the worker's lock, and frames leave through the worker's `send`.

Memory rule: a published page stays unchanged until `poll` shows a final state, or until `withdraw` or `abort` has
returned. Each of these bumps the publications' generations first, so that a reader that was late is told so by the
verdict and never reports those bytes as a success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, RLock
from typing import TypeAlias

import numpy as np

from pdlink.control.frames import Abort, AbortAck, Body, Failed, Refused, Release, Subscribe, Subscribed, Verdict
from pdlink.errors import StateError, TransferFailed
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.chunk import Chunk, RankFacts, build_chunk
from pdlink.prefill.publication import Publication, PublishedPages
from pdlink.transfer.descriptors import Int64Array
from pdlink.transfer.digests import Digests
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SENDER_MOVES, SenderState, StateCell

Send: TypeAlias = Callable[[bytes, int, Body], None]
"""(route, attempt, body): hand a frame about this request to the I/O thread."""


@dataclass(slots=True)
class _Reader:
    """One reader of the set.

    `seen` is the sequence up to which Ready frames were sent to its current route; `through` that it has released.
    """

    attempt: int
    route: bytes
    heard: float
    seen: int = 0
    through: bool = False


class Sender:
    """One request on one rank. Made by `PrefillWorker.open`; see the module for threads and memory."""

    def __init__(
        self, transfer_id: str, rank: RankFacts, send: Send, clock: Callable[[], float], lock: RLock | None = None
    ) -> None:
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
        self._set: ReaderSet | None = None
        self._readers: dict[int, _Reader] = {}
        self._active = clock()

    # --- engine side ------------------------------------------------------------------------------

    def poll(self) -> SenderState:
        """The state now; never blocks. RELEASED, ABORTED and EXPIRED are final: the pages are the engine's again."""
        return self._state.now

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
    ) -> None:
        """Declare pages final, from now until the end of the request.

        `page_ids` are pages of this rank's pool that hold page positions [start_page, start_page + n) of the prompt;
        without `start_page` they follow what was published of `group` before. `layers` narrows the owned layers
        (component -> global ids). `last` ends publishing; `aux` goes with it and is sent by the elected rank only.
        Several groups: publish each, `last` with the final one. After the request has ended this does nothing.

        Raises `InvalidInput` for pages or layers that this rank does not have, `StateError` for a position published
        twice, a page given for two positions, or a publish after the last. Whether a page holds the tokens that the
        engine says is not checked here: ranks have page ids of their own.
        """
        with self._publishing:
            with self._lock:
                if self._state.now.is_final:
                    return
                if self._state.now is SenderState.PUBLISHED:
                    raise StateError(f"transfer {self.transfer_id!r} was published to its end already")
                start = self._next_page.get(group, 0) if start_page is None else start_page
                chunk = build_chunk(self._rank, self.transfer_id, group, page_ids, start, layers, last, aux)
                self._published.add(group, chunk.layers, start, chunk.page_ids)
                self._next_page[group] = max(self._next_page.get(group, 0), chunk.stop_page)
            # Without the lock, because hashing takes long and the I/O thread would wait for it.
            digests = chunk.digests(self._rank)
            with self._lock:
                if not self._state.now.is_final:
                    self._add(chunk, digests)

    def withdraw(self, page_ids: Iterable[int], *, group: str = "kv") -> None:
        """Take published pages back. When this returns they may be reused: no reader can succeed with them any more.

        A request that loses pages before every reader is through is ABORTED, and its readers are told.
        """
        with self._publishing, self._lock:
            wanted = np.fromiter(page_ids, dtype=np.int64)
            hit = [one for one in self._publications if one.group == group and np.isin(one.page_ids, wanted).any()]
            for one in hit:
                one.generation = next(self._rank.generations)
            if hit and not self._state.now.is_final:
                text = f"{len(wanted)} published pages were withdrawn by the prefill engine"
                self._end(SenderState.ABORTED, Failure(FailureReason.GENERATION, text))

    def abort(self, text: str = "aborted by the prefill engine") -> None:
        """End the request and tell its readers. When this returns the pages may be reused. Twice is fine."""
        with self._lock:
            self.fail(Failure(FailureReason.ABORTED, text))

    def fail(self, cause: Failure) -> None:
        """End the request with `cause` unless it has ended already."""
        with self._lock:
            if not self._state.now.is_final:
                self._end(SenderState.ABORTED, cause)

    # --- frames and time, called by the worker under its lock -------------------------------------

    def attempts(self) -> tuple[int, ...]:
        """The attempts that have taken part: each belongs to this request and to no later one of the same id."""
        return tuple(reader.attempt for reader in self._readers.values())

    def is_reading(self, attempt: int) -> bool:
        """Whether `attempt` may still pull: it is a reader of this request, and neither has ended."""
        if self._state.now.is_final:
            return False
        return any(reader.attempt == attempt and not reader.through for reader in self._readers.values())

    def publication(self, sequence: int) -> Publication | None:
        return self._publications[sequence] if 0 <= sequence < len(self._publications) else None

    def touch(self) -> None:
        """A reader is at work: the lease begins anew."""
        self._active = self._clock()

    def must_wait(self, readers: ReaderSet, attempt: int) -> bool:
        """Whether `attempt` must wait: an earlier attempt of that reader has not drained, or this request goes on
        without it because it has released."""
        reader = self._readers.get(readers.reader_index)
        stranger = self._set is not None and not self._set.agrees(readers)
        if reader is None or reader.attempt == attempt or stranger or self._state.now.is_final:
            return False
        return reader.through or not self._is_silent(reader, self._clock())

    def is_over_for(self, readers: ReaderSet, attempt: int) -> bool:
        """Whether `attempt` means a later request of the same id: this one has ended, and that reader with it."""
        if not self._state.now.is_final:
            return False
        reader = self._readers.get(readers.reader_index)
        stranger = self._set is not None and not self._set.agrees(readers)
        return stranger or (reader is not None and reader.attempt != attempt)

    def on_subscribe(self, route: bytes, attempt: int, body: Subscribe) -> None:
        now = self._clock()
        refusal = self._refusal(body.readers)
        if refusal:
            self._send(route, attempt, Refused(refusal.at(self._state.now, self._rank.worker_id)))
            if self._state.now.is_final:
                self._readers.setdefault(body.readers.reader_index, _Reader(attempt, route, now, through=True))
            return
        self._set = self._set or body.readers
        if self.must_wait(body.readers, attempt):
            # A new attempt of the same reader runs once the old one has drained; until then it is told to wait.
            self._send(route, attempt, Subscribed(self._rank.incarnation, 0, False))
            return
        reader = self._readers.get(body.readers.reader_index)
        if reader is None or reader.attempt != attempt:
            reader = self._readers[body.readers.reader_index] = _Reader(attempt, route, now)
        reader.route, reader.heard = route, now
        reader.seen = min(body.next_sequence, len(self._publications))
        self._active = now
        self._send(route, attempt, Subscribed(self._rank.incarnation, len(self._publications), True))
        self._announce()

    def on_release(self, route: bytes, attempt: int, body: Release) -> Verdict:
        """Mark the reader as through and say whether all that it pulled was still published. The caller keeps it."""
        self._active = self._clock()
        cause = self._changed(body.pulled)
        if not cause and self._set and not self._set.agrees(body.readers):
            cause = self._other_set(body.readers)
        verdict = Verdict(cause is None, cause)
        self._send(route, attempt, verdict)
        if cause is None:
            self._set = self._set or body.readers
            reader = self._readers.setdefault(body.readers.reader_index, _Reader(attempt, route, self._active))
            reader.through = reader.through or reader.attempt == attempt
            self._finish_when_through()
        return verdict

    def on_abort(self, route: bytes, attempt: int, body: Abort) -> None:
        """Answer always; end the request when the abort comes from a reader that still needs it."""
        self._send(route, attempt, AbortAck())
        self.stop(body.readers, attempt, body.cause)

    def stop(self, readers: ReaderSet, attempt: int, cause: Failure) -> None:
        """End the request because `attempt` cannot or will not go on, unless it has no say in it (any more)."""
        reader = self._readers.get(readers.reader_index)
        stranger = self._set is not None and not self._set.agrees(readers)
        if self._state.now.is_final or stranger or (reader and (reader.attempt != attempt or reader.through)):
            return
        # It is that reader's request which ends, so that whoever else asks for this id means a later one.
        self._set = self._set or readers
        reader = self._readers.setdefault(readers.reader_index, _Reader(attempt, b"", self._clock()))
        reader.through = True
        self._end(SenderState.ABORTED, cause)

    def expire(self, now: float) -> None:
        """End the request when nobody has touched its published pages for a lease."""
        if self._publications and not self._state.now.is_final and now - self._active > self._rank.lease_s:
            text = f"no reader was heard for {now - self._active:.1f} s (PDLINK_PUBLICATION_LEASE_S)"
            self._end(SenderState.EXPIRED, Failure(FailureReason.EXPIRED, text))

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, chunk: Chunk, digests: Digests | None) -> None:
        self._publications += chunk.publications(self._rank, len(self._publications), digests)
        if self._state.now is SenderState.OPEN or chunk.last:
            self._state.advance(SenderState.PUBLISHED if chunk.last else SenderState.PUBLISHING)
        self._active = self._clock()
        self._announce()
        self._finish_when_through()

    def _announce(self) -> None:
        for reader in self._readers.values():
            for publication in self._publications[reader.seen :] if not reader.through else ():
                self._send(reader.route, reader.attempt, publication.ready())
            reader.seen = max(reader.seen, len(self._publications))

    def _refusal(self, readers: ReaderSet) -> Failure | None:
        if self._set and not self._set.agrees(readers):
            return self._other_set(readers)
        if self._state.now.is_final:
            return self.failure or Failure(FailureReason.STALE, f"transfer {self.transfer_id!r} has been released")
        return None

    def _other_set(self, readers: ReaderSet) -> Failure:
        assert self._set is not None
        return Failure(
            FailureReason.DUPLICATE,
            f"transfer {self.transfer_id!r} is read by {self._set.decode_instance!r} with {self._set.num_readers} "
            f"readers; {readers.decode_instance!r} with {readers.num_readers} readers asks for it too",
            fix="give every live request a transfer id of its own",
        )

    def _is_silent(self, reader: _Reader, now: float) -> bool:
        return now - reader.heard > min(self._rank.lease_s, SILENT_AFTER_S)

    def _changed(self, pulled: Mapping[int, int]) -> Failure | None:
        for sequence, generation in pulled.items():
            current = self._publications[sequence].generation if sequence < len(self._publications) else None
            if current != generation:
                text = f"pages of publication {sequence} were taken back while they were read (generation {generation}"
                why = f": {self.failure.text}" if self.failure else ""
                return Failure(FailureReason.GENERATION, f"{text}, now {current}){why}", self._rank.worker_id)
        return None

    def _finish_when_through(self) -> None:
        if self._set is None or self._state.now is not SenderState.PUBLISHED:
            return
        if sum(one.through for one in self._readers.values()) == self._set.num_readers:
            self._end(SenderState.RELEASED, None)

    def _end(self, state: SenderState, cause: Failure | None) -> None:
        if cause:
            self.failure = cause.at(self._state.now, self._rank.worker_id)
        # Generations first: once the state is final the engine may reuse the pages.
        for publication in self._publications:
            publication.generation = next(self._rank.generations)
        for reader in self._readers.values():
            if self.failure and not reader.through:
                self._send(reader.route, reader.attempt, Failed(self.failure))
        self.ended_at = self._clock()
        self._state.advance(state)


SILENT_AFTER_S = 15.0
"""A reader that has not repeated its subscribe for this long no longer keeps a new attempt of its own waiting."""
