"""Owns what the tests of the staged way share: sites that are forced to it, and the slots that they must get back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from pdlink.backends.staging import Arena
from pdlink.layout.components import CacheLayout
from pdlink.prefill.sender import Sender
from pdlink.runtime.node import Node
from pdlink.transfer.descriptors import PullBatch
from tests.link.rig import DEADLINE_S, Decode, Owner, Site, make_layout, wait_until

SLOT_BYTES = 128 << 10
"""Three latent pages of 64 tokens, so that requests of a few pages take several pieces."""
LATENT_BYTES = 656 * 64


def staged_site(stack: contextlib.ExitStack, **settings: object) -> Site:
    """A site where both sides stage whatever moves, over `ipc` alone."""
    chosen: dict[str, object] = {
        "backends": "ipc",
        "way": "staged",
        "staging_slots": 2,
        "staging_slot_bytes": SLOT_BYTES,
        "confirm_timeout_s": 3.0,
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


class HeldCopy:
    """Packing (of module `stager`) or unpacking (of `staged_pull`) that does not begin before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self._copy = module.copy
        monkeypatch.setattr(module, "copy", self)

    def __call__(self, batch: PullBatch, stop: Callable[[], bool]) -> bool:
        self.begun.release()
        assert self.go.wait(DEADLINE_S)
        return bool(self._copy(batch, stop))
