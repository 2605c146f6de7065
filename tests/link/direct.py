"""Owns what the tests of requests that are pulled directly share: three pages from every rank, and held pulls."""

from __future__ import annotations

from pdlink.backends.base import Backend
from pdlink.decode.receiver import Receiver
from pdlink.prefill.sender import Sender
from pdlink.transfer.states import SenderState
from tests.link.rig import (
    DEADLINE_S,
    PAGE_SIZE,
    Decode,
    Gate,
    Owner,
    Site,
    assert_all,
    assert_whole,
    make_layout,
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
