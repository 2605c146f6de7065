"""Owns the transfers of one nixl link as they are posted, and those that are kept to be posted again. It makes none.

What is made of addresses takes nixl longer to prepare than to post: two lists and a transfer for every range. Ranges
from slot to slot are much the same in each request, and a transfer that is over may be posted once more.
"""

from __future__ import annotations

from contextlib import suppress

from pdlink.backends.nixl_engine import Held
from pdlink.backends.nixl_pieces import Indexed, Plain

MAX_IDLE = 64
"""Four slots on either side, in as many lengths."""


class Post:
    """One transfer and the lists that only it uses."""

    def __init__(self, transfer: Held, lists: tuple[Held, ...] = ()) -> None:
        self.transfer = transfer
        self.lists = lists

    def release(self) -> None:
        for one in (self.transfer, *self.lists):
            one.release()


class KeptPosts:
    """Transfers that are over, by the piece that each was made of. The caller serialises calls.

    Pieces are their own keys, compared by identity. Those of prepared lists are not kept: they are as cheap to make.
    """

    def __init__(self) -> None:
        self._idle: dict[Plain, list[Post]] = {}
        """The piece whose last transfer ended longest ago comes first."""
        self._num_idle = 0

    def __len__(self) -> int:
        return self._num_idle

    def take(self, piece: Indexed | Plain) -> Post | None:
        """One that was made of `piece` and is under way nowhere. It is the caller's until `give`."""
        if not isinstance(piece, Plain) or piece not in self._idle:
            return None
        posts = self._idle[piece]
        post = posts.pop()
        self._num_idle -= 1
        if not posts:
            del self._idle[piece]
        return post

    def give(self, piece: Indexed | Plain, post: Post) -> None:
        """Keep a transfer that is over, or release it where it would not be asked for."""
        if not isinstance(piece, Plain):
            post.release()
            return
        self._idle[piece] = [*self._idle.pop(piece, ()), post]
        self._num_idle += 1
        if self._num_idle > MAX_IDLE:
            oldest = self.take(next(iter(self._idle)))
            assert oldest is not None
            oldest.release()

    def release(self) -> None:
        """Let go of all, as is due before memory that they read or write is taken back. What nixl will not release
        goes with its agent."""
        idle, self._idle, self._num_idle = self._idle, {}, 0
        for posts in idle.values():
            for post in posts:
                with suppress(Exception):
                    post.release()
