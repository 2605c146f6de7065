"""Owns the servers and keepers that bootstrap tests run, and their end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdlink.address import Address
from pdlink.bootstrap import keeper
from pdlink.bootstrap.client import BootstrapClient
from pdlink.bootstrap.keeper import RegistrationKeeper
from pdlink.bootstrap.server import BootstrapServer
from pdlink.config import Settings

LOOPBACK = Address("127.0.0.1", 0)
PATIENT = Settings(resolve_timeout_s=60.0)
"""For clients whose service answers; a busy machine may take long over that."""


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: contextlib.ExitStack) -> Callable[..., BootstrapServer]:
    """Start a server; keyword arguments are `start`'s, and settings."""

    def start(address: Address = LOOPBACK, *, settings: Settings | None = None, **options: Any) -> BootstrapServer:
        return stack.enter_context(BootstrapServer.start(address, settings, **options))

    return start


@pytest.fixture
def client(stack: contextlib.ExitStack) -> Callable[..., BootstrapClient]:
    def make(*addresses: Address, **options: Any) -> BootstrapClient:
        options.setdefault("settings", PATIENT)
        return stack.enter_context(BootstrapClient(addresses, **options))

    return make


@pytest.fixture
def keep(stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RegistrationKeeper]:
    monkeypatch.setattr(keeper, "WITHDRAW_TIMEOUT_S", PATIENT.resolve_timeout_s)

    def make(registration: Any, *addresses: Address, **options: Any) -> RegistrationKeeper:
        return stack.enter_context(RegistrationKeeper(registration, addresses, **options))

    return make
