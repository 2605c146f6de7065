"""One prefill rank that stages unasked, against bare frames: what it stages, for whom, and when it had better not."""

from __future__ import annotations

import contextlib

import pytest

from pdlink.bootstrap.messages import PROTOCOL
from pdlink.control.frames import Credit, Failed, PageSpan, Ready, Subscribe
from pdlink.errors import TransferFailed
from pdlink.layout.fingerprint import fingerprint
from pdlink.testing.pattern import page_pattern
from pdlink.transfer.ahead import ahead_ticket
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import SenderState
from tests.link.rig import wait_until
from tests.link.staged import LATENT_BYTES, arena, assert_slots_back, num_packed
from tests.link.test_stage_frames import PAGES, SOLO, Rig, stage

pytestmark = pytest.mark.backend("ipc")

ALL = PageSpan("kv", 0, 3)


class Unasked(Rig):
    """A reader that says that pieces may be staged for it unasked."""

    def say(self, piece_bytes: int, num_pieces: int = 4, span: PageSpan = ALL) -> None:
        said = (self.owner.worker.rank.incarnation, (span,), 0, ("ipc",), None, piece_bytes, num_pieces)
        self.peer.send(1, Subscribe(PROTOCOL, fingerprint(self.layout).digest, SOLO, *said))

    def told(self) -> int:
        (ready,) = self.peer.answers(Ready)
        return ready.staged_pieces


@pytest.fixture
def unasked(stack: contextlib.ExitStack) -> Unasked:
    return Unasked(stack)


def test_as_many_pieces_are_staged_unasked_as_there_are_free_slots(unasked: Unasked) -> None:
    unasked.say(3 * LATENT_BYTES)
    unasked.sender.publish(PAGES, last=True)
    assert unasked.told() == 2  # of three: each layer of `latent` has one, and both of `index_k` share one
    wait_until(lambda: num_packed(unasked.owner) == 2)
    assert unasked.slots.num_free == 0


def test_what_is_staged_unasked_is_what_the_reader_would_have_asked_for(unasked: Unasked) -> None:
    unasked.say(3 * LATENT_BYTES, 1)
    unasked.sender.publish(PAGES, last=True)
    (got,) = unasked.staged()
    assert (got.ticket, got.nbytes) == (ahead_ticket(0, 0), 2 * 3 * 132 * 64)
    packed = arena(unasked.owner.node).block.array[got.offset : got.offset + got.nbytes].tobytes()
    cells = [(layer, page) for layer in (0, 1) for page in range(3)]
    wanted = (page_pattern("t", "index_k", layer, page, 132 * 64).tobytes() for layer, page in cells)
    assert packed == b"".join(wanted)
    unasked.ask(Credit((got.slot,), (got.stamp,)))
    assert_slots_back([unasked.owner.node])


def test_a_publication_is_staged_unasked_once(unasked: Unasked) -> None:
    unasked.say(3 * LATENT_BYTES, 1)
    unasked.sender.publish(PAGES, last=True)
    assert unasked.told() == 1
    unasked.say(3 * LATENT_BYTES, 1)
    assert unasked.told() == 0
    assert unasked.slots.num_free == 1


@pytest.mark.parametrize(
    ("piece_bytes", "num_pieces", "span"),
    [
        (0, 4, ALL),
        (3 * LATENT_BYTES, 0, ALL),
        (1, 4, ALL),
        (LATENT_BYTES - 1, 4, ALL),
        ((1 << 64) - 1, (1 << 32) - 1, ALL),  # larger than a slot
        (3 * LATENT_BYTES, 4, PageSpan("kv", 1, 2)),
        (3 * LATENT_BYTES, 4, PageSpan("kv", 0, 2)),
        (3 * LATENT_BYTES, 4, PageSpan("index", 0, 3)),
    ],
)
def test_what_cannot_be_staged_unasked_waits_to_be_asked_for(
    unasked: Unasked, piece_bytes: int, num_pieces: int, span: PageSpan
) -> None:
    unasked.say(piece_bytes, num_pieces, span)
    unasked.sender.publish(PAGES, last=True)
    assert unasked.told() == 0
    assert unasked.slots.num_free == 2
    unasked.ask(stage())
    unasked.staged()


def test_while_somebody_who_asked_waits_for_a_slot_nothing_is_staged_unasked(unasked: Unasked) -> None:
    """It would hold a slot behind whoever waits for it."""
    unasked.say(3 * LATENT_BYTES)
    unasked.sender.publish(PAGES[:1])
    unasked.peer.collect()
    held = [unasked.slots.try_take() for _ in range(2)]
    for ticket in range(1, 4):
        unasked.ask(stage(ticket, first_page=0, num_pages=1))
    wait_until(lambda: unasked.slots.is_wanted)
    unasked.sender.publish(PAGES[1:], last=True)
    assert unasked.told() == 0
    assert held


def test_no_reader_asks_with_a_ticket_that_the_owner_gives(unasked: Unasked) -> None:
    unasked.publish()
    unasked.ask(stage(ahead_ticket(0, 0)))
    (failed,) = unasked.peer.answers(Failed)
    assert failed.cause.reason is FailureReason.PROTOCOL
    assert_slots_back([unasked.owner.node])


def test_a_reader_that_keeps_what_was_staged_unasked_loses_it_in_bounded_time(stack: contextlib.ExitStack) -> None:
    unasked = Unasked(stack, staging_timeout_s=1.0)
    unasked.say(3 * LATENT_BYTES)
    unasked.sender.publish(PAGES, last=True)
    wait_until(lambda: unasked.sender.poll() is SenderState.ABORTED)
    assert_slots_back([unasked.owner.node])
    with pytest.raises(TransferFailed, match="kept staging slot"):
        unasked.sender.raise_failure()


def test_many_publications_that_are_staged_unasked_and_given_back_leave_nothing_behind(unasked: Unasked) -> None:
    unasked.say(3 * LATENT_BYTES, 1)
    desk = unasked.owner.worker._desk._stager
    assert desk is not None
    for number in range(3):
        unasked.sender.publish(PAGES[number : number + 1])
        (got,) = unasked.staged()
        assert got.ticket == ahead_ticket(number, 0)
        unasked.ask(Credit((got.slot,), (got.stamp,)))
        assert_slots_back([unasked.owner.node])
    (reading,) = desk._readings.values()
    assert not reading.over
    assert not reading.tickets
    unasked.ask(stage(first_page=0, num_pages=1))  # whose tickets are counted apart
    unasked.staged()
