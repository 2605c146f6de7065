"""Owns the endpoint blob of the ipc backend: what memory a process shows to others of its host, bounded on entry.

It maps nothing.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from dataclasses import dataclass

from pdlink.backends.base import Peer
from pdlink.backends.cuda_driver import HANDLE_BYTES
from pdlink.backends.region_spans import Span, merge
from pdlink.backends.shm import SHM_DIR
from pdlink.errors import BackendUnavailable
from pdlink.layout.regions import MAX_ADDRESS


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """A shared-memory segment, and the address at which its owner has it."""

    name: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedAllocation:
    """An allocation of a device: where its owner has it, by what handle others map it, and on which device it is."""

    uuid: str
    start: int
    nbytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class IpcEndpoint:
    """`host` and `process` are equal for two processes on one host, and for one and the same process."""

    host: str
    process: str
    segments: tuple[SharedSegment, ...]
    allocations: tuple[SharedAllocation, ...]
    device_spans: tuple[Span, ...]
    """What may be read of the allocations, in order: an allocator puts more than the pool into one."""

    def to_bytes(self) -> bytes:
        blob = {
            "host": self.host,
            "process": self.process,
            "segments": [[one.name, one.start, one.nbytes] for one in self.segments],
            "allocations": [
                [one.uuid, one.start, one.nbytes, base64.b64encode(one.handle).decode()] for one in self.allocations
            ],
            "device_spans": self.device_spans,
        }
        return json.dumps(blob, separators=(",", ":")).encode()


def parse_endpoint(peer: Peer) -> IpcEndpoint:
    """Raises `BackendUnavailable` for anything that is malformed or cannot be memory."""
    try:
        blob = json.loads(peer.endpoint)
        made = IpcEndpoint(
            str(blob["host"]),
            str(blob.get("process", "")),
            tuple(SharedSegment(str(name), int(start), int(nbytes)) for name, start, nbytes in blob["segments"]),
            tuple(
                SharedAllocation(str(uuid), int(start), int(nbytes), base64.b64decode(handle, validate=True))
                for uuid, start, nbytes, handle in blob.get("allocations", [])
            ),
            tuple(merge(sorted((int(start), int(stop)) for start, stop in blob.get("device_spans", [])))),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        raise BackendUnavailable(f"{peer.worker_id} offers an ipc endpoint that cannot be read: {error}") from error
    ranges = [(f"segment {one.name}", one.start, one.nbytes) for one in made.segments]
    ranges += [(f"memory of GPU {one.uuid}", one.start, one.nbytes) for one in made.allocations]
    ranges += [("device memory", start, stop - start) for start, stop in made.device_spans]
    for what, start, nbytes in ranges:
        if start < 1 or nbytes < 1 or start + nbytes > MAX_ADDRESS:
            raise BackendUnavailable(f"{peer.worker_id} offers {what} at {start:#x} of {nbytes} bytes over ipc")
    wrong = next((len(one.handle) for one in made.allocations if len(one.handle) != HANDLE_BYTES), None)
    if wrong is not None:
        raise BackendUnavailable(
            f"{peer.worker_id} offers a device handle of {wrong} bytes over ipc, not {HANDLE_BYTES}"
        )
    return made


def host_identity() -> str:
    """Equal for two processes exactly when they see the same /dev/shm of the same boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        shm = os.stat(SHM_DIR)
    except OSError as error:
        raise BackendUnavailable(f"backend ipc needs {SHM_DIR} and /proc: {error}") from error
    return f"{boot}/{shm.st_dev}:{shm.st_ino}"


def process_identity() -> str:
    """Of this process alone, also after a fork: device memory of one's own is read where it lies, and not mapped."""
    global _identity
    if _identity[0] != os.getpid():
        _identity = (os.getpid(), secrets.token_hex(8))
    return _identity[1]


_identity = (0, "")
