"""How requests end badly: aborts in every state, pages reused under a reader, ranks that go, workers that close."""

from __future__ import annotations

import threading

import pytest

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.decode.receiver import Receiver
from pdlink.errors import StateError, TransferFailed
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.sender import Sender
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Decode,
    Gate,
    Owner,
    Site,
    assert_all,
    assert_whole,
    finished,
    make_layout,
    wait_until,
)

TARGET = {"kv": [4, 3, 9]}
SOURCE = [1, 2, 5]


def gated(site: Site, **settings: object) -> tuple[Decode, Gate]:
    gates: list[Gate] = []

    def wrap(inner: Backend) -> Backend:
        gates.append(Gate(inner))
        return gates[0]

    return site.decode(make_layout(4), wrap=wrap, **settings), gates[0]


def start(site: Site, owners: list[Owner], decode: Decode, *, last: bool = True) -> tuple[Receiver, list[Sender]]:
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    for sender in senders:
        sender.publish(SOURCE, last=last)
    return receiver, senders


def serve(site: Site, owners: list[Owner], decode: Decode, transfer_id: str = "good") -> None:
    receiver = decode.worker.receive(transfer_id, site.instance, TARGET, 3 * PAGE_SIZE)
    senders = [owner.open(transfer_id, {"kv": SOURCE}) for owner in owners]
    for sender in senders:
        sender.publish(SOURCE, last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, transfer_id, TARGET)
    assert_all(senders, SenderState.RELEASED)


# --- pages reused under a reader ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["withdraw", "abort", "expire"])
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "digests"])
def test_pages_taken_back_and_reused_while_a_reader_pulls_never_make_a_success(
    site: Site, how: str, verify: bool
) -> None:
    lease = {"publication_lease_s": 0.3} if how == "expire" else {}
    owners = site.prefill(make_layout(4), 2, verify_digests=verify, **lease)
    decode, gate = gated(site, verify_digests=verify, keepalive_interval_s=1000)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    if how == "withdraw":
        senders[1].withdraw(SOURCE[1:2])
    elif how == "abort":
        senders[1].abort()
    wait_until(lambda: senders[1].poll().is_final)
    # The engine was told that these pages are its own again, and uses them for another request.
    owners[1].pool.fill("someone else", {"kv": SOURCE})
    gate.open.set()
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert receiver.failure
    assert receiver.failure.worker_id == owners[1].worker.rank.worker_id or how == "expire"
    with pytest.raises(TransferFailed):
        receiver.result()
    wait_until(lambda: all(one.poll().is_final for one in senders))
    serve(site, owners, decode)


def test_pages_taken_back_before_the_verdict_fail_though_all_bytes_came(site: Site) -> None:
    """The reader has pulled everything of this rank and waits for another when the pages go."""
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4), keepalive_interval_s=1000)
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    senders[0].publish(SOURCE, last=True)
    wait_until(lambda: decode.pool.view("latent", 0)[TARGET["kv"][2]].tobytes() != bytes([0xEE]) * 41984)
    senders[0].withdraw(SOURCE)
    owners[0].pool.fill("someone else", {"kv": SOURCE})
    senders[1].publish(SOURCE, last=True)
    with pytest.raises(TransferFailed, match=r"withdrawn|taken back"):
        receiver.wait(DEADLINE_S)


def test_an_engine_that_writes_published_pages_without_a_word_is_found_by_digests(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2, verify_digests=True)
    decode, gate = gated(site, verify_digests=True)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    owners[1].pool.view("index_k", 3)[SOURCE[1]][77] ^= 1
    gate.open.set()
    with pytest.raises(TransferFailed, match=r"digest of 'index_k' layer 3, page 3 differs"):
        receiver.wait(DEADLINE_S)
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.DIGEST
    assert_all(senders, SenderState.ABORTED)


# --- aborts ------------------------------------------------------------------------------------------


def test_an_abort_holds_the_pages_until_the_wire_is_quiet(site: Site) -> None:
    """A pool of few pages: the next request gets them only after the last byte of the aborted one could land."""
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    gate.quiet.clear()
    receiver.abort()
    assert_all(senders, SenderState.ABORTED)
    wait_until(lambda: receiver.poll() is ReceiverState.DRAINING)
    with pytest.raises(TransferFailed, match=r"draining"):
        receiver.result()
    assert decode.worker.num_receives == 1
    gate.quiet.set()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    gate.open.set()
    serve(site, owners, decode)


def test_a_wire_that_never_says_quiet_is_fenced_in_bounded_time(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site, drain_timeout_s=0.3)
    receiver, _ = start(site, owners, decode)
    gate.wait_held(2)
    gate.quiet.clear()
    receiver.abort()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    assert sorted(gate.fenced) == [owner.worker.rank.worker_id for owner in owners]
    gate.open.set()
    serve(site, owners, decode)


class Raising(Gate):
    """Once armed, `poll` raises what no backend may; `settle` too, and `fence`, until it is quiet."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.open.set()
        self.armed = threading.Event()

    def poll(self, handle: PullHandle) -> PullStatus:
        if self.armed.is_set():
            raise ValueError("a defect of a backend")
        return super().poll(handle)

    def settle(self, handle: PullHandle) -> Settled:
        if not self.quiet.is_set():
            raise RuntimeError("cannot tell")
        return super().settle(handle)

    def fence(self, peer: Peer) -> tuple[str, ...]:
        if not self.quiet.is_set():
            raise RuntimeError("cannot fence")
        return super().fence(peer)


def test_a_backend_that_raises_anything_is_quiet_before_the_failure_is_reported(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    made: list[Raising] = []

    def wrap(inner: Backend) -> Backend:
        made.append(Raising(inner))
        return made[0]

    decode = site.decode(make_layout(4), wrap=wrap)
    made[0].armed.set()
    made[0].quiet.clear()
    receiver, senders = start(site, owners, decode)
    assert_all(senders, SenderState.ABORTED)
    assert receiver.poll() is ReceiverState.DRAINING
    made[0].quiet.set()
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert "a defect of a backend" in str(receiver.failure)
    made[0].armed.clear()
    serve(site, owners, decode)


@pytest.mark.parametrize("when", ["resolving", "subscribed", "pulling", "before the engine opens it"])
def test_an_abort_of_decode_reaches_every_prefill_rank(site: Site, when: str) -> None:
    owners, decode = site.prefill(make_layout(4), 3), site.decode(make_layout(4))
    if when != "resolving":
        serve(site, owners, decode, "warm")
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    senders: list[Sender] = []
    if when != "before the engine opens it":
        senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    if when == "pulling":
        senders[0].publish(SOURCE)
        wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    receiver.abort("the user left")
    receiver.abort()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    wait_until(lambda: decode.worker.num_receives == 0)
    senders = senders or [owner.open("t", {"kv": SOURCE}) for owner in owners]
    assert_all(senders, SenderState.ABORTED)
    assert all(one.failure and "the user left" in one.failure.text for one in senders)
    serve(site, owners, decode)


def test_an_abort_while_resolving_still_releases_ranks_that_published(site: Site) -> None:
    """The instance becomes ready after the abort; its ranks may be holding pages for the request."""
    layout = make_layout(2)
    owners = site.prefill(layout, 2, register=False)
    decode = site.decode(layout)
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    receiver.abort()
    assert finished(receiver).poll() is ReceiverState.ABORTED
    for owner in owners:
        owner.worker.register([site.bootstrap.address])
    assert_all(senders, SenderState.ABORTED)
    wait_until(lambda: decode.worker.num_receives == 0)


@pytest.mark.parametrize("warm", [False, True], ids=["resolving", "known"])
def test_an_abort_that_meets_nothing_to_move_leaves_no_rank_waiting(site: Site, warm: bool) -> None:
    owners, decode = site.prefill(make_layout(4), 3), site.decode(make_layout(4))
    if warm:
        serve(site, owners, decode, "warm")
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    for sender in senders:
        sender.publish(SOURCE, last=True)
    receiver = decode.worker.receive("t", site.instance, {"kv": []}, 3 * PAGE_SIZE, prefix_tokens=3 * PAGE_SIZE)
    receiver.abort()
    state = finished(receiver).poll()
    assert state is (ReceiverState.DONE if warm else ReceiverState.ABORTED)
    assert_all(senders, SenderState.RELEASED if warm else SenderState.ABORTED)


def test_an_abort_of_one_reader_fails_the_other(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    decodes = [site.decode(make_layout(4)) for _ in range(2)]
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    receivers = [
        decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE, readers=ReaderSet("dec", index, 2))
        for index, decode in enumerate(decodes)
    ]
    wait_until(lambda: all(one.poll() is ReceiverState.SUBSCRIBED for one in receivers))
    senders[0].publish(SOURCE)
    wait_until(lambda: all(one.poll() is ReceiverState.PULLING for one in receivers))
    receivers[0].abort("one left")
    assert finished(receivers[0]).poll() is ReceiverState.ABORTED
    assert finished(receivers[1]).poll() is ReceiverState.FAILED
    assert "one left" in str(receivers[1].failure)
    assert_all(senders, SenderState.ABORTED)


def test_an_abort_of_prefill_fails_decode_with_its_words(site: Site) -> None:
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    receiver, senders = start(site, owners, decode, last=False)
    senders[1].abort("out of memory")
    with pytest.raises(TransferFailed, match=r"out of memory.*cp1"):
        receiver.wait(DEADLINE_S)
    assert_all(senders, SenderState.ABORTED)


# --- workers that close ------------------------------------------------------------------------------


def test_a_prefill_worker_that_closes_in_the_middle_fails_the_request_and_says_so(site: Site) -> None:
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    receiver, senders = start(site, owners, decode, last=False)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    owners[0].node.close()
    with pytest.raises(TransferFailed, match=r"pre/dp0\.pp0\.cp0\.tp0 is closing"):
        receiver.wait(DEADLINE_S)
    assert_all(senders, SenderState.ABORTED)


def test_a_decode_worker_that_closes_waits_for_its_pulls_and_tells_prefill(site: Site) -> None:
    owners = site.prefill(make_layout(4), 2)
    decode, gate = gated(site)
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    gate.quiet.clear()
    ended = []
    receiver.on_end(lambda one: ended.append(one.poll()))
    closing = threading.Thread(target=decode.node.close)
    closing.start()
    assert_all(senders, SenderState.ABORTED)
    assert not receiver.poll().is_final
    assert closing.is_alive()
    gate.quiet.set()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert ended == [ReceiverState.ABORTED]
    with pytest.raises(StateError, match="closed"):
        decode.worker.receive("u", site.instance, TARGET, 3 * PAGE_SIZE)


def test_a_decode_worker_that_closes_while_it_resolves_leaves_no_thread(site: Site) -> None:
    before = {one.name for one in threading.enumerate()}
    decode = site.decode(make_layout(2), resolve_timeout_s=0.5)
    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    decode.node.close()
    assert receiver.poll() is ReceiverState.ABORTED
    wait_until(lambda: {one.name for one in threading.enumerate()} <= before)


def test_a_callback_that_raises_or_calls_back_in_harms_nothing(site: Site) -> None:
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    seen = []
    started = threading.Event()

    def call_in(receiver: Receiver) -> None:
        """Needs the worker from another thread, and waits for it: a lock held around it would be a deadlock."""
        helper = threading.Thread(target=lambda: seen.append(receive_another().transfer_id))
        helper.start()
        helper.join(DEADLINE_S)
        started.set()

    def receive_another() -> Receiver:
        return decode.worker.receive("next", site.instance, {"kv": [0]}, PAGE_SIZE)

    receiver = decode.worker.receive("t", site.instance, TARGET, 3 * PAGE_SIZE)
    receiver.on_end(lambda one: [][1])
    receiver.on_end(call_in)
    for owner in owners:
        owner.open("t", {"kv": SOURCE}).publish(SOURCE, last=True)
    receiver.wait(DEADLINE_S)
    assert started.wait(DEADLINE_S)
    assert seen == ["next"]
    serve(site, owners, decode)


# --- restarts and links ------------------------------------------------------------------------------


def test_a_restarted_rank_serves_the_next_request_and_the_old_one_fails_cleanly(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    receiver, _ = start(site, owners, decode, last=False)
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    old = owners[1].worker.rank
    node = site.node()
    again = type(old)(old.instance, layout, old.sizes, old.rank, old.kinds, old.owned, old.regions)
    worker = node.prefill(again, [site.bootstrap.address])
    worker.wait_registered(DEADLINE_S)
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.STALE
    assert receiver.failure.worker_id == old.worker_id
    serve(site, [owners[0], Owner(node, worker, owners[1].pool)], decode)


def test_two_decode_workers_of_one_process_do_not_break_each_others_links(site: Site) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2), site.decode(layout)
    pool = site.pool(layout, {one.name: one.layers for one in layout.components})
    second = Decode(decode.node, decode.node.decode("dec2", layout, pool.regions), pool)
    serve(site, owners, decode, "a")
    serve(site, owners, second, "b")
    second.worker.close()
    serve(site, owners, decode, "c")


def test_a_request_that_runs_keeps_its_links_while_the_instance_goes_and_comes_back(site: Site) -> None:
    """As when a lease ran out for a moment: the processes are the same, so channels and pullers are."""
    layout = make_layout(4)
    owners = site.prefill(layout, 2, register=False)
    decode, gate = gated(site)
    said = [owner.worker.registration() for owner in owners]

    def register() -> list[RegistrationKeeper]:
        keepers = [RegistrationKeeper(one, [site.bootstrap.address]).start() for one in said]
        for keeper in keepers:
            keeper.wait_registered(DEADLINE_S)
        return keepers

    keepers = register()
    receiver, senders = start(site, owners, decode)
    gate.wait_held(2)
    keepers[1].close()
    wait_until(lambda: decode.worker._links.known(site.instance) is None)
    keepers[0].close()
    keepers = register()
    other = decode.worker.receive("other", site.instance, {"kv": [0, 1, 2]}, 3 * PAGE_SIZE)
    for owner in owners:
        owner.open("other", {"kv": [10, 11, 12]}).publish([10, 11, 12], last=True)
    gate.open.set()
    receiver.wait(DEADLINE_S)
    other.wait(DEADLINE_S)
    assert decode.pool.find_wrong("t", TARGET) is None
    assert decode.pool.find_wrong("other", {"kv": [0, 1, 2]}) is None
    assert_all(senders, SenderState.RELEASED)
    for keeper in keepers:
        keeper.close()
