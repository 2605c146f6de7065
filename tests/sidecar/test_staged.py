"""Beside an engine, transports get the sidecar's own staging memory alone: pages go staged, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdlink.backends.base import Backend, Capabilities
from pdlink.backends.ipc import IpcBackend
from pdlink.bootstrap import service_wire
from pdlink.bootstrap.messages import RankInfo
from pdlink.config import load_settings
from pdlink.decode.actions import Pull
from pdlink.decode.way_picker import WayPicker
from pdlink.errors import ConfigError, FrameError, InvalidInput, RegionError
from pdlink.events import Events
from pdlink.layout.regions import MemoryKind, Region
from pdlink.runtime.verbs import NodeVerbs
from pdlink.sidecar.server import SidecarServer
from pdlink.sidecar.staged_only import StagedOnly
from pdlink.transfer.descriptors import GroupMove, LayerTable, PullBatch, pair_pages
from tests.backends.needs import mooncake_missing, nixl_missing
from tests.bootstrap.values import make_instance
from tests.sidecar.rig import Rig, folder_for_sockets, serve

ENGINES = Region("latent", 0, 1 << 20, 4096, 4096, 4)
OURS = Region("staging", 0, 1 << 30, 4096, 4096, 4)


class Recorder(IpcBackend):
    name = "recorder"
    capabilities = Capabilities(frozenset({MemoryKind.HOST}), cost_per_descriptor_s=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Region] = []

    def register(self, region: Region) -> None:
        self.registered.append(region)

    def deregister(self, region: Region) -> None:
        self.registered.remove(region)


def test_memory_of_the_engine_is_never_registered_with_a_transport() -> None:
    inner = Recorder()
    backend = StagedOnly(inner, lambda region: region == ENGINES)
    backend.register(ENGINES)
    backend.register(OURS)
    assert inner.registered == [OURS]
    backend.deregister(ENGINES)
    assert inner.registered == [OURS]
    backend.deregister(OURS)
    assert inner.registered == []
    assert backend.capabilities == replace(inner.capabilities, staged_only=True)


def make_pull() -> Pull:
    pages = np.array([2, 0], dtype=np.int64)
    column = np.array([4096], dtype=np.int64)
    table = LayerTable(np.zeros(1, dtype=np.int64), *(column,) * 5)
    batch = PullBatch("w0", (GroupMove("kv", pair_pages(pages, pages), table),))
    return Pull("w0", 1, batch, "kv", table.rows, pages, None, (("latent", 0),), 0, 3, 0)


def rank() -> RankInfo:
    return make_instance()[0].rank


def test_a_rank_tells_readers_over_what_only_its_staging_slots_can_be_read() -> None:
    told = replace(rank(), staged_only=frozenset({"nixl", "mooncake"}))
    assert service_wire.unpack_rank_info(service_wire.pack_rank_info(told)) == told
    message = service_wire.pack_rank_info(told)
    message.staged_only.append("")
    with pytest.raises((FrameError, InvalidInput), match="staged_only transport"):
        service_wire.unpack_rank_info(message)


@pytest.mark.parametrize("way", ["auto", "direct", "staged"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_page_that_cannot_be_staged_is_not_pulled_directly_instead(way: str, side: str) -> None:
    backend: Backend = Recorder()
    owner = rank()
    if side == "decode":
        backend = StagedOnly(backend, lambda _: True)
    else:
        owner = replace(owner, staged_only=frozenset({backend.name}))
    picker = WayPicker(owner, load_settings({}, way=way), None, Events())
    pull = make_pull()
    assert not picker.may_stage(pull, backend)
    with pytest.raises(RegionError, match=r"cannot be pulled over recorder: .* not registered .* no staging slots"):
        picker.pick(pull, backend)
    assert WayPicker(rank(), load_settings({}, way=way), None, Events()).pick(pull, Recorder()).way == "direct"


def test_a_sidecar_that_is_to_move_pages_directly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="staged or mapped"):
        SidecarServer.start(tmp_path / "a.sock", load_settings({}, way="direct"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["nixl", "mooncake"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if reason := {"nixl": nixl_missing(), "mooncake": mooncake_missing()}[request.param]:
        pytest.skip(reason)
    with folder_for_sockets() as folder, contextlib.ExitStack() as stack:
        yield Rig(stack, Path(folder), request.param)


def beside(rig: Rig, name: str) -> NodeVerbs:
    return rig.connect(rig.sidecar(name))


def inside(rig: Rig, name: str) -> NodeVerbs:
    return rig.node()


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("prefill_in", "decode_in"),
    [
        pytest.param(beside, beside, id="both-beside"),
        pytest.param(beside, inside, id="prefill-beside"),
        pytest.param(inside, beside, id="decode-beside"),
    ],
)
def test_pages_go_staged_between_sidecars_and_libraries(
    rig: Rig, prefill_in: Callable[[Rig, str], NodeVerbs], decode_in: Callable[[Rig, str], NodeVerbs]
) -> None:
    prefill, decode = rig.prefill(prefill_in(rig, "pre.sock")), rig.decode(decode_in(rig, "dec.sock"))
    for number in range(3):
        serve(rig, prefill, decode, f"request-{number}", [4, 0, 9], [1, 12, 7])
        (told,) = decode.worker.explain(rig.instance).values()
        assert told.startswith("staged: ")
