"""Owns how the ranks of one prefill instance find each other, again whenever one was away. It computes nothing.

Rank 0 leads. Each other rank says every `SAY_EVERY_S` that it is there, by a name that is new with each process. Once
all of them are, the leader names a torch store of its own to meet at, and they form a group there. A rank that comes
under another name while the group stands has been restarted: the leader gives the group up, and so, by the broken
connections, does every other rank.

Messages are JSON and go over plain zmq sockets: ranks share one trusted network, as torch's own collectives demand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
import zmq

from pdlink.address import Address
from pdlink.errors import DeadlineExceeded, PeerGone

log = logging.getLogger("pdlink_engines.serve")

SAY_EVERY_S = 0.2
FRESH_S = 1.5
"""A rank that has not said it is there for so long is not."""
MAX_MESSAGE_BYTES = 4096


@dataclass(slots=True)
class _Member:
    name: str
    route: bytes
    heard_at: float


@dataclass(slots=True)
class Gathering:
    """The leader's decision: who is there, under which name, and since when. Pure."""

    size: int
    members: dict[int, _Member] = field(default_factory=dict)

    def hear(self, rank: int, name: str, route: bytes, now: float) -> None:
        if 0 < rank < self.size:
            self.members[rank] = _Member(name, route, now)

    def missing(self, now: float) -> list[int]:
        """The ranks that are not there, the leader aside."""
        return [one for one in range(1, self.size) if not self._is_fresh(one, now)]

    def names(self) -> dict[str, str]:
        return {str(rank): one.name for rank, one in sorted(self.members.items())}

    def _is_fresh(self, rank: int, now: float) -> bool:
        member = self.members.get(rank)
        return member is not None and now - member.heard_at < FRESH_S


class Leader:
    """Rank 0's end. One thread. `close` twice is fine."""

    def __init__(self, address: Address, size: int) -> None:
        self._address = address
        self._size = size
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
        self._socket.bind(f"tcp://{address}")
        self._gathering = Gathering(size)
        self._agreed: dict[str, str] | None = None

    def meet(self, timeout_s: float, is_over: Callable[[], bool]) -> bool:
        """Form torch's default group of all ranks; False when `is_over` said yes first.

        Raises what torch does when a rank went away meanwhile.
        """
        told_at = time.monotonic()
        while missing := self._gathering.missing(time.monotonic()):
            if is_over():
                return False
            if time.monotonic() - told_at > timeout_s:
                told_at = time.monotonic()
                log.warning("prefill ranks %s have not come to %s yet", missing, self._address)
            self._listen(SAY_EVERY_S)
        listener = socket.create_server((self._address.host, 0), family=_family(self._address))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            self._address.host,
            port,
            self._size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._agreed = self._gathering.names()
        told = json.dumps({"port": port, "names": self._agreed}).encode()
        for member in self._gathering.members.values():
            self._socket.send_multipart([member.route, told])
        dist.init_process_group("gloo", store=store, rank=0, world_size=self._size, timeout=timeout)
        return True

    def check(self) -> None:
        """Raises `PeerGone` when a rank of the group has come anew. Never blocks."""
        self._listen(0)
        for rank, name in self._gathering.names().items():
            if self._agreed is not None and self._agreed.get(rank) != name:
                raise PeerGone(f"prefill rank {rank} was restarted: the group is formed anew")

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _listen(self, timeout_s: float) -> None:
        wait_s = timeout_s
        while self._socket.poll(wait_s * 1e3):
            route, *rest = self._socket.recv_multipart()
            # Whatever else reaches this port is nobody's turn.
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                said = json.loads(rest[0])
                self._gathering.hear(int(said["rank"]), str(said["name"]), route, time.monotonic())
            wait_s = 0


def follow(leader: Address, rank: int, size: int, timeout_s: float, is_over: Callable[[], bool]) -> bool:
    """Another rank's end of `Leader.meet`; False when `is_over` said yes first.

    Raises `DeadlineExceeded` when the leader does not answer within ten times `timeout_s`: the next try dials it anew.
    """
    name = secrets.token_hex(8)
    told = json.dumps({"rank": rank, "name": name}).encode()
    give_up = time.monotonic() + 10 * timeout_s
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.setsockopt(zmq.IPV6, int(leader.is_ipv6))
        # A leader that was cut off leaves a connection that looks alive.
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        dealer.connect(f"tcp://{leader}")
        while not is_over():
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"the leader of the prefill ranks at {leader} did not answer rank {rank}")
            with contextlib.suppress(zmq.Again):
                dealer.send(told, zmq.NOBLOCK)
            if not dealer.poll(SAY_EVERY_S * 1e3):
                continue
            answer = json.loads(dealer.recv())
            if answer["names"].get(str(rank)) == name:
                timeout = timedelta(seconds=timeout_s)
                store = dist.TCPStore(leader.host, int(answer["port"]), size, is_master=False, timeout=timeout)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
                return True
    return False


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
