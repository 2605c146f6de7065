"""How requests end badly: pages reused under a reader, aborts in every state, backends that raise."""

from __future__ import annotations

import threading

import pytest

from pdlink.backends.base import Backend, Peer, PullHandle, PullStatus, Settled
from pdlink.decode.live import Live
from pdlink.decode.puller import Puller
from pdlink.errors import BackendError, PeerGone, TransferFailed
from pdlink.layout.readers import ReaderSet
from pdlink.prefill.sender import Sender
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.direct import SOURCE, TARGET, gated, serve, start
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Gate,
    Site,
    assert_all,
    finished,
    make_layout,
    wait_until,
)

pytestmark = pytest.mark.backend("ipc")


# --- pages reused under a reader ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["withdraw", "abort", "expire"])
@pytest.mark.parametrize("verify", [False, True], ids=["plain", "digests"])
def test_pages_taken_back_and_reused_while_a_reader_pulls_never_make_a_success(
    site: Site, how: str, verify: bool
) -> None:
    lease = {"publication_lease_s": 3.0} if how == "expire" else {}
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


class Relinked(Gate):
    """The link is down when a pull is posted, and the post over the new one goes wrong half-way."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.open.set()
        self.num_posts = 0

    def submit(self, batch: PullBatch) -> PullHandle:
        self.num_posts += 1
        if self.num_posts == 1:
            raise PeerGone("taken down by another")
        if self.num_posts == 2:
            super().submit(batch)
            raise BackendError("posted a part of it")
        return super().submit(batch)


def test_a_post_that_goes_wrong_on_a_link_made_anew_is_fenced_too(site: Site) -> None:
    owners = site.prefill(make_layout(4), 1)
    made: list[Relinked] = []

    def wrap(inner: Backend) -> Backend:
        made.append(Relinked(inner))
        return made[0]

    decode = site.decode(make_layout(4), wrap=wrap)
    receiver, _ = start(site, owners, decode)
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert "posted a part of it" in str(receiver.failure)
    assert made[0].fenced == [owners[0].worker.rank.worker_id]
    serve(site, owners, decode)


@pytest.mark.parametrize("defect", ["submit", "send"])
def test_a_defect_while_a_decision_is_carried_out_ends_that_request_and_loses_no_pull(
    site: Site, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    owners, decode = site.prefill(make_layout(4), 2), site.decode(make_layout(4))
    serve(site, owners, decode)

    def fail(*args: object) -> None:
        monkeypatch.undo()
        raise KeyError("a defect")

    if defect == "submit":
        monkeypatch.setattr(Puller, "submit", fail)
    else:
        monkeypatch.setattr(Live, "send", fail)
    receiver, senders = start(site, owners, decode)
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert receiver.failure
    assert receiver.failure.reason is FailureReason.INTERNAL
    assert_all(senders, SenderState.ABORTED)
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
def test_an_abort_that_meets_nothing_to_move_leaves_no_rank_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    owners, decode = site.prefill(make_layout(4), 3), site.decode(make_layout(4))
    aborted, resolve = threading.Event(), decode.worker._links.resolve
    if warm:
        serve(site, owners, decode, "warm")
    else:
        # Where it is resolved sooner, it is over by then.
        monkeypatch.setattr(decode.worker._links, "resolve", lambda one: aborted.wait(DEADLINE_S) and resolve(one))
    senders = [owner.open("t", {"kv": SOURCE}) for owner in owners]
    for sender in senders:
        sender.publish(SOURCE, last=True)
    receiver = decode.worker.receive("t", site.instance, {"kv": []}, 3 * PAGE_SIZE, prefix_tokens=3 * PAGE_SIZE)
    receiver.abort()
    aborted.set()
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
