"""Any order of publishing, subscribing, releasing, aborting, taking back, silence and time against one request."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdlink.control.frames import Abort, AbortAck, Failed, Ready, Refused, Subscribed
from pdlink.layout.readers import ReaderSet
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.prefill.rig import LEASE_S, LIVENESS_S, NUM_PAGES, Rig

STRANGER = ReaderSet("other", 0, 1)
NUM_ATTEMPTS = 2
"""Of each reader, one after the other; frames of all of them come at any time."""


@dataclass
class Place:
    """What the model knows of one reader of the set: who reads, what was announced to whom, and who is through."""

    holder: int | None = None
    heard: float = 0.0
    through: bool = False
    gone: set[int] = field(default_factory=set)
    rival: float | None = None


class SenderMachine(RuleBasedStateMachine):
    """The model says who may read, and that a yes needs every page unchanged and its own place."""

    @initialize(num_readers=st.integers(1, 2))
    def begin(self, num_readers: int) -> None:
        self.rig = Rig()
        self.readers = [ReaderSet("dec", index, num_readers) for index in range(num_readers)]
        self.places = [Place() for _ in self.readers]
        self.told: dict[int, dict[int, int]] = {}
        """Attempt -> sequence -> generation, as it was announced."""
        self.next_page = 0
        self.said_last = False
        self.is_set = False
        """Whether the readers are known to be `dec`."""
        self.ends: list[SenderState] = []
        self.taken_back = False

    @property
    def is_over(self) -> bool:
        return self.rig.sender.poll().is_final

    @property
    def published(self) -> dict[int, int]:
        """What whoever saw every announcement would release."""
        every: dict[int, int] = {}
        for told in self.told.values():
            every |= told
        return every

    def attempt(self, index: int, number: int) -> int:
        return 1 + index * NUM_ATTEMPTS + number

    def hear(self) -> None:
        """Take what was sent, and remember what was announced."""
        for _, attempt, body in self.rig.sent:
            if isinstance(body, Ready):
                known = self.told.setdefault(attempt, {})
                assert known.setdefault(body.sequence, body.generation) == body.generation, "announced in two ways"
        state = self.rig.sender.poll()
        if state.is_final and self.ends[-1:] != [state]:
            self.ends.append(state)

    # --- the engine ---------------------------------------------------------------------------------

    @rule(num_pages=st.sampled_from([0, 1, 2]), last=st.booleans())
    def publish(self, num_pages: int, last: bool) -> None:
        if self.said_last and not self.is_over:
            return
        pages = list(range(self.next_page, min(NUM_PAGES, self.next_page + num_pages)))
        if not self.is_over:
            self.next_page += len(pages)
            self.said_last = last
        self.rig.sent.clear()
        self.rig.sender.publish(pages, last=last)
        self.hear()

    @rule(data=st.data(), strange=st.sampled_from([True, True, False]))
    def withdraw(self, data: st.DataObject, strange: bool) -> None:
        pages = [NUM_PAGES + 1] if strange or not self.next_page else [data.draw(st.integers(0, self.next_page - 1))]
        was_over = self.is_over
        self.rig.sent.clear()
        self.rig.sender.withdraw(pages)
        if pages[0] < self.next_page:
            assert self.is_over
            self.taken_back = self.taken_back or not was_over
        else:
            assert self.is_over == was_over
        self.end_is_told(was_over)
        self.hear()

    @precondition(lambda self: self.said_last)
    @rule()
    def engine_aborts(self) -> None:
        was_over = self.is_over
        self.rig.sent.clear()
        self.rig.sender.abort()
        assert self.is_over
        self.end_is_told(was_over)
        self.hear()

    # --- readers ------------------------------------------------------------------------------------

    @rule(data=st.data(), number=st.integers(0, NUM_ATTEMPTS - 1), gap=st.integers(0, 2))
    def subscribe(self, data: st.DataObject, number: int, gap: int) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        place, attempt, was_over = self.places[index], self.attempt(index, number), self.is_over
        known = len(self.told.get(attempt, ()))
        self.rig.sent.clear()
        self.rig.subscribe(attempt, self.readers[index], max(0, known - gap))
        sent = [body for _, to, body in self.rig.sent if to == attempt]
        silent = self.rig.now - place.heard > LIVENESS_S
        if was_over or attempt in place.gone:
            assert [type(body) for body in sent] == [Refused]
        elif place.holder not in (None, attempt) and (place.through or not silent):
            place.rival = self.rig.now
            assert [body.is_open for body in sent if isinstance(body, Subscribed)] == [False]
            assert not [body for body in sent if isinstance(body, Ready)]
        else:
            if place.holder not in (None, attempt):
                place.gone.add(place.holder)
                place.rival = None
            place.holder, place.heard, self.is_set = attempt, self.rig.now, True
            assert [body.is_open for body in sent if isinstance(body, Subscribed)] == [True]
        self.hear()

    @rule(data=st.data(), number=st.integers(0, NUM_ATTEMPTS - 1), wrong=st.booleans())
    def release(self, data: st.DataObject, number: int, wrong: bool) -> None:
        """Of what this attempt was told, or of what another was; or in a generation that was never announced."""
        index = data.draw(st.integers(0, len(self.readers) - 1))
        attempt, place, was_over = self.attempt(index, number), self.places[index], self.is_over
        pulled = dict(self.told.get(attempt) or (self.published if data.draw(st.booleans()) else {}))
        if wrong and pulled:
            pulled[min(pulled)] += 1 << 40
        self.rig.sent.clear()
        verdict = self.rig.release(attempt, pulled, self.readers[index])
        assert verdict.unchanged == (verdict.cause is None)
        if pulled:
            assert verdict.unchanged == (not was_over and not wrong and place.holder == attempt)
        if verdict.unchanged and not was_over and place.holder in (None, attempt):
            place.holder, place.through, self.is_set = attempt, True, True
        self.hear()

    @rule(data=st.data(), number=st.integers(0, NUM_ATTEMPTS - 1))
    def reader_aborts(self, data: st.DataObject, number: int) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        attempt, place, was_over = self.attempt(index, number), self.places[index], self.is_over
        self.rig.sent.clear()
        cause = Failure(FailureReason.ABORTED, "enough")
        self.rig.sender.on_abort(b"x", attempt, Abort(cause, self.readers[index]))
        assert [body for _, to, body in self.rig.sent if to == attempt and isinstance(body, AbortAck)]
        ends = place.holder in (None, attempt) and attempt not in place.gone and not place.through
        assert self.is_over == (was_over or ends)
        self.hear()

    @precondition(lambda self: self.is_set)
    @rule(what=st.sampled_from(["subscribe", "release", "abort"]))
    def stranger(self, what: str) -> None:
        before = self.rig.sender.poll()
        self.rig.sent.clear()
        if what == "subscribe":
            self.rig.subscribe(99, STRANGER)
            assert [type(body) for _, _, body in self.rig.sent] == [Refused]
        elif what == "release":
            assert not self.rig.release(99, self.published, STRANGER).unchanged
        else:
            self.rig.sender.on_abort(b"x", 99, Abort(Failure(FailureReason.ABORTED, "enough"), STRANGER))
        assert self.rig.sender.poll() is before

    @rule(seconds=st.sampled_from([1.0, 1.0, LIVENESS_S + 1, LIVENESS_S + 1, LEASE_S + 1]), stood_still=st.booleans())
    def time_passes(self, seconds: float, stood_still: bool) -> None:
        self.rig.now += seconds
        was_over = self.is_over
        self.rig.sent.clear()
        self.rig.sender.expire(self.rig.now, self.rig.now if stood_still else 0.0)
        if self.is_over and not was_over:
            assert self.rig.sender.poll() is SenderState.EXPIRED
            self.end_is_told(was_over)
        elif not was_over and not stood_still:
            for place in self.places:
                is_wanted = place.rival is not None and self.rig.now - place.rival <= LIVENESS_S
                is_dead = place.holder in self.told and not place.through
                assert not is_dead or is_wanted or self.rig.now - place.heard <= LIVENESS_S, "a dead reader holds pages"
        self.hear()

    # --- what must hold -----------------------------------------------------------------------------

    def end_is_told(self, was_over: bool) -> None:
        """Readers that still needed the request hear of its end, and once."""
        told = [to for _, to, body in self.rig.sent if isinstance(body, Failed)]
        if was_over:
            assert told == []
        elif self.is_over:
            readers = [one.holder for one in self.places if one.holder is not None and not one.through]
            assert sorted(told) == sorted(readers)

    @invariant()
    def the_end_is_one(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert len(self.ends) <= 1
        state = self.rig.sender.poll()
        if state is SenderState.RELEASED:
            assert self.said_last
            assert all(one.through for one in self.places)
            assert not self.taken_back
            assert self.rig.sender.failure is None
        elif state.is_final:
            assert self.rig.sender.failure
        if state.is_final:
            for attempt, pulled in self.told.items():
                index = (attempt - 1) // NUM_ATTEMPTS
                assert not pulled or not self.rig.release(attempt, pulled, self.readers[index]).unchanged


TestSenderMachine = SenderMachine.TestCase
TestSenderMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("num_orders", [150, pytest.param(1500, marks=pytest.mark.thorough)])
def test_the_same_holds_in_many_more_orders(num_orders: int) -> None:
    run_state_machine_as_test(
        SenderMachine, settings=hypothesis_settings(max_examples=num_orders, stateful_step_count=40)
    )
