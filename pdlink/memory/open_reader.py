"""Owns how a rank learns what the ranks of its shard group can do, and opens the reader that all of them then choose.

The choice itself is `reader_choice`.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from pdlink.backends.shm import SHM_DIR
from pdlink.config import Settings
from pdlink.layout import CacheLayout
from pdlink.layout.regions import MemoryKind
from pdlink.memory.broadcast_reader import BroadcastReader
from pdlink.memory.communicator import DEFAULT_TIMEOUT_S, Communicator, GroupCommunicator
from pdlink.memory.forward import digest63
from pdlink.memory.layer_reader import LayerReader
from pdlink.memory.owners import ShardOwners
from pdlink.memory.peer_board import MACHINES
from pdlink.memory.peer_reader import PeerReader
from pdlink.memory.pool_device import PoolDevice
from pdlink.memory.reader_choice import RankFacts, ReaderChoice, ReaderKind, choose_reader

log = logging.getLogger("pdlink.memory")


def open_reader(
    owners: ShardOwners,
    layout: CacheLayout,
    global_ranks: Sequence[int],
    *,
    device: PoolDevice | None = None,
    settings: Settings | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> tuple[LayerReader, ReaderChoice]:
    """The reader for pools of `layout` on `device` (None: in host memory), and why it is that one.

    Collective over `global_ranks`, all of which are on devices or none.

    The setting `pool_reader` forces one; all ranks set it alike. Raises `BackendUnavailable` on every rank where the
    one that is asked for cannot work.
    """
    communicator = GroupCommunicator(global_ranks, timeout_s=timeout_s)
    try:
        facts = exchange_facts(communicator, device)
        wanted = (settings or Settings()).pool_reader
        choice = choose_reader(
            MemoryKind.HOST if device is None else device.memory,
            facts,
            layer_token_bytes(layout),
            wanted=None if wanted == "auto" else ReaderKind(wanted),
        )
        log.info("layers of other ranks are read by %s", choice.reason)
        made = PeerReader if choice.kind is ReaderKind.PEER else BroadcastReader
        return cast(LayerReader, made(owners, communicator)), choice
    except BaseException:
        communicator.close()
        raise


def exchange_facts(communicator: Communicator, device: PoolDevice | None = None) -> list[RankFacts]:
    """What each rank of the group says of itself, in shard rank order. Collective."""
    identity = bytes(16) if device is None else bytes.fromhex(device.identity)
    record = np.concatenate([[host_number(), platform.machine() in MACHINES], np.frombuffer(identity, np.int64)])
    every = communicator.gather(torch.from_numpy(record), "where the ranks are").numpy()
    reach = [device is not None and device.reaches(row[2:].tobytes().hex()) for row in every]
    reaches = communicator.gather(torch.tensor(reach, dtype=torch.int64), "what the ranks can map").numpy()
    return [
        RankFacts(f"{int(row[0]):016x}", bool(row[1]), frozenset(np.flatnonzero(reached).tolist()))
        for row, reached in zip(every, reaches, strict=True)
    ]


def host_number() -> int:
    """A number that processes share if they see one running kernel and one /dev/shm, and others do not."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read().strip()
    except OSError:
        boot = platform.node().encode()
    facts = os.stat(SHM_DIR)
    return digest63(boot, f"{facts.st_dev}:{facts.st_ino}".encode())


def layer_token_bytes(layout: CacheLayout) -> int:
    """Bytes that a token takes in one layer that has every component."""
    return sum(-(-one.page_bytes // one.page_size) for one in layout.components)
