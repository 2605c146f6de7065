"""Owns what the tests of the staged way share: sites that are forced to it, and the slots that they must get back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from pdlink.backends.base import Backend
from pdlink.backends.copiers import HostCopier
from pdlink.backends.staging import Arena
from pdlink.decode.receiver import Receiver
from pdlink.layout.components import CacheLayout
from pdlink.prefill.sender import Sender
from pdlink.runtime.node import Node
from pdlink.transfer.descriptors import PullBatch
from pdlink.transfer.states import SenderState
from tests.link.rig import DEADLINE_S, PAGE_SIZE, Decode, Gate, Owner, Site, assert_all, make_layout, wait_until

SLOT_BYTES = 128 << 10
"""Three latent pages of 64 tokens, so that requests of a few pages take several pieces."""
LATENT_BYTES = 656 * 64
NUM_PAGES = 6
"""Of a request: several pieces per owner."""


def staged_site(stack: contextlib.ExitStack, **settings: object) -> Site:
    """A site where both sides stage whatever moves, over `ipc` alone."""
    chosen: dict[str, object] = {
        "backends": "ipc",
        "way": "staged",
        "staging_slots": 2,
        "staging_slot_bytes": SLOT_BYTES,
        "confirm_timeout_s": 30.0,
        "resend_interval_s": 0.1,
    }
    return Site(stack, **(chosen | settings))


def arena(node: Node) -> Arena:
    """The staging memory of a node that has one role."""
    (found,) = [one for one in node._arenas.values() if one]
    return found


def assert_slots_back(nodes: Sequence[Node]) -> None:
    """Every slot is free again, in bounded time."""
    slots = [arena(node).slots for node in nodes]
    wait_until(lambda: all(one.num_free == one.num_slots for one in slots))


def publish_scattered(site: Site, owners: Sequence[Owner], num_pages: int, transfer_id: str = "t") -> list[Sender]:
    senders = []
    for owner in owners:
        pages = site.scatter(owner.pool, num_pages)
        senders.append(owner.open(transfer_id, {"kv": pages}))
        senders[-1].publish(pages, last=True)
    return senders


def pair(site: Site, cp: int = 2, num_layers: int = 4, **settings: object) -> tuple[CacheLayout, list[Owner], Decode]:
    layout = make_layout(num_layers)
    return layout, site.prefill(layout, cp, **settings), site.decode(layout, staging_slots=cp * 2)


class HeldCopy(HostCopier):
    """Packing (of module `packer`) or unpacking (of `way_picker`) that does not begin before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        monkeypatch.setattr(module, "open_copier", lambda memory, device: self)

    def copy(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        self.begun.release()
        assert self.go.wait(DEADLINE_S)
        return super().copy(batch, stop)


def gated(site: Site, **settings: object) -> tuple[Decode, Gate]:
    gates: list[Gate] = []

    def wrap(inner: Backend) -> Backend:
        gates.append(Gate(inner))
        return gates[0]

    return site.decode(make_layout(4), wrap=wrap, **({"staging_slots": 4} | settings)), gates[0]


def receive(site: Site, decode: Decode, transfer_id: str = "t") -> tuple[Receiver, dict[str, list[int]]]:
    target = {"kv": site.scatter(decode.pool, NUM_PAGES)}
    return decode.worker.receive(transfer_id, site.instance, target, NUM_PAGES * PAGE_SIZE), target


def serve(site: Site, owners: list[Owner], decode: Decode) -> None:
    """After whatever happened, the next request goes well."""
    receiver, target = receive(site, decode, "good")
    senders = publish_scattered(site, owners, NUM_PAGES, "good")
    receiver.wait(DEADLINE_S)
    assert decode.pool.find_wrong("good", target) is None
    assert_all(senders, SenderState.RELEASED)
    assert_slots_back([decode.node, *(owner.node for owner in owners)])


def num_packed(owner: Owner) -> int:
    """Slots of an owner that lie packed at a reader's disposal."""
    stager = owner.worker._desk._stager
    assert stager is not None
    with owner.worker._lock:
        return sum(one.answer is not None for one in stager._held())


def hold_all(node: Node) -> list[int]:
    slots = arena(node).slots
    held = [slots.try_take() for _ in range(slots.num_slots)]
    return [one for one in held if one is not None]


def give_all(node: Node, held: list[int]) -> None:
    for one in held:
        arena(node).slots.give(one)
