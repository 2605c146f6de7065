"""Whole requests over a control path that loses, repeats, delays and reorders frames."""

from __future__ import annotations

import contextlib
import random

import pytest

from pdlink.control.frames import Abort, AbortAck, Failed, Frame, Ready, Release, Subscribe, Subscribed, Verdict
from pdlink.errors import TransferFailed
from pdlink.transfer.failure import FailureReason
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.proxy import put_between
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Owner,
    Site,
    assert_all,
    assert_whole,
    finished,
    make_layout,
    wait_until,
)

pytestmark = pytest.mark.backend("ipc")


def publish_all(owners: list[Owner], transfer_id: str = "t", num_pages: int = 2):
    senders = []
    for owner in owners:
        pages = list(range(1, num_pages + 1))
        senders.append(owner.open(transfer_id, {"kv": pages}))
        for page in pages[:-1]:
            senders[-1].publish([page])
        senders[-1].publish(pages[-1:], last=True, aux=b"tok")
    return senders


class Once:
    """Drops the first frame of a kind."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.done = False

    def __call__(self, frame: Frame) -> tuple[Frame, ...]:
        if isinstance(frame.body, self.kind) and not self.done:
            self.done = True
            return ()
        return (frame,)


def test_a_lost_verdict_is_given_again_and_the_request_succeeds(site: Site, stack: contextlib.ExitStack) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2, register=False), site.decode(layout)
    proxies = put_between(site, stack, owners)
    proxies[1].to_decode = lost = Once(Verdict)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 3]}, 2 * PAGE_SIZE, expect_aux=True)
    senders = publish_all(owners)
    assert receiver.wait(DEADLINE_S).aux == b"tok"
    assert lost.done
    assert proxies[1].count(Release) >= 2
    assert_whole(decode, "t", {"kv": [4, 3]})
    assert_all(senders, SenderState.RELEASED)


@pytest.mark.parametrize("register", ["seen", "unseen"])
def test_a_rank_that_restarts_before_its_verdict_is_known_fails_the_request(
    site: Site, stack: contextlib.ExitStack, register: str
) -> None:
    """Whether or not the bootstrap service tells of the new process: never success by assumption."""
    layout = make_layout(4)
    owners = site.prefill(layout, 2, register=False)
    decode = site.decode(layout, confirm_timeout_s=60.0 if register == "seen" else 4.0)
    proxies = put_between(site, stack, owners)
    # A process that is killed says nothing, so neither its verdict nor its goodbye gets through.
    proxies[1].to_decode = lambda frame: () if isinstance(frame.body, Verdict | Failed) else (frame,)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 3]}, 2 * PAGE_SIZE, expect_aux=True)
    publish_all(owners)
    wait_until(lambda: proxies[1].count(Verdict) > 0)
    assert receiver.poll() is ReceiverState.CONFIRMING
    owners[1].node.close()
    if register == "seen":
        rank = owners[1].worker.rank
        node = site.node()
        again = type(rank)(rank.instance, layout, rank.sizes, rank.rank, rank.kinds, rank.owned, rank.regions)
        node.prefill(again, [site.bootstrap.address]).wait_registered(DEADLINE_S)
    assert finished(receiver).poll() is ReceiverState.FAILED
    assert receiver.failure
    assert receiver.failure.worker_id == rank_name(1)
    assert receiver.failure.reason is (FailureReason.STALE if register == "seen" else FailureReason.TIMEOUT)


def rank_name(cp: int) -> str:
    return f"pre/dp0.pp0.cp{cp}.tp0"


@pytest.mark.parametrize("kind", [Subscribe, Release, Abort])
def test_a_lost_frame_to_prefill_is_sent_again(site: Site, stack: contextlib.ExitStack, kind: type) -> None:
    layout = make_layout(2)
    owners, decode = site.prefill(layout, 1, register=False), site.decode(layout)
    (proxy,) = put_between(site, stack, owners)
    proxy.to_prefill = lost = Once(kind)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 3]}, 2 * PAGE_SIZE)
    if kind is Abort:
        sender = owners[0].open("t", {"kv": [1, 2]})
        wait_until(lambda: receiver.poll() is ReceiverState.SUBSCRIBED and proxy.count(Subscribed) > 0)
        receiver.abort()
        assert finished(receiver).poll() is ReceiverState.ABORTED
        assert_all([sender], SenderState.ABORTED)
        wait_until(lambda: proxy.count(AbortAck) > 0)
    else:
        senders = publish_all(owners)
        receiver.wait(DEADLINE_S)
        assert_all(senders, SenderState.RELEASED)
    assert lost.done


def test_lost_ready_frames_are_asked_for_again_well_before_the_next_sign_of_life(
    site: Site, stack: contextlib.ExitStack
) -> None:
    layout = make_layout(2)
    owners, decode = site.prefill(layout, 1, register=False), site.decode(layout, keepalive_interval_s=1000)
    (proxy,) = put_between(site, stack, owners)
    proxy.to_decode = Once(Ready)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4, 3, 9]}, 3 * PAGE_SIZE)
    wait_until(lambda: proxy.count(Subscribed) > 0)
    senders = publish_all(owners, num_pages=3)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", {"kv": [4, 3, 9]})
    assert_all(senders, SenderState.RELEASED)


@pytest.mark.parametrize("seed", range(4))
def test_requests_survive_frames_that_are_repeated_lost_and_reordered(
    site: Site, stack: contextlib.ExitStack, seed: int
) -> None:
    """Old frames of ended attempts come again during later requests of the same id, in both directions."""
    layout = make_layout(4)
    owners = site.prefill(layout, 2, register=False)
    decode = site.decode(layout, keepalive_interval_s=0.1)
    chance = random.Random(seed)
    for proxy in put_between(site, stack, owners):
        for side in ("to_prefill", "to_decode"):
            setattr(proxy, side, _unreliable(chance))
    for number in range(5):
        target = {"kv": site.scatter(decode.pool, 3)}
        receiver = decode.worker.receive("same id", site.instance, target, 3 * PAGE_SIZE, expect_aux=True)
        pages = [site.scatter(owner.pool, 3) for owner in owners]
        senders = [owner.open("same id", {"kv": mine}) for owner, mine in zip(owners, pages, strict=True)]
        for sender, mine in zip(senders, pages, strict=True):
            sender.publish(mine[:2])
            sender.publish(mine[2:], last=True, aux=b"tok %d" % number)
        assert receiver.wait(DEADLINE_S).aux == b"tok %d" % number
        assert decode.pool.find_wrong("same id", target) is None
        assert_all(senders, SenderState.RELEASED)


def _unreliable(chance: random.Random):
    """Loses one frame in six, repeats others at once and later, and holds some back until another has passed."""
    old: list[Frame] = []
    held: list[Frame] = []

    def rule(frame: Frame) -> list[Frame]:
        old.append(frame)
        draw = chance.random()
        if draw < 1 / 6:
            return []
        if draw < 2 / 6:
            held.append(frame)
            return []
        out = [frame, *held]
        held.clear()
        if draw < 4 / 6:
            out.append(chance.choice(old))
        return out

    return rule


def test_a_peer_that_never_answers_a_subscribe_fails_the_request_by_name(
    site: Site, stack: contextlib.ExitStack
) -> None:
    layout = make_layout(2)
    owners, decode = site.prefill(layout, 2, register=False), site.decode(layout, subscribe_timeout_s=1.5)
    proxies = put_between(site, stack, owners)
    proxies[1].to_decode = lambda frame: ()
    receiver = decode.worker.receive("t", site.instance, {"kv": [4]}, PAGE_SIZE)
    with pytest.raises(TransferFailed, match="the answer to a subscribe") as failure:
        receiver.wait(DEADLINE_S)
    assert rank_name(1) in str(failure.value)
    assert "PDLINK_SUBSCRIBE_TIMEOUT_S" in str(failure.value)


def test_a_rank_that_falls_silent_fails_the_request_by_name(site: Site, stack: contextlib.ExitStack) -> None:
    layout = make_layout(2)
    owners = site.prefill(layout, 2, register=False)
    decode = site.decode(layout, liveness_timeout_s=3.0, keepalive_interval_s=0.1)
    proxies = put_between(site, stack, owners)
    receiver = decode.worker.receive("t", site.instance, {"kv": [4]}, PAGE_SIZE)
    wait_until(lambda: all(proxy.count(Subscribed) > 0 for proxy in proxies))
    proxies[1].to_decode = lambda frame: ()
    with pytest.raises(TransferFailed, match="has not been heard") as failure:
        receiver.wait(DEADLINE_S)
    assert rank_name(1) in str(failure.value)
