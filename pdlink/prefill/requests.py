"""Owns the requests of one prefill rank by name: the live ones, those that ended, and what readers say of either, too
early or too late included. It owns no socket, and no request's state (see `sender`).

Every method is called under the worker's lock. Time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from pdlink.config import Settings
from pdlink.control.frames import Abort, AbortAck, Body, Frame, Refused, Release, Subscribe, Subscribed, Verdict
from pdlink.errors import DuplicateTransfer, LimitReached
from pdlink.layout.readers import ReaderSet
from pdlink.prefill import admission
from pdlink.prefill.early_book import EarlyBook
from pdlink.prefill.leases import AnswerBook, ExpiringBook
from pdlink.prefill.rank import PrefillRank
from pdlink.prefill.sender import Sender
from pdlink.transfer.failure import Failure, FailureReason

Reply: TypeAlias = Callable[[bytes, Frame, Body], None]
"""Answer a frame that came by a route."""


class Requests:
    """Those of one rank. Not thread-safe."""

    def __init__(self, rank: PrefillRank, settings: Settings, reply: Reply) -> None:
        self.senders: dict[str, Sender] = {}
        self.early = EarlyBook(settings.publication_lease_s, settings.max_transfers)
        self.answers: AnswerBook = ExpiringBook(settings.verdict_ttl_s, settings.max_transfers)
        self.strays: AnswerBook = ExpiringBook(settings.verdict_ttl_s, settings.max_transfers)
        """Answers about requests that nobody has opened: a flood of those pushes out no verdict that counts."""
        self._rank = rank
        self._settings = settings
        self._reply = reply

    def __iter__(self) -> Iterator[Sender]:
        return iter(list(self.senders.values()))

    @property
    def are_all_final(self) -> bool:
        return all(sender.poll().is_final for sender in self.senders.values())

    # --- the engine's side --------------------------------------------------------------------------

    def make_place(self, transfer_id: str, now: float) -> None:
        """Let a request of this name be added.

        Raises `DuplicateTransfer` where one is live, `LimitReached` where `max_transfers` are.
        """
        known = self.senders.get(transfer_id)
        if known and not known.poll().is_final:
            raise DuplicateTransfer(
                f"transfer {transfer_id!r} is {known.poll()} on {self._rank.worker_id} already; give every live "
                "request an id of its own"
            )
        if known:
            self._forget(known, now)
        if len(self.senders) < self._settings.max_transfers:
            return
        ended = next((one for one in self.senders.values() if one.poll().is_final), None)
        if ended is None:
            raise LimitReached(f"{len(self.senders)} transfers are live (PDLINK_MAX_TRANSFERS)")
        self._forget(ended, now)

    def add(self, sender: Sender, now: float) -> None:
        """Take it in, and give it what readers have said of it already."""
        self.senders[sender.transfer_id] = sender
        early = self.early.take(sender.transfer_id, now)
        for route, attempt, body in early.in_order(now - self._settings.liveness_timeout_s) if early else ():
            if isinstance(body, Release):
                sender.on_release(route, attempt, body)
            elif isinstance(body, Abort):
                sender.stop(body.readers, attempt, body.cause)
            elif not self._answer_to((sender.transfer_id, attempt), now):
                sender.on_subscribe(route, attempt, body)

    def refuse_waiting(self, cause: Failure, now: float) -> None:
        """Tell those that wait for a request which is not to be opened any more."""
        for transfer_id, (route, attempt, body) in self.early.take_all(now):
            if isinstance(body, Subscribe):
                self._reply(route, Frame(transfer_id, attempt, body), Refused(cause))

    def expire(self, now: float, awake_since: float) -> None:
        """Let go of all that is past its time. `awake_since`: since when this process has read its frames."""
        for sender in self:
            sender.expire(now, awake_since)
            if sender.ended_at is not None and now - sender.ended_at > self._settings.verdict_ttl_s:
                self._forget(sender, now)
        self.early.expire(now)
        self.answers.expire(now)
        self.strays.expire(now)

    # --- the readers' side --------------------------------------------------------------------------

    def on_subscribe(self, route: bytes, frame: Frame, body: Subscribe, now: float) -> bool:
        """A reader that may have the request. Returns whether the request is here and has it now."""
        known = self._answer_to((frame.transfer_id, frame.attempt), now)
        if known:  # it is over: a late duplicate, or it does not know yet that it will be denied
            if isinstance(known, Verdict) and known.cause:
                self._reply(route, frame, Refused(known.cause))
            return False
        sender = self.senders.get(frame.transfer_id)
        if sender and sender.must_wait(body.readers, frame.attempt):
            self._keep_early(route, frame, body, now)
        if sender and not sender.is_over_for(body.readers, frame.attempt):
            sender.on_subscribe(route, frame.attempt, body)
            return True
        self._keep_early(route, frame, body, now)
        self._reply(route, frame, Subscribed(self._rank.incarnation, 0, False))
        return False

    def on_incompatible(self, route: bytes, frame: Frame, body: Subscribe, refusal: Failure, now: float) -> None:
        """A reader was refused for what it is: fail this end too, the open request or the one that the engine will
        open."""
        if sender := self.senders.get(frame.transfer_id):
            sender.stop(body.readers, frame.attempt, refusal)
        else:
            self._keep_early(route, frame, Abort(refusal, body.readers), now)

    def on_release(self, route: bytes, frame: Frame, body: Release, now: float) -> None:
        key = (frame.transfer_id, frame.attempt)
        known = self._answer_to(key, now)
        sender = self.senders.get(frame.transfer_id)
        is_later = sender is None or _means_later(sender, body.readers, frame.attempt)
        if known:
            self._reply(route, frame, known)
        elif sender and (body.pulled or not (is_later or sender.poll().is_final)):
            self.answers.put(key, sender.on_release(route, frame.attempt, body), now)
        else:
            verdict = admission.verdict_without_request(self._rank.worker_id, body)
            (self.answers if sender else self.strays).put(key, verdict, now)
            self._reply(route, frame, verdict)
            if verdict.unchanged and is_later:
                self._keep_early(route, frame, body, now)

    def on_abort(self, route: bytes, frame: Frame, body: Abort, now: float) -> None:
        key = (frame.transfer_id, frame.attempt)
        sender = self.senders.get(frame.transfer_id)
        known = self._answer_to(key, now)
        if known:  # it is over, so it has no say in a later request of this id
            if isinstance(known, Verdict) and known.cause:
                self.answers.put(key, AbortAck(), now)  # it knows now, and need not be told again
            self._reply(route, frame, AbortAck())
            return
        (self.answers if sender else self.strays).put(key, AbortAck(), now)
        if sender:
            self.early.drop(frame.transfer_id, body.readers, frame.attempt)  # it waited for that before it to end
        if sender and not sender.poll().is_final:
            sender.on_abort(route, frame.attempt, body)
            return
        self._reply(route, frame, AbortAck())
        if sender is None or sender.is_over_for(body.readers, frame.attempt):
            self._keep_early(route, frame, body, now)

    # --- inside -------------------------------------------------------------------------------------

    def _keep_early(self, route: bytes, frame: Frame, body: Subscribe | Release | Abort, now: float) -> None:
        self.early.keep(frame.transfer_id, route, frame.attempt, body, now)

    def _answer_to(self, key: tuple[str, int], now: float) -> Verdict | AbortAck | None:
        """How that attempt ended here, where it has. Its frames are known for what they are as long as they come."""
        return self.answers.renew(key, now) or self.strays.renew(key, now)

    def _forget(self, sender: Sender, now: float) -> None:
        """Let go of a request that ended. What its attempts still send must not reach a later one of the same id."""
        del self.senders[sender.transfer_id]
        text = f"transfer {sender.transfer_id!r} has ended here ({sender.poll()})"
        ended = sender.failure or Failure(FailureReason.STALE, text, self._rank.worker_id)
        for attempt in sender.attempts():
            key = (sender.transfer_id, attempt)
            if not self.answers.get(key, now):
                self.answers.put(key, Verdict(False, ended), now)


def _means_later(sender: Sender, readers: ReaderSet, attempt: int) -> bool:
    """Whether `attempt` speaks of a request that the engine has not opened yet, though one of that id is here."""
    return sender.is_over_for(readers, attempt) or sender.must_wait(readers, attempt)
