"""Owns the answers that a puller waits for: which tickets it has asked its owner to stage, and what came. No I/O."""

from __future__ import annotations

import threading

from pdlink.control.frames import Staged


class StageInbox:
    """Answers by (transfer id, attempt, ticket). The control loop puts, the puller waits."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int, int], Staged | None] = {}
        self._came = threading.Condition()

    def expect(self, key: tuple[str, int], ticket: int) -> None:
        """From now on an answer to this ticket is taken. Call it before asking."""
        with self._came:
            self._answers[*key, ticket] = None

    def put(self, key: tuple[str, int], body: Staged) -> bool:
        """Keep the first answer to a ticket; False for one that nobody waits for or reads from (any more)."""
        with self._came:
            place = (*key, body.ticket)
            if place not in self._answers:
                return False
            if self._answers[place] is None:
                self._answers[place] = body
                self._came.notify_all()
            return True

    def take(self, key: tuple[str, int], ticket: int, timeout_s: float) -> Staged | None:
        """The answer, waiting for it up to `timeout_s`; it stays here until `forget`."""
        with self._came:
            self._came.wait_for(lambda: self._answers.get((*key, ticket)) is not None, timeout_s)
            return self._answers.get((*key, ticket))

    def forget(self, key: tuple[str, int], ticket: int) -> None:
        """Its slot is not read any more: an answer that comes now is none of ours."""
        with self._came:
            self._answers.pop((*key, ticket), None)
