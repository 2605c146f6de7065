"""Owns what a bound socket's monitor tells of strangers: which connections ended before they had proved themselves.

libzmq names a reason for some, and for others only that the connection is over; each is counted here, once. No I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import zmq

WATCHED = (
    zmq.Event.ACCEPTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)
NO_CURVE = "no CURVE, or another rank's keys"
BROKE_OFF = "no handshake"
_REASONS = {zmq.Event.HANDSHAKE_FAILED_PROTOCOL: NO_CURVE, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: BROKE_OFF}


@dataclass(frozen=True, slots=True)
class Refused:
    """A connection that came to nothing."""

    peer: str
    reason: str


class Handshakes:
    """The connections of one bound socket, by what its monitor says in turn, from before it was bound.

    libzmq does not say which connection proved itself. So the numbers are right, and of connections that overlap one
    may be taken for another.
    """

    def __init__(self) -> None:
        self._num_proved = 0
        self._num_proved_open = 0
        self._failures: deque[str] = deque()
        """Reasons of connections whose end is still to come; a failure is told without its connection."""
        self._open: dict[int, tuple[str, int]] = {}
        """File descriptor -> the peer, and how many had proved themselves when it was accepted."""

    def see(self, event: int, value: int, peer: str = "") -> Refused | None:
        """Whom that shows to be refused, if anybody. A wrong key is the ZAP handler's to tell.

        `value` is the event's own: the descriptor of a connection that comes or goes; `peer` is who it is from.
        """
        if event == zmq.Event.ACCEPTED:
            self._open[value] = (peer, self._num_proved)
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._num_proved += 1
            self._num_proved_open += 1
        elif event == zmq.Event.DISCONNECTED:
            if value in self._open:
                return self._end(*self._open.pop(value))
        else:
            self._failures.append(_REASONS.get(zmq.Event(event), ""))
        return None

    def _end(self, peer: str, num_proved: int) -> Refused | None:
        if self._failures:
            reason = self._failures.popleft()
            return Refused(peer, reason) if reason else None
        # Nobody has proved himself since it came; or fewer than are there, and who leaves is more likely a stranger.
        if num_proved == self._num_proved or self._num_proved_open <= len(self._open):
            return Refused(peer, BROKE_OFF)
        self._num_proved_open -= 1
        return None
