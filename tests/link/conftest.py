"""Owns the end of what a link test starts."""

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
    """A site with short waits, so that a failure is seen inside a test's deadline."""
    return Site(stack, confirm_timeout_s=30.0, resend_interval_s=0.1)
