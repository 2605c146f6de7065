"""Transfers of the same ranges are made once and posted again, with the bytes of that time."""

from __future__ import annotations

import json
import os
import sys

import pytest

from pdlink.backends.nixl_pieces import Indexed, Plain
from pdlink.backends.nixl_posts import MAX_IDLE, KeptPosts, Post
from pdlink.layout import MemoryKind
from tests import processes
from tests.backends.needs import nixl_missing
from tests.transfer.values import ints


class Raw:
    """What nixl would hand out."""

    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def make_post() -> tuple[Post, list[Raw]]:
    from pdlink.backends.nixl_engine import Held

    raws = [Raw() for _ in range(3)]
    transfer, *lists = map(Held, raws)
    return Post(transfer, tuple(lists)), raws


def plain() -> Plain:
    rows = ints([0, 64, 0]).reshape(1, 3).astype("uint64")
    return Plain(rows, rows, MemoryKind.HOST, MemoryKind.HOST)


def test_a_transfer_is_given_out_once_and_only_for_its_own_piece() -> None:
    kept, piece, (post, raws) = KeptPosts(), plain(), make_post()
    kept.give(piece, post)
    assert kept.take(plain()) is None
    assert kept.take(piece) is post
    assert kept.take(piece) is None
    assert len(kept) == 0
    assert not any(raw.released for raw in raws)


def test_no_more_are_kept_than_a_link_may_have_and_the_oldest_goes() -> None:
    kept, pieces = KeptPosts(), [plain() for _ in range(MAX_IDLE + 2)]
    made = [make_post() for _ in pieces]
    for piece, (post, _) in zip(pieces, made, strict=True):
        kept.give(piece, post)
    assert len(kept) == MAX_IDLE
    assert [sum(raw.released for raw in raws) for _, raws in made[:3]] == [3, 3, 0]
    kept.release()
    kept.release()
    assert all([raw.released for raw in raws] == [1, 1, 1] for _, raws in made)
    assert kept.take(pieces[-1]) is None


def test_one_of_prepared_lists_is_released_at_once() -> None:
    kept, (post, raws) = KeptPosts(), make_post()
    pages = ints([1]).astype("int32")
    piece = Indexed(pages, pages, MemoryKind.HOST, MemoryKind.HOST)
    kept.give(piece, post)
    assert kept.take(piece) is None
    assert [raw.released for raw in raws] == [1, 1, 1]


AGAIN = """
import ctypes, json, sys, time
from contextlib import ExitStack, closing
import numpy as np
from pdlink.backends.base import Peer, PullStatus, Settled
from pdlink.backends.nixl import NixlBackend
from pdlink.backends.nixl_engine import Agent
from pdlink.config import load_settings
from pdlink.layout import MemoryKind, Region
from pdlink.layout.staging import StagingArea
from pdlink.transfer.packing import one_range

SLOT, NUM, SIZE = 1 << 16, 4, 50_000
made = []
real = Agent.make_read
Agent.make_read = lambda self, *rest: made.append(1) or real(self, *rest)
memory = [np.zeros(SLOT * NUM, dtype=np.uint8) for _ in range(3)]
area = [StagingArea(one.ctypes.data, SLOT, NUM, ("nixl",), MemoryKind.HOST, 0) for one in memory]
counts = []
with ExitStack() as stack:
    owner, reader = (stack.enter_context(closing(NixlBackend(load_settings()))) for _ in range(2))
    owner.register(area[0].region())
    reader.register(area[1].region())
    peer = Peer("w0", 1, owner.endpoint())
    owner.serve("w0", 1)
    reader.connect(peer)
    pulls = [one_range("w0", area[0], 1, area[1], to, SIZE) for to in (2, 3)]

    def move(number):
        memory[0][SLOT : 2 * SLOT] = number
        memory[1][:] = 0
        handles = [reader.submit(one) for one in pulls]
        until = time.monotonic() + 60
        for handle in handles:
            while (status := reader.poll(handle)) is PullStatus.PENDING:
                assert time.monotonic() < until
            assert status is PullStatus.DONE, handle.error
            assert reader.settle(handle) is Settled.QUIET
        for slot in (2, 3):
            assert (memory[1][slot * SLOT : slot * SLOT + SIZE] == number).all()
            assert not memory[1][slot * SLOT + SIZE : (slot + 1) * SLOT].any()
        counts.append(len(made))

    for number in range(1, 6):
        move(number)
    reader.register(area[2].region())
    move(6)
    move(7)
    reader.deregister(area[2].region())
    move(8)
    reader.fence(peer)
    reader.connect(peer)
    move(9)
print(json.dumps(counts))
"""


@pytest.mark.skipif(bool(nixl_missing()), reason=nixl_missing())
@pytest.mark.parametrize("transports", ["cma,tcp,cuda_copy", "tcp,cuda_copy"])
def test_the_same_ranges_are_made_once_until_memory_or_the_link_changes(transports: str) -> None:
    env = {**os.environ, "UCX_TLS": transports, "UCX_NET_DEVICES": "lo"}
    ended = processes.run([sys.executable, "-c", AGAIN], env=env, check=True)
    assert json.loads(ended.stdout) == [2, 2, 2, 2, 2, 4, 4, 6, 8]
