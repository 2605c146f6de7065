"""Owns the boards of a shard group whose pools are on devices: epochs that lanes advance and wait for.

What ranks say to each other on the host (records of a begin, failures, who lives) is on host boards as ever. Epochs are
words of device memory that peers map: a lane advances its own behind the work that they stand for, and waits for
others' ahead of the work that needs them, so that no host waits for any device before the end of a forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pdlink.errors import DeadlineExceeded, IntegrityError, PdlinkError
from pdlink.memory.epochs import begin_of, end_of
from pdlink.memory.lockstep import Step, name_rank
from pdlink.memory.peer_board import PeerBoards
from pdlink.memory.pool_device import DeviceMemory, Lane, PoolDevice, Trouble, TroubleKind

# Bytes from one word to the next, so that lanes and peers do not meet in one cache line.
WORD_STRIDE = 256
WRITTEN, READ, BROKEN = (place * WORD_STRIDE for place in range(3))
# Small allocations share a block of the driver, which would be mapped by peers as a whole.
WORDS_NBYTES = 2 << 20
_LOOK_EVERY_S = 0.1
_PAUSE_S = 5e-5
_PATIENCE_S = 30.0


def make_words(device: PoolDevice) -> DeviceMemory:
    """A rank's words, all at the end of the time before any forward."""
    words = device.allocate(WORDS_NBYTES)
    device.advance(Lane.COMPUTE, words.address + WRITTEN, end_of(0))
    device.fork()
    device.advance(Lane.FETCH, words.address + READ, end_of(0))
    return words


class DeviceBoards:
    """As `PeerBoards`, of ranks on devices. `words` are the addresses of all ranks' words, the own one among them.

    Epochs that are waited for count from the int64 at the address `base`, as it is when the wait is made (0: from 0).
    """

    def __init__(self, host: PeerBoards, device: PoolDevice, words: Sequence[int], base: int = 0) -> None:
        self._host = host
        self._device = device
        self._words = tuple(words)
        self._ranks = [rank for rank in range(len(words)) if rank != host.rank]
        # Up to where a lane has been made to wait: it does not do so again.
        nothing = -2 if base else 0
        self._written_waited = dict.fromkeys(self._ranks, nothing)
        self._read_waited = nothing
        self._base = base
        self.global_ranks = host.global_ranks

    def capturing(self, base: int) -> DeviceBoards:
        """The same boards for waits that are captured into a graph: 0 is the first epoch of each forward that it makes,
        which is at `base` by then, and nothing has been waited for."""
        return DeviceBoards(self._host, self._device, self._words, base)

    def advance_written(self, epoch: int) -> None:
        self._device.advance(Lane.COMPUTE, self._own(WRITTEN), epoch)

    def advance_read(self, epoch: int) -> None:
        self._device.advance(Lane.FETCH, self._own(READ), epoch)

    def fail(self, forward: int) -> None:
        self._host.fail(forward)

    def post(self, step: Step) -> None:
        self._host.post(step)

    def records(self, forward: int, what: str) -> list[Step]:
        return self._host.records(forward, what)

    def wait_written(self, rank: int, epoch: int, forward: int, what: Callable[[], str]) -> None:
        """Gathers that are launched from here on run once `rank` has written `epoch`."""
        if self._written_waited[rank] < epoch:
            word = self._words[rank] + WRITTEN
            self._device.wait_for(Lane.FETCH, [word], [rank], epoch, self._host.timeout_s, base=self._base)
            self._written_waited[rank] = epoch

    def wait_read(self, epoch: int, forward: int, what: str) -> None:
        """Writes that are launched from here on run once every rank has read `epoch`, or have been told of."""
        if self._read_waited < epoch and self._ranks:
            words = [self._words[rank] + READ for rank in self._ranks]
            limit_s, broken = self._host.timeout_s, self._own(BROKEN)
            self._device.wait_for(Lane.COMPUTE, words, self._ranks, epoch, limit_s, broken, self._base)
            self._read_waited = epoch

    def confirm(self, forward: int, what: str) -> None:
        """Return when the gathers of `forward` are over, and were right; the one wait of the host for its device.

        Raises `DeadlineExceeded` or `IntegrityError` naming the rank.
        """
        if self._ranks:
            words = [self._words[rank] + BROKEN for rank in self._ranks]
            self._device.look_for_broken(words, self._ranks, begin_of(forward))
        # Every wait in the lanes has its limit, so that this one is of a device that has failed.
        wait_until_over(self._device, self._device.mark(), _PATIENCE_S + 4 * self._host.timeout_s, what)
        found = self._device.trouble()
        if found is not None:
            self._device.clear_trouble()
            raise explain(found, what, self.global_ranks)

    def close(self) -> None:
        self._host.close()

    def _own(self, word: int) -> int:
        return self._words[self._host.rank] + word


def wait_until_over(
    device: PoolDevice, mark: object, timeout_s: float, what: str, watch: Callable[[], None] | None = None
) -> None:
    """Return when the work before `mark` is over. `watch` is called now and then and may raise.

    Raises `DeadlineExceeded` after `timeout_s`.
    """
    until = time.monotonic() + timeout_s
    look = time.monotonic() + _LOOK_EVERY_S
    while not device.is_over(mark):
        now = time.monotonic()
        if now > until:
            raise DeadlineExceeded(f"{what}: the device's fetches did not end within {timeout_s:g} s")
        if watch is not None and now > look:
            watch()
            look = now + _LOOK_EVERY_S
        time.sleep(_PAUSE_S)


def explain(found: Trouble, what: str, global_ranks: Sequence[int]) -> PdlinkError:
    """The error that says what a lane found."""
    who = name_rank(found.rank, global_ranks)
    if found.kind is TroubleKind.LATE:
        return DeadlineExceeded(
            f"{what}: waited for {who}, which stayed at epoch {found.seen} and was to reach {found.wanted}; no row "
            "that depends on it was used"
        )
    if found.kind is TroubleKind.OVERWRITTEN:
        return IntegrityError(
            f"{what}: {who} changed rows, after waiting in vain, that this rank may still have been reading"
        )
    return IntegrityError(
        f"{what}: a broadcast of {who} brought word {found.seen} where it sent {found.wanted}; its communicator does "
        "not work, and no row of it was used"
    )
