"""Prefill and decode ranks as processes of their own, which can be killed."""

from __future__ import annotations

import contextlib

import pytest

from pdlink.backends.base import Backend
from pdlink.decode.receiver import Receiver
from pdlink.errors import TransferFailed
from pdlink.testing.child import Child
from pdlink.transfer.states import ReceiverState, SenderState
from tests.link.ranks import ROOT, START_TIMEOUT_S, Rank, start_ranks
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Decode, Gate, Site, assert_all, assert_whole, make_layout, wait_until
from tests.link.staged import assert_slots_back, publish_scattered, staged_site

pytestmark = pytest.mark.backend("ipc")

NUM_LAYERS, CP = 5, 3
TARGET = {"kv": [8, 2, 5]}


def start(site: Site, ranks: list[Rank], decode: Decode, name: str) -> Receiver:
    receiver = decode.worker.receive(name, site.instance, TARGET, 3 * PAGE_SIZE)
    for number, rank in enumerate(ranks):
        rank.tell(do="open", id=name, pages=[number, 9, 4])
        rank.tell(do="publish", id=name, pages=[number], last=False)
    return receiver


def finish(ranks: list[Rank], receiver: Receiver, decode: Decode, name: str) -> None:
    for rank in ranks:
        rank.tell(do="publish", id=name, pages=[9, 4], last=True)
    receiver.wait(DEADLINE_S)
    assert_whole(decode, name, TARGET)
    for rank in ranks:
        wait_until(lambda rank=rank: rank.tell(do="poll", id=name) == "released")


def test_a_killed_rank_fails_its_request_by_name_and_its_successor_serves_the_next(
    site: Site, stack: contextlib.ExitStack
) -> None:
    ranks = start_ranks(stack, site, CP, NUM_LAYERS)
    decode = site.decode(make_layout(NUM_LAYERS), liveness_timeout_s=4.0, keepalive_interval_s=0.2)
    finish(ranks, start(site, ranks, decode, "first"), decode, "first")

    receiver = start(site, ranks, decode, "second")
    wait_until(lambda: receiver.poll() is ReceiverState.PULLING)
    ranks[1].process.kill()
    for rank in (ranks[0], ranks[2]):
        rank.tell(do="publish", id="second", pages=[9, 4], last=True)
    with pytest.raises(TransferFailed, match=r"cp1"):
        receiver.wait(DEADLINE_S)
    for rank in (ranks[0], ranks[2]):
        wait_until(lambda rank=rank: rank.tell(do="poll", id="second") == "aborted")

    ranks[1] = Rank(stack, site, 1, num_layers=NUM_LAYERS, cp=CP)
    ranks[1].wait_ready()
    finish(ranks, start(site, ranks, decode, "third"), decode, "third")


def test_a_killed_reader_gives_back_its_staging_slots_and_the_next_one_is_served(stack: contextlib.ExitStack) -> None:
    site = staged_site(stack)
    layout = make_layout(NUM_LAYERS)
    owners = site.prefill(layout, 2, staging_timeout_s=5.0)
    senders = publish_scattered(site, owners, 3, "dies")
    reader = Child("reader", "tests.link.decode_process", env={"PYTHONPATH": str(ROOT)})
    stack.callback(reader.close)
    reader.say({"num_layers": NUM_LAYERS, "port": site.bootstrap.address.port, "id": "dies", "num_owners": 2})
    assert reader.hear(START_TIMEOUT_S) == {"held": True}
    reader.kill()
    assert_all(senders, SenderState.ABORTED)
    assert_slots_back([owner.node for owner in owners])

    decode = site.decode(layout)
    receiver = decode.worker.receive("lives", site.instance, TARGET, 3 * PAGE_SIZE)
    publish_scattered(site, owners, 3, "lives")
    receiver.wait(DEADLINE_S)
    assert_whole(decode, "lives", TARGET)


def test_a_rank_that_is_killed_while_it_stages_costs_its_request_and_no_slot_here(stack: contextlib.ExitStack) -> None:
    site = staged_site(stack, liveness_timeout_s=4.0, keepalive_interval_s=0.2)
    layout = make_layout(NUM_LAYERS)
    ranks = start_ranks(stack, site, CP, NUM_LAYERS, backends="ipc", way="staged")
    gates: list[Gate] = []

    def wrap(inner: Backend) -> Backend:
        gates.append(Gate(inner))
        return gates[0]

    decode = site.decode(layout, wrap=wrap, staging_slots=2 * CP)
    receiver = start(site, ranks, decode, "t")
    gates[0].wait_held_of(CP)
    ranks[1].process.kill()
    with pytest.raises(TransferFailed, match=r"cp1"):
        receiver.wait(DEADLINE_S)
    assert_slots_back([decode.node])
    for rank in (ranks[0], ranks[2]):
        wait_until(lambda rank=rank: rank.tell(do="poll", id="t") == "aborted")
