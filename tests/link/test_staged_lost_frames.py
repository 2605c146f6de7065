"""Staging frames that are lost, repeated, late or wrong cost a moment or the request, and never a slot."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest

from pdlink.control.frames import Credit, Frame, Stage, Staged
from pdlink.errors import TransferFailed
from pdlink.transfer.states import SenderState
from tests.link.proxy import put_between
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Site,
    assert_all,
    assert_whole,
    make_layout,
    wait_until,
)
from tests.link.staged import (
    NUM_PAGES,
    SLOT_BYTES,
    assert_slots_back,
    publish_scattered,
    receive,
    staged_site,
)
from tests.link.test_frames import Once, _unreliable

pytestmark = pytest.mark.backend("ipc")


@pytest.fixture
def site(stack: contextlib.ExitStack) -> Site:
    return staged_site(stack)


@pytest.mark.parametrize("kind", [Stage, Staged, Credit])
def test_a_lost_staging_frame_costs_a_moment_and_no_slot(site: Site, stack: contextlib.ExitStack, kind: type) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 2, register=False), site.decode(layout)
    proxies = put_between(site, stack, owners)
    lost = Once(kind)
    if kind is Staged:
        proxies[1].to_decode = lost
    else:
        proxies[1].to_prefill = lost
    receiver, target = receive(site, decode)
    senders = publish_scattered(site, owners, NUM_PAGES)
    receiver.wait(DEADLINE_S)
    assert lost.done
    assert_whole(decode, "t", target)
    assert_all(senders, SenderState.RELEASED)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


def test_a_lost_credit_is_made_good_while_the_request_goes_on(site: Site, stack: contextlib.ExitStack) -> None:
    """The request cannot end yet, so that only the reminder brings the slot back."""
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 1, register=False), site.decode(layout)
    (proxy,) = put_between(site, stack, owners)
    drop = Once(Credit)
    proxy.to_prefill = drop
    receiver, target = receive(site, decode)
    pages = site.scatter(owners[0].pool, NUM_PAGES)
    sender = owners[0].open("t", {"kv": pages})
    sender.publish(pages[:2])
    wait_until(lambda: drop.done)
    assert_slots_back([owners[0].node])
    assert sender.poll() is SenderState.PUBLISHING
    sender.publish(pages[2:], last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", target)


@pytest.mark.parametrize("seed", range(3))
def test_staged_requests_survive_frames_that_are_repeated_lost_and_reordered(
    site: Site, stack: contextlib.ExitStack, seed: int
) -> None:
    layout = make_layout(4)
    owners = site.prefill(layout, 2, register=False)
    decode = site.decode(layout, keepalive_interval_s=0.1)
    chance = random.Random(seed)
    for proxy in put_between(site, stack, owners):
        proxy.to_prefill, proxy.to_decode = _unreliable(chance), _unreliable(chance)
    for _ in range(3):
        target = {"kv": site.scatter(decode.pool, NUM_PAGES)}
        receiver = decode.worker.receive("same id", site.instance, target, NUM_PAGES * PAGE_SIZE)
        senders = publish_scattered(site, owners, NUM_PAGES, "same id")
        receiver.wait(DEADLINE_S)
        assert decode.pool.find_wrong("same id", target) is None
        assert_all(senders, SenderState.RELEASED)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slot": 7, "offset": 7 * SLOT_BYTES}, r"staged .* bytes in slot 7"),
        ({"offset": 3}, r"staged .* at 3; asked were"),
        ({"nbytes": 1}, r"staged 1 bytes"),
        ({"generation": 1}, r"was taken back before its pages were packed"),
    ],
)
def test_a_staged_frame_that_lies_fails_the_request_and_moves_nothing(
    site: Site, stack: contextlib.ExitStack, changes: dict[str, int], text: str
) -> None:
    layout = make_layout(4)
    owners, decode = site.prefill(layout, 1, register=False), site.decode(layout)
    (proxy,) = put_between(site, stack, owners)

    def lie(frame: Frame) -> tuple[Frame, ...]:
        body = frame.body
        if not isinstance(body, Staged):
            return (frame,)
        return (Frame(frame.transfer_id, frame.attempt, dataclasses.replace(body, **changes)),)

    proxy.to_decode = lie
    receiver, _ = receive(site, decode)
    publish_scattered(site, owners, NUM_PAGES)
    with pytest.raises(TransferFailed, match=text):
        receiver.wait(DEADLINE_S)
    assert decode.pool.find_touched({}) is None
    assert_slots_back([decode.node, owners[0].node])
