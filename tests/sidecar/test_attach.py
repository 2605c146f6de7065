"""What a sidecar maps of an engine, and what it refuses, with what to change."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pdlink.backends import shm
from pdlink.backends.shm import Segment
from pdlink.errors import PeerGone, RegionError
from pdlink.layout.regions import MemoryKind, Region
from pdlink.sidecar.attach import AttachedPool, EngineSegment, segments_of
from tests import processes

NBYTES, PAGE = 8192, 1024


@pytest.fixture
def segment() -> Iterator[Segment]:
    with contextlib.closing(Segment.create(NBYTES)) as segment:
        yield segment


def region(address: int, num_pages: int = 2) -> Region:
    return Region("latent", 3, address, PAGE, PAGE, num_pages)


def told(segment: Segment) -> EngineSegment:
    return EngineSegment(segment.name, NBYTES, segment.address)


def attach(segment: EngineSegment, *regions: Region, pid: int | None = None) -> AttachedPool:
    return AttachedPool([segment], regions, os.getpid() if pid is None else pid)


def test_what_the_sidecar_writes_is_in_the_engines_memory(segment: Segment) -> None:
    with contextlib.closing(attach(told(segment), region(segment.address + PAGE))) as pool:
        (here,) = pool.regions
        assert replace(here, base_address=segment.address + PAGE) == region(segment.address + PAGE)
        assert here.base_address != segment.address + PAGE
        assert pool.holds(here)
        assert not pool.holds(region(segment.address))
        place = shm.locate(here.base_address, here.nbytes)
        assert place == shm.Location(segment.name, PAGE, NBYTES)
        pool._mapped[0].array[PAGE] = 77
    assert segment.array[PAGE] == 77
    assert shm.locate(here.base_address, here.nbytes) is None


def test_peers_still_map_a_segment_for_reading_alone(segment: Segment) -> None:
    with contextlib.closing(shm.attach(segment.name, NBYTES)) as attached:
        assert not attached.array.flags.writeable
        assert shm.locate(attached.address, NBYTES) is None


def test_an_adopted_segment_stays_where_its_owner_has_it(segment: Segment) -> None:
    attach(told(segment)).close()
    assert os.path.exists(f"{shm.SHM_DIR}/{segment.name}")


def test_the_engine_names_each_segment_once_and_where_it_has_it(segment: Segment) -> None:
    regions = [region(segment.address), region(segment.address + 4 * PAGE)]
    assert segments_of(regions) == (told(segment),)


def test_memory_of_the_engine_alone_is_refused_with_what_to_change() -> None:
    private = np.zeros(NBYTES, dtype=np.uint8)
    with pytest.raises(RegionError, match=r"'latent' layer 3 .* private .* pdlink\.memory\.allocate"):
        segments_of([region(private.__array_interface__["data"][0])])


def test_a_region_that_leaves_its_segment_is_refused(segment: Segment) -> None:
    with pytest.raises(RegionError, match="private"):
        segments_of([region(segment.address, NBYTES // PAGE + 1)])
    for address, num_pages in ((segment.address, NBYTES // PAGE + 1), (segment.address - 1, 1), (1, 1)):
        with pytest.raises(RegionError, match="in none of the shared segments"):
            attach(told(segment), region(address, num_pages))


@pytest.mark.parametrize("address", [(1 << 63) - 4096, (1 << 64) - 4096])
def test_a_segment_at_an_address_that_cannot_be_is_refused(segment: Segment, address: int) -> None:
    with pytest.raises(RegionError, match="in none of the shared segments"):
        attach(replace(told(segment), base_address=address), region((1 << 63) - 4 * 4096))


def test_a_device_region_never_counts_as_a_part_of_host_memory(segment: Segment) -> None:
    on_device = replace(region(segment.address), memory=MemoryKind.CUDA, device=1)
    assert segments_of([on_device]) == ()
    with pytest.raises(RegionError, match="in none of the device blocks"):
        attach(told(segment), on_device)


def test_a_wrong_size_is_refused_with_both(segment: Segment) -> None:
    with pytest.raises(RegionError, match=f"has {NBYTES} bytes, its owner said {2 * NBYTES}"):
        attach(replace(told(segment), nbytes=2 * NBYTES))


@pytest.mark.parametrize("name", ["passwd", "../etc/passwd", "pdlink-1-../../../etc/pass", "pdlink-1-0"])
def test_a_name_that_is_no_segments_is_refused(name: str) -> None:
    with pytest.raises(RegionError, match=r"is not the name of a pdlink shared-memory segment"):
        attach(EngineSegment(name, NBYTES, 4096), pid=1)


def test_memory_of_another_process_is_refused(segment: Segment) -> None:
    with pytest.raises(RegionError, match=f"was made by process {os.getpid()}, and the engine is process 77"):
        attach(told(segment), pid=77)


def test_memory_of_another_user_is_refused(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(RegionError, match=rf"belongs to user {mine} .* as user {mine + 1}; run both as one user"):
        attach(told(segment))


def test_memory_of_an_engine_that_has_died_is_refused() -> None:
    script = "from pdlink.backends.shm import Segment; s = Segment.create(8192); print(s.name, flush=True); input()"
    command = [sys.executable, "-c", script]
    with processes.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        name = engine.stdout.readline().strip()
        engine.kill()
        engine.wait(processes.PATIENCE_S)
        with pytest.raises(PeerGone, match="owner that has died"):
            attach(EngineSegment(name, NBYTES, 4096), pid=engine.pid)


def test_nothing_stays_mapped_of_a_pool_that_is_refused(segment: Segment) -> None:
    with pytest.raises(RegionError):
        attach(told(segment), region(segment.address), region(1))
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert sum(segment.name in line for line in maps) == 1
