"""Owns the answers that a puller waits for: which tickets it has asked its owner to stage, and what came."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Protocol

from pdlink.control.frames import Body, Credit, Staged


class Send(Protocol):
    """Sends frames about one request to its owner, together."""

    def __call__(self, *bodies: Body) -> None: ...


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

    def look(self, key: tuple[str, int], ticket: int) -> Staged | None:
        """The answer if it has come; it stays here until `forget`. Takes no lock: one look at a dict needs none."""
        return self._answers.get((*key, ticket))

    def wait(self, key: tuple[str, int], tickets: Collection[int], timeout_s: float) -> bool:
        """Wait up to `timeout_s` for an answer to any of these; whether there is one."""
        places = [(*key, ticket) for ticket in tickets]
        with self._came:
            return self._came.wait_for(lambda: any(self._answers.get(one) for one in places), timeout_s)

    def forget(self, key: tuple[str, int], ticket: int) -> Staged | None:
        """Its slot is not read any more: an answer that comes now is none of ours. Returns the one that was here."""
        with self._came:
            return self._answers.pop((*key, ticket), None)

    def give_back(self, key: tuple[str, int], tickets: Iterable[int], send: Send) -> None:
        """Forget tickets, and give back the slots of those that were answered."""
        found = [answer for ticket in tickets if (answer := self.forget(key, ticket))]
        if found:
            send(Credit(tuple(one.slot for one in found), tuple(one.stamp for one in found)))
