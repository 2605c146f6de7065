"""Whole links over mooncake: requests across ranks, pages reused under a reader, a rank that stops in the middle."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from pdlink.backends.shm import sweep_stale
from pdlink.decode.receiver import Receiver
from pdlink.errors import TransferFailed
from pdlink.prefill.sender import Sender
from pdlink.testing.pattern import SENTINEL
from pdlink.transfer.states import ReceiverState, SenderState
from tests.backends.needs import needs_mooncake
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
from tests.link.test_processes import CP, NUM_LAYERS, Rank, finish
from tests.link.test_processes import TARGET as RANK_TARGET

pytestmark = needs_mooncake

TARGET = {"kv": [4, 3, 9]}
SOURCE = [1, 2, 5]
WATCH_S = 1.5


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def site(stack):
    return Site(stack, backends="mooncake", confirm_timeout_s=3.0, resend_interval_s=0.1)


def gated(site: Site, num_layers: int, **settings: object) -> tuple[Decode, Gate]:
    """A decode rank whose pulls wait before they post anything, until the gate is opened."""
    layout = make_layout(num_layers)
    pool = site.pool(layout, {one.name: one.layers for one in layout.components})
    node = site.node(**settings)
    gate = Gate(node.backends["mooncake"])
    node.backends["mooncake"] = gate
    return Decode(node, node.decode("dec", layout, pool.regions), pool), gate


def start(site: Site, owners: list[Owner], decode: Decode, name: str) -> tuple[Receiver, list[Sender]]:
    receiver = decode.worker.receive(name, site.instance, TARGET, 3 * PAGE_SIZE)
    senders = [owner.open(name, {"kv": SOURCE}) for owner in owners]
    for sender in senders:
        sender.publish(SOURCE, last=True)
    return receiver, senders


@pytest.mark.parametrize(("num_layers", "cp"), [(10, 4), (3, 4)], ids=["uneven", "a rank owns nothing"])
def test_layers_of_every_owner_arrive_exactly_and_all_ranks_are_released(site, num_layers, cp):
    owners = site.prefill(make_layout(num_layers), cp)
    decode = site.decode(make_layout(num_layers), page_gap=64)
    receiver, senders = start(site, owners, decode, "t")
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "t", TARGET)
    assert_all(senders, SenderState.RELEASED)
    assert set(receiver.result().backends.values()) == {"mooncake"}


@pytest.mark.parametrize("how", ["withdraw", "abort", "expire"])
def test_pages_taken_back_and_reused_while_a_reader_pulls_never_make_a_success(site, how):
    lease = {"publication_lease_s": 0.3} if how == "expire" else {}
    owners = site.prefill(make_layout(4), 2, **lease)
    decode, gate = gated(site, 4, keepalive_interval_s=1000)
    receiver, senders = start(site, owners, decode, "t")
    gate.wait_held(2)
    if how == "withdraw":
        senders[1].withdraw(SOURCE[1:2])
    elif how == "abort":
        senders[1].abort()
    wait_until(lambda: senders[1].poll().is_final)
    owners[1].pool.fill("someone else", {"kv": SOURCE})
    gate.open.set()
    assert finished(receiver).poll() is ReceiverState.FAILED
    wait_until(lambda: all(one.poll().is_final for one in senders))
    receiver, _ = start(site, owners, decode, "good")
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "good", TARGET)


@pytest.mark.parametrize("then", ["resumes", "is killed", "never resumes"])
@pytest.mark.timeout(120)
def test_a_rank_that_stops_costs_the_deadline_and_writes_nothing_into_pages_handed_out_again(site, stack, then):
    ranks = [Rank(stack, site, number, backends="mooncake") for number in range(CP)]
    assert [rank.read() for rank in ranks] == [{"ready": True}] * CP
    decode, gate = gated(
        site, NUM_LAYERS, liveness_timeout_s=0.8, keepalive_interval_s=0.2, drain_timeout_s=1.0, abort_ack_timeout_s=0.3
    )
    receiver = decode.worker.receive("t", site.instance, RANK_TARGET, 3 * PAGE_SIZE)
    for number, rank in enumerate(ranks):
        rank.tell(do="open", id="t", pages=[number, 9, 4])
        rank.tell(do="publish", id="t", pages=[number, 9, 4], last=True)
    gate.wait_held(CP)
    stopped = ranks[1].process
    stopped.send_signal(signal.SIGSTOP)
    try:
        gate.open.set()
        with pytest.raises(TransferFailed, match="cp1"):
            receiver.wait(2 * DEADLINE_S)
        assert gate.fenced == ["pre/dp0.pp0.cp1.tp0"]
        for component, layer in decode.pool.layout.cells():
            decode.pool.view(component, layer)[:] = SENTINEL
        if then == "is killed":
            stopped.kill()
        elif then == "resumes":
            stopped.send_signal(signal.SIGCONT)
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            time.sleep(0.1)
            assert decode.pool.find_touched() is None
        if then == "resumes":
            again = decode.worker.receive("again", site.instance, RANK_TARGET, 3 * PAGE_SIZE)
            for number, rank in enumerate(ranks):
                rank.tell(do="open", id="again", pages=[number, 9, 4])
                rank.tell(do="publish", id="again", pages=[number], last=False)
            finish(ranks, again, decode, "again")
    finally:
        if then == "resumes":
            stopped.send_signal(signal.SIGCONT)
        else:
            stopped.kill()
            stopped.wait(DEADLINE_S)
            sweep_stale()
