"""Owns one process group for the ranks that share a layer split, and counts what it moves. It knows no layers.

The group is pdlink's own: an engine's communicator may be disabled, busy or of another rank order. Ranks inside the
shard group ("shard ranks") and ranks of the world ("global ranks") are translated here and nowhere else.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from pdlink.errors import DeadlineExceeded, IntegrityError, InvalidInput, PdlinkError, PeerGone, StateError
from pdlink.memory.lockstep import name_rank
from pdlink.memory.presence import has_ended, own_presence

DEFAULT_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.1
_PRESENCE = "presence"
# How many groups of the same ranks this process has formed: the ranks of a group meet under the same number.
_GENERATIONS: Counter[tuple[int, ...]] = Counter()


class Communicator(Protocol):
    """What a reader needs. `gather` and `broadcast` are collective; every call returns in bounded time."""

    global_ranks: tuple[int, ...]
    rank: int
    nbytes_broadcast: int
    nbytes_gathered: int
    timeout_s: float
    watch: Callable[[], None] | None
    """Called now and then while a collective waits; what it raises ends the wait, and then `abandon` must follow."""

    def gather(self, record: torch.Tensor, what: str) -> torch.Tensor:
        """int64 [n] of each shard rank -> int64 [num_ranks, n] on all. Raises `DeadlineExceeded`, `IntegrityError`, and
        `PeerGone` naming the ranks whose processes have ended, as far as they were on this host."""

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        """Fill `data` on every rank from shard rank `root`. Raises as `gather` does."""

    def announce(self, record: torch.Tensor) -> None:
        """Take part in the next `gather` of the others without waiting for them."""

    def post(self, topic: str, record: bytes) -> None:
        """Say something that others may look at, whatever collective they are in."""

    def posted(self, topic: str) -> list[bytes | None]:
        """What each shard rank has said about `topic`, None where it has not."""

    def check_present(self, what: str) -> None:
        """Raise `PeerGone` naming the ranks whose processes have ended, as far as they were on this host."""

    def abandon(self) -> None:
        """Leave collectives that may never end. All ranks do so; the next call of all of them is on a new group."""

    def close(self) -> None: ...


class _Collectives(Protocol):
    """The part of a torch process group that is used; its own stubs leave these out."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> dist.Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work: ...

    def shutdown(self) -> None: ...


class GroupCommunicator:
    """A gloo group of `global_ranks`, which are listed in shard rank order.

    Creating it is collective over those ranks only; other ranks of the world need not call. Every wait ends after
    `timeout_s`. Once a wait has failed, the group's connections are undefined: every later call raises the first
    failure again. One thread at a time.

    The group is made on the store of the default group directly: `new_group` would have every rank of the world call
    it, or name the group by a count of groups that need not be equal on all ranks and that repeats after a close.
    """

    def __init__(self, global_ranks: Sequence[int], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not dist.is_initialized():
            raise StateError("torch.distributed is not initialized; call init_process_group before opening a reader")
        self.global_ranks = tuple(int(rank) for rank in global_ranks)
        me, size = dist.get_rank(), dist.get_world_size()
        if len(set(self.global_ranks)) != len(self.global_ranks) or not all(
            0 <= rank < size for rank in self.global_ranks
        ):
            raise InvalidInput(f"shard group {list(self.global_ranks)} is not a set of ranks of a world of {size}")
        if me not in self.global_ranks:
            raise InvalidInput(
                f"global rank {me} is not in its shard group {list(self.global_ranks)}; give global ranks, not ranks "
                "inside the group"
            )
        if timeout_s <= 0:
            raise InvalidInput(f"timeout_s={timeout_s} must be positive")
        self.rank = self.global_ranks.index(me)
        self.timeout_s = timeout_s
        self.nbytes_broadcast = 0
        self.nbytes_gathered = 0
        self.watch: Callable[[], None] | None = None
        self._closed = False
        self._announcements: list[dist.Work] = []
        self._failure: PdlinkError | None = None
        self._present: list[bytes | None] = []
        self._group: _Collectives | None = self._form()

    def gather(self, record: torch.Tensor, what: str) -> torch.Tensor:
        every = [torch.zeros_like(record) for _ in self.global_ranks]
        try:
            self._finish(self._usable(what).allgather([every], [record]))
        except RuntimeError as exc:
            raise self._broken(exc, what) from exc
        self.nbytes_gathered += record.nbytes * len(every)
        return torch.stack(every)

    def broadcast(self, data: torch.Tensor, root: int, what: str) -> None:
        try:
            self._finish(self._usable(what).broadcast(data, root))
        except RuntimeError as exc:
            raise self._broken(exc, what) from exc
        self.nbytes_broadcast += data.nbytes

    def announce(self, record: torch.Tensor) -> None:
        if self._closed or self._failure is not None:
            return
        group = self._usable("an announcement")
        every = [torch.zeros_like(record) for _ in self.global_ranks]
        # A group that is broken already has told the others by itself.
        with contextlib.suppress(RuntimeError):
            self._announcements.append(group.allgather([every], [record]))

    def post(self, topic: str, record: bytes) -> None:
        self._store.set(f"{topic}/{self.rank}", record.hex())

    def posted(self, topic: str) -> list[bytes | None]:
        keys = [f"{topic}/{rank}" for rank in range(len(self.global_ranks))]
        return [bytes.fromhex(self._store.get(key).decode()) if self._store.check([key]) else None for key in keys]

    def check_present(self, what: str) -> None:
        if gone := self._gone():
            raise PeerGone(f"{what}: {gone} has ended: its process is gone; restart the ranks of the shard group")

    def abandon(self) -> None:
        self._announcements.clear()
        # Its sockets close with it, which ends what others still wait for on it.
        self._group = None

    def close(self) -> None:
        """Wait (at most `timeout_s`) until announcements are heard, and leave the group; twice is fine."""
        self._closed = True
        group, self._group = self._group, None
        if group is None:
            return
        for work in self._announcements:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._announcements.clear()
        with contextlib.suppress(RuntimeError):
            group.shutdown()

    def _form(self) -> _Collectives:
        generation = _GENERATIONS[self.global_ranks]
        _GENERATIONS[self.global_ranks] += 1
        name = f"pdlink/{'.'.join(map(str, self.global_ranks))}/{generation}"
        self._store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.post(_PRESENCE, own_presence())
        try:
            group = dist.ProcessGroupGloo(
                self._store, self.rank, len(self.global_ranks), timedelta(seconds=self.timeout_s)
            )
        except RuntimeError as exc:
            raise DeadlineExceeded(
                f"shard group {list(self.global_ranks)} did not form within {self.timeout_s:g} s: {_first_line(exc)}; "
                "every rank of it must open its reader, in the same order as its other readers"
            ) from exc
        # The store ends with the rank that keeps it: what is to be known once a rank has gone is read now.
        self._present = self.posted(_PRESENCE)
        return cast("_Collectives", group)

    def _usable(self, what: str) -> _Collectives:
        if self._closed:
            raise StateError(f"{what}: the communicator of shard group {list(self.global_ranks)} is closed")
        if self._failure is not None:
            raise IntegrityError(f"{what}: the shard group has failed before: {self._failure}") from self._failure
        if self._group is None:
            self._group = self._form()
        return self._group

    def _finish(self, work: dist.Work) -> None:
        """Wait for `work`, and look up now and then if there is something to watch."""
        if self.watch is None:
            work.wait()
            return
        try:
            while True:
                try:
                    work.wait(timedelta(seconds=_LOOK_EVERY_S))
                    return
                except RuntimeError:
                    # Who abandons the group has said why, and its sockets close after that.
                    self.watch()
                    if work.is_completed():
                        work.wait()
                        return
        finally:
            # A traceback that kept it would keep the group's sockets open; nor may one keep the group.
            del work

    def _broken(self, exc: RuntimeError, what: str) -> PdlinkError:
        others = ", ".join(str(rank) for at, rank in enumerate(self.global_ranks) if at != self.rank)
        text = _first_line(exc)
        if gone := self._gone():
            self._failure = PeerGone(
                f"{what}: {gone} has ended: its process is gone ({text}); restart the ranks of the shard group"
            )
        elif "imed out" in text or "imeout" in text:
            self._failure = DeadlineExceeded(
                f"{what}: no answer from the shard group (global ranks {others}) within {self.timeout_s:g} s; a rank "
                "has stopped, or does not make this call"
            )
        else:
            self._failure = IntegrityError(
                f"{what}: lost the shard group (global ranks {others}): {text}; a rank has ended or given up"
            )
        return self._failure

    def _gone(self) -> str:
        """The ranks whose processes are known to have ended, in words."""
        found = [rank for rank, one in enumerate(self._present) if one is not None and has_ended(one)]
        return " and ".join(name_rank(rank, self.global_ranks) for rank in found)


def _first_line(exc: BaseException) -> str:
    """What gloo says, without the place in its source and its advice."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(exc).strip())
    return text.splitlines()[0].split(". ")[0] if text else type(exc).__name__
