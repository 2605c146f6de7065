"""Owns what one staged pull says to its owner about the owner's slots: which pieces it asks for, and which slots it has
read. Frames go together where they can; what is asked for, and when, the pull decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from pdlink.control.frames import Credit, Stage, Staged
from pdlink.decode.stage_inbox import Send, StageInbox

YIELD_S = 50e-6
"""A real pause after frames were handed over. The I/O thread gets the interpreter only while this one sleeps; else they
would lie there until this thread has nothing else to do, and the owner would have nothing to pack."""
OWE_S = 5e-3
"""How long a slot of the owner that is read, and that no piece of this pull needs, waits for others to go with it."""


class OwnerSlots:
    """The owner's slots as one pull of the attempt `key` uses them. By the thread that pulls."""

    def __init__(self, inbox: StageInbox, key: tuple[str, int], tickets: Iterator[int], send: Send) -> None:
        self._inbox = inbox
        self._key = key
        self._tickets = tickets
        self._send = send
        self._stages: list[Stage] = []
        """To be sent."""
        self._read: list[Staged] = []
        """To be given back."""
        self._read_at = 0.0

    def new_ticket(self) -> int:
        """The next ticket; an answer to it is expected from now on."""
        ticket = next(self._tickets)
        self._inbox.expect(self._key, ticket)
        return ticket

    def ask(self, body: Stage) -> None:
        """Ask with the next `say`."""
        self._stages.append(body)

    def ask_again(self, body: Stage) -> None:
        """Repeat a question that may be lost."""
        self._send(body)

    def answer(self, ticket: int) -> Staged | None:
        return self._inbox.look(self._key, ticket)

    def wait(self, tickets: Iterable[int], timeout_s: float) -> bool:
        """Wait up to `timeout_s` for an answer to any of these; whether there is one."""
        return self._inbox.wait(self._key, list(tickets), timeout_s)

    def has_read(self, ticket: int) -> None:
        """The slot of this ticket is read. It goes back with what is said next."""
        if answer := self._inbox.forget(self._key, ticket):
            self._read_at = self._read_at if self._read else time.monotonic()
            self._read.append(answer)

    def give_back(self, tickets: Iterable[int]) -> None:
        """Nothing reads the slots of these (any more). Answers that come later go back as they come."""
        self._inbox.give_back(self._key, tickets, self._send)

    def say(self, are_needed: bool) -> bool:
        """Send what is to be sent; whether there was anything. `are_needed`: pieces to come need slots of the owner.

        It costs this thread the interpreter for a while. Slots that no piece to come needs go back with the last one,
        or after a while.
        """
        is_time = self._read and (are_needed or time.monotonic() > self._read_at + OWE_S)
        if not (self._stages or is_time):
            return False
        credit = self.owed()
        self._send(*((credit,) if credit else ()), *self._stages)
        self._stages.clear()
        time.sleep(YIELD_S)
        return True

    def let_go(self, tickets: Iterable[int]) -> None:
        """Ask for nothing more, and give back what is read, and the slots of `tickets`."""
        self._stages.clear()
        if credit := self.owed():
            self._send(credit)
        self.give_back(tickets)

    def owed(self) -> Credit | None:
        """What gives back the slots that are read, to be sent by the caller: they count as given back."""
        read, self._read = self._read, []
        return Credit(tuple(one.slot for one in read), tuple(one.stamp for one in read)) if read else None
