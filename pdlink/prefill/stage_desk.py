"""Owns what a prefill worker answers to staging frames: who may have pages packed, and the refusal of everyone else.

The slots and the packing are the stager's. All of it runs under the worker's lock but `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from pdlink.backends.staging import Arena
from pdlink.config import Settings
from pdlink.control.frames import Body, Credit, Failed, Frame, Stage, Verdict
from pdlink.errors import InvalidInput
from pdlink.events import Events
from pdlink.layout.parts import Part
from pdlink.prefill.chunk import RankFacts
from pdlink.prefill.leases import AnswerBook
from pdlink.prefill.packer import Key, Ticket
from pdlink.prefill.publication import Publication
from pdlink.prefill.sender import Sender
from pdlink.prefill.stage_job import RowTables, ahead_jobs, build_job
from pdlink.prefill.stager import Stager
from pdlink.transfer.ahead import MAX_PIECES, MAX_SEQUENCE, Ahead, ahead_ticket, is_ahead
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState

MAX_TICKETS = 64
"""Pieces that one attempt may wait for at once. A reader of ours never asks for more than a few."""


class StageDesk:
    """The staging frames of one prefill worker. Without an `arena` it refuses every Stage."""

    def __init__(
        self,
        rank: RankFacts,
        arena: Arena | None,
        settings: Settings,
        lock: threading.RLock,
        clock: Callable[[], float],
        send: Callable[[bytes, Frame], None],
        sender_of: Callable[[str], Sender | None],
        answers: AnswerBook,
        events: Events | None = None,
    ) -> None:
        self._rank = rank
        self._tables = RowTables(rank)
        self._clock = clock
        self._send = send
        self._sender_of = sender_of
        self._answers = answers
        self._stager: Stager | None = None
        if arena and rank.regions:
            self._stager = Stager(
                rank.worker_id,
                arena,
                settings,
                lock,
                clock,
                lambda route, transfer_id, attempt, body: send(route, Frame(transfer_id, attempt, body)),
                self._may_read,
                self._fail_request,
                self._taken_back,
                events,
            )

    @property
    def arena(self) -> Arena | None:
        """Where this rank packs; None where it packs nothing."""
        return self._stager.arena if self._stager else None

    def on_stage(self, route: bytes, frame: Frame, body: Stage) -> None:
        key = (frame.transfer_id, frame.attempt)
        sender = self._sender_of(frame.transfer_id)
        if self._answers.get(key, self._clock()) or (sender and sender.poll() is SenderState.RELEASED):
            return  # a late repeat of an attempt that is over
        stager = self._stager
        if stager is None:
            text, fix = "this rank has no staging memory", "set PDLINK_STAGING_SLOTS on prefill"
            self._fail(route, frame, Failure(FailureReason.LIMIT, text, fix=fix))
        elif sender is None or not sender.is_reading(frame.attempt):
            text = "whoever asks for pages to be staged is no reader of this request (any more)"
            known = sender.failure if sender else None
            self._fail(route, frame, known or Failure(FailureReason.STALE, text))
        elif is_ahead(body.ticket):
            text = f"a reader asks with ticket {body.ticket}, one of those that only this rank gives"
            self._fail(route, frame, Failure(FailureReason.PROTOCOL, text))
        elif stager.knows(key, body.ticket, route):
            pass
        elif stager.num_tickets(key) >= MAX_TICKETS:
            text = f"a reader asks for more than {MAX_TICKETS} staged pieces at once"
            self._fail(route, frame, Failure(FailureReason.LIMIT, text))
        else:
            self._admit(stager, sender, route, frame, body)

    def reserve(
        self, key: Key, route: bytes, publication: Publication, ahead: Ahead, parts: Mapping[str, Part]
    ) -> Sequence[Ticket]:
        """Take slots for the first pieces of a publication that a reader of `parts` will ask for, as many as are free
        now."""
        stager = self._stager
        if stager is None or not publication.layers or publication.sequence > MAX_SEQUENCE:
            return ()
        most = min(ahead.num_pieces, MAX_PIECES, MAX_TICKETS - stager.num_tickets(key))
        jobs = ahead_jobs(self._tables, publication, ahead, most, parts) if stager.is_free else []
        numbered = [(ahead_ticket(publication.sequence, index), job) for index, job in enumerate(jobs)]
        return stager.reserve(key, route, numbered)

    def begin(self, tickets: Sequence[Ticket]) -> None:
        """Pack what slots were reserved for."""
        if self._stager:
            self._stager.begin(tickets)

    def reroute(self, route: bytes, transfer_id: str, attempt: int) -> None:
        """A reader speaks along `route` now, so that its answers go there."""
        if self._stager:
            self._stager.reroute((transfer_id, attempt), route)

    def on_credit(self, frame: Frame, body: Credit) -> None:
        if self._stager:
            self._stager.credit((frame.transfer_id, frame.attempt), body)

    def look(self, transfer_id: str, attempt: int) -> None:
        """Take slots back from an attempt that has ended."""
        if self._stager:
            self._stager.look((transfer_id, attempt))

    def sweep(self) -> None:
        if self._stager:
            self._stager.sweep()

    def close(self) -> None:
        """End the packing; nothing reads the rank's regions when this returns. Not under the worker's lock."""
        if self._stager:
            self._stager.close()

    # --- inside -------------------------------------------------------------------------------------

    def _admit(self, stager: Stager, sender: Sender, route: bytes, frame: Frame, body: Stage) -> None:
        sender.touch()
        try:
            publication = sender.publication(body.sequence)
            if publication is None:
                raise InvalidInput(f"{self._rank.worker_id} has no publication {body.sequence} to stage pages of")
            job = build_job(self._tables, publication, body, stager.arena.area.slot_bytes)
        except InvalidInput as error:
            self._fail(route, frame, Failure(FailureReason.PLAN, str(error)))
            return
        stager.stage((frame.transfer_id, frame.attempt), body.ticket, route, job)

    def _fail(self, route: bytes, frame: Frame, cause: Failure) -> None:
        """Refuse a Stage. A reader whose pull cannot go on fails the request, so that its pages go back."""
        cause = cause.at("staging", self._rank.worker_id)
        sender = self._sender_of(frame.transfer_id)
        if sender and sender.is_reading(frame.attempt):
            sender.fail(cause)
        else:
            answer: Body = Failed(cause)
            self._send(route, Frame(frame.transfer_id, frame.attempt, answer))

    def _may_read(self, key: Key) -> bool:
        sender = self._sender_of(key[0])
        return sender is not None and sender.is_reading(key[1])

    def _fail_request(self, key: Key, cause: Failure) -> None:
        """End a request for which a slot was not to be had, or did not come back: its reader must not end well."""
        sender = self._sender_of(key[0])
        if sender:
            sender.fail(cause)

    def _taken_back(self, key: Key) -> None:
        """An attempt lost its slots. Where the request goes on with another, a release of this one is refused."""
        sender = self._sender_of(key[0])
        now = self._clock()
        if sender and not sender.poll().is_final and not self._answers.get(key, now):
            text = "a newer attempt of this reader took its place"
            self._answers.put(key, Verdict(False, Failure(FailureReason.STALE, text, self._rank.worker_id)), now)
