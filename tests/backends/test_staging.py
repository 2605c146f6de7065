"""Staging memory lies where the pages lie, or nowhere, and then it is said why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pdlink.backends.base import Backend, Capabilities
from pdlink.backends.ipc import IpcBackend
from pdlink.backends.staging import open_arena
from pdlink.config import Settings
from pdlink.errors import BackendError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.runtime.node import Node

NO_DEVICE = 4096


def region(memory: MemoryKind = MemoryKind.HOST, device: int = 0) -> Region:
    return Region("latent", 0, 1 << 20, 4096, 4096, 4, memory, device)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(Settings(backends="ipc", way="staged", staging_slots=2, staging_slot_bytes=8192)) as made:
        yield made


def test_workers_of_a_role_share_staging_memory_and_roles_do_not(node: Node) -> None:
    prefill = node._arena("prefill", [region()], node.backends)
    decode = node._arena("decode", [region(), region()], node.backends)
    assert prefill
    assert decode
    assert prefill is node._arena("prefill", [region()], node.backends)
    assert prefill is not decode
    assert (decode.area.memory, decode.area.slot_bytes) == (MemoryKind.HOST, 8192)


@pytest.mark.parametrize(
    "regions",
    [
        [region(), region(MemoryKind.CUDA)],
        [region(MemoryKind.CUDA, 0), region(MemoryKind.CUDA, 1)],
    ],
    ids=["host and device", "two devices"],
)
def test_pages_in_several_places_move_without_staging_and_the_log_says_so(
    node: Node, regions: list[Region], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pdlink.runtime"):
        assert node._arena("prefill", regions, node.backends) is None
    (said,) = [one.message for one in caplog.records if "without staging" in one.message]
    assert all(f"{one.memory} device {one.device}" in said for one in regions)


@dataclass
class Memory:
    """A backend as far as staging looks at it, with the memory that it is said to serve."""

    name: str
    capabilities: Capabilities
    registered: list[Region] = field(default_factory=list)

    def register(self, region: Region) -> None:
        self.registered.append(region)

    def deregister(self, region: Region) -> None:
        self.registered.remove(region)


def serving(*kinds: MemoryKind, gathers: bool = False, name: str = "wire") -> dict[str, Backend]:
    return {name: Memory(name, Capabilities(frozenset(kinds), gathers=gathers))}  # type: ignore[dict-item]


def test_no_device_memory_is_taken_where_no_backend_moves_it() -> None:
    assert open_arena(Settings(), serving(MemoryKind.HOST), MemoryKind.CUDA, NO_DEVICE) is None


def test_no_device_memory_is_taken_where_every_backend_that_moves_it_gathers() -> None:
    backends = serving(MemoryKind.CUDA, gathers=True) | serving(MemoryKind.HOST, name="other")
    assert open_arena(Settings(), backends, MemoryKind.CUDA, NO_DEVICE) is None


def test_a_device_without_memory_for_slots_is_done_without_unless_staging_is_forced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backends = serving(MemoryKind.CUDA)
    with caplog.at_level(logging.WARNING, "pdlink.backends"):
        assert open_arena(Settings(), backends, MemoryKind.CUDA, NO_DEVICE) is None
    assert any("PDLINK_STAGING_DEVICE_SLOT_BYTES" in one.message for one in caplog.records)
    with pytest.raises(BackendError):
        open_arena(Settings(way="staged"), backends, MemoryKind.CUDA, NO_DEVICE)


def test_slots_are_registered_with_the_backends_that_serve_their_memory_and_taken_back() -> None:
    able, other = serving(MemoryKind.HOST), serving(MemoryKind.CUDA, name="other")
    arena = open_arena(Settings(), able | other)
    assert arena
    assert arena.area.backends == ("wire",)
    assert able["wire"].registered == [arena.area.region()]  # type: ignore[attr-defined]
    arena.close()
    assert able["wire"].registered == []  # type: ignore[attr-defined]
    arena.close()


def test_slots_of_the_same_host_are_shared_memory_where_staging_is_forced() -> None:
    ipc = IpcBackend()
    with contextlib.closing(ipc):
        arena = open_arena(Settings(way="staged"), {"ipc": ipc})
        assert arena
        assert ipc.endpoint()
        arena.close()
