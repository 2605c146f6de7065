"""Owns a man in the middle of one rank's control socket: it sees every frame, and a test says what becomes of each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

from pdlink.address import Address
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.control.frames import Frame
from pdlink.control.loop import Channel, ControlLoop
from tests.link.rig import DEADLINE_S, LOOPBACK, Owner, Site

Rule = Callable[[Frame], Iterable[Frame]]


def passes(frame: Frame) -> Iterable[Frame]:
    return (frame,)


class Proxy:
    """Forwards between decode and one prefill rank. `to_prefill` and `to_decode` turn a frame into those to send."""

    def __init__(self, stack: contextlib.ExitStack, target: Address) -> None:
        self.to_prefill: Rule = passes
        self.to_decode: Rule = passes
        self.seen: list[tuple[str, Frame]] = []
        self._target = target
        self._loop = ControlLoop().start()
        stack.callback(self._loop.close)
        self._channels: dict[bytes, Channel] = {}
        self._server = self._loop.bind(LOOPBACK, self._from_decode)

    @property
    def address(self) -> Address:
        return self._server.address

    def count(self, kind: type) -> int:
        return sum(isinstance(frame.body, kind) for _, frame in self.seen)

    def _from_decode(self, route: bytes, frame: Frame) -> None:
        if route not in self._channels:
            self._channels[route] = self._loop.connect(self._target, lambda answer: self._from_prefill(route, answer))
        self.seen.append(("prefill", frame))
        for one in self.to_prefill(frame):
            self._channels[route].send(one)

    def _from_prefill(self, route: bytes, frame: Frame) -> None:
        self.seen.append(("decode", frame))
        for one in self.to_decode(frame):
            self._server.send(route, one)


def put_between(site: Site, stack: contextlib.ExitStack, owners: list[Owner]) -> list[Proxy]:
    """Register `owners`, which have not registered themselves, at the addresses of proxies."""
    proxies = []
    for owner in owners:
        proxy = Proxy(stack, owner.worker.control_endpoint)
        said = owner.worker.registration()
        said = dataclasses.replace(said, rank=dataclasses.replace(said.rank, control_endpoint=proxy.address))
        keeper = RegistrationKeeper(said, [site.bootstrap.address]).start()
        stack.callback(keeper.close)
        keeper.wait_registered(DEADLINE_S)
        proxies.append(proxy)
    return proxies
