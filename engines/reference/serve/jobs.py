"""Owns the passage of requests from the HTTP thread of a server to its engine's thread, and of answers back.

It bounds how many are there at once. What a request asks for and what becomes of it is not its concern.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

from pdlink.errors import LimitReached


class Job:
    """One request. The engine's thread answers; the HTTP thread takes the answers, or leaves."""

    def __init__(self, transfer_id: str, tokens: tuple[int, ...], **fields: Any) -> None:
        """Made on the HTTP thread, in its running event loop."""
        self.transfer_id = transfer_id
        self.tokens = tokens
        self.fields = fields
        self.has_left = False
        """Whether the caller has: nobody reads the answers any more."""
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def answer(self, event: str, **fields: Any) -> None:
        """Say something to the caller. Any thread."""
        said = {"event": event, **fields}
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answers.put_nowait, said)

    def fail(self, text: str, *, is_callers: bool = False) -> None:
        """Say that it came to nothing; `is_callers`: the same request will never do, so that it is not retried."""
        self.answer("error", text=text, retry=not is_callers)

    async def next_answer(self) -> dict[str, Any]:
        return await self._answers.get()


class Inbox:
    """Jobs that the engine has not taken yet. Thread-safe."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_live = 0

    @property
    def num_live(self) -> int:
        """Jobs that were put and are not `done`."""
        return self._num_live

    def put(self, job: Job) -> None:
        """Raises `LimitReached` with what to do."""
        with self._lock:
            if self._num_live >= self._max_jobs:
                raise LimitReached(f"{self._num_live} requests are here, which is the most; send it again later")
            self._num_live += 1
        self._jobs.put(job)

    def done(self) -> None:
        """One that was put is over."""
        with self._lock:
            self._num_live -= 1

    def take(self, timeout_s: float) -> list[Job]:
        """What there is, after a wait of up to `timeout_s` for the first."""
        found: list[Job] = []
        try:
            found.append(self._jobs.get(timeout=timeout_s) if timeout_s > 0 else self._jobs.get_nowait())
            while True:
                found.append(self._jobs.get_nowait())
        except queue.Empty:
            return found
