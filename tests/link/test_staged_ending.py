"""Staged requests that wait, are taken back, or end badly: always in bounded time, and no slot is lost on a side."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from pdlink.backends.base import PullHandle, PullStatus, Settled
from pdlink.control.frames import Stage, Staged
from pdlink.decode import way_picker
from pdlink.errors import TransferFailed
from pdlink.prefill import packer
from pdlink.prefill.packer import Ticket
from pdlink.prefill.stager import Stager
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.proxy import put_between
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Gate,
    Site,
    assert_all,
    assert_whole,
    finished,
    make_layout,
    wait_until,
)
from tests.link.staged import (
    NUM_PAGES,
    HeldCopy,
    arena,
    assert_slots_back,
    gated,
    give_all,
    hold_all,
    num_packed,
    pair,
    publish_scattered,
    receive,
    serve,
    staged_site,
)

pytestmark = pytest.mark.backend("ipc")


@pytest.fixture
def site(stack: contextlib.ExitStack) -> Site:
    return staged_site(stack)


# --- waits for slots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_pull_waits_while_all_slots_are_taken_and_then_goes_on(site: Site, side: str) -> None:
    _, owners, decode = pair(site)
    nodes = [owner.node for owner in owners] if side == "prefill" else [decode.node]
    held = [hold_all(node) for node in nodes]
    receiver, target = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    waiting = [arena(node).slots._waiters for node in nodes]
    wait_until(lambda: all(waiting))
    assert decode.pool.find_touched({}) is None
    for node, slots in zip(nodes, held, strict=True):
        give_all(node, slots)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


@pytest.mark.parametrize(
    ("side", "text"),
    [("prefill", "PDLINK_STAGING_SLOTS on prefill"), ("decode", "own staging slots came free")],
)
def test_a_wait_for_a_slot_ends_with_its_deadline_and_says_whose(site: Site, side: str, text: str) -> None:
    layout = make_layout(4)
    short_s, long_s = 3.0, 60.0  # the request after it has no longer
    owners = site.prefill(layout, 2, staging_timeout_s=short_s if side == "prefill" else long_s)
    decode = site.decode(layout, staging_slots=4, staging_timeout_s=short_s if side == "decode" else long_s)
    node = owners[1].node if side == "prefill" else decode.node
    held = hold_all(node)
    receiver, _ = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    with pytest.raises(TransferFailed, match=text) as failure:
        receiver.wait(DEADLINE_S)
    assert "PDLINK_STAGING_TIMEOUT_S" in str(failure.value)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.TIMEOUT
    assert_all(senders, SenderState.ABORTED)
    give_all(node, held)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])
    serve(site, owners, decode)


def test_an_owner_that_packs_nothing_is_given_up_by_name(site: Site, stack: contextlib.ExitStack) -> None:
    layout = make_layout(4)
    owners, decode = (
        site.prefill(layout, 2, register=False),
        site.decode(layout, staging_slots=4, staging_timeout_s=3.0),
    )
    proxies = put_between(site, stack, owners)
    proxies[1].to_prefill = lambda frame: () if isinstance(frame.body, Stage) else (frame,)
    receiver, _ = receive(site, decode)
    publish_scattered(site, owners, NUM_PAGES)
    with pytest.raises(TransferFailed, match="has staged nothing") as failure:
        receiver.wait(DEADLINE_S)
    assert owners[1].worker.rank.worker_id in str(failure.value)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


def test_while_one_piece_is_on_the_wire_the_next_one_is_packed(site: Site) -> None:
    owners = site.prefill(make_layout(4), 1)
    decode, gate = gated(site)
    receiver, target = receive(site, decode)
    publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(1)
    wait_until(lambda: num_packed(owners[0]) == 2)
    assert not gate.open.is_set()
    gate.open.set()
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)


@pytest.mark.parametrize(
    "at_once", [pytest.param(1000, marks=pytest.mark.slow), 40, pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_thousand_requests_over_single_slots_never_wait_for_each_other(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Two owners, two decodes, one slot each: whoever holds one waits for nothing that waits for it. Owners stage
    unasked, too, whenever theirs is free, which it is the more often the fewer requests there are at once."""
    site = staged_site(stack, staging_slots=1, staging_slot_bytes=64 << 10, max_transfers=4096)
    layout = make_layout(2, latent_bytes=16)
    owners = site.prefill(layout, 2, num_pages=64)
    decodes = [site.decode(layout, name=f"dec{number}", num_pages=1024) for number in range(2)]
    for decode in decodes:  # so that all those that follow say what may be staged unasked
        receiver = decode.worker.receive(f"first {decode.worker.instance}", site.instance, {"kv": [1000]}, PAGE_SIZE)
        publish_scattered(site, owners, 1, f"first {decode.worker.instance}")
        assert set(receiver.wait(DEADLINE_S).ways.values()) == {("staged",)}
    begun: list[Ticket] = []
    begin = Stager.begin
    monkeypatch.setattr(Stager, "begin", lambda self, tickets: (begun.extend(tickets), begin(self, tickets)))
    chance = random.Random(11)
    names = [f"t{number}" for number in range(1000)]
    where = {name: (decodes[number % 2], 2 * (number // 2)) for number, name in enumerate(names)}
    for owner in owners:
        owner.taken = {"kv": [0, 1]}
    # The bytes are those of one request: what is looked at here is that all of them come.
    for owner in owners:
        owner.pool.fill("t", {"kv": [7, 3]})
    for first in range(0, len(names), at_once):
        some, receivers = names[first : first + at_once], {}
        for name in chance.sample(some, len(some)):
            decode, page = where[name]
            receivers[name] = decode.worker.receive(name, site.instance, {"kv": [page + 1, page]}, 2 * PAGE_SIZE)
        for owner in owners:
            for name in chance.sample(some, len(some)):
                owner.worker.open(name).publish([7, 3], last=True)
        for name in some:
            assert set(receivers[name].wait(DEADLINE_S).ways.values()) == {("staged",)}
    for name in chance.sample(names, 50):
        decode, page = where[name]
        assert decode.pool.find_wrong("t", {"kv": [page + 1, page]}) is None
    assert len(begun) >= (100 if at_once == 8 else 1)
    assert_slots_back([one.node for one in (*owners, *decodes)])


# --- pages taken back --------------------------------------------------------------------------------


def test_pages_withdrawn_before_they_are_asked_for_never_make_a_success(site: Site) -> None:
    _, owners, decode = pair(site)
    held = hold_all(decode.node)
    receiver, _ = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    wait_until(lambda: bool(arena(decode.node).slots._waiters))
    senders[1].withdraw(owners[1].taken["kv"][:1])
    owners[1].pool.fill("someone else", owners[1].taken)
    give_all(decode.node, held)
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert_slots_back([decode.node, *(owner.node for owner in owners)])
    serve(site, owners, decode)


def test_pages_withdrawn_while_they_are_packed_are_not_given_to_the_reader(
    site: Site, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 1, register=False), site.decode(layout)
    (proxy,) = put_between(site, stack, owners)
    held = HeldCopy(monkeypatch, packer)
    receiver, _ = receive(site, decode)
    (sender,) = publish_scattered(site, owners, NUM_PAGES)
    assert held.begun.acquire(timeout=DEADLINE_S)
    sender.withdraw(owners[0].taken["kv"][:1])  # does not wait for the packing, which only reads
    owners[0].pool.fill("someone else", owners[0].taken)
    held.go.set()
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.GENERATION
    assert_slots_back([decode.node, owners[0].node])
    assert proxy.count(Staged) == 0


def test_pages_withdrawn_after_they_were_packed_never_make_a_success(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site)
    receiver, _ = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(2)
    senders[1].withdraw(owners[1].taken["kv"][:1])
    owners[1].pool.fill("someone else", owners[1].taken)
    assert_slots_back([owners[1].node])
    gate.open.set()
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert_slots_back([decode.node, *(owner.node for owner in owners)])
    serve(site, owners, decode)


# --- ends in the middle ------------------------------------------------------------------------------


def test_an_abort_with_pieces_on_the_wire_returns_every_slot_once_the_wire_is_quiet(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site)
    receiver, _ = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(2)
    gate.quiet.clear()
    receiver.abort()
    assert_all(senders, SenderState.ABORTED)
    assert_slots_back([owner.node for owner in owners])
    wait_until(lambda: receiver.poll() is ReceiverState.DRAINING)
    # Bytes may still land in the slots of what was posted, so nobody else gets them.
    assert arena(decode.node).slots.num_free <= arena(decode.node).slots.num_slots - 2
    gate.quiet.set()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    gate.open.set()
    assert_slots_back([decode.node])
    serve(site, owners, decode)


def test_a_wire_that_never_says_quiet_is_fenced_and_its_slots_come_back(site: Site) -> None:
    owners = site.prefill(make_layout(4), 1)
    decode, gate = gated(site, drain_timeout_s=0.3)
    receiver, _ = receive(site, decode)
    publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(1)
    gate.quiet.clear()
    receiver.abort()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    assert set(gate.fenced) == {owners[0].worker.rank.worker_id}  # once for each piece on the wire
    assert_slots_back([decode.node, owners[0].node])
    gate.quiet.set()
    gate.open.set()
    serve(site, owners, decode)


def test_an_abort_while_one_piece_is_unpacked_waits_for_the_next_one_on_the_wire(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = site.prefill(make_layout(4), 1)
    decode, gate = gated(site)
    settled = threading.Semaphore(0)
    settle = gate.settle

    def look(handle: PullHandle) -> Settled:
        settled.release()
        return settle(handle)

    first: list[PullHandle] = []

    def poll(handle: PullHandle) -> PullStatus:
        first.append(handle)
        return Gate.poll(gate, handle) if handle is first[0] else PullStatus.PENDING

    monkeypatch.setattr(gate, "settle", look)
    monkeypatch.setattr(gate, "poll", poll)
    held = HeldCopy(monkeypatch, way_picker)
    receiver, _ = receive(site, decode)
    publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(2)  # both are on the wire: what is posted after the first has landed may wait for its unpacking
    gate.open.set()
    assert held.begun.acquire(timeout=DEADLINE_S)
    gate.quiet.clear()
    receiver.abort()
    held.go.set()
    assert settled.acquire(timeout=DEADLINE_S)
    assert receiver.poll() is ReceiverState.DRAINING
    assert arena(decode.node).slots.num_free < 4
    gate.quiet.set()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    assert_slots_back([decode.node, owners[0].node])


def test_an_abort_while_slots_are_waited_for_ends_at_once(site: Site) -> None:
    _, owners, decode = pair(site)
    held = [hold_all(owner.node) for owner in owners]
    receiver, _ = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    wait_until(lambda: all(arena(owner.node).slots._waiters for owner in owners))
    receiver.abort()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    assert_all(senders, SenderState.ABORTED)
    assert_slots_back([decode.node])
    for owner, slots in zip(owners, held, strict=True):
        give_all(owner.node, slots)
    serve(site, owners, decode)


def test_a_reader_that_dies_with_packed_pieces_loses_them_in_bounded_time(
    site: Site, stack: contextlib.ExitStack
) -> None:
    """Nothing of it comes through any more, and its wire never ends."""
    layout = make_layout(4)
    owners = site.prefill(layout, 2, register=False, staging_timeout_s=4.0)
    decode, gate = gated(site)
    proxies = put_between(site, stack, owners)
    receiver, _ = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(2)
    wait_until(lambda: all(num_packed(owner) for owner in owners))
    for proxy in proxies:
        proxy.to_prefill = proxy.to_decode = lambda frame: ()
    assert_all(senders, SenderState.ABORTED)
    for sender in senders:
        # Whichever of the two is seen first: a packed piece that stays where it is, or one that waits for its slot.
        with pytest.raises(TransferFailed, match=r"(kept staging slot|slots came free).*PDLINK_STAGING_TIMEOUT_S"):
            sender.raise_failure()
    assert_slots_back([owner.node for owner in owners])
    gate.open.set()
    receiver.abort()
    finished(receiver)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_worker_that_closes_with_pieces_on_their_way_leaves_no_slot_taken(site: Site, side: str) -> None:
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site)
    receiver, senders = receive(site, decode)[0], publish_scattered(site, owners, NUM_PAGES)
    gate.wait_held(2)
    closing = owners[0].worker if side == "prefill" else decode.worker
    closing.close()
    gate.open.set()
    assert finished(receiver).poll() is not ReceiverState.DONE
    assert_all(senders, SenderState.ABORTED)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


def test_an_owner_that_closes_while_it_packs_waits_for_the_end_of_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the pages may unmap them when `close` has returned."""
    _, owners, decode = pair(site, 1)
    held = HeldCopy(monkeypatch, packer)
    receiver, _ = receive(site, decode)
    publish_scattered(site, owners, NUM_PAGES)
    assert held.begun.acquire(timeout=DEADLINE_S)
    closing = threading.Thread(target=owners[0].worker.close)
    closing.start()
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert closing.is_alive()
    held.go.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert_slots_back([decode.node, owners[0].node])
