"""One prefill rank against bare staging frames: foreign, malformed, late and repeated ones. No slot is ever lost."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from pdlink.bootstrap.messages import PROTOCOL
from pdlink.control.frames import Abort, AbortAck, Credit, Failed, Ready, Release, Stage, Staged, Subscribe, Verdict
from pdlink.control.loop import ControlLoop
from pdlink.errors import TransferFailed
from pdlink.layout.fingerprint import fingerprint
from pdlink.layout.layer_plan import LayerPlan
from pdlink.layout.parallel import ParallelSizes
from pdlink.layout.readers import ReaderSet
from pdlink.prefill import packer
from pdlink.prefill.sender import Sender
from pdlink.prefill.stage_desk import MAX_TICKETS
from pdlink.testing.pattern import page_pattern
from pdlink.transfer.failure import Failure, FailureReason
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, Owner, make_layout, wait_until
from tests.link.staged import LATENT_BYTES, HeldCopy, arena, assert_slots_back, staged_site
from tests.prefill.peer import Peer

pytestmark = pytest.mark.backend("ipc")

LAYERS = {"latent": (0,)}
PAGES = [5, 2, 9]
SOLO = ReaderSet("dec")


class Rig:
    """An owner of two layers with pages published of request "t", and a reader made of frames."""

    def __init__(self, stack: contextlib.ExitStack, **settings: object) -> None:
        self.site = staged_site(stack, **({"resend_interval_s": 1000.0} | settings))
        self.layout = make_layout(4)
        self.owner: Owner = self.site.prefill(self.layout, 2)[0]
        loop = ControlLoop().start()
        stack.callback(loop.close)
        self.peer = Peer(loop, self.owner.worker)
        self.other = Peer(loop, self.owner.worker)
        self.sender: Sender = self.owner.open("t", {"kv": PAGES})
        self.slots = arena(self.owner.node).slots

    def subscribe(self, attempt: int = 1, peer: Peer | None = None) -> list[Ready]:
        body = Subscribe(
            PROTOCOL, fingerprint(self.layout).digest, SOLO, self.owner.worker.rank.incarnation, (), 0, ("ipc",)
        )
        peer = peer or self.peer
        peer.send(attempt, body)
        return peer.answers(Ready, attempt)

    def publish(self) -> Ready:
        """The first publication as the reader heard of it."""
        self.sender.publish(PAGES, last=True)
        (ready,) = self.subscribe()
        return ready

    def staged(self, attempt: int = 1) -> list[Staged]:
        """What comes until there is an answer: packing takes a moment."""
        found: list[Staged] = []

        def look() -> bool:
            found.extend(self.peer.answers(Staged, attempt))
            return bool(found)

        wait_until(look)
        return found

    def ask(self, body: Stage | Credit, attempt: int = 1) -> None:
        self.peer.send(attempt, body)


@pytest.fixture
def rig(stack: contextlib.ExitStack) -> Rig:
    return Rig(stack)


def stage(ticket: int = 1, **changes: object) -> Stage:
    return dataclasses.replace(Stage(ticket, 0, 1, 2, LAYERS), **changes)


def test_a_piece_lies_in_its_slot_as_it_was_asked_for(rig: Rig) -> None:
    ready = rig.publish()
    rig.ask(stage(layers={"latent": (0, 1), "index_k": (1,)}, num_pages=1))
    (got,) = rig.staged()
    area = arena(rig.owner.node).area
    assert (got.ticket, got.offset, got.generation) == (1, got.slot * area.slot_bytes, ready.generation)
    cells = [("index_k", 1, 132 * 64), ("latent", 0, LATENT_BYTES), ("latent", 1, LATENT_BYTES)]
    assert got.nbytes == sum(nbytes for _, _, nbytes in cells)
    packed = arena(rig.owner.node).block.array[got.offset : got.offset + got.nbytes].tobytes()
    assert packed == b"".join(page_pattern("t", name, layer, 1, nbytes).tobytes() for name, layer, nbytes in cells)


def test_a_stage_that_is_repeated_takes_one_slot_and_is_answered_alike(rig: Rig) -> None:
    rig.publish()
    for _ in range(5):
        rig.ask(stage())
    first = rig.staged()[0]
    rig.ask(stage())
    assert set(rig.staged()) == {first}
    assert rig.slots.num_free == 1


@pytest.mark.parametrize("how", ["asks", "subscribes"])
def test_a_reader_whose_connection_was_made_anew_gets_its_answer_along_the_new_one(rig: Rig, how: str) -> None:
    """What it asked for along the old one would be answered to nobody, until its pull has waited too long."""
    rig.publish()
    held = [rig.slots.try_take() for _ in range(2)]
    rig.ask(stage())
    wait_until(lambda: rig.slots.is_wanted)
    first, rig.peer = rig.peer, rig.other
    if how == "asks":
        rig.ask(stage())
    else:
        rig.subscribe()
    rig.peer.collect()
    for slot in held:
        assert slot is not None
        rig.slots.give(slot)
    (got,) = rig.staged()
    assert got.ticket == 1
    assert first.answers(Staged) == []


def test_a_stage_that_comes_again_after_its_credit_takes_no_slot(rig: Rig) -> None:
    rig.publish()
    rig.ask(stage())
    (got,) = rig.staged()
    rig.ask(Credit((got.slot,), (got.stamp,)))
    rig.ask(stage())
    assert rig.peer.answers(Staged) == []
    assert_slots_back([rig.owner.node])
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_a_credit_that_comes_late_does_not_free_the_slot_of_another_piece(rig: Rig) -> None:
    rig.publish()
    rig.ask(stage(1))
    (first,) = rig.staged()
    back = Credit((first.slot,), (first.stamp,))
    rig.ask(back)
    for ticket in (2, 3):
        rig.ask(stage(ticket))
    wait_until(lambda: rig.slots.num_free == 0)
    for wrong in (
        back,
        back,
        Credit((first.slot,)),
        Credit((first.slot, 99), (0, first.stamp)),
        Credit(()),
        Credit((1 << 60,), (first.stamp,)),
    ):
        rig.ask(wrong)
    rig.peer.collect()
    assert rig.slots.num_free == 0


def test_nobody_gives_back_the_slots_of_another_attempt(rig: Rig) -> None:
    rig.publish()
    rig.ask(stage())
    (got,) = rig.staged()
    rig.ask(Credit((got.slot,), (got.stamp,)), attempt=2)
    rig.peer.send(1, Credit((got.slot,), (got.stamp,)), "another")
    rig.peer.collect()
    assert rig.slots.num_free == 1
    assert rig.sender.poll() is SenderState.PUBLISHED


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sequence": 1}, "no publication 1"),
        ({"sequence": 1 << 63}, "no publication"),
        ({"layers": {"latent": (3,)}}, "'latent' layer 3, which it does not announce"),
        ({"layers": {"nothing": (0,)}}, "'nothing' layer 0, which it does not announce"),
        ({"layers": {}}, "no layer"),
        ({"first_page": 2, "num_pages": 2}, r"page positions \[2, 4\)"),
        ({"first_page": 1 << 63}, "page positions"),
        ({"num_pages": 0}, r"page positions \[1, 1\)"),
        ({"num_pages": (1 << 64) - 1}, "page positions"),
        ({"layers": {"latent": (0, 1)}, "first_page": 0, "num_pages": 3}, "a slot has 131072"),
    ],
)
def test_a_reader_that_asks_for_what_is_not_there_fails_its_request_and_takes_no_slot(
    rig: Rig, changes: dict[str, object], text: str
) -> None:
    rig.publish()
    rig.ask(stage(**changes))
    (failed,) = rig.peer.answers(Failed)
    assert failed.cause.reason is FailureReason.PLAN
    assert failed.cause.worker_id == rig.owner.worker.rank.worker_id
    assert rig.sender.poll() is SenderState.ABORTED
    assert_slots_back([rig.owner.node])
    with pytest.raises(TransferFailed, match=text):
        rig.sender.raise_failure()


def test_a_reader_that_asks_for_pieces_without_end_fails_its_request(rig: Rig) -> None:
    rig.publish()
    for ticket in range(1, MAX_TICKETS + 1):
        rig.ask(stage(ticket))
    rig.peer.collect()
    assert rig.sender.poll() is SenderState.PUBLISHED
    rig.ask(stage(1))  # a repeat is no new piece
    rig.peer.collect()
    assert rig.sender.poll() is SenderState.PUBLISHED
    rig.ask(stage(MAX_TICKETS + 1))
    (failed,) = rig.peer.answers(Failed)
    assert failed.cause.reason is FailureReason.LIMIT
    assert_slots_back([rig.owner.node])


@pytest.mark.parametrize("who", ["no such request", "no reader"])
def test_a_stranger_is_told_off_and_harms_nobody(rig: Rig, who: str) -> None:
    rig.publish()
    name, attempt = ("another", 1) if who == "no such request" else ("t", 99)
    rig.other.send(attempt, stage(), name)
    (failed,) = rig.other.answers(Failed)
    assert failed.cause.reason is FailureReason.STALE
    rig.ask(stage())
    rig.staged()
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_a_stage_after_the_release_is_a_late_repeat_and_says_nothing(rig: Rig) -> None:
    ready = rig.publish()
    rig.ask(stage())
    rig.staged()
    rig.peer.send(1, Release(SOLO, {0: ready.generation}))
    assert rig.peer.answers(Verdict) == [Verdict(True)]
    assert_slots_back([rig.owner.node])
    rig.ask(stage(2))
    assert rig.peer.collect() == []
    assert rig.slots.num_free == 2


def test_an_abort_takes_the_slots_at_once_and_later_stages_say_nothing(rig: Rig) -> None:
    rig.publish()
    rig.ask(stage())
    rig.staged()
    rig.peer.send(1, Abort(Failure(FailureReason.ABORTED, "enough"), SOLO))
    assert AbortAck() in [one.body for one in rig.peer.collect()]
    assert rig.slots.num_free == 2
    rig.ask(stage(2))
    assert rig.peer.collect() == []
    assert rig.slots.num_free == 2


def fall_silent(rig: Rig) -> None:
    """The reader has not been heard for long, and another attempt wants its place."""
    for one in rig.sender._readers:
        one.rival = rig.owner.node.loop.clock()
        one.heard -= 60.0


def test_an_attempt_that_a_newer_one_replaced_loses_its_slots_and_cannot_succeed(rig: Rig) -> None:
    """A reader that was silent for long, and whose process was started again meanwhile."""
    ready = rig.publish()
    rig.ask(stage())
    rig.staged()
    fall_silent(rig)
    assert rig.subscribe(2, rig.other) != []
    assert_slots_back([rig.owner.node])
    rig.peer.send(1, Release(SOLO, {0: ready.generation}))
    (verdict,) = rig.peer.answers(Verdict)
    assert not verdict.unchanged
    assert rig.sender.poll() is SenderState.PUBLISHED


def test_an_attempt_that_is_replaced_while_its_piece_is_packed_gets_no_slot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.publish()
    held = HeldCopy(monkeypatch, packer)
    rig.ask(stage())
    assert held.begun.acquire(timeout=DEADLINE_S)
    fall_silent(rig)
    assert rig.subscribe(2, rig.other) != []
    desk = rig.owner.worker._desk._stager
    assert desk is not None
    wait_until(lambda: not list(desk._held()))
    held.go.set()
    assert_slots_back([rig.owner.node])
    assert rig.peer.answers(Staged, 1) == []


def test_a_slot_that_is_not_given_back_is_asked_for_again(stack: contextlib.ExitStack) -> None:
    rig = Rig(stack, resend_interval_s=0.1)
    rig.publish()
    rig.ask(stage())
    first = rig.staged()[0]
    rig.peer.collect()
    assert set(rig.staged()) == {first}


def test_without_slots_a_stage_fails_the_request_and_names_the_setting(stack: contextlib.ExitStack) -> None:
    site = staged_site(stack)
    layout = make_layout(4)
    owner = site.prefill(layout, 2, staging_slots=0)[0]
    assert owner.worker.registration().rank.staging is None
    loop = ControlLoop().start()
    stack.callback(loop.close)
    peer = Peer(loop, owner.worker)
    peer.send(1, stage(), "t")
    (failed,) = peer.answers(Failed)
    assert "PDLINK_STAGING_SLOTS" in failed.cause.fix


def test_every_rank_that_packs_says_where(stack: contextlib.ExitStack) -> None:
    """A rank that owns nothing packs nothing."""
    site = staged_site(stack)
    layout = make_layout(1)
    owners = site.prefill(layout, 2)
    assert [bool(cells["latent"]) for cells in LayerPlan.balanced(layout, ParallelSizes(cp=2)).owned.values()] == [
        True,
        False,
    ]
    assert owners[0].worker.registration().rank.staging == arena(owners[0].node).area
    assert owners[1].worker.registration().rank.staging is None
