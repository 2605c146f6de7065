"""Owns the memory of an engine's pool as its sidecar has it: which shared segments regions lie in, their mapping here,
and the regions at the addresses of this process. It registers nothing and copies nothing.

Memory rules: the engine's segments stay the engine's, which alone removes them. The sidecar writes into a segment where
a receive of that engine has it write, and reads what the engine has published. It unmaps when the worker is detached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdlink.backends import shm
from pdlink.errors import RegionError
from pdlink.layout.regions import MAX_ADDRESS, MemoryKind, Region

MAX_SEGMENTS = 4096
_OWNER = re.compile(r"pdlink-([0-9]{1,10})-")


@dataclass(frozen=True, slots=True)
class EngineSegment:
    """A segment by its name and size, and the address at which the engine has it."""

    name: str
    nbytes: int
    base_address: int


def segments_of(regions: Iterable[Region]) -> tuple[EngineSegment, ...]:
    """The segments of this process that `regions` lie in, each once. Raises `RegionError` with what to change."""
    found: dict[str, EngineSegment] = {}
    for one in regions:
        where = f"{one.component!r} layer {one.layer}"
        _check_kind(where, one)
        place = shm.locate(one.base_address, one.nbytes)
        if place is None:
            raise RegionError(
                f"{where} lies in memory that is private to this process, so that a sidecar cannot map it; allocate "
                "the pool with pdlink.memory.allocate, or open a Node in this process instead of a sidecar's"
            )
        found[place.name] = EngineSegment(place.name, place.nbytes, one.base_address - place.offset)
    return tuple(found.values())


class AttachedPool:
    """An engine's segments, mapped for writing. `close` twice is fine.

    `regions` are the engine's at the addresses of this process.
    """

    def __init__(self, segments: Sequence[EngineSegment], regions: Sequence[Region], engine_pid: int) -> None:
        """Raises `RegionError` or `PeerGone`, naming what is refused and what to change, with nothing left mapped."""
        if len(segments) > MAX_SEGMENTS:
            raise RegionError(
                f"a pool in {len(segments)} shared segments; at most {MAX_SEGMENTS}: allocate larger ones"
            )
        self._mapped: list[shm.AttachedSegment] = []
        self._regions: list[Region] = []
        try:
            for one in segments:
                _check_owner(one, engine_pid)
                self._mapped.append(shm.adopt(one.name, one.nbytes))
            self._regions += [_rebased(one, segments, self._mapped) for one in regions]
        except BaseException:
            self.close()
            raise

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions)

    def holds(self, region: Region) -> bool:
        """Whether `region`, at an address of this process, lies in the engine's memory."""
        return any(
            one.address <= region.base_address and region.end_address <= one.address + one.nbytes
            for one in self._mapped
        )

    def close(self) -> None:
        mapped, self._mapped = self._mapped, []
        self._regions.clear()
        for one in mapped:
            one.close()


def _check_kind(where: str, region: Region) -> None:
    if region.memory is not MemoryKind.HOST:
        raise RegionError(
            f"{where} lies on {region.memory} device {region.device}; a sidecar takes pools in host memory alone: open "
            "a Node in the engine's process for pools on devices"
        )


def _check_owner(segment: EngineSegment, engine_pid: int) -> None:
    """An engine brings its own memory, and no other's of the same user."""
    made = _OWNER.match(segment.name)
    if made and int(made[1]) != engine_pid:
        raise RegionError(
            f"shared-memory segment {segment.name} was made by process {made[1]}, and the engine is process "
            f"{engine_pid}; attach each engine's pool from its own process"
        )


def _rebased(region: Region, segments: Sequence[EngineSegment], mapped: Sequence[shm.AttachedSegment]) -> Region:
    where = f"{region.component!r} layer {region.layer}"
    _check_kind(where, region)
    for theirs, ours in zip(segments, mapped, strict=True):
        start, stop = theirs.base_address, theirs.base_address + theirs.nbytes
        if stop <= MAX_ADDRESS and start <= region.base_address and region.end_address <= stop:
            return replace(region, base_address=ours.address + region.base_address - start)
    raise RegionError(
        f"{where} at {region.base_address:#x}..{region.end_address:#x} lies in none of the shared segments that the "
        "engine has named; allocate the pool with pdlink.memory.allocate"
    )
