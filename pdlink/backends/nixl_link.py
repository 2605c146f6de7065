"""Owns one peer as the nixl backend pulls from it: an agent of its own, prepared lists, and the posts of its pulls.

An agent for each peer, because taking an agent down is the one act after which nothing of it lands any more; so a
fence breaks that peer alone. Pulls of a link share its fate.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter

import numpy as np

from pdlink.backends.base import Peer, PullHandle, PullStatus, Settled
from pdlink.backends.kept_plans import KeptPlans, is_kept
from pdlink.backends.nixl_endpoint import RegionTable, unpack
from pdlink.backends.nixl_engine import Agent, Held
from pdlink.backends.nixl_memory import NixlMemory
from pdlink.backends.nixl_pieces import Indexed, PieceCutter, Plain
from pdlink.backends.nixl_posts import KeptPosts, Post
from pdlink.errors import BackendError, PeerGone
from pdlink.layout.regions import MemoryKind
from pdlink.transfer.descriptors import PullBatch

log = logging.getLogger("pdlink.backends")

MAX_POSTED = 2
"""Posts of one pull under way: enough that the next one waits ready, few enough that a cancelled pull ends soon."""


class NixlPull(PullHandle):
    def __init__(self, batch: PullBatch, link: NixlLink, own: _OwnPages, todo: Iterator[Indexed | Plain]) -> None:
        super().__init__(batch)
        self.link = link
        self.is_kept = is_kept(batch)
        self.own = own
        self.todo = todo
        self.posted: deque[tuple[Indexed | Plain, Post]] = deque()
        self.status = PullStatus.PENDING

    def fail(self, error: Exception) -> None:
        """Post no more. What is posted may still land."""
        if self.status is PullStatus.PENDING:
            self.status, self.error = PullStatus.FAILED, error
        self.todo = iter(())


class _OwnPages:
    """Own regions as they were at some time, and a prepared list for each kind of memory that they lie in."""

    def __init__(self, table: RegionTable, prepared: dict[MemoryKind, Held]) -> None:
        self.table = table
        self.prepared = prepared

    def release(self) -> None:
        for one in self.prepared.values():
            one.release()


class NixlLink:
    """A connected peer. `lock` is held over each step, so that a fence or close never meets a step under way."""

    def __init__(self, peer: Peer, own: RegionTable) -> None:
        """Connect. Raises `BackendUnavailable`, `PeerGone` or `BackendError`."""
        metadata, self.regions = unpack(peer.endpoint, peer.worker_id)
        self.peer = peer
        self.agent = Agent(own.cuda_device)
        self.lock = self.agent.lock
        self._memory = NixlMemory(self.agent)
        self._own: _OwnPages | None = None
        self._their_lists: dict[MemoryKind, Held] = {}
        self._pulls: list[NixlPull] = []
        self._cutter = PieceCutter(self.regions, peer.worker_id)
        self._plans: KeptPlans[Indexed | Plain] = KeptPlans()
        self._kept = KeptPosts()
        """Of own regions as they are in `_own`."""
        self._is_dead = False
        """The connection has failed: a post of it may never be heard of again."""
        self._may_copy = False
        """The agent was taken down with posts under way, and its device may still copy for them."""
        try:
            self._name = self.agent.add_peer(metadata, peer.worker_id)
            self._prepare(self._their_lists, self._name, self.regions)
            with self.lock:
                self._adopt(own)
        except BaseException:
            self.take_down("it could not be connected")
            raise

    @property
    def is_down(self) -> bool:
        return self.agent.is_destroyed

    @property
    def is_usable(self) -> bool:
        return not (self.is_down or self._is_dead)

    def submit(self, batch: PullBatch, own: RegionTable) -> NixlPull:
        """Check the ranges, then post the first piece. Raises `RegionError` before a byte moves, or `PeerGone`."""
        todo = self._plans.parts(batch, own, lambda: self._cutter.pieces(batch, own))
        with self.lock:
            if not self.is_usable:
                raise PeerGone(f"the nixl link to {self.peer.worker_id} is down; connect again")
            pull = NixlPull(batch, self, self._adopt(own), todo)
            self._pulls.append(pull)
            self._step(pull)
            return pull

    def poll(self, pull: NixlPull) -> PullStatus:
        with self.lock:
            if pull.status is PullStatus.PENDING:
                self._step(pull)
            return pull.status

    def settle(self, pull: NixlPull) -> Settled:
        """Post no more and look at what is posted. A connection that failed is taken down, because nothing else proves
        that its posts are over."""
        with self.lock:
            pull.fail(BackendError("the pull was stopped before all of it had landed"))
            if self.is_down:
                self.take_down("it was not proved to be down")  # raises while it is not
            else:
                self._reap(pull)
            if pull.posted and self._is_dead:
                self.take_down("its connection has failed")
            if pull.posted:
                return Settled.NOT_QUIET
            self._end(pull)
            return Settled.QUIET

    def take_down(self, why: str) -> None:
        """Destroy the agent: every pull of the link is over and quiet afterwards. Twice is fine."""
        with self.lock:
            if any(pull.posted for pull in self._pulls):
                self._may_copy = True
            for pull in self._pulls:
                pull.fail(PeerGone(f"the nixl link to {self.peer.worker_id} was taken down: {why}"))
                while pull.posted:
                    with suppress(Exception):  # a post that will not be released goes with its agent
                        pull.posted.popleft()[1].release()
            self._pulls.clear()
            self._kept.release()
            for prepared in (*(self._own.prepared.values() if self._own else ()), *self._their_lists.values()):
                with suppress(Exception):  # it goes with its agent
                    prepared.release()
            self.agent.destroy()
            if self._may_copy:
                self.agent.wait_for_device()
                self._may_copy = False

    def _adopt(self, own: RegionTable) -> _OwnPages:
        """Register own regions as they are now, unless they are already, and prepare their list.

        What is not there any more is let go when no pull is under way, which may still use it.
        """
        if self._own is None or self._own.table is not own:
            self._kept.release()
            if self.agent.device is None:
                self.agent.device = own.cuda_device
            self._memory.add(own)
            prepared: dict[MemoryKind, Held] = {}
            self._prepare(prepared, "", own)
            # A list that pulls under way still use is released with the last of them, which holds it.
            self._own = _OwnPages(own, prepared)
        if not self._pulls:
            self._memory.keep_only(own)
        return self._own

    def _prepare(self, lists: dict[MemoryKind, Held], name: str, table: RegionTable) -> None:
        for memory in table.kinds:
            lists[memory] = self.agent.prepare(name, table.strided_rows(memory), memory, self.peer.worker_id)

    # --- steps, under the lock ----------------------------------------------------------------------

    def _step(self, pull: NixlPull) -> None:
        """Look at what is posted, then post what there is room for: at most one post that moves its bytes at once."""
        self._reap(pull)
        while pull.status is PullStatus.PENDING and len(pull.posted) < MAX_POSTED:
            began = perf_counter()
            piece = next(pull.todo, None)
            pull.timings.prep_s += perf_counter() - began
            if piece is None:
                if not pull.posted:
                    pull.status = PullStatus.DONE
                    self._end(pull)
                return
            if self._post(pull, piece):
                return

    def _end(self, pull: NixlPull) -> None:
        """Forget a pull that is quiet, and the list that only it has used."""
        if pull in self._pulls:
            self._pulls.remove(pull)
        used = [one.own for one in self._pulls]
        if pull.own is not self._own and pull.own not in used:
            pull.own.release()

    def _post(self, pull: NixlPull, piece: Indexed | Plain) -> bool:
        """Post one piece; returns whether it was over when the call came back, as it is where a kernel copies."""
        began = perf_counter()
        try:
            post = self._kept.take(piece) or self._made(pull, piece)
        except BackendError as error:
            pull.fail(error)
            return False
        pull.posted.append((piece, post))
        made = perf_counter()
        over = self._look(pull, piece, post, self.agent.post)
        pull.timings.prep_s += made - began
        pull.timings.post_s += perf_counter() - made
        return over

    def _made(self, pull: NixlPull, piece: Indexed | Plain) -> Post:
        """A transfer of `piece`. Raises as the agent does."""
        peer = self.peer.worker_id
        if isinstance(piece, Indexed):
            own, theirs = pull.own.prepared[piece.own_memory], self._their_lists[piece.their_memory]
            return Post(self.agent.make_read(own, piece.own, theirs, piece.theirs, peer))
        own = self.agent.prepare("", piece.own, piece.own_memory, peer)
        theirs = self.agent.prepare(self._name, piece.theirs, piece.their_memory, peer)
        every = np.arange(len(piece.own), dtype=np.int32)
        return Post(self.agent.make_read(own, every, theirs, every, peer), (own, theirs))

    def _reap(self, pull: NixlPull) -> None:
        for piece, post in list(pull.posted):
            self._look(pull, piece, post, self.agent.state)

    def _look(self, pull: NixlPull, piece: Indexed | Plain, post: Post, ask: Callable[[Held, str], str]) -> bool:
        """Whether the post is done. One that failed stays posted: nixl does not say that it is over."""
        try:
            state = ask(post.transfer, self.peer.worker_id)
            if state not in ("DONE", "PROC"):
                raise BackendError(f"nixl says {state!r} of a transfer from {self.peer.worker_id}")
        except BackendError as error:
            self._is_dead = True
            pull.fail(error)
            return False
        if state == "PROC":
            return False
        pull.posted.remove((piece, post))
        if pull.is_kept and pull.own is self._own:
            self._kept.give(piece, post)
        else:
            post.release()
        return True
