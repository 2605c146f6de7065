"""Owns the boards of a shard group: what each rank lets the others see of its progress, in memory that all map.

A rank writes its own board only, and maps the others' for reading. What the numbers mean is `epochs`; here they are
stored, looked at and waited for.

Order: a rank stores rows before the epoch that says so, and reads the epoch before the rows. x86-64 keeps both orders
by itself; elsewhere plain stores may overtake each other, so boards are refused there.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from pdlink.backends.shm import AttachedSegment, Segment, attach
from pdlink.errors import BackendUnavailable, DeadlineExceeded, IntegrityError, PeerGone, RegionError
from pdlink.memory.epochs import end_of
from pdlink.memory.lockstep import NUM_WORDS, RECORD_NBYTES, Step, StepKind, name_rank, unpack

# Words of a board; each epoch has a cache line of its own, so that a wait for one does not slow the others.
_WRITTEN, _READ, _FAILED, _LEFT = 0, 8, 16, 17
_RECORDS = (24, 24 + NUM_WORDS)
_NUM_WORDS = 24 + 2 * NUM_WORDS
BOARD_NBYTES = _NUM_WORDS * 8
MACHINES = ("x86_64", "AMD64")
_YIELDS = 40
_LONGEST_PAUSE_S = 1e-3
_PULSE_S = 0.2


class PeerBoards:
    """The boards of all ranks of a shard group as one of them has them. One thread writes; any may wait.

    `manifest` are bytes that the others can read once they are connected. Raises `BackendUnavailable` on a machine
    whose memory order does not suit, or without shared memory.
    """

    def __init__(self, rank: int, global_ranks: Sequence[int], manifest: bytes, *, timeout_s: float) -> None:
        if platform.machine() not in MACHINES:
            raise BackendUnavailable(
                f"reads of peers' host memory need the memory order of x86-64, this is {platform.machine()}; use the "
                "broadcast reader"
            )
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self.timeout_s = timeout_s
        self._segment = Segment.create(BOARD_NBYTES + len(manifest))
        self._segment.array[BOARD_NBYTES:] = np.frombuffer(manifest, np.uint8)
        self._own = self._segment.array[:BOARD_NBYTES].view(np.int64)
        self._own[_WRITTEN] = self._own[_READ] = end_of(0)
        self._peers: list[AttachedSegment | None] = []
        self._words: list[np.ndarray] = []

    @property
    def name(self) -> str:
        return self._segment.name

    @property
    def nbytes(self) -> int:
        return self._segment.nbytes

    def connect(self, places: Sequence[tuple[str, int]]) -> None:
        """Map the boards of all ranks: (segment name, bytes) of each in shard rank order.

        Raises `PeerGone` or `RegionError` naming the rank whose board cannot be mapped.
        """
        for rank, (name, nbytes) in enumerate(places):
            if rank == self.rank:
                self._peers.append(None)
                self._words.append(self._own)
                continue
            try:
                peer = attach(name, nbytes)
            except (PeerGone, RegionError) as exc:
                raise type(exc)(
                    f"{name_rank(rank, self.global_ranks)}: {exc}; the peer reader needs all ranks of a shard group on "
                    "one host with one /dev/shm, the broadcast reader does not"
                ) from exc
            self._peers.append(peer)
            self._words.append(peer.array[:BOARD_NBYTES].view(np.int64))

    def manifest(self, rank: int) -> bytes:
        peer = self._peers[rank]
        return (self._segment.array if peer is None else peer.array)[BOARD_NBYTES:].tobytes()

    def advance_written(self, epoch: int) -> None:
        self._own[_WRITTEN] = max(int(self._own[_WRITTEN]), epoch)

    def advance_read(self, epoch: int) -> None:
        self._own[_READ] = max(int(self._own[_READ]), epoch)

    def fail(self, forward: int) -> None:
        """This rank failed in `forward`: whoever waits for it there hears of it."""
        self._own[_FAILED] = forward

    def post(self, step: Step) -> None:
        """Show the record of a begin; it stays until that of the next forward but one."""
        at = _RECORDS[step.forward % 2]
        self._own[at : at + NUM_WORDS] = step.pack()

    def records(self, forward: int, what: str) -> list[Step]:
        """The record of each rank for the begin of `forward`, once all have posted one."""
        found: dict[int, Step] = {}

        def missing() -> list[int]:
            for rank in range(len(self._words)):
                if rank not in found and (step := self._record(rank, forward)) is not None:
                    found[rank] = step
            return [rank for rank in range(len(self._words)) if rank not in found]

        complaint = "has not begun it; every rank begins each forward, or skips it"
        # Who fails has shown a record, which says more.
        self._wait(missing, forward, what, complaint, heed_failures=False)
        return [found[rank] for rank in range(len(self._words))]

    def wait_written(self, rank: int, epoch: int, forward: int, what: Callable[[], str]) -> None:
        """Return when `rank` has written `epoch`."""
        if self._words[rank][_WRITTEN] < epoch:
            self._wait(
                lambda: [rank] if self._words[rank][_WRITTEN] < epoch else [],
                forward,
                what(),
                "owns the layer and has not finished writing what a read of it needs",
            )

    def wait_read(self, epoch: int, forward: int, what: str) -> None:
        """Return when every rank has read `epoch`."""
        self._wait(
            lambda: [rank for rank, words in enumerate(self._words) if rank != self.rank and words[_READ] < epoch],
            forward,
            what,
            "may still be reading this rank's rows",
            heed_failures=False,
        )

    def confirm(self, forward: int, what: str) -> None:
        """Nothing to wait for: on the host a gather that has returned is over, and was right."""

    def leave(self, timeout_s: float) -> None:
        """Say that this rank uses nothing of the others any more, and return when they say so too, or have ended.

        After `timeout_s` it returns all the same.
        """
        self._own[_LEFT] = 1
        with suppress(DeadlineExceeded, PeerGone):
            self._wait(
                lambda: [rank for rank, words in enumerate(self._words) if not words[_LEFT]],
                0,
                "the end of a pool",
                "still has this rank's memory mapped",
                heed_failures=False,
                timeout_s=timeout_s,
            )

    def close(self) -> None:
        """Unmap the others' boards and remove the own one; twice is fine."""
        # The words are views of the mappings: they have to go first.
        self._words = []
        self._own = np.zeros(_NUM_WORDS, np.int64)
        for peer in self._peers:
            if peer is not None:
                peer.close()
        self._peers = []
        self._segment.close()

    def _record(self, rank: int, forward: int) -> Step | None:
        at = _RECORDS[forward % 2]
        words = self._words[rank]
        step = unpack(words[at : at + NUM_WORDS].copy())
        if step is None or step.forward < forward:
            return None
        if step.forward == forward:
            return step
        # Two forwards on already: it needed nobody for this one, or has failed in it.
        failed = bool(words[_FAILED] == forward)
        return Step(StepKind.FAILED if failed else StepKind.SKIP, forward, setup_digest=step.setup_digest, changes=-1)

    def _wait(
        self,
        late: Callable[[], list[int]],
        forward: int,
        what: str,
        complaint: str,
        *,
        heed_failures: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        """Look until `late` names no rank. Raises when one of them fails, ends, or takes longer than `timeout_s` (None:
        that of all waits)."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        ranks = late()
        if not ranks:
            return
        started = pulse = time.monotonic()
        looks = 0
        while ranks:
            looks += 1
            time.sleep(0.0 if looks < _YIELDS else min((looks - _YIELDS) * 2e-5, _LONGEST_PAUSE_S))
            ranks = late()
            now = time.monotonic()
            if heed_failures:
                self._check_failures(ranks, forward, what)
            if now - pulse >= _PULSE_S:
                pulse = now
                self._check_alive(ranks, what)
            if now - started > limit_s:
                names = ", ".join(name_rank(rank, self.global_ranks) for rank in ranks)
                raise DeadlineExceeded(f"{what}: waited {limit_s:g} s for {names}, which {complaint}")

    def _check_failures(self, ranks: list[int], forward: int, what: str) -> None:
        for rank in ranks:
            if forward and self._words[rank][_FAILED] == forward:
                raise IntegrityError(
                    f"{what}: {name_rank(rank, self.global_ranks)} has failed in forward {forward}; its own error says "
                    "why"
                )

    def _check_alive(self, ranks: list[int], what: str) -> None:
        for rank in ranks:
            peer = self._peers[rank]
            if peer is None:
                continue
            try:
                attach(peer.name, peer.nbytes).close()
            except PeerGone as exc:
                raise PeerGone(f"{what}: {name_rank(rank, self.global_ranks)} has ended or closed its pool") from exc


NBYTES_POSTED = RECORD_NBYTES
