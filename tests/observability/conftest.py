"""Owns the rigs that are watched: a bootstrap service, ranks over real sockets, and what is asked of them over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.link.rig import Site


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def site(stack: contextlib.ExitStack) -> Site:
    return Site(stack, resend_interval_s=0.1)
