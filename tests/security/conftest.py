"""Owns the certificates of a test run, and the servers that a test starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdlink.address import Address
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import load_settings
from pdlink.events import Event, Events
from tests.security.pki import Pki

LOOPBACK = Address("127.0.0.1", 0)
WAIT_S = 60.0


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki.make(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


class Told(list[Event]):
    """What servers of the test have emitted."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def append(self, event: Event) -> None:
        with self._changed:
            super().append(event)
            self._changed.notify_all()

    def wait(self, name: str, **fields: object) -> None:
        """Until an event of that name with these fields has come."""

        def is_there() -> bool:
            return any(one.name == name and fields.items() <= one.fields.items() for one in self)

        with self._changed:
            assert self._changed.wait_for(is_there, WAIT_S), self


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def serve(stack: contextlib.ExitStack, told: Told) -> Callable[..., BootstrapServer]:
    """Start a server with these settings."""

    def start(address: Address = LOOPBACK, **settings: Any) -> BootstrapServer:
        events = Events()
        events.subscribe(told.append)
        return stack.enter_context(BootstrapServer.start(address, load_settings({}, **settings), events=events))

    return start
